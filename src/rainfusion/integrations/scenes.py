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
    """The clips of a forward in their order, and the tokens around them.

    >>> Scene(((3, 4, 6),), before=None).place(80)  # 8 tokens of text before a video of 72
    Placed(grids=((3, 4, 6),), before=8, after=0, gaps=())
    """

    grids: tuple[Grid, ...]  # (t, h, w) of each clip
    before: int | None = 0  # tokens before the first clip. None: all that are no clip's
    alone: bool = False  # the sequence holds nothing but clips
    gaps: tuple[int, ...] = ()  # tokens between each clip and the next; none: they follow each other
    after: int | None = None  # tokens after the last clip. None: any number, or with `before` None, none

    @classmethod
    def of_clips(cls, clips: Sequence[Clip]) -> Scene:
        """From clips (start, t, h, w) that lie anywhere in the sequence, in order.

        >>> Scene.of_clips([(5, 1, 4, 6), (31, 2, 4, 6)])
        Scene(grids=((1, 4, 6), (2, 4, 6)), before=5, alone=False, gaps=(2,), after=None)
        """
        ends = [start + math.prod(grid) for start, *grid in clips]
        gaps = tuple(clip[0] - end for end, clip in zip(ends, clips[1:], strict=False))
        grids = tuple((t, h, w) for _, t, h, w in clips)
        return cls(grids, clips[0][0], gaps=gaps if any(gaps) else ())

    @property
    def tokens(self) -> int:
        return sum(math.prod(grid) for grid in self.grids)

    def place(self, length: int) -> Placed | None:
        """In a sequence of this length; None if it does not fit."""
        others = length - self.tokens - sum(self.gaps)
        before = others - (self.after or 0) if self.before is None else self.before
        after = others - before
        if before < 0 or after < 0 or (self.alone and others != 0) or self.after not in (None, after):
            return None
        return Placed(self.grids, before, after, self.gaps)

    def __str__(self) -> str:
        return in_words(self.grids)


def in_words(grids: Sequence[Grid]) -> str:
    return " and ".join("x".join(map(str, grid)) for grid in grids)


class Placed(NamedTuple):
    """Clips in a sequence of known length, with the number of tokens before and after all of them."""

    grids: tuple[Grid, ...]
    before: int
    after: int
    gaps: tuple[int, ...] = ()  # tokens between each clip and the next

    def __str__(self) -> str:
        around = (("before", self.before), ("between", sum(self.gaps)), ("after", self.after))
        words = [f"{count} tokens {where}" for where, count in around if count]
        return ", ".join([f"grid {in_words(self.grids)}", *words])

    @property
    def frames(self) -> int:
        """Of the longest clip."""
        return self.geometry.frames

    @property
    def geometry(self) -> Geometry:
        """The same as layout arguments of a call."""
        if self.after == 0 and len(self.grids) == 1:
            return Geometry(self.before, self.grids[0], self.grids[0])
        clips: list[Clip] = []
        start = self.before
        for grid, gap in zip(self.grids, (*self.gaps, *[0] * len(self.grids)), strict=False):
            clips.append((start, *grid))
            start += math.prod(grid) + gap
        return Geometry(clips=tuple(clips))
