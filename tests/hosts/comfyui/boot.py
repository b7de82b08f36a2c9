"""ComfyUI on a CPU, from the folder that COMFYUI_PATH names, without torchvision and torchaudio.

Their builds for a CPU's torch are not everywhere, and no model here needs them: empty modules take their place.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

_ABSENT = ("torchvision", "torchaudio")


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules in which every name is an empty class."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = "0"  # type: ignore[attr-defined]

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def start() -> str:
    """Makes `import comfy` work; the version."""
    path = os.environ["COMFYUI_PATH"]
    sys.meta_path.insert(0, _Empty())
    sys.path.insert(0, path)
    sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfyui_version

    return str(comfyui_version.__version__)
