"""Profiles: a budget for every layer and head, under one density for all; `rainfusion calibrate` makes them.

A profile is a small JSON file. It names the layers of one kind of model, and holds the options it was measured with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rainfusion import checks

FORMAT = "rainfusion profile 1"
OPTIONS: dict[str, Callable[[Any], object]] = {  # what budgets depend on -> its check
    "token_order": lambda value: checks.order_and_window(value, 128),
    "predictor": lambda value: checks.choice("predictor", value, tuple(checks.PREDICTORS)),
    "compensate": lambda value: checks.flag("compensate", value),
    "first_frame": lambda value: checks.choice("first_frame", value, checks.FIRST_FRAMES),
}


@dataclass(frozen=True)
class Profile:
    """sparsities[layer][head], protected blocks counted in (`exact_budget`); their mean is `sparsity`.

    >>> profile = Profile({"0": (0.9, 0.7), "1": (0.8, 0.8)}, 0.8, {"predictor": "mean"})
    >>> profile.arguments("0")
    {'predictor': 'mean', 'exact_budget': True, 'sparsity': [0.9, 0.7]}
    """

    sparsities: Mapping[str, tuple[float, ...]]
    sparsity: float
    options: Mapping[str, Any]  # some of `OPTIONS`
    notes: Mapping[str, Any] = field(default_factory=dict)  # how it came about

    def __post_init__(self) -> None:
        if not self.sparsities:
            raise ValueError("sparsities must name at least one layer, got none")
        for layer, heads in self.sparsities.items():
            if not heads or not all(isinstance(share, (int, float)) and 0.0 <= share <= 1.0 for share in heads):
                raise ValueError(f"sparsities[{layer!r}] must have numbers from 0 to 1, one for each head, got {heads}")
        unknown = set(self.options) - set(OPTIONS)
        if unknown:
            raise ValueError(f"options must be some of {', '.join(OPTIONS)}, got {', '.join(sorted(unknown))}")
        for name, value in self.options.items():
            OPTIONS[name](value)

    def arguments(self, layer: str) -> dict[str, Any]:
        """Keywords of `sparse_attention` for a layer."""
        return {**self.options, "exact_budget": True, "sparsity": list(self.of(layer))}

    def of(self, layer: str) -> tuple[float, ...]:
        if layer not in self.sparsities:
            known = ", ".join(list(self.sparsities)[:3])
            raise ValueError(
                f"the profile has no layer {layer!r}; it has {len(self.sparsities)}: {known}, ... It was made for "
                "another model, or for a pipeline where this is a part: calibrate what you enable"
            )
        return self.sparsities[layer]

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Profile) -> Profile:
        """From a file, or from what such a file holds."""
        if isinstance(source, Profile):
            return source
        where = "profile" if isinstance(source, Mapping) else str(source)
        try:
            found = dict(source) if isinstance(source, Mapping) else json.loads(Path(source).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} must be a JSON file of `rainfusion calibrate`, got {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(
                f"{where} must be a profile of `rainfusion calibrate` ({FORMAT!r} in it); is it another file?"
            )
        kinds: dict[str, Any] = {"sparsities": dict, "sparsity": (int, float), "options": dict}
        wrong = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
        wrong += [
            name for name, heads in (found.get("sparsities") or {}).items() if not isinstance(heads, (list, tuple))
        ]
        if wrong:
            raise ValueError(f"{where} must have {', '.join(wrong)}, as `rainfusion calibrate` writes them")
        options = dict(found["options"])
        if isinstance(options.get("token_order"), list):
            options["token_order"] = tuple(options["token_order"])
        sparsities = {name: tuple(heads) for name, heads in found["sparsities"].items()}
        return cls(sparsities, found["sparsity"], options, found.get("notes", {}))
