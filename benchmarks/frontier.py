"""The frontier: how near sparse samples come to dense ones, over how long attention takes.

--time  times whole calls of `sparse_attention` on one shape, every method at every density, in random turns with dense
        attention, and writes the times into a JSON file.
--plot  joins those times with the samples that `rainfusion quality` compared, by method and density, and draws PSNR
        and SSIM over milliseconds. Measures nothing, and runs on any machine.

What has no partner on the other side is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rainfusion import BlockMask, checks, sparse_attention
from rainfusion.backends import NAMES as BACKENDS
from rainfusion.bench import baselines, timing
from rainfusion.bench.contest import device_name, versions
from rainfusion.bench.inputs import attention_inputs
from rainfusion.bench.shapes import SHAPES, Shape
from rainfusion.bench.verification import QUANTISED_ERROR, verify
from rainfusion.cli import arguments, outputs
from rainfusion.lab import comparison, methods
from rainfusion.lab.comparison import Comparison, Row
from rainfusion.lab.methods import Candidate
from rainfusion.lab.model import Place
from rainfusion.lab.quality import find_amount
from rainfusion.options import PRECISIONS
from rainfusion.planning import planned
from rainfusion.progress import Progress
from rainfusion.schedules import Schedule
from rainfusion.table import table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TIMES = RESULTS / "frontier.json"
PICTURE = ROOT / "docs" / "images" / "frontier.png"
SHAPE = SHAPES["wan-720p"]
DENSITIES = (0.1, 0.2, 0.3)

OURS, PUBLISHED = "ours", "published"


class Curve(NamedTuple):
    """A method to time and to draw. The lab's list has its options, and its results have the same name."""

    name: str
    label: str  # at the end of the curve
    mark: str = ""

    @property
    def method(self) -> Candidate:
        """The method with its options."""
        return next(method for method in methods.METHODS if method.name == self.name)

    @property
    def timed(self) -> Candidate:
        """What is timed: a schedule shares out the same blocks, and time grows evenly with them."""
        return replace(self.method, schedule=Schedule())


_SUBMEANS = "rf_v2 2x8x8 free submeans compensate"
_SPREAD = "rf_v2 2x8x8 free spread compensate"
CURVES = (
    Curve(f"{_SPREAD}, 32 keys, falling", "the defaults of enable", OURS),
    Curve(f"{_SPREAD}, 32 keys", "constant density"),
    Curve(f"{_SPREAD}, 64 keys", "constant, 64 keys"),
    Curve(_SPREAD, "constant, 128 keys"),
    Curve(f"{_SUBMEANS}, falling", "128 keys, by submeans"),
    Curve(_SUBMEANS, "constant, 128 keys, by submeans"),
    Curve("rf_v2 2x8x8 free submeans", "... no compensation"),
    Curve("rf_v2 2x8x8", "rf_v2 as published", PUBLISHED),
    Curve("ada_bsa by cap", "ada_bsa, as many blocks a row"),
    Curve("ada_bsa by cdf", "ada_bsa, by predicted mass"),
)


@dataclass(frozen=True)
class Time:
    """A method at a density in a precision: milliseconds of a whole call. Dense attention has no target."""

    method: str
    signature: str  # what was timed
    precision: str
    target: float | None  # the density asked for
    density: float  # the density that the call had
    ms: float
    low_ms: float
    high_ms: float
    rounds: int
    right: bool  # whether a few rows, computed again in float64, agree


@dataclass(frozen=True)
class Times:
    """What `--time` wrote: the call, the machine, and a time for each method, density and precision."""

    settings: dict[str, Any]
    rows: list[Time]


# ---------------------------------------------------------------------------------------------------------------------
# times


class Contender(NamedTuple):
    """Something to time: what will be its row but for the time, and its calls, the same on different memory."""

    row: Time
    calls: list[timing.Call]


