"""Sparse attention in ComfyUI, without a graph.

    from rainfusion.integrations import comfyui
    fast = comfyui.apply(model, sparsity=0.8)   # a MODEL, as UNETLoader gives it; the model itself stays as it was
    ...                                         # sample with it
    print(comfyui.stats(fast))

The nodes do the same (`nodes`), and `FOLDER` is what to link into ComfyUI's custom_nodes. Importing this module
imports nothing of ComfyUI.

models         the transformers that are known: one row each
session        what happens around their forwards and attention calls
nodes          the nodes of the graph
private_names  the one place that touches ComfyUI's names
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rainfusion import checks, schedules
from rainfusion.integrations.comfyui import private_names
from rainfusion.integrations.comfyui.models import find, register_model
from rainfusion.integrations.comfyui.session import Session
from rainfusion.integrations.settings import OnUnsupported, Settings, SkipLayers
from rainfusion.integrations.stats import Stats
from rainfusion.options import Method, Precision
from rainfusion.qualities import QualityName
from rainfusion.schedules import ScheduleSource

__all__ = ["FOLDER", "METHODS", "SCHEDULES", "apply", "register_model", "remove", "report", "stats"]

FOLDER = Path(__file__).parent / "custom_node"

Preset = Literal["recommended", "published", "adaptive"]
SCHEDULES: dict[str, ScheduleSource] = {
    "auto": "auto",
    "constant": "constant",
    "falling": "falling",
    "falling gently": schedules.GENTLY,
}
METHODS: dict[str, Method] = {
    "recommended": Method.recommended(),
    "published": Method(sparse_type="rf_v2", sparsity=None),
    "adaptive": Method.recommended(sparse_type="ada_bsa"),
}


def apply(
    model: Any,
    *,
    quality: QualityName | None = None,
    sparsity: float | None = None,
    dense_start: float = 0.0,
    dense_end: float = 0.0,
    skip_layers: SkipLayers = (),
    precision: Precision = "native",
    method: Preset | Method = "recommended",
    min_tokens: int | None = None,
    schedule: ScheduleSource = "auto",
    on_unsupported: OnUnsupported = "dense",
    backend: str = "auto",
) -> Any:
    """A clone of a MODEL whose self-attention is sparse where that fits; applied twice, the later settings hold.

    Args:
        model: a MODEL, as ComfyUI's loaders and patching nodes return it. It stays as it is.
        quality: instead of `sparsity`, a word: `"high"`, `"balanced"` or `"fast"`, see `rainfusion.enable`.
        sparsity: the share of key blocks to skip, 0 to 1. None: by task, 0.6 for images and 0.85 for video. 0: every
            call is answered as without this.
        dense_start: this share of the schedule stays dense at its start, 0 to 1.
        dense_end: this share of the schedule stays dense at its end, 0 to 1.
        skip_layers: layers that stay dense, as ints or as text such as `"0-3,38"`.
        precision: `"native"`; `"int8"` on NVIDIA GPUs from 8.0 on, `"fp8"` from 8.9 on.
        method: `"recommended"`, `"published"` (RainFusion2.0 as it was published), `"adaptive"` (blocks by predicted
            mass), or a `Method`, in which `sparsity` and `precision` are replaced if they are given.
        min_tokens: shorter sequences stay dense. None: by the measured crossover, 2048 at least.
        schedule: how the blocks are shared out over the part of the schedule that is not dense, of which `sparsity` is
            the mean: `"auto"`, `"constant"`, `"falling"`, numbers such as `[2, 1]`, or a function, see
            `rainfusion.enable`. From an image, where auto is constant, is a run whose conditioning has a picture, or
            whose latents have a mask.
        on_unsupported: what becomes of a call that cannot be sparse: `"dense"`, or `"error"`.
        backend: `"auto"`, or the name of the one that has to run.

    Raises:
        ValueError: the model's class is not known, or an argument is not allowed.
    """
    transformer = private_names.diffusion_model(model)
    row = find(transformer)
    changes: dict[str, Any] = {} if sparsity is None else {"sparsity": sparsity}
    if precision != "native":
        changes["precision"] = precision
    settings = Settings.check(
        method if isinstance(method, Method) else METHODS[checks.choice("method", method, tuple(METHODS))],
        changes,  # type: ignore[arg-type]
        skip_layers=skip_layers,
        min_tokens=min_tokens,
        schedule=schedule,
        on_unsupported=on_unsupported,
        backend=backend,
        quality=quality,
    )
    session = Session(
        transformer,
        row,
        replace(settings, start_step=0),  # a word's dense steps are a share of the schedule here
        checks.fraction("dense_start", dense_start, zero=True) or settings.start_step,
        checks.fraction("dense_end", dense_end, zero=True),
    )
    clone = model.clone()
    session.before_run(clone)  # guiders that have several models tell only the first one that a run begins
    private_names.attach(clone, session.around_forward, session.around_run, session.before_run, session.after_run)
    return clone


def remove(model: Any) -> Any:
    """A clone of a MODEL without what `apply` gave it."""
    private_names.diffusion_model(model)
    clone = model.clone()
    private_names.detach(clone)
    return clone


def stats(model: Any) -> Stats:
    """What the attention calls of the last run did; `print` it for a table. Waits for the device.

    Raises:
        ValueError: `apply` was not called for this model, nor for one that it was cloned from.
    """
    session = _session(model)
    if session is None:
        raise ValueError("model must be one that rainfusion.integrations.comfyui.apply, or the node, returned")
    return session.stats()


def report(model: Any) -> str:
    """`stats` as text, also of a model without sparse attention: as when the node is bypassed."""
    session = _session(model)
    if session is None:
        return "RainFusion Sparse Attention is not on this model, or bypassed: attention was the model's own."
    return str(session.stats())


def _session(model: Any) -> Session | None:
    private_names.diffusion_model(model)
    around = private_names.attached(model)
    return None if around is None else around.__self__
