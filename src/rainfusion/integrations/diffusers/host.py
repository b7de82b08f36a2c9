"""One transformer of diffusers as a host of the `Decider`: reads each forward's scene and step, and hands calls over.

A hook on the transformer finds the scene; `attaching` puts sparse attention on its layers; their calls arrive through
`scope`. Everything can be taken off again.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rainfusion.integrations.decider import Decider, Observer
from rainfusion.integrations.diffusers import private_names, scope, shards
from rainfusion.integrations.diffusers.attaching import Attachment
from rainfusion.integrations.diffusers.models import Model
from rainfusion.integrations.diffusers.scope import LAYER, Arrival
from rainfusion.integrations.diffusers.steps import Steps
from rainfusion.integrations.layer_names import layer_names
from rainfusion.integrations.scenes import NoGrid, Scene
from rainfusion.integrations.settings import Settings

__all__ = ["ATTRIBUTE", "LAYER", "Host", "enabled_through"]

ATTRIBUTE = "_rainfusion"  # on the transformer: its host

_TIMESTEPS = ("timestep", "timesteps", "t")  # what forwards call it
_NUMBERS = itertools.count()
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # so that compiled code stays valid


class Host:
    """A transformer that is, or was, enabled."""

    def __init__(
        self,
        model: nn.Module,
        row: Model,
        settings: Settings,
        steps: Steps,
        prefix: str = "",
        observer: Observer | None = None,
    ) -> None:
        names = layer_names(model, row.attention)
        if not names:
            raise ValueError(
                f"{type(model).__name__} has no modules that match {', '.join(row.attention)}: it is not the model "
                "that this row was written for; rainfusion.register_model can give it another one"
            )
        decider = Decider(settings, names, prefix, model=type(model).__name__, observer=observer)
        self._begin(model, row, decider, steps)

    def _begin(self, model: nn.Module, row: Model, decider: Decider, steps: Steps) -> None:
        self.row, self.decider, self.steps = row, decider, steps
        self.attached = False
        self._model = weakref.ref(model)
        self._names = _Names()
        self._foreign: str | None = None  # who spreads the model over processes, if not diffusers
        self._number = _OF_MODELS.setdefault(model, next(_NUMBERS))
        self._attachment = self._new_attachment()

    def _new_attachment(self, originals: dict[int, Any] | None = None) -> Attachment:
        arrival: Arrival = "dispatch" if self.row.call == "dispatch" else "sdpa"
        return Attachment(self.decider.layers, arrival, self._number, originals)

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    # -----------------------------------------------------------------------------------------------------------------
    # on and off

    def attach(self) -> None:
        """Also after `detach`: the settings and the counts are the same."""
        model = self.model
        if model is None:
            return
        setattr(model, ATTRIBUTE, self)
        self.attached = True
        scope.HOSTS[self._number] = self
        before, after = _hooks()
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        model.register_forward_hook(after, always_call=True)
        self._attachment.follow(model)

    def detach(self) -> None:
        """Leaves the model as it was found, unless another host has it."""
        model = self.model
        self.attached = False
        if model is None or vars(model).get(ATTRIBUTE) is not self:
            return
        _drop_hooks(model)
        self._attachment.take_off(model)
        del model.__dict__[ATTRIBUTE]

    # -----------------------------------------------------------------------------------------------------------------
    # a forward

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.attached:  # a copy that runs for the first time
            self.attached = True
            scope.HOSTS[self._number] = self
        given = self._names.of(model, args, kwargs)
        config = self.parallel_config()
        self._foreign = _foreign(config)
        watched = self._foreign is not None and self.row.call == "dispatch"
        self._attachment.follow(model, "watch" if watched else None)
        step, steps = None, None
        if self.decider.needs_step:
            timestep = next((given[name] for name in _TIMESTEPS if name in given), None)
            steps = self.steps.total()
            step = self.steps.current(timestep, may_wait=self.decider.settings.needs_steps)
        self.decider.begin(self._scene(given, model), step=step, steps=steps, training=model.training)
        for layer in self._attachment.unreachable:
            self.decider.enter(layer)  # nobody else will

    def _scene(self, given: dict[str, Any], model: nn.Module) -> Scene | NoGrid:
        try:
            return self.row.scene(given, getattr(model, "config", {}))
        except NoGrid as reason:
            return NoGrid(str(reason))  # without the frames that the other one holds on to

    def after_forward(self, finished: bool) -> None:
        scope.leave()
        if finished:
            self.decider.end(self._why_missing)

    def _why_missing(self, layer: int) -> str:
        """Why the attention of a layer that was at work did not arrive."""
        if self._foreign is not None:
            return self._foreign
        if self.row.call == "dispatch":
            name = self._attachment.unreachable.get(layer)
            name = name or type(getattr(self._attachment.module(layer), "processor", None)).__name__
            return f"{name} does not go through diffusers' attention dispatch"
        active = private_names.active_backend()
        if self.row.call == "active" and active not in private_names.THROUGH_SDPA:
            return f"the active attention backend is {active!r}, and this model takes no other"
        return "its attention does not call torch's function (a processor of its own, or a patched torch)"

    # -----------------------------------------------------------------------------------------------------------------
    # a call, see `scope.Answerer`

    def enter(self, layer: int) -> None:
        self.decider.enter(layer)

    def dense_backend(self, layer: int) -> Any:
        processor = getattr(self._attachment.module(layer), "processor", None)
        return None if processor is None else scope.own_backend(processor)

    def parallel_config(self) -> Any:
        return getattr(self.model, "_parallel_config", None)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any,
        dense: Callable[[], Tensor],
        *,
        scale: float | None,
        special: str | None,
        parallel: Any,
    ) -> Tensor:
        special = special or self._foreign or _foreign(parallel) or self._why_heads(layer, q)
        config = private_names.context_parallelism(parallel)
        if config is None:
            return self.decider.attend(
                layer, q, k, v, attn_mask, dense, scale=scale, special=special, pairs_are_keys=self.row.pairs_are_keys
            )
        return self.decider.answer(
            layer,
            lambda: shards.attend(self.decider, layer, self.row, q, k, v, attn_mask, scale, config, special),
            dense,
        )

    def _why_heads(self, layer: int, q: Tensor) -> str | None:
        """Fewer heads than the module has, where text is in the sequence: processes share them out, in their order."""
        heads = getattr(self._attachment.module(layer), "heads", None)
        if not isinstance(heads, int) or q.dim() != 4 or q.shape[1] >= heads or self.row.others == "none":
            return None
        if private_names.is_tensor_parallel(self.parallel_config()):
            return None  # a share of the heads, and every token in the model's order
        return (
            f"the call has {q.shape[1]} of the module's {heads} heads: something spreads the model over processes, and "
            "the order of text and picture is not known then"
        )

    # -----------------------------------------------------------------------------------------------------------------
    # copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Host:
        """Of a model that is being copied: it is enabled as well, on its own. Of a part of it: ours still."""
        model = memo.get(id(self.model))
        if model is None:
            return self
        twin = Host.__new__(Host)
        memo[id(self)] = twin
        pipeline = memo.get(id(self.steps.pipeline), self.steps.pipeline)
        twin._begin(model, self.row, self.decider.twin(), Steps(pipeline))
        twin._attachment = twin._new_attachment(copy.deepcopy(self._attachment.originals(), memo))
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("a model with sparse attention cannot be pickled: call rainfusion.disable(model) before")


def enabled_through(pipeline: Any) -> list[Host]:
    """The hosts of transformers that were enabled with this pipeline."""
    hosts = [host for host in list(scope.HOSTS.values()) if isinstance(host, Host)]
    return [host for host in hosts if host.attached and host.steps.pipeline is pipeline]


def _foreign(config: Any) -> str | None:
    """In words, if it is not diffusers that spreads a model over processes."""
    if not private_names.is_foreign(config):
        return None
    kind = type(config)
    return f"{kind.__module__}.{kind.__qualname__} spreads the model over processes, which is not diffusers' own"


# ---------------------------------------------------------------------------------------------------------------------
# hooks of the transformer


def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    host = vars(model).get(ATTRIBUTE)
    if host is not None:
        host.before_forward(model, args, kwargs)


def _after_forward(model: nn.Module, args: Any, out: Any) -> None:
    host = vars(model).get(ATTRIBUTE)
    if host is not None:
        host.after_forward(finished=out is not None)


@lru_cache(maxsize=1)
def _hooks() -> tuple[Callable[..., None], Callable[..., None]]:
    """Compilers leave them alone, and begin with the model's own forward."""
    return torch.compiler.disable(_before_forward), torch.compiler.disable(_after_forward)


