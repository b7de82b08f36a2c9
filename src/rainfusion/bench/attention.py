"""`rainfusion bench`: dense and sparse attention on named shapes, timed in one run.

On a GPU, and wherever results are kept or drawn, `contest` measures all contenders; on a CPU `measure` is enough.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

import rainfusion
from rainfusion.bench import contest, results, timing
from rainfusion.bench.contest import device_name
from rainfusion.bench.inputs import Precision, SparseType, attention_inputs, call_arguments
from rainfusion.bench.memory import peak_memory
from rainfusion.bench.pictures import Panel
from rainfusion.bench.results import Row
from rainfusion.bench.shapes import SHAPES, Shape
from rainfusion.bench.verification import verify
from rainfusion.layout import TokenLayout
from rainfusion.progress import Progress
from rainfusion.table import table

_CPU_REPEATS, _GPU_REPEATS = 5, 50


@dataclass(frozen=True)
class Result:
    """One row of the table. Times are medians in milliseconds; a result that was found wrong has no speed-up."""

    shape: str
    device: str
    dtype: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    sparse_type: str
    sparsity: float
    density: float
    dense_ms: float
    sparse_ms: float
    speedup: float | None
    error_to_dense: float  # relative L2: what skipping blocks changes
    error_to_float64: float  # relative L2 over the same blocks: what the arithmetic loses
    allowed_error: float
    right: bool
    peak_mb: float | None  # the most that the sparse call held, its output included
    torch: str
    rainfusion: str


@torch.inference_mode()
def measure(
    shape: Shape,
    *,
    sparse_type: SparseType = "rf_v2",
    sparsity: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    precision: Precision = "native",
    batch: int | None = None,
    heads: int | None = None,
    repeats: int = 5,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Checks the sparse result, then times dense and sparse calls in turn."""
    device = torch.device(device)
    batch, heads = shape.batch if batch is None else batch, shape.heads if heads is None else heads
    sparsity = shape.sparsity if sparsity is None else sparsity
    tell("inputs")
    q, k, v = attention_inputs(shape, batch=batch, heads=heads, dtype=dtype, device=device, seed=seed)
    kwargs = {**call_arguments(shape, sparse_type, sparsity), "backend": backend, "precision": precision}
    layout = _layout(shape, sparse_type).to(device)

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def sparse() -> Tensor:
        out: Tensor = rainfusion.sparse_attention(q, k, v, **kwargs)
        return out

    tell("dense")
    exact = dense()
    tell("check")
    (out, mask), peak = peak_memory(lambda: rainfusion.sparse_attention(q, k, v, **kwargs, return_mask=True), device)
    error_to_dense = float((out.double() - exact.double()).norm() / exact.double().norm())
    compensate, spreads = kwargs.get("compensate", False), kwargs.get("predictor") == "spread"
    verdict = verify(q, k, v, out, mask, layout, compensate=compensate, spreads=spreads)
    del out, exact
    tell("timing")
    dense_ms, sparse_ms = _medians([dense, sparse], repeats, device)
    return Result(
        shape=shape.name,
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        batch=batch,
        heads=heads,
        tokens=shape.seq_len,
        head_dim=shape.head_dim,
        sparse_type=sparse_type,
        sparsity=sparsity,
        density=mask.density(),
        dense_ms=dense_ms,
        sparse_ms=sparse_ms,
        speedup=dense_ms / sparse_ms if verdict.right else None,
        error_to_dense=error_to_dense,
        error_to_float64=verdict.error,
        allowed_error=verdict.allowed,
        right=verdict.right,
        peak_mb=None if peak is None else peak / 2**20,
        torch=torch.__version__,
        rainfusion=rainfusion.__version__,
    )


def _layout(shape: Shape, sparse_type: SparseType) -> TokenLayout:
    if sparse_type == "ada_bsa":
        return TokenLayout.build(shape.seq_len)
    first_frame: Literal["protected", "free"] = "free" if sparse_type == "enable" else "protected"
    return TokenLayout.build(shape.seq_len, shape.latent_shape, shape.txt_len, first_frame=first_frame)


