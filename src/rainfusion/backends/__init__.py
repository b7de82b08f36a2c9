"""Backends: who can run a call, and who does it fastest. `protocol` says what a backend is.

`backend="auto"` takes the first of `FASTEST_FIRST` that can; one asked for by name either runs or raises. A new backend
is a module with the functions of `protocol.Backend`, and a line here.
"""

from __future__ import annotations

from rainfusion.backends import hopper, portable, reference, triton
from rainfusion.backends.protocol import Backend, Keys, QueryShard, Request
from rainfusion.calls import Call, Shapes

__all__ = ["FASTEST_FIRST", "NAMES", "Backend", "Keys", "QueryShard", "Request", "choose", "find", "get", "why_not"]

_BACKENDS: dict[str, Backend] = {"hopper": hopper, "triton": triton, "portable": portable, "reference": reference}
NAMES = tuple(_BACKENDS)
FASTEST_FIRST = ("hopper", "triton", "portable")  # the specification is for checking


def get(name: str) -> Backend:
    return _BACKENDS[name]


def why_not(name: str, call: Call, shapes: Shapes) -> str | None:
    """Why this backend cannot run this call, or None if it can."""
    return _BACKENDS[name].why_not(call, shapes)


def find(call: Call, shapes: Shapes) -> tuple[str | None, list[str]]:
    """The name of the backend that will run this call, None if none can, and why those before it cannot."""
    reasons: list[str] = []
    for name in FASTEST_FIRST if call.backend == "auto" else (call.backend,):
        reason = why_not(name, call, shapes)
        if reason is None:
            return name, reasons
        reasons.append(f"{name!r} {reason}")
    return None, reasons


def choose(call: Call, shapes: Shapes) -> str:
    """The name of the backend that will run this call; raises where the one asked for cannot."""
    name, reasons = find(call, shapes)
    if name is not None:
        return name
    raise ValueError(
        f"backend={call.backend!r} with precision={call.method.precision!r} cannot run this call: "
        f"{'; '.join(reasons)}; precision='native' and backend='portable' run on every device"
    )
