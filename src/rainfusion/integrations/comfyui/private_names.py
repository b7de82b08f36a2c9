"""The one place that touches ComfyUI's names: its model patcher, its hooks, what travels in `transformer_options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rainfusion.integrations.hosts import Host

HOST = Host("ComfyUI", "comfyui", ("0.3.64", "0.3.75", "0.8.0", "0.19.3"))
KEY = "rainfusion"  # of our wrapper and callbacks in a patcher
Override = Callable[..., Tensor]  # (dense attention, q, k, v, heads, ...) -> its result
_OVERRIDE = "optimized_attention_override"
_IMAGES = ("concat_latent_image", "concat_mask", "ref_latent")  # in a conditioning: a picture or video beside text
_PATCHER = ("clone", "model", "model_options", "wrappers", "add_wrapper_with_key", "remove_wrappers_with_key",
            "add_callback_with_key", "remove_callbacks_with_key", "get_model_object")  # fmt: skip

# what dense attention is called with beside the tensors, and what does not change a result
_HARMLESS = frozenset(("transformer_options", "_inside_attn_wrapper", "low_precision_attention", "enable_gqa"))


def version() -> str | None:
    """ComfyUI is a folder, not a package: a module in it says its version."""
    try:
        return str(import_module("comfyui_version").__version__)
    except (ImportError, AttributeError):
        return HOST.version()


def node_api() -> Any:
    """What nodes are made of: `io`, `ui`, `ComfyExtension`."""
    # a clone asks, too, for which pip checked nothing
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
        raise ImportError(f"rainfusion needs torch 2.11 or later, found {torch.__version__}: update ComfyUI's torch")
    with HOST.names(version()):
        api = import_module("comfy_api.latest")
        for name in ("io", "ui", "ComfyExtension"):
            getattr(api, name)
    return api


# ---------------------------------------------------------------------------------------------------------------------
# the model patcher


def diffusion_model(patcher: Any) -> torch.nn.Module:
    """The transformer in what ComfyUI hands around as a MODEL."""
    missing = [name for name in _PATCHER if not hasattr(patcher, name)]
    if missing:
        raise TypeError(
            f"model must be a MODEL of ComfyUI, a ModelPatcher, got {type(patcher).__name__}, which has no "
            f"{', '.join(missing)}: {HOST.misfit('may be too old for it', version())}"
        )
    model = patcher.model.diffusion_model
    found: torch.nn.Module = getattr(model, "_orig_mod", model)  # of a compiled one
    return found


class _Places(NamedTuple):
    """Where a patcher keeps what is called around a forward and around a run, and before and after a run."""

    around: str
    around_run: str
    before_run: str
    after_run: str


def _places() -> _Places:
    with HOST.names(version()):
        names = import_module("comfy.patcher_extension")
        wrappers, callbacks = names.WrappersMP, names.CallbacksMP
        return _Places(wrappers.DIFFUSION_MODEL, wrappers.OUTER_SAMPLE, callbacks.ON_PRE_RUN, callbacks.ON_CLEANUP)


def attach(
    patcher: Any,
    around: Callable[..., Any],
    around_run: Callable[..., Any],
    before_run: Callable[[Any], None],
    after_run: Callable[[Any], None],
) -> None:
    """`around` every forward of the transformer; the others around, before and after a run of a sampler."""
    detach(patcher)
    places = _places()
    patcher.add_wrapper_with_key(places.around, KEY, around)
    patcher.add_wrapper_with_key(places.around_run, KEY, around_run)
    patcher.add_callback_with_key(places.before_run, KEY, before_run)
    patcher.add_callback_with_key(places.after_run, KEY, after_run)


def detach(patcher: Any) -> None:
    """Takes off what an earlier `attach` put on this patcher, or on one that it was cloned from."""
    places = _places()
    for place in (places.around, places.around_run):
        patcher.remove_wrappers_with_key(place, KEY)
    for event in (places.before_run, places.after_run):
        patcher.remove_callbacks_with_key(event, KEY)


def attached(patcher: Any) -> Any | None:
    """What `attach` put around the forwards of this patcher."""
    found = patcher.wrappers.get(_places().around, {}).get(KEY, [])
    return found[-1] if found else None


def sigma_at(patcher: Any, share: float) -> float:
    """The noise level after this share of the schedule, with the patcher's own shift."""
    with HOST.names(version()):
        return float(patcher.get_model_object("model_sampling").percent_to_sigma(share))


# ---------------------------------------------------------------------------------------------------------------------
# a run of a sampler, a forward of the transformer


def is_from_image(executor: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run begins with a picture: its conditioning has one, or its latents have a mask of what is given."""
    conditions = getattr(executor.class_obj, "conds", None) or {}
    given = any(
        condition.get(name) is not None for each in conditions.values() for condition in each for name in _IMAGES
    )
    return given or arguments(executor, args, kwargs).get("denoise_mask") is not None


def arguments(executor: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a wrapper was given, by the names of what it is around, with further keywords beside them."""
    with HOST.names(version()):
        signature = inspect.signature(executor.original)
    found = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found.update(found.pop(name, {}))
    return found


def options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The dict that travels with a forward, in a forward's arguments."""
    found = given.get("transformer_options")
    return found if isinstance(found, dict) else {}


def sigma(travelling: Mapping[str, Any]) -> float | None:
    """The noise level of this forward, if the sampler says it. Waits for the device."""
    sigmas = travelling.get("sigmas")
    return float(sigmas.max()) if isinstance(sigmas, Tensor) and sigmas.numel() else None


def steps(travelling: Mapping[str, Any]) -> int | None:
    """How many steps the sampler makes, if it says so."""
    levels = travelling.get("sample_sigmas")
    return len(levels) - 1 if isinstance(levels, Tensor) and levels.dim() == 1 and len(levels) > 1 else None


def override_of(travelling: Mapping[str, Any]) -> Override | None:
    """Who answers the attention calls of this forward, if another node wants to."""
    return travelling.get(_OVERRIDE)


@contextmanager
def overriding(travelling: dict[str, Any], override: Override) -> Iterator[None]:
    """While the forward runs, its attention calls go to `override`."""
    previous = {_OVERRIDE: travelling[_OVERRIDE]} if _OVERRIDE in travelling else {}
    travelling[_OVERRIDE] = override
    try:
        yield
    finally:
        travelling.pop(_OVERRIDE, None)
        travelling.update(previous)


# ---------------------------------------------------------------------------------------------------------------------
# an attention call


class Attention(NamedTuple):
    """An attention call as [B, N, S, D], and how its result is wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float | None
    special: str | None  # what else is asked for, in words
    heads_apart: bool  # the result stays [B, N, S, D]

    def result(self, out: Tensor) -> Tensor:
        return out if self.heads_apart else out.transpose(1, 2).flatten(2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    scale: float | None = None,
    **more: Any,
) -> Attention:
    """From the arguments of ComfyUI's attention functions: [B, N, S, D] with `skip_reshape`, else [B, S, N * D].

    `attn_precision` says in which dtype logits are computed: always fp32 here.
    """
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (q, k, v))
    asked = [name for name, value in more.items() if name not in _HARMLESS and value is not None and value is not False]
    special = f"{', '.join(sorted(asked))} asked for with the call" if asked else None
    return Attention(q, k, v, mask, scale, special, skip_output_reshape)
