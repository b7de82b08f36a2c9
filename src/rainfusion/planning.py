"""One decision for every door: what came is checked, a plan says how it runs, `pipeline` runs it.

    check(tensors) -> Inputs        ask(what for) -> Call        plan(Call, Shapes) -> Plan        pipeline.attend

`sparse_attention` is these four; `explain` is the first three, then words. The integrations, the distributed functions,
the benchmarks and the lab use the same. A plan is made once for a call and the shapes of its tensors, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rainfusion import backends, checks
from rainfusion.backends import crossover, dense
from rainfusion.blockmask import BlockMask
from rainfusion.calls import Call, Inputs, Shapes
from rainfusion.geometry import Geometry, LayoutSpec, TokenOrderKey, VideoSpan
from rainfusion.layout import TokenLayout, cached_layout
from rainfusion.options import Method, MethodOptions
from rainfusion.prediction import budgets

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PUBLISHED = Method()


class CallOptions(MethodOptions, total=False):
    """The keywords of `sparse_attention`, but for the tensors, their layout, `mask` and what is returned."""

    scale: float | None
    is_causal: bool
    head_num: int | None
    txt_len: int
    latent_shape_q: Sequence[int] | None
    latent_shape_k: Sequence[int] | None
    video_spans: Sequence[VideoSpan] | None
    backend: str
    method: Method | None


def check(
    q: Any, k: Any, v: Any, attn_mask: Any = None, mask: Any = None, *, input_layout: Any, head_num: Any = None
) -> Inputs:
    """The tensors as [B, H, S, D] views, and the key mask in two plain forms. Where v is not needed, k serves."""
    q, k, v = checks.tensors(input_layout, head_num, q=q, k=k, v=v)
    if mask is not None:
        check_mask(mask, q, k)
    return Inputs(q, k, v, *checks.key_mask(attn_mask, q, k), mask)


def ask(
    inputs: Inputs,
    method: Method,
    geometry: Geometry,
    *,
    scale: Any = None,
    is_causal: Any = False,
    backend: Any = "auto",
    may_be_dense: bool | None = None,
    return_lse: Any = False,
    return_mask: Any = False,
) -> Call:
    """Everything that is not a tensor, checked together. What another strategy would read has no effect.

    `may_be_dense`: torch's attention may run where it is faster. None: if only the output is asked for.
    """
    q_len, k_len = inputs.q.shape[2], inputs.k.shape[2]
    method = method.for_frames(geometry.frames)
    return_lse, return_mask = checks.flag("return_lse", return_lse), checks.flag("return_mask", return_mask)
    if may_be_dense is None:
        may_be_dense = inputs.mask is None and not (return_lse or return_mask)
    call = Call(
        method=method,
        geometry=geometry.fitted(q_len, k_len) if method.strategy == "rf_v2" else Geometry(),
        scale=checks.checked_scale(scale, inputs.q.shape[3]),
        is_causal=checks.flag("is_causal", is_causal),
        backend=checks.choice("backend", backend, ("auto", *backends.NAMES)),
        may_be_dense=may_be_dense,
        return_lse=return_lse,
        return_mask=return_mask,
        given_mask=inputs.mask is not None,
    )
    _check_together(call, inputs)
    return call


def ask_flat(
    inputs: Inputs,
    *,
    txt_len: Any = 0,
    latent_shape_q: Any = None,
    latent_shape_k: Any = None,
    video_spans: Any = None,
    method: Method | None = None,
    scale: Any = None,
    is_causal: Any = False,
    backend: Any = "auto",
    return_lse: Any = False,
    return_mask: Any = False,
    **options: Unpack[MethodOptions],
) -> Call:
    """`ask` with the arguments of `sparse_attention`."""
    geometry = Geometry.check(txt_len, latent_shape_q, latent_shape_k, video_spans)
    return ask(
        inputs,
        _chosen(method, options),
        geometry,
        scale=scale,
        is_causal=is_causal,
        backend=backend,
        return_lse=return_lse,
        return_mask=return_mask,
    )


def _chosen(method: Method | None, options: MethodOptions) -> Method:
    """`method`, or one of these options; not both."""
    if method is None:
        return Method(**options) if torch.compiler.is_compiling() else Method.known(**options)  # type: ignore[arg-type]
    if not isinstance(method, Method):
        raise TypeError(f"method must be a rainfusion.Method, got {method!r} ({type(method).__name__})")
    for name, value in options.items():
        if not (isinstance(value, (int, float, str, tuple, NoneType)) and value == getattr(_PUBLISHED, name)):
            raise ValueError(
                f"method holds all options of the method: leave {name} out, got {value!r}; or change the method, "
                f"dataclasses.replace(method, {name}={value!r})"
            )
    return method


@dataclass(frozen=True, eq=False)
class Plan:
    """How a call runs, for tensors of one shape: nothing of it is derived again."""

    call: Call
    shapes: Shapes
    method: Method  # what is attended: where nothing is skipped, dense blocks of 128
    backend: str
    dense_because: str | None  # torch's attention runs instead
    budgets: tuple[int, ...]  # rf_v2: key blocks that a row keeps, for each head or for all
    q_spec: LayoutSpec
    k_spec: LayoutSpec

    @property
    def layouts(self) -> tuple[TokenLayout, TokenLayout]:
        """Of q and of k, on the device. The cache of layouts holds them, which is small: plans are many."""
        return cached_layout(self.q_spec, self.shapes.device), cached_layout(self.k_spec, self.shapes.device)

    @cached_property
    def orders(self) -> tuple[TokenOrderKey, TokenOrderKey] | None:
        """Of q's and of k's tokens, for a mask."""
        return orders(self.call, self.q_spec, self.k_spec)

    @cached_property
    def kind(self) -> object:
        """One for all plans that launch the same kernels: those that differ in nothing but one budget for all heads.

        Where a mask is given, there is none.
        """
        if self.dense_because is not None or (len(self.budgets) != 1 and not self.call.given_mask):
            return self
        method = replace(self.method, sparsity=0.0)
        return _kind(self.call._replace(method=method, may_be_dense=False), self.shapes, self.backend)

    @cached_property
    def kept_blocks(self) -> int | None:
        """How many blocks a call computes, of all heads together; None: the data decides."""
        return budgets.kept(self.method, self.budgets, self.shapes.q[:2], self.q_spec, self.k_spec)

    @cached_property
    def blocks(self) -> int:
        """How many blocks there are, of all heads together."""
        rows, columns = -(-self.shapes.q_len // self.method.q_block), -(-self.shapes.k_len // self.method.k_block)
        return math.prod(self.shapes.q[:2]) * rows * columns

    def __str__(self) -> str:
        if self.dense_because is not None:
            lines = [f"runs with torch's attention: {self.dense_because}"]
        else:
            lines = [f"runs with {self.backend!r}"]
            slow = crossover.why_native(
                backends.get(self.backend), self.method, self.shapes, (self.q_spec, self.k_spec)
            )
            lines += [] if slow is None else [slow]
        for name in backends.FASTEST_FIRST:
            reason = None if name == self.backend else backends.why_not(name, self.call, self.shapes)
            if reason:
                lines.append(f"not with {name!r}: it {reason}")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def plan(call: Call, shapes: Shapes) -> Plan:
    """Raises where the backend that was asked for cannot run this call."""
    method = _attended(call)
    specs = call.geometry.specs(method, shapes.q_len, shapes.k_len)
    backend = backends.choose(call, shapes)
    predicts = not call.given_mask and method.strategy == "rf_v2"
    return Plan(
        call,
        shapes,
        method,
        backend,
        _why_dense(call, shapes, method, specs, backend),
        budgets.numbers(method, *specs) if predicts and method.target_error is None else (),
        *specs,
    )


@lru_cache(maxsize=4096)
def _kind(call: Call, shapes: Shapes, backend: str) -> object:
    return object()


def planned(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Unpack[CallOptions]
) -> tuple[Inputs, Plan]:
    """A call of `sparse_attention` [B, N, S, D] up to its plan, for those who run its stages one by one."""
    inputs = check(q, k, v, attn_mask, input_layout="BNSD")
    return inputs, plan(ask_flat(inputs, **options), inputs.shapes)  # type: ignore[misc] # no head_num


def orders(call: Call, q_spec: LayoutSpec, k_spec: LayoutSpec) -> tuple[TokenOrderKey, TokenOrderKey] | None:
    """Which a mask is made for; one of all blocks, but for a causal one, fits every order."""
    return None if call.keeps_everything and not call.is_causal else (q_spec.order, k_spec.order)


def runs_dense(call: Call, shapes: Shapes) -> bool:
    """Whether torch's attention runs because nothing is skipped: what a compiler may know while it traces."""
    return call.backend == "auto" and call.keeps_everything and not call.return_lse and not dense.why_not(call, shapes)


