"""Pooling: a representative token for each block, the mean of its tokens; or several, one for each part of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.layout import TokenLayout
from rainfusion.slabs import head_slabs

_SLAB_BYTES = 64 * 2**20


def block_means(x: Tensor, layout: TokenLayout, keep: Tensor | None = None, parts: int = 1) -> Tensor:
    """mean[n] = sum of the kept tokens of block n / their number, in fp32.

    x [B, H, S, D] in the caller's order, keep bool [B, S] or None -> [B, H, N * parts, D]. The tail block averages its
    real tokens only; a block, or a part, with no token left has mean 0 (see `live_blocks`).
    """
    batch, heads, seq_len, head_dim = x.shape
    means = x.new_empty((batch, heads, layout.num_blocks * parts, head_dim), dtype=torch.float32)
    tokens = _tokens_per_block(layout, keep, batch, x.device, parts)  # [B, N * parts]
    for b in range(batch):
        for slab in head_slabs(heads, seq_len * head_dim * 4, _SLAB_BYTES):
            part = x[b, slab]
            if keep is not None:
                part = part.masked_fill(~keep[b].unsqueeze(-1), 0.0)
            sums = _block_sums(layout.reorder(part).float().contiguous(), layout.block_size // parts)
            means[b, slab, : sums.shape[1]] = sums / tokens[b, : sums.shape[1]].clamp(min=1).unsqueeze(-1)
            means[b, slab, sums.shape[1] :] = 0.0  # parts of the tail block that have no token
    return means


def live_blocks(layout: TokenLayout, keep: Tensor, parts: int = 1) -> Tensor:
    """bool [B, N * parts]: blocks, or parts of them, with at least one kept token."""
    return _tokens_per_block(layout, keep, keep.shape[0], keep.device, parts) > 0


def present(layout: TokenLayout, parts: int, device: torch.device) -> Tensor:
    """bool [N * parts]: parts with a token in them; only the tail block has others."""
    return torch.arange(layout.num_blocks * parts, device=device) * (layout.block_size // parts) < layout.seq_len


def _block_sums(x: Tensor, block_size: int) -> Tensor:
    """[H, S, D] -> [H, N, D]."""
    seq_len = x.shape[1]
    whole = seq_len - seq_len % block_size
    sums = x[:, :whole].unflatten(1, (whole // block_size, block_size)).sum(2)
    return torch.cat([sums, x[:, whole:].sum(1, keepdim=True)], 1) if whole < seq_len else sums


def _tokens_per_block(
    layout: TokenLayout, keep: Tensor | None, batch: int, device: torch.device, parts: int = 1
) -> Tensor:
    """float32 [B, N * parts]."""
    if keep is None:
        kept = torch.ones(1, layout.seq_len, dtype=torch.float32, device=device)
    else:
        kept = keep.float() if layout.is_identity else keep.index_select(1, layout.order).float()
    padding = -layout.seq_len % layout.block_size
    size = layout.block_size // parts
    blocks: Tensor = F.pad(kept, (0, padding)).unflatten(1, (layout.num_blocks * parts, size))
    return blocks.sum(2).expand(batch, -1)
