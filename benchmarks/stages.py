"""Times each stage of a call on a GPU: the passes over tokens, the choice of blocks, the attention kernel.

The kernel is timed on random block masks of a given density, as other libraries' kernels usually are, and the whole
call on random q, k and v. Medians of CUDA events; every stage is warmed up first. --by-kernel shows instead what each
kernel of a whole call takes, by torch.profiler.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from rainfusion import BlockMask, backends, pipeline, sparse_attention
from rainfusion.backends import Request
from rainfusion.bench.shapes import SHAPES
from rainfusion.options import RECOMMENDED
from rainfusion.planning import planned

BACKENDS = ("hopper", "triton")
_PROFILED = 8  # calls


def main() -> None:
    args = _parser().parse_args()
    shape = SHAPES[args.shape]
    torch.manual_seed(0)
    size = (shape.batch, args.heads or shape.heads, shape.seq_len, shape.head_dim)
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    grid = list(shape.latent_shape) if shape.latent_shape else None
    call: dict[str, Any] = dict(
        sparse_type="rf_v2", sparsity=shape.sparsity if args.sparsity is None else args.sparsity
    )
    call.update(latent_shape_q=grid, txt_len=shape.txt_len, **(RECOMMENDED if args.recommended else {}))
    if args.keys != 128:
        call.update(block_size=(128, args.keys))
    print(f"{torch.cuda.get_device_name()}, {args.shape} {list(size)} bf16, torch {torch.__version__}", flush=True)
    with torch.inference_mode():
        if args.by_kernel:
            _by_kernel(q, k, v, call, args)
            return
        _kernels(q, k, v, call, args)
        _around(q, k, v, call, args)
        _whole(q, k, v, call, args)


def _kernels(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], args: argparse.Namespace) -> None:
    """The attention kernel alone: TFLOP/s on the kept blocks."""
    mask = random_mask(q, k, args.density, args.keys)
    kept = int(mask.counts.sum(dtype=torch.int64))
    flops = 4.0 * q.shape[3] * mask.q_block * mask.k_block * kept
    for name, precision in ((name, p) for name in args.backend for p in args.precision):
        backend: Any = backends.get(name)
        if precision not in backend.PRECISIONS:
            continue
        request = _request(q, k, v, call, precision, name)
        keys = backend.prepare(request)
        ms, best = median(partial(backend.attend, request, keys, mask), args.seconds)
        print(
            f"{name} kernel, {precision}, {args.density:.0%} of the blocks, {args.keys} keys each: {ms:.3f} ms, "
            f"{flops / ms / 1e9:.0f} TFLOP/s (best {flops / best / 1e9:.0f})",
            flush=True,
        )


def _around(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], args: argparse.Namespace) -> None:
    """What comes before the kernel."""
    hopper, triton = backends.get("hopper"), backends.get("triton")
    for precision in args.precision:
        ms, _ = median(partial(hopper.prepare, _request(q, k, v, call, precision, "hopper")), args.seconds)
        print(f"gather k and v, {precision}: {ms:.3f} ms", flush=True)
    request = _request(q, k, v, call, "native", "triton")
    keys = triton.prepare(request)
    ms, _ = median(partial(triton.scores, request, keys), args.seconds)
    print(f"pool q and score: {ms:.3f} ms", flush=True)
    both, _ = median(partial(pipeline.predict, request, triton, keys), args.seconds)
    print(f"best blocks and lists: {both - ms:.3f} ms", flush=True)


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
        host = host_time(partial(sparse_attention, q, k, v, **call, precision=precision, return_mask=True))
        print(
            f"whole call, {precision}, sparsity {call['sparsity']}, density {mask.density():.3f}: {ms:.3f} ms, "
            f"{dense / ms:.2f}x; host {host:.3f} ms",
            flush=True,
        )


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], args: argparse.Namespace) -> None:
    """Milliseconds of each kernel of a whole call, and of all but attention."""
    for precision in args.precision:
        run = partial(sparse_attention, q, k, v, **call, precision=precision, return_mask=True)
        for _ in range(4):
            run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(_PROFILED):
                run()
            torch.cuda.synchronize()
        times = kernel_times(profiled.events())
        total, attention = sum(times.values()), sum(ms for name, ms in times.items() if "attention_kernel" in name)
        each = ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(times.items(), key=lambda item: -item[1]))
        print(
            f"whole call, {precision}, sparsity {call['sparsity']}: {total:.3f} ms, of which {total - attention:.3f} "
            f"({(total - attention) / total:.1%}) around attention: {each}",
            flush=True,
        )


def kernel_times(events: Any) -> dict[str, float]:
    """Milliseconds of a call, by the names of kernels, from the events of a profile of `_PROFILED` calls."""
    times: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if event.device_type == DeviceType.CUDA:
            times[event.name.partition("<")[0]] += event.device_time / 1000 / _PROFILED
    return dict(times)


def random_mask(q: Tensor, k: Tensor, density: float, keys: int = 128) -> BlockMask:
    batch, heads = q.shape[:2]
    rows, columns = -(-q.shape[2] // 128), -(-k.shape[2] // keys)
    block_size = 128 if keys == 128 else (128, keys)
    parts = []
    for _ in range(heads):  # one head at a time: packing takes several times the memory of the mask
        dense = torch.rand(batch, 1, rows, columns, device=q.device) < density
        parts.append(BlockMask.from_dense(dense, block_size))
    counts, indices = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("counts", "indices"))
    return BlockMask(counts, indices, block_size)


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


def host_time(call: Callable[[], object]) -> float:
    """Milliseconds until the call returns, while the device still works: the median of 20 after 3 to warm up."""
    times: list[float] = []
    for _ in range(23):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def _request(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], precision: str, backend: str) -> Request:
    return pipeline.request_for(*planned(q, k, v, **call, precision=precision, backend=backend))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stages.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python benchmarks/stages.py wan-720p --density 0.2 --precision native int8 fp8\n"
        "  python benchmarks/stages.py wan-720p --recommended --precision native --keys 32\n"
        "  python benchmarks/stages.py wan-720p --recommended --sparsity 0.85 --by-kernel",
    )
    parser.add_argument(
        "shape", nargs="?", default="wan-720p", choices=SHAPES, metavar="SHAPE", help="default: wan-720p"
    )
    parser.add_argument("--density", type=float, default=0.2, help="of the random masks (default: 0.2)")
    parser.add_argument("--precision", nargs="+", default=["native", "int8", "fp8"], help="default: native int8 fp8")
    parser.add_argument("--backend", nargs="+", default=["hopper", "triton"], choices=BACKENDS, help="default: both")
    parser.add_argument("--recommended", action="store_true", help="with the options that `enable` has")
    parser.add_argument("--keys", type=int, default=128, choices=(128, 64, 32), help="of a block (default: 128)")
    parser.add_argument("--heads", type=int, help="instead of the shape's own")
    parser.add_argument("--sparsity", type=float, help="of whole calls (default: the shape's own)")
    parser.add_argument("--by-kernel", action="store_true", help="what each kernel of a whole call takes, and no more")
    parser.add_argument("--seconds", type=float, default=2.0, help="at most so long for each stage (default: 2)")
    return parser


if __name__ == "__main__":
    main()
