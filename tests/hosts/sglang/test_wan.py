"""SGLang's own Wan transformer, tiny and with random weights, 6,144 tokens: sparse steps, dense steps, compiled."""

import re
from pathlib import Path

import pytest
import torch
from sglang.multimodal_gen.configs.models.dits.wanvideo import WanVideoArchConfig, WanVideoConfig
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.multimodal_gen.runtime.utils.torch_compile import compile_matching_submodules
from torch._dynamo.utils import counters

from rainfusion.integrations import sglang

SIZES = dict(num_attention_heads=2, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=32, freq_dim=32)
LATENTS = (1, 4, 8, 48, 64)


@pytest.fixture
def build(server_args, monkeypatch):
    from sglang.multimodal_gen.runtime.models.dits.wanvideo import WanTransformer3DModel

    def made(backend="rain_fusion_attn"):
        monkeypatch.setattr(server_args, "attention_backend", backend)
        torch.manual_seed(0)
        sizes = WanVideoArchConfig(**SIZES, ffn_dim=128, num_layers=2)
        model = WanTransformer3DModel(config=WanVideoConfig(arch_config=sizes), hf_config={})
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, 0, 0.05)
            else:
                torch.nn.init.constant_(weight, float(not name.endswith("bias")))
        return model.eval()

    return made


def run(model, metadata, step):
    torch.manual_seed(1)
    latents, text = torch.randn(LATENTS), torch.randn(1, 16, 32)
    with torch.inference_mode(), set_forward_context(current_timestep=step, attn_metadata=metadata):
        return model(hidden_states=latents, encoder_hidden_states=text, timestep=torch.tensor([500]))


def test_sparse_and_dense_steps(build, stage):
    model = build()
    assert model.blocks[0].attn1.backend is AttentionBackendEnum.RAIN_FUSION_ATTN
    assert model.blocks[0].attn2.attn.backend is AttentionBackendEnum.TORCH_SDPA  # cross-attention
    dense = run(model, stage(0, LATENTS), 0)
    assert sglang.stats().reasons == {"the first steps are dense (skip_first_steps)": 2}
    sparse = run(model, stage(1, LATENTS), 1)
    stats = sglang.stats()
    assert stats.calls == {"blocks.0.attn1": (1, 1), "blocks.1.attn1": (1, 1)}
    assert stats.layouts == {"grid 8x24x32": 2}
    reference = run(build("torch_sdpa"), None, 0)
    torch.testing.assert_close(dense, reference)
    error = (sparse - reference).norm() / reference.norm()
    assert sparse.isfinite().all() and 0 < error < 0.5


def test_compiled_models_give_the_same(build, stage):
    """As their stage compiles them, whole or by blocks; without a compiler of C++, which the tests cannot ask for."""
    model = build()
    wanted = [run(model, stage(step, LATENTS), step) for step in (0, 1)]
    for by_blocks in (True, False):
        compiled = build()
        if by_blocks:
            compile_matching_submodules(compiled, compile_kwargs={"backend": "aot_eager"})
        else:
            compiled.compile(backend="aot_eager")
        sglang.ENGINE.reset()
        counters.clear()
        for step in (0, 1):
            torch.testing.assert_close(run(compiled, stage(step, LATENTS), step), wanted[step])
        assert (sglang.stats().sparse_calls, sglang.stats().dense_calls) == (2, 2)
        assert counters["stats"]["unique_graphs"] >= 2  # before attention, and after it


def test_the_log_says_what_the_page_shows(build, stage, caplog):
    page = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    caplog.set_level("INFO")
    model = build()
    for step in (0, 1, 0):
        run(model, stage(step, LATENTS), step)
    lines = [record.getMessage() for record in caplog.records if record.name == "sglang.rainfusion"]
    assert "\n".join(lines) == shown
