"""vLLM-Omni: its backend `RAINFUSION_ATTN` on GPUs. Installed next to it, rainfusion is found by itself.

rules          options, refusals, and when a call is dense; no host inside
backend        the classes that vLLM-Omni loads
private_names  the one place that touches vLLM-Omni's names

vLLM-Omni calls `register` in each of its processes (entry point `vllm_omni.general_plugins`). Importing this package
imports nothing of it. Guide: docs/vllm_omni.md.
"""

from __future__ import annotations

from rainfusion.integrations.serving import Engine, register_with
from rainfusion.integrations.stats import Stats
from rainfusion.integrations.vllm_omni import private_names

__all__ = ["register", "stats"]

ENGINE = Engine(private_names.HOST.name, logger=private_names.LOGGER, native="block_sparse.precision='bf16'")


def register() -> None:
    """Makes vLLM-Omni's `RAINFUSION_ATTN` this one, but on Ascend NPUs, where it stays vLLM-Omni's own.

    With a vLLM-Omni that lacks what is used of it, a warning says so, and it runs without us.
    """
    register_with(
        private_names.HOST,
        lambda: private_names.register("rainfusion.integrations.vllm_omni.backend.RainfusionBackend"),
    )


def stats() -> Stats:
    """What the attention calls of this process did: how many were sparse, why others were not. Waits for the device.

    A worker's calls are known in the worker.
    """
    return ENGINE.stats()
