"""Block-sparse attention in plain torch operations, for any device that torch runs on.

Rows with the same number of key blocks form a group. A chunk of its rows is one batched operation after another:

    gather the rows' key and value blocks -> logits = q @ k^T -> softmax -> probs @ v

in pieces of a few key blocks, merged by their log-sum-exp, so that the logits of a piece stay in the cache and no
memory grows with the sequence. Torch's softmax is one pass where max, exp and sum by hand are four, each of them with a
barrier between the threads. Blocks are in ascending order, so only a row's last one can be ragged or on the diagonal,
and nothing else is masked unless the caller gave a key mask. Rows that keep every block need no gathering and go to
torch's own attention; on a GPU it also attends the gathered rows, where no LSE is asked for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.checks import Options
from rainfusion.layout import TokenLayout
from rainfusion.slabs import WORKSPACE_BYTES, head_slabs

_PIECE_BLOCKS = 32  # key blocks at a time: 128 x 4096 logits of a row are 2 MB in fp32; 16 and 64 were slower
_CPU_SLAB_BYTES = 8 * 2**20  # a thread: fewer heads at a time on a CPU, so that their copies stay in the cache


def why_not(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, options: Options | None = None, precision: str = "native"
) -> str | None:
    """Runs everywhere."""
    return None if precision == "native" else "has no quantised kernels"


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
    return_lse: bool,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Same contract as `reference.attend`.

    Memory beyond inputs and outputs stays within `workspace_bytes`, or what one key head and its query heads need if
    that is more: its k, v, q and output in block order, and one piece of one row. Torch's own attention gives no
    LSE, so asking for it may change last bits.
    """
    batch, heads, q_len, _ = q.shape
    k_heads = k.shape[1]
    shared = heads // max(1, k_heads)  # query heads that share a key head
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device) if return_lse else None
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    compute = _compute_dtype(q, inner_precise)
    fused = not (is_causal or return_lse) and scale > 0  # what torch's own attention can do, and does right
    if q.device.type != "cpu":
        # it would round a bias to half precision; without one it is exact enough, and the fastest there is
        fused = fused and (bias is None or q.dtype == wide)
        compute = q.dtype if fused else compute
    worker: _Worker | None = None
    head_bytes = _head_bytes(mask, q.shape[3], shared, compute, wide)
    for b in range(batch):  # never across batch elements: each one's result is its own to the last bit
        removed = None if keep is None or bool(keep[b].all()) else ~keep[b].unsqueeze(-1)  # [Sk, 1]
        if removed is not None and bool(removed.all()):
            out[b] = 0.0
            if lse is not None:
                lse[b] = -torch.inf
            continue
        key_bias = _key_bias(k_layout, removed, None if bias is None else bias[b], k.device, wide)
        for k_slab in head_slabs(k_heads, head_bytes, _slab_bytes(q, workspace_bytes)):
            q_slab = slice(k_slab.start * shared, k_slab.stop * shared)
            slab = _Slab(
                q=_blocks(q[b, q_slab], q_layout, compute),
                k=_blocks(k[b, k_slab], k_layout, compute, removed),
                v=_blocks(v[b, k_slab], k_layout, compute, removed),
                counts=mask.counts[b, q_slab],
                indices=mask.indices[b, q_slab],
                key_bias=key_bias,
                may_be_empty=removed is not None,
                scale=scale,
                is_causal=is_causal,
                return_lse=return_lse,
                fused=fused,
                wide=wide,
            )
            worker = worker or _worker(slab, workspace_bytes // 2)  # the first slab is the largest
            result, result_lse = _attend_slab(slab, worker, workspace_bytes // 2)
            out[b, q_slab] = q_layout.restore(result.flatten(1, 2)[:, :q_len])
            if lse is not None and result_lse is not None:
                lse[b, q_slab] = q_layout.restore(result_lse.flatten(1, 2)[:, :q_len]).squeeze(-1)
    return out, lse


class _Slab(NamedTuple):
    """Some heads of one batch element, cut into blocks of T tokens, in block order."""

    q: Tensor  # [h, NQ, T, D]
    k: Tensor  # [hk, NK, T, D]
    v: Tensor
    counts: Tensor  # int32 [h, NQ]
    indices: Tensor  # int32 [h, NQ, NK]
    key_bias: Tensor | None  # [NK, T], -inf for keys that do not count; None where all of them do, plainly
    may_be_empty: bool  # a block may have no key left
    scale: float
    is_causal: bool
    return_lse: bool
    fused: bool  # torch's own attention may be used
    wide: torch.dtype  # of softmax and sums


class _Group(NamedTuple):
    """Rows of a slab with the same number n of key blocks."""

    rows: Tensor  # [G] numbers of the rows, counted over all heads of the slab
    blocks: Tensor  # [G, n] their key blocks
    where: Tensor  # [G, n] the same, counted over all key heads of the slab
    diagonal: Tensor  # bool [G]: whether the last of them is the row's own, in causal attention
    masked_from: list[int]  # G positions, 0 to n: the first block with a key bias

    def part(self, part: slice) -> _Group:
        return _Group(self.rows[part], self.blocks[part], self.where[part], self.diagonal[part], self.masked_from[part])


class _Workspace(NamedTuple):
    """Scratch memory of a chunk, flat, used over and over: fresh memory would cost a page fault every 4 KB."""

    blocks: Tensor  # gathered keys, then values, in the products' dtype
    logits: Tensor  # in the softmax's
    probs: Tensor
    rows: int  # of a chunk

    @classmethod
    def allocate(cls, slab: _Slab, workspace_bytes: int) -> _Workspace:
        heads, num_rows, size, head_dim = slab.q.shape
        keys = min(_PIECE_BLOCKS, slab.k.shape[1]) * size  # of a row, in a piece
        row_bytes = keys * (head_dim * slab.k.dtype.itemsize + 2 * size * slab.wide.itemsize)
        rows = min(heads * num_rows, max(1, workspace_bytes // max(1, row_bytes)))
        if slab.q.device.type == "cpu":
            rows = min(rows, 2 * torch.get_num_threads())  # what they touch stays in the caches
        logits, probs = (slab.q.new_empty(rows * size * keys, dtype=slab.wide) for _ in range(2))
        return cls(slab.k.new_empty(rows * keys * head_dim), logits, probs, rows)


class _Worker(NamedTuple):
    """Who attends a chunk of rows, and how many rows with so many blocks fit at once."""

    attend: Callable[[_Slab, _Group], tuple[Tensor, Tensor | None]]  # -> out [G, T, D], lse [G, T, 1] or None
    rows: Callable[[int], int]


def _compute_dtype(q: Tensor, inner_precise: int) -> torch.dtype:
    """fp32 products for half-precision inputs, or their own dtype where speed was asked for (softmax stays fp32).

    On a CPU fp32 is the fast one: fp16 products took 20 times as long on an AVX-512 machine, bf16 gained little.
    """
    if q.dtype == torch.float64 or (inner_precise == 1 and q.device.type != "cpu"):
        return q.dtype
    return torch.float32


def _head_bytes(mask: BlockMask, head_dim: int, shared: int, compute: torch.dtype, wide: torch.dtype) -> int:
    """k, v, and for each query head q and the output, twice: rows that keep everything, and restored to their order."""
    inputs = 2 * mask.num_k_blocks + shared * mask.num_q_blocks
    outputs = 2 * shared * mask.num_q_blocks
    return (inputs * compute.itemsize + outputs * wide.itemsize) * mask.block_size * head_dim


def _slab_bytes(q: Tensor, workspace_bytes: int) -> int:
    half = workspace_bytes // 2  # the other half is for the pieces
    return min(half, _CPU_SLAB_BYTES * torch.get_num_threads()) if q.device.type == "cpu" else half


def _blocks(x: Tensor, layout: TokenLayout, dtype: torch.dtype, removed: Tensor | None = None) -> Tensor:
    """[h, S, D] in the caller's order -> [h, N, T, D] in block order, zero-padded. A view where nothing has to move."""
    x = layout.reorder(x).to(dtype)
    if removed is not None:
        x = x.masked_fill(layout.reorder(removed), 0.0)  # a removed key may hold anything, NaN too
    padding = -layout.seq_len % layout.block_size
    x = F.pad(x, (0, 0, 0, padding)) if padding else x.contiguous()
    return x.view(x.shape[0], layout.num_blocks, layout.block_size, x.shape[2])


def _key_bias(
    layout: TokenLayout, removed: Tensor | None, bias: Tensor | None, device: torch.device, wide: torch.dtype
) -> Tensor | None:
    """What is added to the logits of each key, in block order: the caller's bias, -inf for removed keys and padding.

    removed bool [Sk, 1], bias [Sk] -> [NK, T]
    """
    padding = -layout.seq_len % layout.block_size
    if removed is None and bias is None and padding == 0:
        return None
    total = torch.zeros(layout.seq_len, 1, dtype=wide, device=device)
    if bias is not None:
        total += bias.to(wide).unsqueeze(-1)
    if removed is not None:
        total.masked_fill_(removed, -torch.inf)
    total = F.pad(layout.reorder(total), (0, 0, 0, padding), value=-torch.inf)
    return total.view(layout.num_blocks, layout.block_size)


def _attend_slab(slab: _Slab, worker: _Worker, workspace_bytes: int) -> tuple[Tensor, Tensor | None]:
    """-> out [h, NQ, T, D], lse [h, NQ, T, 1] or None, both in block order."""
    heads, num_rows, size, head_dim = slab.q.shape
    counts = _causal_counts(slab) if slab.is_causal else slab.counts
    out = torch.empty((heads * num_rows, size, head_dim), dtype=slab.wide, device=slab.q.device)
    lse = torch.empty((heads * num_rows, size, 1), dtype=slab.wide, device=slab.q.device) if slab.return_lse else None
    for count, rows in _rows_by_count(counts.flatten().tolist()):
        chosen = torch.tensor(rows, device=out.device)
        if count == 0:  # nothing to attend to
            out.index_fill_(0, chosen, 0.0)
            if lse is not None:
                lse.index_fill_(0, chosen, -torch.inf)
        elif slab.fused and count == slab.k.shape[1]:
            out.index_copy_(0, chosen, _attend_full(slab, rows, workspace_bytes))
        else:
            group = _group(slab, chosen, count)
            rows_at_once = worker.rows(count)
            for start in range(0, len(rows), rows_at_once):
                chunk = group.part(slice(start, start + rows_at_once))
                part, part_lse = worker.attend(slab, chunk)
                last = min(start + rows_at_once, len(rows)) - 1
                if rows[last] - rows[start] == last - start:  # a slice takes a third of index_copy_'s time
                    out[rows[start] : rows[last] + 1] = part
                else:
                    out.index_copy_(0, chunk.rows, part)
                if lse is not None and part_lse is not None:
                    lse.index_copy_(0, chunk.rows, part_lse)
    return out.view(slab.q.shape), None if lse is None else lse.view(heads, num_rows, size, 1)


def _causal_counts(slab: _Slab) -> Tensor:
    """Blocks that are wholly in the future are at the end of their row: leave them out."""
    rows, columns = slab.indices.shape[1:]
    kept = torch.arange(columns, device=slab.indices.device) < slab.counts.unsqueeze(-1)
    past = slab.indices <= torch.arange(rows, device=slab.indices.device).unsqueeze(-1)
    return (kept & past).sum(-1)


def _rows_by_count(counts: list[int]) -> list[tuple[int, list[int]]]:
    """(number of blocks, the rows with just that many), ascending."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, count in enumerate(counts):
        groups[count].append(row)
    return sorted(groups.items())


def _worker(slab: _Slab, workspace_bytes: int) -> _Worker:
    """On a CPU by hand, which is faster there and gives the LSE; elsewhere by torch's own kernels where they can."""
    if slab.fused and slab.q.device.type != "cpu":
        size, head_dim = slab.k.shape[2:]
        # keys and values of a block, and its logits should torch hold them
        block_bytes = size * (2 * head_dim * slab.k.dtype.itemsize + size * slab.wide.itemsize)
        return _Worker(_attend_gathered, lambda count: max(1, workspace_bytes // (count * block_bytes)))
    workspace = _Workspace.allocate(slab, workspace_bytes)
    return _Worker(partial(_attend_by_hand, workspace), lambda count: workspace.rows)


def _attend_gathered(slab: _Slab, chunk: _Group) -> tuple[Tensor, None]:
    """Each row is an attention of its own to torch, over its gathered keys."""
    rows, count = chunk.blocks.shape
    size, head_dim = slab.k.shape[2:]
    q = slab.q.flatten(0, 1).index_select(0, chunk.rows).unsqueeze(1)  # [G, 1, T, D]
    where = chunk.where.flatten()
    k, v = (x.flatten(0, 1).index_select(0, where).view(rows, 1, count * size, head_dim) for x in (slab.k, slab.v))
    bias = None
    if slab.key_bias is not None and min(chunk.masked_from) < count:
        bias = slab.key_bias[chunk.blocks].view(rows, 1, 1, count * size)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=None if bias is None else bias.to(q.dtype), scale=slab.scale
    ).to(slab.wide)
    if slab.may_be_empty and bias is not None:
        out = out.masked_fill((bias == -torch.inf).all(-1, keepdim=True), 0.0)
    return out.squeeze(1), None


def _attend_full(slab: _Slab, rows: list[int], workspace_bytes: int) -> Tensor:
    """Rows that keep every block, protected ones above all, by torch's own attention -> out [G, T, D]."""
    num_rows, size, head_dim = slab.q.shape[1:]
    k_heads, num_blocks = slab.k.shape[:2]
    shared = slab.q.shape[0] // k_heads
    bias = None if slab.key_bias is None else slab.key_bias.to(slab.q.dtype).view(1, 1, 1, -1)
    # should torch hold all logits of these rows
    at_once = max(1, workspace_bytes // (size * num_blocks * size * slab.wide.itemsize))
    parts = []
    for head, of_head in groupby(rows, key=lambda row: row // num_rows):
        numbers = [row % num_rows for row in of_head]
        k, v = (x[head // shared].view(1, 1, num_blocks * size, head_dim) for x in (slab.k, slab.v))
        for start in range(0, len(numbers), at_once):
            chosen = torch.tensor(numbers[start : start + at_once], device=slab.q.device)
            q = slab.q[head].index_select(0, chosen).view(1, 1, -1, head_dim)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=slab.scale)
            parts.append(out.view(-1, size, head_dim))
    return torch.cat(parts).to(slab.wide)


def _group(slab: _Slab, rows: Tensor, count: int) -> _Group:
    heads, num_rows = slab.q.shape[:2]
    k_heads, num_blocks = slab.k.shape[:2]
    blocks = slab.indices.flatten(0, 1).index_select(0, rows)[:, :count].long()
    k_head = rows // num_rows // (heads // k_heads)
    masked_from = [count] * len(rows)
    if slab.key_bias is not None:
        masked = (slab.key_bias != 0).any(-1)[blocks]  # [G, n]
        position = torch.arange(count, device=blocks.device).expand(masked.shape)
        masked_from = position.where(masked, count).amin(1).tolist()
    return _Group(rows, blocks, k_head[:, None] * num_blocks + blocks, blocks[:, -1] == rows % num_rows, masked_from)


def _attend_by_hand(workspace: _Workspace, slab: _Slab, chunk: _Group) -> tuple[Tensor, Tensor | None]:
    """gather -> products -> softmax -> products, in pieces that fit the workspace."""
    q = slab.q.flatten(0, 1).index_select(0, chunk.rows)
    if q.dtype == slab.wide:
        q.mul_(slab.scale)  # in half precision that would round q once more: there the product is scaled
    count = chunk.blocks.shape[1]
    return_lse = slab.return_lse or count > _PIECE_BLOCKS  # pieces are merged by it
    masked_from = min(chunk.masked_from)
    out: Tensor | None = None
    lse: Tensor | None = None
    step = -(-count // -(-count // _PIECE_BLOCKS))  # pieces of one size, as far as possible
    for first in range(0, count, step):
        last = min(first + step, count)
        where = chunk.where[:, first:last]
        logits = _products(q, _gathered(slab.k, where, workspace), slab, workspace)  # [R, T, n*T]
        if masked_from < last:
            _add_key_bias(logits, slab.key_bias, chunk.blocks[:, first:last], max(0, masked_from - first))
        if slab.is_causal and last == count:
            _hide_future(logits, chunk.diagonal)
        largest = logits.amax(-1, keepdim=True) if return_lse or slab.may_be_empty else None
        probs = torch.softmax(logits, -1, out=_view(workspace.probs, logits.shape))
        part = torch.bmm(probs.to(slab.v.dtype), _gathered(slab.v, where, workspace)).to(slab.wide)
        if slab.may_be_empty and largest is not None:
            part.masked_fill_(largest == -torch.inf, 0.0)  # a row of -inf only: 0, not NaN
        part_lse = _log_sum_exp(largest, probs) if return_lse and largest is not None else None
        if out is None or lse is None or part_lse is None:
            out, lse = part, part_lse
        else:
            out, lse = _merged(out, lse, part, part_lse)
    assert out is not None
    return out, lse


def _view(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    return buffer[: math.prod(shape)].view(*shape)


def _products(q: Tensor, k: Tensor, slab: _Slab, workspace: _Workspace) -> Tensor:
    """scale * q @ k^T: [R, T, D], [R, n*T, D] -> [R, T, n*T] in the softmax's dtype. A wide q is scaled already."""
    logits = _view(workspace.logits, (q.shape[0], q.shape[1], k.shape[1]))
    if q.dtype == slab.wide:
        return torch.bmm(q, k.mT, out=logits)
    # scaled before it is rounded to half precision, where it might not fit
    return logits.copy_(torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT, beta=0, alpha=slab.scale))


def _gathered(x: Tensor, where: Tensor, workspace: _Workspace) -> Tensor:
    """x [hk, NK, T, D], where [R, n] -> [R, n*T, D]. index_select over flat blocks runs at the speed of a copy."""
    size, head_dim = x.shape[2:]
    blocks = _view(workspace.blocks, (where.numel(), size * head_dim))
    torch.index_select(x.view(-1, size * head_dim), 0, where.flatten(), out=blocks)
    return blocks.view(where.shape[0], where.shape[1] * size, head_dim)


def _add_key_bias(logits: Tensor, key_bias: Tensor | None, blocks: Tensor, start: int) -> None:
    """logits [R, T, n*T], blocks [R, n]: in place, from the block at position `start` on."""
    assert key_bias is not None
    size = logits.shape[1]
    logits[:, :, start * size :] += key_bias[blocks[:, start:]].flatten(1).unsqueeze(1)


def _hide_future(logits: Tensor, diagonal: Tensor) -> None:
    """In place, in the last block of the rows where it is the diagonal one: diagonal bool [R]."""
    size = logits.shape[1]
    token = torch.arange(size, device=logits.device)
    future = token > token[:, None]
    logits[:, :, -size:].masked_fill_(diagonal[:, None, None] & future, -torch.inf)


def _log_sum_exp(largest: Tensor, probs: Tensor) -> Tensor:
    """The softmax's normaliser, from its result: the largest probability is exp(largest logit - lse)."""
    return (largest - probs.amax(-1, keepdim=True).log()).masked_fill(largest == -torch.inf, -torch.inf)


def _merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from the attention over each."""
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)  # neither set has a key: 0 * exp(-inf)
    return out.mul_((lse - finite).exp()).add_(part.mul_((part_lse - finite).exp())), total
