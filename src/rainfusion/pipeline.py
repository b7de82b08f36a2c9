"""The pipeline, on [B, H, S, D] tensors and checked options:

    q, k, v --layout--> reorder --> pool --> score --> select --> attend --> restore --> out

Backends reorder and restore on their way, so that a fast one can do it while it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rainfusion import backends
from rainfusion.backends import crossover, dense
from rainfusion.blockmask import BlockMask
from rainfusion.checks import Options
from rainfusion.layout import TokenLayout, cached_layout
from rainfusion.prediction import budgets, compensation, error_curves
from rainfusion.prediction.pooling import block_means, live_blocks, present
from rainfusion.prediction.predictors import antidiagonal_mass, mean_scores, part_mass
from rainfusion.prediction.selection import keep_best, keep_mass
from rainfusion.slabs import head_slabs

_SELECTION_BYTES = 64 * 2**20
_RANKING_BYTES = 64  # for each score: a sort with int64 indices, and packing its result


class Share(NamedTuple):
    """q holds some blocks of a longer sequence, ascending; the others are attended elsewhere."""

    blocks: Tensor  # int64 [NQ]: which
    of: int  # blocks in all

    def in_place(self, means: Tensor, parts: int) -> Tensor:
        """[B, H, NQ * parts, D] -> [B, H, of * parts, D].

        A product rounds a row as before only in its place among as many rows.
        """
        whole = means.new_zeros((*means.shape[:2], self.of, parts, means.shape[3]))
        return whole.index_copy_(2, self.blocks, means.unflatten(2, (-1, parts))).flatten(2, 3)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    mask: BlockMask | None,
    options: Options,
    runner: str,
    may_be_dense: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None, BlockMask | None]:
    """-> out, lse if asked for, and the mask that was used. keep bool [B, Sk], bias [B, Sk]: see `key_mask`.

    `may_be_dense`: where dense attention is faster, and only the output is wanted, it may run instead.
    """
    if may_be_dense and crossover.why_dense(runner, q, k, options) and dense.why_not(q, keep, bias, options) is None:
        return _strided_like(q, dense.attend(q, k, v, keep, bias, options)), None, None
    return attend_in(*layouts(q, k, options), q, k, v, keep, bias, mask, options, runner, return_lse)


def attend_in(
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    mask: BlockMask | None,
    options: Options,
    runner: str,
    return_lse: bool,
    share: Share | None = None,
) -> tuple[Tensor, Tensor | None, BlockMask | None]:
    """`attend` in layouts of the caller's own, always with `runner`; the options' layout arguments are not read."""
    if mask is None and options.strategy == "dense":
        options = options._replace(compensate=False)  # nothing is skipped
    if mask is not None:
        mask.check_values()
    elif options.target_error and not _empty(q, k):
        mask = _predict_for_error(q, k, v, keep, bias, options, q_layout, k_layout, runner)
    if options.compensate and runner not in backends.FUSED and not _empty(q, k):
        without = options._replace(compensate=False)
        out, lse, mask = attend_in(q_layout, k_layout, q, k, v, keep, bias, mask, without, runner, True, share)
        assert lse is not None and mask is not None
        weights = compensation.log_weights(k_layout, keep, bias, len(k), k.device)
        k_means, v_means = block_means(k, k_layout, keep), block_means(v, k_layout, keep)
        out, lse = compensation.add(q, out, lse, mask, k_means, v_means, weights, q_layout, options.scale)
        return out, lse if return_lse else None, mask
    numbers = _numbers(q, k, options, share) if mask is None else []
    if runner in backends.FUSED and not _empty(q, k):
        return backends.FUSED[runner].attend(
            q, k, v, mask, q_layout, k_layout, keep=keep, bias=bias, options=options, numbers=numbers,
            return_lse=return_lse,
        )  # fmt: skip
    runner = "portable" if runner in backends.FUSED else runner  # nothing to do, and it knows how
    if mask is None:
        mask = predict(q, k, keep, options, q_layout, k_layout, runner, share)
    out, lse = backends.BACKENDS[runner].attend(
        q, k, v, mask, q_layout, k_layout, keep=keep, bias=bias, scale=options.scale, is_causal=options.is_causal,
        inner_precise=options.inner_precise, return_lse=return_lse,
    )  # fmt: skip
    return out, lse, mask


def layouts(q: Tensor, k: Tensor, options: Options) -> tuple[TokenLayout, TokenLayout]:
    q_spec, k_spec = options.layout_specs(q.shape[2], k.shape[2])
    return cached_layout(q_spec, q.device), cached_layout(k_spec, k.device)


def predict(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    options: Options,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    runner: str,
    share: Share | None = None,
) -> BlockMask:
    """pool -> score -> select."""
    if options.strategy == "dense" or _empty(q, k):
        return full_mask(q, k, options)
    numbers = _numbers(q, k, options, share)
    if runner in backends.FUSED:
        return backends.FUSED[runner].predict(q, k, keep, options, numbers, q_layout, k_layout)
    if options.strategy == "rf_v2":
        scores = _scores(q, k, keep, options, q_layout, k_layout, share)
        number = budgets.on_device(numbers, q.device).expand(len(q), q.shape[1])
        return _select_best(scores, number, options.exact_budget, options.block_size, q_layout, k_layout)
    live = None if keep is None else live_blocks(k_layout, keep)
    scores = antidiagonal_mass(q, k, options.scale, keep, options.is_causal)

    def select(part: Tensor, b: int, slab: slice) -> Tensor:
        return keep_mass(
            part, options.sparsity, options.cdf_threshold, keep_sink=options.keep_sink,
            keep_recent=options.keep_recent, is_causal=options.is_causal, live=None if live is None else live[b],
        )  # fmt: skip

    return _select_in_slabs(scores, select, options.block_size)


def _numbers(q: Tensor, k: Tensor, options: Options, share: Share | None) -> list[int]:
    """Blocks that rf_v2 keeps in a row, for each head or for all; shares are of self-attention."""
    if options.strategy != "rf_v2":
        return []
    return budgets.numbers(options, q.shape[2] if share is None else k.shape[2], k.shape[2])


def _predict_for_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    options: Options,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    runner: str,
) -> BlockMask:
    """rf_v2's ranking, with budgets from a sample of dense rows."""
    scores = block_scores(q, k, keep, options, q_layout, k_layout, runner)
    curves = error_curves.curves(q, k, v, scores, keep, bias, options, q_layout, k_layout)
    number = budgets.for_error(curves, options.target_error)
    if runner in backends.FUSED:
        return backends.triton.keep_best(scores, number.flatten(), True, options.block_size, q_layout, k_layout)
    return _select_best(scores, number, True, options.block_size, q_layout, k_layout)


