"""Calibration: which layers and heads can do with fewer blocks, measured on a few samples.

    error[layer, head](x) = |out - dense|^2 of the head with a share x of its free blocks / |dense|^2 of the whole layer

Budgets go where they take most off the sum of these errors, until the mean density is what was asked for: the curves
are made convex, and their steepest pieces are bought first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from rainfusion import errors, pipeline
from rainfusion.arguments import Options
from rainfusion.errors import Curves
from rainfusion.layout import TokenLayout

GRID = 64  # a curve is kept at 1/64, 2/64, ... of the free blocks


@dataclass
class LayerCurves:
    """Of one layer: sums over its calls."""

    error: Tensor  # float64 [H, GRID]
    calls: int
    whole: float  # the share of rows that are protected
    always: float  # the share of columns that are

    def density(self, share: float) -> float:
        """Of all blocks, with that share of the free ones."""
        return self.whole + (1.0 - self.whole) * (self.always + (1.0 - self.always) * share)


@dataclass
class Recorder:
    """Collects the curves of a model's attention calls, by name of the layer."""

    layers: dict[str, LayerCurves] = field(default_factory=dict)

    @torch.no_grad()
    def add(
        self,
        layer: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        bias: Tensor | None,
        options: Options,
        runner: str,
    ) -> None:
        """One call, as `sparse_attention` would get it; every element of the batch counts as one."""
        q_layout, k_layout = pipeline.layouts(q, k, options)
        scores = pipeline.block_scores(q, k, keep, options, q_layout, k_layout, runner)
        curves = errors.curves(q, k, v, scores, keep, bias, options, q_layout, k_layout)
        relative = resampled(curves) / curves.squared_norm.double().sum(1)[:, None, None]  # [B, H, GRID]
        found = relative.nan_to_num(nan=0.0, posinf=0.0).sum(0).cpu()
        known = self.layers.get(layer)
        if known is None:
            self.layers[layer] = LayerCurves(found, len(q), *_protected(q_layout, k_layout))
        else:
            known.error += found
            known.calls += len(q)


def resampled(curves: Curves) -> Tensor:
    """float64 [B, H, GRID]: squared errors with 1/64, 2/64, ... of the free blocks, at least one."""
    free = curves.squared_error.shape[2] - curves.protected
    points = torch.arange(1, GRID + 1, device=curves.squared_error.device)
    kept = (points * free).div(GRID, rounding_mode="floor").clamp(min=min(1, free)) + curves.protected
    return curves.squared_error.double().index_select(2, (kept - 1).clamp(min=0))


def _protected(q_layout: TokenLayout, k_layout: TokenLayout) -> tuple[float, float]:
    return q_layout.num_protected / q_layout.num_blocks, k_layout.num_protected / k_layout.num_blocks


def allocate(layers: dict[str, LayerCurves], sparsity: float) -> dict[str, tuple[float, ...]]:
    """A sparsity for each head of each layer, protected blocks counted in, whose mean is `sparsity`.

    Raises where the protected blocks alone are more than that leaves.
    """
    most = highest_sparsity(layers)
    if sparsity > most + 1e-9:
        raise ValueError(
            f"sparsity must be at most {most:.3f} here, got {sparsity}: protected blocks (first frame, text) are the "
            "rest; first_frame='keys' or 'free' protects fewer"
        )
    pieces, shares = [], dict[str, list[float]]()
    for name, layer in layers.items():
        shares[name] = [1 / GRID] * len(layer.error)
        for head, error in enumerate(layer.error / layer.calls):
            for gain, width in convex_pieces(error.tolist()):
                cost = layer.density(1 / GRID + width) - layer.density(1 / GRID)
                pieces.append((-gain / max(cost, 1e-12), name, head, width, cost))
    left = (most - sparsity) * sum(map(len, shares.values()))  # of densities, to spend
    heapq.heapify(pieces)
    while pieces and left > 1e-9:
        _, name, head, width, cost = heapq.heappop(pieces)
        part = min(1.0, left / cost) if cost > 0 else 1.0
        shares[name][head] += part * width
        left -= part * cost
    return {
        name: tuple(round(1.0 - layers[name].density(min(1.0, share)), 4) for share in found)
        for name, found in shares.items()
    }


def highest_sparsity(layers: dict[str, LayerCurves]) -> float:
    """With one block in 64 of those that are free."""
    heads = sum(len(layer.error) for layer in layers.values())
    return 1.0 - sum(len(layer.error) * layer.density(1 / GRID) for layer in layers.values()) / heads


def convex_pieces(errors: list[float]) -> list[tuple[float, float]]:
    """The lower convex hull of a curve over 1/64 ... 1: (what a piece takes off it, its width), steepest first."""
    hull: list[tuple[int, float]] = []
    for x, y in enumerate(errors):
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return [(max(0.0, before - after), (to - at) / GRID) for (at, before), (to, after) in pairwise(hull)]
