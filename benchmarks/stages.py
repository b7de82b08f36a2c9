"""Times each stage of a call on a GPU: the passes over tokens, the choice of blocks, the attention kernel.

The kernel is timed on random block masks of a given density, as other libraries' kernels usually are, and the whole
call on random q, k and v. Medians of CUDA events; every stage is warmed up first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rainfusion import BlockMask, checks, sparse_attention
from rainfusion.backends import hopper, triton
from rainfusion.bench.shapes import SHAPES
from rainfusion.layout import cached_layout
from rainfusion.prediction import budgets

BACKENDS: dict[str, Any] = {"hopper": hopper, "triton": triton}


def main() -> None:
    args = _parser().parse_args()
    shape = SHAPES[args.shape]
    torch.manual_seed(0)
    size = (shape.batch, args.heads or shape.heads, shape.seq_len, shape.head_dim)
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    grid = list(shape.latent_shape) if shape.latent_shape else None
    call = dict(sparse_type="rf_v2", sparsity=shape.sparsity, latent_shape_q=grid, txt_len=shape.txt_len)
    print(f"{torch.cuda.get_device_name()}, {args.shape} {list(size)} bf16, torch {torch.__version__}", flush=True)
    with torch.inference_mode():
        _kernels(q, k, v, call, args)
        _around(q, k, v, call, args)
        _whole(q, k, v, call, args)


def _kernels(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], args: argparse.Namespace) -> None:
    """The attention kernel alone: TFLOP/s on the kept blocks."""
    mask = random_mask(q, k, args.density)
    kept = int(mask.counts.sum(dtype=torch.int64))
    flops = 4.0 * q.shape[3] * mask.block_size**2 * kept
    rows = triton.heavy_first(mask)
    layout = _layout(q, call)
    for backend, precision in ((name, p) for name in args.backend for p in args.precision):
        if precision not in BACKENDS[backend].PRECISIONS:
            continue
        keys = _prepare(backend, precision, k, v, layout)

        def attend(backend: str = backend, keys: Any = keys) -> None:
            BACKENDS[backend].attend_blocks(
                q, keys, mask, rows, layout, scale=q.shape[3] ** -0.5, is_causal=False, inner_precise=0,
                return_lse=False,
            )  # fmt: skip

        ms, best = median(attend, args.seconds)
        print(f"{backend} kernel, {precision}, {args.density:.0%} of the blocks: {ms:.3f} ms, "
              f"{flops / ms / 1e9:.0f} TFLOP/s (best {flops / best / 1e9:.0f})", flush=True)  # fmt: skip


def _around(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], args: argparse.Namespace) -> None:
    """What comes before the kernel."""
    layout = _layout(q, call)
    for precision in args.precision:
        ms, _ = median(lambda p=precision: _prepare("hopper", p, k, v, layout), args.seconds)  # type: ignore[misc]
        print(f"gather k and v, {precision}: {ms:.3f} ms", flush=True)
    ms, _ = median(lambda: triton.block_means(q, layout), args.seconds)
    print(f"pool q: {ms:.3f} ms", flush=True)
    options = checks.options(q, k, predicts=True, **call)
    keys = triton.prepare(k, v, layout, None, None, pool=1)
    numbers = budgets.numbers(options, q.shape[2], k.shape[2])
    both, _ = median(lambda: triton.choose_blocks(q, keys, None, layout, layout, None, options, numbers), args.seconds)
    print(f"scores, best blocks and lists: {both - ms:.3f} ms", flush=True)


def _whole(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], args: argparse.Namespace) -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        dense, _ = median(lambda: F.scaled_dot_product_attention(q, k, v), args.seconds)
    print(f"cuDNN, dense: {dense:.3f} ms", flush=True)
    for precision in args.precision:
        out, mask = sparse_attention(q, k, v, **call, precision=precision, return_mask=True)
        del out
        # return_mask: never dense instead
        ms, _ = median(
            lambda p=precision: sparse_attention(q, k, v, **call, precision=p, return_mask=True), args.seconds
        )  # type: ignore[misc]
        print(f"whole call, {precision}, sparsity {call['sparsity']}, density {mask.density():.3f}: {ms:.3f} ms, "
              f"{dense / ms:.2f}x", flush=True)  # fmt: skip


def random_mask(q: Tensor, k: Tensor, density: float) -> BlockMask:
    batch, heads = q.shape[:2]
    rows, columns = (-(-x.shape[2] // 128) for x in (q, k))
    parts = []
    for _ in range(heads):  # one head at a time: packing takes several times the memory of the mask
        parts.append(BlockMask.from_dense(torch.rand(batch, 1, rows, columns, device=q.device) < density))
    counts, indices = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("counts", "indices"))
    return BlockMask(counts, indices)


def median(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Milliseconds, median and best, of up to 30 runs in so many seconds, after two to warm up."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    start = time.monotonic()
    while len(times) < 30 and (len(times) < 3 or time.monotonic() - start < seconds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times), min(times)


def _layout(q: Tensor, call: dict[str, Any]) -> Any:
    spec = checks.layout_spec(q.shape[2], call["latent_shape_q"], call["txt_len"], None, "window", 128)
    return cached_layout(spec, q.device)


def _prepare(backend: str, precision: str, k: Tensor, v: Tensor, layout: Any) -> Any:
    extra = {} if precision == "native" else {"precision": precision}
    return BACKENDS[backend].prepare(k, v, layout, None, None, pool=1, **extra)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stages.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/stages.py wan-720p --density 0.2 --precision native int8 fp8",
    )
    parser.add_argument(
        "shape", nargs="?", default="wan-720p", choices=SHAPES, metavar="SHAPE", help="default: wan-720p"
    )
    parser.add_argument("--density", type=float, default=0.2, help="of the random masks (default: 0.2)")
    parser.add_argument("--precision", nargs="+", default=["native", "int8", "fp8"], help="default: native int8 fp8")
    parser.add_argument("--backend", nargs="+", default=["hopper", "triton"], choices=BACKENDS, help="default: both")
    parser.add_argument("--heads", type=int, help="instead of the shape's own")
    parser.add_argument("--seconds", type=float, default=2.0, help="at most so long for each stage (default: 2)")
    return parser


if __name__ == "__main__":
    main()
