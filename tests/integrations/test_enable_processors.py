"""Processors: those that are shared, swapped, of another backend, or that do not dispatch."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F

import rainfusion
from helpers import tiny_models
from helpers.enabling import WanAttnProcessor, attention_dispatch, forward, snapshot, wide_wan


def test_what_was_there_is_the_dense_way(monkeypatch):
    """Another backend that the user chose serves dense calls, and is there again afterwards."""
    model, inputs, _ = tiny_models.ALL["wan"]()
    model.set_attention_backend("_native_math")
    used = []
    registry = attention_dispatch._AttentionBackendRegistry._backends
    math_backend = attention_dispatch.AttentionBackendName._NATIVE_MATH
    function = registry[math_backend]
    monkeypatch.setitem(registry, math_backend, lambda **kwargs: used.append(1) or function(**kwargs))
    forward(model, inputs)
    usual = len(used)
    rainfusion.enable(model, min_tokens=0, sparsity=0.0)
    forward(model, inputs)
    assert len(used) == 2 * usual
    rainfusion.disable(model)
    assert {module.processor._attention_backend for module in model.modules() if hasattr(module, "processor")} == {
        math_backend
    }


def test_a_processor_shared_with_cross_attention_is_not_touched():
    model, inputs, expected = tiny_models.ALL["wan"]()
    shared = model.blocks[0].attn1.processor
    for block in model.blocks:
        block.attn1.processor = block.attn2.processor = shared
    dense, before = forward(model, inputs), snapshot(model)
    handle = rainfusion.enable(model, min_tokens=0)
    forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls and handle.stats().dense_calls == 0
    assert vars(shared) == {}
    rainfusion.disable(model)
    assert snapshot(model) == before and torch.equal(forward(model, inputs), dense)


def test_layers_that_share_a_processor_share_its_backend(monkeypatch):
    model, inputs, expected = tiny_models.ALL["wan"]()
    shared = copy.copy(model.blocks[0].attn1.processor)
    shared._attention_backend = attention_dispatch.AttentionBackendName._NATIVE_MATH
    for block in model.blocks:
        block.attn1.processor = shared
    used = []
    registry = attention_dispatch._AttentionBackendRegistry._backends
    function = registry[shared._attention_backend]
    monkeypatch.setitem(registry, shared._attention_backend, lambda **kwargs: used.append(1) or function(**kwargs))
    before = snapshot(model)
    with rainfusion.enabled(model, min_tokens=0, sparsity=0.0):
        forward(model, inputs)
    assert len(used) == expected.calls and snapshot(model) == before


def test_processors_that_are_swapped_are_found_again():
    model, inputs, expected = tiny_models.ALL["wan"]()
    handle = rainfusion.enable(model, min_tokens=0)
    model.blocks[0].attn1.set_processor(WanAttnProcessor())
    model.fuse_qkv_projections()
    forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls
    rainfusion.disable(model)
    assert all(vars(block.attn1.processor) == {} for block in model.blocks)


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_a_patch_of_a_processor_s_class_is_one_of_its_own_class(name):
    """Others replace `type(processor).__call__`: it takes effect, calls still arrive, and it outlives ours."""
    model, inputs, expected = tiny_models.ALL[name]()
    processor = next(module.processor for module in model.modules() if hasattr(module, "processor"))
    own = type(processor)
    original, calls = own.__call__, []

    def patched(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    handle = rainfusion.enable(model, min_tokens=0)
    assert type(processor) is not own
    try:
        type(processor).__call__ = patched
        type(processor).mark = 1
        assert own.__call__ is patched and own.mark == 1
        forward(model, inputs)
        assert len(calls) >= expected.calls and handle.stats().sparse_calls == expected.calls
        del type(processor).mark
        assert not hasattr(own, "mark")
        rainfusion.disable(model)
        calls.clear()
        forward(model, inputs)
        assert len(calls) >= expected.calls
    finally:
        own.__call__ = original
    with rainfusion.enabled(model, min_tokens=0) as handle:
        forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_processors_made_of_our_class_are_let_go(name):
    """Loading an adapter makes new ones, `type(processor)()`; the model may be disabled before it runs again."""
    model, _, _ = tiny_models.ALL[name]()
    holders = [module for module in model.modules() if hasattr(module, "processor")]
    before = [type(module.processor) for module in holders]
    rainfusion.enable(model, min_tokens=0)
    for module in holders:
        module.set_processor(type(module.processor)())
    rainfusion.disable(model)
    assert [type(module.processor) for module in holders] == before


def test_a_processor_that_does_not_dispatch_is_counted():
    class Own:
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return torch.zeros_like(hidden_states)

    model, inputs, _ = tiny_models.ALL["wan"]()
    handle = rainfusion.enable(model, min_tokens=0)
    model.blocks[1].attn1.processor = Own()
    forward(model, inputs)
    stats = handle.stats()
    assert stats.sparse_calls == 1
    assert stats.reasons == {"Own does not go through diffusers' attention dispatch": 1}


def test_cosmos_takes_the_active_backend(monkeypatch):
    """One that ends in torch's attention can be made sparse; of another one it is said that it is dense."""
    model, inputs, expected = tiny_models.ALL["cosmos"]()
    registry = attention_dispatch._AttentionBackendRegistry
    names = attention_dispatch.AttentionBackendName
    monkeypatch.setitem(registry._backends, names.XFORMERS, lambda query, **_: query)
    for backend, sparse in ((names._NATIVE_MATH, expected.calls), (names.XFORMERS, 0)):
        with rainfusion.enabled(model, min_tokens=0) as handle:
            active = registry._active_backend
            registry.set_active_backend(backend)
            try:
                forward(model, inputs)
            finally:
                registry.set_active_backend(active)
        stats = handle.stats()
        assert (stats.sparse_calls, stats.dense_calls) == (sparse, expected.calls - sparse)
    assert "the active attention backend is 'xformers'" in next(iter(stats.reasons))


