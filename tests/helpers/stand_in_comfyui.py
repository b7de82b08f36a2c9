"""ComfyUI's side of the contract, as small as it can be: a patcher, wrappers, attention with an override, a model.

`tests/hosts/comfyui` runs the same with the real one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def dense_attention(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """What a backend of ComfyUI does; a mask of three dimensions has no heads."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.ndim == 3:
        mask = mask.unsqueeze(1)
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def attention(*args: Any, transformer_options: dict[str, Any], **kwargs: Any) -> Tensor:
    kwargs["transformer_options"] = transformer_options
    override = transformer_options.get("optimized_attention_override")
    return dense_attention(*args, **kwargs) if override is None else override(dense_attention, *args, **kwargs)


class Executor:
    """Wrappers around a forward, outermost first."""

    def __init__(self, original: Callable[..., Any], class_obj: Any, wrappers: list[Any], number: int = 0) -> None:
        self.original, self.class_obj, self.wrappers, self.number = original, class_obj, wrappers, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Executor(self.original, self.class_obj, self.wrappers, self.number + 1).execute(*args, **kwargs)

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        if self.number == len(self.wrappers):
            return self.original(*args, **kwargs)
        return self.wrappers[self.number](self, *args, **kwargs)


class SelfAttention(nn.Module):
    def forward(self, x: Tensor, transformer_options: dict[str, Any], **how: Any) -> Tensor:
        q, k, v = x * 1.5, x * 0.5, x
        return x + attention(q, k, v, how.pop("heads", 2), transformer_options=transformer_options, **how)


class Block(nn.Module):
    """Self-attention, then attention to text."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = SelfAttention()

    def forward(self, x: Tensor, text: Tensor, transformer_options: dict[str, Any], **how: Any) -> Tensor:
        x = self.self_attn(x, transformer_options, **how)
        return x + attention(x, text, text, 2, transformer_options=transformer_options)


class WanModel(nn.Module):
    """Named as ComfyUI's, whose row it is found by; tokens are sums over patches."""

    patch_size = (1, 2, 2)

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.how: dict[str, Any] = {}
        self.eval()

    def forward(self, x: Tensor, timestep: Any, context: Tensor, transformer_options: Any = None, **kwargs: Any) -> Any:
        options = {} if transformer_options is None else transformer_options
        wrappers = [wrapper for several in options.get("wrappers", {}).values() for wrapper in several]
        return Executor(self._forward, self, wrappers).execute(x, timestep, context, options, **kwargs)

    def _forward(self, x, timestep, context, transformer_options, time_dim_concat=None, **kwargs):
        tokens = nn.functional.avg_pool3d(x, self.patch_size).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens, context, transformer_options, **self.how)
        return tokens


class Patcher:
    """A MODEL."""

    def __init__(self, transformer: nn.Module) -> None:
        sampling = SimpleNamespace(percent_to_sigma=lambda share: 1.0 - share)
        self.model = SimpleNamespace(diffusion_model=transformer, model_sampling=sampling)
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.callbacks: dict[str, dict[str, list[Any]]] = {}

    def clone(self) -> Patcher:
        other = Patcher(self.model.diffusion_model)
        other.model = self.model
        for name in ("model_options", "wrappers", "callbacks"):
            setattr(
                other, name, {k: {key: copy.copy(x) for key, x in v.items()} for k, v in getattr(self, name).items()}
            )
        return other

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def add_callback_with_key(self, kind: str, key: str, callback: Any) -> None:
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, kind: str, key: str) -> None:
        self.callbacks.get(kind, {}).pop(key, None)

    def get_model_object(self, name: str) -> Any:
        return getattr(self.model, name)

    def _call(self, kind: str) -> None:
        for several in self.callbacks.get(kind, {}).values():
            for callback in several:
                callback(self)

    def sample(
        self,
        x: Tensor,
        text: Tensor,
        sigmas: tuple[float, ...] = (1.0, 0.5),
        *,
        denoise_mask: Tensor | None = None,
        conditioning: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Tensor]:
        """A forward for each noise level, as a sampler makes them."""

        def run(x: Tensor, sigmas: tuple[float, ...], denoise_mask: Tensor | None = None) -> list[Tensor]:
            self._call("on_pre_run")
            try:
                return [self._forward(x, text, sigma, kwargs) for sigma in sigmas]
            finally:
                self._call("on_cleanup")

        guider = SimpleNamespace(conds={"positive": [{"uuid": 1, **(conditioning or {})}], "negative": [{"uuid": 2}]})
        wrappers = [wrapper for several in self.wrappers.get("outer_sample", {}).values() for wrapper in several]
        return Executor(run, guider, wrappers).execute(x, sigmas, denoise_mask)

    def _forward(self, x: Tensor, text: Tensor, sigma: float, kwargs: dict[str, Any]) -> Tensor:
        options = dict(self.model_options["transformer_options"])
        options |= {"wrappers": self.wrappers.get("diffusion_model", {}), "sigmas": torch.tensor([sigma])}
        self.travelled = options  # what the last forward had with it
        return self.model.diffusion_model(x, sigma, text, transformer_options=options, **kwargs)


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.19.3") -> None:
    """`comfy.patcher_extension` and `comfyui_version` can be imported."""
    extension = ModuleType("comfy.patcher_extension")
    extension.WrappersMP = SimpleNamespace(  # type: ignore[attr-defined]
        DIFFUSION_MODEL="diffusion_model", OUTER_SAMPLE="outer_sample"
    )
    extension.CallbacksMP = SimpleNamespace(  # type: ignore[attr-defined]
        ON_PRE_RUN="on_pre_run", ON_CLEANUP="on_cleanup"
    )
    said = ModuleType("comfyui_version")
    said.__version__ = version  # type: ignore[attr-defined]
    for name, module in {
        "comfy": ModuleType("comfy"),
        "comfy.patcher_extension": extension,
        "comfyui_version": said,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
