"""The specification: a row of blocks at a time, in fp32 (fp64 for fp64 inputs), for any device and small sizes."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.checks import Options
from rainfusion.layout import TokenLayout


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
) -> tuple[Tensor, Tensor | None]:
    """out[i] = sum_j softmax_j(scale * q_i . k_j + bias_j) v_j over the kept keys j of the kept blocks of i's row."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, q_len, _ = q.shape
    k_len, size = k.shape[2], mask.block_size
    shared = heads // max(1, k.shape[1])
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, q_len), -torch.inf, dtype=dtype, device=q.device)

    for b, h, row in product(range(batch), range(heads), range(mask.num_q_blocks)):
        count = int(mask.counts[b, h, row])
        blocks = mask.indices[b, h, row, :count].long()
        positions = (blocks[:, None] * size + torch.arange(size, device=q.device)).flatten()
        positions = positions[positions < k_len]
        keys = k_layout.order[positions]
        if keep is not None:
            kept = keep[b, keys]
            positions, keys = positions[kept], keys[kept]
        if len(keys) == 0:
            continue
        queries = q_layout.order[row * size : (row + 1) * size]
        key, value = k[b, h // shared, keys].to(dtype), v[b, h // shared, keys].to(dtype)
        logits = q[b, h, queries].to(dtype) @ key.T * scale  # [queries, keys]
        if bias is not None:
            logits = logits + bias[b, keys].to(dtype)
        if is_causal:
            rows = torch.arange(row * size, row * size + len(queries), device=q.device)
            logits = logits.masked_fill(positions > rows[:, None], -torch.inf)
        lse[b, h, queries] = logits.logsumexp(-1)
        probs = logits.softmax(-1).masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0)
        out[b, h, queries] = probs @ value
    return torch.empty_like(q).copy_(out), lse.float() if return_lse else None
