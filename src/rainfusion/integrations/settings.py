"""What a user may ask of a host: the method, and where it is not used. Checked here, before anything is touched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Literal, NamedTuple

from rainfusion import checks, qualities
from rainfusion.backends import NAMES as BACKEND_NAMES
from rainfusion.options import OPTION_NAMES, Method, MethodOptions
from rainfusion.profiles import Profile
from rainfusion.qualities import QualityName
from rainfusion.schedules import Schedule, ScheduleSource

MIN_TOKENS = 2048  # below it, dense attention was as fast or faster wherever it was measured
_SHOWN = 8  # layers that a message lists

OnUnsupported = Literal["dense", "error"]
SkipLayers = str | int | Sequence[int]
ProfileSource = str | Path | Profile | Mapping[str, Any]


class Stage(NamedTuple):
    """A step among the sparse ones of a run."""

    step: int  # from 0
    steps: int
    made: int | None = None  # how many the run has, where the host counts in finer ones


@dataclass(frozen=True)
class Settings:
    """A method, and where dense attention stays. The arguments of `rainfusion.enable`, checked.

    Args:
        method: how sparse calls are run; with a profile, without the sparsity, which each layer has of its own.
        start_step: so many steps at the start stay dense; a float is a share of the steps.
        end_step: so many steps at the end stay dense; a float is a share of the steps.
        skip_layers: layers that stay dense, as ranges of their numbers.
        min_tokens: shorter sequences stay dense. None: by the measured crossover, 2048 at least.
        on_unsupported: what becomes of a call that cannot be sparse: `"dense"`, or `"error"`.
        profile: a budget for each layer and head.
        schedule: how the blocks are shared out among the steps that are not dense; `sparsity` is the mean. Auto is for
            videos from text, and constant with a profile, and where nobody knows how many steps there are.
        backend: `"auto"`, or the name of the one that has to run.
        quality: the word that was asked for instead of a sparsity, which it has for each task.
    """

    method: Method
    start_step: int | float = 0
    end_step: int | float = 0
    skip_layers: tuple[range, ...] = ()
    min_tokens: int | None = None
    on_unsupported: OnUnsupported = "dense"
    profile: Profile | None = None
    backend: str = "auto"
    schedule: Schedule = Schedule.of("auto")  # noqa: RUF009 # frozen
    quality: QualityName | None = None

    @classmethod
    def check(
        cls,
        method: Method | None = None,
        changes: MethodOptions | None = None,
        *,
        start_step: int | float = 0,
        end_step: int | float = 0,
        skip_layers: SkipLayers = (),
        min_tokens: int | None = None,
        on_unsupported: OnUnsupported = "dense",
        profile: ProfileSource | None = None,
        schedule: ScheduleSource = "auto",
        backend: str = "auto",
        quality: QualityName | None = None,
    ) -> Settings:
        """From unchecked arguments; `changes` apply to `method`, or to the recommended one."""
        chosen = changed(method, changes or {})
        shape, first_steps = Schedule.of(schedule), steps("start_step", start_step)
        if quality is not None:
            word = qualities.checked_quality(quality, chosen, profile)
            shape = Schedule.of(word.schedule) if shape.is_auto else shape
            first_steps = first_steps or word.dense_start
        other = None
        if chosen.target_error is not None:
            other = "target_error"
        elif chosen.sparse_type == "ada_bsa":
            other = "ada_bsa, whose blocks are found call by call"
        if shape.is_auto and (other is not None or profile is not None):
            shape = Schedule()
        if other is not None and not shape.is_constant:
            raise ValueError(f"schedule shares out a sparsity, and not {other}: leave one of them out")
        loaded = None
        if profile is not None:
            _check_no_other_budget(chosen)
            loaded = Profile.load(profile)
            chosen = _with_profile(chosen, loaded)
        return cls(
            method=chosen,
            start_step=first_steps,
            end_step=steps("end_step", end_step),
            skip_layers=layers(skip_layers),
            min_tokens=None if min_tokens is None else checks.integer("min_tokens", min_tokens, minimum=0),
            on_unsupported=checks.choice("on_unsupported", on_unsupported, ("dense", "error")),
            profile=loaded,
            backend=checks.choice("backend", backend, ("auto", *BACKEND_NAMES)),
            schedule=shape,
            quality=quality,
        )

    def from_image(self) -> Settings:
        """The same for videos that are made from an image, where auto is constant."""
        return replace(self, schedule=Schedule()) if self.schedule.is_auto else self

    @property
    def asks_for_steps(self) -> bool:
        """Whether steps differ, so that the host should say which step it is, if it can."""
        return self.needs_steps or self.schedule.is_auto

    @property
    def needs_steps(self) -> bool:
        """Whether a host that cannot say it has to stay dense."""
        return bool(self.start_step or self.end_step) or not (self.schedule.is_constant or self.schedule.is_auto)

    @property
    def fewest_tokens(self) -> int:
        return MIN_TOKENS if self.min_tokens is None else self.min_tokens

    def method_for(self, layer: str, frames: int, stage: Stage | None = None) -> Method:
        """The method of a layer's calls; an image has one frame. `stage`: where in the run, with a schedule."""
        if self.profile is not None:
            method = replace(self.method, sparsity=self.profile.of(layer))
        elif self.quality is not None:
            method = replace(self.method, sparsity=qualities.QUALITIES[self.quality].sparsity(frames))
        else:
            method = self.method.for_frames(frames)
        if stage is None or (self.schedule.is_auto and frames == 1):
            return method
        return self.schedule.for_steps(stage.made or stage.steps).method_at(method, stage.step, stage.steps)

    def stage(self, step: int | None, total: int | None, made: int | None = None) -> Stage | None:
        """Where a step lies among those that are not dense. None: without a schedule, or where that is not known."""
        if self.schedule.is_constant or step is None or total is None:
            return None
        first = _number(self.start_step, total)
        steps = total - first - _number(self.end_step, total)
        return Stage(step - first, steps, made) if 0 <= step - first < steps else None

    def why_step_is_dense(self, step: int, total: int | None) -> str | None:
        """start_step and end_step in words, if one of them covers this step."""
        if step < _number(self.start_step, total):
            return "the first steps are dense (start_step)"
        last = _number(self.end_step, total)
        if last and total is not None and total - last <= step < total:  # a later step is of a run that nobody told of
            return "the last steps are dense (end_step)"
        return None


