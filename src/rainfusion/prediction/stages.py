"""The stages of a prediction in plain torch operations, for backends that have no kernels of their own for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rainfusion.backends.protocol import Keys, Request
from rainfusion.blockmask import BlockMask, index_dtype
from rainfusion.prediction import budgets as budget_table
from rainfusion.prediction import spread
from rainfusion.prediction.pooling import block_means, live_blocks, present
from rainfusion.prediction.predictors import antidiagonal_mass, mean_scores, part_errors, part_mass
from rainfusion.prediction.selection import keep_best, keep_mass
from rainfusion.slabs import head_slabs

_SELECTION_BYTES = 64 * 2**20
_RANKING_BYTES = 64  # for each score: a sort with int64 indices, and packing its result


def prepare(request: Request) -> Keys:
    """Nothing is copied: keys are reordered a few heads at a time, where they are attended."""
    return Keys(request.k, request.v, length=request.k.shape[2])


def scores(request: Request, keys: Keys | None) -> Tensor:
    """fp32 [B, H, NQ, NK]: rf_v2's from means of blocks or of their parts, ada_bsa's from samples of the logits."""
    if request.method.strategy == "ada_bsa":
        return antidiagonal_mass(request.q, request.k, request.scale, request.keep, request.is_causal)
    shard, found = request.shard, _rf_v2_scores(request)
    return found if shard is None else found.index_select(2, shard.blocks)


def _rf_v2_scores(request: Request) -> Tensor:
    """With a shard: of the whole sequence, in whose places its means are."""
    q, k, keep, shard = request.q, request.k, request.keep, request.shard
    q_layout, k_layout, method = request.q_layout, request.k_layout, request.method
    q_parts, k_parts = method.q_parts, method.k_parts
    q_means, k_means = block_means(q, q_layout, None, q_parts), block_means(k, k_layout, keep, k_parts)
    dtype = spread.means_dtype(method, q.dtype)
    q_means, k_means = q_means.to(dtype).float(), k_means.to(dtype).float()
    q_means = q_means if shard is None else shard.in_place(q_means, q_parts)
    if q_parts == 1:
        live = None if keep is None else live_blocks(k_layout, keep)
        return mean_scores(q_means, k_means, request.scale, live)
    q_live = present(q_layout, q_parts, q.device)
    if shard is not None:
        q_live = shard.in_place(q_live[None, None, :, None].float(), q_parts).flatten() > 0
    k_live = present(k_layout, k_parts, k.device).expand(len(k), -1)
    k_live = k_live if keep is None else live_blocks(k_layout, keep, k_parts)
    rest = request.scale, q_live, k_live, q_parts, k_parts
    if not method.spreads:
        return part_mass(q_means, k_means, *rest)
    wide = None
    if method.compensate:
        wide = spread.widened(k_means.to(dtype), k_live)
        wide = wide._replace(means=wide.means.float())
    return part_errors(q_means, k_means, wide, spread.of_keys(k, k_layout, keep), *rest)


def choose(request: Request, keys: Keys | None) -> BlockMask:
    """`select` of `scores`."""
    return select(request, scores(request, keys), request.budgets, request.method.exact_budget)


def select(request: Request, scores: Tensor, budgets: tuple[int, ...] | Tensor, free_only: bool) -> BlockMask:
    """The best blocks of each row (rf_v2), or those that hold most of its mass (ada_bsa)."""
    method = request.method
    if method.strategy == "rf_v2":
        numbers = budgets if isinstance(budgets, Tensor) else budget_table.on_device(budgets, scores.device)
        numbers = numbers.expand(scores.shape[:2])

        def best(part: Tensor, b: int, slab: slice) -> Tensor:
            rows, columns = request.q_layout.protected, request.k_layout.protected
            return keep_best(part, numbers[b, slab], rows, columns, free_only)

        return _in_slabs(scores, best, method.block_size)
    live = None if request.keep is None else live_blocks(request.k_layout, request.keep)

    def heaviest(part: Tensor, b: int, slab: slice) -> Tensor:
        return keep_mass(
            part,
            method.mean_sparsity,
            method.cdf_threshold,
            keep_sink=method.keep_sink,
            keep_recent=method.keep_recent,
            is_causal=request.is_causal,
            live=None if live is None else live[b],
        )

    return _in_slabs(scores, heaviest, method.block_size)


def _in_slabs(
    scores: Tensor, select: Callable[[Tensor, int, slice], Tensor], block_size: int | tuple[int, int]
) -> BlockMask:
    """A few heads of a batch element at a time: ranking takes many times the memory of the scores themselves.

    scores [B, H, NQ, NK]; select: (some of them [h, NQ, NK], number of the element, which heads) -> bool
    """
    batch, heads, rows, columns = scores.shape
    counts = scores.new_empty((batch, heads, rows), dtype=torch.int32)
    indices = scores.new_empty(scores.shape, dtype=index_dtype(block_size, columns))
    for b in range(batch):
        for slab in head_slabs(heads, rows * columns * _RANKING_BYTES, _SELECTION_BYTES):
            part = BlockMask.from_dense(select(scores[b, slab], b, slab).unsqueeze(0), block_size)
            counts[b, slab], indices[b, slab] = part.counts[0], part.indices[0]
    return BlockMask(counts, indices, block_size)
