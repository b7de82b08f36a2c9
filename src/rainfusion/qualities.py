"""Words for how much to skip: `enable(pipe, quality="high")` instead of a number.

A word stands for a sparsity, by task, and for what goes with it. This table is the one place that says what:

>>> QUALITIES["fast"].sparsity(frames=21), QUALITIES["fast"].sparsity(frames=1)
(0.9, 0.7)

`"balanced"` is what `enable` does without a word. docs/quality.md has the table for readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from types import MappingProxyType
from typing import Any, Literal

from rainfusion import checks
from rainfusion.options import FINE_VIDEO_SPARSITY, IMAGE_SPARSITY, Method
from rainfusion.schedules import ScheduleName

QualityName = Literal["high", "balanced", "fast"]


@dataclass(frozen=True)
class Quality:
    """What a word stands for.

    Args:
        video: the share of key blocks to skip in videos.
        image: the share of key blocks to skip in images, which have one frame.
        schedule: how the blocks of a run are shared out among its steps, where the user names no schedule.
        dense_start: this share of the steps stays dense at the start, where the user names no steps. A share, since
            models have from 4 to 50 steps.
    """

    video: float
    image: float
    schedule: ScheduleName = "auto"
    dense_start: float = 0.0

    def sparsity(self, frames: int) -> float:
        """Of a clip of so many frames."""
        return self.image if frames == 1 else self.video

    def dense_steps(self, steps: int) -> int:
        """How many of so many steps stay dense at the start."""
        return round(self.dense_start * steps)


QUALITIES: Mapping[str, Quality] = MappingProxyType(
    {
        "high": Quality(video=0.75, image=0.5),
        "balanced": Quality(video=FINE_VIDEO_SPARSITY, image=IMAGE_SPARSITY),
        "fast": Quality(video=0.9, image=0.7),
    }
)


def checked_quality(value: Any, method: Method, profile: Any = None) -> Quality:
    """What a word stands for. It sets the budgets, and is an error where something else sets them, too.

    Args:
        value: the word.
        method: with which it goes, without a sparsity of its own.
        profile: budgets by layer and head, with which it does not go.
    """
    word = QUALITIES[checks.choice("quality", value, tuple(QUALITIES))]
    others = {"sparsity": method.sparsity, "target_error": method.target_error, "profile": profile}
    if method.sparse_type == "ada_bsa" and method.cdf_threshold < 1.0:
        others["cdf_threshold"] = method.cdf_threshold
    for name, other in others.items():
        if other is not None:
            raise ValueError(
                f"quality and {name} both say how much to skip: pass one of them, got quality={value!r} and "
                f"{name}={shortened(other)}"
            )
    return word
