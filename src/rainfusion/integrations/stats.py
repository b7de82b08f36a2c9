"""What the attention calls of a pipeline did: how many were sparse, why others were not, how much was computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rainfusion.graphs import is_capturing
from rainfusion.table import table

_MOST_WAITING, _MOST_ROWS = 16, 2**14  # calls whose blocks are summed at once, and rows of blocks that they have
_OF_GRAPHS = -1  # no stream

_Source = tuple[torch.device, int]  # where counts are made, and by which stream


class _Counted(NamedTuple):
    """Blocks of some calls. Replaced and never changed: who reads it while a model runs reads one moment of it."""

    blocks: int = 0
    kept: int = 0  # as far as that was known beforehand
    found: Tensor | None = None  # the others, summed
    waiting: tuple[Tensor, ...] = ()  # counts that are still to be summed
    rows: int = 0  # how many of them

    def summed(self) -> _Counted:
        if not self.waiting:
            return self
        found = torch.cat([x.flatten() for x in self.waiting]).sum()
        return self._replace(found=found if self.found is None else self.found + found, waiting=(), rows=0)

    def whole(self) -> int:
        """All blocks that were kept. Waits for the device."""
        found = self.summed().found
        return self.kept + (0 if found is None else int(found))

    def and_then(self, other: _Counted) -> _Counted:
        if other.found is not None:
            other = other._replace(found=None, waiting=(other.found, *other.waiting), rows=other.rows + 1)
        return _Counted(
            self.blocks + other.blocks,
            self.kept + other.kept,
            self.found,
            self.waiting + other.waiting,
            self.rows + other.rows,
        )


_NOTHING = _Counted()


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


@dataclass
class LayerTally:
    """The calls of one layer. Blocks that the data decides are summed on the device, and read when somebody asks.

    Not at every call: sums have to be launched, too, and for many calls at once they are as few as for one. They are
    launched by the stream that made the counts.
    """

    sparse_calls: int = 0
    dense_calls: int = 0
    counted: dict[_Source | None, _Counted] = field(default_factory=dict)  # None: known beforehand

    def sparse(self, kept: Tensor | int, blocks: int) -> None:
        """One call; kept: how many blocks, or how many of each row."""
        self.sparse_calls += 1
        if isinstance(kept, int):
            self._count(None, _Counted(blocks, kept))
        elif is_capturing(kept.device):  # this sum is the graph's own: it is made anew whenever the graph is replayed
            self._count((kept.device, _OF_GRAPHS), _Counted(blocks, waiting=(kept.sum(),)))
        else:
            source = kept.device, _stream(kept.device)
            counted = self._count(source, _Counted(blocks, waiting=(kept,), rows=kept.numel()))
            if len(counted.waiting) >= _MOST_WAITING or counted.rows >= _MOST_ROWS:
                self.counted[source] = counted.summed()

    def add(self, other: LayerTally) -> None:
        """The calls of the same layer at another time."""
        self.sparse_calls += other.sparse_calls
        self.dense_calls += other.dense_calls
        for source, more in list(other.counted.items()):
            counted = self._count(source, more)
            if source is None or source[1] == _OF_GRAPHS or len(counted.waiting) < _MOST_WAITING:
                continue
            if source[1] != _stream(source[0]):
                torch.cuda.synchronize(source[0])
            self.counted[source] = counted.summed()

    def density(self) -> float | None:
        """The share of blocks that were computed. Waits for the device, and may be asked while a model runs."""
        every = list(self.counted.items())
        for device in {source[0] for source, _ in every if source is not None and source[0].type == "cuda"}:
            torch.cuda.synchronize(device)  # counts of other streams, too
        blocks = sum(counted.blocks for _, counted in every)
        return sum(counted.whole() for _, counted in every) / blocks if blocks else None

    def _count(self, source: _Source | None, more: _Counted) -> _Counted:
        counted = self.counted[source] = self.counted.get(source, _NOTHING).and_then(more)
        return counted


class Tally:
    """Counts calls while a model runs."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerTally() for _ in range(layers)]
        self.reasons: Counter[str] = Counter()
        self.layouts: Counter[str] = Counter()
        self.steps: dict[int, LayerTally] = {}  # of all layers, where the steps differ

    def sparse(self, layer: int, layout: str, kept: Tensor | int = 0, blocks: int = 0, step: int | None = None) -> None:
        self.layers[layer].sparse(kept, blocks)
        self.layouts[layout] += 1
        if step is not None:
            self.steps.setdefault(step, LayerTally()).sparse(kept, blocks)

    def dense(self, layer: int, reason: str) -> None:
        self.layers[layer].dense_calls += 1
        self.reasons[reason] += 1

    def add(self, other: Tally) -> None:
        """The calls of the same layers at another time."""
        for entry, more in zip(self.layers, other.layers, strict=True):
            entry.add(more)
        self._add_counts(other)

    def _add_counts(self, other: Tally) -> None:
        self.reasons.update(dict(other.reasons))  # copies: `other` may be counting
        self.layouts.update(dict(other.layouts))
        for step, entry in list(other.steps.items()):
            self.steps.setdefault(step, LayerTally()).add(entry)

    @classmethod
    def side_by_side(cls, tallies: Iterable[Tally]) -> Tally:
        """One for the layers of all of them, in their order."""
        whole = cls(0)
        for tally in tallies:
            whole.layers += tally.layers
            whole._add_counts(tally)
        return whole


