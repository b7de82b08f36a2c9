"""A call as data: the tensors that came, what a plan depends on of them, and what is asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.geometry import Geometry
from rainfusion.options import Method


class Shapes(NamedTuple):
    """All that a plan depends on of the tensors: no value of theirs, and no stride."""

    q: tuple[int, ...]  # [B, H, Sq, D]
    k: tuple[int, ...]  # [B, Hk, Sk, D]
    dtype: torch.dtype
    device: torch.device
    has_key_mask: bool = False
    bias_dtype: torch.dtype | None = None  # of an additive key mask

    @property
    def q_len(self) -> int:
        return self.q[2]

    @property
    def k_len(self) -> int:
        return self.k[2]

    @property
    def head_dim(self) -> int:
        return self.q[3]

    @property
    def is_empty(self) -> bool:
        return 0 in self.q or 0 in self.k


class Inputs(NamedTuple):
    """The checked tensors of a call, [B, H, S, D] in the caller's order."""

    q: Tensor
    k: Tensor
    v: Tensor  # where a mask alone is wanted: k, and nobody reads it
    keep: Tensor | None = None  # bool [B, Sk], True where the key takes part
    bias: Tensor | None = None  # [B, Sk], added to the logits
    mask: BlockMask | None = None  # instead of a prediction

    @property
    def shapes(self) -> Shapes:
        bias_dtype = None if self.bias is None else self.bias.dtype
        return Shapes(self.q.shape, self.k.shape, self.q.dtype, self.q.device, self.keep is not None, bias_dtype)


class Call(NamedTuple):
    """What is asked for, checked, as plain values: with `Shapes` it makes a plan."""

    method: Method
    geometry: Geometry
    scale: float
    is_causal: bool
    backend: str  # a name, or "auto"
    may_be_dense: bool  # torch's attention may run instead, where it is faster
    return_lse: bool
    return_mask: bool
    given_mask: bool  # blocks are not predicted

    @property
    def keeps_everything(self) -> bool:
        return not self.given_mask and self.method.keeps_everything


class Attended(NamedTuple):
    """A result, in the caller's order."""

    out: Tensor
    lse: Tensor | None  # fp32 [B, H, Sq], if asked for
    mask: BlockMask | None  # the one that was given, or the one that was found if it was asked for
