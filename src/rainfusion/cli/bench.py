"""`rainfusion bench`: dense and sparse attention on named shapes, or whole models, timed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rainfusion import backends, checks
from rainfusion.bench.architectures import MODELS, Model, Size
from rainfusion.bench.inputs import SparseType, Strategy
from rainfusion.bench.models import REPEATS
from rainfusion.bench.shapes import SHAPES, SWEEP_SPARSITIES, Shape, token_sweep
from rainfusion.cli import arguments, outputs
from rainfusion.cli.arguments import Commands
from rainfusion.options import PRECISIONS

_DESCRIPTION = """\
Times dense and sparse attention in one run, after checking a few rows against float64.
Without names: shapes of seconds on a CPU, the real ones elsewhere. On a CUDA device: torch's dense
kernels, other libraries that are installed, our kernel alone, the whole call, and the call in a CUDA graph.

With --model: forwards of a whole diffusers transformer, the real architecture with random weights, made
on the device. A forward's time does not depend on the weights; its output says nothing about quality."""

_EXAMPLES = """\
examples:
  rainfusion bench wan-480p-17f flux-1024-4h --sparse-type rf_v2,ada_bsa --json > bench.json
  rainfusion bench --latent-shape 9 30 52 --txt-len 256 --heads 4 --sparsity 0.8
  rainfusion bench wan-720p --precision native fp8 int8 --flex --csv benchmarks/results/attention.csv
  rainfusion bench --sweep sparsity --csv benchmarks/results/attention.csv --plot sparsity.png
  rainfusion bench --from-csv benchmarks/results/attention.csv --sweep tokens --plot tokens.png
  rainfusion bench --model wan2.2-a14b --precision native int8 --csv benchmarks/results/end_to_end.csv
  rainfusion bench --model wan2.2-a14b --compile --sparsity 0.8,0.85 --precision native fp8
  rainfusion bench --model qwen-image flux --height 2048 --width 2048
  rainfusion bench --model wan2.1-1.3b --layers 1 --height 64 --width 128 --frames 9 --device cpu"""

_OF_MODELS = ("height", "width", "frames", "layers", "steps", "compile")
_OF_ATTENTION = (
    "names",
    "latent_shape",
    "txt_len",
    "head_dim",
    "batch",
    "heads",
    "flex",
    "seconds",
    "sweep",
    "plot",
)


def add(commands: Commands) -> None:
    """Adds the command and its options to the parser of `rainfusion`."""
    parser = commands.add_parser(
        "bench",
        help="time dense and sparse attention on named shapes, or whole models with --model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=f"shapes (batch x heads x tokens x head dim):\n{_list_shapes()}\n\n"
        f"models (parameters, default height x width x frames, self-attention):\n{_list_models()}\n\n{_EXAMPLES}",
    )
    _add_attention_options(parser)
    _add_model_options(parser)
    how = parser.add_argument_group("how long")
    rounds = f"timed rounds of each (default: 5; on CUDA up to 50; {REPEATS} forwards of a model)"
    how.add_argument("--repeats", type=int, help=rounds)
    how.add_argument("--seconds", type=float, default=2.0, help="at most so long for each contender (default: 2)")
    where = parser.add_argument_group("where results go")
    where.add_argument("--json", action="store_true", help="print JSON instead of the table")
    where.add_argument("--csv", type=Path, metavar="FILE", help="add rows to it, or replace those measured before")
    where.add_argument("--from-csv", type=Path, metavar="FILE", help="measure nothing: show or draw what it holds")
    where.add_argument("--plot", type=Path, metavar="PNG", help="draw speed-ups of the whole call")
    parser.set_defaults(run=run, needs=needs, interrupted=interrupted, parser=parser)


def _list_shapes() -> str:
    return "\n".join(
        f"  {s.name:19} {s.batch} x {s.heads:2} x {s.seq_len:6} x {s.head_dim:3}  {s.note}" for s in SHAPES.values()
    )


def _list_models() -> str:
    return "\n".join(
        f"  {m.name:19} {m.billions:4.1f} B, {m.size!s:>12}, {m.tokens(m.size):6} tokens, sparsity {m.sparsity}"
        + (f"; {m.note}" if m.note else "")
        for m in MODELS.values()
    )


