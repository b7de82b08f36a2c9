"""`rainfusion demo`: a clip of the lab model with full and with sparse attention, from the same noise, side by side."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import rainfusion
from rainfusion import checks, lab
from rainfusion.lab import metrics, pictures
from rainfusion.lab.methods import Attend, ours
from rainfusion.options import FINE_VIDEO_SPARSITY, RECOMMENDED
from rainfusion.progress import Progress
from rainfusion.schedules import ScheduleSource
from rainfusion.table import table

PROMPT = (
    "background left; yellow star, from left, down, clockwise; red ring, from top right, down; "
    "cyan square, from bottom right, up left, anticlockwise"
)
GIF, SHEET = "side_by_side.gif", "frames.png"
GIF_FRAMES = 27  # at most: every third of 81
GAIN = 3  # how much the difference is enlarged, to be seen


@dataclass(frozen=True)
class Plan:
    """What to sample. None stands for the model's own frames and size, and for the weights of the repository."""

    out: Path
    device: torch.device
    prompt: str = PROMPT
    seed: int = 0
    sparsity: float = FINE_VIDEO_SPARSITY
    schedule: ScheduleSource = "auto"
    steps: int = 10
    dense_steps: int = 0
    guidance: float = 1.0
    frames: int | None = None
    size: int | None = None
    weights: Path | None = None

    def __post_init__(self) -> None:
        checks.fraction("--sparsity", self.sparsity, zero=True)
        checks.integer("--steps", self.steps, minimum=1)
        if not math.isfinite(self.guidance):
            raise ValueError(f"--guidance must be a finite number, got {self.guidance}")
        for name in ("frames", "size"):
            if getattr(self, name) is not None:
                checks.integer(f"--{name}", getattr(self, name), minimum=1)
        if not 0 <= self.dense_steps < self.steps:
            most = self.steps - 1
            raise ValueError(f"--dense-steps must be in 0..{most} for {self.steps} steps, got {self.dense_steps}")

    def sparse(self) -> Attend:
        """The sparse attention to compare, with the options of `enable`."""
        guided = self.guidance != 1
        return Attend(
            ours("rf_v2", schedule=self.schedule, **RECOMMENDED),
            1 - self.sparsity,
            "auto",
            guided=guided,
            dense_steps=self.dense_steps,
        )


class Watched:
    """An attention that measures how many seconds it takes in each step."""

    def __init__(self, attention: lab.Attention, tick: Callable[[], None]) -> None:
        self.attention, self.tick = attention, tick
        self.seconds: defaultdict[int, float] = defaultdict(float)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, place: lab.Place) -> Tensor:
        begun = _now(q.device)
        out = self.attention(q, k, v, place)
        self.seconds[place.step] += _now(q.device) - begun
        self.tick()
        return out

    def total(self, first: int = 0) -> float:
        """The seconds of all steps from `first` on."""
        return sum(seconds for step, seconds in self.seconds.items() if step >= first)


@dataclass(frozen=True)
class Sample:
    """A clip [1, 3, T, H, W] on the CPU, and the seconds that it took."""

    clip: Tensor
    seconds: float
    attention: float  # the part of the seconds that attention took
    attention_later: float  # the part that it took after the dense steps


def run(plan: Plan) -> int:
    """Samples, prints what it took and how near sparse comes, and writes the pictures."""
    prompt = lab.parse(plan.prompt)
    model = lab.load(plan.weights, device=plan.device)
    _introduce(plan, model, prompt)
    _warm_up(plan, model, prompt)
    sparse = plan.sparse()
    full = _sample_and_tell("full", plan, model, prompt, lab.dense)
    fast = _sample_and_tell("sparse", plan, model, prompt, sparse)
    for sample in (full, fast):
        if not sample.clip.isfinite().all():
            raise ValueError(f"the clip is not finite: --guidance must be smaller, got {plan.guidance}; try 1 to 5")
    psnr = float(metrics.psnr(full.clip, fast.clip))
    _report(plan, full, fast, psnr, sparse.density())
    for path in _draw(plan, prompt, full, fast, psnr):
        print(f"wrote {path}")
    return 0


