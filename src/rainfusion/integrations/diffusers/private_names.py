"""The one place that touches diffusers' private names: a pseudo-backend for `dispatch_attention_fn`.

diffusers finds an attention function in a registry, by a member of a closed enum. A value of the enum's type that is
not among its members passes for one. Only the self-attention processors of enabled models have it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

TESTED = "0.42.1"
# backends that call torch's function
THROUGH_SDPA = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")
_REGISTRY_NAMES = ("_backends", "_constraints", "_supported_arg_names", "_supports_context_parallel", "_active_backend")
_ARGUMENTS = frozenset(
    ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "_parallel_config")
)


@lru_cache(maxsize=1)
def dispatch_module() -> Any:
    """diffusers.models.attention_dispatch, checked for everything that is used here."""
    try:
        found = version("diffusers")
    except PackageNotFoundError:
        found = "of an unknown version"
    try:
        module = import_module("diffusers.models.attention_dispatch")
    except ImportError as error:
        raise ImportError(
            f"rainfusion.enable needs diffusers with attention backends ({TESTED} is what it is tested with): "
            f"pip install diffusers=={TESTED} ({error})"
        ) from error
    registry = getattr(module, "_AttentionBackendRegistry", None)
    names = ("AttentionBackendName", "dispatch_attention_fn", "_AttentionBackendRegistry")
    missing = [name for name in names if not hasattr(module, name)]
    missing += [f"_AttentionBackendRegistry.{name}" for name in _REGISTRY_NAMES if not hasattr(registry, name)]
    if missing:
        raise ImportError(
            f"rainfusion.enable works with diffusers {TESTED}; diffusers {found} has no {', '.join(missing)} in "
            f"models/attention_dispatch.py: pip install diffusers=={TESTED}, or call rainfusion.sparse_attention "
            "yourself"
        )
    return module


@lru_cache(maxsize=1)
def backend(function: Callable[..., Tensor]) -> Any:
    """A value for `processor._attention_backend` that leads to `function`.

    It stays in the registry: compiled models look at the whole of it, and would have to be compiled again.
    """
    module = dispatch_module()
    name = "rainfusion"
    value = str.__new__(module.AttentionBackendName, name)
    value._name_, value._value_ = name.upper(), name
    registry = module._AttentionBackendRegistry
    registry._backends[value] = function
    registry._constraints[value] = []
    registry._supported_arg_names[value] = _ARGUMENTS
    registry._supports_context_parallel.add(name)
    return value


def dispatch(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """What the processor would have called: `backend` None is the active one of the process."""
    return dispatch_module().dispatch_attention_fn(query, key, value, **kwargs)  # type: ignore[no-any-return]


def active_backend() -> str:
    return str(dispatch_module()._AttentionBackendRegistry._active_backend.value)


# ---------------------------------------------------------------------------------------------------------------------
# context parallelism


def context_parallelism(config: Any) -> Any | None:
    """diffusers' own ContextParallelConfig in what a model or a processor has as its parallel config."""
    return None if is_foreign(config) else getattr(config, "context_parallel_config", None)


def is_foreign(config: Any) -> bool:
    """Whether a model is spread over processes by somebody else than diffusers."""
    if config is None:
        return False
    whole, context = _parallel_types()
    found = getattr(config, "context_parallel_config", None)
    return not isinstance(config, whole) or (found is not None and not isinstance(found, context))


def is_tensor_parallel(config: Any) -> bool:
    """Whether diffusers shares out the heads of every layer, and each process has all tokens."""
    return not is_foreign(config) and getattr(config, "tensor_parallel_config", None) is not None


@lru_cache(maxsize=1)
def _parallel_types() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """ParallelConfig and ContextParallelConfig, where this diffusers has them."""
    try:
        module = import_module("diffusers.models._modeling_parallel")
        return (module.ParallelConfig,), (module.ContextParallelConfig,)
    except (ImportError, AttributeError):
        return (), ()


# ---------------------------------------------------------------------------------------------------------------------
# hooks around a module's forward


def forget_forward(module: Any, old: Any, new: Any) -> None:
    """In diffusers' hooks around a module: a forward that they would put back one day becomes another one."""
    for reference in getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ()):
        for name in ("forward", "original_forward"):
            if getattr(reference, name, None) is old:
                setattr(reference, name, new)