@torch.inference_mode()
def measure(
    curves: Sequence[Curve],
    shape: Shape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    densities: Sequence[float] = DENSITIES,
    precisions: Sequence[str] = ("native", "fp8"),
    backend: str = "auto",
    repeats: int = 50,
    seconds: float = 2.0,
    say: Callable[[str], None] = print,
) -> Times:
    """Checks the result of every call, then times all of them in turn; says what is left out, and why."""
    first = attention_inputs(shape, batch=shape.batch, heads=shape.heads, dtype=dtype, device=device)
    copies = timing.copies_needed(first, timing.cache_bytes(device))
    sets = [first, *(tuple(x.clone() for x in first) for _ in range(copies - 1))]
    contenders, refused = _dense(sets, say), dict[str, None]()
    different = {curve.timed.signature: curve for curve in curves}  # a schedule takes as long as none
    place = Place(0, 0, shape.latent_shape, shape.txt_len)
    jobs = [(curve.timed, precision) for curve in different.values() for precision in precisions]
    with Progress("frontier", len(jobs), "method") as progress:
        for method, precision in jobs:
            progress.note(f"{method.name} in {precision}: check")
            try:
                _, plan = planned(*first, **method.arguments(place, 0.5), precision=precision, backend=backend)
            except ValueError as error:  # often the same for all methods
                refused[f"left out: {precision}: {error}"] = None
            else:
                contenders += _ours(method, sets, place, precision, densities, plan.backend, progress.say)
            progress.advance()
        for reason in refused:
            progress.say(reason)
        progress.note("timing")
        found = timing.take_turns(
            [contender.calls for contender in contenders],
            timing.clock_for(device),
            repeats=repeats,
            seconds=seconds,
            tell=progress.note,
        )
    rows = [
        replace(contender.row, ms=time.ms, low_ms=time.low_ms, high_ms=time.high_ms, rounds=time.rounds)
        for contender, time in zip(contenders, found, strict=True)
    ]
    settings = dict(
        device=device_name(device),
        shape=shape.name,
        batch=shape.batch,
        heads=shape.heads,
        tokens=shape.seq_len,
        head_dim=shape.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        **versions(),
    )
    return Times(settings, rows)


def _dense(sets: Sequence[tuple[Tensor, ...]], say: Callable[[str], None]) -> list[Contender]:
    """The dense kernels that run here in the tensors' own precision."""
    q, k, _ = sets[0]
    mask = BlockMask.full(1, 1, q.shape[2], k.shape[2], device=q.device)
    layout: Any = None  # dense attention has no order of its own
    found = []
    for kernel in baselines.DENSE:
        if not kernel.exact:
            continue
        reason = kernel.why_not(q)
        if reason is None:
            row = Time(kernel.name, "dense", "native", None, 1.0, 0.0, 0.0, 0.0, 0, True)
            found.append(Contender(row, kernel.prepare([baselines.Setting(*qkv, mask, layout) for qkv in sets])))
        elif q.device.type == "cuda":
            say(f"left out: {kernel.name}: {reason}")
    return found


def _ours(
    method: Candidate,
    sets: Sequence[tuple[Tensor, ...]],
    place: Place,
    precision: str,
    densities: Sequence[float],
    backend: str,
    say: Callable[[str], None],
) -> list[Contender]:
    """A method in a precision, at every density that it can have."""
    qkv, found = sets[0], []
    for target in densities:
        amount = _amount(method, qkv, place, target, backend)
        if amount is None:
            say(f"left out: {method.name} in {precision}: a density of {target:g} is out of its reach")
            continue
        options = {**method.arguments(place, amount), "precision": precision, "backend": backend}
        out, mask = sparse_attention(*qkv, **options, return_mask=True)
        verdict = verify(
            *qkv,
            out,
            mask,
            planned(*qkv, **options)[1].layouts[0],
            allowed=None if precision == "native" else QUANTISED_ERROR,
            compensate=options.get("compensate", False),
            spreads=options.get("predictor") == "spread",
        )
        if not verdict.right:
            say(f"WRONG: {method.name} in {precision} at {target:g}: error {verdict.error:.1e}")
        row = Time(
            method.name, method.signature, precision, target, mask.density(), 0.0, 0.0, 0.0, 0, verdict.right
        )  # fmt: skip
        found.append(Contender(row, [partial(sparse_attention, *tensors, **options) for tensors in sets]))
    return found