def _add_attention_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to measure")
    what.add_argument("names", nargs="*", metavar="SHAPE", help="which shapes; see the list below")
    what.add_argument("--latent-shape", type=int, nargs=3, metavar=("T", "H", "W"), help="a shape of your own")
    what.add_argument("--txt-len", type=int, default=0, help="text in front of it (default: 0)")
    what.add_argument("--head-dim", type=int, default=128, help="of it, or of --sweep tokens (default: 128)")
    what.add_argument("--batch", type=int, help="instead of the shape's own (default for your own: 1)")
    what.add_argument("--heads", type=int, help="instead of the shape's own number (default for your own: 4)")
    what.add_argument(
        "--sparse-type",
        default="rf_v2",
        help="rf_v2, ada_bsa, enable (rf_v2 with its options); several with commas (default: rf_v2)",
    )
    share = "share of blocks to skip; several with commas (default: the shape's or model's own)"
    what.add_argument("--sparsity", type=arguments.numbers, metavar="SHARE", help=share)
    what.add_argument("--precision", nargs="+", default=["native"], choices=PRECISIONS, help="default: native")
    what.add_argument("--dtype", choices=arguments.DTYPES, help="default: fp32 on a CPU, bf16 elsewhere")
    what.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    what.add_argument("--backend", default="auto", choices=["auto", *backends.NAMES], help="default: auto")
    what.add_argument(
        "--flex",
        action="store_true",
        help="also FlexAttention and, if installed, FlashAttention-4, dense and sparse (CUDA; slow to compile)",
    )
    what.add_argument("--seed", type=int, default=0, help="of the synthetic video or of the weights (default: 0)")
    sweeps = "sparsity: 0 to 0.95 on the shapes named (default: wan-480p); tokens: 2k to 150k, 12 heads, sparsity 0.8"
    what.add_argument("--sweep", choices=["sparsity", "tokens"], help=sweeps)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    whole = parser.add_argument_group("whole models, with random weights")
    whole.add_argument("--model", nargs="+", metavar="MODEL", help="which; see the list below (needs diffusers)")
    whole.add_argument("--height", type=int, help="in pixels (default: the model's own)")
    whole.add_argument("--width", type=int, help="in pixels (default: the model's own)")
    whole.add_argument("--frames", type=int, help="default: the model's own")
    whole.add_argument("--layers", type=int, metavar="N", help="only N blocks of each kind, for a quick look")
    whole.add_argument("--steps", type=int, metavar="N", help="of a whole run, which is N times a step")
    whole.add_argument("--compile", action="store_true", help="torch.compile the blocks, dense and sparse")


def needs(args: argparse.Namespace) -> list[str]:
    """Modules beside torch that this run imports."""
    measures_models = args.model and args.from_csv is None
    return [*(["diffusers"] if measures_models else []), *(["matplotlib"] if args.plot else [])]


def interrupted(args: argparse.Namespace) -> str:
    """What a run that was cut short has left, and how to go on."""
    if args.csv is None:
        return "nothing was kept: with --csv FILE rows are kept as they are measured"
    if not args.csv.exists():
        return f"nothing was measured yet, and {args.csv} was not written"
    kind = "models" if args.model else "shapes"
    return f"{args.csv} has what was measured so far: run the command again with the {kind} that are missing"


def run(args: argparse.Namespace) -> int:
    """Checks the options, measures and prints; the exit status is 1 if a result was wrong."""
    return _run_models(args) if args.model else _run_attention(args)


def _run_attention(args: argparse.Namespace) -> int:
    from rainfusion.bench import attention

    arguments.refuse(args, args.parser, _OF_MODELS, "needs --model")
    unknown = [name for name in args.names if name not in SHAPES]
    if unknown:
        raise ValueError(f"SHAPE must be one of {', '.join(SHAPES)}, got {', '.join(unknown)}")
    arguments.check_counts(args, "heads", "head_dim", "batch")
    arguments.check_counts(args, "txt_len", minimum=0)
    arguments.check_finite(args, "seconds")
    if not args.seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {args.seconds}")
    _check_numbers(args)
    sparse_types = _sparse_types(args)
    panels = [args.sweep] if args.sweep else None
    if args.from_csv is not None:
        _check_outputs(args)
        return attention.draw_from_csv(args.from_csv, args.plot, panels, args.json)
    shapes, sparsities = _shapes_and_sparsities(args)
    device = arguments.device(args.device)
    _check_outputs(args)
    plan = attention.Plan(
        shapes or attention.default_shapes(device),
        device,
        arguments.dtype(args.dtype, device),
        sparse_types=sparse_types,
        sparsities=sparsities,
        precisions=list(dict.fromkeys(args.precision)),
        backend=args.backend,
        batch=args.batch,
        heads=args.heads,
        repeats=args.repeats,
        seconds=args.seconds,
        seed=args.seed,
        flex=args.flex,
        as_json=args.json,
        csv=args.csv,
        plot=args.plot,
        panels=panels or (["shapes"] if args.plot else None),
    )
    return attention.run(plan)


def _check_numbers(args: argparse.Namespace) -> None:
    """Checks the numbers that shapes and models share."""
    arguments.check_counts(args, "repeats")
    arguments.check_seed(args)
    for sparsity in args.sparsity or ():
        checks.fraction("--sparsity", sparsity, zero=True)


