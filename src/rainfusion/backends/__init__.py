"""Backends: q, k, v and a BlockMask -> out and LSE.

A backend is a module with two functions: `attend`, and `why_not`, which says in words why it cannot run here.
`backend="auto"` takes the first of `FASTEST_FIRST` that can; one asked for by name either runs or raises.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from rainfusion import arguments
from rainfusion.backends import portable, reference
from rainfusion.blockmask import BlockMask
from rainfusion.layout import TokenLayout


class Backend(Protocol):
    def why_not(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> str | None: ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        q_layout: TokenLayout,
        k_layout: TokenLayout,
        *,
        keep: Tensor | None,
        bias: Tensor | None,
        scale: float,
        is_causal: bool,
        inner_precise: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]: ...


BACKENDS: dict[str, Backend] = {"portable": portable, "reference": reference}
FASTEST_FIRST = ("portable",)


def choose(name: Any, precision: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> str:
    """The name of the backend that will run this call; raises where the one asked for cannot."""
    arguments.choice("backend", name, ("auto", *BACKENDS))
    arguments.choice("precision", precision, arguments.PRECISIONS)
    reasons = []
    for candidate in FASTEST_FIRST if name == "auto" else (name,):
        reason = BACKENDS[candidate].why_not(q, k, v, mask)
        if reason is None and precision != "native":
            reason = "has no quantised kernels"
        if reason is None:
            return str(candidate)
        reasons.append(f"{candidate!r} {reason}")
    raise ValueError(
        f"backend={name!r} with precision={precision!r} cannot run this call: {'; '.join(reasons)}; "
        "precision='native' and backend='portable' run on every device"
    )
