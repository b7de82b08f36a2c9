"""One transformer with sparse attention: reads each forward's grid and step, and answers its attention calls.

A hook on the transformer finds the scene; a hook on every self-attention module says which layer is at work. The call
itself arrives through a backend of diffusers that only these modules have (`hub`), or, where a model calls torch's
attention directly, through a scope around the module's forward. Everything can be taken off again.
"""

from __future__ import annotations

import copy
import fnmatch
import inspect
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rainfusion import checks
from rainfusion.integrations import decider as calls
from rainfusion.integrations.diffusers import private_names as hub
from rainfusion.integrations.diffusers import shards
from rainfusion.integrations.diffusers.grids import NoGrid, Scene
from rainfusion.integrations.diffusers.models import Model
from rainfusion.integrations.diffusers.scope import Scope
from rainfusion.integrations.diffusers.steps import Steps
from rainfusion.integrations.settings import Settings, check_layers
from rainfusion.integrations.stats import Tally

ATTRIBUTE = "_rainfusion"  # on the transformer: its controller
LAYER = "_rainfusion_layer"  # on a self-attention module: its controller's number and its own, see `_At`

_TIMESTEPS = ("timestep", "timesteps", "t")  # what forwards call it
_NUMBERS = itertools.count()
_CONTROLLERS: weakref.WeakValueDictionary[int, Controller] = weakref.WeakValueDictionary()
_log = logging.getLogger("rainfusion")

# sees a call before dense attention answers it: layer, q, k, v [B, N, S, D], key mask, how it would be run
Observer = Callable[[str, Tensor, Tensor, Tensor, "Tensor | None", calls.Plan], None]


class _At(threading.local):
    """Where a thread is: (controller's number, layer) of the self-attention module at work, as a tensor."""

    layer: Tensor | None = None


_AT = _At()
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # so that compiled code stays valid


def _enter(module: nn.Module, args: Any) -> None:
    """A hook of every self-attention module. Compilers see a tensor move, the same way in all layers."""
    _AT.layer = getattr(module, LAYER)


class _Taken(NamedTuple):
    """A processor that was made ours, and what to put back."""

    processor: Any
    original: Any  # another one, if it was shared with modules that are not ours
    backend: Any  # what it had, or _NOTHING


_NOTHING = object()


