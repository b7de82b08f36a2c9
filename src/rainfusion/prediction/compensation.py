"""Skipped blocks through their means: what they would have added to the softmax, approximately.

    weight of a skipped block j for query i = n_j exp(scale * q_i . mean_k[j])      n_j: its keys
    out_i = (sum over kept keys + sum over skipped blocks of weight * mean_v[j]) / (sum of all weights)

Attention over the kept blocks is done already: its log-sum-exp says how much it weighs. A key's bias counts in n_j, as
exp(bias), and not in the means.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.layout import TokenLayout
from rainfusion.slabs import head_slabs

_SLAB_BYTES = 64 * 2**20


def log_weights(
    layout: TokenLayout, keep: Tensor | None, bias: Tensor | None, batch: int, device: torch.device
) -> Tensor:
    """fp32 [B, NK]: log of the number of keys in each block; -inf for a block with none left."""
    blocks: Tensor = key_bias(layout, keep, bias, batch, device).unflatten(1, (-1, layout.block_size))
    return blocks.logsumexp(2)


def key_bias(layout: TokenLayout, keep: Tensor | None, bias: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """fp32 [B, NK * block_size] in block order: -inf for keys that were removed, and behind the last one."""
    total = torch.zeros((batch, layout.seq_len), dtype=torch.float32, device=device) if bias is None else bias.float()
    if keep is not None:
        total = total.masked_fill(~keep, -torch.inf)
    total = total if layout.is_identity else total.index_select(1, layout.order)
    padding = layout.num_blocks * layout.block_size - layout.seq_len
    return F.pad(total, (0, padding), value=-torch.inf)


def add(
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BlockMask,
    k_means: Tensor,
    v_means: Tensor,
    weights: Tensor,
    q_layout: TokenLayout,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out and lse over the kept blocks -> with the skipped ones.

    q, out [B, H, Sq, D], lse fp32 [B, H, Sq], all in the caller's order; means fp32 [B, Hk, NK, D]; weights [B, NK]
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, q_len, _ = q.shape
    shared = heads // max(1, k_means.shape[1])
    block = torch.empty(q_len, dtype=torch.int64, device=q.device)  # of each query
    block[q_layout.order] = torch.arange(q_len, device=q.device) // mask.block_size
    total, total_lse = torch.empty_like(q), torch.empty_like(lse)
    for b in range(batch):
        for slab in head_slabs(heads, 3 * q_len * mask.num_k_blocks * dtype.itemsize, _SLAB_BYTES):
            of_keys = torch.arange(slab.start, slab.stop, device=q.device) // shared
            kept = BlockMask(mask.counts[b : b + 1, slab], mask.indices[b : b + 1, slab], mask.block_size).to_dense()[0]
            logits = q[b, slab].to(dtype) @ k_means[b, of_keys].to(dtype).mT * scale + weights[b].to(dtype)
            logits = logits.masked_fill_(kept[:, block], -torch.inf)
            skipped = logits.logsumexp(-1)
            both = torch.logaddexp(lse[b, slab].to(dtype), skipped)
            base = both.masked_fill(both == -torch.inf, 0.0)  # a row without a key anywhere stays 0
            share = (lse[b, slab].to(dtype) - base).exp()
            probs = (logits - base.unsqueeze(-1)).exp()
            mixed = out[b, slab].to(dtype) * share.unsqueeze(-1) + probs @ v_means[b, of_keys].to(dtype)
            total[b, slab], total_lse[b, slab] = mixed.to(q.dtype), both.float()
    return total, total_lse
