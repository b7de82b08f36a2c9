"""Measures tile sizes of the portable Triton kernel on the GPU at hand, for the table in rainfusion/kernels/tuning.py.

Every candidate runs in a process of its own with a time limit, since some compile for minutes or never end. Several
compile at once; one at a time is measured.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from rainfusion.backends.triton.kernels.tuning import Tile, attention_tile
from rainfusion.table import table

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # fp16 has bf16's sizes
HEAD_DIMS = (64, 128, 256)
QUERIES, KEYS, WARPS, STAGES = (64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)
GRID = (1, 128, 128)


class Trial(NamedTuple):
    head_dim: int
    dtype: str
    tile: Tile
    ms: float | None
    problem: str = ""


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.measure:
        tile = Tile(*args.measure, described=args.descriptors)
        print(json.dumps(measure(args.head_dim[0], args.dtype[0], tile, args)), flush=True)
        return 0
    if not torch.cuda.is_available():
        print("tune.py needs a CUDA or ROCm device", file=sys.stderr)
        return 2
    capability: Any = "hip" if torch.version.hip else torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, capability {capability}, torch {torch.__version__}", flush=True)
    jobs = [
        (head_dim, dtype, Tile(*sizes, described=args.descriptors))
        for head_dim, dtype in product(args.head_dim, args.dtype)
        for sizes in product(args.queries, args.keys, args.warps, args.stages)
    ]
    trials = try_all(jobs, args)
    print(report(trials, capability), flush=True)
    return 0 if any(trial.ms is not None for trial in trials) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tune.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python benchmarks/tune.py                                    # all head dims and dtypes: minutes\n"
        "  python benchmarks/tune.py --head-dim 128 --dtype bf16 --keys 32 64 --jobs 4",
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS), help="default: 64 128 256")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES, help="default: bf16 fp32")
    parser.add_argument("--queries", type=int, nargs="+", default=list(QUERIES), help="of a program (default: 64 128)")
    parser.add_argument("--keys", type=int, nargs="+", default=list(KEYS), help="at a time (default: 16 32 64 128)")
    parser.add_argument("--warps", type=int, nargs="+", default=list(WARPS), help="default: 4 8")
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES), help="default: 1 2 3 4")
    parser.add_argument("--descriptors", action="store_true", help="keys by tensor descriptors: Hopper, Blackwell")
    parser.add_argument("--heads", type=int, default=12, help="of the call that is timed (default: 12)")
    parser.add_argument("--sparsity", type=float, default=0.8, help="of it; it has 16384 tokens (default: 0.8)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile at once (default: 8)")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for a candidate (default: 90)")
    parser.add_argument("--measure", type=int, nargs=4, help=argparse.SUPPRESS)  # one candidate, in its own process
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    return parser


def try_all(jobs: list[tuple[int, str, Tile]], args: argparse.Namespace) -> list[Trial]:
    trials = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        lock = Path(folder) / "gpu"
        futures = [pool.submit(try_one, *job, args, lock) for job in jobs]
        for future in tqdm(as_completed(futures), total=len(jobs), desc="tune", unit="tile", file=sys.stderr):
            trials.append(future.result())
    return trials


def try_one(head_dim: int, dtype: str, tile: Tile, args: argparse.Namespace, lock: Path) -> Trial:
    command = [
        sys.executable, __file__, "--measure", *map(str, tile[:4]), "--head-dim", str(head_dim), "--dtype", dtype,
        "--heads", str(args.heads), "--sparsity", str(args.sparsity), "--lock", str(lock),
        *(["--descriptors"] if tile.described else []),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired:
        return Trial(head_dim, dtype, tile, None, f"took more than {args.limit:g} s")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Trial(head_dim, dtype, tile, None, said[-1][:90])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Trial(head_dim, dtype, tile, found["ms"] if found["right"] else None, "" if found["right"] else "WRONG")


@torch.inference_mode()
def measure(head_dim: int, dtype: str, tile: Tile, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the attention kernel with this tile, and whether its result is right."""
    import rainfusion
    from rainfusion.backends.triton.kernels import tuning
    from rainfusion.bench import timing
    from rainfusion.bench.contest import kernel_alone
    from rainfusion.bench.verification import verify
    from rainfusion.planning import planned

    tuning.attention_tile = lambda *_: tile
    device = torch.device("cuda")
    tokens = GRID[0] * GRID[1] * GRID[2]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, args.heads, tokens, head_dim, device=device, dtype=DTYPES[dtype]) for _ in range(3))
    call_arguments = dict(sparse_type="rf_v2", sparsity=args.sparsity, latent_shape_q=GRID, latent_shape_k=GRID)
    inputs, plan = planned(q, k, v, backend="triton", **call_arguments)
    call = kernel_alone(inputs, plan)
    out = call()  # compiles
    torch.cuda.synchronize()
    with _alone(args.lock):
        mask = rainfusion.predict_mask(q, k, backend="triton", **call_arguments)
        verdict = verify(q, k, v, out, mask, plan.layouts[0], slack=3.0)
        (result,) = timing.take_turns([[call]], timing.clock_for(device), repeats=50, seconds=0.4)
    return dict(ms=result.ms, right=verdict.right, error=verdict.error)


@contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    """Others wait until this process has measured."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def report(trials: list[Trial], capability: tuple[int, int] | str) -> str:
    """For each head dim and dtype the best few and what the table has now, then the lines to put there."""
    parts, lines = [], []
    for head_dim, dtype in sorted({(trial.head_dim, trial.dtype) for trial in trials}, key=lambda x: (x[1], x[0])):
        group = [trial for trial in trials if (trial.head_dim, trial.dtype) == (head_dim, dtype)]
        ran = sorted((trial for trial in group if trial.ms is not None), key=lambda trial: trial.ms or 0.0)
        itemsize = DTYPES[dtype].itemsize
        described = group[0].tile.described
        now = attention_tile(capability, head_dim, itemsize, 128 if described else 0)
        rows = [
            (str(trial.tile[:4]), f"{trial.ms:.3f}", "now" if trial.tile == now else "")
            for number, trial in enumerate(ran)
            if number < 5 or trial.tile == now
        ]
        failed = [trial for trial in group if trial.ms is None]
        rows += [(str(trial.tile[:4]), "-", trial.problem) for trial in failed]
        parts.append(f"\nhead dim {head_dim}, {dtype}: {len(ran)} of {len(group)} ran")
        parts.append(table(("queries, keys, warps, stages", "ms", ""), rows))
        if ran:
            where = f"{head_dim}, {itemsize}"
            if capability != "hip" and not described:
                where = f"{capability}, {where}"
            sizes = ", ".join(map(str, ran[0].tile[:4])) + (", described=True" if described else "")
            lines.append(f"    ({where}, Tile({sizes})),")
    name = "_HIP_TILES" if capability == "hip" else "_DESCRIBED" if trials[0].tile.described else "_TILES"
    return "\n".join([*parts, f"\nfor {name} in rainfusion/backends/triton/kernels/tuning.py:", *lines])


if __name__ == "__main__":
    sys.exit(main())
