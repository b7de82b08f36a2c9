"""Wrong arguments, unknown models, failures: nothing is left behind."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import rainfusion
from helpers import offline_pipelines, tiny_models
from helpers.enabling import attention_dispatch, forward, snapshot
from rainfusion.integrations import decider, settings
from rainfusion.integrations.diffusers import private_names
from rainfusion.integrations.diffusers.host import ATTRIBUTE


def test_enabling_twice_replaces_the_settings_and_says_so():
    model, inputs, expected = tiny_models.ALL["wan"]()
    before = snapshot(model)
    rainfusion.enable(model, min_tokens=0)
    with pytest.warns(UserWarning, match="enabled here already"):
        handle = rainfusion.enable(model, min_tokens=0, skip_layers=[0, 1])
    forward(model, inputs)
    assert handle.stats().dense_calls == expected.calls
    handle.disable()
    assert snapshot(model) == before


def test_disabling_what_is_not_enabled_does_nothing():
    model, _, _ = tiny_models.ALL["wan"]()
    before = snapshot(model)
    rainfusion.disable(model)
    rainfusion.disable(offline_pipelines.qwen())
    assert snapshot(model) == before


def test_enabled_puts_back_what_was_there():
    model, inputs, expected = tiny_models.ALL["wan"]()
    outer = rainfusion.enable(model, min_tokens=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rainfusion.enabled(model, min_tokens=0, skip_layers=[0, 1]) as inner:
            forward(model, inputs)
    assert outer.stats().sparse_calls == 0 and inner.stats().dense_calls == expected.calls
    forward(model, inputs)
    assert outer.stats().sparse_calls == expected.calls
    rainfusion.disable(model)
    with pytest.raises(RuntimeError, match="inside"), rainfusion.enabled(model):
        raise RuntimeError("inside")
    assert ATTRIBUTE not in vars(model)


def test_a_failure_inside_does_not_corrupt_the_model(monkeypatch):
    model, inputs, _ = tiny_models.ALL["cogvideox"]()
    before, dense = snapshot(model), forward(model, inputs)

    def broken(*_):
        raise RuntimeError("broken")

    rainfusion.enable(model, min_tokens=0)
    with monkeypatch.context() as patch:
        patch.setattr(decider, "run", broken)
        with pytest.raises(RuntimeError, match="broken"):
            forward(model, inputs)
    F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 4).unbind())  # no mode is left around torch's attention
    rainfusion.disable(model)
    assert snapshot(model) == before and torch.equal(forward(model, inputs), dense)


def test_a_failure_while_enabling_leaves_nothing(monkeypatch):
    pipe = offline_pipelines.wan(experts=2)
    before = [snapshot(model) for model in (pipe.transformer, pipe.transformer_2)]
    pipe.transformer_2.register_forward_pre_hook = None  # the second expert cannot be hooked
    with pytest.raises(TypeError):
        rainfusion.enable(pipe)
    del pipe.transformer_2.register_forward_pre_hook
    assert [snapshot(model) for model in (pipe.transformer, pipe.transformer_2)] == before


class Unknown(torch.nn.Module):
    def forward(self, x):
        return x


def test_unknown_models_get_the_recipe():
    with pytest.raises(ValueError, match=r'register_model\("Unknown", attention='):
        rainfusion.enable(Unknown())


def test_what_is_no_pipeline():
    with pytest.raises(TypeError, match="must be a diffusers pipeline or its transformer, got int"):
        rainfusion.enable(3)
    pipe = offline_pipelines.qwen()
    pipe.register_modules(transformer=None)
    with pytest.raises(ValueError, match=r"QwenImagePipeline has no transformer .* its models are: vae"):
        rainfusion.enable(pipe)
    pipe.register_modules(transformer=Unknown())
    with pytest.raises(ValueError, match="register_model"):
        rainfusion.enable(pipe)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(skip_layers=[2]), ValueError, "has 2 self-attention layers: 0 to 1; got 2"),
        (dict(skip_layers="0-5"), ValueError, "0 to 1; got 2, 3, 4, 5"),
        (dict(skip_layers="a"), ValueError, "skip_layers as text must be"),
        (dict(skip_layers="3-1"), ValueError, "runs backwards"),
        (dict(skip_layers=[-1]), ValueError, "skip_layers must be at least 0"),
        (dict(skip_layers=1.5), TypeError, "skip_layers must be ints"),
        (dict(sparsity=1.5), ValueError, r"sparsity must be in \[0, 1\]"),
        (dict(start_step=-1), ValueError, "start_step must be at least 0"),
        (dict(start_step=1.5), ValueError, "start_step as a float is a share"),
        (dict(sparse_type="x"), ValueError, "sparse_type must be one of"),
        (dict(precision="fp4"), ValueError, "precision must be one of"),
        (dict(on_unsupported="x"), ValueError, "on_unsupported must be one of"),
        (dict(min_tokens=-1), ValueError, "min_tokens must be at least 0"),
        (dict(backend="x"), ValueError, "backend must be one of"),
        (dict(token_order="x"), ValueError, "token_order must be"),
        (dict(predictor="x"), ValueError, "predictor must be one of"),
        (dict(compensate=1), TypeError, "compensate must be True or False"),
        (dict(block_size=3), ValueError, "block_size must be"),
        (dict(sparse_type="ada_bsa", block_size=64), ValueError, "block_size must be 128 with"),
    ],
)
def test_wrong_arguments(kwargs, error, message):
    model, _, _ = tiny_models.ALL["wan"]()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        rainfusion.enable(model, **kwargs)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0-3,38", {0, 1, 2, 3, 38}), ("", set()), (" 1 - 2 , 7", {1, 2, 7}), ([3, 1], {1, 3}), (4, {4})],
)
def test_skip_layers(text, layers):
    assert settings.check_layers(settings.layers(text), 39, "model") == layers


def test_a_diffusers_without_the_private_names_is_refused(monkeypatch):
    model, _, _ = tiny_models.ALL["wan"]()
    private_names.dispatch_module.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(attention_dispatch._AttentionBackendRegistry, "_supported_arg_names")
        with pytest.raises(ImportError, match=r"has no _AttentionBackendRegistry\._supported_arg_names"):
            rainfusion.enable(model)
    private_names.dispatch_module.cache_clear()
    rainfusion.enable(model)


def test_without_diffusers(monkeypatch):
    import sys

    private_names.dispatch_module.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
        with pytest.raises(ImportError, match="pip install diffusers"):
            rainfusion.enable(Unknown())
    private_names.dispatch_module.cache_clear()


def test_wrong_layers_leave_the_old_settings_and_warn_of_nothing():
    model, inputs, expected = tiny_models.ALL["wan"]()
    handle = rainfusion.enable(model, min_tokens=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="0 to 1; got 9"):
            rainfusion.enable(model, skip_layers=9, precision="fp8")
    forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls


def test_a_range_of_millions_of_layers_is_refused_at_once():
    model, _, _ = tiny_models.ALL["wan"]()
    with pytest.raises(ValueError, match="got 2, 3, 4, 5, 6, 7, 8, 9 and 19999991 more"):
        rainfusion.enable(model, skip_layers="0-20000000")


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), dict(sparsty=0.5), TypeError, "sparsty is not an option; did you mean sparsity"),
        ((3,), dict(), TypeError, "method must be a rainfusion.Method, got 3"),
        ((rainfusion.Method(),), dict(), ValueError, "method must have sparse_type='rf_v2' or 'ada_bsa', got None"),
        ((), dict(sparse_type=None), ValueError, "sparse_type must be one of"),
        ((), dict(target_error=0.1, sparse_type="ada_bsa"), ValueError, "target_error needs sparse_type='rf_v2'"),
        ((), dict(profile={}, sparse_type="ada_bsa"), ValueError, "profile needs sparse_type='rf_v2'"),
    ],
)
def test_wrong_methods(args, kwargs, error, message):
    model, _, _ = tiny_models.ALL["wan"]()
    with pytest.raises(error, match=message):
        rainfusion.enable(model, *args, **kwargs)
    assert ATTRIBUTE not in vars(model)
