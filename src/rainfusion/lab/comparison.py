"""What `rainfusion quality` found: rows that a JSON file keeps, a table and a picture of them.

A row is a method at a density. Metrics are kept for each prompt, so that two rows can be compared prompt by prompt.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rainfusion.table import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JSON, MARKDOWN, PICTURE = FILES = ("quality.json", "quality.md", "quality.png")
_DIGITS = dict(psnr=2, ssim=4, cosine=5, temporal=4)
HEADER = (
    "method",
    "at",
    "density",
    "PSNR dB",
    "vs baseline",
    "SSIM",
    "cosine",
    "temporal error",
    "mass recall",
    "s/clip",
)


@dataclass(frozen=True)
class Row:
    """A method at a density. Equal clips have no PSNR, and a failed row has only an error: what is missing is None."""

    method: str
    family: str
    signature: str  # what the method did
    target: float | None = None  # the density asked for; None in dense rows and in nominal ones
    nominal: float | None = None  # the sparsity asked for instead of a density
    amount: float | None = None  # the setting that gave it; None where the target is out of the method's reach
    density: float | None = None  # the density that was realised while sampling
    recall: float | None = None  # the share of the true attention mass that was kept, on a few dense calls
    seconds: float | None = None  # the time of a clip
    emulated: bool = False  # whether blocks were chosen in plain torch code, so that the time says little
    psnr: list[float | None] = field(default_factory=list)  # one for each prompt, as the other metrics
    ssim: list[float | None] = field(default_factory=list)
    cosine: list[float | None] = field(default_factory=list)
    temporal: list[float | None] = field(default_factory=list)
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, float | None, float | None]:
        """What a row must have in common with this one to stand for the same measurement."""
        return (self.method, self.signature, self.target, self.nominal)

    @property
    def at(self) -> str:
        """The density or sparsity asked for, in words."""
        if self.nominal is not None:
            return f"sparsity {self.nominal:g}"
        return "-" if self.target is None else f"{self.target:g}"


@dataclass
class Comparison:
    """All rows of one setting; `settings` must agree for rows to stand side by side."""

    settings: dict[str, Any]
    about: dict[str, Any]  # what may differ: versions, the command, the prompts in words
    rows: list[Row] = field(default_factory=list)

    def find(self, key: tuple[str, str, float | None, float | None]) -> Row | None:
        """The row with this key that was measured; a row that failed was not."""
        return next((row for row in self.rows if row.key == key and row.error is None), None)

    def put(self, row: Row) -> None:
        """Puts a row in the place of the one of the same name and density, or at the end."""
        same = [(r.method, r.target, r.nominal) == (row.method, row.target, row.nominal) for r in self.rows]
        if any(same):
            self.rows[same.index(True)] = row
        else:
            self.rows.append(row)

    def sort(self, names: Sequence[str]) -> None:
        """Sorts the rows: dense ones first, the others by density and then as the methods are listed."""
        place = {name: number for number, name in enumerate(names)}
        self.rows.sort(
            key=lambda r: (r.family != "dense", r.nominal or 0.0, r.target or 0.0, place.get(r.method, len(place)))
        )

    @property
    def baseline(self) -> str | None:
        """The name of the first of our own methods, which the others are compared with."""
        return next((row.method for row in self.rows if row.family == "ours"), None)

    def difference(self, row: Row) -> tuple[float, float | None] | None:
        """Mean and standard error of the PSNR less that of the baseline, prompt by prompt."""
        at = (self.baseline, row.target, row.nominal)
        base = next((r for r in self.rows if (r.method, r.target, r.nominal) == at), None)
        if base is None or base is row or row.family == "dense" or not (base.psnr and row.psnr):
            return None
        pairs = list(zip(row.psnr, base.psnr, strict=True))
        return mean_and_error([None if a is None or b is None else a - b for a, b in pairs])


def mean_and_error(values: Sequence[float | None]) -> tuple[float, float | None] | None:
    """Mean and standard error of the mean. None where a value is missing; a single value has no error."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return statistics.fmean(known), error


