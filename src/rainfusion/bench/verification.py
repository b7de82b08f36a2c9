"""Is a result right? A few rows, computed again in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.layout import TokenLayout
from rainfusion.prediction import spread


class Verdict(NamedTuple):
    """How far a result is from float64, and how far it may be."""

    error: float  # relative L2 distance to float64
    allowed: float  # 1.5 times what torch's own attention loses on the same rows and dtype, unless a bound was given

    @property
    def right(self) -> bool:
        """Whether the error is allowed; NaN is not."""
        return self.error <= self.allowed


QUANTISED_ERROR = 0.06  # the error that fp8 and int8 kernels may have


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mask: BlockMask,
    layout: TokenLayout,
    rows: int = 6,
    *,
    allowed: float | None = None,
    slack: float = 1.5,
    compensate: bool = False,
    spreads: bool = False,
) -> Verdict:
    """Computes `rows` blocks of rows again in float64, over the blocks that the mask keeps, and compares.

    Args:
        q: queries [B, H, S, D] in the caller's order; k, v and out likewise.
        k: keys.
        v: values.
        out: the result to check.
        mask: the blocks that were attended to.
        layout: the order of blocks, of both q and k.
        rows: how many blocks of rows to check.
        allowed: the error to allow, instead of `slack` times what torch's own attention loses.
        slack: see `allowed`.
        compensate: whether skipped blocks count through their means.
        spreads: with predictor="spread", by which they count for more.
    """
    batch, heads, _, _ = q.shape
    shared = heads // k.shape[1]
    q_size, k_size = mask.q_block, mask.k_block
    picks = picked_rows(batch, heads, mask.num_q_blocks, rows)
    exact, ours, torchs = [], [], []
    for b, h, row in picks:
        queries = layout.order[row * q_size : (row + 1) * q_size]
        keys = kept_keys(mask, layout, b, h, row)
        part = (q[b, h, queries], k[b, h // shared, keys], v[b, h // shared, keys])
        stand_ins = None
        if compensate:
            skipped = mask.indices[b, h, row, int(mask.counts[b, h, row]) :].tolist()
            of_row = part[0] if spreads else None
            stand_ins = _stand_ins(k[b, h // shared], v[b, h // shared], layout, skipped, k_size, of_row)
        exact.append(_attention_in_float64(*part, stand_ins))
        ours.append(out[b, h, queries].cpu().double())
        if allowed is None:
            query, key, value = (x[None, None] for x in part)
            lost = F.scaled_dot_product_attention(query, key, value)[0, 0].cpu().double()
            torchs.append(lost - _attention_in_float64(*part) + exact[-1])
    if allowed is not None:
        return Verdict(_distance(ours, exact), allowed)
    # Rounding the output once is always allowed; in fp32 and fp64 more, for sums of many terms in another order.
    floor = torch.finfo(q.dtype).eps / 2 * (1 if q.dtype.itemsize == 2 else 8)
    return Verdict(_distance(ours, exact), slack * max(_distance(torchs, exact), floor))


def picked_rows(batch: int, heads: int, blocks: int, number: int) -> list[list[int]]:
    """Batch element, head and block of rows, so many times, and the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.stack([torch.randint(n, (number,), generator=generator) for n in (batch, heads, blocks)], 1).tolist()
    picks[-1][2] = blocks - 1  # the last block is checked always: it may be ragged
    return [list(map(int, pick)) for pick in picks]


def kept_keys(mask: BlockMask, layout: TokenLayout, b: int, h: int, row: int) -> Tensor:
    """The tokens whose keys a row of blocks attends to, in the order of its list."""
    blocks = mask.indices[b, h, row, : int(mask.counts[b, h, row])].long()
    positions = (blocks[:, None] * mask.k_block + torch.arange(mask.k_block, device=blocks.device)).flatten()
    return layout.order[positions[positions < layout.seq_len]]


def _attention_in_float64(
    q: Tensor, k: Tensor, v: Tensor, stand_ins: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """Of some queries over some keys and, with `stand_ins`, over the means of skipped blocks as often as they count."""
    if q.device.type != "cuda":  # not every device has float64
        q, k, v = q.cpu(), k.cpu(), v.cpu()
    q, k, v = q.double(), k.double(), v.double()
    number = torch.ones(len(k), dtype=torch.float64, device=q.device)
    if stand_ins is not None:
        means = [x.to(q.device) for x in stand_ins]
        k, v, number = torch.cat([k, means[0]]), torch.cat([v, means[1]]), torch.cat([number, means[2]])
    logits: Tensor = q @ k.T * q.shape[-1] ** -0.5 + number.log()
    return (logits.softmax(-1) @ v).cpu()


def _stand_ins(
    k: Tensor, v: Tensor, layout: TokenLayout, blocks: list[int], size: int, q: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """float64 [n, D], [n, D], [n]: mean key and value of each block [S, D], and how many tokens it counts for.

    As many as it has; with the row's queries q for more, the farther keys are from their mean: see `prediction.spread`.
    """
    tokens = [layout.order[block * size : (block + 1) * size] for block in blocks]
    empty = torch.zeros(0, k.shape[-1], dtype=torch.float64)
    means = [torch.stack([x[which].cpu().double().mean(0) for which in tokens]) if tokens else empty for x in (k, v)]
    number = torch.tensor([float(len(which)) for which in tokens], dtype=torch.float64)
    if q is not None:
        power = q[:: spread.EVERY].cpu().double().square().mean()
        apart = [
            (k[which].cpu().double() - mean).square().sum(-1) for which, mean in zip(tokens, means[0], strict=True)
        ]
        spreads = torch.tensor([float(distances.mean()) for distances in apart], dtype=torch.float64)
        number = number * spread.gain(power, spreads, q.shape[-1] ** -0.5)
    return means[0], means[1], number


def _distance(ours: list[Tensor], exact: list[Tensor]) -> float:
    a, b = torch.cat(ours), torch.cat(exact)
    return float((a - b).norm() / b.norm())