def _medians(calls: list[Callable[[], Tensor]], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each call. They take turns, so that a slow moment of the machine hits all of them."""
    clock = timing.WallClock(device)
    rounds = [[clock.milliseconds([call]) for call in calls] for _ in range(repeats + 1)]  # the first one warms up
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


_COLUMNS: dict[str, Callable[[Result], str]] = {
    "shape": lambda result: result.shape,
    "heads": lambda result: str(result.heads),
    "tokens": lambda result: str(result.tokens),
    "type": lambda result: result.sparse_type,
    "dtype": lambda result: result.dtype,
    "dense ms": lambda result: f"{result.dense_ms:.1f}",
    "sparse ms": lambda result: f"{result.sparse_ms:.1f}",
    "speed-up": lambda result: "WRONG" if result.speedup is None else f"{result.speedup:.2f}x",
    "sparsity": lambda result: f"{result.sparsity:.2f}",
    "density": lambda result: f"{result.density:.3f}",
    "vs dense": lambda result: f"{result.error_to_dense:.4f}",
    "vs fp64": lambda result: f"{result.error_to_float64:.1e}",
    "peak MB": lambda result: results.form(result.peak_mb, ".0f"),
}


def format_results(found: Sequence[Result]) -> str:
    """The results as a table."""
    return table(tuple(_COLUMNS), [tuple(cell(result) for cell in _COLUMNS.values()) for result in found])


def default_shapes(device: torch.device) -> list[Shape]:
    """The shapes that are measured without names: on a CPU those that take seconds, elsewhere the real ones."""
    return [shape for shape in SHAPES.values() if shape.small == (device.type == "cpu")]


@dataclass(frozen=True)
class Plan:
    """What to measure, how, and where the results go."""

    shapes: Sequence[Shape]
    device: torch.device
    dtype: torch.dtype
    sparse_types: Sequence[SparseType] = ("rf_v2",)
    sparsities: Sequence[float | None] = (None,)  # None stands for the shape's own
    precisions: Sequence[Precision] = ("native",)
    backend: str = "auto"
    batch: int | None = None  # None stands for the shape's own, here and for the heads
    heads: int | None = None
    repeats: int | None = None  # None stands for 5 rounds on a CPU and 50 on a GPU
    seconds: float = 2.0  # the time of each contender on each shape, on a GPU
    seed: int = 0
    flex: bool = False
    as_json: bool = False
    csv: Path | None = None
    plot: Path | None = None
    panels: Sequence[Panel] | None = None  # what to plot; None stands for all that there is

    @property
    def rounds(self) -> int:
        """How often each call is timed, at most."""
        if self.repeats is not None:
            return self.repeats
        return _GPU_REPEATS if self.device.type == "cuda" else _CPU_REPEATS

    @property
    def jobs(self) -> list[tuple[Shape, SparseType, float | None]]:
        """Every shape with every sparse type and every sparsity."""
        return list(product(self.shapes, self.sparse_types, self.sparsities))


def run(plan: Plan) -> int:
    """Prints the table (or JSON) and returns the exit status: 1 if a result was wrong."""
    kept = plan.csv is not None or plan.plot is not None or plan.panels is not None
    return _run_contest(plan) if plan.device.type == "cuda" or kept else _run_pair(plan)


def _run_pair(plan: Plan) -> int:
    """Times torch's dense attention and one sparse call for each job."""
    found = []
    jobs = list(product(plan.jobs, plan.precisions))
    with Progress("bench", len(jobs), "call") as progress:
        for (shape, kind, sparsity), precision in jobs:
            result = measure(
                shape,
                sparse_type=kind,
                sparsity=sparsity,
                dtype=plan.dtype,
                device=plan.device,
                backend=plan.backend,
                precision=precision,
                batch=plan.batch,
                heads=plan.heads,
                repeats=plan.rounds,
                seed=plan.seed,
                tell=partial(_tell, progress, shape),
            )
            found.append(result)
            progress.advance()
    if plan.as_json:
        _say(json.dumps([asdict(result) for result in found], indent=2))
    else:
        versions = f"torch {torch.__version__}, rainfusion {rainfusion.__version__}"
        _say(f"{found[0].device}, {versions}, synthetic video, medians of {plan.rounds}")
        _say(format_results(found))
        _say("relative L2 errors: 'vs dense' is what skipping blocks changes, 'vs fp64' what the arithmetic loses")
    return 0 if all(result.right for result in found) else 1


def _run_contest(plan: Plan) -> int:
    """Times all contenders for each job. Rows are kept after every job, so that one which is cut short leaves some."""
    if plan.csv is not None and plan.csv.exists():
        results.read(plan.csv)  # a file of another kind is refused before the work, not after
    rows: list[Row] = []
    remarks: dict[str, list[str]] = {}  # remark -> the shapes that it concerns
    broken = False
    with Progress("bench", len(plan.jobs), "call") as progress:
        progress.note("matmul")
        matmul = timing.matmul_tflops(plan.device) if plan.device.type == "cuda" else None
        for shape, kind, sparsity in plan.jobs:
            outcome = contest.measure(
                shape,
                sparse_type=kind,
                sparsity=sparsity,
                precisions=plan.precisions,
                dtype=plan.dtype,
                device=plan.device,
                backend=plan.backend,
                batch=plan.batch,
                heads=plan.heads,
                repeats=plan.rounds,
                seconds=plan.seconds,
                seed=plan.seed,
                flex=plan.flex,
                matmul_tflops=matmul,
                tell=partial(_tell, progress, shape),
            )
            if plan.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()  # frees the memory of CUDA graphs
            rows += outcome.rows
            broken = broken or bool(outcome.broken)
            for kind_of, about in (("left out", outcome.left_out), ("BROKEN", outcome.broken)):
                for name, reason in about.items():
                    remarks.setdefault(f"{kind_of}: {name}: {reason}", []).append(shape.name)
            if plan.csv is not None:
                results.update(plan.csv, outcome.rows)
            for line in _summary(outcome.rows):
                progress.say(line)
            progress.advance()
    notes = sys.stderr if plan.as_json else sys.stdout
    for remark, names in remarks.items():
        where = "" if len(names) == len(plan.jobs) else f" ({', '.join(dict.fromkeys(names))})"
        print(remark + where, file=notes, flush=True)
    if plan.plot is not None:
        _draw(rows, plan.plot, plan.panels, notes)
    if plan.as_json:
        _say(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _say(_heading(rows, plan))
        _say(results.format_rows(rows))
    wrong = any(not row.right for row in rows if row.contender.endswith((" kernel", " call", " graph")))
    return 1 if wrong or broken else 0


def _tell(progress: Progress, shape: Shape, stage: str) -> None:
    progress.note(f"{shape.name}: {stage}")


def _summary(rows: Sequence[Row]) -> list[str]:
    """A line for each whole call, to read while others are measured."""
    return [
        f"{row.shape} at {row.sparsity:g}, {row.contender}, {row.precision}: {row.ms:.3f} ms, "
        + (f"{row.speedup:.2f}x" if row.speedup is not None else "no speed-up" if row.right else "WRONG")
        for row in rows
        if row.contender.endswith(" call")
    ]


def _heading(rows: Sequence[Row], plan: Plan) -> str:
    first = rows[0]
    peak = "" if first.matmul_tflops is None else f"; a bf16 matmul reaches {first.matmul_tflops:.0f} TFLOP/s"
    return (
        f"{first.gpu}, torch {first.torch}, triton {first.triton}, rainfusion {first.rainfusion}, synthetic video, "
        f"medians of up to {plan.rounds} rounds or {plan.seconds:g} s{peak}\n"
        "'host ms': until all is launched; TFLOP/s on the kept blocks; 'around': beyond the kernel, in percent of it;\n"
        "'peak MB': beyond inputs and output;\n"
        "relative L2 errors: 'vs dense' is what skipping blocks changes, 'vs fp64' what the arithmetic loses"
    )


def draw_from_csv(csv: Path, plot: Path | None, panels: Sequence[Panel] | None, as_json: bool) -> int:
    """The rows of a file as a picture, a table or JSON, without measuring anything."""
    rows = results.read(csv)
    if plot is not None:
        _draw(rows, plot, panels, sys.stderr if as_json else sys.stdout)
    if as_json:
        _say(json.dumps([asdict(row) for row in rows], indent=2))
    elif plot is None:
        _say(results.format_rows(rows))
    return 0


def _draw(rows: Sequence[Row], path: Path, panels: Sequence[Panel] | None, notes: TextIO) -> None:
    from rainfusion.bench.pictures import speedup_figure

    path.parent.mkdir(parents=True, exist_ok=True)
    speedup_figure(rows, panels).savefig(path)
    print(f"wrote {path}", file=notes, flush=True)


def _say(text: str) -> None:
    for line in text.splitlines():
        print(line, flush=True)
