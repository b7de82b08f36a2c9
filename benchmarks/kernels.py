"""Every kernel that attends to given blocks, over the same random blocks of 128 x 128, in turns and in one process.

Ours in each precision, alone ("kernel": keys prepared beforehand) and as a call that is given the mask ("call"), beside
FlexAttention and FlashAttention-4 over the same blocks, and dense kernels. What is not installed is left out, and said.
Results are first checked against float64 on some rows, and wrong ones refused. Times are medians, of CUDA events on a
GPU; TFLOP/s are counted on the blocks that are kept.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rainfusion import BlockMask, backends, pipeline, sparse_attention
from rainfusion.bench import baselines, contest, timing
from rainfusion.bench.baselines import Baseline, Call, Setting, first_line
from rainfusion.bench.verification import QUANTISED_ERROR, verify
from rainfusion.cli.arguments import check_counts
from rainfusion.cli.arguments import device as checked_device
from rainfusion.layout import TokenLayout
from rainfusion.options import PRECISIONS
from rainfusion.planning import ask_flat, check, plan
from rainfusion.table import table

CASES = ("1x40x75600x128@0.2", "1x12x32760x128@0.2", "2x24x4096x128@0.4", "1x32x32640x64@0.2", "2x24x4608x128@0.4+512")
OURS = ("hopper", "triton")
HEADER = ("case", "what", "ms", "lower quartile", "TFLOP/s", "error")
Line = tuple[str, ...]  # of the table
_CHECKED_ROWS = 12  # blocks of rows that are computed again in float64
_SLACK = 3.0  # times what torch loses: kernels round in different places, and what is wrong is far more


class Case(NamedTuple):
    """One attention call: so many tokens, a share of the blocks, and text at the end that all see and that sees all."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    density: float
    text: int

    @classmethod
    def parse(cls, words: str) -> Case:
        """From words like 2x24x4608x128@0.4+512."""
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)@(\d*\.?\d+)(?:\+(\d+))?", words)
        if not found:
            raise argparse.ArgumentTypeError(
                f"{words!r} is no case: batch x heads x tokens x head dim @ density, as in {CASES[2]}, or with tokens "
                f"of text, as in {CASES[4]}"
            )
        batch, heads, tokens, head_dim = map(int, found.groups()[:4])
        case = cls(batch, heads, tokens, head_dim, float(found[5]), int(found[6] or 0))
        if min(case[:4]) < 1 or not 0 < case.density <= 1 or case.text > tokens:
            raise argparse.ArgumentTypeError(
                f"{words!r}: sizes must be at least 1, the density in (0, 1] and text at most all tokens"
            )
        return case

    def __str__(self) -> str:
        sizes = "x".join(map(str, self[:4]))
        return f"{sizes}@{self.density:g}" + (f"+{self.text}" if self.text else "")

    def mask(self, device: torch.device) -> BlockMask:
        """Random blocks, and all of those that hold text."""
        number = -(-self.tokens // 128)
        text = (self.tokens - self.text) // 128 if self.text else number  # its first block
        parts = []
        for _ in range(self.heads):  # one head at a time: packing takes several times the memory of the mask
            dense = torch.rand(self.batch, 1, number, number, device=device) < self.density
            dense[..., text:] = True
            dense[..., text:, :] = True
            parts.append(BlockMask.from_dense(dense))
        counts, indices = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("counts", "indices"))
        return BlockMask(counts, indices)

    def settings(self, device: torch.device, dtype: torch.dtype) -> list[Setting]:
        """The same call on different memory, as often as a cache would hold one."""
        torch.manual_seed(0)
        size = (self.batch, self.heads, self.tokens, self.head_dim)
        q, k, v = (torch.randn(size, device=device, dtype=dtype) for _ in range(3))
        mask, layout = self.mask(device), TokenLayout.build(self.tokens).to(device)
        copies = timing.copies_needed((q, k, v), timing.cache_bytes(device))
        others = [Setting(q.clone(), k.clone(), v.clone(), mask, layout) for _ in range(copies - 1)]
        return [Setting(q, k, v, mask, layout), *others]


class Contender(NamedTuple):
    """What is timed: a call for each setting, whose result is right."""

    name: str
    calls: list[Call]
    tflop: float  # of one call
    error: float  # relative, against float64


@dataclass
class Contest:
    """Those of a case that can run. Why the rest cannot is printed."""

    settings: list[Setting]
    found: list[Contender] = field(default_factory=list)
    broken: bool = False  # one of ours, which should have run

    def enter_ours(self, backend: str, precision: str) -> None:
        options: dict[str, Any] = dict(sparse_type="rf_v2", precision=precision, backend=backend)
        try:
            _requests(self.settings[:1], options)
        except ValueError as error:
            print(f"{backend} {precision}: {error}", flush=True)
            return
        for stage, calls in (("kernel", _kernels), ("call", _whole_calls)):
            name = f"{backend} {precision} {stage}"
            if not self._enter(name, partial(calls, self.settings, options), exact=precision == "native"):
                self.broken = True

    def enter(self, baseline: Baseline) -> None:
        reason = baseline.why_not(self.settings[0].q)
        if reason is None:
            prepare = partial(baseline.prepare, self.settings)
            self._enter(baseline.name, prepare, exact=baseline.exact, dense=baseline.dense)
        else:
            print(f"{baseline.name}: {reason}", flush=True)

    def _enter(self, name: str, prepare: Callable[[], list[Call]], *, exact: bool, dense: bool = False) -> bool:
        try:
            contender = self._checked(name, prepare(), exact, dense)
        except Exception as error:  # of another library, out of memory, or a wrong result: the others still run
            print(f"{name}: failed: {first_line(error)}", flush=True)
            return False
        self.found.append(contender)
        print(f"{name}: error {contender.error:.4f}", flush=True)
        return True

    def _checked(self, name: str, calls: list[Call], exact: bool, dense: bool) -> Contender:
        """Raises where the result is wrong, or where one of the calls fails."""
        q, k, v, mask, layout = self.settings[0]
        blocks, allowed = _every_block(q, k) if dense else mask, None if exact else QUANTISED_ERROR
        verdict = verify(q, k, v, calls[0](), blocks, layout, _CHECKED_ROWS, allowed=allowed, slack=_SLACK)
        if not verdict.right:
            raise ArithmeticError(f"the error is {verdict.error:.4f}, and may be {verdict.allowed:.4f}")
        timing.clock_for(q.device).milliseconds(calls)  # what fails on other memory fails here, and not in turns
        tflop = contest.dense_tflop(q, k) if dense else contest.kept_tflop(mask, q.shape[3])
        return Contender(name, calls, tflop, verdict.error)


