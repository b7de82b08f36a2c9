"""SGLang for diffusion models: its backend `rain_fusion_attn` on GPUs. Installed next to it, rainfusion is found.

rules          options, and when a call is dense; no host inside
backend        the classes that SGLang loads
private_names  the one place that touches SGLang's names

SGLang calls `register` in each of its processes (entry point `sglang.multimodal_gen.plugins`). Importing this package
imports nothing of it. Guide: docs/sglang.md.
"""

from __future__ import annotations

from rainfusion.integrations.serving import Engine, register_with
from rainfusion.integrations.sglang import private_names
from rainfusion.integrations.stats import Stats

__all__ = ["register", "stats"]

ENGINE = Engine(private_names.HOST.name, logger=private_names.LOGGER)


def register() -> None:
    """Makes SGLang's `rain_fusion_attn` this one, but on Ascend NPUs, where it stays SGLang's own.

    With an SGLang that lacks what is used of it, a warning says so, and it runs without us.
    """
    register_with(
        private_names.HOST, lambda: private_names.register("rainfusion.integrations.sglang.backend.RainfusionBackend")
    )


def stats() -> Stats:
    """What the attention calls of this process did: how many were sparse, why others were not. Waits for the device.

    A worker's calls are known in the worker.
    """
    return ENGINE.stats()