# ---------------------------------------------------------------------------------------------------------------------
# the method


def changed(method: Method | None, changes: MethodOptions) -> Method:
    """`method`, or else the recommended one, with these changes. `compensate=None` leaves it as it is there."""
    if method is not None and not isinstance(method, Method):
        raise TypeError(f"method must be a rainfusion.Method, got {method!r} ({type(method).__name__})")
    check_names(changes)
    wanted: dict[str, Any] = dict(changes)
    if wanted.get("compensate", True) is None:
        del wanted["compensate"]
    if "sparse_type" in wanted:
        checks.choice("sparse_type", wanted["sparse_type"], ("rf_v2", "rf_v3", "ada_bsa"))
    if wanted.get("target_error") is not None and wanted.get("sparsity") is not None:
        raise ValueError(f"target_error takes the place of sparsity: leave sparsity out, got {wanted['sparsity']}")
    chosen = Method.recommended(**wanted) if method is None else replace(method, **wanted)
    if chosen.sparse_type is None:
        raise ValueError(
            "method must have sparse_type='rf_v2' or 'ada_bsa', got None, which is dense attention: "
            "Method.recommended() is a method to start from"
        )
    if chosen.target_error is not None and chosen.sparse_type == "ada_bsa":
        raise ValueError("target_error needs sparse_type='rf_v2', got 'ada_bsa'")
    return chosen


def check_names(changes: Mapping[str, Any]) -> None:
    """A keyword that is no option of the method is an error that names the nearest one."""
    for name in changes:
        if name not in OPTION_NAMES:
            near = get_close_matches(name, OPTION_NAMES, 1)
            hint = f"did you mean {near[0]}? Options" if near else "options"
            raise TypeError(f"{name} is not an option; {hint} of the method are {', '.join(OPTION_NAMES)}")


def _check_no_other_budget(method: Method) -> None:
    if method.target_error is not None:
        raise ValueError("target_error and profile both set the budgets: pass one of them")
    if method.sparsity is not None:
        raise ValueError(f"profile takes the place of sparsity: leave sparsity out, got {method.sparsity}")
    if method.sparse_type == "ada_bsa":
        raise ValueError("profile needs sparse_type='rf_v2', got 'ada_bsa'")


def _with_profile(method: Method, profile: Profile) -> Method:
    """What a profile was measured with; another wish, unless it is the recommended value, is an error."""
    usual = Method.recommended()
    found = replace(method, exact_budget=True, **profile.options)
    for name in profile.options:
        asked, measured = getattr(method, name), getattr(found, name)
        if asked not in (getattr(usual, name), measured):
            raise ValueError(
                f"{name} must be that of the profile, {measured!r}, or left out, got {asked!r}; or calibrate with it"
            )
    return found


# ---------------------------------------------------------------------------------------------------------------------
# steps


def _number(steps: int | float, total: int | None) -> int:
    if isinstance(steps, int):
        return steps
    return round(steps * total) if total is not None else 0


def steps(name: str, value: Any) -> int | float:
    """A number of steps, or a share of them as a float."""
    if isinstance(value, float):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} as a float is a share of the steps, 0 to 1; got {value}; for a number use an int")
        return value
    return checks.integer(name, value, minimum=0)


# ---------------------------------------------------------------------------------------------------------------------
# layers


def layers(value: Any) -> tuple[range, ...]:
    """Ints, or text such as "0-3,38", as ranges of numbers: a range is as cheap to refuse as a number.

    >>> layers("0-3,38")
    (range(0, 4), range(38, 39))
    """
    if isinstance(value, str):
        return tuple(_range(part.strip(), value) for part in value.split(",") if part.strip())
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise TypeError(
            f'skip_layers must be ints or text such as "0-3,38", got {shortened(value)} ({type(value).__name__})'
        )
    numbers = [checks.integer("skip_layers", layer, minimum=0) for layer in value]
    return tuple(range(number, number + 1) for number in numbers)


def _range(part: str, whole: str) -> range:
    match = re.fullmatch(r"(\d{1,18})(?:\s*-\s*(\d{1,18}))?", part)
    if match is None:
        raise ValueError(f'skip_layers as text must be numbers and ranges such as "0-3,38", got {shortened(whole)}')
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"skip_layers has a range that runs backwards: {part!r}")
    return range(first, last + 1)


def check_layers(skipped: Sequence[range], number: int, model: str) -> frozenset[int]:
    """The numbers of the layers to skip, all of them among the first `number`."""
    beyond = [range(max(part.start, number), part.stop) for part in skipped if part.stop > number]
    if beyond:
        first = [layer for part in beyond for layer in part[:_SHOWN]][:_SHOWN]
        more = sum(map(len, beyond)) - len(first)
        raise ValueError(
            f"skip_layers must be layers of {model}, which has {number} self-attention layers: 0 to {number - 1}; got "
            f"{', '.join(map(str, first))}{f' and {more} more' if more else ''}"
        )
    return frozenset(layer for part in skipped for layer in part)
