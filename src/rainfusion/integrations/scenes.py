"""Where the picture lies in an attention sequence: the grids of its clips, and the tokens around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rainfusion.checks import Grid
from rainfusion.geometry import Clip, Geometry


class NoGrid(Exception):
    """There is no grid in what a model was given; the message says why."""


class Scene(NamedTuple):
    """The clips of a forward, one after the other, and the tokens around them.

    >>> Scene(((3, 4, 6),), before=None).place(80)  # 8 tokens of text before a video of 72
    Placed(grids=((3, 4, 6),), before=8, after=0)
    """

    grids: tuple[Grid, ...]  # (t, h, w) of each clip
    before: int | None = 0  # tokens before the first clip. None: all that are no clip's
    alone: bool = False  # the sequence holds nothing but clips

    @property
    def tokens(self) -> int:
        return sum(math.prod(grid) for grid in self.grids)

    def place(self, length: int) -> Placed | None:
        """In a sequence of this length; None if it does not fit."""
        others = length - self.tokens
        before = others if self.before is None else self.before
        if others < 0 or others < before or (self.alone and others != 0):
            return None
        return Placed(self.grids, before, others - before)

    def __str__(self) -> str:
        return in_words(self.grids)


def in_words(grids: Sequence[Grid]) -> str:
    return " and ".join("x".join(map(str, grid)) for grid in grids)


class Placed(NamedTuple):
    """Clips in a sequence of known length, with the number of tokens before and after all of them."""

    grids: tuple[Grid, ...]
    before: int
    after: int

    def __str__(self) -> str:
        before = f", {self.before} tokens before" if self.before else ""
        after = f", {self.after} tokens after" if self.after else ""
        return f"grid {in_words(self.grids)}{before}{after}"

    @property
    def frames(self) -> int:
        """Of the clip that is generated, which is the first."""
        return self.grids[0][0]

    @property
    def geometry(self) -> Geometry:
        """The same as layout arguments of a call."""
        if self.after == 0 and len(self.grids) == 1:
            return Geometry(self.before, self.grids[0], self.grids[0])
        clips: list[Clip] = []
        start = self.before
        for grid in self.grids:
            clips.append((start, *grid))
            start += math.prod(grid)
        return Geometry(clips=tuple(clips))
