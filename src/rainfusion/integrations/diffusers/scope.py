"""How the attention calls of a layer arrive, and where a thread is.

A self-attention module hands its work to a processor. While a model is enabled, the class of that processor is a
subclass of its own one (`scoped`), which says which layer is at work and brings the call here:

    dispatch   diffusers' dispatch asks the processor for its backend, and is told ours (`attention`)
    sdpa       torch's attention is called directly, or through the active backend: a mode around the processor sees it
    watch      nothing arrives: it is only seen that the layer was at work

A processor lies inside everything that others wrap around a module, so that a call that a cache answers is not ours to
count, and wrappers may come and go. Modules without a processor get a `Scope` around their forward instead.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable
from functools import cache, wraps
from types import MethodType
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rainfusion.integrations.diffusers import private_names

LAYER = "_rainfusion_layer"  # on a self-attention module: the numbers of its host and of its layer, as a tensor
BACKEND = "_attention_backend"  # on a processor: what diffusers' dispatch is to use

Arrival = Literal["dispatch", "sdpa", "watch"]


class Answerer(Protocol):
    """Who answers the calls of a model's layers."""

    def enter(self, layer: int) -> None:
        """The layer's attention begins."""

    def dense_backend(self, layer: int) -> Any:
        """What the layer's processor would use without us; None: the active one."""

    def parallel_config(self) -> Any:
        """How the model is spread over processes; None: not at all."""

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
        """q, k, v [B, N, S, D]; `parallel`: the parallel config that came with the call."""


class _At(threading.local):
    layer: Tensor | None = None  # of the self-attention module at work: its `LAYER`


HOSTS: weakref.WeakValueDictionary[int, Answerer] = weakref.WeakValueDictionary()  # by number
_AT = _At()


def leave() -> None:
    """No layer is at work in this thread: a processor of ours that another model got hold of finds nobody."""
    _AT.layer = None


def _found(layer: Tensor | None) -> tuple[Answerer | None, int]:
    if layer is None:
        return None, 0
    number, index = layer.tolist()
    return HOSTS.get(number), index


