"""Tile sizes, measured. `benchmarks/tune.py` measures them again and prints lines to put here.

A row: the least compute capability it serves, the padded head dim up to which, and the bytes of an element. The first
that fits is taken, so a newer or older GPU than the ones measured gets its nearest relative's sizes, never a search at
first use. "hip" stands for AMD GPUs.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """Queries of a program, keys at a time, warps, stages of the pipeline, whether descriptors bring the keys.

    registers: of a lane at most, where the compiler would take those of another program that fits beside it.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    described: bool = False
    registers: int | None = None


# (capability at least, head dim at most, bytes of an element) -> sizes
_TILES: tuple[tuple[tuple[int, int], int, int, Tile], ...] = (
    # the large Blackwell: fp32 products stay within its tensor memory; not measured
    ((10, 0), 128, 4, Tile(64, 32, 8, 1)),
    ((10, 0), 256, 4, Tile(32, 16, 8, 1)),
    # H200, measured; sm_100 has the same shared memory
    ((9, 0), 64, 2, Tile(128, 64, 4, 3)),
    ((9, 0), 128, 2, Tile(128, 128, 8, 3)),
    ((9, 0), 256, 2, Tile(128, 64, 8, 2)),
    ((9, 0), 64, 4, Tile(128, 64, 8, 2)),
    ((9, 0), 128, 4, Tile(128, 64, 8, 1)),
    ((9, 0), 256, 4, Tile(64, 32, 8, 1)),
    # 99 KB of shared memory and more; not measured
    ((8, 0), 64, 2, Tile(128, 64, 4, 3)),
    ((8, 0), 128, 2, Tile(128, 64, 8, 2)),
    ((8, 0), 256, 2, Tile(64, 32, 8, 2)),
    ((8, 0), 64, 4, Tile(64, 32, 8, 2)),
    ((8, 0), 128, 4, Tile(64, 16, 8, 1)),
    ((8, 0), 256, 4, Tile(32, 16, 8, 1)),
)
# Hopper and the large Blackwell with tensor descriptors: for blocks of that many keys or more, in rows of a multiple of
# 16 bytes. Two programs at once, so that the products of one hide the softmax of the other. Where products read
# registers the code is longer with descriptors than with pointers
_DESCRIBED: tuple[tuple[int, int, Tile], ...] = (
    (64, 2, Tile(64, 128, 4, 3, described=True)),
    (128, 2, Tile(128, 64, 4, 2, described=True)),
    (256, 2, Tile(128, 64, 8, 2, described=True)),
)
# AMD: 64 KB of shared memory; not measured
_HIP_TILES: tuple[tuple[int, int, Tile], ...] = (
    (128, 2, Tile(128, 32, 4, 2)),
    (256, 2, Tile(64, 16, 8, 1)),
    (128, 4, Tile(64, 16, 8, 1)),
    (256, 4, Tile(32, 16, 8, 1)),
)
_SMALL_SHARED_MEMORY = {(12, 0), (12, 1)}  # newer than sm_90, with the 99 KB of sm_86


def attention_tile(capability: tuple[int, int] | str, head_dim: int, itemsize: int, describable: int = 0) -> Tile:
    """`capability`: (major, minor), or "hip"; `head_dim`: padded to a power of two.

    `describable`: keys that a descriptor may bring at once.
    """
    if _roomy(capability):
        for most, size, tile in _DESCRIBED:
            if head_dim <= most and itemsize == size and tile.keys <= describable:
                return tile
    if capability == "hip":
        return next(tile for most, size, tile in _HIP_TILES if head_dim <= most and itemsize == size)
    least = (8, 0) if capability in _SMALL_SHARED_MEMORY else max(capability, (8, 0))
    fits = (tile for needs, most, size, tile in _TILES if least >= needs and head_dim <= most and itemsize == size)
    return next(fits)


def quantised_tile(capability: tuple[int, int] | str, head_dim: int, describable: int = 0) -> Tile:
    """For int8 and fp8. By what compilers say, not measured but on an H200: the most at once that registers hold.

    On Hopper products read shared memory themselves, which leaves registers for 128 keys and two programs of 64 queries
    at once, with descriptors a fifth faster than one of 128; on the large Blackwell some of fp8's would be spilled.
    Descriptors need the index of a block, for which the pipeline keeps half of its stages: with five, a copy is issued
    two steps before it is waited for, with three or four at the end of the step before. Hopper's sizes with
    descriptors were timed. Shared memory is less of a limit: 104 KB on Hopper, which two programs have, 128
    beyond head dim 128, and 87 on the large Blackwell, 74 of 99 elsewhere, 41 of 64 on AMD GPUs.
    """
    if capability == "hip":
        return Tile(128, 64, 4, 2) if head_dim <= 128 else Tile(64, 64, 4, 1)
    if capability == (9, 0):
        if head_dim <= 128:
            return Tile(64, 128, 4, 5, described=True) if describable >= 128 else Tile(64, 128, 4, 3)
        return Tile(128, 64, 8, 5, described=True) if describable >= 64 else Tile(128, 64, 8, 3)
    return Tile(128, 64, 8, 3) if head_dim <= 128 else Tile(64, 64, 8, 2)


def mass_tile(capability: tuple[int, int] | str, head_dim: int, itemsize: int) -> Tile:
    """For ada_bsa's scores: groups of queries and of keys. By shared memory; not measured but on an H200."""
    if itemsize == 2 and head_dim <= 128 and _roomy(capability):
        return Tile(128, 128, 8, 3)
    return Tile(64, 64, 4, 2)


def part_tile(capability: tuple[int, int] | str, head_dim: int, itemsize: int) -> Tile:
    """For the mass between part means, and for their errors: parts of queries and of keys."""
    if itemsize == 2:
        if capability == (9, 0) and head_dim <= 128:  # two programs: one with a key mask would take 150 registers
            return Tile(128, 64, 8, 3, registers=128)
        if _roomy(capability):
            return Tile(128, 64, 8, 3) if head_dim <= 128 else Tile(64, 64, 4, 2)
        if head_dim > 128:
            return Tile(64, 32, 4, 1)
        return Tile(64, 64, 8 if capability == "hip" else 4, 2)
    if _roomy(capability):
        return Tile(128, 64, 8, 3) if head_dim <= 128 else Tile(64, 64, 8, 1)
    if capability == "hip":
        return Tile(32, 16, 8, 1)
    return Tile(64, 32, 4, 1) if head_dim <= 128 else Tile(32, 16, 4, 1)


def _roomy(capability: tuple[int, int] | str) -> bool:
    """Hopper and the large Blackwell: 227 KB of shared memory, and products that read it themselves."""
    return not isinstance(capability, str) and capability >= (9, 0) and capability not in _SMALL_SHARED_MEMORY
