"""vLLM-Omni on a CPU: the pieces that it lacks there, its plug-ins loaded as in a worker, counts that begin anew."""

import gc
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "plugin")]  # the platform is found by its entry point
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", VLLM_LOGGING_LEVEL="INFO")

import pytest
import torch
import torchvision_ops  # noqa: F401
from vllm_omni.plugins import load_omni_general_plugins

torch.set_num_threads(2)
load_omni_general_plugins()


@pytest.fixture(autouse=True)
def fresh_counts():
    import cpu_sdpa

    from rainfusion.integrations import vllm_omni

    gc.collect()  # the layers of other tests
    torch.manual_seed(0)
    vllm_omni.ENGINE.reset()
    cpu_sdpa.CALLS.clear()
    yield
    vllm_omni.ENGINE.reset()