def _amount(method: Candidate, qkv: Sequence[Tensor], place: Place, target: float, backend: str) -> float | None:
    """The setting that gives a density, as `rainfusion quality` finds it; None where there is none."""

    @cache
    def density(amount: float) -> float:
        return method.predict(*qkv, place, amount, backend, guided=False).density()

    return find_amount(density, target, 1 / method.layout(place, torch.device("cpu")).num_blocks)


def write(times: Times, path: Path) -> None:
    """As JSON. Whoever reads it meanwhile finds the old file or the new one."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(asdict(times), indent=1, allow_nan=False) + "\n")
    os.replace(fresh, path)


def read(path: Path) -> Times:
    """What `write` has left. ValueError says so where it is another file, or none."""
    try:
        content = json.loads(path.read_text())
        return Times(content["settings"], [Time(**row) for row in content["rows"]])
    except FileNotFoundError:
        raise ValueError(
            f"--out must name the times to draw, and there is no {path}: measure them first, with --time"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a file of frontier.py --time, with settings and rows: {error}") from error


def report(times: Times) -> str:
    """All times as a table of plain text."""
    rows = [
        (
            time.method,
            time.precision,
            "-" if time.target is None else f"{time.target:g}",
            f"{time.density:.3f}",
            f"{time.ms:.2f} ms" if time.right else "WRONG",
            f"{time.low_ms:.2f} to {time.high_ms:.2f}",
            str(time.rounds),
        )
        for time in times.rows
    ]
    return table(("method", "precision", "at", "density", "median", "quartiles", "rounds"), rows)


# ---------------------------------------------------------------------------------------------------------------------
# the join


class Point(NamedTuple):
    """A method at a density: its time, and the samples that were compared."""

    time: Time
    row: Row


class Line(NamedTuple):
    """The points of a method in a precision, in the order of their density."""

    curve: Curve
    precision: str
    points: list[Point]
    own_precision: bool  # whether the samples were made in this precision, too


def read_results(paths: Sequence[Path]) -> Comparison:
    """The rows of several files of `rainfusion quality`, whose settings must agree; the first file's rows go before."""
    found = comparison.read(paths[0])
    for path in paths[1:]:
        more = comparison.read(path)
        for name, value in found.settings.items():
            if more.settings.get(name) != value:
                raise ValueError(
                    f"--results must be of the same settings to stand side by side: {name} is {value!r} in {paths[0]} "
                    f"and {more.settings.get(name)!r} in {path}"
                )
        found.rows += [row for row in more.rows if found.find(row.key) is None]
    return found


def join(times: Times, results: Comparison, curves: Sequence[Curve] = CURVES) -> tuple[list[Line], list[str]]:
    """The lines to draw, and what was left out, in words. Partners have the same options and the same density."""
    rows = {(row.method, row.signature, row.target): row for row in results.rows if _is_drawn(row)}
    lines, remarks, used = [], [], set()
    for precision in dict.fromkeys(time.precision for time in times.rows if time.target is not None):
        for curve in curves:
            own = {
                time.target: time
                for time in times.rows
                if (time.signature, time.precision) == (curve.timed.signature, precision) and time.target is not None
            }
            wrong = [target for target, time in own.items() if not time.right]
            remarks += [f"{curve.name} in {precision} at {_list(wrong)}: its result was wrong"] if wrong else []
            right = {target: time for target, time in own.items() if time.right}
            keys, is_own = _keys(curve.method, precision, rows)
            partners = {target: rows.get((*keys, target)) for target in right}
            used.update((*keys, target) for target, row in partners.items() if row is not None)
            points = [Point(right[target], row) for target, row in partners.items() if row is not None]
            missing = [target for target, row in partners.items() if row is None]
            if missing:
                remarks.append(f"{curve.name} in {precision} at {_list(missing)}: timed, but without samples")
            if points:
                lines.append(Line(curve, precision, sorted(points, key=lambda point: point.time.density), is_own))
    targets = {time.target for time in times.rows if time.target is not None}
    names = dict.fromkeys(key[0] for key in rows if key not in used and key[2] in targets)
    if names:
        remarks.append(f"samples without a time: {'; '.join(names)}")
    return lines, remarks


def _is_drawn(row: Row) -> bool:
    """Whether a row has what is drawn: a density that was asked for, and both metrics."""
    whole = row.target is not None and row.error is None
    return whole and all(comparison.mean_and_error(getattr(row, name)) is not None for name in METRICS)