def block_scores(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    options: Options,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    runner: str,
) -> Tensor:
    """By which rf_v2 ranks, fp32 [B, H, NQ, NK]."""
    if runner in backends.FUSED:
        return backends.triton.scores(q, k, keep, options, q_layout, k_layout)
    return _scores(q, k, keep, options, q_layout, k_layout, None)


def _select_best(
    scores: Tensor, number: Tensor, free_only: bool, block_size: int, q_layout: TokenLayout, k_layout: TokenLayout
) -> BlockMask:
    """number int [B, H]"""

    def select(part: Tensor, b: int, slab: slice) -> Tensor:
        return keep_best(part, number[b, slab], q_layout.protected, k_layout.protected, free_only)

    return _select_in_slabs(scores, select, block_size)


def _scores(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    options: Options,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    share: Share | None,
) -> Tensor:
    """rf_v2's, from the means of blocks or of their parts."""
    parts = options.parts
    q_means, k_means = block_means(q, q_layout, None, parts), block_means(k, k_layout, keep, parts)
    q_means = q_means if share is None else share.in_place(q_means, parts)
    if parts == 1:
        live = None if keep is None else live_blocks(k_layout, keep)
        scores = mean_scores(q_means, k_means, options.scale, live)
    else:
        q_live = present(q_layout, parts, q.device)
        if share is not None:
            q_live = share.in_place(q_live[None, None, :, None].float(), parts).flatten() > 0
        k_live = present(k_layout, parts, k.device).expand(len(k), -1)
        k_live = k_live if keep is None else live_blocks(k_layout, keep, parts)
        scores = part_mass(q_means, k_means, options.scale, q_live, k_live, parts)
    return scores if share is None else scores.index_select(2, share.blocks)


def _strided_like(q: Tensor, out: Tensor) -> Tensor:
    """`out` in the strides that this op always has: compilers rely on them."""
    if out.stride() == torch.empty_like(q, device="meta").stride():
        return out
    return torch.empty_like(q).copy_(out)


def _empty(q: Tensor, k: Tensor) -> bool:
    return 0 in (*q.shape, *k.shape)


def _select_in_slabs(scores: Tensor, select: Callable[[Tensor, int, slice], Tensor], block_size: int) -> BlockMask:
    """A few heads of a batch element at a time: ranking takes many times the memory of the scores themselves.

    scores [B, H, NQ, NK]; select: (some of them [h, NQ, NK], number of the element, which heads) -> bool
    """
    batch, heads, rows, columns = scores.shape
    counts = scores.new_empty((batch, heads, rows), dtype=torch.int32)
    indices = scores.new_empty(scores.shape, dtype=torch.int32)
    for b in range(batch):
        for slab in head_slabs(heads, rows * columns * _RANKING_BYTES, _SELECTION_BYTES):
            part = BlockMask.from_dense(select(scores[b, slab], b, slab).unsqueeze(0), block_size)
            counts[b, slab], indices[b, slab] = part.counts[0], part.indices[0]
    return BlockMask(counts, indices, block_size)


def full_mask(q: Tensor, k: Tensor, options: Options) -> BlockMask:
    """Every block that may be seen."""
    batch, heads, q_len, _ = q.shape
    return BlockMask.full(
        batch, heads, q_len, k.shape[2],
        block_size=options.block_size, is_causal=options.is_causal, device=q.device,
    )  # fmt: skip
