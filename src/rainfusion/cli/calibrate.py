"""`rainfusion calibrate`: a budget for each layer and head of a diffusers pipeline, or of the lab model."""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rainfusion import checks
from rainfusion.cli import arguments, outputs
from rainfusion.cli.arguments import Commands
from rainfusion.integrations import diffusers
from rainfusion.options import FINE_VIDEO_SPARSITY, FIRST_FRAMES, PREDICTORS, TOKEN_ORDERS, Method
from rainfusion.planning import planned
from rainfusion.prediction.calibration import Recorder, allocate
from rainfusion.profiles import Profile
from rainfusion.progress import Progress
from rainfusion.table import table

LAB = "lab"
LAB_SAMPLES = 2
PICTURE = ".png"  # the ending of the picture beside a profile

_DESCRIPTION = """\
Makes a few samples with dense attention, measures on the way what every head would lose at
every budget, and writes a profile: a sparsity for each layer and head, whose mean is what was asked for.
Takes as long as the samples do, and a little more. rainfusion.enable(pipe, profile=FILE) uses it."""

_EXAMPLES = """\
examples:
  rainfusion calibrate lab --sparsity 0.7 --steps 6 --out lab.json
  rainfusion calibrate Wan-AI/Wan2.1-T2V-1.3B-Diffusers --sparsity 0.8 --steps 8 --frames 81 --height 480 \\
    --width 832 --prompt 'a cat on a wall' --prompt 'waves at night' --out wan.json"""


