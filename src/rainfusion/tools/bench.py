"""`rainfusion bench`: dense and sparse attention on named shapes, timed in one run."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rainfusion
from rainfusion.layout import TokenLayout
from rainfusion.tools import synthetic
from rainfusion.tools.memory import peak_memory
from rainfusion.tools.shapes import SHAPES, Shape
from rainfusion.tools.table import table
from rainfusion.tools.verification import verify


@dataclass(frozen=True)
class Result:
    """One row. Times are medians in milliseconds; the speed-up is None where the result was found wrong."""

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
    peak_mb: float | None  # of the sparse call, its output included
    torch: str
    rainfusion: str


@torch.inference_mode()
def measure(
    shape: Shape,
    *,
    sparse_type: str = "rf_v2",
    sparsity: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    heads: int | None = None,
    repeats: int = 5,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Checks the sparse result, then times dense and sparse calls in turn."""
    device = torch.device(device)
    heads = heads or shape.heads
    sparsity = shape.sparsity if sparsity is None else sparsity
    tell("inputs")
    q, k, v = _inputs(shape, heads, dtype, device, seed)
    latent = None if shape.latent_shape is None else list(shape.latent_shape)
    kwargs: dict[str, Any] = dict(sparse_type=sparse_type, sparsity=sparsity, backend=backend)
    if sparse_type == "rf_v2":
        kwargs.update(latent_shape_q=latent, latent_shape_k=latent, txt_len=shape.txt_len)
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
    verdict = verify(q, k, v, out, mask, layout)
    del out, exact
    tell("timing")
    dense_ms, sparse_ms = _medians([dense, sparse], repeats, device)
    return Result(
        shape=shape.name,
        device=_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        batch=1,
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


def _inputs(
    shape: Shape, heads: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    if shape.latent_shape is None:
        return synthetic.tokens_qkv(shape.tokens, heads, shape.head_dim, seed=seed, dtype=dtype, device=device)
    latent = synthetic.video_latent(shape.latent_shape, seed=seed)
    return synthetic.video_qkv(
        latent, heads, shape.head_dim, txt_len=shape.txt_len, seed=seed, dtype=dtype, device=device
    )


def _layout(shape: Shape, sparse_type: str) -> TokenLayout:
    if sparse_type != "rf_v2":
        return TokenLayout.build(shape.seq_len)
    return TokenLayout.build(shape.seq_len, shape.latent_shape, shape.txt_len)


def _medians(calls: list[Callable[[], Tensor]], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each call. They take turns, so that a slow moment of the machine hits all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):  # the first one warms up
        for call, collected in zip(calls, times, strict=True):
            _synchronize(device)
            start = time.perf_counter()
            call()
            _synchronize(device)
            if turn > 0:
                collected.append(1000 * (time.perf_counter() - start))
    return [statistics.median(collected) for collected in times]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


def format_results(results: list[Result]) -> str:
    header = ("shape", "heads", "tokens", "type", "dtype", "dense ms", "sparse ms", "speed-up", "sparsity", "density",
              "vs dense", "vs fp64", "peak MB")  # fmt: skip
    rows = [
        (
            r.shape, str(r.heads), str(r.tokens), r.sparse_type, r.dtype, f"{r.dense_ms:.1f}", f"{r.sparse_ms:.1f}",
            f"{r.speedup:.2f}x" if r.speedup is not None else "WRONG", f"{r.sparsity:.2f}", f"{r.density:.3f}",
            f"{r.error_to_dense:.4f}", f"{r.error_to_float64:.1e}", "-" if r.peak_mb is None else f"{r.peak_mb:.0f}",
        )
        for r in results
    ]  # fmt: skip
    return table(header, rows)


def default_shapes(device: torch.device) -> list[Shape]:
    """Seconds each on a CPU; the real sizes elsewhere."""
    return [shape for shape in SHAPES.values() if shape.small == (device.type == "cpu")]


def run(
    shapes: list[Shape],
    *,
    sparse_types: list[str],
    sparsity: float | None,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    heads: int | None,
    repeats: int,
    seed: int,
    as_json: bool,
) -> int:
    """Prints the table (or JSON) and returns the exit status: 1 if a result was wrong."""
    from tqdm import tqdm

    jobs = [(shape, kind) for shape in shapes for kind in sparse_types]
    results = []
    with tqdm(jobs, desc="bench", unit="shape", file=sys.stderr) as bar:
        for shape, kind in bar:

            def tell(stage: str, name: str = shape.name) -> None:
                bar.set_postfix_str(f"{name}: {stage}")

            result = measure(
                shape, sparse_type=kind, sparsity=sparsity, dtype=dtype, device=device, backend=backend, heads=heads,
                repeats=repeats, seed=seed, tell=tell,
            )  # fmt: skip
            results.append(result)
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        versions = f"torch {torch.__version__}, rainfusion {rainfusion.__version__}"
        print(f"{results[0].device}, {versions}, synthetic video, medians of {repeats}")
        print(format_results(results))
        print("relative L2 errors: 'vs dense' is what skipping blocks changes, 'vs fp64' what the arithmetic loses")
    return 0 if all(result.right for result in results) else 1