def _calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"


@dataclass(frozen=True)
class Stats:
    """The attention calls that were counted: print it for a table.

    Args:
        sparse_calls: how many calls were sparse.
        dense_calls: how many calls were dense.
        reasons: why calls were dense, in words, and how many of them.
        density: the share of blocks that each layer computed in its sparse calls; None where there was none.
        layouts: which grids were found, and in how many sparse calls.
        calls: the sparse and the dense calls of each layer.
        steps: the share of blocks that each step computed in its sparse calls, where a schedule makes them differ.
    """

    sparse_calls: int
    dense_calls: int
    reasons: dict[str, int]
    density: dict[str, float | None]
    layouts: dict[str, int]
    calls: dict[str, tuple[int, int]] = field(repr=False)
    steps: dict[int, float] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tallies: Mapping[str, tuple[Sequence[str], Tally]]) -> Stats:
        """tallies: the name of a transformer ("" if it is alone) -> the names of its layers, and their tally."""
        whole = Tally.side_by_side(tally for _, tally in tallies.values())
        density: dict[str, float | None] = {}
        calls: dict[str, tuple[int, int]] = {}
        for prefix, (names, tally) in tallies.items():
            for name, entry in zip(names, tally.layers, strict=True):
                full = f"{prefix}.{name}" if prefix else name
                density[full] = entry.density()
                calls[full] = entry.sparse_calls, entry.dense_calls
        return cls(
            sparse_calls=sum(sparse for sparse, _ in calls.values()),
            dense_calls=sum(dense for _, dense in calls.values()),
            reasons=dict(whole.reasons.most_common()),
            density=density,
            layouts=dict(whole.layouts.most_common()),
            calls=calls,
            steps={
                step: share for step, entry in sorted(whole.steps.items()) if (share := entry.density()) is not None
            },
        )

    @property
    def mean_density(self) -> float | None:
        """The mean over the layers that had sparse calls."""
        known = [share for share in self.density.values() if share is not None]
        return sum(known) / len(known) if known else None

    @property
    def summary(self) -> str:
        """The table's first lines, without the layers."""
        share = "" if self.mean_density is None else f", {self.mean_density:.1%} of the blocks computed"
        lines = [f"{self.sparse_calls} sparse and {self.dense_calls} dense attention calls{share}"]
        lines += [f"dense: {_calls(count)}: {reason}" for reason, count in self.reasons.items()]
        lines += [f"sparse: {_calls(count)}: {layout}" for layout, count in self.layouts.items()]
        if self.steps:
            lines.append("blocks computed, step by step: " + " ".join(f"{share:.0%}" for share in self.steps.values()))
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = [
            (name, str(sparse), str(dense), "-" if self.density[name] is None else f"{self.density[name]:.3f}")
            for name, (sparse, dense) in self.calls.items()
        ]
        return "\n".join([self.summary, table(("layer", "sparse", "dense", "density"), rows)])
