"""The contract with ComfyUI, on a stand-in for it; `make test-hosts` runs the real one."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import rainfusion
from helpers import stand_in_comfyui as comfy
from rainfusion.integrations import comfyui
from rainfusion.integrations.comfyui import models, private_names
from rainfusion.integrations.scenes import NoGrid, Scene
from rainfusion.qualities import QUALITIES, Quality

GRID = (3, 16, 16)
TOKENS = 768


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    comfy.install(monkeypatch)


@pytest.fixture
def x():
    return torch.randn(1, 128, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def text():
    return torch.randn(1, 7, 128, generator=torch.Generator().manual_seed(1))


def model(layers=2):
    return comfy.Patcher(comfy.WanModel(layers))


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# sparse, dense, and nothing left behind


def expected(x, text, **options):
    """One layer, by calls of the library."""
    tokens = torch.nn.functional.avg_pool3d(x, (1, 2, 2)).flatten(2).transpose(1, 2)
    q, k, v = (part.unflatten(-1, (2, -1)) for part in (tokens * 1.5, tokens * 0.5, tokens))
    options |= dict(method=rainfusion.Method.recommended(sparsity=0.6), latent_shape_q=GRID, latent_shape_k=GRID)
    tokens = tokens + rainfusion.sparse_attention(q, k, v, input_layout="BSND", **options).flatten(2)
    return tokens + comfy.dense_attention(tokens, text, text, 2)


def test_sparse_calls_are_those_of_the_library(x, text):
    out = comfyui.apply(model(layers=1), sparsity=0.6, min_tokens=0, schedule="constant").sample(x, text, (1.0,))[0]
    assert torch.equal(out, expected(x, text))


def test_without_noise_levels_density_is_constant_unless_a_shape_was_asked_for(x, text, monkeypatch):
    def missing(*args):
        raise ImportError("no noise levels")

    monkeypatch.setattr(private_names, "sigma_at", missing)
    out = comfyui.apply(model(layers=1), sparsity=0.6, min_tokens=0).sample(x, text, (1.0,))[0]
    assert torch.equal(out, expected(x, text))
    with pytest.raises(ImportError, match="no noise levels"):
        comfyui.apply(model(layers=1), sparsity=0.6, schedule="falling")


def test_sparsity_0_is_bit_equal_to_no_node(x, text):
    patcher = model()
    fast = comfyui.apply(patcher, sparsity=0.0, min_tokens=0)
    assert equal(fast.sample(x, text), patcher.sample(x, text))
    assert comfyui.stats(fast).reasons == {"sparsity is 0": 4}


def test_the_model_is_cloned_and_stays_dense(x, text):
    patcher = model()
    before = patcher.sample(x, text)
    fast = comfyui.apply(patcher, sparsity=0.7, min_tokens=0)
    sparse = fast.sample(x, text)
    assert not equal(sparse, before) and equal(patcher.sample(x, text), before)
    assert equal(fast.sample(x, text), sparse), "a second run"
    assert patcher.wrappers == {} and patcher.callbacks == {}


def test_a_previous_override_is_the_dense_path(x, text):
    seen = []

    def other(func, *args, **kwargs):
        seen.append((args, kwargs))
        return func(*args, **kwargs) * 2

    patcher = model()
    patcher.model_options["transformer_options"]["optimized_attention_override"] = other
    alone = patcher.sample(x, text)
    calls = [(len(args), sorted(kwargs)) for args, kwargs in seen]
    seen.clear()
    assert equal(comfyui.apply(patcher, sparsity=0.0, min_tokens=0).sample(x, text), alone)
    assert [(len(args), sorted(kwargs)) for args, kwargs in seen] == calls, "it gets what it would have got"
    seen.clear()
    comfyui.apply(patcher, sparsity=0.7, min_tokens=0).sample(x, text)
    assert len(seen) == 4, "cross-attention alone"


def test_an_override_that_is_put_on_afterwards_is_the_dense_path_too(x, text):
    seen = []
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0)
    fast.model_options["transformer_options"]["optimized_attention_override"] = lambda func, *args, **kwargs: (
        seen.append(1) or func(*args, **kwargs)
    )
    fast.sample(x, text)
    assert len(seen) == 4 and comfyui.stats(fast).sparse_calls == 4


def test_applied_twice_the_later_settings_hold(x, text):
    once = comfyui.apply(model(), sparsity=0.5, min_tokens=0)
    twice = comfyui.apply(once, sparsity=0.8, min_tokens=0)
    assert equal(twice.sample(x, text), comfyui.apply(model(), sparsity=0.8, min_tokens=0).sample(x, text))
    assert len(twice.wrappers["diffusion_model"]["rainfusion"]) == 1
    assert comfyui.stats(once).sparse_calls == 0, "it was not run"


def test_removed_it_is_dense(x, text):
    patcher = model()
    bare = comfyui.remove(comfyui.apply(patcher, sparsity=0.7, min_tokens=0))
    assert equal(bare.sample(x, text), patcher.sample(x, text))
    with pytest.raises(ValueError, match="apply"):
        comfyui.stats(bare)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_error_in_the_middle_leaves_nothing_behind(x, text, error):
    patcher = model()
    fast = comfyui.apply(patcher, sparsity=0.7, min_tokens=0)
    sparse = fast.sample(x, text)
    transformer = patcher.model.diffusion_model

    def fail(module, args):
        raise error("in the middle")

    hook = transformer.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(error):
        fast.sample(x, text)
    hook.remove()
    assert "optimized_attention_override" not in fast.travelled
    assert not any(module._forward_pre_hooks for module in transformer.modules())
    assert comfyui.stats(fast).sparse_calls == 1, "what ran before it is counted"
    assert equal(fast.sample(x, text), sparse)


def test_the_hooks_last_for_a_forward_only(x, text):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0)
    fast.sample(x, text)
    assert not any(module._forward_pre_hooks for module in fast.model.diffusion_model.modules())
    assert "optimized_attention_override" not in fast.travelled


def test_nothing_is_read_from_the_device_in_a_call(x, text, monkeypatch):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0, schedule="constant")  # a shape reads the noise level

    def read(*args):
        raise AssertionError("read from the device")

    def attempt(layer, q, *args, **kwargs):  # backends are asked elsewhere
        return q

    monkeypatch.setattr(private_names.attached(fast).__self__.decider, "attempt", attempt)
    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "cpu", "__float__", "__int__", "__bool__"):
            patched.setattr(torch.Tensor, name, read)
        fast.sample(x, text)


# ---------------------------------------------------------------------------------------------------------------------
# the schedule, layers, reasons


def test_the_start_and_the_end_of_the_schedule_stay_dense(x, text):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0, dense_start=0.25, dense_end=0.3)
    fast.sample(x, text, (1.0, 0.8, 0.75, 0.5, 0.31, 0.29, 0.1))
    stats = comfyui.stats(fast)
    assert stats.reasons == {
        "the start of the schedule is dense (dense_start)": 4,
        "the end of the schedule is dense (dense_end)": 4,
    }
    assert stats.sparse_calls == 6


def test_a_word_instead_of_a_sparsity(x, text):
    runs = [dict(quality="fast"), dict(sparsity=QUALITIES["fast"].video), dict(quality="balanced"), dict()]
    fast, same, balanced, plain = (comfyui.apply(model(), min_tokens=0, **run).sample(x, text) for run in runs)
    assert equal(fast, same) and equal(balanced, plain) and not equal(fast, plain)
    with pytest.raises(ValueError, match="quality and sparsity both say how much to skip"):
        comfyui.apply(model(), quality="fast", sparsity=0.5)


def test_a_word_may_have_a_dense_start(x, text, monkeypatch):
    monkeypatch.setattr("rainfusion.qualities.QUALITIES", {"calm": Quality(0.5, 0.4, "falling", 0.3)})
    for own, dense in ((0.0, 4), (0.1, 2)):
        fast = comfyui.apply(model(), quality="calm", dense_start=own, min_tokens=0)
        fast.sample(x, text, (1.0, 0.8, 0.6, 0.4))
        assert comfyui.stats(fast).reasons == {"the start of the schedule is dense (dense_start)": dense}
        assert comfyui.stats(fast).sparse_calls == 8 - dense


def test_the_schedule_is_known_to_a_model_that_no_run_began_with(x, text):
    """As the second model of a guider that has two."""
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0, dense_start=0.5)
    options = {"wrappers": fast.wrappers["diffusion_model"], "sigmas": torch.tensor([0.9])}
    fast.model.diffusion_model(x, 0.9, text, transformer_options=options)
    assert comfyui.stats(fast).reasons == {"the start of the schedule is dense (dense_start)": 2}


def test_blocks_are_shared_out_over_the_schedule(x, text):
    """By the noise level, so that a sampler that runs a part of it computes what that part would have had."""
    whole = comfyui.apply(model(), sparsity=0.6, min_tokens=0, schedule="falling", dense_start=0.2)
    whole.sample(x, text, (1.0, 0.8, 0.6, 0.4, 0.2))
    stats = comfyui.stats(whole)
    shares = list(stats.steps.values())
    assert list(stats.steps) == [0, 25, 50, 75] and shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    assert stats.dense_calls == 2
    part = comfyui.apply(model(), sparsity=0.6, min_tokens=0, schedule="falling", dense_start=0.2)
    part.sample(x, text, (0.4, 0.2))
    assert list(comfyui.stats(part).steps.items()) == list(stats.steps.items())[2:]


FROM_IMAGE = {
    "an image beside the text": dict(conditioning={"concat_latent_image": torch.zeros(1)}),
    "a mask for one": dict(conditioning={"concat_mask": torch.zeros(1)}),
    "a reference in the sequence": dict(conditioning={"ref_latent": torch.zeros(1)}),
    "frames that are given": dict(denoise_mask=torch.zeros(1)),
}


@pytest.mark.parametrize("how", FROM_IMAGE)
def test_auto_is_constant_from_an_image(x, text, how):
    constant = comfyui.apply(model(), sparsity=0.6, min_tokens=0, schedule="constant").sample(x, text)
    for word in (dict(sparsity=0.6), dict(quality="fast")):
        fast = comfyui.apply(model(), min_tokens=0, **word)
        found = fast.sample(x, text, **FROM_IMAGE[how])
        assert not comfyui.stats(fast).steps and comfyui.stats(fast).sparse_calls == 4
        assert equal(found, constant) == ("sparsity" in word)
        fast.sample(x, text)
        assert comfyui.stats(fast).steps, "the next run is from text"
    shaped = comfyui.apply(model(), sparsity=0.6, min_tokens=0, schedule="falling")
    shaped.sample(x, text, **FROM_IMAGE[how])
    assert comfyui.stats(shaped).steps, "as it was asked for"


def test_a_schedule_needs_to_know_how_far_it_is(x, text):
    fast = comfyui.apply(model(), sparsity=0.6, min_tokens=0, schedule=[2, 1])
    fast.model.diffusion_model(x, 1.0, text, transformer_options={"wrappers": fast.wrappers["diffusion_model"]})
    assert "schedule depends on it" in next(iter(comfyui.stats(fast).reasons))


def test_a_node_behind_ours_may_change_the_schedule(x, text):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0, dense_start=0.5).clone()
    fast.model = SimpleNamespace(
        diffusion_model=fast.model.diffusion_model,
        model_sampling=SimpleNamespace(percent_to_sigma=lambda share: 0.9),
    )
    fast.sample(x, text, (0.95, 0.85))
    assert comfyui.stats(fast).sparse_calls == 2


def test_a_sampler_that_does_not_say_how_far_it_is_makes_it_dense(x, text):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0, dense_start=0.5)
    options = {"wrappers": fast.wrappers["diffusion_model"]}
    fast.model.diffusion_model(x, 1.0, text, transformer_options=options)
    (reason,) = comfyui.stats(fast).reasons
    assert "dense_start" in reason and comfyui.stats(fast).sparse_calls == 0


def test_keys_that_old_versions_lack_are_not_needed(x, text):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0)
    options = {"wrappers": fast.wrappers["diffusion_model"]}
    fast.model.diffusion_model(x, 1.0, text, transformer_options=options)
    assert comfyui.stats(fast).sparse_calls == 2


def test_layers_to_skip(x, text):
    fast = comfyui.apply(model(layers=3), sparsity=0.7, min_tokens=0, skip_layers="0,2")
    fast.sample(x, text)
    assert comfyui.stats(fast).calls == {
        "blocks.0.self_attn": (0, 2),
        "blocks.1.self_attn": (2, 0),
        "blocks.2.self_attn": (0, 2),
    }


def test_a_picture_of_another_length_is_dense_and_counted(x, text):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0)
    dense = model().sample(x, text)
    assert equal(fast.sample(x, text, time_dim_concat=torch.zeros(1, 128, 1, 32, 32)), dense)
    assert comfyui.stats(fast).reasons == {"768 tokens do not hold a grid of 4x16x16 where this model has it": 4}


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"mask": torch.zeros(1, TOKENS, TOKENS)}, "the model gave a mask for pairs of tokens, not for keys"),
        ({"dropout": 0.5}, "dropout asked for with the call"),
        ({"weights": torch.ones(3)}, "weights asked for with the call"),
    ],
)
def test_what_cannot_be_sparse_is_dense_and_counted(x, text, how, reason):
    patcher = model()
    patcher.model.diffusion_model.how = how
    fast = comfyui.apply(patcher, sparsity=0.7, min_tokens=0)
    assert equal(fast.sample(x, text), patcher.sample(x, text))
    assert comfyui.stats(fast).reasons == {reason: 4}


def test_a_mask_of_keys_is_kept(x, text):
    patcher = model(layers=1)
    mask = torch.zeros(1, 1, TOKENS)
    mask[..., :100] = -torch.inf
    patcher.model.diffusion_model.how = {"mask": mask}
    out = comfyui.apply(patcher, sparsity=0.6, min_tokens=0, schedule="constant").sample(x, text, (1.0,))[0]
    assert torch.equal(out, expected(x, text, attn_mask=mask[:, 0]))


def test_short_sequences_stay_dense_by_themselves(x, text):
    fast = comfyui.apply(model(), sparsity=0.7)
    assert equal(fast.sample(x, text), model().sample(x, text))
    assert comfyui.stats(fast).reasons == {"fewer than 2048 tokens (min_tokens)": 4}


def test_a_block_that_another_node_replaced_is_counted(x, text):
    patcher = model()
    patcher.model.diffusion_model.blocks[0].self_attn.forward = lambda x, options, **how: x
    fast = comfyui.apply(patcher, sparsity=0.7, min_tokens=0)
    fast.sample(x, text, (1.0,))
    stats = comfyui.stats(fast)
    assert stats.calls["blocks.0.self_attn"] == (0, 1) and stats.calls["blocks.1.self_attn"] == (1, 0)
    assert "did not come past" in next(iter(stats.reasons))


def test_a_call_that_must_be_sparse_is_an_error_if_the_user_wants_that(x, text):
    patcher = model()
    patcher.model.diffusion_model.how = {"dropout": 0.5}
    with pytest.raises(ValueError, match="dropout"):
        comfyui.apply(patcher, sparsity=0.7, min_tokens=0, on_unsupported="error").sample(x, text)


def test_the_summary_is_in_the_log_at_the_end_of_a_run(x, text, caplog):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0)
    with caplog.at_level(logging.INFO, "rainfusion"):
        fast.sample(x, text)
    assert "WanModel: 4 sparse and 0 dense attention calls" in caplog.text and "grid 3x16x16" in caplog.text


def test_counts_begin_again_with_every_run(x, text):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0)
    for _ in range(3):
        fast.sample(x, text)
    assert comfyui.stats(fast).sparse_calls == 4


def test_a_model_that_nobody_says_begins_again_counts_anew(x, text):
    """As the second model of a guider that has two."""
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0)
    for _ in range(2):
        fast._forward(x, text, 1.0, {})
        assert comfyui.stats(fast).sparse_calls == 2
        fast._call("on_cleanup")


def test_an_error_of_the_device_is_not_hidden_by_the_summary(x, text, monkeypatch, caplog):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0)
    fast.sample(x, text)

    def failed():
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(private_names.attached(fast).__self__.decider, "stats", failed)
    fast._call("on_cleanup")
    assert "the counts cannot be read: CUDA error" in caplog.text


def test_an_override_that_is_put_on_inside_the_forward_is_named(x, text):
    fast = comfyui.apply(model(), sparsity=0.7, min_tokens=0)

    def inside(executor, x, timestep, context, options, **kwargs):
        options["optimized_attention_override"] = lambda func, *args, **kwargs: func(*args, **kwargs)
        return executor(x, timestep, context, options, **kwargs)

    fast.add_wrapper_with_key("diffusion_model", "other", inside)
    fast.sample(x, text, (1.0,))
    assert list(comfyui.stats(fast).reasons) == [
        "its attention call did not come past: another node took the calls over inside the forward"
    ]
    assert "optimized_attention_override" not in fast.travelled


def test_blocks_that_are_compiled_have_the_same_names(x, text):
    patcher = model()
    transformer = patcher.model.diffusion_model
    transformer.blocks[1] = torch.compile(transformer.blocks[1], backend="eager")
    fast = comfyui.apply(patcher, sparsity=0.7, min_tokens=0)
    fast.sample(x, text)
    assert comfyui.stats(fast).calls == {"blocks.0.self_attn": (2, 0), "blocks.1.self_attn": (2, 0)}
    patcher.model.diffusion_model = torch.compile(transformer, backend="eager")
    assert len(comfyui.stats(comfyui.apply(patcher)).calls) == 2


def test_a_report_of_a_model_without_it_is_no_error():
    assert "not on this model" in comfyui.report(model())


def test_two_models_have_counts_and_settings_of_their_own(x, text):
    high, low = (comfyui.apply(model(), sparsity=s, min_tokens=0) for s in (0.5, 0.9))
    high.sample(x, text)
    low.sample(x, text, (0.5,))
    assert comfyui.stats(high).sparse_calls == 4 and comfyui.stats(low).sparse_calls == 2
    assert comfyui.stats(high).mean_density > comfyui.stats(low).mean_density


# ---------------------------------------------------------------------------------------------------------------------
# layouts of attention calls


@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("result_apart", [False, True])
def test_every_layout_of_tensors_and_results(heads_apart, result_apart):
    q = torch.randn(2, 3, 10, 8)
    given = q if heads_apart else q.transpose(1, 2).flatten(2)
    call = private_names.attention(given, given, given, 3, None, None, heads_apart, result_apart)
    assert torch.equal(call.q, q)
    assert torch.equal(call.result(q), q if result_apart else q.transpose(1, 2).flatten(2))


def test_fewer_heads_of_keys():
    call = private_names.attention(torch.randn(1, 5, 32), torch.randn(1, 5, 16), torch.randn(1, 5, 16), 4)
    assert call.q.shape == (1, 4, 5, 8) and call.k.shape == (1, 2, 5, 8)


# ---------------------------------------------------------------------------------------------------------------------
# where the picture lies


def latents(*shape):
    return torch.empty(1, 16, *shape)


def transformer(**attributes):
    return SimpleNamespace(**{"patch_size": (1, 2, 2), **attributes})


VIDEO = latents(5, 32, 48)
FIRST = latents(1, 32, 48)
WIDE = latents(62, 94)
TEXT = torch.empty(1, 9, 4)
CLIP = (5, 16, 24)
IMAGE = (1, 16, 24)
PADDED = {"patch_size": 2, "pad_tokens_multiple": 32}
FLIPPED = SimpleNamespace(flipped_img_txt=True)


@pytest.mark.parametrize(
    ("kind", "attributes", "given", "scene"),
    [
        ("WanModel", {}, dict(x=latents(5, 31, 48)), Scene((CLIP,), alone=True)),
        ("WanModel", {}, dict(x=VIDEO, time_dim_concat=latents(2, 32, 48)), Scene(((7, 16, 24),), alone=True)),
        ("WanModel", {"ref_conv": None}, dict(x=VIDEO, reference_latent=FIRST[:, :, 0]), Scene((CLIP,), alone=True)),
        ("WanModel", {"ref_conv": 1}, dict(x=VIDEO, reference_latent=FIRST[:, :, 0]), Scene((IMAGE, CLIP), alone=True)),
        ("WanModel", {}, dict(x=VIDEO, context_latents=[FIRST]), Scene((CLIP, IMAGE), alone=True)),
        ("HumoWanModel", {}, dict(x=VIDEO, reference_latent=FIRST), Scene((CLIP, IMAGE), alone=True)),
        ("WanModel_S2V", {}, dict(x=VIDEO, reference_motion=1), Scene((CLIP,))),
        (
            "SCAILWanModel", {}, dict(x=VIDEO, reference_latent=FIRST, pose_latents=latents(5, 16, 24)),
            Scene(((6, 16, 24), (5, 8, 12)), alone=True),
        ),
        ("Flux", {"patch_size": 2}, dict(x=latents(31, 48), context=TEXT), Scene((IMAGE,), 9, after=0)),
        (
            "Flux", {"patch_size": 2}, dict(x=latents(32, 48), context=TEXT, ref_latents=[latents(16, 16)]),
            Scene((IMAGE, (1, 8, 8)), 9, after=0),
        ),
        (
            "Chroma", {"patch_size": 2}, dict(x=latents(31, 48), context=TEXT, ref_latents=[latents(16, 16)]),
            Scene((IMAGE,), 9, after=0),
        ),
        (
            "QwenImageTransformer2DModel", {"patch_size": 2},
            dict(x=FIRST, context=TEXT, ref_latents=[latents(1, 16, 16)] * 2),
            Scene((IMAGE, (1, 8, 8), (1, 8, 8)), 9, after=0),
        ),
        ("HunyuanVideo", {"double_blocks": [None]}, dict(x=VIDEO, context=TEXT), Scene((CLIP,), 9, after=0)),
        (
            "HunyuanVideo", {"double_blocks": [None], "byt5_in": 1},
            dict(x=VIDEO, context=TEXT, txt_byt5=torch.empty(1, 4, 4), clip_fea=torch.empty(1, 3, 4)),
            Scene((CLIP,), 16, after=0),
        ),
        ("HunyuanVideo", {"double_blocks": [FLIPPED]}, dict(x=VIDEO, context=TEXT), Scene((CLIP,), 0, after=9)),
        (
            "HunyuanVideo", {"double_blocks": [None]}, dict(x=VIDEO, context=TEXT, ref_latent=FIRST),
            Scene((IMAGE, CLIP), 9, after=0),
        ),
        (
            "HunyuanVideo", {"double_blocks": [None], "patch_size": [1, 1]}, dict(x=latents(64, 64), context=TEXT),
            Scene(((1, 64, 64),), 9, after=0),
        ),
        ("NextDiT", PADDED, dict(x=WIDE), Scene(((1, 31, 47),), None, after=15)),
        ("NextDiT", {"patch_size": 2, "pad_tokens_multiple": None}, dict(x=WIDE), Scene(((1, 31, 47),), None, after=0)),
        (
            "NextDiT", PADDED, dict(x=WIDE, ref_latents=[latents(10, 6)]),
            Scene(((1, 5, 3), (1, 31, 47)), None, gaps=(17,), after=15),
        ),
        ("LTXVModel", {"patch_size": 1}, dict(x=[latents(5, 16, 24), latents(8, 9)]), Scene((CLIP,), alone=True)),
        ("MiniTrainDIT", {"patch_temporal": 1, "patch_spatial": 2}, dict(x=VIDEO), Scene((CLIP,), alone=True)),
        ("GeneralDIT", {"patch_temporal": 1, "patch_spatial": 2}, dict(x=VIDEO), Scene((CLIP,), alone=True)),
        ("HiDreamImageTransformer2DModel", {"patch_size": 2}, dict(x=latents(32, 48)), Scene((IMAGE,))),
        (
            "HiDreamImageTransformer2DModel", {"patch_size": 2}, dict(x=latents(32, 48), image_cond=latents(32, 48)),
            Scene(((1, 16, 48),)),
        ),
    ],
)  # fmt: skip
def test_where_the_picture_lies(kind, attributes, given, scene):
    assert models.MODELS[kind].scene(given, transformer(**attributes)) == scene


@pytest.mark.parametrize("given", [{}, {"x": None}, {"x": "latents"}, {"x": latents(4, 4), "context": None}])
def test_no_grid_in_what_a_model_was_given(given):
    with pytest.raises(NoGrid):
        models.MODELS["Flux"].scene(given, transformer(patch_size=2))


def test_padding_tokens_lie_between_and_behind_the_pictures():
    scene = Scene(((1, 5, 3), (1, 31, 47)), None, gaps=(17,), after=15)
    placed = scene.place(64 + 15 + 17 + 31 * 47 + 15)
    assert (placed.before, placed.after) == (64, 15)
    assert scene.place(15 + 17 + 31 * 47 + 14) is None


# ---------------------------------------------------------------------------------------------------------------------
# what users do wrong


def test_a_model_that_is_not_known_says_how_to_make_it_known(x, text, monkeypatch):
    class Other(comfy.WanModel):
        pass

    class Stranger(torch.nn.Module):
        pass

    assert comfyui.apply(comfy.Patcher(Other()), min_tokens=0), "derived from one that is known"
    with pytest.raises(ValueError, match=r"(?s)Stranger is not a model .*register_model"):
        comfyui.apply(comfy.Patcher(Stranger()))
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    comfyui.register_model(Stranger, attention=["blocks.*"], scene=models.alone)
    with pytest.raises(ValueError, match=r"works with ComfyUI 0.3.64, .*; ComfyUI 0.19.3 has no blocks"):
        comfyui.apply(comfy.Patcher(Stranger()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.5}, "sparsity"),
        ({"dense_start": 2}, "dense_start must be in"),
        ({"dense_end": float("nan")}, "dense_end must be in"),
        ({"skip_layers": "0-9"}, "skip_layers must be layers of WanModel"),
        ({"precision": "fp4"}, "precision"),
        ({"method": "best"}, "method must be"),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
def test_bad_arguments(arguments, message):
    patcher = model()
    with pytest.raises(ValueError, match=message):
        comfyui.apply(patcher, **arguments)
    assert patcher.wrappers == {}


def test_what_is_no_model_says_so():
    with pytest.raises(TypeError, match=r"must be a MODEL of ComfyUI.*got str"):
        comfyui.apply("wan.safetensors")


def test_a_version_that_lacks_something_is_named(monkeypatch):
    comfy.install(monkeypatch, "0.2.0")
    monkeypatch.delattr(sys.modules["comfy.patcher_extension"], "WrappersMP")
    with pytest.raises(ImportError, match=r"works with ComfyUI .* and 0.19.3; ComfyUI 0.2.0 lacks .*WrappersMP"):
        comfyui.apply(model())


def test_importing_it_imports_no_host():
    code = "import sys, rainfusion.integrations.comfyui; print([name for name in sys.modules if 'comfy' in name])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all("rainfusion" in name for name in eval(found))


# ---------------------------------------------------------------------------------------------------------------------
# the folder


def test_the_folder_has_help_for_both_nodes_and_workflows_with_them():
    assert {path.stem for path in (comfyui.FOLDER / "web" / "docs").iterdir()} == {
        "RainFusionSparseAttention",
        "RainFusionReport",
    }
    workflows = sorted((comfyui.FOLDER / "example_workflows").glob("*.json"))
    assert len(workflows) == 2
    for path in workflows:
        graph = json.loads(path.read_text())
        assert {"RainFusionSparseAttention", "RainFusionReport"} <= {node["type"] for node in graph["nodes"]}
        slots = {node["id"]: node for node in graph["nodes"]}
        for number, source, out, target, to, kind in graph["links"]:
            assert number in slots[source]["outputs"][out]["links"]
            assert slots[target]["inputs"][to]["link"] == number
            assert kind in (slots[target]["inputs"][to]["type"], "*") or slots[target]["inputs"][to]["type"] == "*"
