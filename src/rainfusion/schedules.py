"""How the blocks of a run are shared out among its steps: a shape of density over the steps, under one mean.

>>> [round(density, 2) for density in Schedule.of("falling").densities(0.3, 5)]
[0.5, 0.4, 0.3, 0.2, 0.1]
>>> [round(density, 2) for density in Schedule.of([3, 1]).densities(0.75, 2)]
[1.0, 0.5]

`"auto"` is what gave the nearest samples from text with as many steps as there are: docs/quality.md has the
measurements. From an image that is a constant density; where a video comes from, hosts know.

>>> [round(density, 2) for density in Schedule.of("auto").densities(0.3, 4)]
[0.4, 0.33, 0.27, 0.2]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from rainfusion import checks
from rainfusion.options import Method

ScheduleName = Literal["auto", "constant", "falling"]
ScheduleSource = ScheduleName | Sequence[float] | Callable[[float], float]

CONSTANT, FALLING, GENTLY = (1.0,), (5.0, 1.0), (2.0, 1.0)
NAMES: dict[str, tuple[float, ...]] = {"auto": (), "constant": CONSTANT, "falling": FALLING}
FEW_STEPS = 8  # up to so many, steep slopes leave too little for the last ones
_POINTS = 65  # that a function is asked for


@dataclass(frozen=True)
class Schedule:
    """A shape: densities at evenly spaced points of a run, of which only the ratios count.

    Args:
        points: none below 0, not all 0; between two of them it is a straight line. None at all: those that suit the
            number of steps.
    """

    points: tuple[float, ...] = CONSTANT

    @classmethod
    def of(cls, source: Any) -> Schedule:
        """From a name, numbers, a function of the share of the run that is done, 0 to 1, or a schedule."""
        if isinstance(source, Schedule):
            return source
        if isinstance(source, str):
            return cls(NAMES[checks.choice("schedule", source, tuple(NAMES))])
        if callable(source):
            source = [source(i / (_POINTS - 1)) for i in range(_POINTS)]
        if not isinstance(source, Sequence) or not source:
            raise TypeError(
                f"schedule must be one of {', '.join(map(repr, NAMES))}, numbers such as [5, 3, 1], or a function of "
                f"the share of the run that is done, got {source!r} ({type(source).__name__})"
            )
        points = tuple(checks.number("schedule", point) for point in source)
        if not all(math.isfinite(point) and point >= 0.0 for point in points) or not any(points):
            raise ValueError(f"schedule must have numbers of at least 0, not all of them 0, got {list(points)}")
        return cls(points)

    @property
    def is_constant(self) -> bool:
        return len(set(self.points)) == 1

    @property
    def is_auto(self) -> bool:
        return not self.points

    def for_steps(self, steps: int) -> Schedule:
        """The shape itself, or the one that suits so many steps."""
        return self if self.points else Schedule(GENTLY if steps <= FEW_STEPS else FALLING)

    def densities(self, mean: float, steps: int) -> tuple[float, ...]:
        """Of each of so many steps: in the ratios of the shape, with this mean, and none above 1."""
        return _densities(self.for_steps(steps).points, mean, steps)

    def method_at(self, method: Method, step: int, steps: int) -> Method:
        """The method of one of so many steps, whose sparsity, of all heads or of each, is the mean."""
        if self.is_constant or method.sparsity is None:
            return method
        of_heads = method.sparsity if isinstance(method.sparsity, tuple) else (method.sparsity,)
        found = tuple(1.0 - self.densities(1.0 - mean, steps)[step] for mean in of_heads)
        return replace(method, sparsity=found if isinstance(method.sparsity, tuple) else found[0])

    def at(self, share: float) -> float:
        """The shape's value after this share of the run, 0 to 1."""
        place = share * (len(self.points) - 1)
        before = min(int(place), len(self.points) - 1)
        after = min(before + 1, len(self.points) - 1)
        return self.points[before] + (place - before) * (self.points[after] - self.points[before])


@lru_cache(maxsize=1024)
def _densities(points: tuple[float, ...], mean: float, steps: int) -> tuple[float, ...]:
    shape = Schedule(points)
    weights = [shape.at(step / (steps - 1) if steps > 1 else 0.5) for step in range(steps)]
    if not any(weights):  # all the weight is between the steps
        weights = [1.0] * steps
    found = [0.0] * steps
    open_steps, left = [step for step in range(steps) if weights[step] > 0.0], mean * steps
    while open_steps:  # what is above 1 is shared out among the others
        factor = left / sum(weights[step] for step in open_steps)
        full = [step for step in open_steps if weights[step] * factor >= 1.0]
        for step in full or open_steps:
            found[step] = 1.0 if full else weights[step] * factor
        open_steps = [step for step in open_steps if step not in full] if full else []
        left -= len(full)
    return tuple(found)
