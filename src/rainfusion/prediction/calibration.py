"""Calibration: which layers and heads can do with fewer blocks, measured on a few samples.

    error[layer, head](x) = |out - dense|^2 of the head with a share x of its free blocks / |dense|^2 of the whole layer

Budgets go where they take most off the sum of these errors, until the mean density is what was asked for: the curves
are made convex, and their steepest pieces are bought first.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from rainfusion import pipeline
from rainfusion.calls import Inputs
from rainfusion.planning import Plan
from rainfusion.prediction import error_curves
from rainfusion.prediction.error_curves import Curves

GRID = 64  # a curve is kept at 1/64, 2/64, ... of the free blocks


@dataclass
class LayerCurves:
    """Of one layer: sums over its calls."""

    error: Tensor  # float64 [H, GRID]
    calls: int
    whole: float  # the share of rows that are protected
    protected: int  # columns
    columns: int

    @property
    def kept(self) -> list[int]:
        """Free blocks of a row at each point of the curve: 1/64, 2/64, ... of them, rounded up."""
        return grid_points(self.columns - self.protected)

    def density(self, kept: int) -> float:
        """Of all blocks, with so many free ones in a row."""
        return self.whole + (1.0 - self.whole) * (self.protected + kept) / self.columns


def grid_points(free: int) -> list[int]:
    return [-(-point * free // GRID) for point in range(1, GRID + 1)]


@dataclass
class Recorder:
    """Collects the curves of a model's attention calls, by name of the layer.

    `sparsity`: what will be asked for; a layer that cannot reach it is an error at its first call.
    """

    sparsity: float = 0.0
    layers: dict[str, LayerCurves] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, layer: str, inputs: Inputs, plan: Plan) -> None:
        """One call, as `sparse_attention` would get it; every element of the batch counts as one."""
        request, scores = pipeline.block_scores(inputs, plan)
        with pipeline.alone_on(inputs.q.device):
            curves = error_curves.curves(request, scores)
        q, q_layout, k_layout = inputs.q, request.q_layout, request.k_layout
        norm = curves.squared_norm.double().sum(1)  # [B]
        relative = resampled(curves) / norm[:, None, None]  # [B, H, GRID]
        counts = norm.isfinite() & (norm > 0)  # an element without a key, or with a NaN, says nothing
        found = relative.masked_fill(~counts[:, None, None], 0.0).sum(0).cpu()
        known = self.layers.get(layer)
        if known is None:
            whole = q_layout.num_protected / q_layout.num_blocks
            known = LayerCurves(found, len(q), whole, k_layout.num_protected, k_layout.num_blocks)
            check_reach({layer: known}, self.sparsity)
            self.layers[layer] = known
        else:  # text may have another length: curves are over shares, and blocks are counted as in the first call
            known.error += found
            known.calls += len(q)


def resampled(curves: Curves) -> Tensor:
    """float64 [B, H, GRID]: squared errors at the grid's points."""
    points = grid_points(curves.squared_error.shape[2] - curves.protected)
    kept = torch.tensor(points, device=curves.squared_error.device) + curves.protected
    return curves.squared_error.double().index_select(2, (kept - 1).clamp(min=0))


def allocate(layers: dict[str, LayerCurves], sparsity: float) -> dict[str, tuple[float, ...]]:
    """A sparsity for each head of each layer, protected blocks counted in, whose mean is `sparsity` or a little more.

    Raises where the protected blocks alone are more than that leaves.
    """
    check_reach(layers, sparsity)
    pieces, kept = [], dict[str, list[float]]()
    for name, layer in layers.items():
        kept[name] = [float(layer.kept[0])] * len(layer.error)
        for head, error in enumerate(layer.error / layer.calls):
            for gain, blocks in convex_pieces(layer.kept, error.tolist()):
                cost = layer.density(blocks) - layer.density(0)
                pieces.append((-gain / max(cost, 1e-12), name, head, blocks, cost))
    left = (highest_sparsity(layers) - sparsity) * sum(map(len, kept.values()))  # of densities, to spend
    heapq.heapify(pieces)
    while pieces and left > 1e-9:
        _, name, head, blocks, cost = heapq.heappop(pieces)
        part = min(1.0, left / cost) if cost > 0 else 1.0
        kept[name][head] += part * blocks
        left -= part * cost
    return {
        name: tuple(_rounded_up(1.0 - layers[name].density(math.floor(number + 1e-9))) for number in found)
        for name, found in kept.items()
    }


def _rounded_up(share: float) -> float:
    """To four digits: a budget from it is then the number of blocks that was meant, not one more."""
    return max(0.0, min(1.0, math.ceil(share * 1e4 - 1e-6) / 1e4))


def highest_sparsity(layers: dict[str, LayerCurves]) -> float:
    """With the fewest blocks that curves go down to."""
    heads = sum(len(layer.error) for layer in layers.values())
    return 1.0 - sum(len(layer.error) * layer.density(layer.kept[0]) for layer in layers.values()) / heads


def check_reach(layers: dict[str, LayerCurves], sparsity: float) -> None:
    most = highest_sparsity(layers)
    if sparsity > most + 1e-9:
        raise ValueError(
            f"sparsity must be at most {most:.3f} here, got {sparsity}: protected blocks (text and, by `first_frame`, "
            "the first frame) are the rest"
        )


def convex_pieces(kept: list[int], errors: list[float]) -> list[tuple[float, int]]:
    """The lower convex hull of errors over blocks kept: (what a piece takes off, its blocks), steepest first."""
    hull: list[tuple[int, float]] = []
    for x, y in zip(kept, errors, strict=True):
        if hull and hull[-1][0] == x:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return [(max(0.0, before - after), to - at) for (at, before), (to, after) in pairwise(hull)]
