"""The error of attention itself, |out - dense| / |dense|, on calls of a dense sample of the lab model, at equal work.

Work is counted in tiles of 128 queries and 128 keys, as a kernel has it: the means that stand in for skipped blocks
take tiles like keys. Text is always kept, on top. Rows are windows, sizes of key blocks and predictors with the other
options of `enable`; "true mass" chooses by what attention really gives each block. Errors say the same as PSNRs of
samples, with less noise and in less time.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rainfusion import BlockMask, lab, sparse_attention
from rainfusion.lab.model import Place, dense
from rainfusion.lab.rules import attention_mass
from rainfusion.layout import TokenLayout
from rainfusion.prediction.selection import keep_best

PREDICTORS = ("mean", "submeans", "spread", "true mass")


class Captured(NamedTuple):
    """One attention call: q, k, v [1, H, S, D], and where in the model it was."""

    q: Tensor
    k: Tensor
    v: Tensor
    place: Place


def capture(model: lab.DiT, number: int, steps: int, **options: Any) -> list[Captured]:
    """Calls of a dense sample, spread evenly over its steps and layers."""
    total = steps * model.config.depth
    wanted = {int((i + 0.5) * total / number) for i in range(number)}
    calls: list[Captured] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        if place.step * model.config.depth + place.layer in wanted:
            calls.append(Captured(q[:1].float(), k[:1].float(), v[:1].float(), place))
        return dense(q, k, v, place)

    prompts = lab.random_prompts(1, torch.Generator().manual_seed(0))
    lab.sample(model, prompts, steps=steps, guidance=1.0, attention=attend, **options)
    return calls


Window = tuple[int, int, int]


def window(text: str) -> Window:
    """As in "2x8x8"."""
    frames, rows, columns = map(int, text.split("x"))
    return frames, rows, columns


def error(call: Captured, order: Window, predictor: str, keys: int, density: float) -> float:
    """Of a call with as many tiles as `density` of all are, those of the means counted in."""
    q, k, v, place = call
    exact = dense(q, k, v, place)
    layout = _layout(call, order, keys)
    blocks, tiles = layout.num_blocks, math.ceil(q.shape[2] / 128)
    kept = max(1, round(density * tiles) - math.ceil(blocks / 128)) * (128 // keys)
    size = 128 if keys == 128 else (128, keys)
    options: dict[str, Any] = dict(sparse_type="rf_v2", block_size=size, compensate=True, first_frame="free")
    where = dict(latent_shape_q=place.grid, txt_len=place.text, token_order=order)
    if predictor == "true mass":
        options.update(predictor="spread", mask=_by_true_mass(call, order, layout, kept))
    else:
        options.update(predictor=predictor, sparsity=1.0 - kept / blocks)
    out = sparse_attention(q, k, v, **options, **where, backend="portable" if q.device.type == "cpu" else "auto")
    return float((out - exact).norm() / exact.norm())


def _layout(call: Captured, order: Window, block_size: int) -> TokenLayout:
    grid, text = call.place.grid, call.place.text
    options = dict(token_order=order, block_size=block_size, first_frame="free")
    return TokenLayout.build(call.q.shape[2], grid, text, **options).to(call.q.device)


def _by_true_mass(call: Captured, order: Window, layout: TokenLayout, number: int) -> BlockMask:
    mass = attention_mass(call.q, call.k, layout, q_block=128)
    budget = torch.tensor([number], device=call.q.device)
    kept = keep_best(mass[0], budget, _layout(call, order, 128).protected, layout.protected)
    return BlockMask.from_dense(kept[None], 128 if layout.block_size == 128 else (128, layout.block_size))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/calls.py --densities 0.1 0.2 --calls 12",
    )
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    parser.add_argument("--keys", type=int, nargs="+", default=[128, 64, 32], choices=[128, 64, 32])
    parser.add_argument("--predictors", nargs="+", default=list(PREDICTORS), choices=PREDICTORS)
    parser.add_argument(
        "--windows", type=window, nargs="+", default=[(2, 8, 8)], metavar="TxHxW", help="default: 2x8x8"
    )
    parser.add_argument("--calls", type=int, default=12, help="of the sample, evenly spread (default: 12)")
    parser.add_argument("--steps", type=int, default=8, help="of the sample (default: 8)")
    parser.add_argument("--frames", type=int, help="fewer than the model has, for a quick look")
    parser.add_argument("--size", type=int, help="pixels of a side, likewise")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    model = lab.load(device=args.device)
    sizes = {name: getattr(args, name) for name in ("frames", "size") if getattr(args, name) is not None}
    with torch.inference_mode():
        calls = capture(model, args.calls, args.steps, **sizes)
        print(f"{len(calls)} calls of {calls[0].q.shape[2]} tokens, grid {calls[0].place.grid}", flush=True)
        print("| window | keys | predictor | " + " | ".join(f"{density:.0%}" for density in args.densities) + " |")
        print("| --- | ---: | --- |" + " ---: |" * len(args.densities))
        for order, keys, predictor in itertools.product(args.windows, args.keys, args.predictors):
            means = [
                sum(error(call, order, predictor, keys, density) for call in calls) / len(calls)
                for density in args.densities
            ]
            words = ("x".join(map(str, order)), str(keys), predictor, *(f"{mean:.3f}" for mean in means))
            print(f"| {' | '.join(words)} |", flush=True)


if __name__ == "__main__":
    main()