def _keys(method: Candidate, precision: str, rows: dict[Any, Row]) -> tuple[tuple[str, str], bool]:
    """Name and signature of a method's samples: those of the same precision, or else those of the tensors' own."""
    own = method.in_precision(precision)
    if any(key[:2] == (own.name, own.signature) for key in rows):
        return (own.name, own.signature), True
    return (method.name, method.signature), own is method


def _list(targets: Sequence[float]) -> str:
    return ", ".join(f"{target:.0%}" for target in targets)


# ---------------------------------------------------------------------------------------------------------------------
# the picture

METRICS = {"psnr": "PSNR against dense samples, dB", "ssim": "SSIM against dense samples"}
_INK, _PALE = "#333333", "#dddddd"
_COLOURS = ("#2e8b57", "#8e5ea2", "#c77d00", "#5b6770", "#3a9bb2", "#a05a2c", "#7a8b2a", "#b0579b", "#6c6cbf")
_MARKED = {
    OURS: dict(color="#1764ab", linewidth=2.6, marker="*", markersize=11, zorder=5),
    PUBLISHED: dict(color="#d1495b", linewidth=2.2, marker="s", markersize=6, zorder=4),
}
_LEAST_GAP = 0.047  # of two labels, as a share of the axis' height
_ROOM = 0.6  # for labels, as a share of what the curves take


def figure(times: Times, results: Comparison, lines: Sequence[Line]) -> Any:
    """PSNR and SSIM over milliseconds of a call, a column for each precision."""
    from matplotlib.figure import Figure

    if not lines:
        raise ValueError("there is nothing to draw: no method has both a time and samples at the same density")
    precisions = list(dict.fromkeys(line.precision for line in lines))
    looks = _looks([line.curve for line in lines])
    picture = Figure(figsize=(9.2 * len(precisions), 9.6), layout="constrained", dpi=110)
    axes = picture.subplots(len(METRICS), len(precisions), squeeze=False)
    for row, metric in zip(axes, METRICS, strict=True):
        for axis, precision in zip(row, precisions, strict=True):
            own = [line for line in lines if line.precision == precision]
            _draw(axis, own, metric, looks, _best_dense(times))
            axis.set_title(_column(own, times), fontsize=10, color=_INK, loc="left")
    picture.suptitle(_title(times, results), fontsize=10, color=_INK, x=0.01, ha="left")
    return picture


def _looks(curves: Sequence[Curve]) -> dict[str, dict[str, Any]]:
    """How each curve is drawn, by its name: the same in all panels."""
    others = list(dict.fromkeys(curve.name for curve in curves if not curve.mark))
    plain = {
        name: dict(color=_COLOURS[number % len(_COLOURS)], linewidth=1.3, marker="o", markersize=4, zorder=3)
        for number, name in enumerate(others)
    }
    return {**plain, **{curve.name: _MARKED[curve.mark] for curve in curves if curve.mark}}


