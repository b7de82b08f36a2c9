"""The methods that are compared, as rows of data, and each of them as the attention of a sample.

`ours` takes any keyword arguments of `rainfusion.sparse_attention`, `rule` a function of `lab.rules`:

    ours("rf_v2 2x8x8 submeans", token_order=(2, 8, 8), predictor="submeans")
    rule("nearest in 3-D", rules.nearest, token_order=(4, 4, 8))

An amount in (0, 1] says how much a method keeps; what it is depends on the method's knob.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rainfusion.api import predict_mask, sparse_attention
from rainfusion.autocast import own_precision
from rainfusion.blockmask import BlockMask
from rainfusion.lab import rules
from rainfusion.lab.model import Grid, Place, arguments_at, dense, schedule_at
from rainfusion.lab.rules import Choice, Rule
from rainfusion.layout import TokenLayout
from rainfusion.options import TokenOrder, Window, sides
from rainfusion.planning import planned
from rainfusion.prediction.calibration import Recorder, allocate, highest_sparsity
from rainfusion.schedules import Schedule, ScheduleSource

Family = Literal["dense", "ours", "rule", "bound"]
Knob = Literal["sparsity", "cdf_threshold", "target_error", "profile"]
KNOBS: dict[Knob, Callable[[float], float]] = {  # argument of sparse_attention -> its value for an amount
    "sparsity": lambda amount: 1 - amount,
    "cdf_threshold": lambda amount: amount,
    "target_error": lambda amount: 1 - amount,
    "profile": lambda amount: 1 - amount,  # a sparsity that layers and heads share, see `Candidate.calibrated`
}


@dataclass(frozen=True)
class Candidate:
    """A row of the comparison. Without a rule `sparse_attention` predicts by itself."""

    name: str
    family: Family
    options: Mapping[str, Any]  # keywords of sparse_attention
    knob: Knob = "sparsity"
    rule: Rule | None = None
    every: int = 1  # how many steps share a mask
    one_branch: bool = False  # whether the prompted half of guidance predicts for both
    note: str = ""
    budgets: Callable[[float], Mapping[str, Sequence[float]]] | None = None  # by layer and head, for the knob "profile"
    schedule: Schedule = Schedule()  # noqa: RUF009 # frozen

    def __post_init__(self) -> None:
        if self.family not in get_args(Family):
            raise ValueError(f"family must be one of {', '.join(get_args(Family))}, got {self.family!r}")
        if self.knob not in KNOBS:
            raise ValueError(f"knob must be one of {', '.join(KNOBS)}, got {self.knob!r}")

    def in_precision(self, precision: str) -> Candidate:
        """The same in another precision, which is in its name, too."""
        if precision == "native":
            return self
        return replace(self, name=f"{self.name}, {precision}", options={**self.options, "precision": precision})

    @property
    def token_order(self) -> TokenOrder | Window:
        """The order of tokens in its blocks."""
        if self.options.get("sparse_type", "rf_v2") == "ada_bsa":
            return "raster"
        order: TokenOrder | Window = self.options.get("token_order", "window")
        return order

    @property
    def signature(self) -> str:
        """What it does, in one line. Methods with other signatures are others, whatever their names say."""
        words = [f"{name}={value!r}" for name, value in sorted(self.options.items())]
        words += [] if self.rule is None else [_words(self.rule)]
        words += [] if self.knob == "sparsity" else [f"by {self.knob}"]
        words += [] if self.every == 1 else [f"mask of every {self.every} steps"]
        words += ["mask of the prompted branch"] if self.one_branch else []
        words += [] if self.schedule.is_constant else [f"in the ratios {', '.join(map(str, self.schedule.points))}"]
        return ", ".join(words)

    def layout(self, place: Place, device: torch.device) -> TokenLayout:
        """The layout of its blocks of keys in a call."""
        return _layout(place.grid, place.text, self.token_order, self.block_sides[1], device)

    @property
    def block_sides(self) -> tuple[int, int]:
        """Tokens of a block of queries, and of one of keys."""
        return sides(self.options.get("block_size", 128))

    def arguments(self, place: Place, amount: float) -> dict[str, Any]:
        """Keywords of `sparse_attention` for one call."""
        fixed, value = {**arguments_at(place), **self.options}, KNOBS[self.knob](amount)
        if self.knob != "profile":
            return {**fixed, self.knob: value}
        assert self.budgets is not None, "calibrate first"
        return {**fixed, "exact_budget": True, "sparsity": list(self.budgets(value)[str(place.layer)])}

    def calibrated(self, calls: Iterable[tuple[Tensor, Tensor, Tensor, Place]], backend: str) -> Candidate:
        """The method with budgets that calls suggest: q, k, v [B, H, S, D] and their place. Other knobs need none."""
        if self.knob != "profile":
            return self
        recorder = Recorder()
        for q, k, v, place in calls:
            options: Any = {**arguments_at(place), **self.options}
            recorder.add(str(place.layer), *planned(q, k, v, sparsity=0.5, backend=backend, **options))
        layers = recorder.layers
        return replace(self, budgets=cache(lambda sparsity: allocate(layers, min(sparsity, highest_sparsity(layers)))))

    def choice(self, q: Tensor, k: Tensor, v: Tensor, place: Place, backend: str, guided: bool = True) -> Choice:
        """The blocks that it keeps in one call, bool [B, H, NQ, NK], for any amount."""
        if self.rule is not None:
            return self.rule(q, k, self.layout(place, q.device), place)
        return lambda amount: self.predict(q, k, v, place, amount, backend, guided).to_dense()

    def predict(
        self, q: Tensor, k: Tensor, v: Tensor, place: Place, amount: float, backend: str, guided: bool
    ) -> BlockMask:
        """The mask of a call. With `one_branch` the prompted half of the batch predicts for the other half too."""
        half = len(q) // 2 if self.one_branch and guided else len(q)
        options = {"backend": backend, **self.arguments(place, amount)}
        if self.knob == "target_error":  # these budgets depend on the values too
            mask: BlockMask = sparse_attention(q[:half], k[:half], v[:half], **options, return_mask=True)[1]
        else:
            mask = predict_mask(q[:half], k[:half], **options)
        return mask if half == len(q) else _twice(mask)


class Attend:
    """A method at an amount, as the attention of one sample; keeps count of the blocks that it attends to."""

    def __init__(self, method: Candidate, amount: float, backend: str, *, guided: bool = True, dense_steps: int = 0):
        self.method, self.amount, self.backend = method, amount, backend
        self.guided, self.dense_steps = guided, dense_steps
        self.kept: list[Tensor] = []  # how many blocks each call kept, on the device
        self.blocks = 0  # how many blocks all calls have
        self._masks: dict[int, BlockMask] = {}  # layer -> its mask, for later steps

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        if place.step < self.dense_steps:
            return dense(q, k, v, place)
        amount, schedule = self.amount, schedule_at(self.method.schedule, place)
        if not schedule.is_constant:
            steps = place.steps - self.dense_steps
            amount = schedule.densities(amount, steps)[place.step - self.dense_steps]
        with own_precision(q.device):
            options = {"backend": self.backend, **self.method.arguments(place, amount)}
            out, mask = sparse_attention(q, k, v, **options, mask=self._mask(q, k, v, place), return_mask=True)
        self.kept.append(mask.counts.sum(dtype=torch.int64))
        self.blocks += mask.indices.numel()
        attended: Tensor = out
        return attended

    def density(self) -> float:
        """The share of blocks kept in all sparse calls so far."""
        return int(torch.stack(self.kept).sum()) / self.blocks if self.kept else 1.0

    def _mask(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> BlockMask | None:
        """The mask to pass to a call; None where the call predicts its own."""
        method = self.method
        if method.rule is not None:
            chosen = method.choice(q, k, v, place, self.backend)(self.amount)
            return BlockMask.from_dense(chosen, method.options.get("block_size", 128))
        if method.every == 1 and not method.one_branch:
            return None
        if (place.step - self.dense_steps) % method.every == 0 or place.layer not in self._masks:
            self._masks[place.layer] = method.predict(q, k, v, place, self.amount, self.backend, self.guided)
        return self._masks[place.layer]


def ours(
    name: str,
    *,
    knob: Knob = "sparsity",
    every: int = 1,
    one_branch: bool = False,
    schedule: ScheduleSource = "constant",
    note: str = "",
    **options: Any,
) -> Candidate:
    """A method of this library.

    Args:
        name: what the table calls it.
        knob: the argument of `sparse_attention` that sets how much is kept.
        every: how many steps share a mask.
        one_branch: whether the prompted half of guidance predicts for both.
        schedule: how the amount is shared out among the steps.
        note: a remark for the list of methods.
        **options: keywords of `sparse_attention`.
    """
    return Candidate(name, "ours", options, knob, None, every, one_branch, note, schedule=Schedule.of(schedule))


def rule(name: str, function: Rule, *, family: Family = "rule", note: str = "", **options: Any) -> Candidate:
    """A method that chooses blocks by a function of `lab.rules` and attends to them with `sparse_attention`.

    Args:
        name: what the table calls it.
        function: the rule.
        family: a rule of others, a bound, or one of ours.
        note: a remark for the list of methods.
        **options: keywords of `sparse_attention`.
    """
    return Candidate(name, family, options, rule=function, note=note)


def select(names: Sequence[str], among: Sequence[Candidate] | None = None) -> list[Candidate]:
    """The methods whose name is one of these or has one of these in it, in whatever case; without names all of them."""
    among = METHODS if among is None else among
    for name in names:
        if not any(name.lower() in method.name.lower() for method in among):
            known = ", ".join(method.name for method in among)
            raise ValueError(f"--methods must be parts of the names {known}; got {name!r}")
    wanted = [name.lower() for name in names]
    whole = {method.name.lower() for method in among} & set(wanted)
    parts = [name for name in wanted if name not in whole]
    return [
        method
        for method in among
        if not names or method.name.lower() in whole or any(part in method.name.lower() for part in parts)
    ]


DENSE = Candidate("dense", "dense", {}, note="torch's attention: what the others are compared with")
SAME = Candidate(
    "dense, other kernel", "dense", {}, note="every block, in the kernel of the others: the floor of rounding"
)

_SPARGE, _FREE = partial(rules.sparge, form="cdf", threshold=0.1), partial(rules.sparge, form="top-k", threshold=-0.1)

_FIRST = (4, 4, 8)
_SUBMEANS: dict[str, Any] = dict(token_order=(2, 8, 8), first_frame="free", predictor="submeans", compensate=True)
_SPREAD: dict[str, Any] = {**_SUBMEANS, "predictor": "spread"}
_FINE: dict[str, Any] = {**_SPREAD, "block_size": (128, 32)}


def _x(order: str | tuple[int, ...]) -> str:
    return order if isinstance(order, str) else "x".join(map(str, order))


METHODS = (
    # as published, in several orders of tokens
    *(
        ours(f"rf_v2 {_x(order)}", token_order=order)
        for order in (_FIRST, (1, 8, 16), (2, 8, 8), (2, 4, 16), (8, 4, 4))
    ),
    ours("rf_v2 mindiesd", token_order="mindiesd", note="the reference's order"),
    ours("rf_v2 raster", token_order="raster", note="without reordering"),
    # one option after the other
    ours("rf_v2 2x8x8 keys", token_order=(2, 8, 8), first_frame="keys"),
    ours("rf_v2 2x8x8 keys submeans compensate", **{**_SUBMEANS, "first_frame": "keys"}),
    ours("rf_v2 2x8x8 free", token_order=(2, 8, 8), first_frame="free"),
    ours("rf_v2 2x8x8 free compensate", **{**_SUBMEANS, "predictor": "mean"}),
    ours("rf_v2 2x8x8 free submeans", **{**_SUBMEANS, "compensate": False}),
    ours("rf_v2 2x8x8 free spread", **{**_SPREAD, "compensate": False}),
    *(
        ours(f"rf_v2 2x8x8 free {predictor} compensate{words}", **{**_SUBMEANS, "predictor": predictor, **options})
        for predictor in ("submeans", "spread")
        for words, options in (
            ("", {}),
            (", 64 keys", dict(block_size=(128, 64))),
            (", 32 keys", dict(block_size=(128, 32))),
        )
    ),
    # one step away from the defaults of `enable`
    ours("rf_v2 2x8x8 spread compensate, 32 keys", **{**_FINE, "first_frame": "protected"}),
    ours("rf_v2 2x8x8 keys spread compensate, 32 keys", **{**_FINE, "first_frame": "keys"}),
    *(
        ours(f"rf_v2 {_x(order)} free spread compensate, 32 keys", **{**_FINE, "token_order": order})
        for order in (_FIRST, (1, 8, 16), (2, 4, 16), (8, 4, 4), "raster")
    ),
    # the same blocks, more of them early
    ours("rf_v2 2x8x8 free submeans compensate, falling", **_SUBMEANS, schedule=[5.0, 1.0]),
    *(
        ours(f"rf_v2 2x8x8 free spread compensate, 32 keys, {words}", **_FINE, schedule=schedule)
        for words, schedule in (
            ("falling", [5.0, 1.0]),
            ("falling gently", [2.0, 1.0]),
            ("falling steeply", [12.0, 1.0]),
            ("falling fast", [9.0, 3.0, 2.0, 1.5, 1.0]),
        )
    ),
    # other ways to share out blocks, and masks that are not of the call itself
    ours("rf_v2 by error", **_FINE, knob="target_error", note="budgets of heads by target_error"),
    ours("rf_v2 calibrated", **_FINE, knob="profile", note="budgets of layers and heads by a profile"),
    ours("rf_v2 mask of every 4th step", **_FINE, every=4),
    ours("rf_v2 mask of one branch", **_FINE, one_branch=True, note="the prompted half of guidance"),
    ours("ada_bsa by cap", sparse_type="ada_bsa"),
    ours("ada_bsa by cdf", sparse_type="ada_bsa", knob="cdf_threshold"),
    rule("without the sink", rules.mean_ranking, family="ours", token_order=_FIRST, note="text alone is protected"),
    rule("SpargeAttn cdf", _SPARGE, token_order="raster"),
    rule("SpargeAttn top-k", _FREE, token_order="raster"),
    rule("SpargeAttn cdf, windows", partial(_SPARGE, protect="text"), token_order=_FIRST, note="in our order"),
    rule("SpargeAttn top-k, windows", partial(_FREE, protect="text"), token_order=_FIRST, note="in our order"),
    rule("sliding window", rules.sliding_window, token_order="raster", note="a band of blocks"),
    rule("nearest in 3-D", rules.nearest, token_order=_FIRST, note="a sliding window over (t, h, w)"),
    rule("random", rules.random_blocks, token_order=_FIRST),
    rule("oracle", rules.oracle, family="bound", token_order=_FIRST, note="true mass, protected as in rf_v2"),
    rule("oracle 2x8x8", rules.oracle, family="bound", token_order=(2, 8, 8)),
    rule("oracle without the sink", partial(rules.oracle, protect="text"), family="bound", token_order=_FIRST),
    rule(
        "oracle, shared budget",
        rules.shared_oracle,
        family="bound",
        token_order=_FIRST,
        note="the best blocks of all heads and rows together; text protected",
    ),
)


@lru_cache(maxsize=64)
def _layout(grid: Grid, text: int, order: TokenOrder | Window, block_size: int, device: torch.device) -> TokenLayout:
    t, h, w = grid
    layout = TokenLayout.build(text + t * h * w, grid, text, token_order=order, block_size=block_size)
    return layout.to(device)


def _twice(mask: BlockMask) -> BlockMask:
    """The mask of one branch, repeated for a batch of both."""
    return BlockMask(mask.counts.repeat(2, 1, 1), mask.indices.repeat(2, 1, 1, 1), mask.block_size)


def _words(function: Any) -> str:
    """The name of a rule, with the arguments that were fixed."""
    if isinstance(function, partial):
        given = (f"{name}={value!r}" for name, value in sorted(function.keywords.items()))
        return f"{function.func.__name__}({', '.join(given)})"
    return str(function.__name__)
