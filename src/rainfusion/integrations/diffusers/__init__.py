"""`rainfusion.enable(pipe)`: sparse self-attention in a diffusers pipeline, and off again.

models      one row for each transformer that is known, and `register_model` for others
grids       where the picture lies in the attention sequence, from the forward's arguments
settings    what `enable` was asked for, checked
controller  one transformer at work: hooks, attention calls, what to put back
calls       one attention call: sparse with which arguments, or dense for which reason
shards      the same, for a model that is spread over several processes
hub         diffusers' private names, in one place
steps       which denoising step it is
stats       what was counted
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rainfusion import checks
from rainfusion.integrations.decider import Plan
from rainfusion.integrations.diffusers import private_names as hub
from rainfusion.integrations.diffusers.host import ATTRIBUTE, Controller, Observer, enabled_through
from rainfusion.integrations.diffusers.models import find, known, register_model
from rainfusion.integrations.diffusers.steps import Steps
from rainfusion.integrations.settings import VIDEO_SPARSITY, Settings
from rainfusion.integrations.stats import Stats, Tally
from rainfusion.prediction.calibration import Recorder, allocate
from rainfusion.profiles import OPTIONS, Profile

__all__ = ["Handle", "Stats", "calibrate", "disable", "enable", "enabled", "register_model"]


class Handle:
    """What `enable` returns: `stats()` says what happened, `disable()` ends it."""

    def __init__(self, controllers: dict[str, Controller]) -> None:
        self._controllers = controllers

    @property
    def settings(self) -> Settings:
        return next(iter(self._controllers.values())).settings

    @property
    def layers(self) -> list[str]:
        """The self-attention layers, in the order that `skip_layers` counts them (of the first transformer)."""
        return list(next(iter(self._controllers.values())).names)

    def stats(self) -> Stats:
        """Counts since `enable`. Waits for the device."""
        alone = len(self._controllers) == 1
        return Stats.of(
            {"" if alone else name: (control.names, control.tally) for name, control in self._controllers.items()}
        )

    def reset(self) -> None:
        """Counts begin again, after a warm-up say."""
        for controller in self._controllers.values():
            controller.tally = Tally(len(controller.names))

    def disable(self) -> None:
        for controller in self._controllers.values():
            controller.detach()

    def __repr__(self) -> str:
        models = ", ".join(
            f"{name}: {len(control.names)} layers of {type(control.model).__name__}"
            for name, control in self._controllers.items()
        )
        state = "" if all(control.attached for control in self._controllers.values()) else ", disabled"
        return f"<rainfusion in {models}{state}>"


def enable(
    pipe_or_transformer: Any,
    *,
    sparse_type: str = "rf_v2",
    sparsity: float | None = None,
    start_step: int | float = 0,
    end_step: int | float = 0,
    skip_layers: str | int | Sequence[int] = (),
    min_tokens: int | None = None,
    precision: str = "native",
    on_unsupported: str = "dense",
    cdf_threshold: float = 1.0,
    keep_sink: bool = True,
    keep_recent: bool = True,
    token_order: str | Sequence[int] = "window",
    predictor: str = "submeans",
    compensate: bool | None = None,
    first_frame: str = "free",
    exact_budget: bool = False,
    target_error: float | None = None,
    profile: str | Path | Profile | Mapping[str, Any] | None = None,
    block_size: int = 128,
    inner_precise: int = 0,
    backend: str = "auto",
) -> Handle:
    """Makes the self-attention of a diffusers pipeline, or of its transformer alone, sparse.

    Args:
        pipe_or_transformer: a pipeline (all of its transformers are enabled, and share one count of steps), or a model.
        sparse_type: `"rf_v2"` or `"ada_bsa"`.
        sparsity: the share of key blocks to skip. None: 0.6 for images, 0.8 for video.
        start_step, end_step: so many steps at the start and at the end stay dense; a float is a share of the steps.
        skip_layers: layers that stay dense: numbers, or text such as `"0-3,38"`; `handle.layers` lists them.
        min_tokens: shorter sequences stay dense. None: by the measured crossover, 2048 at least. 0: none does.
        precision: `"native"`; `"fp8"` or `"int8"` on Hopper GPUs.
        on_unsupported: `"dense"`: a call that cannot be sparse is dense, and counted with its reason; or `"error"`.
        target_error: instead of `sparsity`, the error to allow in each head of each call.
        profile: instead of `sparsity`, a budget for each layer and head: a file or `Profile` of `calibrate`, with the
            token_order, predictor, compensate and first_frame that it was measured with.
        predictor, compensate, first_frame: as for `sparse_attention`, but `"submeans"`, True (None: with rf_v2) and
            `"free"` by default, which gave the best samples for their time (docs/quality.md). Where the first frame is
            what a video is made from, `"keys"` is the careful choice.
        cdf_threshold, keep_sink, keep_recent, token_order, exact_budget, block_size, inner_precise, backend: as for
            `sparse_attention`.

    Returns:
        a handle with `stats()` and `disable()`. Enabling again replaces the settings, and warns.
    """
    settings = Settings.check(
        sparse_type=sparse_type, sparsity=sparsity, start_step=start_step, end_step=end_step, skip_layers=skip_layers,
        min_tokens=min_tokens, precision=precision, on_unsupported=on_unsupported, cdf_threshold=cdf_threshold,
        keep_sink=keep_sink, keep_recent=keep_recent, token_order=token_order, predictor=predictor,
        compensate=compensate, first_frame=first_frame, exact_budget=exact_budget, target_error=target_error,
        profile=profile, block_size=block_size, inner_precise=inner_precise, backend=backend,
    )  # fmt: skip
    return _start(pipe_or_transformer, settings)


def _start(pipe_or_transformer: Any, settings: Settings, observer: Observer | None = None) -> Handle:
    hub.dispatch_module()
    models, pipeline = _transformers(pipe_or_transformer)
    for name, steps in (("start_step", settings.start_step), ("end_step", settings.end_step)):
        if pipeline is None and steps and (name == "end_step" or isinstance(steps, float)):
            raise ValueError(
                f"{name}={steps} needs the number of steps, which a transformer alone does not know: enable the "
                "pipeline"
            )
    if settings.precision != "native" and not _has_hopper():
        warnings.warn(
            f"precision={settings.precision!r} runs on Hopper GPUs (H100, H200), and there is none: attention will be "
            "dense",
            stacklevel=3,
        )
    if any(ATTRIBUTE in vars(model) for model in models.values()):
        warnings.warn("rainfusion was enabled here already: the new settings replace the old ones", stacklevel=3)
    return _enable(models, pipeline, settings, observer)


def calibrate(
    pipe_or_transformer: Any, run: Callable[[], Any], *, sparsity: float = VIDEO_SPARSITY, **kwargs: Any
) -> Profile:
    """Measures what each layer and head loses, while `run` makes a few samples, and shares out one density.

        profile = rainfusion.calibrate(pipe, lambda: pipe("a cat", num_inference_steps=8), sparsity=0.8)
        profile.save("wan.json")
        rainfusion.enable(pipe, profile="wan.json")

    Args:
        pipe_or_transformer: as for `enable`; attention stays dense meanwhile.
        run: makes one or a few samples with it, of the size that will be used; fewer steps will do.
        sparsity: of all heads together, protected blocks counted in.
        kwargs: options of `enable` that the budgets are for, and that the profile will bring along: `token_order`,
            `predictor`, `compensate`, `first_frame`; others hold while measuring.
    """
    share = checks.fraction("sparsity", sparsity, zero=False)
    options = {name: p.default for name, p in inspect.signature(enable).parameters.items() if p.kind == p.KEYWORD_ONLY}
    unknown = sorted(kwargs.keys() - options.keys() | kwargs.keys() & {"profile", "target_error"})
    if unknown:
        raise TypeError(f"calibrate takes the options of enable but profile and target_error, got {', '.join(unknown)}")
    settings = Settings.check(**{**options, "min_tokens": 0, **kwargs, "sparsity": share})
    if settings.sparse_type == "ada_bsa":
        raise ValueError("sparse_type must be 'rf_v2', whose budgets are by head, got 'ada_bsa'")
    recorder = Recorder(share)

    def observe(layer: str, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, how: Plan) -> None:
        keep, bias = checks.key_mask(key_mask, q, k)
        recorder.add(layer, q, k, v, keep, bias, how.options, how.runner)

    models = _modules(pipe_or_transformer)
    before = {name: vars(model)[ATTRIBUTE] for name, model in models.items() if ATTRIBUTE in vars(model)}
    _detach(models)
    handle = None
    try:
        handle = _start(pipe_or_transformer, settings, observe)
        run()
        summary, names = handle.stats().summary, handle.stats().calls
    finally:
        if handle is not None:
            handle.disable()
        for controller in before.values():
            controller.reattach()
    if not recorder.layers:
        raise ValueError(f"no attention call could be measured: {summary}")
    missing = [name for name in names if name not in recorder.layers]
    if missing:
        warnings.warn(
            f"{len(missing)} of {len(names)} layers had no call to measure, {missing[0]} among them: with this profile "
            "they must be in skip_layers; more steps may reach them",
            stacklevel=2,
        )
    chosen = {name: getattr(settings, name) for name in OPTIONS}
    calls = sum(layer.calls for layer in recorder.layers.values())
    return Profile(allocate(recorder.layers, share), share, chosen, dict(calls=calls))


def _enable(
    models: dict[str, nn.Module], pipeline: Any, settings: Settings, observer: Observer | None = None
) -> Handle:
    """All transformers or none."""
    steps = Steps(pipeline)
    rows = {name: find(model) for name, model in models.items()}
    controllers = {
        name: Controller(model, rows[name], settings, steps, "" if len(models) == 1 else name, observer)
        for name, model in models.items()
    }
    _detach(models)
    try:
        for controller in controllers.values():
            controller.attach()
    except BaseException:
        for controller in controllers.values():
            controller.detach()
        raise
    return Handle(controllers)


def _has_hopper() -> bool:
    return torch.cuda.is_available() and any(
        torch.cuda.get_device_capability(device) == (9, 0) for device in range(torch.cuda.device_count())
    )


def disable(pipe_or_transformer: Any) -> None:
    """Leaves the pipeline or transformer as it was before `enable`; does nothing where that was not called."""
    _detach(_modules(pipe_or_transformer))
    for controller in enabled_through(pipe_or_transformer):  # a transformer that was replaced since
        controller.detach()


@contextmanager
def enabled(pipe_or_transformer: Any, **kwargs: Any) -> Iterator[Handle]:
    """`with rainfusion.enabled(pipe, sparsity=0.8) as handle:` enables, and puts back what was there before."""
    models = _modules(pipe_or_transformer)
    before = {name: vars(model)[ATTRIBUTE] for name, model in models.items() if ATTRIBUTE in vars(model)}
    _detach(models)
    handle = None
    try:
        handle = enable(pipe_or_transformer, **kwargs)
        yield handle
    finally:
        if handle is not None:
            handle.disable()
        for controller in before.values():
            controller.reattach()


def _detach(models: dict[str, nn.Module]) -> None:
    for model in models.values():
        controller = vars(model).get(ATTRIBUTE)
        if controller is not None:
            controller.detach()


def _transformers(target: Any) -> tuple[dict[str, nn.Module], Any]:
    """-> what to enable by name, and the pipeline if there is one."""
    if isinstance(target, nn.Module):
        return _modules(target), None
    modules = _modules(target)
    transformers = {name: module for name, module in modules.items() if known(module) is not None}
    unknown = [name for name in modules if name.startswith("transformer") and name not in transformers]
    if unknown:
        find(modules[unknown[0]])  # says how to add it
    if not transformers:
        kinds = ", ".join(f"{name}: {type(module).__name__}" for name, module in modules.items()) or "none"
        raise ValueError(
            f"{type(target).__name__} has no transformer that rainfusion knows; its models are: {kinds}. Pass a "
            "diffusers pipeline with a transformer, or the transformer itself"
        )
    return transformers, target


def _modules(target: Any) -> dict[str, nn.Module]:
    """The models of a pipeline by name; of a model, itself. Wrappers of torch.compile are taken off."""
    if isinstance(target, nn.Module):
        return {"transformer": getattr(target, "_orig_mod", target)}
    components = getattr(target, "components", None)
    if not isinstance(components, dict):
        raise TypeError(
            f"pipe_or_transformer must be a diffusers pipeline or its transformer, got {type(target).__name__}"
        )
    found: dict[str, nn.Module] = {}
    for name, component in components.items():
        module = getattr(component, "_orig_mod", component)
        if isinstance(module, nn.Module) and not any(module is other for other in found.values()):
            found[name] = module
    return found
