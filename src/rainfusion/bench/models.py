"""`rainfusion bench --model`: forwards of whole diffusers transformers, dense and sparse, timed in one run.

Weights are random: the time of a forward depends on shapes, not on values. What it computes is no picture, so that the
difference between dense and sparse outputs says that something ran, not how good it is.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import rainfusion
from rainfusion.bench import results, timing
from rainfusion.bench.architectures import MODELS, Model, Size, build
from rainfusion.bench.baselines import first_line
from rainfusion.bench.contest import device_name, versions
from rainfusion.bench.inputs import Precision, Strategy
from rainfusion.bench.results import form
from rainfusion.progress import Progress
from rainfusion.table import table

REPEATS = 3  # forwards that are timed, where the caller does not say
LEAST_TOKENS = 1024  # shorter sequences that attend to themselves are text, not the picture

# ---------------------------------------------------------------------------------------------------------------------
# attention in a dense forward


def dense_kernels(device: torch.device) -> AbstractContextManager[object]:
    """Inside this, torch's own attention takes cuDNN's kernel where it can."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


class AttentionMeter(TorchFunctionMode):
    """Times `F.scaled_dot_product_attention` where q is as long as k and longer than `least_tokens`."""

    def __init__(self, device: torch.device, least_tokens: int) -> None:
        super().__init__()
        self.device, self.least_tokens = device, least_tokens
        self.lengths: list[int] = []  # tokens of each call that counts
        self._marks: list[tuple[Any, Any]] = []
        self._entered: Any = None
        self._left: Any = None

    def __enter__(self) -> AttentionMeter:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._entered = self._mark()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._left = self._mark()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not self._counts(*args, **kwargs):
            return func(*args, **kwargs)
        start = self._mark()
        out = func(*args, **kwargs)
        self._marks.append((start, self._mark()))
        return out

    def _counts(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> bool:
        counts = query.shape[-2] == key.shape[-2] > self.least_tokens
        if counts:
            self.lengths.append(query.shape[-2])
        return counts

    def _mark(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            return event
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def milliseconds(self) -> float:
        """The time of all calls that counted, together."""
        return sum(self._between(start, end) for start, end in self._marks)

    def whole_milliseconds(self) -> float:
        """The time of everything that ran while it listened."""
        return self._between(self._entered, self._left)

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return float(start.elapsed_time(end))
        return float(1000 * (end - start))


# ---------------------------------------------------------------------------------------------------------------------
# rows


KEY = (
    "gpu",
    "model",
    "height",
    "width",
    "frames",
    "layers",
    "dtype",
    "compiled",
    "attention",
    "precision",
    "sparsity",
    "rainfusion",
    "torch",
    "triton",
    "diffusers",
)


@dataclass(frozen=True)
class ModelRow:
    """One way to run one model at one size. A number is None where there is nothing to say."""

    gpu: str
    model: str
    height: int
    width: int
    frames: int
    layers: int  # blocks that were built
    all_layers: int  # blocks that the whole model has
    tokens: int  # the length of self-attention
    dtype: str
    compiled: bool
    attention: str  # "dense", "rf_v2" or "ada_bsa"
    precision: str
    sparsity: float
    rainfusion: str
    torch: str
    triton: str
    diffusers: str
    density: float | None  # the mean over layers
    seconds: float  # the median time of a forward
    low_seconds: float  # the lower quartile
    high_seconds: float  # the upper quartile
    rounds: int
    forwards: int  # forwards in a denoising step
    step_seconds: float
    speedup: float | None  # how much faster than the dense forwards of the same run; None where it went wrong
    attention_share: float | None  # the part of a dense forward's time that is self-attention
    sparse_calls: int  # attention calls of one forward that were sparse
    dense_calls: int  # attention calls of one forward that were dense
    peak_gb: float | None  # the most memory that was held, weights included
    error_to_dense: float | None  # relative L2 difference of the outputs, with random weights
    right: bool  # whether the output is finite
    measured: str  # the time of measurement, in UTC

    @property
    def key(self) -> tuple[Any, ...]:
        """What a later measurement must have in common to replace this row."""
        return tuple(getattr(self, name) for name in KEY)

    @property
    def size(self) -> Size:
        """Height, width and frames together."""
        return Size(self.height, self.width, self.frames)


def format_rows(rows: Sequence[ModelRow], steps: int | None = None) -> str:
    """The rows as a table. A whole run has `steps` steps; None stands for the model's own number."""
    return table(tuple(_COLUMNS), [tuple(cell(row, steps) for cell in _COLUMNS.values()) for row in rows])


def _name(row: ModelRow) -> str:
    return row.model + (f" ({row.layers} of {row.all_layers} layers)" if row.layers < row.all_layers else "")


def _run_seconds(row: ModelRow, steps: int | None) -> str:
    if steps is None and row.model in MODELS:
        steps = MODELS[row.model].steps
    return "-" if steps is None else f"{steps} x = {steps * row.step_seconds:.1f}"


_COLUMNS: dict[str, Callable[[ModelRow, int | None], str]] = {  # heading -> the cell of a row, for a number of steps
    "model": lambda row, _: _name(row),
    "size": lambda row, _: str(row.size),
    "tokens": lambda row, _: str(row.tokens),
    "attention": lambda row, _: row.attention,
    "precision": lambda row, _: row.dtype if row.precision == "native" else row.precision,
    "sparsity": lambda row, _: f"{row.sparsity:.2f}",
    "density": lambda row, _: form(row.density, ".3f"),
    "s/forward": lambda row, _: f"{row.seconds:.3f}",
    "s/step": lambda row, _: f"{row.step_seconds:.3f}",
    "s/run": _run_seconds,
    "speed-up": lambda row, _: form(row.speedup, ".2f", "x") if row.right else "WRONG",
    "attention share": lambda row, _: form(row.attention_share, ".0%"),
    "sparse calls": lambda row, _: f"{row.sparse_calls}/{row.sparse_calls + row.dense_calls}",
    "peak GB": lambda row, _: form(row.peak_gb, ".1f"),
    "vs dense": lambda row, _: form(row.error_to_dense, ".4f"),
}


# ---------------------------------------------------------------------------------------------------------------------
# measuring


@dataclass(frozen=True)
class Job:
    """One model at one size, and the ways to run it."""

    model: Model
    size: Size
    device: torch.device
    dtype: torch.dtype
    layers: int | None = None  # None stands for all
    sparse_types: Sequence[Strategy] = ("rf_v2",)
    precisions: Sequence[Precision] = ("native",)
    backend: str = "auto"
    sparsities: Sequence[float | None] = (None,)  # None stands for the model's own
    repeats: int = REPEATS
    seed: int = 0
    compiled: bool = False


@dataclass(frozen=True)
class Outcome:
    """What measuring one model found."""

    rows: list[ModelRow] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # way to run that was refused -> why
    broken: dict[str, str] = field(default_factory=dict)  # way to run that should have worked -> what went wrong
    remarks: list[str] = field(default_factory=list)


class _Ran(NamedTuple):
    """What a few forwards of one way to run gave."""

    out: Tensor
    time: timing.Timing
    peak_gb: float | None


def measure(
    job: Job,
    tell: Callable[[str], None] = lambda _: None,
    keep: Callable[[ModelRow], None] = lambda _: None,
) -> Outcome:
    """Builds the model, runs it dense and then sparse in each precision. `keep` is called with every row at once."""
    measurement = _Measurement(job, tell, keep)
    with torch.inference_mode(), dense_kernels(job.device):
        measurement.attempt("dense", measurement.meter)
        if job.compiled:
            measurement.transformer.compile_repeated_blocks(fullgraph=True)
        if "dense" not in measurement.outcome.broken:
            measurement.attempt("dense", measurement.run_dense)
        for sparse_type, sparsity, precision in product(job.sparse_types, job.sparsities, job.precisions):
            at = f" at {sparsity:g}" if len(job.sparsities) > 1 and sparsity is not None else ""
            work = partial(measurement.run_sparse, sparse_type, precision, sparsity)
            measurement.attempt(f"{sparse_type}{at} in {precision}", work, may_refuse=True)
    return measurement.outcome


class _Measurement:
    def __init__(self, job: Job, tell: Callable[[str], None], keep: Callable[[ModelRow], None]) -> None:
        self.job, self.tell, self.keep = job, tell, keep
        self.outcome = Outcome()
        self.reference: Tensor | None = None  # the output of a dense forward
        self.dense_seconds: float | None = None
        self.attention_ms, self.attention_calls, self.metered_ms = 0.0, 0, 0.0
        tell("weights")
        import_module("diffusers")  # takes seconds, which are not to count for the weights
        start = time.perf_counter()
        transformer, billions = build(job.model, job.layers, job.device, job.dtype, job.seed)
        self.transformer: Any = transformer  # it has methods of diffusers that nn.Module does not
        _synchronize(job.device)
        seconds = time.perf_counter() - start
        self.outcome.remarks.append(f"{billions:.2f} billion random parameters, made in {seconds:.1f} s")
        torch.manual_seed(job.seed)
        self.inputs = job.model.inputs(job.model.config, job.size, job.device, job.dtype)

    def attempt(self, name: str, work: Callable[[], None], may_refuse: bool = False) -> None:
        """Runs one way. If it is refused or breaks, the others still run, and the exit status tells."""
        try:
            work()
        except Exception as error:
            if may_refuse and isinstance(error, (ValueError, NotImplementedError)):
                self.outcome.left_out[name] = str(error)
            else:
                self.outcome.broken[name] = first_line(error)
        _free(self.job.device)

    def forward(self) -> Tensor:
        """One forward of the transformer as it is now."""
        out: Tensor = self.transformer(**self.inputs, return_dict=False)[0]
        return out

    def meter(self) -> None:
        """Times the attention of a dense forward that is not compiled, after a warm-up if there is time for several."""
        if self.job.repeats > 1:
            self.tell("dense, warm-up")
            self.forward()
        self.tell("dense, attention alone")
        with AttentionMeter(self.job.device, LEAST_TOKENS) as meter:
            self.reference = self.forward()
        self.attention_ms, self.attention_calls = meter.milliseconds(), len(meter.lengths)
        self.metered_ms = meter.whole_milliseconds()

    def run_dense(self) -> None:
        """Times dense forwards and adds their row."""
        ran = self._run("dense", None if self.job.compiled else self.reference)
        self.reference, self.dense_seconds = ran.out, ran.time.ms / 1000
        # of the forward that it was a part of; one that is compiled is another, with the same attention in it
        whole_ms = ran.time.ms if self.job.compiled else self.metered_ms
        share = self.attention_ms / whole_ms if self.attention_calls else None
        self._add(ran, attention="dense", density=1.0, dense_calls=self.attention_calls, attention_share=share)

    def run_sparse(self, sparse_type: Strategy, precision: Precision, sparsity: float | None = None) -> None:
        """Times sparse forwards and adds their row. Steps and lengths that `enable` leaves dense are sparse here."""
        sparsity = self.job.model.sparsity if sparsity is None else sparsity
        with rainfusion.enabled(
            self.transformer,
            sparse_type=sparse_type,
            sparsity=sparsity,
            precision=precision,
            backend=self.job.backend,
            min_tokens=0,
            start_step=0,
        ) as handle:
            ran = self._run(f"{sparse_type} in {precision}")
            stats = handle.stats()
        forwards = self.job.repeats + 1
        reasons = ", ".join(f"{reason} ({count})" for reason, count in stats.reasons.items())
        if not stats.sparse_calls:
            raise ValueError(f"no attention ran sparse: {reasons or 'no reason was given'}")
        if reasons:
            self.outcome.remarks.append(f"dense calls among those of {sparse_type} in {precision}: {reasons}")
        found = [density for density in stats.density.values() if density is not None]
        self._add(
            ran,
            attention=sparse_type,
            precision=precision,
            sparsity=sparsity,
            density=sum(found) / len(found) if found else None,
            sparse_calls=stats.sparse_calls // forwards,
            dense_calls=stats.dense_calls // forwards,
        )

    def _run(self, name: str, out: Tensor | None = None) -> _Ran:
        """Times forwards, after one that warms up unless its output is given as `out`."""
        device, clock = self.job.device, timing.clock_for(self.job.device)
        if out is None:
            self.tell(f"{name}, warm-up")
            out = self.forward()
        _synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = []
        for number in range(self.job.repeats):
            self.tell(f"{name}, forward {number + 1} of {self.job.repeats}")
            times.append(clock.milliseconds([self.forward]))
        peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
        return _Ran(out, timing.Timing.of(times), peak)

    def _add(
        self,
        ran: _Ran,
        *,
        attention: str,
        density: float | None,
        precision: str = "native",
        sparsity: float = 0.0,
        attention_share: float | None = None,
        sparse_calls: int = 0,
        dense_calls: int = 0,
    ) -> None:
        job, t = self.job, ran.time
        right = bool(ran.out.isfinite().all())
        error = None if self.reference is None else relative_error(ran.out, self.reference)
        row = ModelRow(
            gpu=device_name(job.device),
            model=job.model.name,
            height=job.size.height,
            width=job.size.width,
            frames=job.size.frames,
            layers=job.model.layers(job.layers),
            all_layers=job.model.layers(),
            tokens=job.model.tokens(job.size),
            dtype=str(job.dtype).removeprefix("torch."),
            compiled=job.compiled,
            attention=attention,
            precision=precision,
            sparsity=sparsity,
            **versions(),
            diffusers=str(import_module("diffusers").__version__),
            density=density,
            seconds=t.ms / 1000,
            low_seconds=t.low_ms / 1000,
            high_seconds=t.high_ms / 1000,
            rounds=t.rounds,
            forwards=job.model.forwards,
            step_seconds=job.model.forwards * t.ms / 1000,
            speedup=1000 * self.dense_seconds / t.ms if right and self.dense_seconds is not None else None,
            attention_share=attention_share,
            sparse_calls=sparse_calls,
            dense_calls=dense_calls,
            peak_gb=ran.peak_gb,
            error_to_dense=error,
            right=right,
            measured=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        self.outcome.rows.append(row)
        self.keep(row)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """|out - exact| / |exact| over all elements."""
    return float((out.float() - exact.float()).norm() / exact.float().norm())


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------------------
# the command


def run(jobs: Sequence[Job], *, steps: int | None = None, csv: Path | None = None, as_json: bool = False) -> int:
    """Prints the table (or JSON) and returns the exit status: 1 if something broke, was not finite or never sparse.

    Rows go to the file one by one, so that a run which is cut short leaves what it has.
    """
    if csv is not None and csv.exists():
        results.read(csv, ModelRow)  # a file of another kind is refused before the work, not after
    rows: list[ModelRow] = []
    notes = sys.stderr if as_json else sys.stdout
    remarks: list[str] = []
    failed = False
    with Progress("bench", len(jobs), "model") as progress:
        for job in jobs:
            if _fewer_layers(job):
                progress.say(_fewer_layers(job))

            def tell(stage: str, name: str = job.model.name) -> None:
                progress.note(f"{name}: {stage}")

            def keep(row: ModelRow) -> None:
                if csv is not None:
                    results.update(csv, [row])
                progress.say(_summary(row))

            outcome = measure(job, tell, keep)
            _forget(job)
            rows += outcome.rows
            failed = failed or bool(outcome.broken) or not all(row.right for row in outcome.rows)
            failed = failed or all(row.attention == "dense" for row in outcome.rows)
            remarks += _remarks(job, outcome)
            progress.advance()
    for remark in remarks:
        print(remark, file=notes, flush=True)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2), flush=True)
    else:
        print(_heading(jobs), flush=True)
        print(format_rows(rows, steps), flush=True)
    return 1 if failed else 0


def show(csv: Path, names: Sequence[str], *, steps: int | None = None, as_json: bool = False) -> int:
    """Prints the rows that a file has of these models, and measures nothing."""
    rows = [row for row in results.read(csv, ModelRow) if row.model in names]
    if not rows:
        raise ValueError(f"{csv} must have rows of {', '.join(names)}, got none")
    print(json.dumps([asdict(row) for row in rows], indent=2) if as_json else format_rows(rows, steps), flush=True)
    return 0


def _forget(job: Job) -> None:
    """Drops compiled blocks and hands freed memory back, before the next model."""
    if job.compiled:
        torch.compiler.reset()
    _free(job.device)


def _fewer_layers(job: Job) -> str:
    built, whole = job.model.layers(job.layers), job.model.layers()
    if built == whole:
        return ""
    return f"NOT THE WHOLE MODEL: {built} of the {whole} layers of {job.model.name}; its times are not the model's"


def _remarks(job: Job, outcome: Outcome) -> list[str]:
    model = job.model
    about = f"{model.name} at {job.size}"
    guidance = "two forwards, for classifier-free guidance" if model.forwards == 2 else "one forward"
    lines = [*outcome.remarks, f"a denoising step is {guidance}", *([model.note] if model.note else [])]
    lines += [f"left out: {name}: {reason}" for name, reason in outcome.left_out.items()]
    lines += [f"BROKEN: {name}: {reason}" for name, reason in outcome.broken.items()]
    fewer = _fewer_layers(job)
    return [f"{about}: {line}" for line in lines] + ([fewer] if fewer else [])


def _summary(row: ModelRow) -> str:
    """A line to read while others are measured."""
    speed = "WRONG" if not row.right else "no speed-up" if row.speedup is None else f"{row.speedup:.2f}x"
    how = "dense" if row.attention == "dense" else f"{row.attention} at {row.sparsity:g} in {row.precision}"
    return f"{row.model} at {row.size}, {how}: {row.seconds:.3f} s a forward, {speed}"


def _heading(jobs: Sequence[Job]) -> str:
    first = jobs[0]
    found = {**versions(), "diffusers": str(import_module("diffusers").__version__)}
    return (
        f"{device_name(first.device)}, {', '.join(f'{name} {version}' for name, version in found.items())}, "
        f"{'compiled blocks' if first.compiled else 'not compiled'}, medians of {first.repeats} forwards\n"
        "random weights: times do not depend on them; 'vs dense', the relative L2 difference of outputs, is no measure "
        "of quality;\na run is so many steps alike, without text encoder and VAE"
    )
