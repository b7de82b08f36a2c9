"""Skipped blocks through their means: what they would have added to the softmax, approximately.

    weight of a skipped block j for query i = n_j exp(scale * q_i . mean_k[j])      n_j: its keys
    out_i = (sum over kept keys + sum over skipped blocks of weight * mean_v[j]) / (sum of all weights)

Attention over the kept blocks is done already: its log-sum-exp says how much it weighs. A key's bias counts in n_j, as
exp(bias), and not in the means. With predictor="spread" a weight has a factor, `spread.gain`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.backends.protocol import Request
from rainfusion.blockmask import BlockMask
from rainfusion.layout import TokenLayout
from rainfusion.prediction import spread
from rainfusion.prediction.pooling import block_means
from rainfusion.slabs import head_slabs

_SLAB_BYTES = 64 * 2**20


def log_weights(
    layout: TokenLayout, keep: Tensor | None, bias: Tensor | None, batch: int, device: torch.device
) -> Tensor:
    """fp32 [B, NK]: log of the number of keys in each block; -inf for a block with none left."""
    blocks: Tensor = key_bias(layout, keep, bias, batch, device).unflatten(1, (-1, layout.block_size))
    return blocks.logsumexp(2)


def key_bias(
    layout: TokenLayout,
    keep: Tensor | None,
    bias: Tensor | None,
    batch: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[B, NK * block_size] in block order, what is added to a key's logits: -inf for removed keys, and for padding."""
    total = torch.zeros((batch, layout.seq_len), dtype=dtype, device=device) if bias is None else bias.to(dtype)
    if keep is not None:
        total = total.masked_fill(~keep, -torch.inf)
    total = total if layout.is_identity else total.index_select(1, layout.order)
    padding = layout.num_blocks * layout.block_size - layout.seq_len
    return F.pad(total, (0, padding), value=-torch.inf)


def add(request: Request, mask: BlockMask, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse over the kept blocks -> with the skipped ones.

    out [B, H, Sq, D], lse fp32 [B, H, Sq], in the caller's order. Some heads of a batch element at a time, and some of
    the queries of one head where that is still too much for the workspace.
    """
    q, q_layout, k_layout = request.q, request.q_layout, request.k_layout
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, q_len, _ = q.shape
    weights = log_weights(k_layout, request.keep, request.bias, batch, q.device).to(dtype)
    k_means, v_means = (block_means(x, k_layout, request.keep).to(dtype) for x in (request.k, request.v))
    spreads, power = None, None
    if request.method.spreads:
        spreads = spread.of_keys(request.k, k_layout, request.keep).to(dtype)
        power = spread.power(q, q_layout).to(dtype)
    block = torch.empty(q_len, dtype=torch.int64, device=q.device)  # of each query
    block[q_layout.order] = torch.arange(q_len, device=q.device) // mask.q_block
    query_bytes = (3 if spreads is None else 4) * mask.num_k_blocks * dtype.itemsize
    chunk = max(mask.q_block, _SLAB_BYTES // max(1, query_bytes)) if q_len * query_bytes > _SLAB_BYTES else q_len
    total, total_lse = torch.empty_like(q), torch.empty_like(lse)
    for b in range(batch):
        for slab in head_slabs(heads, q_len * query_bytes, _SLAB_BYTES):
            of_keys = torch.arange(slab.start, slab.stop, device=q.device) // request.gqa_ratio
            kept = BlockMask(mask.counts[b : b + 1, slab], mask.indices[b : b + 1, slab], mask.block_size).to_dense()[0]
            keys, values = k_means[b, of_keys].mT, v_means[b, of_keys]
            for part in (slice(start, min(start + chunk, q_len)) for start in range(0, q_len, chunk)):
                logits = q[b, slab, part].to(dtype) @ keys * request.scale + weights[b]
                if spreads is not None and power is not None:
                    rows = power[b, slab, block[part]].unsqueeze(-1)
                    logits += spread.gain(rows, spreads[b, of_keys].unsqueeze(1), request.scale).log_()
                logits = logits.masked_fill_(kept[:, block[part]], -torch.inf)
                known = lse[b, slab, part].to(dtype)
                both = torch.logaddexp(known, logits.logsumexp(-1))
                base = both.masked_fill(both == -torch.inf, 0.0)  # a row without a key anywhere stays 0
                probs = logits.sub_(base.unsqueeze(-1)).exp_()
                mixed = out[b, slab, part].to(dtype) * (known - base).exp().unsqueeze(-1) + probs @ values
                total[b, slab, part], total_lse[b, slab, part] = mixed.to(q.dtype), both.float()
    return total, total_lse
