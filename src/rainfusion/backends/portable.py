"""Block-sparse attention in plain torch operations, for any device that torch runs on.

Rows with the same number of key blocks form a group. A chunk of such rows is one batched product after another:

    gather the rows' key and value blocks -> logits = q @ k^T -> online softmax -> out += probs @ v

in pieces of a few key blocks, so the logits of a piece stay in the cache and no memory grows with the sequence. Only
a row's last block can be ragged or on the diagonal, since blocks are in ascending order; nothing else is masked unless
the caller gave a key mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.layout import TokenLayout
from rainfusion.slabs import WORKSPACE_BYTES, head_slabs

_PIECE_BLOCKS = 16  # key blocks at a time: 128 x 2048 logits of a row are 1 MB in fp32
_CPU_SLAB_BYTES = 16 * 2**20  # fewer heads at a time on a CPU: their copies stay in the cache


def why_not(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> str | None:
    """Runs everywhere."""
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    *,
    keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    is_causal: bool,
    inner_precise: int,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.attend`.

    Memory beyond inputs and outputs stays within `workspace_bytes`, or what one key head and its query heads need in
    fp32 if that is more: its k, v, q and output in block order, and one piece of one row.
    """
    batch, heads, q_len, head_dim = q.shape
    k_heads = k.shape[1]
    shared = heads // max(1, k_heads)  # query heads that share a key head
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
    compute = _compute_dtype(q, inner_precise)
    head_tokens = 2 * mask.num_k_blocks + 2 * shared * mask.num_q_blocks
    head_bytes = head_tokens * mask.block_size * head_dim * compute.itemsize
    slab_bytes = workspace_bytes // 2
    if q.device.type == "cpu":
        slab_bytes = min(slab_bytes, _CPU_SLAB_BYTES)
    for b in range(batch):  # never across batch elements: each one's result is its own to the last bit
        extra = _key_bias(mask, k_layout, keep, bias, b, k.device, compute)
        removed = None if keep is None or bool(keep[b].all()) else ~keep[b].unsqueeze(-1)  # [Sk, 1]
        for slab in head_slabs(k_heads, head_bytes, slab_bytes):
            q_slab = slice(slab.start * shared, slab.stop * shared)
            rows = _Rows(
                q=_blocks(q[b, q_slab], q_layout, compute),
                k=_blocks(k[b, slab], k_layout, compute, removed=removed),
                v=_blocks(v[b, slab], k_layout, compute, removed=removed),
                indices=mask.indices[b, q_slab],
                key_bias=extra,
                scale=scale,
            )
            counts = mask.counts[b, q_slab]
            if is_causal:
                counts = _causal_counts(counts, rows.indices)
            result, result_lse = _attend_rows(rows, counts, is_causal, workspace_bytes // 2)
            out[b, q_slab] = q_layout.restore(result.flatten(1, 2)[:, :q_len])
            lse[b, q_slab] = q_layout.restore(result_lse.flatten(1, 2)[:, :q_len].unsqueeze(-1)).squeeze(-1)
    return out, lse


class _Rows(NamedTuple):
    """One slab: heads of one batch element, cut into blocks (T tokens each), in block order."""

    q: Tensor  # [h, NQ, T, D]
    k: Tensor  # [hk, NK, T, D]
    v: Tensor
    indices: Tensor  # int32 [h, NQ, NK]
    key_bias: Tensor | None  # [NK, T], -inf for keys that do not count; None where all of them do, plainly
    scale: float


def _compute_dtype(q: Tensor, inner_precise: int) -> torch.dtype:
    """fp32 products for half-precision inputs; the inputs' own dtype where speed was asked for (softmax stays fp32)."""
    if inner_precise == 1 or q.dtype == torch.float64:
        return q.dtype
    return torch.float32


def _blocks(x: Tensor, layout: TokenLayout, dtype: torch.dtype, *, removed: Tensor | None = None) -> Tensor:
    """[h, S, D] in the caller's order -> [h, N, T, D] in block order, zero-padded. A view where nothing has to move."""
    x = layout.reorder(x).to(dtype)
    if removed is not None:
        x = x.masked_fill(layout.reorder(removed), 0.0)  # a removed key may hold anything, NaN too
    padding = -layout.seq_len % layout.block_size
    x = F.pad(x, (0, 0, 0, padding)) if padding else x.contiguous()
    return x.view(x.shape[0], layout.num_blocks, layout.block_size, x.shape[2])


def _key_bias(
    mask: BlockMask,
    layout: TokenLayout,
    keep: Tensor | None,
    bias: Tensor | None,
    b: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor | None:
    """What is added to the logits of each key, in block order: the caller's bias, -inf for removed keys and padding."""
    padding = -layout.seq_len % layout.block_size
    if keep is None and bias is None and padding == 0:
        return None
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(layout.seq_len, 1, dtype=dtype, device=device)
    if bias is not None:
        total += bias[b].unsqueeze(-1)
    if keep is not None:
        total.masked_fill_(~keep[b].unsqueeze(-1), -torch.inf)
    total = F.pad(layout.reorder(total), (0, 0, 0, padding), value=-torch.inf)
    return total.view(layout.num_blocks, layout.block_size)


def _causal_counts(counts: Tensor, indices: Tensor) -> Tensor:
    """Blocks that are wholly in the future are at the end of their row: leave them out."""
    rows, columns = indices.shape[1:]
    kept = torch.arange(columns, device=indices.device) < counts.unsqueeze(-1)
    past = indices <= torch.arange(rows, device=indices.device).unsqueeze(-1)
    return (kept & past).sum(-1)


def _attend_rows(rows: _Rows, counts: Tensor, is_causal: bool, workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """-> out [h, NQ, T, D], lse [h, NQ, T], both in block order."""
    heads, num_rows, size, head_dim = rows.q.shape
    out = torch.empty_like(rows.q, dtype=_softmax_dtype(rows.q))
    lse = torch.empty((heads, num_rows, size), dtype=out.dtype, device=out.device)
    queries = rows.q.flatten(0, 1)
    flat_out, flat_lse = out.flatten(0, 1), lse.flatten(0, 1)
    row_bytes = _PIECE_BLOCKS * size * (2 * size + 2 * head_dim) * 4
    at_once = max(1, workspace_bytes // row_bytes)
    if rows.q.device.type == "cpu":
        at_once = min(at_once, 2 * torch.get_num_threads())  # the working set stays in the cache
    for count, chunk in _chunks(counts.flatten().tolist(), at_once):
        chosen = torch.tensor(chunk, device=out.device)
        if count == 0:  # nothing to attend to
            flat_out.index_fill_(0, chosen, 0.0)
            flat_lse.index_fill_(0, chosen, -torch.inf)
            continue
        blocks = rows.indices.flatten(0, 1)[chosen, :count].long()  # [R, count]
        part, part_lse = _attend_chunk(rows, queries.index_select(0, chosen), chosen, blocks, is_causal)
        flat_out.index_copy_(0, chosen, part)
        flat_lse.index_copy_(0, chosen, part_lse)
    return out, lse


def _softmax_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(counts: list[int], at_once: int) -> Iterator[tuple[int, list[int]]]:
    """(number of blocks, rows with just that many), at most `at_once` rows together."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, count in enumerate(counts):
        groups[count].append(row)
    for count in sorted(groups):
        for start in range(0, len(groups[count]), at_once):
            yield count, groups[count][start : start + at_once]


def _attend_chunk(rows: _Rows, q: Tensor, chosen: Tensor, blocks: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """q [R, T, D], chosen [R] (row numbers in the slab), blocks [R, count] -> out [R, T, D], lse [R, T]."""
    heads, num_rows = rows.q.shape[:2]
    k_heads, num_blocks = rows.k.shape[:2]
    head = chosen // num_rows // (heads // k_heads)  # key head of each row
    where = head[:, None] * num_blocks + blocks  # in the flattened [hk * NK]
    row = chosen % num_rows
    wide = _softmax_dtype(q)
    # in half precision the scale would round q once more: there it goes to the logits
    q, logit_scale = (q.mul_(rows.scale), None) if q.dtype == wide else (q, rows.scale)
    total: Tensor | None = None
    for first in range(0, blocks.shape[1], _PIECE_BLOCKS):
        piece = slice(first, first + _PIECE_BLOCKS)
        logits = torch.bmm(q, _gathered(rows.k, where[:, piece]).mT)  # [R, T, n*T]
        if logit_scale is not None:
            logits = logits.to(wide).mul_(logit_scale)
        _mask_logits(logits, rows.key_bias, blocks[:, piece], row, is_causal)
        values = _gathered(rows.v, where[:, piece])
        if total is None:
            largest = logits.amax(-1, keepdim=True)
            probs = _exp_inplace(logits, largest)
            total = probs.sum(-1, keepdim=True)
            out = torch.bmm(probs.to(values.dtype), values).to(wide)
        else:
            before, largest = largest, torch.maximum(largest, logits.amax(-1, keepdim=True))
            decay = _exp_inplace(before, largest)
            probs = _exp_inplace(logits, largest)
            total = total * decay + probs.sum(-1, keepdim=True)
            out = out * decay + torch.bmm(probs.to(values.dtype), values)
    assert total is not None
    lse = torch.where(total == 0, -torch.inf, largest + total.log())
    # nothing to attend to: 0, not 0 / 0
    return out / total.masked_fill(total == 0, 1.0), lse.squeeze(-1)


def _exp_inplace(logits: Tensor, largest: Tensor) -> Tensor:
    """exp(logits - largest); a row that has seen only -inf so far gives 0, not NaN."""
    return logits.sub_(largest.masked_fill(largest == -torch.inf, 0.0)).exp_()


def _gathered(x: Tensor, where: Tensor) -> Tensor:
    """x [hk, NK, T, D], where [R, n] -> [R, n*T, D]. index_select over flat blocks runs at the speed of a copy."""
    size, head_dim = x.shape[2:]
    blocks = x.view(-1, size * head_dim).index_select(0, where.flatten())
    return blocks.view(where.shape[0], where.shape[1] * size, head_dim)


def _mask_logits(logits: Tensor, key_bias: Tensor | None, blocks: Tensor, row: Tensor, is_causal: bool) -> None:
    """Adds the keys' bias and cuts off the future, in place, in the columns that need it."""
    size = logits.shape[1]
    if key_bias is not None:
        touched = (key_bias != 0).any(-1)[blocks].any(0).nonzero()  # positions where some row has such a block
        if len(touched):
            start = int(touched[0])
            logits[:, :, start * size :] += key_bias[blocks[:, start:]].flatten(1).unsqueeze(1)
    if is_causal:
        # [R, 1]: only a row's last block can be the diagonal one
        diagonal = (blocks[:, -1] == row)[:, None, None]
        token = torch.arange(size, device=logits.device)
        logits[:, :, -size:].masked_fill_(diagonal & (token > token[:, None]), -torch.inf)
