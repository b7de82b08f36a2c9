"""vLLM-Omni's own Wan transformer, tiny and with random weights, 6,144 tokens: sparse steps, dense steps, compiled."""

import gc
import logging
import re
from pathlib import Path

import cpu_sdpa
import pytest
import torch
from torch._dynamo.utils import counters
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm_omni.diffusion.compile import regionally_compile
from vllm_omni.diffusion.config import set_current_diffusion_config
from vllm_omni.diffusion.data import AttentionConfig, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm_omni.diffusion.forward_context import get_forward_context, set_forward_context

from rainfusion.integrations import vllm_omni

SIZES = dict(num_attention_heads=2, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=32, freq_dim=32)
SELF = {"blocks.0.attn1", "blocks.1.attn1"}


@pytest.fixture(scope="module")
def vllm_config():
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method="env://")
        initialize_model_parallel()
    return config


def config(attention):
    return OmniDiffusionConfig(dtype=torch.float32, diffusion_attention_config=AttentionConfig(**attention))


SPARSE = {"per_role": {"self": {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.8, "start_step": 1}}}}
EVERYWHERE = {"default": {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.8, "start_step": 1}}}


def build(vllm_config, attention):
    from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel

    torch.manual_seed(0)
    with set_current_vllm_config(vllm_config), set_current_diffusion_config(config(attention)):
        model = WanTransformer3DModel(**SIZES, ffn_dim=128, num_layers=2)
    for name, weight in sorted(model.named_parameters()):  # those of one dimension are not initialised
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.05)
        else:
            torch.nn.init.constant_(weight, float(not name.endswith("bias")))
    for module in model.modules():  # what their loader does once the weights are there
        if hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
            module.quant_method.process_weights_after_loading(module)
    return model.eval()


def run(model, vllm_config, attention, step, steps=None):
    torch.manual_seed(1)
    latents, text = torch.randn(1, 4, 8, 48, 64), torch.randn(1, 16, 32)
    context = set_forward_context(vllm_config=vllm_config, omni_diffusion_config=config(attention))
    with torch.inference_mode(), context:
        get_forward_context().denoise_step_idx, get_forward_context().total_denoise_steps = step, steps
        return model(latents, torch.tensor([500]), text, return_dict=False)[0]


def test_sparse_and_dense_steps(vllm_config):
    model = build(vllm_config, SPARSE)
    reference = run(build(vllm_config, {"default": "TORCH_SDPA"}), vllm_config, {"default": "TORCH_SDPA"}, 0)
    dense = run(model, vllm_config, SPARSE, 0)
    assert vllm_omni.stats().reasons == {"the first steps are dense (start_step)": 2}
    torch.testing.assert_close(dense, reference)
    cpu_sdpa.CALLS.clear()
    sparse = run(model, vllm_config, SPARSE, 1)
    assert not SELF & set(cpu_sdpa.CALLS) and cpu_sdpa.CALLS  # cross-attention stays the platform's
    stats = vllm_omni.stats()
    assert stats.calls == {"blocks.0.attn1": (1, 1), "blocks.1.attn1": (1, 1)}
    assert stats.layouts == {"grid 8x24x32": 2}
    error = (sparse - reference).norm() / reference.norm()
    assert sparse.isfinite().all() and 0 < error < 0.5


def test_chosen_for_all_roles_cross_attention_is_dense(vllm_config):
    model = build(vllm_config, EVERYWHERE)
    run(model, vllm_config, EVERYWHERE, 1)
    stats = vllm_omni.stats()
    assert (stats.sparse_calls, stats.dense_calls) == (2, 2) and len(stats.calls) == 4
    assert stats.reasons == {"the model says nothing of the call, as in cross-attention": 2}


def test_two_transformers_of_one_pipeline(vllm_config):
    first, second = build(vllm_config, SPARSE), build(vllm_config, SPARSE)
    run(first, vllm_config, SPARSE, 1)
    run(second, vllm_config, SPARSE, 2)
    assert {name: calls for name, calls in vllm_omni.stats().calls.items() if calls != (0, 0)} == {
        "blocks.0.attn1": (1, 0), "blocks.1.attn1": (1, 0), "blocks.0.attn1 (2)": (1, 0), "blocks.1.attn1 (2)": (1, 0),
    }  # fmt: skip
    del second
    gc.collect()
    assert len(vllm_omni.stats().calls) == 2


def test_compiled_blocks_give_the_same(vllm_config):
    """As their runner compiles them; without a compiler of C++, which the tests cannot ask for."""
    eager = build(vllm_config, SPARSE)
    wanted = [run(eager, vllm_config, SPARSE, step) for step in (0, 1)]
    compiled = regionally_compile(build(vllm_config, SPARSE), dynamic=True, backend="aot_eager")
    vllm_omni.ENGINE.reset()
    counters.clear()
    for step in (0, 1):
        torch.testing.assert_close(run(compiled, vllm_config, SPARSE, step), wanted[step])
    stats = vllm_omni.stats()
    assert (stats.sparse_calls, stats.dense_calls) == (2, 2)
    assert counters["stats"]["unique_graphs"] >= 2  # before attention, and after it


def test_the_log_says_what_the_page_shows(vllm_config, caplog, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "vllm_omni.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO")
    model = build(vllm_config, SPARSE)
    for step in (0, 1, 0):
        run(model, vllm_config, SPARSE, step)
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm_omni.rainfusion"]
    assert "\n".join(lines) == shown
