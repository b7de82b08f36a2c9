"""Which blocks other rules keep, and bounds: functions of one attention call, written for comparison, not for speed.

    rule(q, k, layout, place)(amount) -> bool [B, H, NQ, NK], in the block space of the layout

q, k [B, H, S, D] in the caller's order, amount in (0, 1]: more of it, more blocks. What does not depend on the amount
is computed once. `protect` says which blocks are always kept, row and column: none, those with text, or with the
first frame too, as rf_v2 does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.lab.model import Place
from rainfusion.layout import TokenLayout
from rainfusion.prediction.pooling import block_means

Choice = Callable[[float], Tensor]
Rule = Callable[[Tensor, Tensor, TokenLayout, Place], Choice]

Protect = Literal["nothing", "text", "first frame"]
PROTECT = get_args(Protect)
_CHUNK_BYTES = 256 * 2**20  # the most fp32 probabilities that are held at a time


# ---------------------------------------------------------------------------------------------------------------------
# bounds


def attention_mass(
    q: Tensor, k: Tensor, layout: TokenLayout, scale: float | None = None, *, q_block: int | None = None
) -> Tensor:
    """mass[i, j] = sum over q in block i, k in block j of softmax_k(scale q . k): fp32 [B, H, NQ, NK].

    A row sums to the number of its queries. One head and some rows at a time. q_block: tokens of a block of queries, if
    they are not those of the layout, which is that of the keys.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    size, blocks, q_block = layout.block_size, layout.num_blocks, q_block or layout.block_size
    q_blocks = -(-layout.seq_len // q_block)
    mass = torch.empty((*q.shape[:2], q_blocks, blocks), dtype=torch.float32, device=q.device)
    rows = max(1, _CHUNK_BYTES // (4 * q_block * size * blocks))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            queries, keys = (layout.reorder(x[b, h]).float() for x in (q, k))
            keys = F.pad(keys, (0, 0, 0, blocks * size - layout.seq_len))
            for first in range(0, q_blocks, rows):
                part = queries[first * q_block : (first + rows) * q_block]
                mass[b, h, first : first + rows] = _mass_of_rows(part, keys, layout, scale, q_block)
    return mass


def _mass_of_rows(queries: Tensor, keys: Tensor, layout: TokenLayout, scale: float, q_block: int) -> Tensor:
    """Queries [rows, D] and padded keys [NK * size, D] -> the mass of each block, [ceil(rows / q_block), NK]."""
    logits = (queries @ keys.mT).mul_(scale)
    logits[:, layout.seq_len :] = -torch.inf
    sums = logits.softmax(-1).unflatten(1, (-1, layout.block_size)).sum(2)  # [rows, NK]
    sums = F.pad(sums, (0, 0, 0, -len(sums) % q_block))
    mass: Tensor = sums.unflatten(0, (-1, q_block)).sum(1)
    return mass


def oracle(q: Tensor, k: Tensor, layout: TokenLayout, place: Place, *, protect: Protect = "first frame") -> Choice:
    """Keeps in each row the share `amount` of blocks that has the most true mass."""
    mass = attention_mass(q, k, layout)
    always = protected(layout, place, protect)
    return lambda amount: _with(best(mass, amount), always)


def shared_oracle(q: Tensor, k: Tensor, layout: TokenLayout, place: Place, *, protect: Protect = "text") -> Choice:
    """Keeps the share `amount` of all blocks of a call, over rows and heads, that has the most true mass.

    Each row keeps one block at least. Rules with a budget for each row cannot reach it, and budgets for each head can
    come near to it.
    """
    mass = attention_mass(q, k, layout)
    always = protected(layout, place, protect)
    first = best(mass, 1e-9)
    return lambda amount: _with(best(mass.flatten(1), amount).view_as(mass) | first, always)


# ---------------------------------------------------------------------------------------------------------------------
# rules of others


def sparge(
    q: Tensor,
    k: Tensor,
    layout: TokenLayout,
    place: Place,
    *,
    form: Literal["cdf", "top-k"] = "cdf",
    threshold: float = 0.1,
    protect: Protect = "nothing",
) -> Choice:
    """SpargeAttn's first stage (Zhang et al. 2025, arXiv 2502.18137): softmax over block means, where blocks are alike.

    P = softmax over self-similar key blocks of scale mean_q . mean_k. "cdf" keeps the fewest blocks of a row whose P
    reaches `amount`; "top-k" the share `amount` of them. Blocks of q or k whose tokens have a mean cosine similarity
    under the threshold are never skipped. Blocks are 128 x 128 here, 128 x 64 there.
    """
    if form not in ("cdf", "top-k"):
        raise ValueError(f"form must be 'cdf' or 'top-k', got {form!r}")
    q_alike, k_alike = (self_similarity(x, layout) >= threshold for x in (q, k))  # [B, H, N]
    scores = mean_products(q, k, layout).masked_fill(~k_alike.unsqueeze(-2), -torch.inf)
    probs = scores.softmax(-1).nan_to_num(0.0)  # a row where no key block is alike is kept whole
    whole = ~q_alike.unsqueeze(-1) | ~k_alike.unsqueeze(-2)
    always = protected(layout, place, protect)
    choose = fewest if form == "cdf" else best
    return lambda amount: _with(choose(probs, amount) | whole, always)


def sliding_window(q: Tensor, k: Tensor, layout: TokenLayout, place: Place, *, protect: Protect = "text") -> Choice:
    """|i - j| <= amount (N - 1): a band of blocks in the order of the layout."""
    blocks = torch.arange(layout.num_blocks, device=q.device)
    distance = (blocks[:, None] - blocks).abs()
    always = protected(layout, place, protect)

    def choose(amount: float) -> Tensor:
        band = distance <= round(amount * (layout.num_blocks - 1))
        return _with(band, always).expand(*q.shape[:2], -1, -1)

    return choose


def nearest(q: Tensor, k: Tensor, layout: TokenLayout, place: Place, *, protect: Protect = "text") -> Choice:
    """Keeps in each row the blocks whose centres (t, h, w) are nearest: a sliding window in three dimensions."""
    centres = block_centres(layout, place)
    distance = torch.cdist(centres, centres).nan_to_num(torch.inf)  # text has no place, and is far from everything
    always = protected(layout, place, protect)
    return lambda amount: _with(best(-distance, amount), always).expand(*q.shape[:2], -1, -1)


def random_blocks(q: Tensor, k: Tensor, layout: TokenLayout, place: Place, *, protect: Protect = "text") -> Choice:
    """Keeps in each row blocks at random: other ones for each layer, step and head, the same in every run and batch."""
    generator = torch.Generator().manual_seed(1000 * place.step + place.layer)
    scores = torch.rand(q.shape[1], layout.num_blocks, layout.num_blocks, generator=generator).to(q.device)
    always = protected(layout, place, protect)
    return lambda amount: _with(best(scores, amount), always).expand(len(q), -1, -1, -1)


def mean_ranking(q: Tensor, k: Tensor, layout: TokenLayout, place: Place, *, protect: Protect = "text") -> Choice:
    """Keeps the blocks that rf_v2 ranks highest, but protects others than it does: not the first frame, say."""
    scores = mean_products(q, k, layout)
    always = protected(layout, place, protect)
    return lambda amount: _with(best(scores, amount), always)


# ---------------------------------------------------------------------------------------------------------------------
# what rules are made of


def best(scores: Tensor, amount: float) -> Tensor:
    """bool [..., N]: the max(1, ceil(amount N)) highest of each row, ties to the lower index."""
    columns = scores.shape[-1]
    number = max(1, math.ceil(amount * columns - 1e-9))
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :number], True)


