"""What users do: interrupts, replaced parts, old handles, timesteps, threads."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import rainfusion
from helpers import tiny_models
from helpers.enabling import forward, snapshot, wide_wan
from rainfusion.integrations import decider
from rainfusion.integrations.diffusers.host import LAYER


def test_start_step_without_a_pipeline():
    model, inputs, _ = tiny_models.ALL["wan"]()
    handle = rainfusion.enable(model, min_tokens=0, start_step=1)
    for _ in range(2):  # two runs of two steps with two forwards each
        for timestep in (900, 500):
            for _ in range(2):
                forward(model, {**inputs, "timestep": torch.tensor([timestep])})
    assert handle.stats().sparse_calls == 2 * 2 * 2
    with pytest.raises(ValueError, match="end_step=1 needs the number of steps"):
        rainfusion.enable(model, end_step=1)


def test_forwards_that_name_the_timestep_otherwise():
    model, inputs, expected = tiny_models.ALL["z_image"]()
    handle = rainfusion.enable(model, min_tokens=0, start_step=1)
    for time in (0.9, 0.5):
        forward(model, {**inputs, "t": torch.tensor([time])})
    assert handle.stats().sparse_calls == expected.calls


def test_a_model_that_is_dropped_is_freed():
    model, inputs, _ = tiny_models.ALL["wan"]()
    rainfusion.enable(model, min_tokens=0)
    forward(model, inputs)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("name", ["cogvideox", "cosmos"])
def test_an_interrupt_leaves_nothing_around_torch(name, monkeypatch):
    """Ctrl-C in the middle of attention is no Exception."""
    model, inputs, _ = tiny_models.ALL[name]()

    def interrupted(*_):
        raise KeyboardInterrupt

    handle = rainfusion.enable(model, min_tokens=0, on_unsupported="error")
    with monkeypatch.context() as patch:
        patch.setattr(decider, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forward(model, inputs)
    F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 4).unbind())
    assert handle.stats().dense_calls == 0
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


def test_an_old_handle_has_no_say():
    model, inputs, expected = tiny_models.ALL["wan"]()
    before = snapshot(model)
    old = rainfusion.enable(model, min_tokens=0)
    with pytest.warns(UserWarning, match="already"):
        new = rainfusion.enable(model, min_tokens=0)
    old.disable()
    forward(model, inputs)
    assert new.stats().sparse_calls == expected.calls
    assert "disabled" in repr(old) and "disabled" not in repr(new)
    new.disable()
    assert snapshot(model) == before


def test_an_unknown_number_of_steps_is_refused_at_once():
    model, _, _ = tiny_models.ALL["wan"]()
    with pytest.raises(ValueError, match=r"start_step=0\.5 needs the number of steps"):
        rainfusion.enable(model, start_step=0.5)


def test_timesteps_of_each_token():
    model, inputs, _ = tiny_models.ALL["wan_ti2v"]()
    handle = rainfusion.enable(model, min_tokens=0, start_step=1)
    for timestep in (900, 500):
        tokens = torch.full((1, 3 * 4 * 6), timestep)
        tokens[:, :24] = 0  # the given frame
        forward(model, {**inputs, "timestep": tokens})
    assert handle.stats().sparse_calls == 2


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_a_block_that_is_replaced_is_found(name):
    model, inputs, expected = tiny_models.ALL[name]()
    handle = rainfusion.enable(model, min_tokens=0)
    blocks = model.blocks if name == "wan" else model.transformer_blocks
    old = blocks[0]
    blocks[0] = copy.deepcopy(blocks[1])
    forward(model, inputs)
    assert handle.stats().calls[handle.layers[0]] == (1, 0)
    assert handle.stats().sparse_calls == expected.calls
    rainfusion.disable(model)
    for block in (old, *blocks):
        attention = block.attn1
        assert LAYER not in vars(attention) and not attention._forward_pre_hooks and "forward" not in vars(attention)


def test_a_default_device_changes_nothing():
    model, inputs, expected = tiny_models.ALL["wan"]()
    with torch.device("meta"):
        handle = rainfusion.enable(model, min_tokens=0)
    forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls


def test_stats_print_as_a_table():
    model, inputs, _ = wide_wan()
    handle = rainfusion.enable(model, min_tokens=0, skip_layers=[1])
    forward(model, inputs)
    text = str(handle.stats())
    assert text.startswith("1 sparse and 1 dense attention calls, ")
    assert "dense: 1 call: the layer is in skip_layers" in text and "blocks.0.attn1" in text
    assert str(handle.stats().summary) in text and "blocks.0" not in handle.stats().summary
    handle.reset()
    assert handle.stats().sparse_calls == 0
    assert hasattr(model.blocks[0].attn1, LAYER) and "2 layers of WanTransformer3DModel" in repr(handle)


def test_a_run_that_begins_at_another_timestep_is_a_new_run():
    """A transformer alone: a timestep against the run's direction begins another one."""
    model, inputs, expected = tiny_models.ALL["wan"]()
    handle = rainfusion.enable(model, min_tokens=0, start_step=1)
    for timestep in (1000, 667, 333, 600, 300, 1000, 500):
        forward(model, {**inputs, "timestep": torch.tensor([timestep])})
    assert handle.stats().reasons == {"the first steps are dense (start_step)": 3 * expected.calls}
    assert handle.stats().sparse_calls == 4 * expected.calls


