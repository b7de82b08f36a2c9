"""When dense attention is faster, and by how much: a model of the two times, fitted to measurements.

    dense  = flops / dense_rate + dense_start
    sparse = density * flops / sparse_rate + bytes around the kernel / bandwidth + start

Short sequences have little to skip and the same launches to pay for. Where kernels are that short a GPU waits for its
host, with any attention: a sparse call has to save more time on the device than the host needs to launch it (an image
of 1024x1024, one at a time, does not). The numbers stand beside each backend (`SPEEDS`).
Those for CUDA are an H200's, where the model is within 25% of benchmarks/results (2k to 150k tokens, densities 0.15 to
0.8, calls replayed from a CUDA graph) but for head dim 64, where both sides take longer than it says; those for a CPU
are two cores'. On another machine both sides shrink or grow together, which leaves the verdict about where it is.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rainfusion import replaying
from rainfusion.backends.protocol import Backend, Speed
from rainfusion.calls import Shapes
from rainfusion.geometry import LayoutSpec
from rainfusion.options import Method
from rainfusion.prediction import budgets

_START_OF_KERNEL = 17e-6  # seconds of a small kernel between others, of an H200
_USUAL_DENSITY = 0.25  # where the data decides
_SLACK = 1.15  # where the two are about as fast, dense attention is exact


def why_dense(backend: Backend, method: Method, shapes: Shapes, specs: tuple[LayoutSpec, LayoutSpec]) -> str | None:
    """Why dense attention is faster for this call, in words; None where sparse is, or where nothing was measured."""
    density = expected_density(method, shapes, specs)
    if density is None or shapes.is_empty:
        return None
    if density >= 1.0:
        return f"nothing can be skipped: a row keeps all of its {math.ceil(shapes.k_len / method.k_block)} key blocks"
    speed = backend.SPEEDS.get(shapes.device.type, {}).get(method.precision)
    if speed is None:
        return None
    dense, sparse = times(speed, method, shapes, density)
    launching = _host_time(speed, method, shapes)
    if dense - sparse < launching:
        return (
            f"dense attention is expected to be faster: it takes {1e6 * dense:.0f} us on an H200, a sparse call "
            f"{1e6 * sparse:.0f} us, and launching that takes the host about {1e6 * launching:.0f} us; longer "
            "sequences or larger batches pay"
        )
    if _SLACK * sparse < dense:
        return None
    machine = "an H200's" if shapes.device.type == "cuda" else "two cores'"
    verdict = "faster" if dense <= sparse else "about as fast, and exact"
    return (
        f"dense attention is expected to be {verdict}: {1e6 * dense:.0f} us, against {1e6 * sparse:.0f} us with "
        f"{density:.0%} of the blocks of {shapes.q_len} x {shapes.k_len} tokens ({machine} times); longer sequences or "
        "more sparsity pay"
    )


def why_native(backend: Backend, method: Method, shapes: Shapes, specs: tuple[LayoutSpec, LayoutSpec]) -> str | None:
    """Why this call would be faster in native precision, in words; None where it would not, or nothing was measured."""
    speeds = backend.SPEEDS.get(shapes.device.type, {})
    density = expected_density(method, shapes, specs)
    if method.precision == "native" or not speeds.keys() >= {"native", method.precision} or shapes.is_empty:
        return None
    density = _USUAL_DENSITY if density is None else density
    native, quantised = (
        times(speeds[precision], replace(method, precision=precision), shapes, density)[1]
        for precision in ("native", method.precision)
    )
    if quantised < native:
        return None
    return (
        f"precision='native' is expected to be faster: {1e6 * native:.0f} us, against {1e6 * quantised:.0f} us in "
        f"{method.precision}, of which quantising takes more than its products save (an H200's times)"
    )


def _host_time(speed: Speed, method: Method, shapes: Shapes) -> float:
    if speed.host_again and replaying.could_repeat(method, shapes):
        return speed.host_again
    options = (method.strategy == "rf_v2" and method.q_parts > 1, method.compensate, shapes.has_key_mask)
    return speed.host + sum(options) * speed.host_of_option


def times(speed: Speed, method: Method, shapes: Shapes, density: float) -> tuple[float, float]:
    """Seconds, dense and sparse."""
    if method.compensate:  # each row also attends to the means of all blocks
        blocks = max(1, math.ceil(shapes.k_len / method.k_block))
        density += math.ceil(blocks / method.k_block) / blocks
    batch, heads, q_len, head_dim = shapes.q
    flops = 4.0 * batch * heads * q_len * shapes.k_len * max(head_dim, 64)
    # pool q; read and write k and v; pool the parts of k; read k and v once more to quantise them
    of_k = 4 + (method.strategy == "rf_v2" and method.q_parts > 1) + 2 * (method.precision != "native")
    passes = (math.prod(shapes.q) + of_k * math.prod(shapes.k)) * shapes.dtype.itemsize
    dense = flops / speed.dense_rate + speed.dense_start
    kernels = (method.strategy == "rf_v2" and method.q_parts > 1) + method.compensate  # beside those of any call
    start = speed.start + kernels * _START_OF_KERNEL * (shapes.device.type == "cuda")
    return dense, density * flops / speed.sparse_rate + passes / speed.bandwidth + start


def expected_density(method: Method, shapes: Shapes, specs: tuple[LayoutSpec, LayoutSpec]) -> float | None:
    """The share of blocks that a prediction will keep, 0 to 1, without predicting; None where it depends on the data.

    ada_bsa keeps at most this many.
    """
    if method.strategy == "dense" or shapes.k_len <= method.k_block:
        return 1.0
    if method.strategy == "ada_bsa":
        return 1.0 - method.mean_sparsity if method.mean_sparsity > 0.0 else None
    if method.target_error is not None:
        return None
    return budgets.density(method, *specs)
