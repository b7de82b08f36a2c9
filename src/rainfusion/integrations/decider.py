"""Sparse or dense: decides for every attention call of a model, and keeps the tally. No host is inside.

A host (diffusers, ComfyUI, a serving engine) tells a `Decider` five things, and gets a tensor back:

    decider = Decider(Settings.check(), layers=["blocks.0.attn", "blocks.1.attn"])
    decider.begin(Scene(((21, 45, 80),)), step=3, steps=50)          # once a forward: the scene and the step
    out = decider.attend(0, q, k, v, key_mask, dense=lambda: ...)    # once a call: layer, tensors, the dense way
    print(decider.stats())

What cannot be sparse is answered by the host's own dense attention, and counted with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rainfusion import ops, planning
from rainfusion.calls import Call, Inputs
from rainfusion.integrations.scenes import NoGrid, Placed, Scene
from rainfusion.integrations.settings import Settings, Stage, check_layers
from rainfusion.integrations.stats import Stats, Tally
from rainfusion.planning import Plan

_MOST_WAYS = 4096  # that are kept; then they are found again
_log = logging.getLogger("rainfusion")

# sees a call that could be sparse before dense attention answers it: layer, tensors, how it would be run
Observer = Callable[[str, Inputs, Plan], None]


class Kind(Enum):
    """What a reason for dense attention means to the user."""

    ASKED = "the user wants it"  # nothing to warn of
    EXPECTED = "it is faster, or the sequence is short"
    UNSUPPORTED = "sparse attention cannot do it"  # an error, with on_unsupported="error"


class Dense(Exception):
    """Why a call is answered by dense attention."""

    def __init__(self, reason: str, kind: Kind) -> None:
        super().__init__(reason)
        self.reason, self.kind = reason, kind

    def again(self) -> Dense:
        """The same reason, to be kept or raised: one that was raised holds on to the frames it came through."""
        return Dense(self.reason, self.kind)

    @classmethod
    def asked(cls, reason: str) -> Dense:
        return cls(reason, Kind.ASKED)

    @classmethod
    def expected(cls, reason: str) -> Dense:
        return cls(reason, Kind.EXPECTED)

    @classmethod
    def unsupported(cls, reason: str) -> Dense:
        return cls(reason, Kind.UNSUPPORTED)


class Way(NamedTuple):
    """How a sparse call of one shape is run."""

    call: Call
    plan: Plan
    placed: Placed
    words: str  # `placed`, for the tally


class _Forward(NamedTuple):
    """What holds for all calls of a forward."""

    scene: Scene | Dense
    why_dense: Dense | None  # whatever the scene is: the user wants this step dense, say
    stage: Stage | None = None  # where in the run, with a schedule
    step: int | None = None


_NOT_BEGUN = _Forward(Dense.unsupported("the transformer's forward has not run"), None)


class Decider:
    """One model's settings, plans, reasons and tally.

    Args:
        settings: what the user asked for.
        layers: the names of the self-attention layers; calls give the number of one.
        prefix: the model's name, where a program runs several with one profile or one table of counts.
        model: what the model is called in messages.
        observer: sees every call that could be sparse, which is then dense: for measuring.
        tally: of this model so far, where several deciders count in one. None: a new one.
        warned: reasons that the log has already named, where several deciders share that. None: no reason yet.
        say: what to do with a warning. None: it goes to the log.
    """

    def __init__(
        self,
        settings: Settings,
        layers: Sequence[str],
        prefix: str = "",
        *,
        model: str = "the model",
        observer: Observer | None = None,
        tally: Tally | None = None,
        warned: set[str] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.settings, self.layers, self.prefix = settings, tuple(layers), prefix
        self.model, self.observer = model, observer
        self._skipped = check_layers(settings.skip_layers, len(self.layers), model)
        if settings.profile is not None:
            for layer in sorted(set(range(len(self.layers))) - self._skipped):
                settings.profile.of(self.full_name(layer))
        self.tally = Tally(len(self.layers)) if tally is None else tally
        self._warned: set[str] = set() if warned is None else warned
        self._say = _log.warning if say is None else say
        self._forward = _NOT_BEGUN
        self._ways: dict[Any, Way | Dense] = {}
        self._known: dict[Any, Way | Dense] = {}  # the same by tensors that are not checked yet, without a key mask
        self._entered: set[int] = set()
        self._reached: set[int] = set()

    def twin(self) -> Decider:
        """One for a copy of the model: the same settings, and counts of its own."""
        return Decider(self.settings, self.layers, self.prefix, model=self.model, observer=self.observer)

    def full_name(self, layer: int) -> str:
        """A layer's name with that of the model, where there are several."""
        return f"{self.prefix}.{self.layers[layer]}" if self.prefix else self.layers[layer]

    # -----------------------------------------------------------------------------------------------------------------
    # a forward

    @property
    def needs_step(self) -> bool:
        """Whether `begin` has to know the step: finding it out may take a host time."""
        return self.settings.asks_for_steps

    def begin(
        self,
        scene: Scene | NoGrid,
        *,
        step: int | None = None,
        steps: int | None = None,
        made: int | None = None,
        dense: Dense | None = None,
        training: bool = False,
    ) -> None:
        """At the start of a forward.

        Args:
            scene: where the picture lies, or why that is not known.
            step: the number of the denoising step, from 0; read only if `needs_step`.
            steps: how many there are, if the host knows.
            made: how many steps the run has, where `step` and `steps` count in finer ones.
            dense: why the whole forward is dense, where the host has a schedule of its own.
            training: the model is being trained: recomputed blocks must give the same as the first time.
        """
        found: Scene | Dense
        if training:
            found = Dense.unsupported(
                "the model is in training mode, and sparse attention is for inference: model.eval()"
            )
        else:
            found = Dense.unsupported(f"no grid: {scene}") if isinstance(scene, NoGrid) else scene
        why = self._why_step_is_dense(step, steps) if dense is None else dense.again()
        stage = self.settings.stage(step, steps, made)
        schedule = self.settings.schedule
        if why is None and stage is None and not (schedule.is_constant or schedule.is_auto):
            why = Dense.unsupported("how many steps there are is not known, and schedule depends on it")
        self._forward = _Forward(found, why, stage, step)
        self._entered.clear()
        self._reached.clear()

    def enter(self, layer: int) -> None:
        """The layer's attention is about to be called: `end` expects a call of `attend`."""
        self._entered.add(layer)

    def end(self, why: Callable[[int], str]) -> None:
        """At the end of a forward: layers that were entered, and whose calls did not arrive, were dense.

        Args:
            why: the reason for one of them, by its number.
        """
        missing, self._entered = sorted(self._entered - self._reached), set()
        for layer in missing:
            self.count_dense(layer, self._why_layer(layer) or Dense.unsupported(why(layer)))

    def _why_step_is_dense(self, step: int | None, steps: int | None) -> Dense | None:
        if not self.needs_step:
            return None
        if step is None:
            reason = "which step it is is not known, and start_step, end_step or schedule depends on it"
            return Dense.unsupported(reason) if self.settings.needs_steps else None
        covered = self.settings.why_step_is_dense(step, steps)
        return None if covered is None else Dense.asked(covered)

    def _why_layer(self, layer: int) -> Dense | None:
        if layer in self._skipped:
            return Dense.asked("the layer is in skip_layers")
        return None if self._forward.why_dense is None else self._forward.why_dense.again()

    # -----------------------------------------------------------------------------------------------------------------
    # a call

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Any,
        dense: Callable[[], Tensor],
        *,
        scale: float | None = None,
        special: str | None = None,
        pairs_are_keys: bool = False,
    ) -> Tensor:
        """One attention call, sparse or dense.

        Args:
            layer: its number in `layers`.
            q: the queries, [B, N, S, D].
            k: the keys, [B, N, S, D], of as many heads as q or fewer.
            v: the values, of k's shape.
            key_mask: None, or a mask that says which keys take part, in any form that broadcasts to [B, 1, 1, S].
            dense: what the model would have called, without arguments.
            scale: of the logits. None: D ** -0.5.
            special: what else is asked for that sparse attention cannot do, in words.
            pairs_are_keys: the model writes a key mask as [B, 1, S, S], valid queries times valid keys.

        Returns:
            [B, N, S, D].
        """

        def sparse() -> Tensor:
            return self.attempt(layer, q, k, v, key_mask, scale=scale, special=special, pairs_are_keys=pairs_are_keys)

        return self.answer(layer, sparse, dense)

    def answer(self, layer: int, sparse: Callable[[], Tensor], dense: Callable[[], Tensor]) -> Tensor:
        """A call that the host makes sparse in its own way: `sparse` counts itself, or raises the reason why not."""
        self._reached.add(layer)
        try:
            return sparse()
        except Dense as why:
            self.count_dense(layer, why)
        return dense()

    def scene_for(self, layer: int, special: str | None = None) -> Scene:
        """The scene of this forward, or the reason why this layer is dense whatever its tensors are."""
        asked = self._why_layer(layer)
        if asked is not None:
            raise asked
        if special is not None:
            raise Dense.unsupported(special)
        if isinstance(self._forward.scene, Dense):
            raise self._forward.scene.again()
        return self._forward.scene

    def attempt(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Any,
        *,
        scale: float | None = None,
        special: str | None = None,
        pairs_are_keys: bool = False,
    ) -> Tensor:
        """The sparse half of `attend`, for `answer`: the result, or the reason why it is dense, raised."""
        scene = self.scene_for(layer, special)
        key = self._key(layer, scene, q, k, v, scale) if key_mask is None and is_plain(q, k, v) else None
        way = None if key is None else self._known.get(key)
        if way is None:
            inputs = checked(q, k, v, plain_key_mask(key_mask, q, k, pairs_are_keys))
            way = self._way_or_reason(layer, scene, inputs, scale)
            if key is not None:
                _keep(self._known, key, way)
        else:
            inputs = Inputs(q, k, v)
        if isinstance(way, Dense):
            raise way.again()
        if self.observer is not None:
            self.observer(self.full_name(layer), inputs, way.plan)
            raise Dense.asked("the call is observed")
        out = run(self.tally, layer, inputs, way, None if self._forward.stage is None else self._forward.step)
        if pairs_are_keys and inputs.keep is not None:
            out = out.masked_fill(~inputs.keep[:, None, :, None], 0.0)  # a padding query sees no key
        return out

    def _key(self, layer: int, scene: Scene, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Any:
        """All that the checks of plain tensors ask, and all that a way depends on."""
        return (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            scene, scale, type(scale), self._forward.stage, layer if self.settings.profile is not None else None,
        )  # fmt: skip

    def way(self, layer: int, scene: Scene, inputs: Inputs, scale: float | None) -> Way:
        """How to run a call of this shape: found once, then known. Raises the reason if it is dense."""
        found = self._way_or_reason(layer, scene, inputs, scale)
        if isinstance(found, Dense):
            raise found.again()
        return found

    def _way_or_reason(self, layer: int, scene: Scene, inputs: Inputs, scale: float | None) -> Way | Dense:
        profiled = layer if self.settings.profile is not None else None
        key = (inputs.shapes, scene, scale, type(scale), profiled, self._forward.stage)  # True is no scale, 1.0 is one
        found = self._ways.get(key)
        if found is None:
            try:
                found = self._find_way(layer, scene, inputs, scale)
            except Dense as why:
                found = why.again()
            _keep(self._ways, key, found)
        return found

    def _find_way(self, layer: int, scene: Scene, inputs: Inputs, scale: float | None) -> Way:
        settings, heads = self.settings, inputs.q.shape[1]
        placed = place(scene, inputs)
        if inputs.q.shape[2] < settings.fewest_tokens:
            raise Dense.expected(f"fewer than {settings.fewest_tokens} tokens (min_tokens)")
        name = self.full_name(layer)
        method = settings.method_for(name, placed.frames, self._forward.stage)
        if settings.profile is not None and len(method.sparsities) != heads:
            raise ValueError(f"the profile has {len(method.sparsities)} heads for {name}, which has {heads}")
        try:
            call = planning.ask(
                inputs,
                method,
                placed.geometry,
                scale=scale,
                backend=settings.backend,
                may_be_dense=settings.min_tokens is None,
            )
            if call.keeps_everything:
                raise Dense.asked("sparsity is 0")
            plan = planning.plan(call, inputs.shapes)
            if plan.kept_blocks is None:  # they are counted in the mask
                call = call._replace(return_mask=True)
                plan = planning.plan(call, inputs.shapes)
        except (ValueError, TypeError) as error:
            raise Dense.unsupported(str(error)) from error
        if plan.dense_because is not None:
            raise Dense.expected("dense attention is expected to be faster (set min_tokens to decide yourself)")
        return Way(call, plan, placed, str(placed))

    def count_dense(self, layer: int, why: Dense) -> None:
        """One dense call: counted, said once in the log, or an error where the user wants that."""
        if why.kind is Kind.UNSUPPORTED and self.settings.on_unsupported == "error":
            raise ValueError(f"attention of {self.layers[layer]} cannot be sparse: {why.reason}") from why
        if why.kind is not Kind.ASKED and why.reason not in self._warned:
            self._warned.add(why.reason)
            self._say(f"dense attention in {self.layers[layer]}: {why.reason}")
        self.tally.dense(layer, why.reason)

    # -----------------------------------------------------------------------------------------------------------------
    # counts

    def stats(self) -> Stats:
        """What was counted. Waits for the device."""
        return Stats.of({self.prefix: (self.layers, self.tally)})

    def reset(self) -> None:
        """Counts begin again."""
        self.tally = Tally(len(self.layers))


def _keep(table: dict[Any, Way | Dense], key: Any, found: Way | Dense) -> None:
    if len(table) >= _MOST_WAYS:
        table.clear()
    table[key] = found


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all that `checked` asks is their shapes, types and devices: no gradients, and no special tensors."""
    if not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor) or forward_ad._current_level >= 0:
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    if q.is_nested or k.is_nested or v.is_nested or q.is_neg() or k.is_neg() or v.is_neg():
        return False
    return q.layout is k.layout is v.layout is torch.strided


def checked(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Inputs:
    """[B, N, S, D], as `sparse_attention` would take them; else the reason why it would not."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise Dense.unsupported("gradients are wanted, and sparse attention has none")
    try:
        return planning.check(q, k, v, key_mask, input_layout="BNSD")
    except (ValueError, TypeError) as error:
        raise Dense.unsupported(str(error)) from error


def place(scene: Scene, inputs: Inputs) -> Placed:
    """Where the clips lie in the sequence of this call."""
    q_len, k_len = inputs.q.shape[2], inputs.k.shape[2]
    if q_len != k_len:
        raise Dense.unsupported("q and k have different lengths: not self-attention")
    placed = scene.place(q_len)
    if placed is None:
        raise Dense.unsupported(f"{q_len} tokens do not hold a grid of {scene} where this model has it")
    return placed


def run(tally: Tally, layer: int, inputs: Inputs, way: Way, step: int | None = None) -> Tensor:
    """A sparse call, counted; with a step, for that step, too."""
    out, _, mask = ops.attend(inputs, way.call, way.plan)
    kept = way.plan.kept_blocks if mask is None else mask.counts
    assert kept is not None
    tally.sparse(layer, way.words, kept, way.plan.blocks, step)
    return out


def plain_key_mask(attn_mask: Any, q: Tensor, k: Tensor, pairs_are_keys: bool = False) -> Tensor | None:
    """The key mask [B, S] in a mask of any form that says no more than that; else the reason why not.

    `pairs_are_keys`: the model writes a key mask as [B, 1, S, S], valid queries times valid keys, first query valid.
    """
    if attn_mask is None or q.dim() != 4 or k.dim() != 4:
        return None  # the check of the tensors says what is wrong
    if not isinstance(attn_mask, Tensor):  # a BlockMask of FlexAttention
        raise Dense.unsupported(f"the model gave a {type(attn_mask).__name__} of its own as a mask")
    batch, k_len = q.shape[0], k.shape[2]
    mask, shape = attn_mask, list(attn_mask.shape)
    if mask.dim() == 4 and shape[1] == 1 and (shape[2] == 1 or pairs_are_keys):
        mask = mask[:, 0, 0]
    elif mask.dim() == 3 and shape[1] == 1:
        mask = mask[:, 0]
    if mask.dim() == 2 and mask.shape[1] != k_len:  # of a sequence that others share out, say
        raise Dense.unsupported(f"the model gave a mask for {mask.shape[1]} keys, and the call has {k_len}")
    if mask.dim() != 2 or mask.shape[0] not in (1, batch):
        raise Dense.unsupported("the model gave a mask for pairs of tokens, not for keys")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        mask = mask.bool()
    return mask.expand(batch, k_len)