class Controller:
    def __init__(
        self,
        model: nn.Module,
        row: Model,
        settings: Settings,
        steps: Steps,
        prefix: str = "",
        observer: Observer | None = None,
    ) -> None:
        self.row, self.settings, self.steps = row, settings, steps
        self.prefix, self.observer = prefix, observer
        self.names = layer_names(model, row)
        if not self.names:
            raise ValueError(
                f"{type(model).__name__} has no modules that match {', '.join(row.attention)}: it is not the model "
                "that this row was written for; rainfusion.register_model can give it another one"
            )
        check_layers(settings.skip_layers, len(self.names), type(model).__name__)
        if settings.profile is not None:
            for layer in set(range(len(self.names))) - settings.skip_layers:
                settings.profile.of(self.full_name(layer))
        self.tally = Tally(len(self.names))
        self._start(model)

    def _start(self, model: nn.Module) -> None:
        """What belongs to this object alone, also where it is a copy."""
        self._model = weakref.ref(model)
        self._signature = inspect.signature(type(model).forward)
        self._scene: Scene | str = "the transformer's forward has not run"
        self._why_now: str | None = None
        self._plans: dict[Any, calls.Plan | str] = {}
        self._warned: set[str] = set()
        if model not in _OF_MODELS:
            _OF_MODELS[model] = next(_NUMBERS)
        self._number = _OF_MODELS[model]
        self._taken: dict[int, _Taken] = {}
        self._scopes: list[Scope] = []
        self._found: list[nn.Module] | None = None
        self.entered: set[int] = set()  # layers of this forward whose module was called, and those that reached us
        self._reached: set[int] = set()
        self.backend = hub.backend(_attention)
        self.attached = False

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    def full_name(self, layer: int) -> str:
        """With that of the transformer, where the pipeline has several."""
        return f"{self.prefix}.{self.names[layer]}" if self.prefix else self.names[layer]

    # -----------------------------------------------------------------------------------------------------------------
    # on and off

    def attach(self) -> None:
        model = self.model
        assert model is not None
        setattr(model, ATTRIBUTE, self)
        self._label_layers(model)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._after_forward, always_call=True)
        self._hook_layers(model)
        self._take_processors(model)

    def _label_layers(self, model: nn.Module) -> None:
        """Calls of these layers come here from now on."""
        _CONTROLLERS[self._number] = self
        for layer, module in enumerate(self._modules(model)):
            setattr(module, LAYER, torch.tensor([self._number, layer], device="cpu"))
        self.attached = True

    def _hook_layers(self, model: nn.Module) -> None:
        for layer, module in enumerate(self._modules(model)):
            if self.row.call == "dispatch":
                module.register_forward_pre_hook(_enter, prepend=True)
            else:
                copied = vars(module).get("forward")
                if isinstance(copied, Scope):  # with the block of another layer
                    copied.take_off()
                scope = Scope(module, self, layer)
                scope.put_on()
                self._scopes.append(scope)

    def _unhook_layers(self, model: nn.Module) -> None:
        for module in self._modules(model):
            module.__dict__.pop(LAYER, None)
            self._drop_hooks(module)
            scope = vars(module).get("forward")
            if isinstance(scope, Scope) and scope.owner is self:  # also of a copy, which has no list of them
                scope.take_off()
        for scope in self._scopes:
            scope.take_off()
        self._scopes.clear()

    def reattach(self) -> None:
        """After `detach`, with the same settings and counts."""
        model = self.model
        if model is not None:
            self._start(model)
            self.attach()

    def detach(self) -> None:
        """Leaves the model as it was found, unless another controller has it."""
        model = self.model
        self.attached = False
        if model is None or vars(model).get(ATTRIBUTE) is not self:
            return
        if any(taken.processor is None for taken in self._taken.values()):
            self._take_processors(model)  # a copy that never ran
        self._drop_hooks(model)
        self._unhook_layers(model)
        self._give_all_back(model)
        del model.__dict__[ATTRIBUTE]

    def _give_all_back(self, model: nn.Module) -> None:
        for layer, taken in self._taken.items():
            self._give_back(self._modules(model)[layer], taken)
        self._taken.clear()

    def _drop_hooks(self, module: nn.Module) -> None:
        tables = (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        )
        for hooks, marks in tables:
            for key in [
                key for key, hook in hooks.items() if hook is _enter or getattr(hook, "__self__", None) is self
            ]:
                del hooks[key]
                for mark in marks:
                    mark.pop(key, None)

    def _modules(self, model: nn.Module) -> list[nn.Module]:
        """The self-attention modules."""
        if self._found is None:
            named = {plain_name(name): module for name, module in model.named_modules()}
            self._found = [named[name] for name in self.names]
        return self._found

    def _follow(self, model: nn.Module) -> None:
        """Blocks may have been replaced since the last forward."""
        if all(
            model.get_submodule(name) is module for name, module in zip(self.names, self._modules(model), strict=True)
        ):
            return
        self._unhook_layers(model)
        self._give_all_back(model)
        self._found = None
        self._label_layers(model)
        self._hook_layers(model)

    # -----------------------------------------------------------------------------------------------------------------
    # processors (models that go through diffusers' dispatch)

    def _take_processors(self, model: nn.Module) -> None:
        """Makes every self-attention processor call us. Again before each forward: adapters and fusing swap them."""
        if self.row.call != "dispatch":
            return
        modules = self._modules(model)
        for layer, module in enumerate(modules):
            processor, before = getattr(module, "processor", None), self._taken.get(layer)
            if processor is None or (before is not None and before.processor is processor and self._has(processor)):
                continue
            found = vars(processor).get("_attention_backend", _NOTHING)
            if found is self.backend:  # of a copied model, or shared with a layer before
                others = (taken for taken in self._taken.values() if taken.processor is processor)
                known = before or next(others, None)
                found = _NOTHING if known is None else known.backend
            if before is not None and before.processor is not None:
                self._give_back(module, before)
            original = processor
            if self._is_shared(model, modules, processor):
                processor = copy.copy(processor)
                module.processor = processor
            processor._attention_backend = self.backend
            self._taken[layer] = _Taken(processor, original, found)

    def _has(self, processor: Any) -> bool:
        return vars(processor).get("_attention_backend") is self.backend

    @staticmethod
    def _is_shared(model: nn.Module, ours: list[nn.Module], processor: Any) -> bool:
        """With a module that must be left alone."""
        mine = {id(module) for module in ours}
        return any(
            getattr(module, "processor", None) is processor for module in model.modules() if id(module) not in mine
        )

    def _give_back(self, module: nn.Module, taken: _Taken) -> None:
        if taken.original is not taken.processor:
            if getattr(module, "processor", None) is taken.processor:
                module.processor = taken.original
            return
        if not self._has(taken.processor):
            return  # somebody has set another one since: theirs
        if taken.backend is _NOTHING:
            del taken.processor._attention_backend
        else:
            taken.processor._attention_backend = taken.backend

    def _dense_backend(self, layer: int) -> Any:
        """What the layer's processor would use without us; None: the active one."""
        taken = self._taken.get(layer)
        if taken is None:
            return None
        return (
            getattr(type(taken.processor), "_attention_backend", None) if taken.backend is _NOTHING else taken.backend
        )

    # -----------------------------------------------------------------------------------------------------------------
    # hooks

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = self._signature.bind_partial(model, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not self.attached:  # a copy that runs for the first time
            self._label_layers(model)
        self._follow(model)
        self.entered.clear()
        self._reached.clear()
        try:
            self._scene = self.row.scene(given, getattr(model, "config", {}))
        except NoGrid as reason:
            self._scene = calls.Unsupported(f"no grid: {reason}")
        self._why_now = self._why_dense_now(next((given[name] for name in _TIMESTEPS if name in given), None))
        if len(self._plans) > 64 * len(self.names):
            self._plans.clear()
        self._take_processors(model)
        self._count_the_unreachable(model)

    def _after_forward(self, model: nn.Module, args: Any, out: Any) -> None:
        _AT.layer = None  # a processor of ours that another model got hold of finds nobody here
        reason = "its attention does not call torch's function (a processor of its own, or a patched torch)"
        if self.row.call == "active" and hub.active_backend() not in hub.THROUGH_SDPA:
            reason = f"the active attention backend is {hub.active_backend()!r}, and this model takes no other"
        for layer in sorted(self.entered - self._reached):
            self._dense(layer, self._why_layer(layer) or calls.Unsupported(reason))

    _before_forward._torchdynamo_disable = True  # type: ignore[attr-defined]
    _after_forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _why_dense_now(self, timestep: Any) -> str | None:
        if not self.settings.start_step and not self.settings.end_step:
            return None
        reason = self.settings.why_step_is_dense(self.steps.current(timestep), self.steps.total())
        return None if reason is None else calls.AsAsked(reason)

    def _count_the_unreachable(self, model: nn.Module) -> None:
        """Layers whose calls will not come to us are dense; they are counted here, since nobody else will."""
        if self.row.call != "dispatch":
            return
        for layer, module in enumerate(self._modules(model)):
            processor = getattr(module, "processor", None)
            if not hasattr(type(processor), "_attention_backend"):
                name = "a module without a processor" if processor is None else type(processor).__name__
                reason = f"{name} does not go through diffusers' attention dispatch"
                self._dense(layer, self._why_layer(layer) or calls.Unsupported(reason))

    # -----------------------------------------------------------------------------------------------------------------
    # calls

    def answer(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any,
        scale: float | None,
        is_causal: bool,
        dropout_p: float,
        dense: Callable[[], Tensor],
    ) -> Tensor:
        """A call of torch's function."""
        self._reached.add(layer)
        return self.attend(layer, q, k, v, attn_mask, scale, dense, special=_special(dropout_p, is_causal))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        scale: float | None,
        dense: Callable[[], Tensor],
        *,
        special: str | None = None,
        parallel: Any = None,
    ) -> Tensor:
        """q, k, v [B, N, S, D] views; `special`: what else is asked for, in words, that sparse attention cannot do."""
        reason = self._why_dense(layer, q, k, v, special)
        if reason is None and parallel is not None and self.observer is not None:
            reason = calls.Unsupported("calibration needs the whole sequence in one process")
        elif reason is None and parallel is not None:
            result = self._attend_shards(layer, q, k, v, attn_mask, scale, parallel)
            if isinstance(result, Tensor):
                return result
            reason = result
        elif reason is None:
            assert isinstance(self._scene, Scene)
            how = self._plan(q, k, v, self._scene, scale, layer)
            keys = calls.key_mask(attn_mask, q.shape[0], k.shape[2], self.row.pairs_are_keys)
            if isinstance(how, str):
                reason = how
            elif isinstance(keys, str):
                reason = keys
            elif self.observer is not None:
                self.observer(self.full_name(layer), q, k, v, keys, how)
                reason = calls.AsAsked("the call is observed")
            else:
                sparse = calls.run(q, k, v, keys, how)
                self.tally.sparse(layer, str(how.placed), sparse.kept, sparse.blocks)
                out = sparse.out
                if attn_mask is not None and self.row.pairs_are_keys and isinstance(keys, Tensor):
                    keep, _ = checks.key_mask(keys, q, k)
                    assert keep is not None
                    out = out.masked_fill(~keep[:, None, :, None], 0.0)  # padding queries see no key
                return out
        self._dense(layer, reason)
        return dense()

    def _why_dense(self, layer: int, q: Tensor, k: Tensor, v: Tensor, special: str | None) -> str | None:
        asked = self._why_layer(layer)
        if asked is not None:
            return asked
        if special is not None:
            return calls.Unsupported(special)
        if any(x.dim() != 4 for x in (q, k, v)):
            return calls.Unsupported(f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions instead of 4")
        if isinstance(self._scene, str):
            return self._scene
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return calls.Unsupported("gradients are wanted, and sparse attention has none")
        return None

    def _why_layer(self, layer: int) -> str | None:
        """The user wants it dense, now or always."""
        if layer in self.settings.skip_layers:
            return calls.AsAsked("the layer is in skip_layers")
        return self._why_now

    def _plan(self, q: Tensor, k: Tensor, v: Tensor, scene: Scene, scale: float | None, layer: int) -> calls.Plan | str:
        key = (
            q.shape,
            k.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.device,
            scene,
            scale,
            layer if self.settings.profile else 0,
        )
        if key not in self._plans:
            self._plans[key] = calls.plan(q, k, v, scene, scale, self.settings, self.full_name(layer))
        return self._plans[key]

    def _attend_shards(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, scale: float | None, parallel: Any
    ) -> Tensor | str:
        assert isinstance(self._scene, Scene)
        result = shards.attend(
            q, k, v, attn_mask, scale, parallel, self._scene, self.row, self.settings, self.full_name(layer)
        )
        if isinstance(result, str):
            return result
        self.tally.sparse(layer, str(result.placed))
        return result.out

    def _dense(self, layer: int, reason: str) -> None:
        if isinstance(reason, calls.Unsupported) and self.settings.on_unsupported == "error":
            raise ValueError(f"attention of {self.names[layer]} cannot be sparse: {reason}")
        if not isinstance(reason, calls.AsAsked) and reason not in self._warned:
            self._warned.add(reason)
            _log.warning("dense attention in %s: %s", self.names[layer], reason)
        self.tally.dense(layer, reason)

    # -----------------------------------------------------------------------------------------------------------------
    # copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Controller:
        """Of a model that is being copied: it is enabled as well, on its own. Of a part of it: ours still."""
        model = memo.get(id(self.model))
        if model is None:
            return self
        twin = Controller.__new__(Controller)
        memo[id(self)] = twin
        twin.row, twin.settings, twin.names = self.row, self.settings, self.names
        twin.prefix, twin.observer = self.prefix, self.observer
        twin.steps = Steps(memo.get(id(self.steps.pipeline), self.steps.pipeline))
        twin.tally = Tally(len(self.names))
        twin._start(model)
        # what to put back one day; which processors these are is found out when the copy runs or is disabled
        twin._taken = {layer: _Taken(None, None, taken.backend) for layer, taken in self._taken.items()}
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("a model with sparse attention cannot be pickled: call rainfusion.disable(model) before")


def enabled_through(pipeline: Any) -> list[Controller]:
    return [
        control for control in list(_CONTROLLERS.values()) if control.attached and control.steps.pipeline is pipeline
    ]


def layer_names(model: nn.Module, row: Model) -> list[str]:
    """Of the self-attention modules, in the model's order. A * stands for one part of a name."""
    patterns = [pattern.split(".") for pattern in row.attention]

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern)) for pattern in patterns)

    return [name for name in (plain_name(name) for name, _ in model.named_modules()) if matches(name)]


