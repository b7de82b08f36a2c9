"""A clone of this repository in ComfyUI/custom_nodes is RainFusion's nodes. The package itself is in src/rainfusion."""

import sys
from pathlib import Path

try:
    import rainfusion.integrations.comfyui  # noqa: F401
except ImportError:  # not installed, too old, or this folder came first
    for name in [name for name in sys.modules if name.split(".")[0] == "rainfusion"]:
        del sys.modules[name]
    sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from rainfusion.integrations.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, comfy_entrypoint

WEB_DIRECTORY = "src/rainfusion/integrations/comfyui/custom_node/web"  # help pages

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY", "comfy_entrypoint"]
