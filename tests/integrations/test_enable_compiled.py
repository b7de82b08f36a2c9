"""Together with torch.compile: whole models, models in place, blocks."""

import pytest
import torch

import rainfusion
from helpers import tiny_models
from helpers.enabling import blocks_of, forward, wide_wan
from rainfusion.integrations.diffusers.host import ATTRIBUTE

SLOW = pytest.mark.slow


def test_compiled_blocks_are_one_graph_for_all_layers_and_steps():
    torch._dynamo.reset()
    model, inputs, _ = wide_wan(num_layers=3)
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.5, start_step=1, skip_layers=[2])
    eager = [forward(model, {**inputs, "timestep": torch.tensor([t])}) for t in (900, 500, 100)]
    counted = handle.stats()
    assert counted.sparse_calls == 4
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = [forward(model, {**inputs, "timestep": torch.tensor([t])}) for t in (900, 500, 100)]
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert handle.stats().sparse_calls == 2 * counted.sparse_calls
    assert handle.stats().dense_calls == 2 * counted.dense_calls
    assert handle.stats().density == counted.density


def test_enabling_again_does_not_compile_again():
    torch._dynamo.reset()
    model, inputs, _ = wide_wan()
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    dense = forward(model, inputs)
    rainfusion.enable(model, min_tokens=0, sparsity=0.5)
    sparse = forward(model, inputs)
    rainfusion.disable(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(10):
            with rainfusion.enabled(model, min_tokens=0, sparsity=0.5) as handle:
                rainfusion.enable(tiny_models.ALL["flux"]()[0])  # others come and go
                assert torch.equal(forward(model, inputs), sparse)
                assert handle.stats().sparse_calls == 2
            assert torch.equal(forward(model, inputs), dense)


def test_a_compiled_model():
    torch._dynamo.reset()
    model, inputs, expected = tiny_models.ALL["wan"]()
    dense = forward(model, inputs)
    compiled = torch.compile(model, backend="aot_eager")
    handle = rainfusion.enable(compiled, min_tokens=0, block_size=128)
    torch.testing.assert_close(forward(compiled, inputs), dense, rtol=1e-5, atol=1e-5)
    assert handle.stats().sparse_calls == expected.calls
    rainfusion.disable(compiled)
    assert ATTRIBUTE not in vars(model)


@pytest.mark.parametrize("name", ["wan", "cogvideox", pytest.param("sd3", marks=SLOW)])
@pytest.mark.parametrize("how", ["model", pytest.param("in place", marks=SLOW), "blocks"])
def test_enabling_after_compiling_and_running(name, how):
    torch._dynamo.reset()
    model, inputs, expected = tiny_models.ALL[name]()
    dense = forward(model, inputs)
    compiled = model
    if how == "model":
        compiled = torch.compile(model, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
    else:
        for block in model.blocks if name == "wan" else model.transformer_blocks:
            block.compile(backend="aot_eager")
    forward(compiled, inputs)
    handle = rainfusion.enable(compiled, min_tokens=0, block_size=128)
    torch.testing.assert_close(forward(compiled, inputs), dense, rtol=1e-4, atol=1e-4)
    assert handle.stats().sparse_calls == expected.calls
    rainfusion.disable(compiled)
    forward(compiled, inputs)
    assert handle.stats().sparse_calls == expected.calls


@pytest.mark.parametrize("name", ["wan", "flux", "cogvideox", "sd3", "mochi", "cosmos"])
@pytest.mark.parametrize("how", ["model", *(pytest.param(how, marks=SLOW) for how in ("in place", "blocks"))])
def test_a_full_graph(name, how):
    torch._dynamo.reset()
    model, inputs, expected = tiny_models.ALL[name]()
    dense = forward(model, inputs)
    graphs = []

    def counting(graph, examples):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    handle = rainfusion.enable(model, min_tokens=0, block_size=128)
    compiled = model
    if how == "model":
        compiled = torch.compile(model, fullgraph=True, backend=counting)
    elif how == "in place":
        model.compile(fullgraph=True, backend=counting)
    else:
        for block in blocks_of(model):
            block.compile(fullgraph=True, backend=counting)
    for _ in range(2):
        torch.testing.assert_close(forward(compiled, inputs), dense, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1 if how != "blocks" else 0 < len(graphs) <= len(blocks_of(model)) + 1
    assert (handle.stats().sparse_calls, handle.stats().dense_calls) == (2 * expected.calls, 0)