def test_timesteps_that_rise():
    """Flow models may count from 0 to 1."""
    model, inputs, expected = tiny_models.ALL["wan"]()
    handle = rainfusion.enable(model, min_tokens=0, start_step=1)
    for timestep in (0.0, 0.3, 0.6, 0.1, 0.5):
        forward(model, {**inputs, "timestep": torch.tensor([timestep])})
    assert handle.stats().sparse_calls == 3 * expected.calls


def test_training_is_dense():
    """Reentrant checkpointing runs a block without gradients first: both passes must give the same."""
    from torch.utils.checkpoint import checkpoint

    def gradient(model):
        model.zero_grad()
        model(**inputs, return_dict=False)[0].square().sum().backward()
        return model.blocks[0].attn1.to_q.weight.grad.clone()

    model, inputs, expected = wide_wan()
    model.train()
    model.enable_gradient_checkpointing(lambda function, *args: checkpoint(function, *args, use_reentrant=True))
    inputs["hidden_states"].requires_grad_()
    usual = gradient(model)
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.8)
    assert torch.equal(gradient(model), usual)
    assert handle.stats().sparse_calls == 0
    assert next(iter(handle.stats().reasons)).startswith("the model is in training mode")
    model.requires_grad_(False)  # what is trained may lie before the model
    forward(model, inputs)
    assert handle.stats().sparse_calls == 0
    model.eval()
    forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls


@pytest.mark.parametrize("kind", ["extra", "anything", "wrapped"])
def test_a_forward_that_was_replaced_on_the_instance(kind):
    model, inputs, expected = tiny_models.ALL["wan"]()
    original = model.forward

    def extra(hidden_states, timestep, encoder_hidden_states, extra=None, **kwargs):
        return original(hidden_states, timestep, encoder_hidden_states, **kwargs)

    def anything(*args, extra=None, **kwargs):
        return original(*args, **kwargs)

    model.forward = functools.wraps(original)(anything) if kind == "wrapped" else locals()[kind]
    handle = rainfusion.enable(model, min_tokens=0)
    with torch.no_grad():
        model(*inputs.values(), extra=1, return_dict=False)
    assert handle.stats().sparse_calls == expected.calls and not handle.stats().reasons


def test_a_subclass_whose_forward_takes_anything():
    model, inputs, expected = tiny_models.ALL["z_image"]()

    class Derived(type(model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = Derived
    handle = rainfusion.enable(model, min_tokens=0)
    with torch.no_grad():
        model(inputs.pop("x"), **inputs)
    assert handle.stats().sparse_calls == expected.calls and not handle.stats().reasons
