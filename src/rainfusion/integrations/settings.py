"""What a user may ask of `enable`: checked here, before anything is touched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rainfusion import checks
from rainfusion.backends import NAMES as BACKEND_NAMES
from rainfusion.profiles import Profile

IMAGE_SPARSITY, VIDEO_SPARSITY = 0.6, 0.8
MIN_TOKENS = 2048  # below it, dense attention was as fast or faster wherever it was measured
_SPARSE_TYPES = ("rf_v2", "rf_v3", "ada_bsa")
DEFAULTS = {"token_order": "window", **checks.RECOMMENDED, "compensate": None}  # those of `enable`


@dataclass(frozen=True)
class Settings:
    """The checked arguments of `enable`."""

    sparse_type: str
    sparsity: float | None  # None: by task
    start_step: int | float
    end_step: int | float
    skip_layers: frozenset[int]
    min_tokens: int | None  # None: by the measured crossover
    precision: str
    on_unsupported: str
    cdf_threshold: float
    keep_sink: bool
    keep_recent: bool
    token_order: str | tuple[int, ...]
    predictor: str
    compensate: bool
    first_frame: str
    exact_budget: bool
    target_error: float | None
    profile: Profile | None
    block_size: int
    inner_precise: int
    backend: str

    @classmethod
    def check(
        cls,
        *,
        sparse_type: Any,
        sparsity: Any,
        start_step: Any,
        end_step: Any,
        skip_layers: Any,
        min_tokens: Any,
        precision: Any,
        on_unsupported: Any,
        cdf_threshold: Any,
        keep_sink: Any,
        keep_recent: Any,
        token_order: Any,
        predictor: Any,
        compensate: Any,
        first_frame: Any,
        exact_budget: Any,
        target_error: Any,
        profile: Any,
        block_size: Any,
        inner_precise: Any,
        backend: Any,
    ) -> Settings:
        block_size = checks.one_of("block_size", block_size, checks.BLOCK_SIZES)
        checks.order_and_window(token_order, block_size)
        checks.choice("precision", precision, checks.PRECISIONS)
        if sparse_type == "ada_bsa" and block_size != 128:
            raise ValueError(f"block_size must be 128 with sparse_type='ada_bsa', got {block_size}")
        for name, value in (("target_error", target_error), ("profile", profile)):
            if value is not None and sparsity is not None:
                raise ValueError(f"{name} takes the place of sparsity: leave sparsity out, got {sparsity}")
            if value is not None and sparse_type == "ada_bsa":
                raise ValueError(f"{name} needs sparse_type='rf_v2', got 'ada_bsa'")
        if target_error is not None and profile is not None:
            raise ValueError("target_error and profile both set the budgets: pass one of them")
        if profile is not None:
            profile = Profile.load(profile)
            asked = dict(token_order=token_order, predictor=predictor, compensate=compensate, first_frame=first_frame)
            token_order, predictor, compensate, first_frame = _with_profile(asked, profile.options)
            exact_budget = True
        return cls(
            sparse_type=checks.choice("sparse_type", sparse_type, _SPARSE_TYPES),
            sparsity=None if sparsity is None else checks.fraction("sparsity", sparsity, zero=True),
            start_step=steps("start_step", start_step),
            end_step=steps("end_step", end_step),
            skip_layers=layers(skip_layers),
            min_tokens=None if min_tokens is None else checks.integer("min_tokens", min_tokens, minimum=0),
            precision=precision,
            on_unsupported=checks.choice("on_unsupported", on_unsupported, ("dense", "error")),
            cdf_threshold=checks.fraction("cdf_threshold", cdf_threshold, zero=False),
            keep_sink=checks.flag("keep_sink", keep_sink),
            keep_recent=checks.flag("keep_recent", keep_recent),
            token_order=token_order if isinstance(token_order, str) else tuple(token_order),
            predictor=checks.choice("predictor", predictor, tuple(checks.PREDICTORS)),
            compensate=sparse_type != "ada_bsa" if compensate is None else checks.flag("compensate", compensate),
            first_frame=checks.choice("first_frame", first_frame, checks.FIRST_FRAMES),
            exact_budget=checks.flag("exact_budget", exact_budget),
            target_error=None if target_error is None else checks.fraction("target_error", target_error, zero=False),
            profile=profile,
            block_size=block_size,
            inner_precise=checks.one_of("inner_precise", inner_precise, (0, 1)),
            backend=checks.choice("backend", backend, ("auto", *BACKEND_NAMES)),
        )

    def sparsity_for(self, frames: int) -> float:
        """As asked for, or by task: an image has one frame."""
        if self.sparsity is not None:
            return self.sparsity
        if self.target_error is not None:
            return 0.0  # the error decides
        if self.sparse_type == "ada_bsa" and self.cdf_threshold < 1.0:
            return 0.0  # the threshold decides
        return IMAGE_SPARSITY if frames == 1 else VIDEO_SPARSITY

    def why_step_is_dense(self, step: int, total: int | None) -> str | None:
        """start_step and end_step in words, if one of them covers this step."""
        if step < _number(self.start_step, total):
            return "the first steps are dense (start_step)"
        last = _number(self.end_step, total)
        if last and total is not None and total - last <= step < total:  # beyond: of a run that is not this pipeline's
            return "the last steps are dense (end_step)"
        return None

    def call_arguments(self, frames: int, layer: str) -> dict[str, Any]:
        """For `rainfusion.sparse_attention`, without the layout."""
        chosen = dict(
            sparse_type=self.sparse_type, sparsity=self.sparsity_for(frames), precision=self.precision,
            inner_precise=self.inner_precise, block_size=self.block_size, cdf_threshold=self.cdf_threshold,
            keep_sink=self.keep_sink, keep_recent=self.keep_recent, token_order=self.token_order,
            predictor=self.predictor, compensate=self.compensate, first_frame=self.first_frame,
            exact_budget=self.exact_budget, target_error=self.target_error,
        )  # fmt: skip
        return chosen if self.profile is None else {**chosen, **self.profile.arguments(layer)}


def _with_profile(asked: dict[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a profile was measured with; another wish, unless it is the default, is an error."""
    for name, value in asked.items():
        if name in options and value not in (DEFAULTS[name], options[name]):
            raise ValueError(
                f"{name} must be that of the profile, {options[name]!r}, or left out, got {value!r}; or calibrate "
                "with it"
            )
    return tuple(options.get(name, value) for name, value in asked.items())


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


def layers(value: Any) -> frozenset[int]:
    """Ints, or text such as "0-3,38"."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        found: set[int] = set()
        for part in parts:
            match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
            if match is None:
                raise ValueError(f'skip_layers as text must be numbers and ranges such as "0-3,38", got {value!r}')
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ValueError(f"skip_layers has a range that runs backwards: {part!r}")
            found.update(range(first, last + 1))
        return frozenset(found)
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise TypeError(f'skip_layers must be ints or text such as "0-3,38", got {value!r} ({type(value).__name__})')
    return frozenset(checks.integer("skip_layers", layer, minimum=0) for layer in value)


def check_layers(skip: frozenset[int], number: int, model: str) -> None:
    beyond = sorted(layer for layer in skip if layer >= number)
    if beyond:
        raise ValueError(
            f"skip_layers must be layers of {model}, which has {number} self-attention layers: 0 to {number - 1}; got "
            f"{', '.join(map(str, beyond))}"
        )
