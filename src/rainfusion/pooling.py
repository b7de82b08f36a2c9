"""Pooling: one representative token for each block, the mean of its tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.layout import TokenLayout
from rainfusion.slabs import head_slabs

_SLAB_BYTES = 64 * 2**20


def block_means(x: Tensor, layout: TokenLayout, keep: Tensor | None = None) -> Tensor:
    """mean[n] = sum of the kept tokens of block n / their number, in fp32.

    x [B, H, S, D] in the caller's order, keep bool [B, S] or None -> [B, H, N, D]. The tail block averages its real
    tokens only; a block with no token left has mean 0 (see `live_blocks`).
    """
    batch, heads, seq_len, head_dim = x.shape
    means = x.new_empty((batch, heads, layout.num_blocks, head_dim), dtype=torch.float32)
    tokens = _tokens_per_block(layout, keep, batch, x.device)  # [B, N]
    for b in range(batch):
        for slab in head_slabs(heads, seq_len * head_dim * 4, _SLAB_BYTES):
            part = x[b, slab]
            if keep is not None:
                part = part.masked_fill(~keep[b].unsqueeze(-1), 0.0)
            sums = _block_sums(layout.reorder(part).float().contiguous(), layout.block_size)
            means[b, slab] = sums / tokens[b].clamp(min=1).unsqueeze(-1)
    return means


def live_blocks(layout: TokenLayout, keep: Tensor) -> Tensor:
    """bool [B, N]: blocks with at least one kept token."""
    return _tokens_per_block(layout, keep, keep.shape[0], keep.device) > 0


def _block_sums(x: Tensor, block_size: int) -> Tensor:
    """[H, S, D] -> [H, N, D]."""
    seq_len = x.shape[1]
    whole = seq_len - seq_len % block_size
    sums = x[:, :whole].unflatten(1, (whole // block_size, block_size)).sum(2)
    return torch.cat([sums, x[:, whole:].sum(1, keepdim=True)], 1) if whole < seq_len else sums


def _tokens_per_block(layout: TokenLayout, keep: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """float32 [B, N]."""
    if keep is None:
        kept = torch.ones(1, layout.seq_len, dtype=torch.float32, device=device)
    else:
        kept = keep.float() if layout.is_identity else keep.index_select(1, layout.order).float()
    padding = -layout.seq_len % layout.block_size
    blocks: Tensor = F.pad(kept, (0, padding)).unflatten(1, (layout.num_blocks, layout.block_size))
    return blocks.sum(2).expand(batch, -1)
