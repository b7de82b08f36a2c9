"""One attention call, measured against what else can compute it: who is how fast, and is the result right?

Contenders: dense and sparse baselines, and ours: the attention kernel alone (keys prepared and blocks chosen
beforehand), the whole call, and the whole call replayed from a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import rainfusion
from rainfusion import backends, pipeline
from rainfusion.bench import baselines, timing
from rainfusion.bench.baselines import Baseline, Call, Setting, first_line
from rainfusion.bench.inputs import Precision, SparseType, attention_inputs, call_arguments
from rainfusion.bench.memory import peak_memory
from rainfusion.bench.results import Row
from rainfusion.bench.shapes import Shape
from rainfusion.bench.verification import QUANTISED_ERROR, Verdict, verify
from rainfusion.blockmask import BlockMask
from rainfusion.calls import Inputs
from rainfusion.layout import TokenLayout
from rainfusion.planning import Plan, planned

_BASELINE_SLACK = 3.0  # other libraries round in other places: this finds a wrong setup, not a lost bit
_CHECKED_ROWS = 12  # blocks of rows that are computed again in float64


class Outcome(NamedTuple):
    """What a contest found."""

    rows: list[Row]
    left_out: dict[str, str]  # contender that did not run -> why
    broken: dict[str, str]  # contender of ours that should have run -> what went wrong


@dataclass(frozen=True)
class _Contender:
    name: str
    calls: list[Call]  # the same call on different memory
    precision: str
    dense: bool
    exact: bool
    ours: bool
    density: float
    tflop: float  # the work of one call
    peak_mb: float | None
    error_to_dense: float
    verdict: Verdict | None

    @property
    def right(self) -> bool:
        return self.verdict is None or self.verdict.right


def dense_tflop(q: Tensor, k: Tensor) -> float:
    """4 B H Sq Sk D: q k^T and p v, with two operations for each product."""
    batch, heads, q_len, head_dim = q.shape
    return 4 * batch * heads * q_len * k.shape[2] * head_dim / 1e12


def kept_tflop(mask: BlockMask, head_dim: int) -> float:
    """4 D and the area of the kept blocks: q k^T and p v over them, each of them counted whole."""
    return 4 * head_dim * mask.q_block * mask.k_block * int(mask.counts.sum(dtype=torch.int64)) / 1e12


def kernel_alone(inputs: Inputs, plan: Plan) -> Call:
    """The attention kernel as a call, with everything that comes before the kernel done beforehand."""
    request, backend = pipeline.request_for(inputs, plan), backends.get(plan.backend)
    with pipeline.alone_on(inputs.q.device):
        keys = backend.prepare(request)
        mask = pipeline.predict(request, backend, keys)

    def call() -> Tensor:
        with pipeline.alone_on(inputs.q.device):
            return backend.attend(request, keys, mask)[0]

    return call


def replayed(call: Call, device: torch.device) -> Call:
    """A call as a replay of a CUDA graph of it. Its result is always in the same memory."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@torch.inference_mode()
