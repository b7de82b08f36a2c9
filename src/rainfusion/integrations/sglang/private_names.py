"""The one place that touches SGLang's names: its hooks, platforms, base classes and metadata.

All are in `sglang.multimodal_gen`, and nothing is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from rainfusion.integrations.hosts import Host

HOST = Host("SGLang", "sglang", ("0.5.23",))
LOGGER = "sglang.rainfusion"

_RUNTIME = "sglang.multimodal_gen.runtime"
_PLATFORMS = f"{_RUNTIME}.platforms"
_PRECISION = f"{_RUNTIME}.utils.precision"
_CHOICE = "get_attn_backend_cls_str"  # of a platform: an attention backend -> the path of its class
# of it, what is used once a layer of ours is there
_USED = ((_PLATFORMS, "AttentionBackendEnum"), (_PLATFORMS, "current_platform"), (_PRECISION, "get_compute_dtype"))


def register(class_path: str) -> bool:
    """Makes `rain_fusion_attn` lead to a class, unless the platform is Ascend's, which has its own. -> whether so"""
    with HOST.names():
        platforms = import_module(_PLATFORMS)
        hooks = import_module(f"{_PLATFORMS}.plugins")
        ours, platform = enum(), platforms.current_platform
        if platform.is_npu():
            return False
        owner = _owner(type(platform))
        target = f"{owner.__module__}.{owner.__qualname__}.{_CHOICE}"
        hooks.plugin_hook(target, hooks.HookType.AROUND)(_chooser(ours, class_path))
    return True


def _owner(platform: type) -> type:
    """The class that has the method itself: a hook on one that inherits it breaks every other backend."""
    for kind in platform.__mro__:
        if _CHOICE in vars(kind):
            return kind
    raise AttributeError(f"{platform.__name__}.{_CHOICE}")


def _chooser(ours: Any, class_path: str) -> Callable[..., Any]:
    """Around the platform's choice of a class."""

    def choose(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        asked = keywords.get("selected_backend", arguments[1] if len(arguments) > 1 else None)
        return class_path if asked is ours else original(*arguments, **keywords)

    return choose


def base_classes() -> tuple[Any, Any, Any, Any]:
    """`AttentionBackend`, `AttentionImpl`, `AttentionMetadata` and `AttentionMetadataBuilder`."""
    with HOST.names():
        module = import_module(f"{_RUNTIME}.layers.attention.backends.attention_backend")
        for other, name in _USED:
            getattr(import_module(other), name)
        return (
            module.AttentionBackend,
            module.AttentionImpl,
            module.AttentionMetadata,
            module.AttentionMetadataBuilder,
        )


def enum() -> Any:
    """What `--attention-backend rain_fusion_attn` becomes."""
    return import_module(_PLATFORMS).AttentionBackendEnum.RAIN_FUSION_ATTN


def dense(head_size: int, **arguments: Any) -> Any:
    """An implementation of what the platform would run by itself, for a layer with these arguments."""
    dtype = import_module(_PRECISION).get_compute_dtype()
    path = getattr(import_module(_PLATFORMS).current_platform, _CHOICE)(None, head_size, dtype)
    return resolve_name(path).get_impl_cls()(head_size=head_size, **arguments)