def _requests(settings: Sequence[Setting], options: dict[str, Any]) -> list[backends.Request]:
    """Raises ValueError where the backend cannot run them."""
    mask = settings[0].mask
    inputs = [check(s.q, s.k, s.v, mask=mask, input_layout="BNSD") for s in settings]
    planned = plan(ask_flat(inputs[0], **options), inputs[0].shapes)
    return [pipeline.request_for(one, planned) for one in inputs]


def _kernels(settings: Sequence[Setting], options: dict[str, Any]) -> list[Call]:
    backend: Any = backends.get(options["backend"])

    def attend(request: backends.Request, keys: backends.Keys) -> Tensor:
        out: Tensor = backend.attend(request, keys, request.mask)[0]
        return out

    return [partial(attend, request, backend.prepare(request)) for request in _requests(settings, options)]


def _whole_calls(settings: Sequence[Setting], options: dict[str, Any]) -> list[Call]:
    return [partial(sparse_attention, s.q, s.k, s.v, mask=s.mask, **options) for s in settings]


def _every_block(q: Tensor, k: Tensor) -> BlockMask:
    """Whose heads share one list."""
    one = BlockMask.full(1, 1, q.shape[2], k.shape[2], device=q.device)
    return BlockMask(one.counts.expand(*q.shape[:2], -1), one.indices.expand(*q.shape[:2], -1, -1))


def compare(case: Case, device: torch.device, dtype: torch.dtype, args: argparse.Namespace) -> tuple[list[Line], bool]:
    """A line of the table for each contender, and whether one of ours is broken."""
    entered = Contest(case.settings(device, dtype))
    for backend, precision in itertools.product(args.backend, args.precision):
        entered.enter_ours(backend, precision)
    for baseline in (*baselines.DENSE, *baselines.SLOW_TO_COMPILE) if args.others else ():
        entered.enter(baseline)
    calls = [one.calls for one in entered.found]
    timings = timing.take_turns(calls, timing.clock_for(device), repeats=args.repeats, seconds=args.seconds)
    lines: list[Line] = [
        (str(case), one.name, f"{t.ms:.3f}", f"{t.low_ms:.3f}", f"{1000 * one.tflop / t.ms:.0f}", f"{one.error:.4f}")
        for one, t in zip(entered.found, timings, strict=True)
    ]
    return lines, entered.broken


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        check_counts(args, "repeats")
        if not args.seconds > 0:
            raise ValueError(f"--seconds must be above 0, got {args.seconds}")
        device = checked_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16  # Triton's interpreter has no products of bf16
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    lines: list[Line] = []
    broken = False
    with torch.inference_mode(), here:
        for case in args.cases:
            print(f"--- {case}", flush=True)
            try:
                found, wrong = compare(case, device, dtype, args)
            except Exception as error:  # out of memory, or an error that a kernel left behind: others have their lines
                print(f"{case}: failed: {first_line(error)}", flush=True)
                found, wrong = [], True
            lines += found
            broken |= wrong
            torch.cuda.empty_cache()
    if not lines:
        print("\nnothing could be timed", flush=True)
        return 1
    versions = ", ".join(f"{name} {version}" for name, version in contest.versions().items())
    name = str(dtype).removeprefix("torch.")
    print(f"\n{contest.device_name(device)}, {versions}, {name}, the same random blocks for all of a case")
    print(table(HEADER, lines), flush=True)
    return int(broken)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kernels.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python benchmarks/kernels.py                                            # five shapes, everything: minutes\n"
        "  python benchmarks/kernels.py 1x12x32760x128@0.2 --backend hopper --precision fp8 --no-others\n"
        "  TRITON_INTERPRET=1 python benchmarks/kernels.py 1x1x300x64@0.5 --device cpu --backend triton \\\n"
        "    --precision native --no-others --repeats 1                            # to see that it works",
    )
    parser.add_argument(
        "cases", nargs="*", type=Case.parse, default=[Case.parse(words) for words in CASES], metavar="CASE",
        help=f"batch x heads x tokens x head dim @ density, + tokens of text (default: {' '.join(CASES)})",
    )  # fmt: skip
    parser.add_argument("--backend", nargs="+", default=list(OURS), choices=OURS, help="of ours (default: both)")
    parser.add_argument(
        "--precision", nargs="+", default=list(PRECISIONS), choices=PRECISIONS, help="of ours (default: all)"
    )
    parser.add_argument("--no-others", dest="others", action="store_false", help="ours alone")
    parser.add_argument("--repeats", type=int, default=40, help="rounds, at most (default: 40)")
    parser.add_argument("--seconds", type=float, default=1.0, help="at most so long for each (default: 1)")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
