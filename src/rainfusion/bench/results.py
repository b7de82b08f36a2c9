"""Measurements as rows of a CSV file: one row for each GPU, shape, setting, contender and version.

Measuring again replaces the row. The file in the repository is `benchmarks/results/attention.csv`. Reading, merging and
writing serve any frozen dataclass of strings, numbers and truth values that has a `key`.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, astuple, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints, overload

from rainfusion.table import table

KEY = (
    "gpu",
    "shape",
    "batch",
    "heads",
    "tokens",
    "head_dim",
    "dtype",
    "precision",
    "sparse_type",
    "sparsity",
    "contender",
    "rainfusion",
    "torch",
    "triton",
)
VERSIONS = ("rainfusion", "torch", "triton")


@dataclass(frozen=True)
class Row:
    """One contender on one call. A number is None where there is nothing to say; a wrong result has no speed-up."""

    gpu: str
    shape: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    dtype: str
    precision: str
    sparse_type: str  # "dense" for what computes every block
    sparsity: float
    contender: str
    rainfusion: str
    torch: str
    triton: str
    density: float
    ms: float
    low_ms: float  # the lower quartile
    high_ms: float  # the upper quartile
    rounds: int
    tflops: float  # TFLOP/s, counted on the kept blocks
    matmul_tflops: float | None  # TFLOP/s of an 8192^3 bf16 product in the same run
    speedup: float | None  # how much faster than the best dense baseline of the same run
    speedup_cudnn: float | None  # how much faster than cuDNN in the same run
    around_percent: float | None  # what the call takes beyond the kernel, in percent of the kernel
    peak_mb: float | None  # the most memory that was held beyond inputs and output
    error_to_dense: float | None  # relative L2: what skipping blocks changes
    error_to_float64: float | None  # relative L2 over the same blocks: what the arithmetic loses
    allowed_error: float | None  # the most that `error_to_float64` may be
    right: bool  # whether it is not; True where nothing could be checked
    measured: str  # the time of measurement, in UTC
    host_ms: float | None = None  # of the host, until all of it is launched; where a GPU works meanwhile

    @property
    def key(self) -> tuple[Any, ...]:
        """What a later measurement must have in common to replace this row."""
        return tuple(getattr(self, name) for name in KEY)

    @property
    def setting(self) -> tuple[Any, ...]:
        """The key without versions: what was measured, whoever measured it."""
        return tuple(getattr(self, name) for name in KEY if name not in VERSIONS)

    @property
    def matmul_share(self) -> float | None:
        """Its TFLOP/s as a share of those of a matrix product."""
        return None if self.matmul_tflops is None else self.tflops / self.matmul_tflops


class Keyed(Protocol):
    """A dataclass whose rows are found again by their key."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a later row must have in common to replace this one."""


R = TypeVar("R", bound=Keyed)


def columns(kind: type[Keyed]) -> tuple[str, ...]:
    """The columns of a file of such rows."""
    return tuple(field.name for field in fields(kind))


@overload
def read(path: Path) -> list[Row]: ...
@overload
def read(path: Path, kind: type[R]) -> list[R]: ...
def read(path: Path, kind: Any = Row) -> list[Any]:
    """The rows of a file. ValueError says what is wrong with one of another kind, and in which line."""
    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    # files that were written before a column was added are without it
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    found = tuple(lines[0]) if lines else ()
    names = tuple(name for name in columns(kind) if name in found or name not in optional)
    if found != names:
        missing = [name for name in names if name not in found]
        raise ValueError(f"{path} must have the columns of rainfusion bench --csv; missing: {', '.join(missing)}")
    types = get_type_hints(kind)
    rows = []
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(names):
            raise ValueError(f"{path}, line {number}: must have {len(names)} values, got {len(line)}")
        try:
            rows.append(kind(**{name: _parse(text, types[name]) for name, text in zip(names, line, strict=True)}))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def _parse(text: str, kind: Any) -> Any:
    if text == "" and kind is not str:
        return None
    if kind is bool:
        return text == "True"
    return kind(text) if kind in (str, int) else float(text)


def merge(old: Iterable[R], new: Iterable[R]) -> list[R]:
    """New rows take the place of old ones with the same key; the others follow at the end."""
    rows = {row.key: row for row in old}
    rows.update((row.key, row) for row in new)
    return list(rows.values())


def update(path: Path, new: Sequence[R]) -> None:
    """Merges new rows into a file. Whoever reads it meanwhile finds the old file or the new one, never a part."""
    if not new:
        return
    kind = type(new[0])
    rows = merge(read(path, kind) if path.exists() else [], [rounded(row) for row in new])
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    with open(fresh, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns(kind))
        writer.writerows([_text(value) for value in astuple(row)] for row in rows)
    os.replace(fresh, path)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def rounded(row: R) -> R:
    """A row as it comes back from a file, so that its key is found there."""
    kind, types = type(row), get_type_hints(type(row))
    return kind(*(_parse(_text(getattr(row, name)), types[name]) for name in columns(kind)))


def newest(rows: Iterable[Row]) -> list[Row]:
    """Of rows that differ in versions only, keeps the one measured last."""
    latest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        other = latest.get(row.setting)
        if other is None or row.measured >= other.measured:
            latest[row.setting] = row
    return list(latest.values())


def format_rows(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    return table(tuple(_COLUMNS), [tuple(cell(row) for cell in _COLUMNS.values()) for row in rows])


def _speedup(factor: float | None, right: bool) -> str:
    """A result that is wrong has no speed-up."""
    return form(factor, ".2f", "x") if right else "WRONG"


def form(value: float | None, how: str, unit: str = "") -> str:
    """A number in the format `how`, with its unit; a dash where there is none."""
    return "-" if value is None else f"{value:{how}}{unit}"


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "shape": lambda row: row.shape,
    "contender": lambda row: row.contender,
    "precision": lambda row: row.dtype if row.precision == "native" else row.precision,
    "sparsity": lambda row: f"{row.sparsity:.2f}",
    "density": lambda row: f"{row.density:.3f}",
    "ms": lambda row: f"{row.ms:.3f}",
    "host ms": lambda row: form(row.host_ms, ".3f"),
    "TFLOP/s": lambda row: f"{row.tflops:.0f}" if row.tflops >= 10 else f"{row.tflops:.2f}",
    "of matmul": lambda row: form(row.matmul_share, ".0%"),
    "vs best dense": lambda row: _speedup(row.speedup, row.right),
    "vs cuDNN": lambda row: _speedup(row.speedup_cudnn, row.right),
    "around": lambda row: form(row.around_percent, "+.1f", "%"),
    "peak MB": lambda row: form(row.peak_mb, ".0f"),
    "vs dense": lambda row: form(row.error_to_dense, ".4f"),
    "vs fp64": lambda row: form(row.error_to_float64, ".1e"),
}
