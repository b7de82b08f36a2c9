"""A shape small enough for a CPU, and rows as an H200 might give them."""

from dataclasses import replace

from rainfusion.bench.results import Row
from rainfusion.bench.shapes import SHAPES, SWEEP_SPARSITIES, Shape, token_sweep

TINY = Shape("tiny", 2, 16, (3, 8, 16), 20, 0.5, "for tests", small=True)
A_ROW = Row(
    gpu="NVIDIA H200", shape="wan-480p", batch=1, heads=12, tokens=32760, head_dim=128, dtype="bfloat16",
    precision="native", sparse_type="rf_v2", sparsity=0.8, contender="hopper call", rainfusion="0.2.0", torch="2.11.0",
    triton="3.6.0", density=0.28, ms=4.0, low_ms=3.9, high_ms=4.1, rounds=50, tflops=470.0, matmul_tflops=776.0,
    speedup=2.5, speedup_cudnn=2.6, around_percent=5.0, peak_mb=200.0, error_to_dense=0.02, error_to_float64=0.002,
    allowed_error=0.004, right=True, measured="2026-01-02T03:04:05Z",
)  # fmt: skip


def made_up_rows():
    """Two sweeps and a few shapes, as an H200 might give them."""
    rows = []
    for precision, factor in (("native", 0.8), ("int8", 1.15)):
        for sparsity in SWEEP_SPARSITIES:
            density = 1 - 0.95 * sparsity
            change = dict(sparsity=sparsity, density=density, precision=precision, speedup=factor / density)
            rows.append(replace(A_ROW, **change))
        for shape in token_sweep():
            reached = factor * 4.6 * shape.seq_len / (shape.seq_len + 9000)
            for contender, share in (("hopper call", 0.9), ("hopper graph", 1.0), ("hopper kernel", 1.1)):
                change = dict(shape=shape.name, tokens=shape.seq_len, density=0.2, contender=contender)
                rows.append(replace(A_ROW, **change, precision=precision, speedup=reached * share))
        for name in ("wan-720p", "flux-1024", "image-4096"):
            change = dict(shape=name, precision=precision, speedup=factor * SHAPES[name].seq_len ** 0.1)
            rows.append(replace(A_ROW, **change, sparsity=SHAPES[name].sparsity))
    return rows
