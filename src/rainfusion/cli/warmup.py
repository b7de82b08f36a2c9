"""`rainfusion warmup`: compiles the kernels of some options before the first call needs them."""

from __future__ import annotations

import argparse
from typing import Any

from rainfusion import checks
from rainfusion.cli import arguments
from rainfusion.cli.arguments import Commands
from rainfusion.options import PRECISIONS, PREDICTORS, Method, checked_block_size

_DESCRIPTION = """\
Compiles the kernels of sparse attention for some options, with one small call of each kind, and says how
long it took. Calls of other lengths, latent shapes, batches, heads, strides and sparsities compile nothing
more. Triton keeps what it compiled in a folder (TRITON_CACHE_DIR, by default ~/.triton/cache): run this where
a server is built or started, with the options that it has. rainfusion.warmup does the same inside of it, for
any Method."""

_EXAMPLES = """\
examples:
  rainfusion warmup                                             # what rainfusion.enable(pipe) needs, bf16
  rainfusion warmup --head-dim 64 --precision fp8 --masks none bool
  rainfusion warmup --block-size 128 --predictor submeans"""


def add(commands: Commands) -> None:
    """Adds the command and its options to the parser of `rainfusion`."""
    parser = commands.add_parser(
        "warmup",
        help="compile the kernels of some options before the first call",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("--dtype", choices=arguments.DTYPES, help="default: bf16, on a CPU fp32")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128], metavar="N", help="default: 128")
    parser.add_argument("--precision", choices=PRECISIONS, default="native", help="default: native")
    sizes = "128, 64, or QUERIES KEYS: 128 64, 128 32 (default: that of enable)"
    parser.add_argument("--block-size", type=int, nargs="+", metavar="N", help=sizes)
    parser.add_argument("--sparse-type", default="rf_v2", choices=["rf_v2", "ada_bsa"], help="default: rf_v2")
    parser.add_argument("--predictor", choices=PREDICTORS, help="default: that of enable")
    parser.add_argument("--compensate", action=argparse.BooleanOptionalAction, help="default: yes with rf_v2")
    parser.add_argument("--exact-budget", action="store_true", help="for calls with exact_budget=True")
    parser.add_argument("--by-head", action="store_true", help="for a sparsity of each head, as of a profile")
    parser.add_argument("--cdf-threshold", type=float, default=1.0, help="ada_bsa (default: 1.0)")
    masks = "key masks of the calls: none, bool, float (default: none)"
    parser.add_argument("--masks", nargs="+", default=["none"], metavar="KIND", help=masks)
    parser.add_argument("--no-grid", action="store_true", help="for calls without latent shapes")
    parser.add_argument("--lse", action="store_true", help="for calls with return_lse=True")
    parser.add_argument("--backend", default="auto", help="default: auto, the fastest that can")
    parser.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    kept = "what was compiled so far is kept, and the same command goes on from there"
    parser.set_defaults(run=run, needs=lambda args: [], interrupted=lambda args: kept, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Checks the options, compiles, and prints a line for each kind of call."""
    from rainfusion.warming import warmup

    for head_dim in args.head_dim:
        arguments.check_counts(argparse.Namespace(head_dim=head_dim), "head_dim")
    given: dict[str, Any] = {name: getattr(args, name) for name in ("predictor", "compensate")}
    if args.block_size is not None:
        given["block_size"] = checked_block_size(args.block_size if len(args.block_size) > 1 else args.block_size[0])
    method = Method.recommended(
        sparse_type=args.sparse_type,
        sparsity=[0.5, 0.6] if args.by_head else 0.5,  # kernels do not depend on its value
        precision=args.precision,
        exact_budget=args.exact_budget,
        cdf_threshold=checks.fraction("--cdf-threshold", args.cdf_threshold, zero=False),
        **{name: value for name, value in given.items() if value is not None},
    )
    device = arguments.device(args.device)
    ready = []
    for head_dim in args.head_dim:
        found = warmup(
            method,
            head_dim=head_dim,
            dtype=arguments.dtype(args.dtype, device),
            device=device,
            masks=args.masks,
            grid=not args.no_grid,
            return_lse=args.lse,
            backend=args.backend,
        )
        for call in found:
            took = f"{call.seconds:.1f} s" if call.compiles else "nothing to compile"
            print(f"{call.words}: {call.backend!r}, {took}", flush=True)
        ready += found
    if any(call.compiles for call in ready):
        print(f"ready after {sum(call.seconds for call in ready):.1f} s: calls of any size compile nothing more")
    else:
        print("ready: these backends are made of torch's operations, and calls compile nothing")
    return 0
