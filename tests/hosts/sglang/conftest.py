"""SGLang on a CPU: the pieces that it lacks there, its plug-ins loaded as in a worker, counts that begin anew."""

import gc
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29655", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")

import pytest
import sgl_kernel_ops  # noqa: F401
import torch
import torchvision_ops  # noqa: F401
from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks, load_plugins

torch.set_num_threads(2)
load_plugins()
apply_plugin_hooks()

CONFIG = "skip_first_steps=1,sparsity=0.7"
COMPONENTS = {
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


@pytest.fixture(scope="session")
def server_args(tmp_path_factory):
    """Those of a server for Wan 2.1, of whose files the names are there."""
    from sglang.multimodal_gen.runtime.distributed.parallel_state import (
        maybe_init_distributed_environment_and_model_parallel,
    )
    from sglang.multimodal_gen.runtime.server_args import ServerArgs, set_global_server_args

    folder = tmp_path_factory.mktemp("models") / "Wan2.1-T2V-1.3B-Diffusers"
    for name in COMPONENTS:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps({"_class_name": COMPONENTS[name][1]}))
    index = {"_class_name": "WanPipeline", "_diffusers_version": "0.33.0", **COMPONENTS}
    (folder / "model_index.json").write_text(json.dumps(index))
    arguments = ServerArgs.from_kwargs(
        model_path=str(folder), attention_backend="rain_fusion_attn", attention_backend_config=CONFIG
    )
    set_global_server_args(arguments)
    maybe_init_distributed_environment_and_model_parallel(tp_size=1, sp_size=1)
    return arguments


@pytest.fixture(autouse=True)
def fresh_counts():
    from rainfusion.integrations import sglang

    gc.collect()  # the layers of other tests
    torch.manual_seed(0)
    sglang.ENGINE.reset()
    yield
    sglang.ENGINE.reset()


@pytest.fixture
def stage(server_args):
    """Metadata as a denoising stage makes them: by step and shape of the latents."""
    from types import SimpleNamespace

    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage

    from rainfusion.integrations.sglang.backend import RainfusionBackend

    def metadata(step, latents, arguments=server_args):
        batch = SimpleNamespace(raw_latent_shape=latents)
        return DenoisingStage._build_attn_metadata(
            SimpleNamespace(attn_backend=RainfusionBackend), step, batch, arguments
        )

    return metadata