def fewest(probs: Tensor, amount: float) -> Tensor:
    """bool [..., N]: the fewest of each row that add up to `amount`, highest first; one at least, all of them at 1."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ranked.double().cumsum(-1) - ranked
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, order, (before < amount) | (amount >= 1))


def mean_products(q: Tensor, k: Tensor, layout: TokenLayout) -> Tensor:
    """D^-0.5 mean_q[i] . mean_k[j], fp32 [B, H, NQ, NK]."""
    products = block_means(q, layout) @ block_means(k, layout).mT
    return products * float(q.shape[3] ** -0.5)


def self_similarity(x: Tensor, layout: TokenLayout) -> Tensor:
    """|mean of unit vectors|^2, which is the mean cosine similarity of a block's pairs of tokens: [B, H, N]."""
    return block_means(F.normalize(x.float(), dim=-1), layout).square().sum(-1)


def block_centres(layout: TokenLayout, place: Place) -> Tensor:
    """Mean (t, h, w) of each block's tokens of the grid: [N, 3]; NaN for a block of text alone."""
    axes = [torch.arange(n, dtype=torch.float32, device=layout.order.device) for n in place.grid]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2)
    tokens = F.pad(grid, (0, 0, place.text, 0), value=torch.nan)[layout.order]
    tokens = F.pad(tokens, (0, 0, 0, -len(tokens) % layout.block_size), value=torch.nan)
    centres: Tensor = tokens.unflatten(0, (-1, layout.block_size)).nanmean(1)
    return centres


def protected(layout: TokenLayout, place: Place, what: Protect) -> Tensor:
    """bool [N]: the blocks that hold text, or those that rf_v2 protects, or none."""
    if what not in PROTECT:
        raise ValueError(f"protect must be one of {', '.join(map(repr, PROTECT))}, got {what!r}")
    if what == "first frame":
        return layout.protected
    blocks = torch.zeros_like(layout.protected)
    if what == "text":
        blocks[layout.inverse[: place.text] // layout.block_size] = True
    return blocks


def _with(chosen: Tensor, always: Tensor) -> Tensor:
    """The chosen blocks [..., NQ, NK] with the rows and columns of those that are always kept."""
    return chosen | always.unsqueeze(-1) | always
