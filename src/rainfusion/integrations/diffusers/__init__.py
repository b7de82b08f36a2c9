"""`rainfusion.enable(pipe)`: sparse self-attention in a diffusers pipeline, and off again.

models         one row for each transformer that is known, and `register_model` for others
grids          where the picture lies in the attention sequence, from the forward's arguments
steps          which denoising step it is
host           one transformer at work: reads scene and step, and hands calls over to the decider
attaching      putting sparse attention on a transformer's layers, and taking it off
scope          how the attention calls of a layer arrive
shards         the same, for a model that is spread over several processes
private_names  diffusers' private names, in one place

What is decided, and why, is in `rainfusion.integrations.decider`, which knows no diffusers.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rainfusion import backends, checks
from rainfusion.calls import Call, Shapes
from rainfusion.geometry import Geometry
from rainfusion.integrations.decider import Observer
from rainfusion.integrations.diffusers import private_names
from rainfusion.integrations.diffusers.host import ATTRIBUTE, Host, enabled_through
from rainfusion.integrations.diffusers.models import find, known, register_model
from rainfusion.integrations.diffusers.steps import Steps
from rainfusion.integrations.settings import OnUnsupported, ProfileSource, Settings, SkipLayers
from rainfusion.integrations.stats import Stats
from rainfusion.options import OPTION_NAMES, Method, MethodOptions
from rainfusion.prediction.calibration import Recorder, allocate
from rainfusion.profiles import OPTIONS as PROFILE_OPTIONS
from rainfusion.profiles import Profile
from rainfusion.qualities import QualityName
from rainfusion.schedules import ScheduleSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Handle", "Stats", "calibrate", "disable", "enable", "enabled", "register_model"]


class CalibrateOptions(MethodOptions, total=False):
    """The keywords of `calibrate`; see `enable` what they are."""

    start_step: int | float
    end_step: int | float
    skip_layers: SkipLayers
    min_tokens: int | None
    on_unsupported: OnUnsupported
    backend: str


class EnableOptions(CalibrateOptions, total=False):
    """The keywords of `enabled`; see `enable` what they are."""

    profile: ProfileSource | None
    schedule: ScheduleSource
    quality: QualityName | None


class Handle:
    """What `enable` returns: `stats()` says what happened, `disable()` ends it."""

    def __init__(self, hosts: dict[str, Host]) -> None:
        self._hosts = hosts

    @property
    def settings(self) -> Settings:
        """What was asked for; `settings.method` is the method."""
        return next(iter(self._hosts.values())).decider.settings

    @property
    def layers(self) -> list[str]:
        """The self-attention layers, in the order that `skip_layers` counts them (of the first transformer)."""
        return list(next(iter(self._hosts.values())).decider.layers)

    def stats(self) -> Stats:
        """What was counted since `enable`, or since `reset`. Waits for the device."""
        alone = len(self._hosts) == 1
        deciders = {"" if alone else name: host.decider for name, host in self._hosts.items()}
        return Stats.of({name: (decider.layers, decider.tally) for name, decider in deciders.items()})

    def reset(self) -> None:
        """Counts begin again, after a warm-up say."""
        for host in self._hosts.values():
            host.decider.reset()

    def disable(self) -> None:
        """Takes sparse attention off, unless it was enabled again since."""
        for host in self._hosts.values():
            host.detach()

    def __repr__(self) -> str:
        models = ", ".join(
            f"{name}: {len(host.decider.layers)} layers of {host.decider.model}" for name, host in self._hosts.items()
        )
        state = "" if all(host.attached for host in self._hosts.values()) else ", disabled"
        return f"<rainfusion in {models}{state}>"


def enable(
    pipe_or_transformer: Any,
    method: Method | None = None,
    *,
    start_step: int | float = 0,
    end_step: int | float = 0,
    skip_layers: SkipLayers = (),
    min_tokens: int | None = None,
    on_unsupported: OnUnsupported = "dense",
    profile: ProfileSource | None = None,
    schedule: ScheduleSource = "auto",
    backend: str = "auto",
    quality: QualityName | None = None,
    **changes: Unpack[MethodOptions],
) -> Handle:
    """Makes the self-attention of a diffusers pipeline, or of its transformer alone, sparse.

    Args:
        pipe_or_transformer: a pipeline (all of its transformers are enabled, and share one count of steps), or a model.
        method: how it is made sparse. None: `Method.recommended()`, which gave the best samples for their time
            (docs/quality.md).
        start_step: so many steps at the start stay dense; a float is a share of the steps.
        end_step: so many steps at the end stay dense; a float is a share of the steps.
        skip_layers: layers that stay dense: numbers, or text such as `"0-3,38"`; `handle.layers` lists them.
        min_tokens: shorter sequences stay dense. None: by the measured crossover, 2048 at least. 0: none does.
        on_unsupported: `"dense"`: a call that cannot be sparse is dense, and counted with its reason; or `"error"`.
        profile: instead of `sparsity`, a budget for each layer and head: a file or `Profile` of `calibrate`, with the
            token_order, predictor, compensate, first_frame and block_size that it was measured with.
        schedule: how the blocks of a run are shared out among its steps, of which `sparsity` is the mean: `"constant"`,
            `"falling"` (from five thirds of the mean density to a third of it), numbers at evenly spaced points of the
            run such as `[5, 3, 1]`, or a function of the share of it that is done. Only ratios count; dense steps are
            left out of it. `"auto"`: falling in videos from text, gently (`[2, 1]`) with 8 steps or fewer; constant in
            images, in videos from an image, with a profile, and in a transformer alone, which does not know its steps.
            From an image is what a pipeline makes whose call has an argument `image`, also where that is left out.
        backend: `"auto"`, or the name of the one that has to run, as for `sparse_attention`.
        quality: instead of `sparsity`, a word: `"high"` (0.75 of the blocks are skipped for video, 0.5 for images),
            `"balanced"` (0.85 and 0.6, as without a word) or `"fast"` (0.9 and 0.7). Other options go with it.
        changes: options of the method by name, such as `sparsity=0.8` or `predictor="mean"`, see `Method`. `sparsity`
            left out is 0.6 for images and 0.85 for video (0.8 with blocks of 64 or 128 keys); `compensate=None` is
            with rf_v2.

    Returns:
        a handle with `stats()` and `disable()`. Enabling again replaces the settings, and warns.
    """
    settings = Settings.check(
        method,
        changes,
        start_step=start_step,
        end_step=end_step,
        skip_layers=skip_layers,
        min_tokens=min_tokens,
        on_unsupported=on_unsupported,
        profile=profile,
        schedule=schedule,
        backend=backend,
        quality=quality,
    )
    return _start(pipe_or_transformer, settings)


def disable(pipe_or_transformer: Any) -> None:
    """Leaves the pipeline or transformer as it was before `enable`; does nothing where that was not called.

    Args:
        pipe_or_transformer: what was enabled.
    """
    _detach(_modules(pipe_or_transformer))
    for host in enabled_through(pipe_or_transformer):  # of a transformer that was replaced since
        host.detach()


@contextmanager
def enabled(
    pipe_or_transformer: Any, method: Method | None = None, **options: Unpack[EnableOptions]
) -> Iterator[Handle]:
    """`with rainfusion.enabled(pipe, sparsity=0.8) as handle:` enables, and puts back what was there before.

    Args:
        pipe_or_transformer: as for `enable`.
        method: as for `enable`.
        options: the keywords of `enable`.
    """
    with _put_back(pipe_or_transformer):
        handle = enable(pipe_or_transformer, method, **options)
        try:
            yield handle
        finally:
            handle.disable()


def calibrate(
    pipe_or_transformer: Any,
    run: Callable[[], Any],
    method: Method | None = None,
    **options: Unpack[CalibrateOptions],
) -> Profile:
    """Measures what each layer and head loses, while `run` makes a few samples, and shares out one density.

        profile = rainfusion.calibrate(pipe, lambda: pipe("a cat", num_inference_steps=8), sparsity=0.8)
        profile.save("wan.json")
        rainfusion.enable(pipe, profile="wan.json")

    Args:
        pipe_or_transformer: as for `enable`; attention stays dense meanwhile.
        run: makes one or a few samples with it, of the size that will be used; fewer steps will do.
        method: as for `enable`.
        options: the keywords of `enable` but `profile`, `quality`, `schedule` and `target_error`. `sparsity` is that of
            all heads together, protected blocks counted in; as in `enable` for videos if it is not given.
            `token_order`, `predictor`, `compensate`, `first_frame` and `block_size` are what the budgets are for, and
            the profile brings them along; the others hold while measuring. `min_tokens` is 0 if it is not given.
    """
    wanted: dict[str, Any] = {"min_tokens": 0, **options}
    allowed = {*OPTION_NAMES, *CalibrateOptions.__annotations__} - {"target_error"}
    unknown = sorted(wanted.keys() - allowed)
    if unknown:
        raise TypeError(
            "calibrate takes the options of enable but profile, quality, schedule and target_error, got "
            f"{', '.join(unknown)}"
        )
    if wanted.get("sparsity") is None:
        base = Method.recommended() if method is None else method
        size = wanted.get("block_size", base.block_size)
        wanted["sparsity"] = replace(base, block_size=size).video_sparsity if base.sparsity is None else base.sparsity
    share = checks.fraction("sparsity", wanted["sparsity"], zero=False)
    changes: Any = {name: wanted.pop(name) for name in OPTION_NAMES if name in wanted}
    settings = Settings.check(method, changes, **wanted)
    if settings.method.sparse_type == "ada_bsa":
        raise ValueError("sparse_type must be 'rf_v2', whose budgets are by head, got 'ada_bsa'")
    recorder = Recorder(share)
    with _put_back(pipe_or_transformer):
        handle = _start(pipe_or_transformer, settings, recorder.add)
        try:
            run()
            stats = handle.stats()
        finally:
            handle.disable()
    return _profile(recorder, stats, settings.method, share)


def _profile(recorder: Recorder, stats: Stats, method: Method, share: float) -> Profile:
    if not recorder.layers:
        raise ValueError(f"no attention call could be measured: {stats.summary}")
    missing = [name for name in stats.calls if name not in recorder.layers]
    if missing:
        warnings.warn(
            f"{len(missing)} of {len(stats.calls)} layers had no call to measure, {missing[0]} among them: with this "
            "profile they must be in skip_layers; more steps may reach them",
            stacklevel=3,
        )
    chosen = {name: getattr(method, name) for name in PROFILE_OPTIONS}
    calls = sum(layer.calls for layer in recorder.layers.values())
    return Profile(allocate(recorder.layers, share), share, chosen, dict(calls=calls))


# ---------------------------------------------------------------------------------------------------------------------
# all transformers of a pipeline


def _start(pipe_or_transformer: Any, settings: Settings, observer: Observer | None = None) -> Handle:
    """All transformers or none: everything is checked before anything is touched."""
    private_names.dispatch_module()
    models, pipeline = _transformers(pipe_or_transformer)
    if pipeline is None:
        _check_steps_are_known(settings)
    elif _takes_an_image(pipeline):
        settings = settings.from_image()
    steps = Steps(pipeline)
    hosts = {
        name: Host(model, find(model), settings, steps, "" if len(models) == 1 else name, observer)
        for name, model in models.items()
    }
    _warn(models, settings)
    _detach(models)
    try:
        for host in hosts.values():
            host.attach()
    except BaseException:
        for host in hosts.values():
            host.detach()
        raise
    return Handle(hosts)


def _takes_an_image(pipeline: Any) -> bool:
    """By the arguments of its call: what a call was given is not known to its transformer."""
    try:
        return "image" in inspect.signature(type(pipeline).__call__).parameters
    except (AttributeError, TypeError, ValueError):  # nothing to call, or nothing that Python can tell
        return False


def _check_steps_are_known(settings: Settings) -> None:
    for name, steps in (("start_step", settings.start_step), ("end_step", settings.end_step)):
        if steps and (name == "end_step" or isinstance(steps, float)):
            raise ValueError(
                f"{name}={steps} needs the number of steps, which a transformer alone does not know: enable the "
                "pipeline"
            )
    if not (settings.schedule.is_constant or settings.schedule.is_auto):
        raise ValueError(
            "schedule needs the number of steps, which a transformer alone does not know: enable the pipeline"
        )


def _warn(models: dict[str, nn.Module], settings: Settings) -> None:
    """For the line that called `enable`."""
    reason = _why_no_kernels(settings)
    if reason is not None:
        warnings.warn(f"attention will be dense, for lack of kernels: {reason}", stacklevel=4)
    if any(ATTRIBUTE in vars(model) for model in models.values()):
        warnings.warn("rainfusion was enabled here already: the new settings replace the old ones", stacklevel=4)


def _why_no_kernels(settings: Settings) -> str | None:
    """Why no backend has kernels of this precision on any device here, for a usual call; None if one has."""
    if settings.method.precision == "native":
        return None
    size, reasons = (1, 1, 128, 128), list[str]()
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    call = Call(settings.method.for_frames(1), Geometry(), 1.0, False, settings.backend, False, False, False, False)
    for device in devices:
        name, reasons = backends.find(call, Shapes(size, size, torch.bfloat16, device))
        if name is not None:
            return None
    return f"{'; '.join(reasons)} (precision={settings.method.precision!r})"


@contextmanager
def _put_back(pipe_or_transformer: Any) -> Iterator[None]:
    """Takes off what is enabled, for a while."""
    models = _modules(pipe_or_transformer)
    before = [vars(model)[ATTRIBUTE] for model in models.values() if ATTRIBUTE in vars(model)]
    _detach(models)
    try:
        yield
    finally:
        for host in before:
            host.attach()


def _detach(models: dict[str, nn.Module]) -> None:
    for model in models.values():
        host = vars(model).get(ATTRIBUTE)
        if host is not None:
            host.detach()


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
