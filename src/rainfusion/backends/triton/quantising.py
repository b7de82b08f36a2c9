"""Keys and values in eight bits, for `triton` and for `hopper`: the passes before a quantised kernel.

k is smoothed by its mean over tokens and has one scale for each block, or for each head where blocks of keys are finer
than those of queries; v, where it is quantised at all, is smoothed likewise and has one for each channel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rainfusion.backends import triton
from rainfusion.backends.protocol import Keys, Request, Scales
from rainfusion.prediction import spread
from rainfusion.prediction.pooling import live_blocks
from rainfusion.replaying import launch

# what each type of eight bits reaches; the last is the one of AMD's MI300
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
_ALIGNED = 16  # bytes that are read at once


class Form(NamedTuple):
    """How a kernel wants keys and values."""

    k: torch.dtype
    v: torch.dtype  # of eight bits, or that of the inputs
    tile: int  # tokens of a block of queries, and keys that the kernel may have at once
    padded: int  # head dim
    permuted: bool  # keys of v, see `quantise_kernel`
    swizzled: bool = False  # channels of v, see there
    k_largest: float | None = None  # what keys reach, if not all that their type does


def form(request: Request) -> Form:
    """That of `triton`. With "int8" values are e4m3 too, but keep their type on GPUs that do not multiply e4m3."""
    q = request.q
    eight = torch.float8_e4m3fn if torch.version.hip is None else torch.float8_e4m3fnuz
    k_type = torch.int8 if request.method.precision == "int8" else eight
    v_type = eight if request.method.precision == "fp8" or triton.multiplies_e4m3(q) else q.dtype
    return Form(k_type, v_type, request.q_layout.block_size, padded(q.shape[3]), permuted(v_type))


def permuted(v_type: torch.dtype) -> bool:
    """Whether `triton` has the keys of such values permuted: as lanes of NVIDIA's GPUs want them."""
    return v_type == torch.float8_e4m3fn


def padded(head_dim: int) -> int:
    """Products of eight bits are over 32 channels or more."""
    return max(32, 1 << (head_dim - 1).bit_length())


def shift(v_type: torch.dtype) -> int:
    """The power of two that the weights of values reach: as far as their type does; 0 if it is not of eight bits."""
    return math.floor(math.log2(LARGEST.get(v_type, 1.0)))


def prepare(request: Request, form: Form, turns: Tensor | None = None) -> Keys:
    """What `triton.prepare` does, in eight bits: one pass for statistics, a small one, and one that quantises."""
    from rainfusion.backends.triton.kernels import quantise

    k, v, padded = triton.whole_rows(request.k), triton.whole_rows(request.v), form.padded
    layout, keep = request.k_layout, request.keep
    batch, heads, length, head_dim = k.shape
    blocks, size = layout.num_blocks, layout.block_size
    width = math.ceil(head_dim / _ALIGNED) * _ALIGNED
    pieces = form.tile // size  # blocks to a tile
    k_largest = form.k_largest or LARGEST[form.k]
    key_bias = None if keep is None else triton.key_bias(layout, keep, request.bias)
    stand_ins, parts = request.method.compensate, triton.pooled_parts(request)
    weights = triton.stand_in_weights(request, key_bias, form.tile) if stand_ins else None
    spare = triton.stand_in_blocks(weights, size)
    flags = None if keep is None else triton.as_bytes(keep)
    sizes = dict(UNIT=triton.row_unit(k), D=head_dim, D_PAD=padded, HAS_KEEP=keep is not None)
    ordered = dict(HAS_ORDER=not layout.is_identity)
    strides = (*triton.row_strides(k, v), heads, length)
    spreads = triton.new_spreads(request)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return k.new_empty((batch, heads, *shape), dtype=dtype)

    dtype = spread.means_dtype(request.method, k.dtype)
    means = v_means = None
    if parts == 1 or stand_ins:
        means = new(blocks, head_dim, dtype=dtype if parts == 1 else k.dtype)
        v_means = torch.empty_like(means) if stand_ins else None
    # where nothing is asked of blocks, tokens are counted in pieces that one warp sums by itself
    by_block = means is not None or spreads is not None
    counted, warps = (size, triton.block_warps(k, size)) if by_block else (min(size, 4096 // padded), 1)
    number = math.ceil(length / counted)
    each = _together(number)
    groups = math.ceil(number / each)
    numbers, k_sums, k_mean = new(groups), new(groups, head_dim), new(head_dim)
    k_bounds = None if pieces == 1 else new(groups, 2, head_dim)
    v_sums = v_largest = v_scale = None
    if form.v in LARGEST:
        v_sums, v_largest, v_scale = new(groups, head_dim), new(groups, head_dim), new(2, head_dim)
    k_scale = new(blocks + spare if pieces == 1 else 1)
    k_out = new((blocks + spare) * size, width, dtype=form.k)
    v_shape = k_out.shape[2:] if v_scale is None else ((blocks + spare) * padded, size)
    v_out = new(*v_shape, dtype=form.v)
    launch(
        quantise.statistics_kernel, batch * heads * groups,
        k, v, layout.order, flags, numbers, k_sums, v_sums, v_largest, k_bounds, means, v_means, spreads,
        *strides, number, each,
        **sizes, **ordered, KEYS=counted, num_warps=warps,
    )  # fmt: skip
    launch(
        quantise.channels_kernel, batch * heads,
        numbers, k_sums, v_sums, v_largest, k_bounds, k_mean, k_scale, v_scale, turns, groups,
        D=head_dim, D_PAD=padded, ROWS=4096 // padded, K_LARGEST=k_largest, V_LARGEST=LARGEST.get(form.v),
        num_warps=8,
    )  # fmt: skip
    found = (k_mean, v_scale, k_out, v_out, k_scale)
    apart = pieces == 1 or form.k != torch.int8  # else values show what is not finite in keys
    total = dict(
        ALL=blocks + spare, WIDTH=width, BLOCK=form.tile, KEYS=size, LARGEST=k_largest, PERMUTED=form.permuted,
        SWIZZLED=form.swizzled, APART=apart, num_warps=4 * triton.row_warps(k),
    )  # fmt: skip
    sides = 2 if apart else 1
    launch(
        quantise.quantise_kernel, batch * heads * math.ceil(blocks / pieces) * sides,
        k, v, layout.order, flags, *found, *strides, blocks, FIRST=0, **total, **sizes, **ordered,
    )  # fmt: skip
    if means is not None and v_means is not None:  # as blocks of keys and values after the others
        live = None if keep is None else triton.as_bytes(live_blocks(layout, keep))
        launch(
            quantise.quantise_kernel, batch * heads * (spare // pieces) * sides,
            means, v_means, layout.order, live, *found, *triton.row_strides(means, v_means),
            heads, blocks, spare, FIRST=blocks, **total, **dict(sizes, UNIT=triton.row_unit(means)), HAS_ORDER=False,
        )  # fmt: skip
    if parts > 1:
        means = triton.block_means(k, layout, keep, parts, dtype)
    elif parts == 0:
        means = None
    return Keys(k_out, v_out, means, key_bias, length, weights, Scales(k_scale, v_scale, k_mean), spreads, turns)


def _together(blocks: int) -> int:
    """How many blocks of a head, which has so many, a program of `statistics_kernel` counts: several of a long one.

    Fewer leave more sums for `channels_kernel` to read, more leave multiprocessors without a program. Whatever the
    batch and the heads beside it, so that a head's sums have the same bits alone.
    """
    return 8 if blocks >= 2048 else max(1, min(4, blocks // 32))