def _why_dense(
    call: Call, shapes: Shapes, method: Method, specs: tuple[LayoutSpec, LayoutSpec], backend: str
) -> str | None:
    if runs_dense(call, shapes):
        return "nothing is to be skipped"
    if call.backend != "auto" or not call.may_be_dense or call.keeps_everything or dense.why_not(call, shapes):
        return None
    return crossover.why_dense(backends.get(backend), method, shapes, specs)


def _attended(call: Call) -> Method:
    """Dense attention comes in blocks of 128, with the same bits whatever the block size that was asked for."""
    method = call.method
    if call.keeps_everything:
        return replace(method, sparse_type=None, compensate=False, block_size=128, sparsity=0.0, token_order="raster")
    if isinstance(method.sparsity, tuple) and len(set(method.sparsity)) == 1:
        return replace(method, sparsity=method.sparsity[0])
    return method


def _check_together(call: Call, inputs: Inputs) -> None:
    method, q_len, k_len = call.method, inputs.q.shape[2], inputs.k.shape[2]
    heads = inputs.q.shape[1]
    if isinstance(method.sparsity, tuple) and len(method.sparsity) != heads:
        raise ValueError(
            f"sparsity must be a number, or one for each of q's {heads} heads, got {len(method.sparsity)} of them"
        )
    if call.is_causal and method.strategy == "rf_v2":
        raise ValueError(
            f"is_causal must be False with sparse_type={method.sparse_type!r}, which reorders tokens; use "
            "sparse_type='ada_bsa' or None for causal attention"
        )
    if call.is_causal and q_len != k_len:
        raise ValueError(f"is_causal needs q and k of one length, got {q_len} and {k_len}")
    if call.is_causal and method.compensate:
        raise ValueError("compensate must be False with is_causal: the mean of a block would show what comes later")
    if inputs.mask is not None:
        _check_order(inputs.mask, call, q_len, k_len)