def _run(layer: Tensor | None, through_torch: bool, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A layer's attention, with its calls coming here. Compilers see a tensor move, the same way in all layers."""
    _AT.layer = layer
    if layer is None:  # of a model that is not enabled, or not any more
        return forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        host, index = _found(layer)
        if host is not None:
            host.enter(index)
    if not through_torch:
        return forward(*args, **kwargs)
    with _TorchAttention(layer):
        return forward(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# processors


@cache
def scoped(kind: type, arrival: Arrival) -> type:
    """The class of a processor while its model is enabled; always the same one, so that compiled code stays valid."""
    through_torch = arrival == "sdpa"

    @wraps(kind.__call__)  # diffusers reads its signature, and drops what is not in it
    def __call__(self: Any, attn: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(getattr(attn, LAYER, None), through_torch, kind.__call__, (self, attn, *args), kwargs)

    members: dict[str, Any] = {"__call__": __call__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if arrival == "dispatch" and hasattr(kind, BACKEND):
        ours = private_names.backend(attention)
        members[BACKEND] = property(lambda self: ours, _set_backend, _delete_backend)
    made: type = _transparent(type(kind))(kind.__name__, (kind,), members)
    made._rainfusion_scoped = kind  # type: ignore[attr-defined]
    private_names.register_like(kind, made)
    return made


@cache
def _transparent(meta: Any) -> Any:
    """A metaclass: what others set on `type(processor)` while ours is on goes to the processor's own class.

    There it takes effect through ours, which asks that class at each call, and stays when ours is taken off.
    """

    def __setattr__(kind: type, name: str, value: Any) -> None:
        meta.__setattr__(unscoped(kind), name, value)

    def __delattr__(kind: type, name: str) -> None:
        meta.__delattr__(unscoped(kind), name)

    return type(meta.__name__, (meta,), {"__setattr__": __setattr__, "__delattr__": __delattr__})


def _set_backend(processor: Any, backend: Any) -> None:
    """What a user chooses while the model is enabled is kept for dense calls, and for afterwards."""
    vars(processor)[BACKEND] = backend


def _delete_backend(processor: Any) -> None:
    vars(processor).pop(BACKEND, None)


def unscoped(kind: type) -> type:
    """The class that a processor has without us."""
    original: type = vars(kind).get("_rainfusion_scoped", kind)
    return original


def put_on(processor: Any, arrival: Arrival) -> bool:
    """Whether the processor is ours now; a function, say, cannot be."""
    try:
        processor.__class__ = scoped(unscoped(type(processor)), arrival)
    except TypeError:
        return False
    return True


def take_off(processor: Any) -> None:
    kind = unscoped(type(processor))
    if kind is not type(processor):
        processor.__class__ = kind


def own_backend(processor: Any) -> Any:
    """What a processor would tell diffusers' dispatch without us."""
    return vars(processor).get(BACKEND, getattr(unscoped(type(processor)), BACKEND, None))


# ---------------------------------------------------------------------------------------------------------------------
# modules without a processor


class Scope:
    """A module's forward, in which calls of torch's attention come here. It stands in the module's `forward`.

    Where somebody has wrapped it since, it can be told to do nothing, but not be taken out.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.is_on = module, True
        self._replaced = vars(module).get("forward")  # of a wrapper that was there before; None: the class has it
        self.__signature__ = inspect.signature(self.original)
        self.__name__ = "forward"

    @property
    def original(self) -> Any:
        return MethodType(type(self.module).forward, self.module) if self._replaced is None else self._replaced

    def put_on(self) -> None:
        self.module.forward = self

    @property
    def is_in_place(self) -> bool:
        """Whether the module's forward still leads here, directly or through wrappers that tell."""
        forward = vars(self.module).get("forward")
        while forward is not None and forward is not self:
            forward = getattr(forward, "__wrapped__", None)
        return forward is self

    def take_off(self) -> None:
        self.is_on = False
        private_names.forget_forward(self.module, self, self.original)
        if vars(self.module).get("forward") is not self:
            return
        if self._replaced is None:
            del self.module.forward
        else:
            self.module.forward = self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self.module, LAYER, None) if self.is_on else None
        if self._replaced is None:
            return _run(layer, True, type(self.module).forward, (self.module, *args), kwargs)
        return _run(layer, True, self._replaced, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of a module that is being copied: a scope of the copy. (Of the scope alone there is nothing to copy.)"""
        module = memo.get(id(self.module))
        if module is None:
            return self
        twin = Scope.__new__(Scope)
        memo[id(self)] = twin
        twin.module, twin.is_on, twin.__signature__, twin.__name__ = module, self.is_on, self.__signature__, "forward"
        twin._replaced = copy.deepcopy(self._replaced, memo)
        return twin


# ---------------------------------------------------------------------------------------------------------------------
# calls of diffusers' dispatch


def attention(
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
    call = (query, key, value, attn_mask, _AT.layer, dropout_p, is_causal, scale, enable_gqa)
    if torch.compiler.is_compiling() and (attn_mask is None or isinstance(attn_mask, Tensor)):
        return _dispatched(*call, _parallel_config is not None)  # type: ignore[no-any-return]
    return _from_dispatch(*call, _parallel_config)


def _from_dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    layer: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    parallel: Any,
) -> Tensor:
    """[B, S, N, D]"""
    host, index = _found(layer)

    def dense() -> Tensor:
        return private_names.dispatch(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            backend=None if host is None else host.dense_backend(index),
            parallel_config=parallel,
        )

    if host is None:  # a processor that was taken out of its module
        return dense()
    q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in (query, key, value))
    special = _special(dropout_p, is_causal)
    out = host.attend(
        index, q, k, v, attn_mask, lambda: dense().transpose(1, 2), scale=scale, special=special, parallel=parallel
    )
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
    host, _ = _found(layer)
    config = host.parallel_config() if host is not None and parallel else None
    out = _from_dispatch(query, key, value, attn_mask, layer, dropout_p, is_causal, scale, enable_gqa, config)
    return out.contiguous()


@_dispatched.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


# ---------------------------------------------------------------------------------------------------------------------
# calls of torch's attention


class _TorchAttention(TorchFunctionMode):
    """While it is on, calls of `F.scaled_dot_product_attention` come here."""

    def __init__(self, layer: Tensor) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # compilers know the method, and not the function that it is made of
            return args[0].unflatten(*args[1:], **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _torch_attention_op(self.layer, *args, **kwargs)
        return _from_torch(self.layer, lambda: func(*args, **kwargs), *args, **kwargs)


def _from_torch(
    layer: Tensor,
    dense: Callable[[], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """[B, N, S, D]; `dense` is the call as it came, with no argument more."""
    host, index = _found(layer)
    if host is None:
        return dense()
    special = _special(dropout_p, is_causal)
    return host.attend(index, query, key, value, attn_mask, dense, scale=scale, special=special, parallel=None)


def _torch_attention_op(
    layer: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With the defaults written out, as an op wants them."""
    return _called(query, key, value, attn_mask, layer, dropout_p, is_causal, scale, enable_gqa)  # type: ignore[no-any-return]


@torch.library.custom_op("rainfusion::called", mutates_args=())
def _called(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    layer: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    def dense() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _from_torch(layer, dense, *call).contiguous()


@_called.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _special(dropout_p: float, is_causal: bool) -> str | None:
    if dropout_p:
        return "dropout is wanted"
    return "the call is causal" if is_causal else None