def plain_name(name: str) -> str:
    """Without the wrappers that torch.compile puts around a block."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


# ---------------------------------------------------------------------------------------------------------------------
# how calls arrive


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """What diffusers' dispatch calls. Compilers see one op, whose arguments are the same for all layers and steps."""
    call = (
        query, key, value, attn_mask, _AT.layer, dropout_p, is_causal, scale, enable_gqa, _parallel_config is not None
    )  # fmt: skip
    if torch.compiler.is_compiling() and (attn_mask is None or isinstance(attn_mask, Tensor)):
        return _dispatched(*call)  # type: ignore[no-any-return]
    return _from_dispatch(*call)


def _from_dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    layer: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    parallel: bool,
) -> Tensor:
    """[B, S, N, D]"""
    number, index = (-1, 0) if layer is None else layer.tolist()
    controller = _CONTROLLERS.get(number)
    config = getattr(controller.model, "_parallel_config", None) if controller is not None and parallel else None

    def dense() -> Tensor:
        backend = None if controller is None else controller._dense_backend(index)
        return hub.dispatch(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, backend=backend, parallel_config=config,
        )  # fmt: skip

    if controller is None:  # a processor that was taken out of its module
        return dense()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = controller.attend(
        index, q, k, v, attn_mask, scale, lambda: dense().transpose(1, 2), special=_special(dropout_p, is_causal),
        parallel=config,
    )  # fmt: skip
    return out.transpose(1, 2)


@torch.library.custom_op("rainfusion::dispatched", mutates_args=())
def _dispatched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    layer: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    parallel: bool,
) -> Tensor:
    out = _from_dispatch(query, key, value, attn_mask, layer, dropout_p, is_causal, scale, enable_gqa, parallel)
    return out.contiguous()


@_dispatched.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _special(dropout_p: float, is_causal: bool) -> str | None:
    if dropout_p:
        return "dropout is wanted"
    return "the call is causal" if is_causal else None
