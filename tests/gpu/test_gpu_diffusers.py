"""The plug-in on a GPU: real kernels, compiled blocks, no waiting for the device, quantised attention."""

import pytest
import torch

import rainfusion
from helpers import gpu, tiny_models

pytestmark = gpu.ON_GPU


def model_and_inputs(name, **kwargs):
    """On the GPU in bf16."""
    model, inputs, _ = tiny_models.ALL[name](**kwargs)

    def moved(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.to("cuda", torch.bfloat16) if x.is_floating_point() else x.to("cuda")

    return model.to("cuda", torch.bfloat16), {key: moved(value) for key, value in inputs.items()}


def wan(**kwargs):
    return model_and_inputs("wan", t=4, h=32, w=48, attention_head_dim=64, **kwargs)


def forward(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def difference(one, other):
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("precision", ["native", "int8", "fp8"])
def test_sparse_is_near_dense(precision):
    if not (precision == "native" or gpu.has_eight_bits(precision)):
        pytest.skip(f"this GPU has no {precision}")
    model, inputs = wan()
    dense = forward(model, inputs)
    with rainfusion.enabled(model, min_tokens=0, sparsity=0.5, precision=precision) as handle:
        sparse = forward(model, inputs)
    stats = handle.stats()
    assert (stats.sparse_calls, stats.dense_calls) == (2, 0)
    assert 0 < difference(sparse, dense) < 0.1
    assert torch.equal(forward(model, inputs), dense)


def test_everything_kept_is_dense_but_for_rounding():
    model, inputs = wan()
    dense = forward(model, inputs)
    with rainfusion.enabled(model, min_tokens=0, sparsity=0.01):
        assert difference(forward(model, inputs), dense) < 0.01


def test_a_forward_does_not_wait_for_the_device():
    model, inputs = wan()
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.5)
    forward(model, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(model, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert handle.stats().sparse_calls == 4


def test_compiled_blocks():
    torch._dynamo.reset()
    model, inputs = wan()
    rainfusion.enable(model, min_tokens=0, sparsity=0.5)
    eager = forward(model, inputs)
    model.compile_repeated_blocks(fullgraph=True)
    forward(model, inputs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert difference(forward(model, inputs), eager) < 0.02


def test_joint_text_with_a_key_mask():
    model, inputs = model_and_inputs("qwen")
    dense = forward(model, inputs)
    with rainfusion.enabled(model, min_tokens=0, sparsity=0.5) as handle:
        sparse = forward(model, inputs)
    assert handle.stats().dense_calls == 0
    assert difference(sparse, dense) < 0.01  # one block


def test_short_sequences_stay_dense_by_the_crossover():
    model, inputs = model_and_inputs("wan", t=2, h=16, w=24)
    dense = forward(model, inputs)
    with rainfusion.enabled(model) as handle:
        assert torch.equal(forward(model, inputs), dense)
    assert handle.stats().sparse_calls == 0