def _drop_hooks(model: nn.Module) -> None:
    tables = (
        (model._forward_pre_hooks, (model._forward_pre_hooks_with_kwargs,)),
        (model._forward_hooks, (model._forward_hooks_with_kwargs, model._forward_hooks_always_called)),
    )
    for hooks, marks in tables:
        for key in [key for key, hook in hooks.items() if hook in _hooks()]:
            del hooks[key]
            for mark in marks:
                mark.pop(key, None)


# ---------------------------------------------------------------------------------------------------------------------
# arguments by name


class _Names:
    """The arguments of a forward by name, also where it was replaced or wrapped by one that does not tell them."""

    def __init__(self) -> None:
        self._forward: Any = self  # the instance's own, for which the names were found; self: none yet
        self._positional: tuple[str, ...] = ()
        self._defaults: dict[str, Any] = {}

    def of(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        own = vars(model).get("forward")
        if own is not self._forward:
            self._find(model, own)
        return {**self._defaults, **dict(zip(self._positional, args, strict=False)), **kwargs}

    def _find(self, model: nn.Module, own: Any) -> None:
        """The nearest signature without *args names the positional ones; defaults are the nearest of each name."""
        known = [_parameters(forward, bound=False) for forward in (own,) if forward is not None]
        known += [
            _parameters(vars(kind)["forward"], bound=True) for kind in type(model).__mro__ if "forward" in vars(kind)
        ]
        self._defaults = {
            parameter.name: parameter.default
            for parameters in reversed(known)
            for parameter in parameters
            if parameter.default is not parameter.empty
        }
        plain = [found for found in known if found and all(p.kind is not p.VAR_POSITIONAL for p in found)]
        candidates = plain or sorted(known, key=len, reverse=True)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = tuple(p.name for p in candidates[0] if p.kind in kinds) if candidates else ()
        self._forward = own


def _parameters(forward: Any, *, bound: bool) -> list[inspect.Parameter]:
    """Without the model itself; none where Python cannot tell."""
    try:
        found = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return []
    return found[1:] if bound else found