def _warm_up(plan: Plan, model: lab.DiT, prompt: Tensor) -> None:
    """Makes first calls, unmeasured: they import and compile. On GPUs in full size: some kernels are for one shape."""
    once = replace(plan, steps=1, dense_steps=0)
    if plan.device.type == "cpu":
        once = replace(once, frames=1 + model.config.together, size=12 * model.config.patch)
    for attention in (lab.dense, once.sparse()):
        _sample(once, model, prompt, attention)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _sample_and_tell(name: str, plan: Plan, model: lab.DiT, prompt: Tensor, attention: lab.Attention) -> Sample:
    with Progress(f"{name} attention", model.config.depth * plan.steps, "layer") as progress:
        return _sample(plan, model, prompt, attention, progress.advance)


def _sample(
    plan: Plan,
    model: lab.DiT,
    prompt: Tensor,
    attention: lab.Attention,
    tick: Callable[[], None] = lambda: None,
) -> Sample:
    watched = Watched(attention, tick)
    begun = _now(plan.device)
    clip = lab.sample(
        model,
        prompt[None],
        attention=watched,
        steps=plan.steps,
        guidance=plan.guidance,
        seed=plan.seed,
        frames=plan.frames,
        size=plan.size,
    )
    seconds = _now(plan.device) - begun
    return Sample(clip.cpu(), seconds, watched.total(), watched.total(plan.dense_steps))


def _introduce(plan: Plan, model: lab.DiT, prompt: Tensor) -> None:
    config = model.config
    frames, size = config.clip_size(plan.frames, plan.size, names=("--frames", "--size"))
    tokens = config.text + math.prod(config.grid(frames, size))
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    where = f"cpu with {torch.get_num_threads()} threads" if plan.device.type == "cpu" else str(plan.device)
    print(f"A video DiT of {millions:.1f} M parameters draws {frames} frames of {size}x{size} pixels, {tokens} tokens,")
    print(f"in {plan.steps} steps on {where}; torch {torch.__version__}, rainfusion {rainfusion.__version__}.")
    print(f"Prompt: {lab.describe(prompt)}\n", flush=True)


def _report(plan: Plan, full: Sample, fast: Sample, psnr: float, density: float) -> None:
    whole, attention = full.seconds / fast.seconds, full.attention / fast.attention
    rows = [
        ("full", f"{full.seconds:.2f} s", f"{full.attention:.2f} s", "1.00", ""),
        (
            f"sparse at {plan.sparsity:g}",
            f"{fast.seconds:.2f} s",
            f"{fast.attention:.2f} s",
            f"{density:.2f}",
            f"{psnr:.1f} dB",
        ),
        ("speed-up", f"{whole:.2f}x", f"{attention:.2f}x", "", ""),
    ]
    print(table(("attention", "sampling", "attention alone", "density", "PSNR"), rows))
    print("\nPSNR: of the sparse clip against the full one. density: the share of blocks that sparse steps compute,")
    print("with the text, which is never dropped.")
    if plan.dense_steps:
        later = full.attention_later / fast.attention_later
        print(f"The first {plan.dense_steps} of {plan.steps} steps are dense in both; in the others attention alone is")
        print(f"{later:.2f}x as fast: {full.attention_later:.2f} s -> {fast.attention_later:.2f} s.")
    if whole < 1:
        print("Sparse was slower: so few tokens do not pay here. `rainfusion bench` has longer sequences.")
    print()


def _draw(plan: Plan, prompt: Tensor, full: Sample, fast: Sample, psnr: float) -> list[Path]:
    plan.out.mkdir(parents=True, exist_ok=True)
    clips = torch.cat([full.clip, fast.clip, GAIN * (full.clip - fast.clip).abs()])
    words = lab.describe(prompt)
    captions = [
        f"full attention: {full.seconds:.1f} s",
        f"sparse at {plan.sparsity:g}: {fast.seconds:.1f} s",
        f"{GAIN} x difference: {psnr:.1f} dB",
    ]
    moving = pictures.some_frames(clips, GIF_FRAMES)
    pictures.write_side_by_side(moving, captions, plan.out / GIF, title=words, zoom=3, milliseconds=150)
    pictures.contact_sheet(clips, [f"{captions[0]}    {words}", *captions[1:]]).save(plan.out / SHEET)
    return [plan.out / GIF, plan.out / SHEET]
