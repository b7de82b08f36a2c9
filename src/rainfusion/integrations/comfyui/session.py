"""One model with sparse attention in ComfyUI: what happens around its forwards and its attention calls.

Nothing of it stays on the model between two forwards. While one runs, the modules that attend say which layer it is,
and the attention calls of the forward come here; a call that is not sparse goes on to whoever would have had it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rainfusion.integrations.comfyui import private_names as comfy
from rainfusion.integrations.comfyui.models import Model
from rainfusion.integrations.decider import Decider, Dense
from rainfusion.integrations.layer_names import layer_names
from rainfusion.integrations.scenes import NoGrid, Scene
from rainfusion.integrations.settings import Settings
from rainfusion.integrations.stats import Stats

_log = logging.getLogger("rainfusion")
_NOT_PAST = (
    "its attention call did not come past: another node has replaced the block, or this ComfyUI's own code for the "
    "model leaves out transformer_options"
)
_TAKEN = "its attention call did not come past: another node took the calls over inside the forward"
_STAGES = 100  # of a run that a schedule knows
_ROUNDING = 1e-5  # of noise levels: a step belongs to the part of the schedule that begins with it, in fp32 too


class Session:
    """What `apply` puts on a model.

    Args:
        transformer: the diffusion model inside.
        row: what is known of its class.
        settings: what the user asked for.
        dense_start: this share of the schedule stays dense at its start.
        dense_end: this share of the schedule stays dense at its end.
    """

    def __init__(
        self,
        transformer: torch.nn.Module,
        row: Model,
        settings: Settings,
        dense_start: float = 0.0,
        dense_end: float = 0.0,
    ) -> None:
        kind, layers = type(transformer).__name__, layer_names(transformer, row.attention)
        if not layers:
            raise ValueError(comfy.HOST.misfit(f"has no {' or '.join(row.attention)} in its {kind}", comfy.version()))
        self.row, self.dense_start, self.dense_end = row, dense_start, dense_end
        self.decider = Decider(settings, layers, model=kind)
        self._sigmas = (float("inf"), float("-inf"))  # above the first, and from the second on, it is dense
        self._stages: list[float] = []  # the noise level at the end of each stage of the part that is not dense
        self._layer: int | None = None  # whose attention call comes next
        self._previous: comfy.Override | None = None  # the override of another node
        self._is_over = False  # the last run: what is counted next is of another
        self._from_image = False  # whether the run begins with a picture

    # -----------------------------------------------------------------------------------------------------------------
    # a run of a sampler

    def around_run(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """ComfyUI's wrapper of a run, which knows what it is made from."""
        self._from_image = comfy.is_from_image(executor, args, kwargs)
        try:
            return executor(*args, **kwargs)
        finally:
            self._from_image = False

    def before_run(self, patcher: Any) -> None:
        """Counts begin again. The patcher is the one that runs: nodes behind ours may have changed its schedule."""
        self.decider.reset()
        self._is_over = False
        start = comfy.sigma_at(patcher, self.dense_start) if self.dense_start else float("inf")
        end = comfy.sigma_at(patcher, 1.0 - self.dense_end) if self.dense_end else float("-inf")
        self._sigmas = (start * (1.0 + _ROUNDING), end * (1.0 + _ROUNDING))
        self._stages = self._ends_of_stages(patcher)

    def _ends_of_stages(self, patcher: Any) -> list[float]:
        schedule = self.decider.settings.schedule
        if schedule.is_constant or (schedule.is_auto and self._from_image):
            return []
        length = max(0.0, 1.0 - self.dense_start - self.dense_end) / _STAGES
        ends = (self.dense_start + (stage + 1) * length for stage in range(_STAGES))
        try:
            return [comfy.sigma_at(patcher, share) * (1.0 + _ROUNDING) for share in ends]
        except ImportError:  # a model without noise levels: auto is constant then
            if schedule.is_auto:
                return []
            raise

    def after_run(self, patcher: Any) -> None:
        """Also after an interrupt or an error."""
        self._is_over = True
        try:
            stats = self.decider.stats()
        except RuntimeError as error:  # the device has failed: that is the error to see, and not ours on top of it
            _log.warning("RainFusion, %s: the counts cannot be read: %s", self.decider.model, error)
            return
        if stats.sparse_calls or stats.dense_calls:
            _log.info("RainFusion, %s: %s", self.decider.model, stats.summary.replace("\n", "\n    "))

    # -----------------------------------------------------------------------------------------------------------------
    # a forward

    def around_forward(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """ComfyUI's wrapper of the transformer's forward."""
        if self._is_over:  # and nobody said that another begins: of two models of a guider, say
            self.decider.reset()
            self._is_over = False
        given = comfy.arguments(executor, args, kwargs)
        transformer, travelling = executor.class_obj, comfy.options(given)
        sigma = comfy.sigma(travelling) if self._needs_sigma else None
        self.decider.begin(
            self._scene(given, transformer),
            step=self._stage(sigma),
            steps=_STAGES,
            made=comfy.steps(travelling),
            dense=self._why_dense(sigma),
            training=transformer.training and torch.is_grad_enabled(),
        )
        self._previous = comfy.override_of(travelling)
        with self._entering(transformer), comfy.overriding(travelling, self.override):
            out = executor(*args, **kwargs)
            is_ours = comfy.override_of(travelling) == self.override
        self.decider.end(lambda layer: _NOT_PAST if is_ours else _TAKEN)
        return out

    def _scene(self, given: dict[str, Any], transformer: Any) -> Scene | NoGrid:
        try:
            return self.row.scene(given, transformer)
        except NoGrid as why:
            return NoGrid(*why.args)

    @property
    def _needs_sigma(self) -> bool:
        return bool(self.dense_start or self.dense_end or self._stages)

    def _stage(self, sigma: float | None) -> int | None:
        """How far the run is, as a number of a stage: of the whole schedule, also where a sampler runs a part of it."""
        if sigma is None or not self._stages:
            return None
        return min(sum(sigma <= end for end in self._stages), _STAGES - 1)

    def _why_dense(self, sigma: float | None) -> Dense | None:
        if not self._needs_sigma:
            return None
        if sigma is None:
            reason = "the sampler does not say how far it is, and dense_start, dense_end or schedule depends on it"
            optional = self.decider.settings.schedule.is_auto and not (self.dense_start or self.dense_end)
            return None if optional else Dense.unsupported(reason)
        if sigma > self._sigmas[0]:
            return Dense.asked("the start of the schedule is dense (dense_start)")
        return Dense.asked("the end of the schedule is dense (dense_end)") if sigma <= self._sigmas[1] else None

    @contextmanager
    def _entering(self, transformer: torch.nn.Module) -> Iterator[None]:
        """While it lasts, modules that attend say so before they do."""
        with ExitStack() as stack:
            stack.callback(self._forget)
            for number, name in enumerate(self.decider.layers):
                module = transformer.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(partial(self._enter, number)).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, layer: int, module: torch.nn.Module, args: Any) -> None:
        self.decider.enter(layer)
        self._layer = layer

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._layer = None

    def _forget(self) -> None:
        self._layer = self._previous = None

    # -----------------------------------------------------------------------------------------------------------------
    # an attention call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def override(self, func: comfy.Override, *args: Any, **kwargs: Any) -> Tensor:
        """ComfyUI's override of attention functions, `func` among them."""

        def dense() -> Tensor:
            return func(*args, **kwargs) if self._previous is None else self._previous(func, *args, **kwargs)

        layer, self._layer = self._layer, None
        return dense() if layer is None else self._attend(layer, comfy.attention(*args, **kwargs), dense)

    def _attend(self, layer: int, call: comfy.Attention, dense: comfy.Override) -> Tensor:
        def sparse() -> Tensor:
            out = self.decider.attempt(layer, call.q, call.k, call.v, call.mask, scale=call.scale, special=call.special)
            return call.result(out)

        return self.decider.answer(layer, sparse, dense)

    # -----------------------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Of the last run. Waits for the device."""
        return self.decider.stats()
