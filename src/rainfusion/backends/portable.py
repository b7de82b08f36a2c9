"""Block-sparse attention in plain torch operations, for any device that torch runs on.

Rows with the same number of key blocks form a group. A chunk of its rows is one batched operation after another:

    gather the rows' key and value blocks -> logits = q @ k^T -> softmax -> probs @ v

in pieces of a few key blocks, merged by their log-sum-exp, so that the logits of a piece stay in the cache and no
memory grows with the sequence. Torch's softmax is one pass where max, exp and sum by hand are four, each of them with a
barrier between the threads. Blocks are in ascending order, so only the last of a row can be ragged or on the diagonal,
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

from rainfusion.backends.protocol import Keys, Request, Speed
from rainfusion.blockmask import BlockMask
from rainfusion.calls import Call, Shapes
from rainfusion.layout import TokenLayout
from rainfusion.prediction import compensation
from rainfusion.prediction.stages import choose, prepare, scores, select
from rainfusion.slabs import WORKSPACE_BYTES, head_slabs

__all__ = ["READS_BACK", "SPEEDS", "attend", "choose", "prepare", "scores", "select", "why_not"]

READS_BACK = True
# of two cores of a Zen 4 server, in fp32; see `crossover`
SPEEDS = {"cpu": {"native": Speed(165e9, 20e-6, 120e9, 10e9, 1e-3)}}

_PIECE_BLOCKS = 32  # key blocks at a time: 128 x 4096 logits of a row are 2 MB in fp32; 16 and 64 were slower
_CPU_SLAB_BYTES = 8 * 2**20  # a thread: fewer heads at a time on a CPU, so that their copies stay in the cache


def why_not(call: Call, shapes: Shapes) -> str | None:
    """Runs everywhere."""
    return None if call.method.precision == "native" else "has no quantised kernels"


def attend(request: Request, keys: Keys, mask: BlockMask) -> tuple[Tensor, Tensor | None]:
    """Attention over the kept blocks and, if asked for, over the means of the others."""
    if not request.method.compensate:
        return attend_kept(request, mask)
    out, lse = attend_kept(request._replace(return_lse=True), mask)
    assert lse is not None
    out, lse = compensation.add(request, mask, out, lse)
    return out, lse if request.return_lse else None


def attend_kept(
    request: Request, mask: BlockMask, workspace_bytes: int = WORKSPACE_BYTES
) -> tuple[Tensor, Tensor | None]:
    """Attention over the kept blocks.

    Memory beyond inputs and outputs stays within `workspace_bytes`, or what one key head and its query heads need if
    that is more: its k, v, q and output in block order, and one piece of one row. Torch's own attention gives no
    LSE, so asking for it may change last bits.
    """
    q, k, v, keep, bias = request[:5]
    q_layout, k_layout, is_causal = request.q_layout, request.k_layout, request.is_causal
    scale, return_lse = request.scale, request.return_lse
    batch, heads, q_len, _ = q.shape
    k_heads = k.shape[1]
    shared = request.gqa_ratio
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device) if return_lse else None
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    compute = _compute_dtype(q, request.method.inner_precise)
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
        key_bias = None
        if removed is not None or bias is not None or k_layout.seq_len % k_layout.block_size:
            kept, added = (None if x is None else x[b : b + 1] for x in (keep, bias))
            flat = compensation.key_bias(k_layout, kept, added, 1, k.device, wide)
            key_bias = flat.view(k_layout.num_blocks, k_layout.block_size)
        for k_slab in head_slabs(k_heads, head_bytes, _slab_bytes(q, workspace_bytes)):
            q_slab = slice(k_slab.start * shared, k_slab.stop * shared)
            slab = _Slab(
                q=_blocks(q[b, q_slab], q_layout, compute),
                k=_blocks(k[b, k_slab], k_layout, compute, removed),
                v=_blocks(v[b, k_slab], k_layout, compute, removed),
                counts=mask.counts[b, q_slab],
                indices=mask.indices[b, q_slab],
                key_bias=key_bias,
                may_be_empty=removed is not None or (is_causal and mask.q_block != mask.k_block),
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
    """Some heads of one batch element, in block order: in blocks of T queries, and of K keys."""

    q: Tensor  # [h, NQ, T, D]
    k: Tensor  # [hk, NK, K, D]
    v: Tensor
    counts: Tensor  # int32 [h, NQ]
    indices: Tensor  # int32 or int16 [h, NQ, NK]
    key_bias: Tensor | None  # [NK, K], -inf for keys that do not count; None where all of them do, plainly
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
    masked_from: list[int]  # G positions, 0 to n: the first block with a key bias

    def part(self, part: slice) -> _Group:
        return _Group(self.rows[part], self.blocks[part], self.where[part], self.masked_from[part])


class _Workspace(NamedTuple):
    """Scratch memory of a chunk, flat, used over and over: fresh memory would cost a page fault every 4 KB."""

    blocks: Tensor  # gathered keys, then values, in the products' dtype
    logits: Tensor  # in the softmax's
    probs: Tensor
    rows: int  # of a chunk

    @classmethod
    def allocate(cls, slab: _Slab, workspace_bytes: int) -> _Workspace:
        heads, num_rows, size, head_dim = slab.q.shape
        keys = min(_piece_blocks(slab), slab.k.shape[1]) * slab.k.shape[2]  # of a row, in a piece
        row_bytes = keys * (head_dim * slab.k.dtype.itemsize + 2 * size * slab.wide.itemsize)
        rows = min(heads * num_rows, max(1, workspace_bytes // max(1, row_bytes)))
        if slab.q.device.type == "cpu":
            rows = min(rows, 2 * torch.get_num_threads())  # what they touch stays in the caches
        logits, probs = (slab.q.new_empty(rows * size * keys, dtype=slab.wide) for _ in range(2))
        return cls(slab.k.new_empty(rows * keys * head_dim), logits, probs, rows)


def _piece_blocks(slab: _Slab) -> int:
    """As many keys in a piece, whatever the size of their blocks."""
    return _PIECE_BLOCKS * slab.q.shape[2] // slab.k.shape[2]


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
    queries = shared * mask.num_q_blocks * mask.q_block
    keys = 2 * mask.num_k_blocks * mask.k_block
    return ((keys + queries) * compute.itemsize + 2 * queries * wide.itemsize) * head_dim


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
    end = torch.arange(1, rows + 1, device=slab.indices.device).unsqueeze(-1) * slab.q.shape[2]
    past = slab.indices.int() * slab.k.shape[2] < end
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
        block_bytes = size * (2 * head_dim * slab.k.dtype.itemsize + slab.q.shape[2] * slab.wide.itemsize)
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
    k_heads, num_blocks, k_size = slab.k.shape[:3]
    shared = slab.q.shape[0] // k_heads
    bias = None if slab.key_bias is None else slab.key_bias.to(slab.q.dtype).view(1, 1, 1, -1)
    # should torch hold all logits of these rows
    at_once = max(1, workspace_bytes // (size * num_blocks * k_size * slab.wide.itemsize))
    parts = []
    for head, of_head in groupby(rows, key=lambda row: row // num_rows):
        numbers = [row % num_rows for row in of_head]
        k, v = (x[head // shared].view(1, 1, num_blocks * k_size, head_dim) for x in (slab.k, slab.v))
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
    return _Group(rows, blocks, k_head[:, None] * num_blocks + blocks, masked_from)


def _attend_by_hand(workspace: _Workspace, slab: _Slab, chunk: _Group) -> tuple[Tensor, Tensor | None]:
    """gather -> products -> softmax -> products, in pieces that fit the workspace."""
    q = slab.q.flatten(0, 1).index_select(0, chunk.rows)
    if q.dtype == slab.wide:
        q.mul_(slab.scale)  # in half precision that would round q once more: there the product is scaled
    count = chunk.blocks.shape[1]
    piece = _piece_blocks(slab)
    return_lse = slab.return_lse or count > piece  # pieces are merged by it
    masked_from = min(chunk.masked_from)
    out: Tensor | None = None
    lse: Tensor | None = None
    step = -(-count // -(-count // piece))  # pieces of one size, as far as possible
    for first in range(0, count, step):
        last = min(first + step, count)
        where = chunk.where[:, first:last]
        logits = _products(q, _gathered(slab.k, where, workspace), slab, workspace)  # [R, T, n*K]
        if masked_from < last:
            _add_key_bias(logits, slab.key_bias, chunk.blocks[:, first:last], max(0, masked_from - first))
        if slab.is_causal:
            _hide_future(logits, slab, chunk, first, last)
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
    """scale * q @ k^T: [R, T, D], [R, n*K, D] -> [R, T, n*K] in the softmax's dtype. A wide q is scaled already."""
    logits = _view(workspace.logits, (q.shape[0], q.shape[1], k.shape[1]))
    if q.dtype == slab.wide:
        return torch.bmm(q, k.mT, out=logits)
    # scaled before it is rounded to half precision, where it might not fit
    return logits.copy_(torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT, beta=0, alpha=slab.scale))


