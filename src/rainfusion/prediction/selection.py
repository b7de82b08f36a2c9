"""Selection: scores and a budget -> the blocks that each row keeps, as a bool tensor of the scores' shape."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def budget(blocks: int, sparsity: float) -> int:
    """ceil(blocks * (1 - sparsity)), rounding noise aside: 30 of 100 blocks at sparsity 0.7, not 31."""
    return math.ceil(blocks * (1.0 - sparsity) - 1e-9)


def keep_best(
    scores: Tensor, number: Tensor, protected_rows: Tensor, protected_columns: Tensor, free_only: bool = False
) -> Tensor:
    """rf_v2: the `number` best columns of each row, ties to the lower index, then the protected blocks.

    NaN ranks first. Of all columns, or (`free_only`) of those that are not protected.
    scores [H, NQ, NK], number int [H] or [1], protected_rows bool [NQ], protected_columns bool [NK].
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if free_only:  # protected columns after all others, whose order stays
        order = order.gather(-1, protected_columns[order].to(torch.uint8).argsort(dim=-1, stable=True))
    kept = torch.arange(scores.shape[-1], device=scores.device) < number[:, None, None]
    return _by_rank(order, kept.expand(scores.shape)) | protected_rows[:, None] | protected_columns


def keep_mass(
    mass: Tensor,
    sparsity: float,
    cdf_threshold: float,
    *,
    keep_sink: bool,
    keep_recent: bool,
    is_causal: bool,
    live: Tensor | None = None,
) -> Tensor:
    """ada_bsa: the forced columns, and of the others the fewest that reach the threshold, at most the cap.

    mass [..., NQ, NK], live bool [NK] (blocks with a key left) or None.
    """
    rows, columns = mass.shape[-2:]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=mass.device)
    visible = visible.tril() if is_causal else visible
    forced = torch.zeros_like(visible)
    if keep_sink:
        forced[:, 0] = True
    if keep_recent and is_causal:
        forced.fill_diagonal_(True)
    elif keep_recent:
        forced[:, -1] = True
    others = visible & ~forced

    # rank: others by mass, then others without a key, then the columns that are not up for choice
    rank = mass if live is None else mass.masked_fill(~live, -1.0)
    rank, order = rank.masked_fill(~others, -torch.inf).sort(dim=-1, descending=True, stable=True)
    available = others.sum(-1)  # [NQ]
    if cdf_threshold < 1.0:
        # in fixed point, so that sums do not depend on the order in which a device adds
        reached = (rank.clamp(min=0.0) * 2**32).long().cumsum(-1)
        before = torch.cat([torch.zeros_like(reached[..., :1]), reached[..., :-1]], -1)
        wanted = (before.float() < cdf_threshold * reached[..., -1:].float()).sum(-1)
    else:
        wanted = available
    seen = [row + 1 if is_causal else columns for row in range(rows)]
    cap = torch.tensor([budget(n, sparsity) for n in seen], device=mass.device)
    number = torch.minimum(torch.minimum(wanted, cap).clamp(min=1), available)
    kept = torch.arange(columns, device=mass.device) < number.unsqueeze(-1)
    return _by_rank(order, kept.expand(mass.shape)) | forced


def _by_rank(order: Tensor, kept: Tensor) -> Tensor:
    """order [..., N]: the column at each rank; kept bool [..., N]: whether a rank is kept -> bool by column."""
    return torch.zeros_like(kept).scatter_(-1, order, kept)
