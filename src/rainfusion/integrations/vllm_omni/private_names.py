"""The one place that touches vLLM-Omni's names: its registry, base classes, metadata and contexts.

Nothing of it is imported before it is needed: `register` reads two modules, the classes in `backend` the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rainfusion.integrations.hosts import Host
from rainfusion.integrations.vllm_omni.rules import Facts, Layout, Span, mask_in_words

HOST = Host("vLLM-Omni", "vllm-omni", ("0.30.0",))
LOGGER = "vllm_omni.rainfusion"  # its logging shows what is below vllm_omni
NAME = "RAINFUSION_ATTN"

_ATTENTION = "vllm_omni.diffusion.attention"
_SELECTOR = f"{_ATTENTION}.selector"
_CONTEXT = "vllm_omni.diffusion.forward_context"
_CONFIG = "vllm_omni.diffusion.config"
# functions of it that are called once a layer of ours is there
_USED = (
    (_SELECTOR, "get_attn_backend_for_role"),
    (_SELECTOR, "get_attn_backend_for_capability"),
    (_CONTEXT, "is_forward_context_available"),
    (_CONTEXT, "get_forward_context"),
    (_CONFIG, "get_current_diffusion_config_or_none"),
)


def register(class_path: str) -> bool:
    """Makes `RAINFUSION_ATTN` lead to a class, unless the platform is Ascend's, which has its own. -> whether it did"""
    with HOST.names():
        platform = import_module("vllm_omni.platforms").current_omni_platform
        registry = import_module(f"{_ATTENTION}.backends.registry")
        backend = getattr(registry.DiffusionAttentionBackendEnum, NAME)
        if platform.is_npu():
            return False
        registry.register_diffusion_backend(backend, class_path)
    return True


def base_classes() -> tuple[Any, Any]:
    """`AttentionBackend` and `AttentionImpl`, after a look at everything else that is used."""
    with HOST.names():
        abstract = import_module(f"{_ATTENTION}.backends.abstract")
        for module, name in _USED:
            getattr(import_module(module), name)
        return abstract.AttentionBackend, abstract.AttentionImpl


# ---------------------------------------------------------------------------------------------------------------------
# dense attention


def dense(role: str, **arguments: Any) -> Any:
    """An implementation of what the platform would run by itself, for a layer with these arguments."""
    backend, _ = import_module(_SELECTOR).get_attn_backend_for_role(
        role=role, head_size=arguments["head_size"], attention_config=None, allow_trtllm_default=False
    )
    return backend.get_impl_cls()(role=role, backend_kwargs=None, **arguments)


def dense_backend() -> Any:
    """The class of what the platform would run by itself, to ask what it can do."""
    return import_module(_SELECTOR).get_attn_backend_for_capability(role="self", attention_config=None)


# ---------------------------------------------------------------------------------------------------------------------
# what it says


def degrees() -> tuple[int, int]:
    """Of ring and of all-gather parallelism, in the model that is being made."""
    config = import_module(_CONFIG).get_current_diffusion_config_or_none()
    parallel = getattr(config, "parallel_config", None)
    return getattr(parallel, "ring_degree", 1), getattr(parallel, "allgather_degree", 1)


def facts(layer: int | None, qkv_layout: str | None, metadata: Any) -> Facts:
    """Of a call, as plain values."""
    step, steps = _steps()
    found = Facts(layer=layer, step=step, steps=steps, qkv_layout=qkv_layout, has_metadata=metadata is not None)
    if metadata is None or metadata.video_layout is None:
        return found
    layout = _layout(metadata.video_layout)
    rows = metadata.extra.get("max_seqlen_q")
    return found._replace(
        layout=layout, special=_special(metadata, layout), packed_rows=None if rows is None else int(rows)
    )


def kv_cache_dtype(metadata: Any) -> str | None:
    return None if metadata is None else metadata.extra.get("kv_cache_dtype")


def _steps() -> tuple[int | None, int | None]:
    contexts = import_module(_CONTEXT)
    if not contexts.is_forward_context_available():
        return None, None
    context = contexts.get_forward_context()
    return context.denoise_step_idx, context.total_denoise_steps


def _layout(found: Any) -> Layout:
    return Layout(
        prefix=None if found.prefix_len is None else int(found.prefix_len),
        grid=None if found.latent_grid is None else _grid(found.latent_grid),
        used=None if found.used_len is None else int(found.used_len),
        spans=[Span(int(span.start), _grid(span.latent_grid), span.role) for span in found.video_spans or ()],
    )


def _grid(found: Any) -> Any:
    return tuple(int(size) for size in found)


def _special(metadata: Any, layout: Layout) -> str | None:
    if metadata.full_attn_spans is not None:
        return "full_attn_spans: tokens that see a part of the sequence"
    mask = metadata.attn_mask
    return None if mask is None else mask_in_words(mask.dim(), str(mask.dtype) == "torch.bool", layout.used is not None)
