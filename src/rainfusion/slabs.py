"""Slabs: a few heads at a time, so that a stage's scratch memory does not grow with the number of heads."""

from __future__ import annotations

import math
from collections.abc import Iterator

WORKSPACE_BYTES = 256 * 2**20  # scratch memory of one stage


def head_slabs(heads: int, bytes_per_head: int, workspace_bytes: int = WORKSPACE_BYTES) -> Iterator[slice]:
    """Slices that cover `heads`, as many at a time as the workspace holds, and at least one."""
    step = max(1, workspace_bytes // max(1, bytes_per_head))
    for start in range(0, heads, step):
        yield slice(start, min(start + step, heads))


def even_slabs(heads: int, bytes_per_head: int, workspace_bytes: int, together: int = 1) -> Iterator[slice]:
    """The same in as few slices, but of like size, and of whole groups of `together` heads."""
    groups = heads // together
    slabs = math.ceil(groups / max(1, workspace_bytes // max(1, bytes_per_head * together)))
    step = together * max(1, math.ceil(groups / max(1, slabs)))
    for start in range(0, heads, step):
        yield slice(start, min(start + step, heads))
