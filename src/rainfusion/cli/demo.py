"""`rainfusion demo`: a small video with full and with sparse attention, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from rainfusion.cli import arguments, outputs
from rainfusion.cli.arguments import Commands
from rainfusion.qualities import QUALITIES

_DESCRIPTION = """\
Samples the small video model of the repository twice from the same noise, with full
and with sparse attention; writes a GIF of both and their difference and a sheet of some frames, and prints
seconds, PSNR and density. About three minutes on two CPU cores."""

_EXAMPLES = """\
A prompt is a background that moves and three shapes, from back to front. The words are those of
rainfusion.lab.data.

examples:
  rainfusion demo --out demo
  rainfusion demo --quality fast --out fast
  rainfusion demo --sparsity 0.9 --dense-steps 2 --prompt 'background up; red disc, from left, right;
    blue square, from top, down, clockwise; white star, from bottom right, up left'"""

_QUICK = dict(steps=2, frames=9, size=36)


def add(commands: Commands) -> None:
    """Adds the command and its options to the parser of `rainfusion`."""
    parser = commands.add_parser(
        "demo",
        help="draw a small video with full and with sparse attention, side by side",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    where = "where pictures go (default: demo)"
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help=where)
    parser.add_argument("--prompt", metavar="TEXT", help="what to draw; see below")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: 0)")
    skipped = parser.add_mutually_exclusive_group()
    skipped.add_argument("--sparsity", type=float, help="share of blocks to skip (default: 0.85)")
    skipped.add_argument("--quality", choices=QUALITIES, help="a word instead, as for enable")
    parser.add_argument("--steps", type=int, metavar="N", help="default: 10")
    parser.add_argument("--dense-steps", type=int, metavar="N", help="the first N steps dense (default: 0)")
    parser.add_argument("--guidance", type=float, default=1.0, help="above 1 takes twice as long (default: 1)")
    parser.add_argument("--frames", type=int, help="default: the model's own, 81")
    parser.add_argument("--size", type=int, metavar="PIXELS", help="height and width (default: the model's own, 72)")
    parser.add_argument("--weights", type=Path, metavar="FILE", help=arguments.WEIGHTS)
    parser.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    parser.add_argument("--quick", action="store_true", help="2 steps, 9 frames, 36 pixels: to see that it works")
    anew = "no picture was written, and the same command starts anew; --quick takes seconds"
    parser.set_defaults(run=run, needs=lambda args: ["safetensors", "PIL"], interrupted=lambda args: anew)


def run(args: argparse.Namespace) -> int:
    """Checks the options, samples, prints and draws."""
    from rainfusion.lab import demo, weights

    arguments.check_seed(args)
    asked = {name: getattr(args, name) for name in ("prompt", "sparsity", "steps", "dense_steps", "frames", "size")}
    given = {name: value for name, value in asked.items() if value is not None}
    if args.quality is not None:  # how many steps stay dense is the demo's own
        word = QUALITIES[args.quality]
        given.update(sparsity=word.sparsity(args.frames or 0), schedule=word.schedule)
    plan = demo.Plan(
        args.out,
        arguments.device(args.device),
        seed=args.seed,
        guidance=args.guidance,
        weights=args.weights,
        **{**(_QUICK if args.quick else {}), **given},
    )
    weights.find(args.weights)
    outputs.check_folder("--out", args.out, (demo.GIF, demo.SHEET))
    return demo.run(plan)