def measure(
    shape: Shape,
    *,
    sparse_type: SparseType = "rf_v2",
    sparsity: float | None = None,
    precisions: Sequence[Precision] = ("native",),
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    backend: str = "auto",
    batch: int | None = None,
    heads: int | None = None,
    repeats: int = 50,
    seconds: float = 2.0,
    seed: int = 0,
    flex: bool = False,
    matmul_tflops: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Checks every contender's result, then times all of them in turn."""
    contest = _Contest(
        shape, sparse_type, shape.sparsity if sparsity is None else sparsity, dtype, torch.device(device), tell
    )
    contest.make_inputs(shape.batch if batch is None else batch, shape.heads if heads is None else heads, seed)
    contest.enter_ours(backend, precisions)
    for baseline in (*baselines.DENSE, *baselines.SPARSE, *(baselines.SLOW_TO_COMPILE if flex else ())):
        contest.enter(baseline)
    contest.reference = None
    contest.contenders.sort(
        key=lambda contender: (not contender.dense, contender.ours)
    )  # dense ones come first, then sparse ones, then ours
    calls = [contender.calls for contender in contest.contenders]
    timings = timing.take_turns(calls, timing.clock_for(contest.device), repeats=repeats, seconds=seconds, tell=tell)
    tell("host")
    hosts = [timing.host_milliseconds(contender.calls[0], contest.device) for contender in contest.contenders]
    rows = contest.rows(timings, hosts, matmul_tflops)
    return Outcome(rows, contest.left_out, contest.broken)


class _Contest:
    """One attention call, and the contenders that were entered for it so far."""

    def __init__(
        self,
        shape: Shape,
        sparse_type: SparseType,
        sparsity: float,
        dtype: torch.dtype,
        device: torch.device,
        tell: Callable[[str], None],
    ) -> None:
        self.shape, self.sparse_type, self.sparsity = shape, sparse_type, sparsity
        self.dtype, self.device, self.tell = dtype, device, tell
        self.kwargs = call_arguments(shape, sparse_type, sparsity)
        self.contenders: list[_Contender] = []
        self.left_out: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.sets: list[tuple[Tensor, Tensor, Tensor]] = []
        self.mask: BlockMask | None = None
        self.reference: Tensor | None = None  # the result of dense attention

    def make_inputs(self, batch: int, heads: int, seed: int) -> None:
        """Makes q, k and v, and copies of them where a cache would hold one set."""
        self.tell("inputs")
        first = attention_inputs(self.shape, batch=batch, heads=heads, dtype=self.dtype, device=self.device, seed=seed)
        copies = timing.copies_needed(first, timing.cache_bytes(self.device))
        q, k, v = first
        self.sets = [first, *((q.clone(), k.clone(), v.clone()) for _ in range(copies - 1))]
        self.layout = planned(q, k, v, **self.kwargs)[1].layouts[0]
        self.reference = F.scaled_dot_product_attention(q, k, v)

    # -----------------------------------------------------------------------------------------------------------------
    # ours

    def enter_ours(self, backend: str, precisions: Sequence[Precision]) -> None:
        """Enters our kernel, the whole call and its CUDA graph in each precision, and notes those that cannot run."""
        refusals: list[str] = []
        for precision in precisions:
            try:
                _, plan = planned(*self.sets[0], **self.kwargs, precision=precision, backend=backend)
            except ValueError as error:
                refusals.append(str(error))
                self.left_out[f"ours in {precision}"] = str(error)
                continue
            self._enter_precision(plan.backend, precision)
        if len(refusals) == len(precisions):
            raise ValueError(refusals[0])

    def _enter_precision(self, backend_name: str, precision: str) -> None:
        kwargs = {**self.kwargs, "backend": backend_name, "precision": precision}
        whole: list[Call] = [partial(rainfusion.sparse_attention, *qkv, **kwargs) for qkv in self.sets]
        mask: BlockMask | None = None
        stages: dict[str, Callable[[], list[Call]]] = {
            "kernel": lambda: [kernel_alone(*planned(*qkv, **kwargs)) for qkv in self.sets],
            "call": lambda: whole,
            "graph": lambda: [replayed(call, self.device) for call in whole],
        }
        for stage, make in stages.items():
            name = f"{backend_name} {stage}"
            self.tell(f"{name} in {precision}")
            reason = self._why_no_stage(stage, backend_name)
            if reason is not None:
                self.left_out[name] = reason
                continue
            try:
                if mask is None:
                    mask = rainfusion.sparse_attention(*self.sets[0], **kwargs, return_mask=True)[1]
                    self.mask = self.mask or mask
                self._check_ours(name, precision, make(), mask)
            except Exception as error:  # the other contenders still run, and the exit status tells
                self.broken[f"{name} in {precision}"] = first_line(error)

    def _why_no_stage(self, stage: str, backend_name: str) -> str | None:
        reads_back = backends.get(backend_name).READS_BACK
        if stage == "kernel" and reads_back:
            return "it has no kernel to time alone"
        if stage == "graph" and reads_back:
            return "it reads counts back from the device, which a CUDA graph cannot hold"
        if stage == "graph" and self.device.type != "cuda":
            return f"CUDA graphs need a CUDA device, got {self.device.type}"
        return None

    def _check_ours(self, name: str, precision: str, calls: list[Call], mask: BlockMask) -> None:
        out, peak = self._run(calls[0])
        self.contenders.append(
            _Contender(
                name=name,
                calls=calls,
                precision=precision,
                dense=False,
                exact=precision == "native",
                ours=True,
                density=mask.density(),
                tflop=kept_tflop(mask, self.shape.head_dim),
                peak_mb=None if name.endswith("graph") else peak,
                error_to_dense=self._error_to_dense(out),
                verdict=self._verify(
                    out,
                    mask,
                    self.layout,
                    None if precision == "native" else QUANTISED_ERROR,
                    1.5,
                    self.kwargs.get("compensate", False),
                    self.kwargs.get("predictor") == "spread",
                ),
            )
        )

    # -----------------------------------------------------------------------------------------------------------------
    # others

    def enter(self, baseline: Baseline) -> None:
        """Enters a baseline, or notes why it cannot run."""
        reason = baseline.why_not(self.sets[0][0])
        if reason is None and self.mask is None and not baseline.dense:
            reason = "there is no mask, since none of ours ran"
        if reason is None:
            self.tell(baseline.name)
            try:
                self._check_baseline(baseline)
            except Exception as error:  # what another library does is not ours to mend
                reason = f"failed: {first_line(error)}"
        if reason is not None:
            self.left_out[baseline.name] = reason

    def _check_baseline(self, baseline: Baseline) -> None:
        q, k, _ = self.sets[0]
        mask = _full_mask(q, k) if baseline.dense or self.mask is None else self.mask
        calls = baseline.prepare([Setting(*qkv, mask, self.layout) for qkv in self.sets])
        out, peak = self._run(calls[0])
        if baseline.reordered:
            out = self.layout.restore(out)
        verdict = None
        if baseline.same_blocks:
            allowed = None if baseline.exact else QUANTISED_ERROR
            layout = TokenLayout.build(q.shape[2]).to(self.device) if baseline.dense else self.layout
            verdict = self._verify(out, mask, layout, allowed, _BASELINE_SLACK)
        density = 1.0 if baseline.dense else mask.density()
        self.contenders.append(
            _Contender(
                name=baseline.name,
                calls=calls,
                precision="native" if baseline.exact else "int8",
                dense=baseline.dense,
                exact=baseline.exact,
                ours=False,
                density=density,
                tflop=dense_tflop(q, k) if baseline.dense else kept_tflop(mask, self.shape.head_dim),
                peak_mb=peak,
                error_to_dense=self._error_to_dense(out),
                verdict=verdict,
            )
        )

    # -----------------------------------------------------------------------------------------------------------------
    # checks

    def _run(self, call: Call) -> tuple[Tensor, float | None]:
        """Returns the result of a call, and the most megabytes that the call held beyond it."""
        call()  # the first call compiles, tunes and fills caches
        out, peak = peak_memory(call, self.device)
        if peak is None:
            return out, None
        return out, max(0, peak - out.numel() * out.element_size()) / 2**20

    def _verify(
        self,
        out: Tensor,
        mask: BlockMask,
        layout: TokenLayout,
        allowed: float | None,
        slack: float,
        compensate: bool = False,
        spreads: bool = False,
    ) -> Verdict:
        return verify(
            *self.sets[0],
            out,
            mask,
            layout,
            _CHECKED_ROWS,
            allowed=allowed,
            slack=slack,
            compensate=compensate,
            spreads=spreads,
        )

    def _error_to_dense(self, out: Tensor) -> float:
        assert self.reference is not None
        return relative_error(out, self.reference)

    # -----------------------------------------------------------------------------------------------------------------
    # rows

    def rows(
        self, timings: Sequence[timing.Timing], hosts: Sequence[float | None], matmul_tflops: float | None
    ) -> list[Row]:
        """A row for each contender, in the order of the timings."""
        measured = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        pairs = list(zip(self.contenders, timings, strict=True))
        times = {contender.name + contender.precision: t.ms for contender, t in pairs}
        dense = {c.name: t.ms for c, t in pairs if c.dense and c.exact and c.right}
        best, cudnn = min(dense.values(), default=None), dense.get("cuDNN")
        q = self.sets[0][0]
        rows = []
        for (contender, t), host_ms in zip(pairs, hosts, strict=True):
            backend_name, _, stage = contender.name.rpartition(" ")
            kernel_ms = times.get(f"{backend_name} kernel{contender.precision}")
            around = contender.ours and stage != "kernel" and kernel_ms is not None
            verdict = contender.verdict
            rows.append(
                Row(
                    gpu=device_name(self.device),
                    shape=self.shape.name,
                    batch=q.shape[0],
                    heads=q.shape[1],
                    tokens=q.shape[2],
                    head_dim=q.shape[3],
                    dtype=str(self.dtype).removeprefix("torch."),
                    precision=contender.precision,
                    sparse_type="dense" if contender.dense else self.sparse_type,
                    sparsity=0.0 if contender.dense else self.sparsity,
                    contender=contender.name,
                    **versions(),
                    density=contender.density,
                    ms=t.ms,
                    low_ms=t.low_ms,
                    high_ms=t.high_ms,
                    rounds=t.rounds,
                    tflops=1000 * contender.tflop / t.ms,
                    matmul_tflops=matmul_tflops,
                    speedup=best / t.ms if best is not None and contender.right else None,
                    speedup_cudnn=cudnn / t.ms if cudnn is not None and contender.right else None,
                    around_percent=100 * (t.ms / kernel_ms - 1) if around and kernel_ms is not None else None,
                    peak_mb=contender.peak_mb,
                    error_to_dense=contender.error_to_dense,
                    error_to_float64=None if verdict is None else verdict.error,
                    allowed_error=None if verdict is None else verdict.allowed,
                    right=contender.right,
                    measured=measured,
                    host_ms=host_ms,
                )
            )
        return rows


def _full_mask(q: Tensor, k: Tensor) -> BlockMask:
    """A mask of every block, whose heads share one list."""
    one = BlockMask.full(1, 1, q.shape[2], k.shape[2], device=q.device)
    batch, heads = q.shape[:2]
    return BlockMask(one.counts.expand(batch, heads, -1), one.indices.expand(batch, heads, -1, -1))


def relative_error(out: Tensor, exact: Tensor) -> float:
    """|out - exact| / |exact| over all elements, summed in float64 a head at a time."""
    difference = sum(
        (ours.double() - theirs.double()).square().sum()
        for ours, theirs in zip(out.flatten(0, 1), exact.flatten(0, 1), strict=True)
    )
    size = sum(theirs.double().square().sum() for theirs in exact.flatten(0, 1))
    return float((difference / size) ** 0.5)


def device_name(device: torch.device) -> str:
    """The name of a GPU; of a CPU its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


def versions() -> dict[str, str]:
    """The versions of rainfusion, torch and Triton that run here."""
    try:
        triton = str(import_module("triton").__version__)
    except ImportError:
        triton = "none"
    return dict(rainfusion=rainfusion.__version__, torch=str(torch.__version__), triton=triton)
