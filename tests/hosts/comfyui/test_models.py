"""ComfyUI's own models, small and random, sampled by its KSampler with and without sparse attention."""

from __future__ import annotations

import gc
import importlib
import inspect
import math
import weakref
from dataclasses import replace
from functools import partial

import comfy.model_management
import comfy.supported_models as supported
import pytest
import tiny
import torch

from rainfusion.integrations import comfyui
from rainfusion.integrations.comfyui import private_names

NAMES = list(tiny.MODELS)


@pytest.fixture(scope="module", params=NAMES)
def row(request):
    row = tiny.MODELS[request.param]
    return row, row.make()


def test_sparsity_0_is_bit_equal_to_no_node(row, sample):
    tiny_model, model = row
    dense = sample(model, tiny_model)
    same = comfyui.apply(model, sparsity=0.0, min_tokens=0)
    assert torch.equal(sample(same, tiny_model), dense)
    assert comfyui.stats(same).reasons == {"sparsity is 0": 2 * tiny_model.layers}


def test_every_self_attention_call_is_sparse(row, sample):
    tiny_model, model = row
    dense = sample(model, tiny_model)
    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    sparse = sample(fast, tiny_model)
    stats = comfyui.stats(fast)
    grid = "x".join(map(str, tiny_model.grid))
    assert (stats.sparse_calls, stats.dense_calls) == (2 * tiny_model.layers, 0), str(stats)
    assert len(stats.calls) == tiny_model.layers and all(grid in words for words in stats.layouts)
    error = (sparse - dense).abs().max()
    assert 0 < error < 0.01 * dense.abs().max(), "weights are small, and attention almost flat"
    assert torch.equal(sample(fast, tiny_model), sparse), "a second run"
    assert torch.equal(sample(model, tiny_model), dense), "the model that came in"


