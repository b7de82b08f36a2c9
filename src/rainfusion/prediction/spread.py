"""Spread: what the mean of a block does not say of it, for predictor="spread".

    spread[j] = mean of |k - mean_k[j]|^2 over the keys of block j
    power[i]  = mean of |q|^2 / D over a sample of row i, every eighth query of it
    variance of the logits of a query in row i over block j  ~  scale^2 power[i] spread[j]

The last as if all channels were alike, which the lab's calls bear out. A block whose logits differ counts for more than
its mean says, exp being convex: by a factor 1 + variance / 2, if all of that were true of the blocks that are skipped.
Those are the ones that have less of it than most, and half of it is what serves them best.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.layout import TokenLayout
from rainfusion.options import Method
from rainfusion.prediction.pooling import block_means
from rainfusion.slabs import head_slabs

EVERY = 8  # a query of so many is in the sample
GAIN = 0.25  # of the variance, by which a mean counts for more
TOGETHER = 4  # parts of keys to a mean of `Wide`: 128 keys
MOST = 2.0**60  # that a part may be given, see `predictors.part_errors`
_SLAB_BYTES = 64 * 2**20


def means_dtype(method: Method, dtype: torch.dtype) -> torch.dtype:
    """Of the means that rf_v2 predicts from. There are many of them here: their products are as those of tokens."""
    return dtype if method.spreads and dtype.itemsize == 2 else torch.float32


class Wide(NamedTuple):
    """Means of 128 keys, from which shares of attention are normalised."""

    means: Tensor  # [B, Hk, W, D], of `means_dtype`
    numbers: Tensor  # int64 [B, W]: how many parts each is the mean of, up to TOGETHER


def widened(means: Tensor, live: Tensor) -> Wide:
    """means [B, Hk, N, D] of parts, live bool [B, N]: those with a key. Each part counts as much as another."""
    padding = -means.shape[2] % TOGETHER
    live = F.pad(live, (0, padding)).unflatten(1, (-1, TOGETHER))  # [B, W, TOGETHER]
    parts = F.pad(means, (0, 0, 0, padding)).float().unflatten(2, (-1, TOGETHER))
    sums = parts.masked_fill(~live[:, None, :, :, None], 0.0).sum(3)
    numbers = live.sum(2)
    return Wide((sums / numbers.clamp(min=1)[:, None, :, None]).to(means.dtype), numbers)


def of_keys(k: Tensor, layout: TokenLayout, keep: Tensor | None = None) -> Tensor:
    """fp32 [B, Hk, NK]; k [B, Hk, S, D] in the caller's order, keep bool [B, S] or None. 0 where no key is left."""
    batch, heads, seq_len, head_dim = k.shape
    blocks, size = layout.num_blocks, layout.block_size
    padding = blocks * size - seq_len
    means = block_means(k, layout, keep)
    found = k.new_empty((batch, heads, blocks), dtype=torch.float32)
    for b in range(batch):
        here = torch.ones(seq_len, dtype=torch.bool, device=k.device) if keep is None else keep[b]
        here = here if layout.is_identity else here.index_select(0, layout.order)
        here = F.pad(here, (0, padding)).view(blocks, size, 1)
        number = here.sum((1, 2)).clamp(min=1)
        for slab in head_slabs(heads, 2 * seq_len * head_dim * 4, _SLAB_BYTES):
            keys = F.pad(layout.reorder(k[b, slab]).float(), (0, 0, 0, padding)).unflatten(1, (blocks, size))
            apart = (keys - means[b, slab].unsqueeze(2)).masked_fill_(~here, 0.0)
            found[b, slab] = apart.square_().sum((2, 3)) / number
    return found


def power(q: Tensor, layout: TokenLayout) -> Tensor:
    """fp32 [B, H, NQ]; q [B, H, S, D] in the caller's order."""
    sample = q.index_select(2, layout.order[::EVERY]).float().square().mean(-1)
    each = layout.block_size // EVERY
    rows = F.pad(sample, (0, layout.num_blocks * each - sample.shape[2])).unflatten(2, (-1, each))
    number = torch.full((layout.num_blocks,), each, device=q.device)
    number[-1] = sample.shape[2] - (layout.num_blocks - 1) * each
    found: Tensor = rows.sum(3) / number
    return found


def gain(power: Tensor, spread: Tensor, scale: float) -> Tensor:
    """By how much more a mean counts: of any shapes that go together."""
    return 1.0 + GAIN * scale**2 * power * spread