def test_attention_that_goes_elsewhere_is_counted(monkeypatch):
    model, inputs, expected = tiny_models.ALL["sd3"]()
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: q)  # as some libraries do
    handle = rainfusion.enable(model, min_tokens=0)
    forward(model, inputs)
    assert handle.stats().dense_calls == expected.calls
    assert "does not call torch's function" in next(iter(handle.stats().reasons))


def test_processors_lent_to_another_model_do_not_make_it_sparse():
    one, inputs, expected = wide_wan()
    other, _, _ = wide_wan()
    dense = forward(other, inputs)
    handle = rainfusion.enable(one, min_tokens=0)
    forward(one, inputs)
    other.set_attn_processor(dict(one.attn_processors))
    assert torch.equal(forward(other, inputs), dense)
    assert handle.stats().sparse_calls == expected.calls


class CallsTorch(WanAttnProcessor):
    """As wrappers of other libraries do: it derives from one that dispatches, and does not."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        q, k, v = (layer(hidden_states).unflatten(2, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


def test_a_processor_that_derives_from_one_that_dispatches_and_does_not():
    model, inputs, _ = tiny_models.ALL["wan"]()
    model.blocks[1].attn1.set_processor(CallsTorch())
    with rainfusion.enabled(model, min_tokens=0) as handle:
        forward(model, inputs)
    assert handle.stats().calls == {"blocks.0.attn1": (1, 0), "blocks.1.attn1": (0, 1)}
    assert handle.stats().reasons == {"CallsTorch does not go through diffusers' attention dispatch": 1}
    rainfusion.enable(model, min_tokens=0, on_unsupported="error")
    with pytest.raises(ValueError, match=r"blocks\.1\.attn1 cannot be sparse: CallsTorch does not go"):
        forward(model, inputs)


def test_a_backend_chosen_while_enabled_is_kept():
    model, inputs, expected = tiny_models.ALL["wan"]()
    with rainfusion.enabled(model, min_tokens=0) as handle:
        model.set_attention_backend("_native_math")
        forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls
    chosen = {block.attn1.processor._attention_backend for block in model.blocks}
    assert chosen == {attention_dispatch.AttentionBackendName._NATIVE_MATH}


def test_processors_are_of_their_kind_while_enabled():
    model, _, _ = tiny_models.ALL["wan"]()
    with rainfusion.enabled(model):
        processor = model.blocks[0].attn1.processor
        assert isinstance(processor, WanAttnProcessor) and type(processor).__name__ == "WanAttnProcessor"
        parameters = inspect.signature(processor.__call__).parameters
        assert list(parameters) == list(inspect.signature(WanAttnProcessor().__call__).parameters)
    assert type(processor) is WanAttnProcessor


def test_a_function_as_a_processor():
    """It cannot be made ours: dense, and counted; where torch's attention is called, the module is scoped instead."""
    model, inputs, _ = tiny_models.ALL["wan"]()
    processor = model.blocks[0].attn1.processor
    model.blocks[0].attn1.processor = lambda *args, **kwargs: processor(*args, **kwargs)
    with rainfusion.enabled(model, min_tokens=0) as handle:
        forward(model, inputs)
    assert handle.stats().reasons == {"<lambda> does not go through diffusers' attention dispatch": 1}
    model, inputs, expected = tiny_models.ALL["cogvideox"]()
    own = model.transformer_blocks[0].attn1.processor

    def function(attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return own(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    model.transformer_blocks[0].attn1.processor = function
    before = snapshot_of_forward(model)
    with rainfusion.enabled(model, min_tokens=0) as handle:
        forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls and snapshot_of_forward(model) == before


def snapshot_of_forward(model):
    return {name: "forward" in vars(module) for name, module in model.named_modules()}