def test_tokens_lie_where_the_grid_says(row, sample):
    """Measured: a patch of the latent is changed, and the token that changes most is where it should be."""
    tiny_model, model = row
    t, h, w = tiny_model.grid
    cell = (t - 1, h // 3, 2 * w // 3)
    scale = [size // cells for size, cells in zip(tiny_model.latent[-2:], (h, w), strict=True)]
    changed = torch.zeros(tiny_model.latent)
    frame = changed[:, :, cell[0]] if changed.dim() == 5 else changed
    frame[..., cell[1] * scale[0] : (cell[1] + 1) * scale[0], cell[2] * scale[1] : (cell[2] + 1) * scale[1]] = 50.0

    def queries(latent):
        found = {}
        fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
        decider = private_names.attached(fast).__self__.decider
        attempt = decider.attempt

        def record(layer, q, *args, **kwargs):
            found.setdefault(layer, (q.clone(), decider.scene_for(layer).place(q.shape[2])))
            return attempt(layer, q, *args, **kwargs)

        decider.attempt = record
        sample(fast, tiny_model, steps=1, denoise=0.5, latent=latent)
        return found

    before, after = queries(torch.zeros(tiny_model.latent)), queries(changed)
    assert len(before) == tiny_model.layers
    for layer, (q, placed) in before.items():
        if layer > 1:
            continue  # later layers have mixed the tokens
        moved = (after[layer][0] - q).square().sum((0, 1, 3))
        assert moved.argmax() == placed.before + (cell[0] * h + cell[1]) * w + cell[2], placed


def test_the_start_of_the_schedule_is_dense(sample):
    row = tiny.MODELS["wan"]
    fast = comfyui.apply(row.make(), sparsity=0.7, min_tokens=0, dense_start=0.2, dense_end=0.3)
    sample(fast, row, steps=10)
    stats = comfyui.stats(fast)
    start, end = (next(n for why, n in stats.reasons.items() if word in why) for word in ("dense_start", "dense_end"))
    assert (start, end, stats.sparse_calls) == (4, 6, 10), "2 and 3 of 10 steps, in two layers"


def first_frame_given(row):
    """A mask as nodes that make videos from an image have it: 0 for what is given."""
    mask = torch.ones(1, 1, *row.latent[2:])
    mask[:, :, 0] = 0.0
    return mask


def from_image():
    """Wan, with an image in channels of its own; LTX, with a frame that is given."""
    wan = tiny.MODELS["wan"]
    image = {"concat_latent_image": torch.zeros(wan.latent), "concat_mask": first_frame_given(wan)}
    channels = partial(tiny.wan, kind=supported.WAN21_I2V, in_dim=36)
    yield "wan", replace(wan, make=channels, conditions=image), {}
    ltx = tiny.MODELS["ltx"]
    yield "ltx", ltx, {"noise_mask": first_frame_given(ltx)}


@pytest.mark.parametrize(("row", "mask"), [pytest.param(*own, id=name) for name, *own in from_image()])
def test_auto_is_constant_from_an_image(sample, row, mask):
    model, text = row.make(), tiny.MODELS["wan"]
    auto, constant = (comfyui.apply(model, sparsity=0.7, min_tokens=0, schedule=name) for name in ("auto", "constant"))
    assert torch.equal(sample(auto, row, steps=4, **mask), sample(constant, row, steps=4, **mask))
    stats = comfyui.stats(auto)
    assert stats.sparse_calls == 4 * row.layers and not stats.steps, str(stats)
    alone = comfyui.apply(text.make(), sparsity=0.7, min_tokens=0)
    sample(alone, text, steps=4)
    assert len(comfyui.stats(alone).steps) == 4, "from text"


def test_an_interrupt_leaves_nothing_behind(sample):
    row = tiny.MODELS["wan"]
    model = row.make()
    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    sparse = sample(fast, row)
    transformer = model.model.diffusion_model

    def interrupt(module, args):
        raise comfy.model_management.InterruptProcessingException

    hook = transformer.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(fast, row)
    hook.remove()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in transformer.modules())
    assert torch.equal(sample(fast, row), sparse)


def test_a_model_is_let_go(sample):
    row = tiny.MODELS["flux"]
    model = row.make()
    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    sample(fast, row, steps=1)
    gone = weakref.ref(private_names.attached(fast).__self__)
    comfy.model_management.unload_all_models()
    del model, fast
    comfy.model_management.cleanup_models_gc()
    gc.collect()
    assert gone() is None


def test_reference_images_of_kontext(sample):
    row = tiny.MODELS["flux"]
    reference = torch.randn(1, 16, 32, 48)
    referring = tiny.Tiny(
        row.make, row.latent, row.grid, row.layers, row.pooled, row.guided,
        conditions={"reference_latents": [reference]},
    )  # fmt: skip
    model = row.make()
    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    sample(fast, referring)
    stats = comfyui.stats(fast)
    assert stats.layouts == {"grid 1x32x48 and 1x16x24, 7 tokens before": 2 * row.layers}, str(stats)


def test_vace(sample):
    row = tiny.MODELS["wan"]
    try:
        model = tiny.vace()
    except TypeError as error:  # another version's arguments
        pytest.fail(f"the small VACE model does not fit this version: {error}")
    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    frames = torch.zeros(1, 32, *row.latent[2:])
    mask = torch.ones(1, 64, *row.latent[2:])
    conditions = {"vace_frames": [frames], "vace_mask": [mask], "vace_strength": [1.0]}
    controlled = tiny.Tiny(tiny.vace, row.latent, row.grid, 3, conditions=conditions)
    sample(fast, controlled)
    stats = comfyui.stats(fast)
    assert stats.sparse_calls == 6 and any("vace_blocks" in name for name in stats.calls), str(stats)


def test_compiled_it_gives_the_same(sample):
    """As the node TorchCompileModel does it, with the plainest of compilers."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    row = tiny.MODELS["wan"]
    fast = comfyui.apply(row.make(), sparsity=0.7, min_tokens=0)
    sparse = sample(fast, row)
    compiled = fast.clone()
    set_torch_compile_wrapper(model=compiled, backend="eager")
    out = sample(compiled, row)
    stats = comfyui.stats(compiled)
    assert (stats.sparse_calls, stats.dense_calls) == (4, 0), str(stats)
    assert torch.allclose(out, sparse, atol=1e-4) and math.isfinite(out.abs().max())


def _by(module: str, node: str, **inputs):
    """A node of ComfyUI, as a function of a MODEL."""
    execute = getattr(importlib.import_module(f"comfy_extras.{module}"), node).execute
    known = {name: value for name, value in inputs.items() if name in inspect.signature(execute).parameters}
    return lambda model: execute(model=model, **known).args[0]


CACHE = dict(reuse_threshold=0.8, start_percent=0.1, end_percent=0.95, verbose=False)
GUIDED = dict(double_layers="1", single_layers="", start_percent=0.0, end_percent=1.0)
WINDOWS = dict(
    context_length=9, context_overlap=4, context_schedule="standard_static", context_stride=1, closed_loop=False,
    fuse_method="pyramid", freenoise=False,
)  # fmt: skip
OTHERS = {
    "EasyCache": (_by("nodes_easycache", "EasyCacheNode", **CACHE), 8, (5, 16, 24)),
    "LazyCache": (_by("nodes_easycache", "LazyCacheNode", **CACHE), 6, (5, 16, 24)),
    "skipped layers": (_by("nodes_slg", "SkipLayerGuidanceDiTSimple", **GUIDED), 18, (5, 16, 24)),
    "windows of frames": (_by("nodes_context_windows", "WanContextWindowsManualNode", **WINDOWS), 24, (3, 16, 24)),
}


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("other", OTHERS)
def test_together_with_other_nodes(sample, other, first):
    """At sparsity 0 the other alone; else the calls that it leaves are sparse, in the grid that it leaves."""
    row = tiny.MODELS["wan"]
    model = row.make()
    put_on, calls, grid = OTHERS[other]

    def both(sparsity):
        with_us = partial(comfyui.apply, sparsity=sparsity, min_tokens=0)
        return put_on(with_us(model)) if first == "ours" else with_us(put_on(model))

    assert torch.equal(sample(both(0.0), row, steps=6), sample(put_on(model), row, steps=6))
    fast = both(0.7)
    sample(fast, row, steps=6)
    stats = comfyui.stats(fast)
    assert (stats.sparse_calls, stats.dense_calls) == (calls, 0), str(stats)
    assert list(stats.layouts) == [f"grid {'x'.join(map(str, grid))}"]