def _check_outputs(args: argparse.Namespace) -> None:
    if args.csv is not None and args.from_csv is not None:
        raise ValueError("--csv is where measurements go, and --from-csv measures nothing: leave one of them out")
    if args.csv is not None:
        outputs.check_file("--csv", args.csv, example="attention.csv")
    if args.plot is not None:
        outputs.check_picture("--plot", args.plot)
        if args.plot in (args.csv, args.from_csv):
            raise ValueError(f"--plot must be another file than the one with the rows, got {str(args.plot)!r} for both")


def _sparse_types(args: argparse.Namespace) -> list[SparseType]:
    """The types that --sparse-type names; one that is named twice is measured once."""
    names = dict.fromkeys(args.sparse_type.split(","))
    return [checks.choice("--sparse-type", name, get_args(SparseType)) for name in names]


def _shapes_and_sparsities(args: argparse.Namespace) -> tuple[list[Shape], list[float | None]]:
    """The shapes and sparsities asked for. No shapes stand for those of the device, None for a shape's own sparsity."""
    shapes = [SHAPES[name] for name in dict.fromkeys(args.names)]
    if args.latent_shape:
        shapes.append(_own_shape(args))
    else:
        arguments.refuse(args, args.parser, ["txt_len"], "needs --latent-shape: named shapes have their own text")
    if not args.latent_shape and args.sweep != "tokens":
        needed = "needs --latent-shape or --sweep tokens: named shapes have their own"
        arguments.refuse(args, args.parser, ["head_dim"], needed)
    sparsities = _sparsities(args)
    if args.sweep == "tokens":
        if shapes:
            raise ValueError(f"--sweep tokens has shapes of its own, got {', '.join(shape.name for shape in shapes)}")
        return token_sweep(head_dim=args.head_dim), sparsities
    if args.sweep == "sparsity":
        if args.sparsity is not None:
            given = ",".join(map(str, args.sparsity))
            raise ValueError(f"--sweep sparsity goes through many, got --sparsity {given} too")
        return shapes or [SHAPES["wan-480p"]], list(SWEEP_SPARSITIES)
    return shapes, sparsities


def _sparsities(args: argparse.Namespace) -> list[float | None]:
    """Those that --sparsity names, each once; None, for the shape's or the model's own, where it is not given."""
    return [None] if args.sparsity is None else list(dict.fromkeys(args.sparsity))


def _own_shape(args: argparse.Namespace) -> Shape:
    grid = checks.grid("--latent-shape", args.latent_shape)
    name = "x".join(map(str, grid))
    sparsity = 0.6 if grid[0] == 1 else 0.8
    heads = 4 if args.heads is None else args.heads
    return Shape(name, heads, args.head_dim, grid, args.txt_len, sparsity, "yours")


def _run_models(args: argparse.Namespace) -> int:
    from rainfusion.bench import models

    arguments.refuse(args, args.parser, _OF_ATTENTION, "is for attention alone, not for --model")
    chosen = _models(args.model)
    arguments.check_counts(args, "steps")
    _check_numbers(args)
    strategies: list[Strategy] = [name for name in _sparse_types(args) if name != "enable"]
    if not strategies:
        raise ValueError("--sparse-type enable is for attention alone: models always have the options of enable")
    if args.from_csv is not None:
        _check_outputs(args)
        return models.show(args.from_csv, [model.name for model in chosen], steps=args.steps, as_json=args.json)
    sizes = [_size(model, args) for model in chosen]
    device = arguments.device(args.device)
    jobs = [
        models.Job(
            model,
            size,
            device,
            arguments.dtype(args.dtype, device),
            layers=args.layers,
            sparse_types=strategies,
            sparsities=_sparsities(args),
            precisions=list(dict.fromkeys(args.precision)),
            backend=args.backend,
            seed=args.seed,
            repeats=REPEATS if args.repeats is None else args.repeats,
            compiled=args.compile,
        )
        for model, size in zip(chosen, sizes, strict=True)
    ]
    _check_outputs(args)
    return models.run(jobs, steps=args.steps, csv=args.csv, as_json=args.json)


def _models(names: Sequence[str]) -> list[Model]:
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, got {', '.join(unknown)}")
    return [MODELS[name] for name in dict.fromkeys(names)]


def _size(model: Model, args: argparse.Namespace) -> Size:
    """The model's own size with what the command line says of it."""
    asked = {name: getattr(args, name) for name in ("height", "width", "frames")}
    size = model.size._replace(**{name: pixels for name, pixels in asked.items() if pixels is not None})
    model.check(size, args.layers)
    return size
