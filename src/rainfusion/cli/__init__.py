"""The command `rainfusion`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from rainfusion import __version__, backends, checks
from rainfusion.bench.models import MODELS, REPEATS
from rainfusion.bench.shapes import SHAPES, SWEEP_SPARSITIES, Shape, token_sweep

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_PACKAGES = {"PIL": "pillow"}  # what to install for a module


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    missing = [_PACKAGES.get(name, name) for name in args.needs(args) if importlib.util.find_spec(name) is None]
    if missing:
        parser.exit(2, f"rainfusion {args.command} needs {' and '.join(missing)}: pip install {' '.join(missing)}\n")
    try:
        return int(args.run(args))
    except BrokenPipeError:  # `rainfusion inspect | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        parser.exit(2, f"rainfusion {args.command}: {error}\n")
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rainfusion", description="Block-sparse attention for video and image DiTs.")
    parser.add_argument("--version", action="version", version=f"rainfusion {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_bench(commands)
    _add_inspect(commands)
    _add_demo(commands)
    _add_quality(commands)
    _add_calibrate(commands)
    return parser


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    names = "\n".join(
        f"  {s.name:19} {s.batch} x {s.heads:2} x {s.seq_len:6} x {s.head_dim:3}  {s.note}" for s in SHAPES.values()
    )
    models = "\n".join(
        f"  {m.name:19} {m.billions:4.1f} B, {m.size!s:>12}, {m.tokens(m.size):6} tokens, sparsity {m.sparsity}"
        + (f"; {m.note}" if m.note else "")
        for m in MODELS.values()
    )
    bench = commands.add_parser(
        "bench",
        help="time dense and sparse attention on named shapes, or whole models with --model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Times dense and sparse attention in one run, after checking a few rows against float64.\n"
        "Without names: shapes of seconds on a CPU, the real ones elsewhere. On a CUDA device: torch's dense\n"
        "kernels, other libraries that are installed, our kernel alone, the whole call, and the call in a CUDA graph.\n"
        "\nWith --model: forwards of a whole diffusers transformer, the real architecture with random weights, made\n"
        "on the device. A forward's time does not depend on the weights; its output says nothing about quality.",
        epilog=f"shapes (batch x heads x tokens x head dim):\n{names}\n\n"
        f"models (parameters, default height x width x frames, self-attention):\n{models}\n\n"
        "examples:\n"
        "  rainfusion bench wan-480p-17f flux-1024-4h --sparse-type rf_v2,ada_bsa --json > bench.json\n"
        "  rainfusion bench --latent-shape 9 30 52 --txt-len 256 --heads 4 --sparsity 0.8\n"
        "  rainfusion bench wan-720p --precision native fp8 int8 --flex --csv benchmarks/results/attention.csv\n"
        "  rainfusion bench --sweep sparsity --csv benchmarks/results/attention.csv --plot sparsity.png\n"
        "  rainfusion bench --from-csv benchmarks/results/attention.csv --sweep tokens --plot tokens.png\n"
        "  rainfusion bench --model wan2.2-a14b --precision native int8 --csv benchmarks/results/end_to_end.csv\n"
        "  rainfusion bench --model qwen-image flux --height 2048 --width 2048\n"
        "  rainfusion bench --model wan2.1-1.3b --layers 1 --height 64 --width 128 --frames 9 --device cpu",
    )
    what = bench.add_argument_group("what to measure")
    what.add_argument("names", nargs="*", metavar="SHAPE", help="which shapes; see the list below")
    what.add_argument("--latent-shape", type=int, nargs=3, metavar=("T", "H", "W"), help="a shape of your own")
    what.add_argument("--txt-len", type=int, default=0, help="text in front of it (default: 0)")
    what.add_argument("--head-dim", type=int, default=128, help="of it, or of --sweep tokens (default: 128)")
    what.add_argument("--batch", type=int, help="instead of the shape's own (default for your own: 1)")
    what.add_argument("--heads", type=int, help="instead of the shape's own number (default for your own: 4)")
    what.add_argument("--sparse-type", default="rf_v2", help="rf_v2, ada_bsa, or both with a comma (default: rf_v2)")
    what.add_argument("--sparsity", type=float, help="share of blocks to skip (default: the shape's or model's own)")
    what.add_argument("--precision", nargs="+", default=["native"], choices=checks.PRECISIONS, help="default: native")
    what.add_argument("--dtype", choices=_DTYPES, help="default: fp32 on a CPU, bf16 elsewhere")
    what.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    what.add_argument("--backend", default="auto", choices=["auto", *backends.NAMES], help="default: auto")
    what.add_argument("--flex", action="store_true", help="also FlexAttention, which takes long to compile (CUDA)")
    what.add_argument("--seed", type=int, default=0, help="of the synthetic video or of the weights (default: 0)")
    what.add_argument(
        "--sweep", choices=["sparsity", "tokens"],
        help="sparsity: 0 to 0.95 on the shapes named (default: wan-480p); tokens: 2k to 150k, 12 heads, sparsity 0.8",
    )  # fmt: skip
    whole = bench.add_argument_group("whole models, with random weights")
    whole.add_argument("--model", nargs="+", metavar="MODEL", help="which; see the list below (needs diffusers)")
    whole.add_argument("--height", type=int, help="in pixels (default: the model's own)")
    whole.add_argument("--width", type=int, help="in pixels (default: the model's own)")
    whole.add_argument("--frames", type=int, help="default: the model's own")
    whole.add_argument("--layers", type=int, metavar="N", help="only N blocks of each kind, for a quick look")
    whole.add_argument("--steps", type=int, metavar="N", help="of a whole run, which is N times a step")
    whole.add_argument("--compile", action="store_true", help="torch.compile the blocks, dense and sparse")
    how = bench.add_argument_group("how long")
    how.add_argument(
        "--repeats", type=int,
        help=f"timed rounds of each (default: 5; on CUDA up to 50; {REPEATS} forwards of a model)",
    )  # fmt: skip
    how.add_argument("--seconds", type=float, default=2.0, help="at most so long for each contender (default: 2)")
    where = bench.add_argument_group("where results go")
    where.add_argument("--json", action="store_true", help="print JSON instead of the table")
    where.add_argument("--csv", type=Path, metavar="FILE", help="add rows to it, or replace those measured before")
    where.add_argument("--from-csv", type=Path, metavar="FILE", help="measure nothing: show or draw what it holds")
    where.add_argument("--plot", type=Path, metavar="PNG", help="draw speed-ups of the whole call")
    bench.set_defaults(run=_bench, needs=_needs_of_bench, given=lambda args, name: _given(bench, args, name))


def _needs_of_bench(args: argparse.Namespace) -> list[str]:
    measuring = ["tqdm", *(["diffusers"] if args.model else [])]
    return [*(measuring if args.from_csv is None else []), *(["matplotlib"] if args.plot else [])]


def _given(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> bool:
    """Whether an option is there and not as it is by default."""
    value = getattr(args, name)
    return bool(value != parser.get_default(name) and value != [])


def _refuse(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if args.given(args, name):
            raise ValueError(f"{'SHAPE' if name == 'names' else '--' + name.replace('_', '-')} {reason}")


def _bench(args: argparse.Namespace) -> int:
    from rainfusion.bench import attention as bench

    if args.model:
        return _bench_models(args)
    _refuse(args, ("height", "width", "frames", "layers", "steps", "compile"), "needs --model")
    unknown = [name for name in args.names if name not in SHAPES]
    if unknown:
        raise ValueError(f"SHAPE must be one of {', '.join(SHAPES)}, got {', '.join(unknown)}")
    for name in ("heads", "repeats", "head_dim", "batch"):
        if getattr(args, name) is not None:
            checks.integer(f"--{name.replace('_', '-')}", getattr(args, name), minimum=1)
    if not args.seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {args.seconds}")
    sparse_types = args.sparse_type.split(",")
    for sparse_type in sparse_types:
        checks.choice("--sparse-type", sparse_type, ("rf_v2", "ada_bsa"))
    panels = [args.sweep] if args.sweep else None
    if args.from_csv is not None:
        return bench.draw_from_csv(args.from_csv, args.plot, panels, args.json)
    device = _device(args.device)
    dtype = _DTYPES[args.dtype] if args.dtype else torch.float32 if device.type == "cpu" else torch.bfloat16
    shapes, sparsities = _shapes_and_sparsities(args)
    return bench.run(
        bench.Plan(
            shapes or bench.default_shapes(device), device, dtype, sparse_types=sparse_types, sparsities=sparsities,
            precisions=list(dict.fromkeys(args.precision)), backend=args.backend, batch=args.batch, heads=args.heads,
            repeats=args.repeats, seconds=args.seconds, seed=args.seed, flex=args.flex, as_json=args.json,
            csv=args.csv, plot=args.plot, panels=panels or (["shapes"] if args.plot else None),
        )
    )  # fmt: skip


def _bench_models(args: argparse.Namespace) -> int:
    from rainfusion.bench import models as endtoend

    alone = ("names", "latent_shape", "txt_len", "head_dim", "batch", "heads", "flex", "seconds", "sweep", "plot")
    _refuse(args, alone, "is for attention alone, not for --model")
    unknown = [name for name in args.model if name not in MODELS]
    if unknown:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, got {', '.join(unknown)}")
    for name in ("repeats", "steps"):
        if getattr(args, name) is not None:
            checks.integer(f"--{name}", getattr(args, name), minimum=1)
    if args.sparsity is not None and not 0 <= args.sparsity <= 1:
        raise ValueError(f"--sparsity must be in [0, 1], got {args.sparsity}")
    sparse_types = list(dict.fromkeys(args.sparse_type.split(",")))
    for sparse_type in sparse_types:
        checks.choice("--sparse-type", sparse_type, ("rf_v2", "ada_bsa"))
    models = [MODELS[name] for name in dict.fromkeys(args.model)]
    if args.from_csv is not None:
        return endtoend.show(args.from_csv, [model.name for model in models], steps=args.steps, as_json=args.json)
    device = _device(args.device)
    dtype = _DTYPES[args.dtype] if args.dtype else torch.float32 if device.type == "cpu" else torch.bfloat16
    jobs = []
    for model in models:
        asked = {name: getattr(args, name) for name in ("height", "width", "frames")}
        size = model.size._replace(**{name: pixels for name, pixels in asked.items() if pixels is not None})
        model.check(size, args.layers)
        jobs.append(
            endtoend.Job(
                model, size, device, dtype, layers=args.layers, sparse_types=sparse_types, sparsity=args.sparsity,
                precisions=list(dict.fromkeys(args.precision)), backend=args.backend, seed=args.seed,
                repeats=args.repeats or REPEATS, compiled=args.compile,
            )
        )  # fmt: skip
    return endtoend.run(jobs, steps=args.steps, csv=args.csv, as_json=args.json)


def _shapes_and_sparsities(args: argparse.Namespace) -> tuple[list[Shape], list[float | None]]:
    """What was asked for; no shapes: those of the device."""
    shapes = [SHAPES[name] for name in args.names]
    if args.latent_shape:
        grid = checks.grid("--latent-shape", args.latent_shape)
        txt_len = checks.integer("--txt-len", args.txt_len, minimum=0)
        name = "x".join(map(str, grid))
        sparsity = 0.6 if grid[0] == 1 else 0.8
        shapes.append(Shape(name, args.heads or 4, args.head_dim, grid, txt_len, sparsity, "yours"))
    if args.sweep == "tokens":
        if shapes:
            raise ValueError(f"--sweep tokens has shapes of its own, got {', '.join(shape.name for shape in shapes)}")
        return token_sweep(head_dim=args.head_dim), [args.sparsity]
    if args.sweep == "sparsity":
        if args.sparsity is not None:
            raise ValueError(f"--sweep sparsity goes through many, got --sparsity {args.sparsity} too")
        return shapes or [SHAPES["wan-480p"]], list(SWEEP_SPARSITIES)
    return shapes, [args.sparsity]


def _device(name: str | None) -> torch.device:
    if name is not None:
        try:
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
            reason = str(error).splitlines()[0]
            raise ValueError(f"--device must be a torch device of this machine, got {name!r}: {reason}") from error
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show a token order and the block masks of a call",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Shows which block each token of a grid falls into, and which blocks each head keeps: as text,\n"
        "and as PNG with --out. The call is a synthetic video, or your own q and k with --tensors.",
        epilog="examples:\n"
        "  rainfusion inspect --latent-shape 5 16 24 --sparsity 0.8 --out pictures\n"
        "  rainfusion inspect --latent-shape 21 45 80 --tensors call.pt   # torch.save({'q': q, 'k': k}, 'call.pt')",
    )
    inspect.add_argument(
        "--latent-shape", type=int, nargs=3, default=[5, 16, 24], metavar=("T", "H", "W"), help="default: 5 16 24"
    )
    inspect.add_argument("--txt-len", type=int, default=0, help="text tokens in front of the grid")
    inspect.add_argument(
        "--token-order", nargs="+", default=["window"], metavar="ORDER", help="window, mindiesd, raster, or WT WH WW"
    )
    inspect.add_argument("--block-size", type=int, default=128, choices=checks.BLOCK_SIZES, help="default: 128")
    inspect.add_argument("--sparse-type", default="rf_v2", choices=["rf_v2", "ada_bsa"], help="default: rf_v2")
    inspect.add_argument("--sparsity", type=float, default=0.8, help="share of blocks to skip (default: 0.8)")
    inspect.add_argument("--cdf-threshold", type=float, default=1.0, help="ada_bsa (default: 1.0)")
    inspect.add_argument("--heads", type=int, default=4, help="of the synthetic call (default: 4)")
    inspect.add_argument("--head-dim", type=int, default=64, help="of the synthetic call (default: 64)")
    inspect.add_argument("--tensors", type=Path, metavar="FILE", help="q and k of a call of your own")
    inspect.add_argument(
        "--input-layout", default="BNSD", choices=checks.INPUT_LAYOUTS, help="of --tensors (default: BNSD)"
    )
    inspect.add_argument("--out", type=Path, metavar="DIR", help="also write order.png and mask.png there")
    inspect.set_defaults(run=_inspect, needs=lambda args: ["matplotlib"] if args.out else [])


def _inspect(args: argparse.Namespace) -> int:
    from rainfusion.bench import inspection

    order = args.token_order[0] if len(args.token_order) == 1 else _integers("--token-order", args.token_order)
    for name in ("heads", "head_dim"):
        checks.integer(f"--{name.replace('_', '-')}", getattr(args, name), minimum=1)
    return inspection.run(
        args.latent_shape, txt_len=args.txt_len, token_order=order, block_size=args.block_size,
        sparse_type=args.sparse_type, sparsity=args.sparsity, cdf_threshold=args.cdf_threshold, heads=args.heads,
        head_dim=args.head_dim, tensors=args.tensors, input_layout=args.input_layout, out=args.out,
    )  # fmt: skip


def _integers(name: str, values: list[str]) -> list[int]:
    try:
        return [int(value) for value in values]
    except ValueError as error:
        raise ValueError(f"{name} must be a name or three numbers WT WH WW, got {' '.join(values)}") from error


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="draw a small video with full and with sparse attention, side by side",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Samples the small video model that comes with the package twice from the same noise, with full\n"
        "and with sparse attention; writes a GIF of both and their difference and a sheet of all frames, and prints\n"
        "seconds, PSNR and density. About two minutes on two CPU cores.",
        epilog="A prompt is a background that moves and three shapes, from back to front. The words are those of\n"
        "rainfusion.lab.data.\n\n"
        "examples:\n"
        "  rainfusion demo --out demo\n"
        "  rainfusion demo --sparsity 0.9 --dense-steps 0 --prompt 'background up; red disc, from left, right;\n"
        "    blue square, from top, down, clockwise; white star, from bottom right, up left'",
    )
    demo.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where pictures go (default: demo)")
    demo.add_argument("--prompt", metavar="TEXT", help="what to draw; see below")
    demo.add_argument("--seed", type=int, default=0, help="of the noise (default: 0)")
    demo.add_argument("--sparsity", type=float, default=0.8, help="share of blocks to skip (default: 0.8)")
    demo.add_argument("--steps", type=int, metavar="N", help="default: 10")
    demo.add_argument("--dense-steps", type=int, metavar="N", help="the first N steps dense (default: 2)")
    demo.add_argument("--guidance", type=float, default=1.0, help="above 1 takes twice as long (default: 1)")
    demo.add_argument("--frames", type=int, help="default: the model's own, 9")
    demo.add_argument("--size", type=int, metavar="PIXELS", help="height and width (default: the model's own, 64)")
    demo.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    demo.add_argument("--quick", action="store_true", help="2 steps, 3 frames, 32 pixels: to see that it works")
    demo.set_defaults(run=_demo, needs=lambda args: ["safetensors", "PIL"])


def _demo(args: argparse.Namespace) -> int:
    from rainfusion.lab import demo

    quick = dict(steps=2, dense_steps=0, frames=3, size=32) if args.quick else {}
    asked = {name: getattr(args, name) for name in ("prompt", "steps", "dense_steps", "frames", "size")}
    chosen = {**quick, **{name: value for name, value in asked.items() if value is not None}}
    return demo.run(
        demo.Plan(
            args.out, _device(args.device), seed=args.seed, sparsity=args.sparsity, guidance=args.guidance, **chosen
        )
    )


def _add_quality(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    quality = commands.add_parser(
        "quality",
        help="sample a small trained video model with dense and sparse attention, and compare",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Samples the lab model with dense attention and with each method, from the same noise, and prints\n"
        "how near each comes: PSNR, SSIM, cosine, the error of frame differences, the attention mass that it keeps,\n"
        "its density and its time, with standard errors over prompts. Methods are compared at equal realised density.\n"
        "The model is small and its videos are synthetic: the order of methods says more than the numbers.",
        epilog="examples:\n"
        "  rainfusion quality --quick --methods 4x4x8 oracle random\n"
        "  rainfusion quality --densities 0.2 0.3 0.4 --nominal 0.8 --prompts 32 --out quality --sheet\n"
        "  rainfusion quality --densities 0.3 --methods rf_v2 --out quality --resume   # adds what is missing\n"
        "  rainfusion quality --show quality   # the table and the picture once more",
    )
    what = quality.add_argument_group("what to compare")
    what.add_argument(
        "--densities", type=float, nargs="*", default=[0.2, 0.3, 0.4], metavar="SHARE",
        help="realised shares of blocks attended to (default: 0.2 0.3 0.4)",
    )  # fmt: skip
    what.add_argument("--nominal", type=float, metavar="SPARSITY", help="also our methods and the oracle at a sparsity")
    what.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="parts of names (default: all methods)")
    what.add_argument("--list", action="store_true", help="show the methods and measure nothing")
    how = quality.add_argument_group("how to sample")
    how.add_argument("--prompts", type=int, metavar="N", help="default: 16")
    how.add_argument("--steps", type=int, metavar="N", help="default: 24")
    how.add_argument("--guidance", type=float, default=2.5, help="1 samples the prompt alone (default: 2.5)")
    how.add_argument("--frames", type=int, help="default: the model's own")
    how.add_argument("--size", type=int, metavar="PIXELS", help="height and width (default: the model's own)")
    how.add_argument("--dense-steps", type=int, default=0, metavar="N", help="the first N steps dense (default: 0)")
    how.add_argument("--quick", action="store_true", help="2 prompts, 6 steps, 32 pixels: minutes on a CPU")
    how.add_argument("--seed", type=int, default=0, help="of prompts and noise (default: 0)")
    how.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    how.add_argument("--backend", choices=backends.NAMES, help="default: the fastest of the device")
    how.add_argument("--weights", type=Path, metavar="FILE", help="of a lab model (default: those of the package)")
    where = quality.add_argument_group("where results go")
    where.add_argument("--out", type=Path, metavar="DIR", help="write quality.json, quality.md and quality.png there")
    where.add_argument("--resume", action="store_true", help="keep the rows that DIR has, measure the others")
    where.add_argument("--sheet", action="store_true", help="also contact sheets of a few methods")
    where.add_argument("--show", type=Path, metavar="DIR", help="measure nothing: show and draw what it holds")
    quality.set_defaults(run=_quality, needs=lambda args: [] if args.list or args.show else ["safetensors"])


def _quality(args: argparse.Namespace) -> int:
    from rainfusion.lab import methods, quality

    chosen = methods.select(args.methods)
    if args.list:
        return quality.list_methods(chosen)
    if args.show is not None:
        return quality.show(args.show)
    for name in ("prompts", "steps", "frames", "size"):
        if getattr(args, name) is not None:
            checks.integer(f"--{name}", getattr(args, name), minimum=1)
    steps = args.steps or (6 if args.quick else 24)
    _check_quality(args, steps)
    quality.check_out(args.out, args.resume)
    return quality.run(
        quality.Plan(
            list(dict.fromkeys(args.densities)), _device(args.device), nominal=args.nominal,
            prompts=args.prompts or (2 if args.quick else 16), steps=steps, guidance=args.guidance, frames=args.frames,
            size=args.size or (32 if args.quick else None), dense_steps=args.dense_steps, methods=chosen,
            backend=args.backend, weights=args.weights, seed=args.seed, out=args.out, resume=args.resume,
            sheet=args.sheet,
        )
    )  # fmt: skip


def _check_quality(args: argparse.Namespace, steps: int) -> None:
    for density in args.densities:
        checks.fraction("--densities", density, zero=False)
    if args.nominal is not None:
        checks.fraction("--nominal", args.nominal, zero=True)
    if not 0 <= args.dense_steps < steps:
        raise ValueError(f"--dense-steps must be in 0..{steps - 1} for {steps} steps, got {args.dense_steps}")
    if args.out is None and (args.resume or args.sheet):
        raise ValueError(f"--{'resume' if args.resume else 'sheet'} needs --out DIR")


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    best = checks.RECOMMENDED
    calibrate = commands.add_parser(
        "calibrate",
        help="measure what each layer and head of a pipeline loses, and share out one density",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Makes a few samples with dense attention, measures on the way what every head would lose at\n"
        "every budget, and writes a profile: a sparsity for each layer and head, whose mean is what was asked for.\n"
        "Takes as long as the samples do, and a little more. rainfusion.enable(pipe, profile=FILE) uses it.",
        epilog="examples:\n"
        "  rainfusion calibrate lab --sparsity 0.7 --steps 6 --out lab.json\n"
        "  rainfusion calibrate Wan-AI/Wan2.1-T2V-1.3B-Diffusers --sparsity 0.8 --steps 8 --frames 81 --height 480 \\\n"
        "    --width 832 --prompt 'a cat on a wall' --prompt 'waves at night' --out wan.json",
    )
    calibrate.add_argument("model", metavar="MODEL", help="a folder or name for diffusers' from_pretrained, or: lab")
    calibrate.add_argument("--sparsity", type=float, default=0.8, help="of all heads together (default: 0.8)")
    calibrate.add_argument("--out", type=Path, required=True, metavar="FILE", help="the profile; a picture beside it")
    calibrate.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeat it for more samples")
    calibrate.add_argument("--samples", type=int, default=2, metavar="N", help="of the lab model (default: 2)")
    calibrate.add_argument("--steps", type=int, help="default: the pipeline's own; 8 will do")
    calibrate.add_argument("--height", type=int, help="default: the pipeline's own")
    calibrate.add_argument("--width", type=int)
    calibrate.add_argument("--frames", type=int)
    calibrate.add_argument("--guidance", type=float)
    calibrate.add_argument("--token-order", default="window", metavar="ORDER", help="window, raster or mindiesd")
    calibrate.add_argument("--predictor", choices=checks.PREDICTORS, default=best["predictor"])
    calibrate.add_argument("--compensate", action=argparse.BooleanOptionalAction, default=best["compensate"])
    calibrate.add_argument("--first-frame", choices=checks.FIRST_FRAMES, default=best["first_frame"])
    calibrate.add_argument("--dtype", choices=_DTYPES, default="bf16", help="of the pipeline (default: bf16)")
    calibrate.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    calibrate.set_defaults(
        run=_calibrate, needs=lambda args: ["safetensors"] if args.model == "lab" else ["diffusers", "transformers"]
    )


def _calibrate(args: argparse.Namespace) -> int:
    from rainfusion.cli import calibrate

    if args.model != calibrate.LAB and not args.prompt:
        raise ValueError("--prompt must be given at least once: budgets come from samples")
    asked = dict(
        num_inference_steps=args.steps, height=args.height, width=args.width, num_frames=args.frames,
        guidance_scale=args.guidance,
    )  # fmt: skip
    options = dict(
        token_order=args.token_order, predictor=args.predictor, compensate=args.compensate, first_frame=args.first_frame
    )
    return calibrate.run(
        calibrate.Plan(
            args.model, checks.fraction("--sparsity", args.sparsity, zero=False), args.out, _device(args.device),
            options, args.prompt, checks.integer("--samples", args.samples, minimum=1),
            {name: value for name, value in asked.items() if value is not None}, _DTYPES[args.dtype],
        )
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
