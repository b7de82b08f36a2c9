"""`rainfusion inspect`: the token order of a grid and the block masks of a call, as text and as pictures."""

from __future__ import annotations

import argparse
from pathlib import Path

from rainfusion import checks
from rainfusion.cli import arguments, outputs
from rainfusion.cli.arguments import Commands

_DESCRIPTION = """\
Shows which block each token of a grid falls into, and which blocks each head keeps: as text,
and as PNG with --out. The call is a synthetic video, or your own q and k with --tensors."""

_EXAMPLES = """\
examples:
  rainfusion inspect --latent-shape 5 16 24 --sparsity 0.8 --out pictures
  rainfusion inspect --latent-shape 21 45 80 --tensors call.pt   # torch.save({'q': q, 'k': k}, 'call.pt')"""


def add(commands: Commands) -> None:
    """Adds the command and its options to the parser of `rainfusion`."""
    parser = commands.add_parser(
        "inspect",
        help="show a token order and the block masks of a call",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--latent-shape", type=int, nargs=3, default=[5, 16, 24], metavar=("T", "H", "W"), help="default: 5 16 24"
    )
    parser.add_argument("--txt-len", type=int, default=0, help="text tokens in front of the grid")
    orders = "window, mindiesd, raster, or WT WH WW"
    parser.add_argument("--token-order", nargs="+", default=["window"], metavar="ORDER", help=orders)
    parser.add_argument("--block-size", type=int, default=128, choices=checks.BLOCK_SIZES, help="default: 128")
    parser.add_argument("--sparse-type", default="rf_v2", choices=["rf_v2", "ada_bsa"], help="default: rf_v2")
    parser.add_argument("--sparsity", type=float, default=0.8, help="share of blocks to skip (default: 0.8)")
    parser.add_argument("--cdf-threshold", type=float, default=1.0, help="ada_bsa (default: 1.0)")
    parser.add_argument("--heads", type=int, default=4, help="of the synthetic call (default: 4)")
    parser.add_argument("--head-dim", type=int, default=64, help="of the synthetic call (default: 64)")
    parser.add_argument("--tensors", type=Path, metavar="FILE", help="q and k of a call of your own")
    layouts = checks.INPUT_LAYOUTS
    parser.add_argument("--input-layout", default="BNSD", choices=layouts, help="of --tensors (default: BNSD)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write order.png and mask.png there")
    parser.set_defaults(run=run, needs=needs, interrupted=lambda args: "nothing more was written", parser=parser)


def needs(args: argparse.Namespace) -> list[str]:
    """Modules beside torch that this run imports."""
    return [] if args.out is None else ["matplotlib"]


def run(args: argparse.Namespace) -> int:
    """Checks the options, then prints and draws."""
    from rainfusion.bench import inspection

    arguments.check_counts(args, "heads", "head_dim")
    arguments.check_counts(args, "txt_len", minimum=0)
    checks.grid("--latent-shape", args.latent_shape)
    checks.fraction("--sparsity", args.sparsity, zero=True)
    checks.fraction("--cdf-threshold", args.cdf_threshold, zero=False)
    if args.tensors is not None:
        of_the_file = "is for the synthetic call: leave it out with --tensors, whose q and k have their own"
        arguments.refuse(args, args.parser, ["heads", "head_dim"], of_the_file)
    order = _token_order(args.token_order)
    if args.out is not None:
        outputs.check_folder("--out", args.out, inspection.FILES)
    return inspection.run(
        args.latent_shape,
        txt_len=args.txt_len,
        token_order=order,
        block_size=args.block_size,
        sparse_type=args.sparse_type,
        sparsity=args.sparsity,
        cdf_threshold=args.cdf_threshold,
        heads=args.heads,
        head_dim=args.head_dim,
        tensors=args.tensors,
        input_layout=args.input_layout,
        out=args.out,
    )


def _token_order(words: list[str]) -> str | list[int]:
    """One word is the name of an order, three are the sides of a window."""
    if len(words) == 1:
        return words[0]
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise ValueError(f"--token-order must be a name or three numbers WT WH WW, got {' '.join(words)}") from error
