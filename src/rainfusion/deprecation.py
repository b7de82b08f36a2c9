"""Old names that still work, for one release, and say what to write instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def warn_deprecated(old: str, new: str, *, stacklevel: int = 3) -> None:
    """One DeprecationWarning, for the line that called the function that calls this one."""
    warnings.warn(
        f"{old} is deprecated and will go with the next release: use {new}", DeprecationWarning, stacklevel=stacklevel
    )


def moved(old: str, new: str, *others: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has moved: names are looked up in `new`, then in `others`, and warn.

    >>> __getattr__ = moved("rainfusion.old", "rainfusion.profiles")
    """

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):  # what Python asks of every module is no use of an old name
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        for place in (new, *others):
            module = import_module(place)
            if hasattr(module, name):
                warn_deprecated(f"{old}.{name}", f"{place}.{name}", stacklevel=3)
                return getattr(module, name)
        raise AttributeError(f"module {old!r}, which has moved to {new!r}, has no attribute {name!r}")

    return __getattr__
