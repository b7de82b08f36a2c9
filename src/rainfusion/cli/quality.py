"""`rainfusion quality`: samples of a small trained video model with dense and sparse attention, compared."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rainfusion import backends, checks
from rainfusion.cli import arguments, outputs
from rainfusion.cli.arguments import Commands
from rainfusion.options import PRECISIONS

_DESCRIPTION = """\
Samples the lab model with dense attention and with each method, from the same noise, and prints
how near each comes: PSNR, SSIM, cosine, the error of frame differences, the attention mass that it keeps,
its density and its time, with standard errors over prompts. Methods are compared at equal realised density.
The model is small and its videos are synthetic: the order of methods says more than the numbers."""

_EXAMPLES = """\
examples:
  rainfusion quality --quick --methods 4x4x8 oracle random
  rainfusion quality --densities 0.1 0.2 0.3 --nominal 0.8 --prompts 32 --out quality --sheet
  rainfusion quality --image --densities 0.2 --out from_images   # image-to-video
  rainfusion quality --densities 0.3 --methods rf_v2 --out quality --resume   # adds what is missing
  rainfusion quality --show quality   # the table and the picture once more"""

_DEFAULTS: dict[str, Any] = dict(prompts=16, steps=24, frames=None, size=None)  # None is the model's own
_QUICK: dict[str, Any] = dict(prompts=2, steps=6, frames=17, size=36)


def add(commands: Commands) -> None:
    """Adds the command and its options to the parser of `rainfusion`."""
    parser = commands.add_parser(
        "quality",
        help="sample a small trained video model with dense and sparse attention, and compare",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    what = parser.add_argument_group("what to compare")
    shares = "realised shares of blocks attended to (default: 0.2 0.3 0.4)"
    what.add_argument("--densities", type=float, nargs="*", default=[0.2, 0.3, 0.4], metavar="SHARE", help=shares)
    what.add_argument("--nominal", type=float, metavar="SPARSITY", help="also our methods and the oracle at a sparsity")
    what.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="parts of names (default: all methods)")
    what.add_argument("--precision", default="native", choices=PRECISIONS, help="of the methods (default: native)")
    what.add_argument("--list", action="store_true", help="show the methods and measure nothing")
    _add_sampling_options(parser)
    where = parser.add_argument_group("where results go")
    where.add_argument("--out", type=Path, metavar="DIR", help="write quality.json, quality.md and quality.png there")
    where.add_argument("--resume", action="store_true", help="keep the rows that DIR has, measure the others")
    where.add_argument("--sheet", action="store_true", help="also contact sheets of a few methods")
    where.add_argument("--show", type=Path, metavar="DIR", help="measure nothing: show and draw what it holds")
    parser.set_defaults(run=run, needs=needs, interrupted=interrupted)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how to sample")
    how.add_argument("--prompts", type=int, metavar="N", help="default: 16")
    how.add_argument("--steps", type=int, metavar="N", help="default: 24")
    how.add_argument("--guidance", type=float, default=2.5, help="1 samples the prompt alone (default: 2.5)")
    how.add_argument("--frames", type=int, help="default: the model's own")
    how.add_argument("--size", type=int, metavar="PIXELS", help="height and width (default: the model's own)")
    how.add_argument("--dense-steps", type=int, default=0, metavar="N", help="the first N steps dense (default: 0)")
    how.add_argument("--image", action="store_true", help="begin each clip with an image, as image-to-video does")
    how.add_argument("--quick", action="store_true", help="2 prompts, 6 steps, 17 frames, 36 pixels: minutes on a CPU")
    how.add_argument("--seed", type=int, default=0, help="of prompts and noise (default: 0)")
    how.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    how.add_argument("--backend", choices=backends.NAMES, help="default: the fastest of the device")
    how.add_argument("--weights", type=Path, metavar="FILE", help=arguments.WEIGHTS)


def needs(args: argparse.Namespace) -> list[str]:
    """Modules beside torch that this run imports."""
    return [] if args.list or args.show else ["safetensors"]


def interrupted(args: argparse.Namespace) -> str:
    """What a run that was cut short has left, and how to go on."""
    from rainfusion.lab import comparison

    if args.out is None:
        return "nothing was kept: with --out DIR rows are kept as they are measured, and --resume goes on with them"
    if not (args.out / comparison.JSON).exists():
        return f"nothing was measured yet, and {args.out / comparison.JSON} was not written"
    return f"{args.out} has the rows measured so far: the same command with --resume measures the others"


def run(args: argparse.Namespace) -> int:
    """Checks the options, samples, prints and writes; the exit status is 1 if a method failed."""
    from rainfusion.lab import comparison, methods, quality, weights

    chosen = [method.in_precision(args.precision) for method in methods.select(args.methods)]
    if args.list:
        return quality.list_methods(chosen)
    if args.show is not None:
        return quality.show(args.show)
    arguments.check_counts(args, "prompts", "steps", "frames", "size")
    arguments.check_finite(args, "guidance")
    arguments.check_seed(args)
    defaults = _QUICK if args.quick else _DEFAULTS
    counts = {name: value if getattr(args, name) is None else getattr(args, name) for name, value in defaults.items()}
    _check(args, counts["steps"])
    quality.check_out(args.out, args.resume)
    plan = quality.Plan(
        list(dict.fromkeys(args.densities)),
        arguments.device(args.device),
        nominal=args.nominal,
        **counts,
        guidance=args.guidance,
        dense_steps=args.dense_steps,
        image=args.image,
        methods=chosen,
        backend=args.backend,
        weights=args.weights,
        seed=args.seed,
        out=args.out,
        resume=args.resume,
        sheet=args.sheet,
    )
    weights.find(args.weights)
    if args.out is not None:
        outputs.check_folder("--out", args.out, comparison.FILES)
    return quality.run(plan)


def _check(args: argparse.Namespace, steps: int) -> None:
    for density in args.densities:
        checks.fraction("--densities", density, zero=False)
    if args.nominal is not None:
        checks.fraction("--nominal", args.nominal, zero=True)
    if not 0 <= args.dense_steps < steps:
        raise ValueError(f"--dense-steps must be in 0..{steps - 1} for {steps} steps, got {args.dense_steps}")
    if args.out is None and (args.resume or args.sheet):
        raise ValueError(f"--{'resume' if args.resume else 'sheet'} needs --out DIR")
