"""What SGLang's users ask for, and when a call is dense: plain values in, a scene or the reason out. No host inside.

The options are those of SGLang's own RainFusion backend, and so are its defaults, which SGLang fills in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rainfusion import checks
from rainfusion.checks import Grid
from rainfusion.integrations.decider import Dense
from rainfusion.integrations.scenes import Scene
from rainfusion.options import Method


@dataclass(frozen=True)
class Options:
    """What the user asked for in `--attention-backend-config`; see docs/sglang.md.

    Args:
        sparsity: the share of key blocks to skip, 0 to 1, without 1. 0 is dense attention.
        skip_first_steps: so many steps at the start stay dense.
    """

    sparsity: float
    skip_first_steps: int

    def __post_init__(self) -> None:
        share = checks.fraction("sparsity", self.sparsity, zero=True)
        if share == 1.0:
            raise ValueError("sparsity must be in [0, 1), got 1.0")
        object.__setattr__(self, "sparsity", share)
        checks.integer("skip_first_steps", self.skip_first_steps, minimum=0)

    @property
    def method(self) -> Method:
        """The recommended one, with what was asked for."""
        return Method.recommended(sparsity=self.sparsity)


def grid_of(latents: Any, patch: Any) -> Grid | None:
    """The grid of tokens (t, h, w) of latents [..., T, H, W]; None where they are no such thing.

    >>> grid_of((1, 16, 21, 60, 104), (1, 2, 2))
    (21, 30, 52)
    """
    if not _is_ints(latents) or not _is_ints(patch) or len(latents) < 3 or len(patch) != 3:
        return None
    t, h, w = (int(size) // int(side) for size, side in zip(latents[-3:], patch, strict=True))
    return (t, h, w) if min(t, h, w) > 0 else None


def _is_ints(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(number, int) for number in value)


class Facts(NamedTuple):
    """What SGLang says of a call."""

    options: Options | None  # None: there is nothing said
    step: int | None = None
    grid: Grid | None = None
    causal: bool = False


def place(facts: Facts) -> Scene | Dense:
    """Where the video lies in a call that may be sparse: it is all of the sequence. Else the reason why it is dense."""
    if facts.options is None:
        return Dense.unsupported("the pipeline's stage says nothing of the grid and the step")
    if facts.options.sparsity == 0.0:
        return Dense.asked("sparsity is 0")
    if facts.options.skip_first_steps and facts.step is None:
        return Dense.unsupported("which step it is is not known, and skip_first_steps depends on it")
    if facts.step is not None and facts.step < facts.options.skip_first_steps:
        return Dense.asked("the first steps are dense (skip_first_steps)")
    if facts.causal:
        return Dense.unsupported("causal attention")
    if facts.grid is None:
        return Dense.unsupported("the latents have no grid: their shape does not end with frames, rows and columns")
    return Scene((facts.grid,), alone=True)