def _draw(axis: Any, lines: Sequence[Line], metric: str, looks: dict[str, Any], dense: Time | None) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ends = []
    for line in lines:
        look = looks[line.curve.name]
        values = [comparison.mean_and_error(getattr(point.row, metric)) for point in line.points]
        places, means = [point.time.ms for point in line.points], [mean for mean, _ in values]
        errors = [error or 0.0 for _, error in values]
        axis.errorbar(places, means, yerr=errors, color=look["color"], linestyle="", elinewidth=0.7, alpha=0.6)
        axis.plot(places, means, **look)
        if line.curve.mark == OURS:
            for place, mean, point in zip(places, means, line.points, strict=True):
                words = dict(textcoords="offset points", xytext=(-6, 7), ha="right", fontsize=8, color=look["color"])
                axis.annotate(f"{point.time.target:.0%}", (place, mean), **words)
        ends.append((places[-1], means[-1], line.curve, look["color"]))
    fastest = min(point.time.ms for line in lines for point in line.points)
    slowest = max(point.time.ms for line in lines for point in line.points)
    last = slowest
    if dense is not None:
        fastest, last = min(fastest, dense.ms), max(last, dense.ms)
    axis.set_xscale("log")
    first, column = fastest / 1.1, 1.06 * slowest
    axis.set_xlim(first, max(1.1 * last, column * (column / first) ** _ROOM))
    if dense is not None:
        axis.axvline(dense.ms, color=_INK, linestyle="--", linewidth=1.2)
        label = axis.annotate(
            f"dense, {dense.method}: {dense.ms:.3g} ms", (dense.ms, 0.99), xycoords=("data", "axes fraction"),
            textcoords="offset points", xytext=(-4, 0), rotation=90, ha="right", va="top", fontsize=8, color=_INK,
        )  # fmt: skip
        label.set_in_layout(False)
    axis.margins(y=0.08)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    ticks = [tick for tick in _TICKS if axis.get_xlim()[0] <= tick <= axis.get_xlim()[1]]
    axis.set_xticks(ticks)
    _label_ends(axis, ends, column)
    axis.set_xlabel("milliseconds of attention, a whole call", fontsize=9, color=_INK)
    axis.set_ylabel(METRICS[metric], fontsize=9, color=_INK)
    axis.grid(color=_PALE, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9, colors=_INK)


_TICKS = [step * 10.0**power for power in range(-3, 5) for step in (1, 1.5, 2, 3, 4, 5, 6, 8)]