# ---------------------------------------------------------------------------------------------------------------------
# files


def read(source: Path) -> Comparison:
    """What `write` has left in a folder, or such a file by another name. ValueError says so where it is another."""
    path = source if source.suffix == ".json" else source / JSON
    expected = f"{path} must be a file of rainfusion quality --out, with settings, about and rows"
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{expected}, got no JSON: {error}") from error
    if not isinstance(content, dict) or not {"settings", "about", "rows"} <= content.keys():
        raise ValueError(expected)
    try:
        return Comparison(content["settings"], content["about"], [Row(**row) for row in content["rows"]])
    except TypeError as error:  # rows of another version, say
        raise ValueError(f"{expected}, got rows with other fields: {error}") from error


def write(comparison: Comparison, folder: Path) -> None:
    """Writes JSON and Markdown. Whoever reads a file meanwhile finds the old one or the new one, never a part."""
    folder.mkdir(parents=True, exist_ok=True)
    content = dict(settings=comparison.settings, about=comparison.about, rows=[asdict(row) for row in comparison.rows])
    for name, text in ((JSON, json.dumps(content, indent=1, allow_nan=False)), (MARKDOWN, markdown(comparison))):
        fresh = folder / f"{name}.new"
        fresh.write_text(text + "\n")
        os.replace(fresh, folder / name)


def markdown(comparison: Comparison) -> str:
    """All rows as a table in Markdown, with what was measured and remarks above it."""
    lines = [HEADER, ["---"] + ["---:"] * (len(HEADER) - 1), *(cells(row, comparison) for row in comparison.rows)]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = "\n".join(f"{line}  " for line in [heading(comparison), *remarks(comparison)])
    return f"{notes}\n\n{rows}"


# ---------------------------------------------------------------------------------------------------------------------
# table


def format_rows(comparison: Comparison) -> str:
    """All rows as a table of plain text."""
    return table(HEADER, [cells(row, comparison) for row in comparison.rows])


def cells(row: Row, comparison: Comparison) -> tuple[str, ...]:
    """A row as a line of the table."""
    if row.error is not None:
        return (row.method, row.at, "failed", *["-"] * (len(HEADER) - 3))
    difference = comparison.difference(row)
    return (
        row.method + ("*" if row.emulated else ""),
        row.at,
        _number(row.density, 3),
        _metric(row, "psnr"),
        "-" if difference is None else _with_error(*difference, 2, sign=True),
        *(_metric(row, name) for name in ("ssim", "cosine", "temporal")),
        _number(row.recall, 3),
        _number(row.seconds, 2),
    )


def heading(comparison: Comparison) -> str:
    """What was measured, in a line."""
    s, about = comparison.settings, comparison.about
    clips = f"{s['frames']} frames of {s['size']} x {s['size']}, {s['steps']} steps, guidance {s['guidance']:g}"
    dense = f", the first {s['dense_steps']} dense" if s["dense_steps"] else ""
    return (
        f"{s['device']}, torch {s['torch']}, rainfusion {about['rainfusion']}, backend {s['backend']}; "
        f"{s['prompts']} prompts, {clips}{dense}, seed {s['seed']}"
    )


def remarks(comparison: Comparison) -> list[str]:
    """What the columns mean, as far as the rows need it, and what failed."""
    rows = comparison.rows
    lines = [
        "against dense samples from the same noise, mean ± standard error over prompts; at: density asked for; "
        "density: blocks that were attended to; mass recall: true attention mass kept, on a few calls of a dense sample"
    ]
    if comparison.baseline is not None:
        lines.append(f"vs baseline: PSNR beyond that of {comparison.baseline} at the same density, prompt by prompt")
    if comparison.settings["dense_steps"]:
        lines.append("density, mass recall: of the steps that are sparse")
    if any(row.emulated for row in rows):
        lines.append("*: chosen in plain torch code, which its time includes; attended with the same kernel")
    if any(row.amount is None and row.family != "dense" and row.error is None for row in rows):
        lines.append("-: such a density is out of the method's reach, or there is nothing to compare")
    return [*lines, *(f"failed: {row.method} at {row.at}: {row.error}" for row in rows if row.error is not None)]


