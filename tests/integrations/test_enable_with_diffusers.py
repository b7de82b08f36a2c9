"""Together with the rest of diffusers: caches, offloading, casting, adapters."""

import pytest
import torch

import rainfusion
from helpers import needs_diffusers, offline_pipelines, tiny_models
from helpers.enabling import forward
from helpers.offline_pipelines import PIPELINES, sample


@pytest.mark.parametrize(
    "cache",
    ["FirstBlockCacheConfig", "PyramidAttentionBroadcastConfig", "TaylorSeerCacheConfig", "MagCacheConfig"],
)
def test_caches(cache):
    import diffusers

    pipe = offline_pipelines.wan(layers=3)
    inputs = PIPELINES["wan"][1]
    configs = dict(
        FirstBlockCacheConfig=lambda: diffusers.FirstBlockCacheConfig(threshold=0.05),
        PyramidAttentionBroadcastConfig=lambda: diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(0, 1000),
            current_timestep_callback=lambda: 500,
            spatial_attention_block_identifiers=("blocks.*attn1",),
        ),
        MagCacheConfig=lambda: diffusers.MagCacheConfig(
            num_inference_steps=4, mag_ratios=torch.ones(4), retention_ratio=0.3, max_skip_steps=1
        ),
        TaylorSeerCacheConfig=lambda: diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1),
    )
    for order in ("cache first", "enable first"):
        handle = None
        if order == "enable first":
            handle = rainfusion.enable(pipe, min_tokens=0)
        pipe.transformer.enable_cache(configs[cache]())
        if handle is None:
            cached = sample(pipe, inputs)
            handle = rainfusion.enable(pipe, min_tokens=0)
        torch.testing.assert_close(sample(pipe, inputs), cached, rtol=1e-3, atol=1e-3)
        assert 0 < handle.stats().sparse_calls <= 24 and handle.stats().dense_calls == 0
        rainfusion.disable(pipe)
        torch.testing.assert_close(sample(pipe, inputs), cached, rtol=1e-6, atol=1e-6)
        pipe.transformer.disable_cache()


def test_group_offload_and_layerwise_casting():
    pipe = offline_pipelines.wan()
    inputs = PIPELINES["wan"][1]
    dense = sample(pipe, inputs)
    handle = rainfusion.enable(pipe, min_tokens=0)
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level"
    )
    torch.testing.assert_close(sample(pipe, inputs), dense, rtol=1e-3, atol=1e-3)
    assert handle.stats().sparse_calls == 16
    model, inputs, expected = tiny_models.ALL["wan"]()
    handle = rainfusion.enable(model, min_tokens=0)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert forward(model, inputs).isfinite().all() and handle.stats().sparse_calls == expected.calls


def test_lora():
    from peft import LoraConfig

    model, inputs, expected = tiny_models.ALL["wan"]()
    handle = rainfusion.enable(model, min_tokens=0)
    plain = forward(model, inputs)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False))
    assert not torch.allclose(forward(model, inputs), plain)
    assert handle.stats().sparse_calls == 2 * expected.calls
    model.disable_adapters()
    torch.testing.assert_close(forward(model, inputs), plain)


def test_ip_adapter():
    """Its processor makes one more call, from the picture to the adapter's tokens: that one is dense."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, inputs, _ = tiny_models.ALL["flux"]()
    handle = rainfusion.enable(model, min_tokens=0)
    attn = model.transformer_blocks[0].attn
    adapter = FluxIPAdapterAttnProcessor(hidden_size=32, cross_attention_dim=32, num_tokens=(4,), scale=[1.0])
    attn.set_processor(adapter)
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(1, 4, 32)]}
    forward(model, inputs)
    stats = handle.stats()
    assert stats.sparse_calls == 2
    assert set(stats.reasons) <= {"q and k have different lengths: not self-attention"}
    rainfusion.disable(model)
    assert "_attention_backend" not in vars(adapter)


def broadcast():
    """Pyramid attention broadcast that answers every second call of an attention module."""
    return needs_diffusers().PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 500,
        spatial_attention_block_identifiers=("transformer_blocks.*attn1",),
    )


def faster_cache():
    return needs_diffusers().FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 500,
        spatial_attention_block_identifiers=("transformer_blocks.*attn1",),
        attention_weight_callback=lambda _: 0.5,
        tensor_format="BFCHW",
    )


@pytest.mark.parametrize("cache", [broadcast, faster_cache])
@pytest.mark.parametrize("first", ["cache", "enable"])
@pytest.mark.parametrize("off_first", ["cache", "enable"])
def test_caches_around_a_module_come_and_go(cache, first, off_first):
    """Calls that a cache answers are nobody's to count, and what one takes off leaves the other alone."""
    pipe = offline_pipelines.cogvideox()
    inputs = PIPELINES["cogvideox"][1]
    model = pipe.transformer
    sample(pipe, inputs)
    before = {name: "forward" in vars(module) for name, module in model.named_modules()}
    if first == "cache":
        model.enable_cache(cache())
    handle = rainfusion.enable(pipe, min_tokens=0, on_unsupported="error")
    if first == "enable":
        model.enable_cache(cache())
    sample(pipe, inputs)
    assert 0 < handle.stats().sparse_calls < 8 and handle.stats().dense_calls == 0
    handle.reset()
    if off_first == "cache":
        model.disable_cache()
        sample(pipe, inputs)
        assert handle.stats().sparse_calls == 8
        rainfusion.disable(pipe)
    else:
        rainfusion.disable(pipe)
        sample(pipe, inputs)
        model.disable_cache()
    sample(pipe, inputs)
    assert handle.stats().dense_calls == 0
    for name, module in model.named_modules():
        if "forward" in vars(module) and not before[name]:  # diffusers leaves the class's own method there
            assert module.forward.__func__ is type(module).forward
