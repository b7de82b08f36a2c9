"""Profiles: a budget for every layer and head, under one density for all; `rainfusion calibrate` makes them.

A profile is a small JSON file. It names the layers of one kind of model, and holds the options it was measured with.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rainfusion.options import Method

FORMAT = "rainfusion profile 1"
OPTIONS = ("token_order", "predictor", "compensate", "first_frame", "block_size")  # what budgets depend on
_KINDS: dict[str, Any] = {"sparsities": Mapping, "sparsity": (int, float), "options": Mapping}  # that a file must have
_MOST_CHARACTERS = 300  # of a part of a message that comes from a file
_MOST_NAMES = 3  # of a list in a message


@dataclass(frozen=True)
class Profile:
    """`sparsities[layer][head]`, protected blocks counted in (`exact_budget`); their mean is `sparsity`.

    Whatever is wrong with them is a ValueError that says what, in a few words however large the profile is.

    >>> profile = Profile({"0": (0.9, 0.7), "1": (0.8, 0.8)}, 0.8, {"predictor": "mean"})
    >>> profile.arguments("0")
    {'predictor': 'mean', 'exact_budget': True, 'sparsity': [0.9, 0.7]}
    """

    sparsities: Mapping[str, tuple[float, ...]]
    sparsity: float
    options: Mapping[str, Any]  # some of `OPTIONS`
    notes: Mapping[str, Any] = field(default_factory=dict)  # how it came about

    def __post_init__(self) -> None:
        for name in ("sparsities", "options", "notes"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name} must be a mapping, got {_short(getattr(self, name))}")
        if not _is_share(self.sparsity):
            raise ValueError(f"sparsity must be a number from 0 to 1, got {_short(self.sparsity)}")
        if not self.sparsities:
            raise ValueError("sparsities must name at least one layer, got none")
        for layer, heads in self.sparsities.items():
            _check_heads(layer, heads)
        _check_options(self.options)

    def arguments(self, layer: str) -> dict[str, Any]:
        """Keywords of `sparse_attention` for a layer."""
        return {**self.options, "exact_budget": True, "sparsity": list(self.of(layer))}

    def of(self, layer: str) -> tuple[float, ...]:
        """The sparsities of a layer's heads."""
        if layer not in self.sparsities:
            raise ValueError(
                f"the profile has no layer {_short(layer)}; it has {len(self.sparsities)}: {_names(self.sparsities)}. "
                "It was made for another model, or for a pipeline where this is a part: calibrate what you enable"
            )
        return self.sparsities[layer]

    def save(self, path: str | Path) -> None:
        """Writes a JSON file that `load` reads."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Profile) -> Profile:
        """From a file, or from what such a file holds."""
        if isinstance(source, Profile):
            return source
        where = "profile" if isinstance(source, Mapping) else str(source)
        found = source if isinstance(source, Mapping) else _read(Path(source))
        if not isinstance(found, Mapping) or found.get("format") != FORMAT:
            raise ValueError(
                f"{where} must be a profile of `rainfusion calibrate` ({FORMAT!r} in it); is it another file?"
            )
        _check_kinds(where, found)
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in found["options"].items()}
        options.setdefault("block_size", 128)  # files that do not say are older than other sizes
        sparsities = {name: tuple(heads) for name, heads in found["sparsities"].items()}
        try:
            return cls(sparsities, found["sparsity"], options, found.get("notes", {}))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} must be a JSON file of `rainfusion calibrate`, got one nested too deeply") from None
    except ValueError as error:  # no JSON, no text, or a number of thousands of digits
        raise ValueError(f"{path} must be a JSON file of `rainfusion calibrate`, got {error}") from None


def _check_kinds(where: str, found: Mapping[str, Any]) -> None:
    """A file's parts must be of the kinds that `calibrate` writes, whatever they hold."""
    wrong = [name for name, kind in _KINDS.items() if not isinstance(found.get(name), kind)]
    if "sparsities" not in wrong:
        wrong += [layer for layer, heads in found["sparsities"].items() if not isinstance(heads, (list, tuple))]
    if wrong:
        raise ValueError(f"{where} must have {_names(wrong)}, as `rainfusion calibrate` writes them")


def _check_heads(layer: str, heads: tuple[float, ...]) -> None:
    needed = f"sparsities[{_short(layer)}] must have numbers from 0 to 1, one for each head"
    if not isinstance(heads, (list, tuple)) or not heads:
        raise ValueError(f"{needed}, got {_short(heads)}")
    for head, share in enumerate(heads):
        if not _is_share(share):
            raise ValueError(f"{needed}, got {_short(share)} for head {head}")


def _is_share(value: object) -> bool:
    """True and False are no shares, and NaN is in no range."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value <= 1.0


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ValueError(f"options must be some of {', '.join(OPTIONS)}, got {_names(unknown)}")
    try:
        Method(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(_cut(str(error))) from None


def _names(names: Iterable[object]) -> str:
    """The first few names of a list, however many there are."""
    shown = [_cut(str(name)) for name, _ in zip(names, range(_MOST_NAMES + 1), strict=False)]
    return ", ".join([*shown[:_MOST_NAMES], *(["..."] if len(shown) > _MOST_NAMES else [])])


def _short(value: object) -> str:
    """A value as Python writes it, in a few characters however large it is."""
    try:
        return _cut(reprlib.repr(value) if not isinstance(value, str) else repr(_cut(value)))
    except ValueError:  # Python does not write out an int of thousands of digits
        return f"a large {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