def check_mask(mask: Any, q: Tensor, k: Tensor) -> None:
    """A `BlockMask` must describe these tensors."""
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a rainfusion.BlockMask, got {type(mask).__name__}; see BlockMask.from_dense")
    (batch, heads, q_len, _), k_len = q.shape, k.shape[2]
    expected = (batch, heads, -(-q_len // mask.q_block), -(-k_len // mask.k_block))
    if tuple(mask.indices.shape) != expected:
        raise ValueError(
            f"mask must be [B, H, NQ, NK] = {list(expected)} for {q_len} queries and {k_len} keys in blocks of "
            f"{mask.block_size}, got {list(mask.indices.shape)}; predict it again for this call"
        )
    for side, known, length in (("q", mask.q_len, q_len), ("k", mask.k_len, k_len)):
        if known is not None and known != length:
            raise ValueError(f"mask was made for {side} of {known} tokens, got {length}; predict it again")
    if mask.indices.device != q.device:
        raise ValueError(f"mask must be on q's device {q.device}, got {mask.indices.device}; use mask.to(q.device)")


def _check_order(mask: BlockMask, call: Call, q_len: int, k_len: int) -> None:
    """The blocks of a mask are cut from tokens in some order: that of the call must be the same."""
    if mask.block_size != call.method.block_size:
        raise ValueError(
            f"mask must have blocks of block_size={call.method.block_size} tokens, got blocks of {mask.block_size}; "
            f"pass block_size={mask.block_size} to use it"
        )
    if mask.orders is None:
        return
    for side, known, spec in zip("qk", mask.orders, call.geometry.specs(call.method, q_len, k_len), strict=True):
        if known != spec.order:
            raise ValueError(
                f"mask was made for another order of {side}'s tokens: {known}; this call has {spec.order}. Pass the "
                "sparse_type, txt_len, latent_shape_*, video_spans, token_order and first_frame that it was predicted "
                "with, or predict it again"
            )