def add(commands: Commands) -> None:
    """Adds the command and its options to the parser of `rainfusion`."""
    best = Method.recommended()
    parser = commands.add_parser(
        "calibrate",
        help="measure what each layer and head of a pipeline loses, and share out one density",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or name for diffusers' from_pretrained, or: lab")
    parser.add_argument(
        "--sparsity", type=float, default=FINE_VIDEO_SPARSITY, help="of all heads together (default: 0.85)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the profile; a picture beside it")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeat it for more samples")
    parser.add_argument("--samples", type=int, metavar="N", help=f"of the lab model (default: {LAB_SAMPLES})")
    parser.add_argument("--steps", type=int, help="default: the pipeline's own; 8 will do")
    parser.add_argument("--height", type=int, help="default: the pipeline's own; the side of the lab's squares")
    parser.add_argument("--width", type=int, help="default: the pipeline's own")
    parser.add_argument("--frames", type=int, help="default: the pipeline's own")
    parser.add_argument("--guidance", type=float, help="default: the pipeline's own")
    parser.add_argument("--token-order", default="window", metavar="ORDER", help="window, raster or mindiesd")
    parser.add_argument("--predictor", choices=PREDICTORS, default=best.predictor)
    parser.add_argument("--compensate", action=argparse.BooleanOptionalAction, default=best.compensate)
    parser.add_argument("--first-frame", choices=FIRST_FRAMES, default=best.first_frame)
    parser.add_argument("--dtype", choices=arguments.DTYPES, help="of the pipeline (default: bf16)")
    parser.add_argument("--weights", type=Path, metavar="FILE", help=arguments.WEIGHTS)
    parser.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    anew = "no profile was written, and the same command starts anew; fewer --steps take less time"
    parser.set_defaults(run=run, needs=needs, interrupted=lambda args: anew, parser=parser)


def needs(args: argparse.Namespace) -> list[str]:
    """Modules beside torch that this run imports."""
    return ["safetensors"] if args.model == LAB else ["diffusers", "transformers"]


def run(args: argparse.Namespace) -> int:
    """Checks the options, samples, prints and writes."""
    _check(args)
    asked = dict(
        num_inference_steps=args.steps,
        height=args.height,
        width=args.width,
        num_frames=args.frames,
        guidance_scale=args.guidance,
    )
    plan = Plan(
        args.model,
        args.sparsity,
        args.out,
        arguments.device(args.device),
        options={name: getattr(args, name) for name in ("token_order", "predictor", "compensate", "first_frame")}
        | {"block_size": Method.recommended().block_size},
        prompts=args.prompt,
        count=LAB_SAMPLES if args.samples is None else args.samples,
        call={name: value for name, value in asked.items() if value is not None},
        dtype=arguments.DTYPES["bf16" if args.dtype is None else args.dtype],
        weights=args.weights,
    )
    if args.model == LAB:
        _find_weights(args.weights)
    _check_output(args.out)
    return calibrate(plan)


def _check(args: argparse.Namespace) -> None:
    checks.fraction("--sparsity", args.sparsity, zero=False)
    checks.choice("--token-order", args.token_order, TOKEN_ORDERS)
    arguments.check_counts(args, "steps", "height", "width", "frames", "samples")
    arguments.check_finite(args, "guidance")
    if args.model == LAB:
        own = "is not for the lab, which"
        arguments.refuse(args, args.parser, ["prompt"], f"{own} draws prompts of its own: say how many with --samples")
        arguments.refuse(args, args.parser, ["width"], f"{own} draws squares: leave it out, --height is their side")
        arguments.refuse(args, args.parser, ["dtype"], f"{own} runs in fp32 on a CPU and in bf16 elsewhere")
    else:
        arguments.refuse(args, args.parser, ["weights"], "is for the lab: a pipeline brings its own")
        arguments.refuse(args, args.parser, ["samples"], "is for the lab: a pipeline makes a sample for each --prompt")
        if not args.prompt:
            raise ValueError("--prompt must be given at least once: budgets come from samples")


def _find_weights(path: Path | None) -> None:
    from rainfusion.lab import weights

    weights.find(path)


def _check_output(out: Path) -> None:
    """The profile and the picture beside it must be two files that can be written."""
    outputs.check_file("--out", out, example="profile.json")
    if out.suffix == PICTURE:
        raise ValueError(f"--out must not end in {PICTURE}, which is for the picture beside it, got {str(out)!r}")
    outputs.check_file("the picture beside --out", out.with_suffix(PICTURE), example="profile.png")


@dataclass(frozen=True)
class Plan:
    """What to measure, on which samples, for which options."""

    model: str  # "lab", or a pipeline as diffusers' from_pretrained knows it
    sparsity: float
    out: Path
    device: torch.device
    options: Mapping[str, Any]  # keywords of `enable`: token_order, predictor, compensate, first_frame, block_size
    prompts: Sequence[str] = ()
    count: int = LAB_SAMPLES  # how many prompts the lab draws
    call: Mapping[str, Any] = field(default_factory=dict)  # keywords of the pipeline: num_inference_steps, height, ...
    dtype: torch.dtype = torch.bfloat16
    weights: Path | None = None  # a file of a lab model; None stands for that of the repository


def calibrate(plan: Plan) -> int:
    """Measures, prints the budgets and writes the profile, with a picture where matplotlib is installed."""
    start = time.perf_counter()
    profile = _of_lab(plan) if plan.model == LAB else _of_pipeline(plan)
    profile.save(plan.out)
    for line in report(profile):
        print(line)
    use = (
        "lab.sparse(profile=Profile.load(...))"
        if plan.model == LAB
        else f"rainfusion.enable(pipe, profile={str(plan.out)!r})"
    )
    print(f"wrote {plan.out} after {time.perf_counter() - start:.0f} s; use it with {use}")
    _draw(profile, plan.out.with_suffix(PICTURE))
    return 0


def report(profile: Profile) -> list[str]:
    """A table of sparsities by layer, with the least and the most sparse head of each."""
    rows = [
        (name, f"{sum(heads) / len(heads):.3f}", f"{min(heads):.3f}", f"{max(heads):.3f}")
        for name, heads in profile.sparsities.items()
    ]
    heading = f"sparsity of {profile.sparsity:g} in all, protected blocks counted in"
    return [heading, table(("layer", "mean", "least", "most"), rows)]


def _of_lab(plan: Plan) -> Profile:
    from rainfusion import lab
    from rainfusion.lab.model import Place, arguments_at, dense
    from rainfusion.lab.sampling import STEPS

    model, recorder = lab.load(plan.weights, device=plan.device), Recorder(plan.sparsity)
    given = {"steps": "num_inference_steps", "guidance": "guidance_scale", "frames": "num_frames", "size": "height"}
    chosen = {"steps": STEPS, **{name: plan.call[theirs] for name, theirs in given.items() if theirs in plan.call}}
    model.config.clip_size(chosen.get("frames"), chosen.get("size"), names=("--frames", "--height"))
    progress = Progress("calibrate", chosen["steps"] * model.config.depth, "attention call")

    def attend(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        options: Any = {**arguments_at(place), **plan.options}
        recorder.add(str(place.layer), *planned(q, k, v, sparsity=plan.sparsity, **options))
        progress.advance()
        return dense(q, k, v, place)

    with progress:
        lab.sample(model, lab.random_prompts(plan.count, torch.Generator().manual_seed(0)), attention=attend, **chosen)
    calls = sum(layer.calls for layer in recorder.layers.values())
    return Profile(allocate(recorder.layers, plan.sparsity), plan.sparsity, plan.options, dict(model=LAB, calls=calls))


def _of_pipeline(plan: Plan) -> Profile:
    from diffusers import DiffusionPipeline

    with _bars_in_terminals_only():
        pipe: Any = DiffusionPipeline.from_pretrained(plan.model, dtype=plan.dtype)  # type: ignore[no-untyped-call]
    pipe = pipe.to(plan.device)
    pipe.set_progress_bar_config(disable=None)  # None has tqdm draw its bar in a terminal only
    known = inspect.signature(pipe.__call__).parameters
    unknown = sorted(plan.call.keys() - known.keys())
    if unknown:
        raise ValueError(f"{type(pipe).__name__} has no {', '.join(unknown)}; it takes {', '.join(known)}")

    def sample() -> None:
        for number, prompt in enumerate(plan.prompts, 1):
            print(f"sample {number} of {len(plan.prompts)}: {prompt}", flush=True)
            generator = torch.Generator("cpu").manual_seed(number)
            pipe(prompt, generator=generator, output_type="latent", **plan.call)

    found = diffusers.calibrate(pipe, sample, sparsity=plan.sparsity, **plan.options)
    notes = {**found.notes, "model": plan.model, "prompts": list(plan.prompts), "call": dict(plan.call)}
    return Profile(found.sparsities, found.sparsity, found.options, notes)


@contextmanager
def _bars_in_terminals_only() -> Iterator[None]:
    """The bars of diffusers and transformers, which they draw while they load, stay out of logs."""
    libraries: list[Any] = [import_module(f"{name}.utils.logging") for name in ("diffusers", "transformers")]
    silenced = [library for library in libraries if not sys.stderr.isatty() and library.is_progress_bar_enabled()]
    for library in silenced:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in silenced:
            library.enable_progress_bar()


def _draw(profile: Profile, path: Path) -> None:
    """Draws sparsities by layer and head, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    heads = max(map(len, profile.sparsities.values()))
    grid = torch.full((len(profile.sparsities), heads), torch.nan)
    for row, shares in zip(grid, profile.sparsities.values(), strict=True):
        row[: len(shares)] = torch.tensor(shares)
    figure = Figure(figsize=(2.5 + 0.28 * heads, 1.5 + 0.22 * len(grid)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1)
    axes.set(xlabel="head", ylabel="layer", title=f"sparsity, {profile.sparsity:g} in all")
    figure.colorbar(image)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
