"""Which modules of a model are its self-attention layers, by their names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn


def layer_names(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Of the self-attention modules, in the model's order. A * in a pattern stands for one part of a name."""
    wanted = [pattern.split(".") for pattern in patterns]

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern)) for pattern in wanted)

    plain = dict.fromkeys(plain_name(name) for name, _ in model.named_modules())  # a compiled block is there twice
    return [name for name in plain if matches(name)]


def plain_name(name: str) -> str:
    """Without the wrappers that torch.compile puts around a block."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
