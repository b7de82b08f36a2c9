"""RainFusion's nodes: this folder, or a link to it, in ComfyUI/custom_nodes.

`pip install rainfusion` in ComfyUI's Python makes the package known; linked from a clone of the repository, it is
found there.
"""

import sys
from pathlib import Path

try:
    import rainfusion.integrations.comfyui  # noqa: F401
except ImportError:  # not installed, too old, or a folder of that name came first
    for name in [name for name in sys.modules if name.split(".")[0] == "rainfusion"]:
        del sys.modules[name]
    sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from rainfusion.integrations.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, comfy_entrypoint

WEB_DIRECTORY = "./web"  # help pages

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY", "comfy_entrypoint"]
