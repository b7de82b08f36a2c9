"""How long multiprocessors wait for the last rows of blocks: a simulation of `hopper`'s programs that stay.

A row takes as long as it has tiles of 128 keys, and a bit for its start; the program that is free first takes the next
one. Printed is by how much the last program ends later than the mean of all, with heads one after the other, and with
the last ones side by side, as the kernel takes them.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rainfusion import TokenLayout
from rainfusion.backends.hopper import heads_side_by_side

_START = 0.6  # tiles that the start and the end of a row take, which nothing runs beside
HEADER = "| call | one after the other | the last side by side | of them |"


class Call(NamedTuple):
    """heads: over the batch; kept: the share of blocks of a row. Without a layout blocks are drawn at random."""

    name: str
    heads: int
    tokens: int
    kept: float
    latent_shape: tuple[int, int, int] | None = None
    txt_len: int = 0


CALLS = (
    Call("1x40x75600, random blocks, 20%", 40, 75600, 0.2),
    Call("1x12x32760, random blocks, 20%", 12, 32760, 0.2),
    Call("2x24x4096, random blocks, 40%", 48, 4096, 0.4),
    Call("1x32x32640, random blocks, 20%", 32, 32640, 0.2),
    Call("2x24x4608, 512 of text, published options at 0.6", 48, 4608, 0.4, (1, 64, 64), 512),
    Call("1x12x32760, published options at 0.8", 12, 32760, 0.2, (21, 30, 52)),
    Call("1x40x75600, published options at 0.8", 40, 75600, 0.2, (21, 45, 80)),
    Call("1x24x16896, 512 of text, published options at 0.6", 24, 16896, 0.4, (1, 128, 128), 512),
)


def tiles(call: Call, seed: int) -> Tensor:
    """Of each row, heavy ones first: int64 [heads, rows]."""
    rows = -(-call.tokens // 128)
    if call.latent_shape is None and not call.txt_len:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(call.heads, rows, rows, generator=generator) < call.kept
        return drawn.sum(2).sort(descending=True).values
    protected = TokenLayout.build(call.tokens, call.latent_shape, call.txt_len).protected
    # the best blocks of all; about as many of the protected ones are among them as of others
    kept = call.kept * rows
    usual = torch.full((rows,), round(kept + (1 - call.kept) * int(protected.sum())))
    return usual.masked_fill(protected, rows).sort(descending=True).values.expand(call.heads, rows)


def taken(work: Tensor, together: int) -> Tensor:
    """In the order in which programs take them."""
    apart = len(work) - together
    return torch.cat([work[:apart].flatten(), work[apart:].T.flatten()])


def waits(work: Tensor, programs: int) -> float:
    """By which share the last program ends later than they would on average."""
    ends = [0.0] * programs
    for number in work.tolist():
        heapq.heapreplace(ends, ends[0] + number + _START)
    return max(ends) * programs / sum(ends) - 1


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    print(f"{HEADER}\n| --- | ---: | ---: | ---: |")
    for call in CALLS:
        together = heads_side_by_side(call.heads, -(-call.tokens // 128), args.programs)
        found = [
            [waits(taken(tiles(call, seed), number), args.programs) for seed in range(args.seeds)]
            for number in (1, together)
        ]
        before, after = (sum(x) / len(x) for x in found)
        print(f"| {call.name} | {before:.1%} | {after:.1%} | {together} |", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="waits.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/waits.py --programs 114",
    )
    parser.add_argument("--programs", type=int, default=132, help="multiprocessors (default: 132, as an H200 has)")
    parser.add_argument("--seeds", type=int, default=3, help="random masks to average over (default: 3)")
    return parser


if __name__ == "__main__":
    main()
