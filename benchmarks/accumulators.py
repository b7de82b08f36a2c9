"""What the sums of tensor cores lose: products of eight bits are added up with 14 bits, which is emulated here.

Attention of a few queries over many keys, as quantised kernels have it: weights and values are e4m3, and 32 keys at a
time are added to what there is, each cut off at the 13th bit behind the largest of them. Relative errors of the output
against float64, with values as they are and less their means over the keys; and with sums that registers take over
after every 128 keys. Measured on an H200, sums of 6,552 weights lost 0.13 of them and of 15,120 0.31.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rainfusion import TokenLayout, predict_mask
from rainfusion.bench.inputs import attention_inputs, call_arguments
from rainfusion.bench.shapes import SHAPES, Shape
from rainfusion.bench.verification import kept_keys, picked_rows

_BITS = 13  # behind the leading one
_STEP = 32  # keys that are added at once
_TILE = 128
_LARGEST = 448.0
HEADER = "| data | 32 bits | 14 bits | a tile at a time | 32 bits, smoothed | 14 bits, smoothed |"


class Part(NamedTuple):
    """A few queries [R, D] of a row of blocks, and the keys and values [N, D] that it keeps, as kernels walk them."""

    q: Tensor
    k: Tensor
    v: Tensor


def rounded(x: Tensor) -> Tensor:
    """As e4m3, in float64."""
    return x.float().to(torch.float8_e4m3fn).double()


def one_step(p: Tensor, v: Tensor, total: Tensor) -> Tensor:
    """total + p @ v of one instruction's keys, each product and the total cut off behind the largest of them."""
    products = p[:, :, None] * v[None]
    largest = torch.maximum(products.abs().amax(1), total.abs()).clamp(min=1e-300)
    unit = torch.exp2(largest.log2().floor() - _BITS)
    return ((products / unit[:, None]).trunc().sum(1) + (total / unit).trunc()) * unit


def added(p: Tensor, v: Tensor) -> Tensor:
    """p [R, N] @ v [N, D] in sums of 14 bits."""
    total = p.new_zeros(p.shape[0], v.shape[1])
    for keys in torch.arange(p.shape[1]).split(_STEP):
        total = one_step(p[:, keys], v[keys], total)
    return total


def by_tiles(p: Tensor, v: Tensor) -> Tensor:
    """The same, where registers add up what each tile gives."""
    return torch.stack([added(p[:, keys], v[keys]) for keys in torch.arange(p.shape[1]).split(_TILE)]).sum(0)


def errors(parts: Sequence[Part]) -> list[float]:
    """Of the columns of `HEADER`, over all parts."""
    gaps, size = [0.0] * 5, 0.0
    for q, k, v in parts:
        q, k, v = q.double(), k.double(), v.double()
        logits = q @ k.mT / math.sqrt(q.shape[1]) * math.log2(math.e)
        weights = torch.exp2(logits - logits.amax(1, keepdim=True))
        exact = weights @ v / weights.sum(1, keepdim=True)
        size += float(exact.square().sum())
        p = rounded(weights * 256)
        found = []
        for mean, ways in ((0.0 * v[0], (torch.matmul, added, by_tiles)), (v.mean(0), (torch.matmul, added))):
            scale = (v.abs().amax(0) + mean.abs()) / _LARGEST
            values = rounded((v - mean) / scale)
            found += [way(p, values) * scale / p.sum(1, keepdim=True) + mean for way in ways]
        gaps = [gap + float((out - exact).square().sum()) for gap, out in zip(gaps, found, strict=True)]
    return [math.sqrt(gap / size) for gap in gaps]


def normal(keys: int, mean: float, rows: int, dim: int) -> Part:
    """Random data; `mean`: of the values."""
    return Part(torch.randn(rows, dim), torch.randn(keys, dim), torch.randn(keys, dim) + mean)


def parts_of_a_call(shape: Shape, number: int, rows: int) -> Iterator[Part]:
    """Of synthetic video, with the published options: the rows of blocks that `rainfusion bench` checks.

    Of four different heads, as it has them on a GPU, where the others are these with other noise.
    """
    q, k, v = attention_inputs(shape, batch=1, heads=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    call = call_arguments(shape, "rf_v2", shape.sparsity)
    size = 128
    layout = TokenLayout.build(shape.seq_len, shape.latent_shape, shape.txt_len)
    for _, head, row in picked_rows(1, shape.heads, layout.num_blocks, number):
        one = [x[:, head % 4, None].float() for x in (q, k, v)]
        mask = predict_mask(*one[:2], **call, backend="portable")
        kept = kept_keys(mask, layout, 0, 0, row).flip(0)
        queries = layout.order[row * size : (row + 1) * size]
        queries = queries[:: max(1, len(queries) // rows)][:rows]
        yield Part(one[0][0, 0, queries], one[1][0, 0, kept], one[2][0, 0, kept])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/accumulators.py --keys 6552 15120 --shapes wan-480p",
    )
    parser.add_argument(
        "--keys",
        type=int,
        nargs="*",
        default=[6552, 15120],
        help="of normal data: 20%% of 480p and 720p (default: %(default)s)",
    )
    parser.add_argument(
        "--shapes",
        nargs="*",
        default=["wan-480p", "wan-720p"],
        choices=SHAPES,
        help="of synthetic video (default: %(default)s)",
    )
    parser.add_argument(
        "--blocks", type=int, default=6, help="of rows of a shape, the last one too (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=16, help="queries of each (default: %(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    torch.manual_seed(0)
    print(HEADER)
    print("| --- " + "| ---: " * (HEADER.count("|") - 2) + "|", flush=True)
    for keys, mean in itertools.product(args.keys, (0, 1, 3)):
        name = f"normal, {keys} keys" + (f", v with a mean of {mean}" if mean else "")
        _print(name, [normal(keys, mean, args.rows, 128)])
    for name in args.shapes:
        _print(f"synthetic video, {name}", parts_of_a_call(SHAPES[name], args.blocks, args.rows))


def _print(name: str, parts: Iterable[Part]) -> None:
    print(f"| {name} | " + " | ".join(f"{error:.4f}" for error in errors(list(parts))) + " |", flush=True)


if __name__ == "__main__":
    main()
