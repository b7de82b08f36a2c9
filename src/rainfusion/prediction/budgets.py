"""Budgets of rf_v2: how many key blocks a row keeps, from a sparsity or from the error that is allowed.

sparsity        number = ceil(NK * (1 - sparsity)) of all columns, at least 1; protected ones come on top
exact_budget    number of the free columns, so that protected rows and columns count in the density 1 - sparsity
target_error    number of the free columns, for each head: as few as a sample of dense rows allows
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from rainfusion.geometry import LayoutSpec
from rainfusion.graphs import keep_if_captured, refuse_if_capturing
from rainfusion.layout import cached_layout
from rainfusion.options import Method
from rainfusion.prediction.error_curves import Curves
from rainfusion.prediction.selection import budget


def numbers(method: Method, q_spec: LayoutSpec, k_spec: LayoutSpec) -> tuple[int, ...]:
    """Blocks that the rows of each head keep: of the free columns with `exact_budget`, else of all. One if all agree.

    The layouts are those of the whole sequence, also where q is a part of it.
    """
    return tuple(_number(q_spec, k_spec, share, method.exact_budget) for share in method.sparsities)


def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [1] or [H]; kept, so that calls of a layer send nothing to the device."""
    found = _on_device(numbers, device)
    keep_if_captured(device, found)
    return found


@lru_cache(maxsize=1024)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    refuse_if_capturing(device, "budgets")
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(device)


def _number(q_spec: LayoutSpec, k_spec: LayoutSpec, sparsity: float, exact: bool) -> int:
    rows, columns = (cached_layout(spec, torch.device("cpu")) for spec in (q_spec, k_spec))
    if not exact:
        return max(1, budget(columns.num_blocks, sparsity))
    free_rows = rows.num_blocks - rows.num_protected
    whole = rows.num_protected * columns.num_blocks + free_rows * columns.num_protected
    left = budget(rows.num_blocks * columns.num_blocks, sparsity) - whole
    return max(1, math.ceil(left / free_rows)) if free_rows else 1


def kept(
    method: Method, numbers: tuple[int, ...], sides: tuple[int, ...], q_spec: LayoutSpec, k_spec: LayoutSpec
) -> int | None:
    """Blocks that all heads compute together, sides = (B, H); None where that depends on the data.

    It does where numbers are of all columns and some of those are protected: how many of the best ones are, is not
    known beforehand.
    """
    rows, columns = (cached_layout(spec, torch.device("cpu")) for spec in (q_spec, k_spec))
    if not numbers or (columns.num_protected and not method.exact_budget):
        return None
    batch, heads = sides
    free = columns.num_blocks - columns.num_protected
    of_rows = [columns.num_protected + min(number, free) for number in numbers]
    chosen = sum(of_rows) * (heads if len(of_rows) == 1 else 1)
    free_rows = rows.num_blocks - rows.num_protected
    return batch * (free_rows * chosen + heads * rows.num_protected * columns.num_blocks)


def density(method: Method, q_spec: LayoutSpec, k_spec: LayoutSpec) -> float:
    """The share of blocks that will be kept, 0 to 1, as far as numbers say; the mean of the heads.

    Without `exact_budget` the best blocks are protected ones as often as chance has it.
    """
    found = [_density(q_spec, k_spec, share, method.exact_budget) for share in method.sparsities]
    return sum(found) / len(found)


def _density(q_spec: LayoutSpec, k_spec: LayoutSpec, sparsity: float, exact: bool) -> float:
    rows, columns = (cached_layout(spec, torch.device("cpu")) for spec in (q_spec, k_spec))
    if rows.num_blocks == 0 or columns.num_blocks == 0:
        return 1.0
    whole, always = rows.num_protected / rows.num_blocks, columns.num_protected / columns.num_blocks
    of = columns.num_blocks - columns.num_protected if exact else columns.num_blocks
    chosen = min(1.0, _number(q_spec, k_spec, sparsity, exact) / of) if of else 1.0
    return whole + (1.0 - whole) * (always + (1.0 - always) * chosen)


def for_error(curves: Curves, target: float) -> Tensor:
    """int32 [B, H]: the fewest free blocks a row with which a head's error |out - dense| / |dense| is at most `target`.

    At least one, where there is one. Nothing is read back to the host.
    """
    columns = curves.squared_error.shape[2]
    errors = (curves.squared_error / curves.squared_norm.unsqueeze(-1)).sqrt()
    too_large = ~(errors <= target)  # also where it is NaN
    blocks = torch.arange(1, columns + 1, device=errors.device)
    too_few = (too_large * blocks).amax(-1)  # the largest number of blocks with which the error is too large
    needed = too_few + 1
    free = columns - curves.protected
    return (needed - curves.protected).clamp(1, max(1, free)).to(torch.int32)
