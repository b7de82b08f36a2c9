"""Together with other libraries: those that spread a model over processes, and those that watch torch's functions."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import rainfusion
from helpers import tiny_models
from helpers.enabling import CogVideoXAttnProcessor2_0, attention_dispatch, forward, snapshot
from rainfusion.integrations.diffusers.models import MODELS


class TwoProcesses(CogVideoXAttnProcessor2_0):
    """As Ulysses of another library: half of the heads, and text and video of two shards one after the other."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None):
        text = encoder_hidden_states.shape[1]
        both = torch.cat([encoder_hidden_states, hidden_states], 1)
        q, k, v = (
            layer(both).unflatten(2, (attn.heads, -1)).transpose(1, 2) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        half = attn.heads // 2
        halves = [F.scaled_dot_product_attention(*(x[:, i * half : (i + 1) * half] for x in (q, k, v))) for i in (0, 1)]
        out = attn.to_out[0](torch.cat(halves, 1).transpose(1, 2).flatten(2))
        return out[:, text:], out[:, :text]


def test_fewer_heads_than_the_module_has_betray_other_parallelism():
    model, inputs, expected = tiny_models.ALL["cogvideox"]()
    for block in model.transformer_blocks:
        block.attn1.set_processor(TwoProcesses())
    dense = forward(model, inputs)
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.8)
    assert torch.equal(forward(model, inputs), dense)
    stats = handle.stats()
    assert (stats.sparse_calls, stats.dense_calls) == (0, 2 * expected.calls)
    assert "heads: something spreads the model over processes" in next(iter(stats.reasons))


def test_half_a_sequence_holds_no_video_also_where_the_text_is_longer():
    """Others that spread a model by torch's attention function leave each process its part of text and video."""
    model, inputs, expected = tiny_models.ALL["cogvideox"]()
    video = math.prod(expected.grid)
    text = 2 * video
    inputs["encoder_hidden_states"] = torch.randn(2, text, 8)
    scene = MODELS["CogVideoXTransformer3DModel"].scene(inputs, model.config)
    assert scene.place(text + video).before == text
    assert scene.place((text + video) // 2) is None


class ForeignContext:
    ulysses_degree, ring_degree = 2, 1


class ForeignConfig:
    """Without much that diffusers' own has."""

    context_parallel_config = ForeignContext()


@pytest.mark.parametrize("name", ["flux", "wan", "cogvideox"])
def test_a_model_that_somebody_else_spreads_is_dense(name, monkeypatch):
    """Its processors may have another dispatch, which does not know our backend."""
    model, inputs, expected = tiny_models.ALL[name]()
    dense, before = forward(model, inputs), snapshot(model)
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.8)
    asked = []

    def foreign_dispatch(*args, backend=None, parallel_config=None, **kwargs):
        asked.append(backend)
        return attention_dispatch.dispatch_attention_fn(*args, backend=backend, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(model, "_parallel_config", ForeignConfig())
        patch.setattr(f"{type(model).__module__}.dispatch_attention_fn", foreign_dispatch, raising=False)
        assert torch.equal(forward(model, inputs), dense)
    assert not any(asked)
    stats = handle.stats()
    assert (stats.sparse_calls, stats.dense_calls) == (0, expected.calls)
    assert "ForeignConfig spreads the model over processes" in next(iter(stats.reasons))
    vars(model).pop("_parallel_config", None)
    forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls
    rainfusion.disable(model)
    assert snapshot(model) == before


def test_a_config_of_somebody_else_is_handed_on(monkeypatch):
    model, inputs, expected = tiny_models.ALL["flux"]()
    dense, config, seen = forward(model, inputs), ForeignConfig(), []
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor._parallel_config = config
    registry = attention_dispatch._AttentionBackendRegistry
    native = attention_dispatch.AttentionBackendName.NATIVE
    function = registry._backends[native]

    def watched(_parallel_config, **kwargs):
        seen.append(_parallel_config)
        return function(**kwargs)

    monkeypatch.setitem(registry._backends, native, watched)
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.8)
    assert torch.equal(forward(model, inputs), dense)
    assert seen == [config] * expected.calls
    assert "ForeignConfig spreads the model over processes" in next(iter(handle.stats().reasons))


class Strict(TorchFunctionMode):
    """Around a whole forward, as other libraries have it: knows only the arguments that the model gives."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)


def test_a_dense_call_passes_on_what_came_and_no_more():
    model, inputs, expected = tiny_models.ALL["cogvideox"]()
    dense = forward(model, inputs)
    rainfusion.enable(model, min_tokens=0, sparsity=0.0)
    with Strict() as strict:
        assert torch.equal(forward(model, inputs), dense)
    assert strict.calls == expected.calls
