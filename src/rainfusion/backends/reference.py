"""The specification: a row of blocks at a time, in fp32 (fp64 for fp64 inputs), for any device and small sizes."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from rainfusion.backends.protocol import Keys, Request, Speed
from rainfusion.blockmask import BlockMask
from rainfusion.calls import Call, Shapes
from rainfusion.prediction import compensation
from rainfusion.prediction.stages import choose, prepare, scores, select

__all__ = ["READS_BACK", "SPEEDS", "attend", "choose", "prepare", "scores", "select", "why_not"]

READS_BACK = True
SPEEDS: dict[str, dict[str, Speed]] = {}  # it is for checking, whatever the time


def why_not(call: Call, shapes: Shapes) -> str | None:
    """Runs everywhere."""
    return None if call.method.precision == "native" else "has no quantised kernels"


def attend(request: Request, keys: Keys, mask: BlockMask) -> tuple[Tensor, Tensor | None]:
    """Attention over the kept blocks and, if asked for, over the means of the others."""
    out, lse = _attend_kept(request, mask)
    if request.method.compensate:
        out, lse = compensation.add(request, mask, out, lse)
    return out, lse if request.return_lse else None


def _attend_kept(request: Request, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """out[i] = sum_j softmax_j(scale * q_i . k_j + bias_j) v_j over the kept keys j of the kept blocks of i's row."""
    q, k, v, keep, bias = request[:5]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, q_len, _ = q.shape
    k_len, shared = k.shape[2], request.gqa_ratio
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, q_len), -torch.inf, dtype=dtype, device=q.device)

    for b, h, row in product(range(batch), range(heads), range(mask.num_q_blocks)):
        count = int(mask.counts[b, h, row])
        blocks = mask.indices[b, h, row, :count].long()
        positions = (blocks[:, None] * mask.k_block + torch.arange(mask.k_block, device=q.device)).flatten()
        positions = positions[positions < k_len]
        keys = request.k_layout.order[positions]
        if keep is not None:
            kept = keep[b, keys]
            positions, keys = positions[kept], keys[kept]
        if len(keys) == 0:
            continue
        first = row * mask.q_block
        queries = request.q_layout.order[first : first + mask.q_block]
        key, value = k[b, h // shared, keys].to(dtype), v[b, h // shared, keys].to(dtype)
        logits = q[b, h, queries].to(dtype) @ key.T * request.scale  # [queries, keys]
        if bias is not None:
            logits = logits + bias[b, keys].to(dtype)
        if request.is_causal:
            rows = torch.arange(first, first + len(queries), device=q.device)
            logits = logits.masked_fill(positions > rows[:, None], -torch.inf)
        lse[b, h, queries] = logits.logsumexp(-1)
        probs = logits.softmax(-1).masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0)
        out[b, h, queries] = probs @ value
    return torch.empty_like(q).copy_(out), lse.float()
