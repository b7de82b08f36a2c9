"""`rainfusion quality`: samples of the lab model with dense and sparse attention, from the same noise, compared.

    dense sample -> a few captured calls -> an amount for each method and density -> samples -> metrics -> rows

Methods stand side by side at equal *realised* density: for each, the amount that gives it on the captured calls is
found by bisection.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rainfusion
from rainfusion import lab
from rainfusion.bench.contest import device_name
from rainfusion.lab import comparison as results
from rainfusion.lab import methods, rules, weights
from rainfusion.lab.comparison import Comparison, Row
from rainfusion.lab.methods import DENSE, SAME, Attend, Candidate
from rainfusion.lab.metrics import METRICS
from rainfusion.lab.model import DiT, Place, dense
from rainfusion.planning import planned
from rainfusion.progress import Progress

BATCH = 8  # prompts that are sampled at a time
CAPTURED = 3  # steps whose attention calls are captured, in all layers
_HALVINGS = 16
_CLOSE_ENOUGH = 5e-4  # a density that is so near to its target ends the search


class Call(NamedTuple):
    """One captured attention call."""

    q: Tensor
    k: Tensor
    v: Tensor
    place: Place


@dataclass(frozen=True)
class Plan:
    """What to sample, with which methods, and where the results go."""

    densities: Sequence[float]
    device: torch.device
    nominal: float | None = None
    prompts: int = 16
    steps: int = 24
    guidance: float = 2.5
    frames: int | None = None  # None stands for the model's own, here and for the size
    size: int | None = None
    dense_steps: int = 0
    image: bool = False  # whether clips begin with a given image
    methods: Sequence[Candidate] = methods.METHODS
    backend: str | None = None  # None stands for the fastest of the device
    weights: Path | None = None  # None stands for those of the repository
    seed: int = 0
    out: Path | None = None
    resume: bool = False
    sheet: bool = False

    @property
    def guided(self) -> bool:
        """Whether samples have two branches."""
        return self.guidance != 1.0


class Job(NamedTuple):
    """A row that is to be measured: a method, and a density or a nominal sparsity."""

    method: Candidate
    target: float | None
    nominal: float | None

    @property
    def row(self) -> Row:
        """The row without its results."""
        name, family, signature = self.method.name, self.method.family, self.method.signature
        emulated = self.method.rule is not None
        return Row(name, family, signature, target=self.target, nominal=self.nominal, emulated=emulated)


def jobs(plan: Plan) -> list[Job]:
    """The rows to measure: each method at every density; at a nominal sparsity bounds, and those of ours it can set."""
    found = [Job(SAME, None, None)]
    for method in plan.methods:
        found += [Job(method, density, None) for density in plan.densities]
        comparable = method.knob == "sparsity" and method.family in ("ours", "bound")
        found += [Job(method, None, plan.nominal)] if plan.nominal is not None and comparable else []
    return found


@torch.no_grad()
def run(plan: Plan) -> int:
    """Prints the table, writes the files and returns the exit status: 1 if a method failed."""
    model = weights.load(plan.weights, device=plan.device)
    study = Study(model, plan)
    found = _begin(study)
    todo = [job for job in jobs(plan) if found.find(job.row.key) is None]
    clips: dict[tuple[str, str], Tensor] = {}  # the first clip of each row
    with Progress("quality", len(todo), "row") as progress:
        progress.say(f"dense: {study.dense_row.seconds:.2f} s a clip; {len(todo)} rows to measure")
        for job in todo:
            progress.note(f"{job.method.name} at {job.row.at}")
            row, clip = study.measure(job)
            found.put(row)
            found.sort([DENSE.name, SAME.name, *(method.name for method in methods.METHODS)])
            progress.say("  ".join(results.cells(row, found)) + (f"  {row.error}" if row.error else ""))
            progress.advance()
            if clip is not None:
                clips[row.method, row.at] = clip
            if plan.out is not None:
                results.write(found, plan.out)
    if plan.sheet and plan.out is not None:
        _draw_sheets(found, clips, study.reference[:1].cpu(), plan.out)
    _finish(found, plan.out)
    return 1 if any(row.error is not None for row in found.rows) else 0


def show(folder: Path) -> int:
    """Prints the table and draws the picture of an earlier run, and measures nothing."""
    _finish(results.read(folder), folder)
    return 0


def list_methods(chosen: Sequence[Candidate] = methods.METHODS) -> int:
    """Prints a line for each method."""
    width = max(len(method.name) for method in chosen)
    for method in chosen:
        print(f"{method.name.ljust(width)}  {method.family:5}  {_about(method)}", flush=True)
    return 0


def _about(method: Candidate) -> str:
    return f"{method.signature} ({method.note})" if method.note else method.signature


class Study:
    """A model, its dense samples and a few of its attention calls; measures one row after the other."""

    def __init__(self, model: DiT, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.frames, self.size = model.config.clip_size(plan.frames, plan.size, names=("--frames", "--size"))
        self.prompts = lab.random_prompts(plan.prompts, torch.Generator().manual_seed(plan.seed))
        self.images = lab.images(self.prompts, self.size, plan.seed) if plan.image else None
        self.calls = self._capture()
        self.backend = plan.backend or fastest(self.calls[0])
        self._warm_up(dense)
        start = time.perf_counter()
        self.reference = torch.cat([self._sample(dense, first) for first in self._batches()])
        seconds = (time.perf_counter() - start) / plan.prompts
        self.dense_row = replace(
            Job(DENSE, None, None).row, density=1.0, recall=1.0, seconds=seconds, **self._metrics(self.reference)
        )
        self._masses: dict[Any, list[Tensor]] = {}  # order of tokens -> the attention mass of each captured call
        self._ready: dict[str, Candidate] = {}  # name -> the method with its budgets
        # The choices of the latest method are kept, since its densities come one after the other.
        self._latest: tuple[Candidate, list[rules.Choice]] | None = None

    def measure(self, job: Job) -> tuple[Row, Tensor | None]:
        """Measures a row and returns it with its first clip. What goes wrong is in the row, and the others go on."""
        try:
            return self._measure(job)
        except Exception as error:  # the row has it, and the exit status tells
            return replace(job.row, error=f"{type(error).__name__}: {error}".splitlines()[0]), None

    def _measure(self, job: Job) -> tuple[Row, Tensor | None]:
        job = job._replace(method=self._calibrated(job.method))
        amount = self._amount(job)
        if amount is None:
            return job.row, None
        self._warm_up(self._attend(job.method, amount))
        start, clips, densities = time.perf_counter(), [], []
        for first in self._batches():
            attention = self._attend(job.method, amount)
            clips.append(self._sample(attention, first))
            densities += [attention.density()] * len(clips[-1])
        seconds = (time.perf_counter() - start) / len(self.prompts)
        sampled = torch.cat(clips)
        row = replace(
            job.row,
            amount=amount,
            density=sum(densities) / len(densities),
            recall=self._recall(job.method, amount),
            seconds=seconds,
            **self._metrics(sampled),
        )
        return row, sampled[0].cpu()

    def _calibrated(self, method: Candidate) -> Candidate:
        if method.name not in self._ready:
            self._ready[method.name] = method.calibrated(self.calls, self.backend)
        return self._ready[method.name]

    def _amount(self, job: Job) -> float | None:
        if job.target is None:
            return 1.0 if job.nominal is None else 1 - job.nominal
        choices = self._choices(job.method)

        @cache
        def density(amount: float) -> float:
            return _mean(choice(amount).float().mean().item() for choice in choices)

        blocks = job.method.layout(self.calls[0].place, torch.device("cpu")).num_blocks
        return find_amount(density, job.target, 1 / blocks)

    def _choices(self, method: Candidate) -> list[rules.Choice]:
        if self._latest is None or self._latest[0] is not method:
            made = [method.choice(*call, self.backend, self.plan.guided) for call in self.calls]
            self._latest = (method, made)
        return self._latest[1]

    def _recall(self, method: Candidate, amount: float) -> float | None:
        """The share of attention mass that a method keeps, if it predicts in the call itself."""
        if method.every > 1:
            return None
        if method.family == "dense":
            return 1.0
        key = (method.token_order, method.block_sides)
        if key not in self._masses:
            layouts = [method.layout(call.place, call.q.device) for call in self.calls]
            calls = zip(self.calls, layouts, strict=True)
            rows = method.block_sides[0]
            self._masses[key] = [rules.attention_mass(call.q, call.k, layout, q_block=rows) for call, layout in calls]
        pairs = zip(self._masses[key], self._choices(method), strict=True)
        return _mean(recall(mass, choice(amount)) for mass, choice in pairs)

    def _attend(self, method: Candidate, amount: float) -> Attend:
        return Attend(method, amount, self.backend, guided=self.plan.guided, dense_steps=self.plan.dense_steps)

    def _batches(self) -> range:
        return range(0, len(self.prompts), BATCH)

    def _sample(self, attention: lab.Attention, first: int, steps: int | None = None, count: int = BATCH) -> Tensor:
        """Samples a batch; the device has finished when it returns."""
        here = slice(first, first + count)
        clips = lab.sample(
            self.model,
            self.prompts[here],
            attention=attention,
            steps=self.plan.steps if steps is None else steps,
            guidance=self.plan.guidance,
            seed=self.plan.seed + first,
            frames=self.frames,
            size=self.size,
            image=None if self.images is None else self.images[here],
        )
        if clips.device.type != "cpu":
            torch.accelerator.synchronize(clips.device)
        return clips

    def _capture(self) -> list[Call]:
        """The attention calls of all layers, in a few steps of a dense sample."""
        steps = spread(range(self.plan.dense_steps, self.plan.steps), CAPTURED)
        calls = []

        def attend(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
            if place.step in steps:
                calls.append(Call(q, k, v, place))
            return dense(q, k, v, place)

        self._sample(attend, 0, count=1)
        return calls

    def _warm_up(self, attention: lab.Attention) -> None:
        """Makes a first step, which compiles kernels and fills caches; on a CPU there are none."""
        if self.plan.device.type != "cpu":
            self._sample(attention, 0, steps=self.plan.dense_steps + 1)

    def _metrics(self, clips: Tensor) -> dict[str, Any]:
        found = {name: metric(clips, self.reference).tolist() for name, metric in METRICS.items()}
        return {name: [x if math.isfinite(x) else None for x in values] for name, values in found.items()}


# ---------------------------------------------------------------------------------------------------------------------
# equal density


def spread(numbers: range, count: int) -> list[int]:
    """So many of the numbers, from the middles of equal parts: three of 0 ... 7 are 1, 4 and 6."""
    return sorted({numbers[(2 * i + 1) * len(numbers) // (2 * count)] for i in range(count)})


def find_amount(density: Callable[[float], float], target: float, slack: float) -> float | None:
    """The amount in (0, 1] whose density is nearest to the target; None if that is further off than the slack.

    density: amount -> density, which grows with the amount, in steps or not.
    """
    low, high = 0.0, 1.0
    best, reached = 1.0, math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        now = density(middle)
        if abs(now - target) < abs(reached - target):
            best, reached = middle, now
        if abs(now - target) <= _CLOSE_ENOUGH:
            break
        low, high = (middle, high) if now < target else (low, middle)
    return best if abs(reached - target) <= slack else None


def recall(mass: Tensor, mask: Tensor) -> float:
    """The share of the true attention mass [B, H, NQ, NK] that a mask keeps."""
    return float((mass * mask).sum() / mass.sum())


def fastest(call: Call) -> str:
    """The backend that `auto` would take for sparse attention, where it does not prefer dense."""
    q, k, v, _ = call
    return planned(q, k, v, sparse_type="rf_v2", sparsity=0.5)[1].backend


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


# ---------------------------------------------------------------------------------------------------------------------
# files and lines


def _begin(study: Study) -> Comparison:
    """A comparison with the rows that a file holds already, if its settings are these."""
    plan = study.plan
    settings = dict(
        prompts=plan.prompts,
        steps=plan.steps,
        guidance=plan.guidance,
        frames=study.frames,
        size=study.size,
        dense_steps=plan.dense_steps,
        image=plan.image,
        seed=plan.seed,
        backend=study.backend,
        device=device_name(plan.device),
        torch=str(torch.__version__),
        weights=weights.digest(weights.find(plan.weights))[:16],
    )
    about = dict(
        rainfusion=rainfusion.__version__,
        command=_command(plan, study),
        prompts=[lab.describe(prompt) for prompt in study.prompts],
    )
    found = Comparison(settings, about)
    if plan.out is not None and plan.resume and (plan.out / results.JSON).exists():
        found.rows = _rows_of(plan.out, settings)
    found.put(study.dense_row)
    return found


def _rows_of(folder: Path, settings: dict[str, Any]) -> list[Row]:
    old = results.read(folder)
    changed = [
        f"{name} {old.settings.get(name)!r} there, {settings[name]!r} now"
        for name in settings
        if old.settings.get(name) != settings[name]
    ]
    if changed:
        raise ValueError(f"--resume needs the settings of {folder / results.JSON}: {'; '.join(changed)}")
    return old.rows


def check_out(out: Path | None, resume: bool) -> None:
    """Refuses to write over what took long to measure."""
    if out is not None and (out / results.JSON).exists() and not resume:
        raise ValueError(f"{out / results.JSON} exists: pass --resume to go on with it, or another --out")


def _command(plan: Plan, study: Study) -> str:
    words = ["rainfusion quality"]
    words += [f"--densities {' '.join(f'{density:g}' for density in plan.densities)}"] if plan.densities else []
    words += [f"--nominal {plan.nominal:g}"] if plan.nominal is not None else []
    words += [f"--prompts {plan.prompts} --steps {plan.steps} --guidance {plan.guidance:g}"]
    words += [f"--frames {study.frames} --size {study.size} --dense-steps {plan.dense_steps}"]
    words += ["--image"] if plan.image else []
    return " ".join([*words, f"--device {plan.device.type} --backend {study.backend} --seed {plan.seed}"])


def _finish(found: Comparison, out: Path | None) -> None:
    if out is not None:
        results.write(found, out)
        _draw(found, out / results.PICTURE)
    for line in (results.heading(found), results.format_rows(found), *results.remarks(found)):
        print(line, flush=True)


def _draw(found: Comparison, path: Path) -> None:
    try:
        results.figure(found).savefig(path)
    except ImportError:
        print(f"no {path.name}: pip install matplotlib, then rainfusion quality --show {path.parent}", flush=True)
    except ValueError as error:  # there is nothing to draw where every row is dense or out of reach
        print(f"no {path.name}: {error}", flush=True)
    else:
        print(f"wrote {path}", flush=True)


def _draw_sheets(found: Comparison, clips: dict[tuple[str, str], Tensor], dense_clip: Tensor, out: Path) -> None:
    """Draws the frames of the first prompt at each density: dense, our first method, and the best of each family."""
    from rainfusion.lab.pictures import contact_sheet

    for at in dict.fromkeys(row.at for row in found.rows if row.family != "dense"):
        rows = [row for row in found.rows if (row.method, row.at) in clips and row.at == at]
        chosen = _shown(rows)
        if not chosen:
            continue
        captions = ["dense", *map(_caption, chosen)]
        sheet = contact_sheet(torch.cat([dense_clip, *(clips[row.method, at][None] for row in chosen)]), captions)
        path = out / f"sheet_{at.replace(' ', '_')}.png"
        sheet.save(path)
        print(f"wrote {path}", flush=True)


def _caption(row: Row) -> str:
    first = row.psnr[0]
    return f"{row.method}, density {row.density:.2f}: {'equal' if first is None else f'{first:.1f} dB'}"


def _shown(rows: Sequence[Row]) -> list[Row]:
    shown = [row for row in rows if row.family == "ours"][:1]
    for family in ("ours", "rule", "bound"):
        own = [row for row in rows if row.family == family and row not in shown]
        shown += sorted(own, key=lambda row: -_mean(math.inf if x is None else x for x in row.psnr))[:1]
    return shown
