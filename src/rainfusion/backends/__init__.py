"""Backends: q, k, v and a BlockMask -> out and LSE.

A backend is a module with `attend`, and with `why_not`, which says in words why it cannot run here. Those in `FUSED`
also predict the mask, from the pass in which they reorder the keys. `backend="auto"` takes the first of
`FASTEST_FIRST` that can; one asked for by name either runs or raises.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from rainfusion import checks
from rainfusion.backends import hopper, portable, reference, triton
from rainfusion.blockmask import BlockMask
from rainfusion.checks import Options
from rainfusion.layout import TokenLayout


class Predicate(Protocol):
    def why_not(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask | None,
        options: Options | None = None,
        precision: str = "native",
    ) -> str | None: ...


class Backend(Predicate, Protocol):
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


class FusedBackend(Predicate, Protocol):
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask | None,
        q_layout: TokenLayout,
        k_layout: TokenLayout,
        *,
        keep: Tensor | None,
        bias: Tensor | None,
        options: Options,
        numbers: list[int],
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None, BlockMask]: ...

    def predict(
        self,
        q: Tensor,
        k: Tensor,
        keep: Tensor | None,
        options: Options,
        numbers: list[int],
        q_layout: TokenLayout,
        k_layout: TokenLayout,
    ) -> BlockMask: ...


BACKENDS: dict[str, Backend] = {"portable": portable, "reference": reference}
FUSED: dict[str, FusedBackend] = {"hopper": hopper, "triton": triton}
NAMES = (*FUSED, *BACKENDS)
FASTEST_FIRST = ("hopper", "triton", "portable")


def why_not(name: str, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, options: Options) -> str | None:
    """Why this backend cannot run this call, or None if it can."""
    backend: Predicate = FUSED[name] if name in FUSED else BACKENDS[name]
    return backend.why_not(q, k, v, mask, options, options.precision)


def choose(name: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, options: Options) -> str:
    """The name of the backend that will run this call; raises where the one asked for cannot."""
    checks.choice("backend", name, ("auto", *NAMES))
    reasons = []
    for candidate in FASTEST_FIRST if name == "auto" else (name,):
        if candidate != "portable" and name == "auto" and q.device.type == "cpu":
            continue  # kernels run there under Triton's interpreter only, when asked for by name
        reason = why_not(candidate, q, k, v, mask, options)
        if reason is None:
            return str(candidate)
        reasons.append(f"{candidate!r} {reason}")
    raise ValueError(
        f"backend={name!r} with precision={options.precision!r} cannot run this call: {'; '.join(reasons)}; "
        "precision='native' and backend='portable' run on every device"
    )