def _label_ends(axis: Any, ends: Sequence[tuple[float, float, Curve, str]], column: float) -> None:
    """The curves' labels in one column behind them, each at the height of its end, or as near as there is room."""
    low, high = axis.get_ylim()
    ordered = sorted(ends, key=lambda end: end[1])
    heights = spread_apart([(end[1] - low) / (high - low) for end in ordered], _LEAST_GAP)
    for (place, value, curve, colour), height in zip(ordered, heights, strict=True):
        label = axis.annotate(
            curve.label, (place, value), xycoords="data", xytext=(column, low + height * (high - low)),
            textcoords="data", va="center", fontsize=8, color=colour, fontweight="bold" if curve.mark else "normal",
            arrowprops=dict(arrowstyle="-", color=colour, linewidth=0.5, relpos=(0.0, 0.5), shrinkA=1, shrinkB=3),
        )  # fmt: skip
        label.set_in_layout(False)  # it lies inside of the axis, which must not shrink for it


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in rising order, moved as little as gives each its gap, all of them between 0 and 1 if there is room.

    >>> spread_apart([0.2, 0.2, 0.9], 0.1)
    [0.15, 0.25, 0.9]
    """
    groups: list[list[float]] = []  # of neighbours that touch: their heights as asked for
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _start(groups[-2], gap) + gap * len(groups[-2]) > _start(groups[-1], gap) + 1e-9:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [round(_start(group, gap) + gap * number, 6) for group in groups for number in range(len(group))]


def _start(group: Sequence[float], gap: float) -> float:
    """Where the first of a group stands, if the group lies around the mean of what was asked for."""
    length = gap * (len(group) - 1)
    wanted = sum(group) / len(group) - length / 2
    return max(0.0, min(wanted, 1.0 - length))


def _best_dense(times: Times) -> Time | None:
    return min((time for time in times.rows if time.target is None), key=lambda time: time.ms, default=None)


def _column(lines: Sequence[Line], times: Times) -> str:
    precision = lines[0].precision
    name = times.settings["dtype"] if precision == "native" else precision
    if all(line.own_precision for line in lines):
        return name
    which = "samples" if not any(line.own_precision for line in lines) else "some samples"
    return f"{name} (times; {which} in {times.settings['dtype']})"


def _title(times: Times, results: Comparison) -> str:
    call, samples = times.settings, results.settings
    return (
        f"attention of {call['shape']}, {call['batch']} x {call['heads']} x {call['tokens']} x {call['head_dim']}, on "
        f"{call['device']}, rainfusion {call['rainfusion']}\npoints: the share of blocks computed, named where "
        f"`enable` stands; bars: standard error over prompts\nsamples of the lab model: {samples['prompts']} prompts, "
        f"{samples['frames']} x {samples['size']} x {samples['size']} pixels, {samples['steps']} steps"
    )


# ---------------------------------------------------------------------------------------------------------------------
# the command


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if not (args.time or args.plot):
        parser.error("--time or --plot must be given, or both")
    try:
        if args.time:
            _time(args)
        if args.plot:
            _plot(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _time(args: argparse.Namespace) -> None:
    arguments.check_counts(args, "heads", "head_dim", "repeats")
    grid = checks.grid("--latent-shape", args.latent_shape)
    for density in args.densities:
        checks.fraction("--densities", density, zero=False)
    if not args.seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {args.seconds}")
    device = arguments.device(args.device)
    outputs.check_file("--out", args.out, example="frontier.json")
    shape = replace(SHAPE, latent_shape=grid, heads=args.heads, head_dim=args.head_dim)
    if shape != SHAPE:
        shape = replace(shape, name=f"a grid of {'x'.join(map(str, grid))}")
    times = measure(
        chosen(args.methods),
        shape,
        device=device,
        dtype=arguments.dtype(args.dtype, device),
        densities=args.densities,
        precisions=args.precision,
        backend=args.backend,
        repeats=args.repeats,
        seconds=args.seconds,
    )
    write(times, args.out)
    print(report(times))
    print(f"wrote {args.out}", flush=True)


def chosen(names: Sequence[str]) -> list[Curve]:
    """The curves whose method has one of these in its name; all without names."""
    wanted = {method.name for method in methods.select(names, [curve.method for curve in CURVES])}
    return [curve for curve in CURVES if curve.name in wanted]


def _plot(args: argparse.Namespace) -> None:
    times, results = read(args.out), read_results(args.results)
    lines, remarks = join(times, results, chosen(args.methods))
    for remark in remarks:
        print(f"left out: {remark}")
    outputs.check_picture("--picture", args.picture)
    figure(times, results, lines).savefig(args.picture)
    print(f"wrote {args.picture}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="frontier.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python benchmarks/frontier.py --time                # on a GPU: minutes\n"
        "  python benchmarks/frontier.py --plot                # anywhere: docs/images/frontier.png\n"
        "  python benchmarks/frontier.py --time --plot --device cpu --latent-shape 3 16 16 --heads 2 --head-dim 64 \\\n"
        "    --repeats 2 --out small.json --picture small.png  # to see that it works",
    )
    parser.add_argument("--time", action="store_true", help="time calls, and write the times")
    parser.add_argument("--plot", action="store_true", help="draw the times that were written")
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="parts of names (default: all)")
    where = parser.add_argument_group("files")
    where.add_argument("--out", type=Path, default=TIMES, metavar="FILE", help="the times, to write or to draw")
    results = "of rainfusion quality (default: quality.json of benchmarks/results)"
    where.add_argument(
        "--results", type=Path, nargs="+", default=[RESULTS / "quality.json"], metavar="FILE", help=results
    )
    where.add_argument("--picture", type=Path, default=PICTURE, metavar="PNG", help="default: docs/images/frontier.png")
    how = parser.add_argument_group("what to time")
    how.add_argument("--densities", type=float, nargs="+", default=list(DENSITIES), help="default: 0.1 0.2 0.3")
    precisions = ["native", "fp8"]
    how.add_argument("--precision", nargs="+", default=precisions, choices=PRECISIONS, help="default: native fp8")
    how.add_argument(
        "--latent-shape", type=int, nargs=3, default=SHAPE.latent_shape, metavar=("T", "H", "W"),
        help="default: 21 45 80, Wan at 720p",
    )  # fmt: skip
    how.add_argument("--heads", type=int, default=SHAPE.heads, help=f"default: {SHAPE.heads}")
    how.add_argument("--head-dim", type=int, default=SHAPE.head_dim, help=f"default: {SHAPE.head_dim}")
    how.add_argument("--device", help="default: the accelerator if there is one, else cpu")
    how.add_argument("--dtype", choices=arguments.DTYPES, help="default: bf16, on a CPU fp32")
    how.add_argument("--backend", default="auto", choices=["auto", *BACKENDS], help="default: auto")
    how.add_argument("--repeats", type=int, default=50, help="rounds, at most (default: 50)")
    how.add_argument("--seconds", type=float, default=2.0, help="at most so long for each call (default: 2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
