"""torch's attention inside the forward of one module, for models that call it directly."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# layer, q, k, v [B, N, S, D], mask, scale, causal, dropout, dense way -> [B, N, S, D]
Answer = Callable[[int, Tensor, Tensor, Tensor, Any, float | None, bool, float, Callable[[], Tensor]], Tensor]


class Scope:
    """A module's forward, in which calls of `F.scaled_dot_product_attention` go to `owner.answer(layer, ...)`.

    It stands in the module's `forward` attribute. Where somebody wraps it since, it can only be made to do nothing.
    """

    def __init__(self, module: nn.Module, owner: Any, layer: int) -> None:
        self.module, self.owner, self.layer = module, owner, layer
        self._found = vars(module).get("forward")  # of a wrapper that was there before; None: the class has it
        self.__signature__ = inspect.signature(self._forward)
        self.__name__ = "forward"

    @property
    def _forward(self) -> Any:
        return type(self.module).forward.__get__(self.module) if self._found is None else self._found

    def put_on(self) -> None:
        self.module.forward = self

    def take_off(self) -> None:
        self.owner = None
        if vars(self.module).get("forward") is not self:
            return
        if self._found is None:
            del self.module.forward
        else:
            self.module.forward = self._found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.owner is None:
            return self._forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.owner.entered.add(self.layer)
        with _SDPAMode(self.owner.answer, self.layer):
            return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of a module that is being copied: a scope of the copy. (Of the scope alone there is nothing to copy.)"""
        module = memo.get(id(self.module))
        if module is None:
            return self
        twin = Scope.__new__(Scope)
        memo[id(self)] = twin
        twin.module, twin.layer, twin.__signature__, twin.__name__ = module, self.layer, self.__signature__, "forward"
        twin._found = copy.deepcopy(self._found, memo)
        twin.owner = copy.deepcopy(self.owner, memo)
        return twin


class _SDPAMode(TorchFunctionMode):
    def __init__(self, answer: Answer, layer: int) -> None:
        super().__init__()
        self.answer, self.layer = answer, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        def dense() -> Tensor:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip

        return self.answer(self.layer, query, key, value, attn_mask, scale, is_causal, dropout_p, dense)