def _gathered(x: Tensor, where: Tensor, workspace: _Workspace) -> Tensor:
    """x [hk, NK, K, D], where [R, n] -> [R, n*K, D]. index_select over flat blocks runs at the speed of a copy."""
    size, head_dim = x.shape[2:]
    blocks = _view(workspace.blocks, (where.numel(), size * head_dim))
    torch.index_select(x.view(-1, size * head_dim), 0, where.flatten(), out=blocks)
    return blocks.view(where.shape[0], where.shape[1] * size, head_dim)


def _add_key_bias(logits: Tensor, key_bias: Tensor | None, blocks: Tensor, start: int) -> None:
    """logits [R, T, n*K], blocks [R, n]: in place, from the block at position `start` on."""
    assert key_bias is not None
    size = key_bias.shape[1]
    logits[:, :, start * size :] += key_bias[blocks[:, start:]].flatten(1).unsqueeze(1)


def _hide_future(logits: Tensor, slab: _Slab, chunk: _Group, first: int, last: int) -> None:
    """In place, in the blocks first ... last - 1 of each row: only blocks that reach past a row's first query are."""
    size, k_size = slab.q.shape[2], slab.k.shape[2]
    start = (chunk.rows % slab.q.shape[1] * size).unsqueeze(1)  # [R, 1]: the first query of each row
    blocks = chunk.blocks[:, first:last]
    reaching = int((blocks * k_size + k_size - 1 > start).sum(1).amax())  # ascending: they are the last ones
    if reaching == 0:
        return
    token = torch.arange(k_size, device=logits.device)
    key = (blocks[:, -reaching:, None] * k_size + token).flatten(1)  # [R, n*K]
    query = start + torch.arange(size, device=logits.device)  # [R, T]
    logits[:, :, -reaching * k_size :].masked_fill_(key.unsqueeze(1) > query.unsqueeze(2), -torch.inf)


def _log_sum_exp(largest: Tensor, probs: Tensor) -> Tensor:
    """The softmax's normaliser, from its result: the largest probability is exp(largest logit - lse)."""
    return (largest - probs.amax(-1, keepdim=True).log()).masked_fill(largest == -torch.inf, -torch.inf)


def _merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from the attention over each."""
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)  # neither set has a key: 0 * exp(-inf)
    return out.mul_((lse - finite).exp()).add_(part.mul_((part_lse - finite).exp())), total
