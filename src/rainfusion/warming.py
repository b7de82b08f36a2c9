"""Kernels compiled before the first call, so that a server's first user waits no longer than the others.

A kernel is compiled for a dtype, a head dim and a set of options, and for no size: a call of a few blocks prepares
calls of every other length, grid, batch, number of heads and stride.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rainfusion import checks, pipeline, planning
from rainfusion.calls import Inputs
from rainfusion.geometry import Geometry
from rainfusion.options import Method
from rainfusion.planning import Plan
from rainfusion.progress import Progress

GRID = (3, 8, 16)  # of the tokens of the calls that are made
MASKS = ("none", "bool", "float")
_COMPILED = ("hopper", "triton")  # the others are made of torch's operations


class Warmed(NamedTuple):
    """One kind of call that is ready."""

    words: str  # which kind
    backend: str  # that runs it
    compiles: bool  # whether that one has kernels to compile at all
    seconds: float  # that it took


def warmup(
    method: Method | None = None,
    *,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    masks: Sequence[str] = ("none",),
    grid: bool = True,
    return_lse: bool = False,
    backend: str = "auto",
) -> list[Warmed]:
    """Compiles the kernels of sparse calls with these options, by making one small call of each kind.

    Later calls compile nothing, whatever their lengths, latent shapes, text, batch, heads, strides and sparsity are.
    Triton keeps what it compiled on disk: with a warm cache this takes a second or two. In a server call it once for
    each head dim of the model, in every process, before the first request.

    Args:
        method: the options of the calls; None for `Method.recommended()`, what `enable` has.
        head_dim: channels of a head.
        dtype: of q, k and v.
        device: where calls will run; None for the current accelerator, or the CPU.
        masks: kinds of key masks that calls will have: `"none"`, `"bool"`, and `"float"` for added ones.
        grid: whether calls say where their tokens lie, `latent_shape_*` or `video_spans`, as those of `enable` do.
        return_lse: whether calls ask for the log-sum-exp.
        backend: as for `sparse_attention`.

    Returns:
        for each kind of call the backend that runs it, whether it has kernels to compile, and the seconds it took.

    >>> [ready] = warmup(head_dim=64, dtype=torch.float32, device="cpu")
    >>> ready.backend, ready.compiles
    ('portable', False)
    """
    method = Method.recommended() if method is None else method
    if not isinstance(method, Method):
        raise TypeError(f"method must be a rainfusion.Method, got {method!r} ({type(method).__name__})")
    method = method.for_frames(GRID[0])
    if method.keeps_everything:
        raise ValueError("method skips nothing, so that torch's attention runs: give it a sparse_type and a sparsity")
    head_dim = checks.integer("head_dim", head_dim, minimum=1)
    if isinstance(masks, str):
        raise TypeError(f"masks must be a sequence of names, such as ['none', 'bool'], got {masks!r}")
    kinds = [checks.choice("masks", kind, MASKS) for kind in dict.fromkeys(masks)]
    where = torch.device(device) if device is not None else _accelerator()
    ready = []
    with torch.inference_mode(), Progress("warmup", len(kinds), "call") as progress:
        for kind in kinds:
            words = _in_words(method, head_dim, dtype, kind)
            progress.note(words)
            inputs, plan = _small_call(method, head_dim, dtype, where, kind, grid, return_lse, backend)
            ready.append(Warmed(words, plan.backend, plan.backend in _COMPILED, _seconds(inputs, plan)))
            progress.advance()
    return ready


def _accelerator() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _small_call(
    method: Method,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    grid: bool,
    return_lse: bool,
    backend: str,
) -> tuple[Inputs, Plan]:
    heads = len(method.sparsity) if isinstance(method.sparsity, tuple) else 1
    q = torch.zeros((1, heads, math.prod(GRID), head_dim), dtype=dtype, device=device)
    inputs = planning.check(q, q, q, _key_mask(kind, q), input_layout="BNSD")
    places = Geometry.check(0, GRID if grid else None, None, None)
    call = planning.ask(inputs, method, places, backend=backend, may_be_dense=False, return_lse=return_lse)
    return inputs, planning.plan(call, inputs.shapes)


def _key_mask(kind: str, q: Tensor) -> Tensor | None:
    """That keeps every key."""
    if kind == "none":
        return None
    fill, dtype = (True, torch.bool) if kind == "bool" else (0.0, torch.float32)
    return torch.full((q.shape[0], q.shape[2]), fill, dtype=dtype, device=q.device)


def _seconds(inputs: Inputs, plan: Plan) -> float:
    """Makes the call, where there is something to compile, and waits for it: what fails on the device shows here."""
    if plan.backend not in _COMPILED:
        return 0.0
    start = time.perf_counter()
    pipeline.attend(inputs, plan)
    if inputs.q.device.type != "cpu":
        torch.accelerator.synchronize(inputs.q.device)
    return time.perf_counter() - start


def _in_words(method: Method, head_dim: int, dtype: torch.dtype, kind: str) -> str:
    words = [method.strategy, str(dtype).removeprefix("torch."), f"head dim {head_dim}"]
    words += [f"precision {method.precision}", f"blocks of {method.block_size}"]
    if method.strategy == "rf_v2":
        words.append(f"predictor {method.predictor}")
    if method.compensate:
        words.append("compensated")
    masks = {"none": "no key mask", "bool": "a key mask of bools", "float": "a key mask of numbers"}
    return ", ".join([*words, masks[kind]])