def _metric(row: Row, name: str) -> str:
    found = mean_and_error(getattr(row, name))
    return "-" if found is None else _with_error(*found, _DIGITS[name])


def _with_error(mean: float, error: float | None, digits: int, sign: bool = False) -> str:
    text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


# ---------------------------------------------------------------------------------------------------------------------
# picture

_INK = "#333333"
_FAMILIES = {  # family -> its name in the legend, its colours from the best method to the last, the style of its lines
    "ours": ("rainfusion", "viridis", "-"),
    "rule": ("other rules", "autumn", "-"),
    "bound": ("bounds, by true attention mass", "gray", "--"),
}
_MARKERS = "osD^vP*X<>"


def figure(comparison: Comparison) -> Figure:
    """PSNR over realised density, a line a method, standard errors as bars."""
    from matplotlib.figure import Figure

    lines = _lines(comparison.rows)
    if not lines:
        raise ValueError("there is nothing to draw: no sparse row has a PSNR")
    picture = Figure(figsize=(11.5, max(5.0, 1.2 + 0.21 * len(lines))), layout="constrained", dpi=130)
    axis = picture.subplots()
    legend: dict[str, Any] = {}
    for family, (title, shades, style) in _FAMILIES.items():
        own = {name: rows for name, rows in lines.items() if rows[0].family == family}
        if own:
            legend[f"{title}:"] = axis.plot([], [], " ")[0]
        for number, (name, rows) in enumerate(own.items()):
            look = dict(
                color=_shade(shades, number, len(own)), linestyle=style, marker=_MARKERS[number % len(_MARKERS)]
            )
            legend[name] = _draw_line(axis, rows, look)
    axis.set_xlabel("realised density: share of blocks attended to", fontsize=9, color=_INK)
    axis.set_ylabel("PSNR against dense samples, dB", fontsize=9, color=_INK)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9, colors=_INK)
    picture.legend(legend.values(), legend.keys(), fontsize=8, frameon=False, loc="outside right upper")
    axis.set_title(_title(comparison), fontsize=9, color=_INK, loc="left")
    return picture


def _title(comparison: Comparison) -> str:
    s = comparison.settings
    return (
        f"sparse against dense samples of the lab model: {s['prompts']} prompts, {s['frames']} x {s['size']} x "
        f"{s['size']} pixels, {s['steps']} steps\n{s['device']}, rainfusion {comparison.about['rainfusion']}; "
        "bars: standard error over prompts"
    )


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows with a PSNR by method, in the order of their density; the method with the best last row first."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row.family in _FAMILIES and row.density is not None and mean_and_error(row.psnr) is not None:
            lines.setdefault(row.method, []).append(row)
    ordered = {name: sorted(line, key=lambda row: row.density or 0.0) for name, line in lines.items()}
    return dict(sorted(ordered.items(), key=lambda item: -_psnr(item[1][-1])[0]))


def _psnr(row: Row) -> tuple[float, float | None]:
    return mean_and_error(row.psnr) or (math.nan, None)


def _draw_line(axis: Any, rows: Sequence[Row], look: dict[str, Any]) -> Any:
    """Draws a line with its errors, and returns what stands for it in the legend."""
    found = [_psnr(row) for row in rows]
    places, means = [row.density for row in rows], [mean for mean, _ in found]
    errors = [error or 0.0 for _, error in found]
    axis.errorbar(places, means, yerr=errors, color=look["color"], linestyle="", capsize=2, elinewidth=0.8)
    return axis.plot(places, means, markersize=4.5, linewidth=1.3, **look)[0]


def _shade(name: str, number: int, of: int) -> Any:
    from matplotlib import colormaps

    return colormaps[name](0.75 * number / max(1, of - 1))
