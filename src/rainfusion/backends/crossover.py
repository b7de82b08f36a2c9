"""When dense attention is faster, and by how much: a model of the two times, fitted to measurements.

    dense  = flops / DENSE_RATE + DENSE_START
    sparse = density * flops / sparse_rate + bytes around the kernel / bandwidth + launches

Short sequences have little to skip and the same launches to pay for. The numbers are an H200's, where the model is
within 25% of benchmarks/results (2k to 150k tokens, densities 0.15 to 0.8, calls replayed from a CUDA graph) but for
head dim 64, where both sides take longer than it says. On another GPU both sides shrink or grow together, which leaves
the verdict about where it is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from rainfusion.checks import Options
from rainfusion.prediction import budgets


class Speed(NamedTuple):
    """Of one backend, with precision="native"."""

    sparse_rate: float  # flops a second on kept blocks
    bandwidth: float  # bytes a second of the passes before the kernel
    launches: float  # seconds


DENSE_RATE = 650e12  # cuDNN, head dim 128
DENSE_START = 15e-6  # seconds
SPEEDS = {"hopper": Speed(660e12, 2.0e12, 25e-6), "triton": Speed(410e12, 2.0e12, 25e-6)}


def why_dense(runner: str, q: Tensor, k: Tensor, options: Options) -> str | None:
    """Why dense attention is faster for this call, in words; None where sparse is, or where nothing was measured."""
    if q.device.type != "cuda" or runner not in SPEEDS or options.precision != "native":
        return None
    density = expected_density(options, q.shape[2], k.shape[2])
    if density is None:
        return None
    dense, sparse = _times(runner, q, k, density, options)
    if sparse < dense:
        return None
    return (
        f"dense attention is expected to be faster: {1e6 * dense:.0f} us, against {1e6 * sparse:.0f} us with "
        f"{density:.0%} of the blocks of {q.shape[2]} x {k.shape[2]} tokens (an H200's times); longer sequences or "
        "more sparsity pay"
    )


def _times(runner: str, q: Tensor, k: Tensor, density: float, options: Options) -> tuple[float, float]:
    """Seconds, dense and sparse, on an H200."""
    speed = SPEEDS[runner]
    if options.compensate:  # each row also attends to the means of all blocks
        blocks = max(1, math.ceil(k.shape[2] / options.block_size))
        density += math.ceil(blocks / options.block_size) / blocks
    batch, heads, q_len, head_dim = q.shape
    flops = 4.0 * batch * heads * q_len * k.shape[2] * max(head_dim, 64)
    # pool q; read and write k and v; pool the parts of k
    of_k = 5 if options.strategy == "rf_v2" and options.parts > 1 else 4
    passes = (q.numel() + of_k * k.numel()) * q.element_size()
    dense = flops / DENSE_RATE + DENSE_START
    return dense, density * flops / speed.sparse_rate + passes / speed.bandwidth + speed.launches


def expected_density(options: Options, q_len: int, k_len: int) -> float | None:
    """The share of blocks that a prediction will keep, 0 to 1, without predicting; None where it depends on the data.

    ada_bsa keeps at most this many.
    """
    if options.strategy == "ada_bsa":
        return 1.0 - options.sparsity if options.sparsity > 0.0 else None
    if options.strategy != "rf_v2":
        return 1.0
    return None if options.target_error else budgets.density(options, q_len, k_len)
