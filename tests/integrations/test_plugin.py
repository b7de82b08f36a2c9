"""`rainfusion.enable` on models and pipelines of diffusers: found grids, steps, layers, and what is left behind."""

import copy
import gc
import inspect
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch

import rainfusion
from helpers import offline_pipelines, tiny_models
from helpers.offline_pipelines import PIPELINES, sample
from rainfusion.integrations import decider as calls
from rainfusion.integrations import settings
from rainfusion.integrations.diffusers import models
from rainfusion.integrations.diffusers import private_names as hub
from rainfusion.integrations.diffusers.host import ATTRIBUTE, LAYER


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def native_backend():
    """`set_attention_backend` of a model sets that of the process, too."""
    registry = attention_dispatch._AttentionBackendRegistry
    active = registry._active_backend
    yield
    registry.set_active_backend(active)


@pytest.fixture
def placed(monkeypatch):
    """Where each sparse call had its clips."""
    seen = []
    run = calls.run

    def recorded(tally, layer, inputs, way):
        seen.append(way.placed)
        return run(tally, layer, inputs, way)

    monkeypatch.setattr(calls, "run", recorded)
    return seen


def forward(model, inputs):
    with torch.no_grad():
        out = model(**inputs, return_dict=False)[0]
    return out[0] if isinstance(out, (list, tuple)) else out


def snapshot(model):
    """Everything that enabling could leave behind."""
    state = {}
    for name, module in model.named_modules():
        hooks = [len(getattr(module, table)) for table in vars(module) if "hooks" in table]
        processor = getattr(module, "processor", None)
        state[name] = (
            sorted(vars(module)), hooks, id(processor), None if processor is None else dict(vars(processor)),
            module.__dict__.get("forward"),
        )  # fmt: skip
    return state


def wide_wan(**kwargs):
    """1,536 tokens: twelve blocks."""
    return tiny_models.ALL["wan"](t=4, h=32, w=48, **kwargs)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_every_family_is_sparse_where_its_picture_is(name, placed):
    model, inputs, expected = tiny_models.ALL[name]()
    before, dense = snapshot(model), forward(model, inputs)
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.8)
    sparse = forward(model, inputs)
    stats = handle.stats()
    if name in ("chroma", "skyreels_v2_causal"):  # their masks are of pairs
        assert stats.sparse_calls == 0 and stats.dense_calls == expected.calls
        assert list(stats.reasons) == ["the model gave a mask for pairs of tokens, not for keys"]
        assert torch.equal(sparse, dense)
    else:
        assert (stats.sparse_calls, stats.dense_calls, stats.reasons) == (expected.calls, 0, {})
        found = {
            (clips.grids[0], clips.before, clips.after + sum(t * h * w for t, h, w in clips.grids[1:]))
            for clips in placed
        }
        assert found == {(expected.grid, *ends) for ends in zip(expected.prefix, expected.suffix, strict=True)}
        # one block, or two: nothing to skip, and so the same result as dense attention but for rounding
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-4)
    rainfusion.disable(model)
    assert snapshot(model) == before
    assert torch.equal(forward(model, inputs), dense)


@pytest.mark.parametrize("name", tiny_models.DENSE)
def test_tokens_in_another_order_stay_dense(name):
    model, inputs, expected = tiny_models.DENSE[name]()
    dense = forward(model, inputs)
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.8)
    assert torch.equal(forward(model, inputs), dense)
    stats = handle.stats()
    assert stats.sparse_calls == 0 and stats.dense_calls == expected.calls
    (reason,) = stats.reasons
    assert reason.startswith("no grid: ")


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_sparsity_0_is_dense_to_the_last_bit(name):
    model, inputs, _ = tiny_models.ALL[name]()
    dense = forward(model, inputs)
    rainfusion.enable(model, min_tokens=0, sparsity=0.0)
    assert torch.equal(forward(model, inputs), dense)


def test_a_call_is_the_sparse_attention_that_one_would_write(monkeypatch):
    model, inputs, expected = wide_wan()
    handle = rainfusion.enable(model, sparsity=0.6, min_tokens=0)
    sparse = forward(model, inputs)
    density = handle.stats().density
    rainfusion.disable(model)
    masks = []

    def by_hand(query, key, value, **_):
        if query.shape[1] != key.shape[1]:
            return attention_dispatch.dispatch_attention_fn(query, key, value)
        out, mask = rainfusion.sparse_attention(
            query, key, value, input_layout="BSND", sparse_type="rf_v2", sparsity=0.6, first_frame="free",
            predictor="submeans", compensate=True, latent_shape_q=list(expected.grid), return_mask=True,
        )  # fmt: skip
        masks.append(mask)
        return out

    monkeypatch.setattr("diffusers.models.transformers.transformer_wan.dispatch_attention_fn", by_hand)
    assert torch.equal(forward(model, inputs), sparse)
    assert list(density.values()) == pytest.approx([mask.density() for mask in masks])
    assert all(0.4 < share < 0.8 for share in density.values())


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_a_profile_is_made_saved_and_used(tmp_path):
    model, inputs, _ = wide_wan()
    before, dense = snapshot(model), forward(model, inputs)
    seen = []
    options = dict(predictor="mean", compensate=False)
    profile = rainfusion.calibrate(model, lambda: seen.append(forward(model, inputs)), sparsity=0.5, **options)
    assert snapshot(model) == before and torch.equal(seen[0], dense)  # dense meanwhile, and off again
    heads = [share for layer in profile.sparsities.values() for share in layer]
    assert len(profile.sparsities) == 2 and sum(heads) / len(heads) == pytest.approx(0.5, abs=1e-3)
    assert profile.options == dict(token_order="window", first_frame="free", **options) and profile.notes["calls"] == 2
    profile.save(tmp_path / "wan.json")
    with rainfusion.enabled(model, profile=tmp_path / "wan.json", min_tokens=0) as handle:
        sparse = forward(model, inputs)
    stats = handle.stats()
    assert stats.sparse_calls == 2 and stats.mean_density == pytest.approx(0.5, abs=1 / 12)
    assert 0 < (sparse - dense).norm() / dense.norm() < 0.5


def test_calibrating_puts_back_what_was_enabled():
    model, inputs, _ = wide_wan()
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.7)
    expected = forward(model, inputs)
    with pytest.raises(ZeroDivisionError):
        rainfusion.calibrate(model, lambda: 1 / 0)
    assert torch.equal(forward(model, inputs), expected) and handle.stats().sparse_calls == 4


def test_a_profile_of_another_model_is_refused():
    model, _, _ = wide_wan()
    profile = rainfusion.Profile({"blocks.0.attn1": (0.5, 0.5)}, 0.5, {})
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"no layer 'blocks\.1\.attn1'.* calibrate what you enable"):
        rainfusion.enable(model, profile=profile)
    assert snapshot(model) == before


def test_a_profile_with_other_heads_is_an_error_at_the_first_call():
    model, inputs, _ = wide_wan()
    profile = rainfusion.Profile({f"blocks.{i}.attn1": (0.5,) * 5 for i in (0, 1)}, 0.5, {})
    rainfusion.enable(model, profile=profile, min_tokens=0)
    with pytest.raises(ValueError, match=r"the profile has 5 heads for blocks\.0\.attn1, which has 2"):
        forward(model, inputs)


def test_a_profile_brings_its_options_along():
    model, _, _ = wide_wan()
    shares = {f"blocks.{i}.attn1": (0.5, 0.5) for i in (0, 1)}
    profile = rainfusion.Profile(shares, 0.5, dict(predictor="mean", first_frame="keys", compensate=False))
    settled = rainfusion.enable(model, profile=profile, token_order="raster").settings.method
    assert (settled.predictor, settled.first_frame, settled.compensate, settled.token_order) == (
        "mean", "keys", False, "raster",
    )  # fmt: skip
    with pytest.raises(
        ValueError, match="first_frame must be that of the profile, 'keys', or left out, got 'protected'"
    ):
        rainfusion.enable(model, profile=profile, first_frame="protected")


def test_layers_that_are_skipped_need_no_budget():
    model, inputs, _ = wide_wan()
    with pytest.warns(UserWarning, match=r"1 of 2 layers had no call to measure, blocks\.0\.attn1"):
        profile = rainfusion.calibrate(model, lambda: forward(model, inputs), sparsity=0.5, skip_layers=0)
    with rainfusion.enabled(model, profile=profile, skip_layers=0, min_tokens=0) as handle:
        forward(model, inputs)
    assert handle.stats().sparse_calls == handle.stats().dense_calls == 1


def test_calibrating_under_another_default_device():
    model, inputs, _ = wide_wan()
    with torch.device("meta"):
        profile = rainfusion.calibrate(model, lambda: forward(model, inputs), sparsity=0.5)
    assert len(profile.sparsities) == 2


def test_two_transformers_have_layers_of_their_own_names():
    pipe = offline_pipelines.wan_two_experts()

    def run():
        pipe("a cat", num_inference_steps=4, height=256, width=384, num_frames=9, output_type="latent")

    profile = rainfusion.calibrate(pipe, run, sparsity=0.4)
    assert {name.split(".")[0] for name in profile.sparsities} == {"transformer", "transformer_2"}
    with rainfusion.enabled(pipe, profile=profile, min_tokens=0) as handle:
        run()
    assert handle.stats().sparse_calls > 0 and not handle.stats().dense_calls


def test_an_error_sets_the_budgets():
    model, inputs, _ = wide_wan()
    densities = []
    for target in (0.9, 0.01):
        with rainfusion.enabled(model, target_error=target, min_tokens=0) as handle:
            forward(model, inputs)
        assert handle.stats().dense_calls == 0
        densities.append(handle.stats().mean_density)
    assert densities[0] < densities[1]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(profile={"format": "x"}), ValueError, "must be a profile of `rainfusion calibrate`"),
        (dict(profile="/no/such/file"), OSError, "no/such/file"),
        (dict(profile={}, sparsity=0.5), ValueError, "profile takes the place of sparsity"),
        (dict(target_error=0.1, sparsity=0.5), ValueError, "target_error takes the place of sparsity"),
        (dict(target_error=0.1, profile={}), ValueError, "pass one of them"),
        (dict(target_error=2.0), ValueError, "target_error must be in"),
        (dict(first_frame="x"), ValueError, "first_frame must be one of"),
    ],
)
def test_wrong_budgets(kwargs, error, message):
    with pytest.raises(error, match=message):
        rainfusion.enable(tiny_models.ALL["wan"]()[0], **kwargs)


def test_calibrate_takes_the_options_of_enable():
    with pytest.raises(TypeError, match="options of enable but profile and target_error, got profile, sparseness"):
        rainfusion.calibrate(wide_wan()[0], lambda: None, sparseness=0.5, profile="x")
    with pytest.raises(ValueError, match="sparse_type must be 'rf_v2'"):
        rainfusion.calibrate(wide_wan()[0], lambda: None, sparse_type="ada_bsa")
    with pytest.raises(ValueError, match="no attention call could be measured"):
        rainfusion.calibrate(wide_wan()[0], lambda: None)


def test_sparsity_by_task():
    model, inputs, _ = wide_wan()
    with rainfusion.enabled(model, min_tokens=0) as handle:
        forward(model, inputs)
    video = handle.stats().mean_density
    with rainfusion.enabled(model, min_tokens=0, sparsity=0.8) as handle:
        forward(model, inputs)
    assert handle.stats().mean_density == video
    model, inputs, _ = tiny_models.ALL["flux"](h=32, w=48, text=64)
    with rainfusion.enabled(model, min_tokens=0) as handle:
        forward(model, inputs)
    image = handle.stats().mean_density
    with rainfusion.enabled(model, min_tokens=0, sparsity=0.6) as handle:
        forward(model, inputs)
    assert handle.stats().mean_density == image


def test_key_masks_are_honoured():
    """Padding text must not change a token, whatever it holds."""
    model, inputs, _ = tiny_models.ALL["hunyuan"]()
    rainfusion.enable(model, min_tokens=0)
    first = forward(model, inputs)
    inputs["encoder_hidden_states"][1, 9:] = 7.0
    second = forward(model, inputs)
    assert torch.equal(first[1], second[1])
    inputs["encoder_attention_mask"][1, 9:] = 1
    assert not torch.equal(forward(model, inputs)[1], second[1])


def test_padding_queries_give_zero():
    """HunyuanVideo 1.5 masks pairs: its padding sees nothing, and dense attention says 0 for it."""
    keys = torch.tensor([[True, True, False, False]])
    pairs = (keys[:, None, :] & keys[:, :, None])[:, None]
    x = torch.zeros(1, 2, 4, 8)
    assert torch.equal(calls.plain_key_mask(pairs, x, x, True), keys)
    with pytest.raises(calls.Dense, match="pairs of tokens"):
        calls.plain_key_mask(pairs, x, x, False)
    model, inputs, _ = tiny_models.ALL["hunyuan15"]()
    outs = []
    original = calls.run
    rainfusion.enable(model, min_tokens=0)
    module = model.transformer_blocks[0].attn
    module.register_forward_hook(lambda _, args, out: outs.append(out))
    assert forward(model, inputs).isfinite().all() and calls.run is original
    assert all(part.isfinite().all() for part in outs[0])


def test_short_sequences_stay_dense():
    model, inputs, _ = wide_wan()
    for kwargs, sparse in ((dict(), 0), (dict(min_tokens=1537), 0), (dict(min_tokens=1536), 2)):
        with rainfusion.enabled(model, **kwargs) as handle:
            forward(model, inputs)
        stats = handle.stats()
        assert stats.sparse_calls == sparse
        assert all("min_tokens" in reason for reason in stats.reasons)


def test_ada_bsa():
    model, inputs, _ = wide_wan()
    dense = forward(model, inputs)
    with rainfusion.enabled(model, sparse_type="ada_bsa", cdf_threshold=0.5, min_tokens=0) as handle:
        sparse = forward(model, inputs)
    assert handle.stats().sparse_calls == 2 and handle.stats().mean_density < 0.9
    assert 0 < (sparse - dense).norm() / dense.norm() < 0.5


def test_predictor_and_compensation_reach_the_call():
    """Which is better is a question of the data: here it is noise."""
    model, inputs, _ = wide_wan()
    dense = forward(model, inputs)
    errors = []
    given = [dict(predictor="mean"), dict(compensate=False), dict(first_frame="protected"), dict(sparse_type="ada_bsa")]
    for kwargs in (dict(), *given, dict(sparse_type="ada_bsa", compensate=True)):
        with rainfusion.enabled(model, min_tokens=0, sparsity=0.8, **kwargs) as handle:
            errors.append(float((forward(model, inputs) - dense).norm()))
        assert handle.stats().dense_calls == 0
    assert len(set(errors)) == 6
    assert errors[0] == float((_enabled(model, inputs, predictor="submeans", compensate=True) - dense).norm())
    assert errors[4] == float((_enabled(model, inputs, sparse_type="ada_bsa", compensate=False) - dense).norm())


def _enabled(model, inputs, **kwargs):
    with rainfusion.enabled(model, min_tokens=0, sparsity=0.8, **kwargs):
        return forward(model, inputs)


def test_gradients_stay_possible():
    model, inputs, _ = wide_wan()
    handle = rainfusion.enable(model, min_tokens=0)
    model(**inputs, return_dict=False)[0].sum().backward()
    assert model.blocks[0].attn1.to_q.weight.grad is not None
    assert any("gradients" in reason for reason in handle.stats().reasons)


def test_on_unsupported_error():
    model, inputs, _ = tiny_models.ALL["chroma"]()
    rainfusion.enable(model, min_tokens=0, on_unsupported="error")
    with pytest.raises(ValueError, match=r"transformer_blocks\.0\.attn cannot be sparse: the model gave a mask"):
        forward(model, inputs)
    rainfusion.disable(model)
    forward(model, inputs)


@pytest.mark.filterwarnings("ignore:precision='fp8' runs on Hopper")
def test_a_precision_that_cannot_run_here_is_said():
    model, inputs, _ = wide_wan()
    dense = forward(model, inputs)
    with pytest.warns(UserWarning, match="runs on Hopper GPUs"):
        rainfusion.enable(model, precision="fp8")
    rainfusion.disable(model)
    with rainfusion.enabled(model, min_tokens=0, precision="fp8") as handle:
        assert torch.equal(forward(model, inputs), dense)
    (reason,) = handle.stats().reasons
    assert "precision='fp8' cannot run this call" in reason


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
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, inputs, expected = tiny_models.ALL["wan"]()
    handle = rainfusion.enable(model, min_tokens=0)
    model.blocks[0].attn1.set_processor(WanAttnProcessor())
    model.fuse_qkv_projections()
    forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls
    rainfusion.disable(model)
    assert all(vars(block.attn1.processor) == {} for block in model.blocks)


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


# --- pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name):
    make, inputs, forwards = PIPELINES[name]
    pipe = make()
    dense = sample(pipe, inputs)
    handle = rainfusion.enable(pipe, min_tokens=0, start_step=1, end_step=0.25, skip_layers="0")
    sparse = sample(pipe, inputs)
    stats = handle.stats()
    assert stats.sparse_calls == forwards * 2  # one layer of two, in the two steps of the middle
    assert stats.reasons == {
        "the layer is in skip_layers": forwards * 4,
        "the first steps are dense (start_step)": forwards,
        "the last steps are dense (end_step)": forwards,
    }
    torch.testing.assert_close(sparse, dense, rtol=1e-3, atol=1e-3)
    assert torch.equal(sample(pipe, inputs), sparse)  # the count of steps begins again
    assert handle.stats().sparse_calls == 2 * stats.sparse_calls
    rainfusion.disable(pipe)
    assert torch.equal(sample(pipe, inputs), dense)


def test_two_experts_share_the_steps():
    pipe = offline_pipelines.wan(experts=2)
    handle = rainfusion.enable(pipe, min_tokens=0, start_step=2)
    sample(pipe, PIPELINES["wan"][1])
    stats = handle.stats()
    by_expert = {
        name: sum(sparse for layer, (sparse, _) in stats.calls.items() if layer.startswith(f"{name}."))
        for name in ("transformer", "transformer_2")
    }
    assert sum(by_expert.values()) == 2 * 2 * 2  # two steps, two forwards, two layers
    assert stats.dense_calls == 8 and by_expert["transformer_2"] > 0


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


def test_a_run_that_was_broken_off_does_not_count_on():
    make, inputs, _ = PIPELINES["cogvideox"]
    pipe = make()
    handle = rainfusion.enable(pipe, min_tokens=0, start_step=1)

    def stop(pipe, step, timestep, kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(pipe, inputs, callback_on_step_end=stop)
    sample(pipe, inputs)
    assert handle.stats().sparse_calls == 3 * 2  # steps 1 to 3 of the second run, two layers


def test_two_pipelines_do_not_meet():
    inputs = PIPELINES["wan"][1]
    first, second = offline_pipelines.wan(), offline_pipelines.wan()
    one = rainfusion.enable(first, min_tokens=0)
    two = rainfusion.enable(second, min_tokens=0, skip_layers=[0])
    threads = [threading.Thread(target=sample, args=(pipe, inputs)) for pipe in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (one.stats().sparse_calls, one.stats().dense_calls) == (16, 0)
    assert (two.stats().sparse_calls, two.stats().dense_calls) == (8, 8)
    rainfusion.disable(first)
    sample(second, inputs)
    assert two.stats().sparse_calls == 16


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_copies_stand_on_their_own(name):
    make, inputs, _ = PIPELINES[name]
    pipe = make()
    dense = sample(pipe, inputs)
    handle = rainfusion.enable(pipe, min_tokens=0)
    sparse = sample(pipe, inputs)
    counted = handle.stats().sparse_calls
    twin, idle = copy.deepcopy(pipe), copy.deepcopy(pipe)
    rainfusion.disable(idle)  # before it ever ran
    assert torch.equal(sample(idle, inputs), dense)
    assert torch.equal(sample(twin, inputs), sparse)
    assert handle.stats().sparse_calls == counted
    rainfusion.disable(twin)
    assert torch.equal(sample(twin, inputs), dense)
    assert torch.equal(sample(pipe, inputs), sparse)


def test_saving_writes_the_same_files(tmp_path):
    pipe = offline_pipelines.wan()
    pipe.transformer.save_pretrained(tmp_path / "before")
    rainfusion.enable(pipe, min_tokens=0)
    pipe.transformer.save_pretrained(tmp_path / "after")
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "after").iterdir())
    for name in files:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


def test_a_model_that_is_dropped_is_freed():
    model, inputs, _ = tiny_models.ALL["wan"]()
    rainfusion.enable(model, min_tokens=0)
    forward(model, inputs)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


# --- with the rest of diffusers --------------------------------------------------------------------------------------


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
    handle = rainfusion.enable(compiled, min_tokens=0)
    torch.testing.assert_close(forward(compiled, inputs), dense, rtol=1e-5, atol=1e-5)
    assert handle.stats().sparse_calls == expected.calls
    rainfusion.disable(compiled)
    assert ATTRIBUTE not in vars(model)


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


# --- what users do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cogvideox", "cosmos"])
def test_an_interrupt_leaves_nothing_around_torch(name, monkeypatch):
    """Ctrl-C in the middle of attention is no Exception."""
    model, inputs, _ = tiny_models.ALL[name]()

    def interrupted(*_):
        raise KeyboardInterrupt

    handle = rainfusion.enable(model, min_tokens=0, on_unsupported="error")
    with monkeypatch.context() as patch:
        patch.setattr(calls, "run", interrupted)
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


@pytest.mark.parametrize("strength", [0.5, 0.8])
def test_a_run_that_begins_in_the_middle_of_the_schedule(strength):
    """Video to video; its pipeline does not tell the scheduler where it begins."""
    from diffusers import WanVideoToVideoPipeline

    pipe = WanVideoToVideoPipeline(**{
        name: part for name, part in offline_pipelines.wan().components.items()
        if name in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    })  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    handle = rainfusion.enable(pipe, min_tokens=0, start_step=1, end_step=1)
    video = [torch.rand(3, 32, 48) for _ in range(9)]
    pipe(
        video=torch.stack(video)[None], num_inference_steps=10, strength=strength,
        prompt_embeds=torch.randn(1, 16, 32), negative_prompt_embeds=torch.randn(1, 16, 32), height=32, width=48,
        output_type="latent",
    )  # fmt: skip
    steps = round(10 * strength)
    per_step = 2 * 2  # forwards, layers
    assert handle.stats().sparse_calls == (steps - 2) * per_step
    assert set(handle.stats().reasons.values()) == {per_step}


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


@pytest.mark.parametrize("name", ["wan", "cogvideox", "sd3"])
@pytest.mark.parametrize("how", ["model", "in place", "blocks"])
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
    handle = rainfusion.enable(compiled, min_tokens=0)
    torch.testing.assert_close(forward(compiled, inputs), dense, rtol=1e-4, atol=1e-4)
    assert handle.stats().sparse_calls == expected.calls
    rainfusion.disable(compiled)
    forward(compiled, inputs)
    assert handle.stats().sparse_calls == expected.calls


def test_attention_that_goes_elsewhere_is_counted(monkeypatch):
    model, inputs, expected = tiny_models.ALL["sd3"]()
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: q)  # as some libraries do
    handle = rainfusion.enable(model, min_tokens=0)
    forward(model, inputs)
    assert handle.stats().dense_calls == expected.calls
    assert "does not call torch's function" in next(iter(handle.stats().reasons))


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


def test_a_transformer_that_is_replaced():
    pipe, other = offline_pipelines.wan(), offline_pipelines.wan()
    first = pipe.transformer
    rainfusion.enable(pipe, min_tokens=0)
    pipe.transformer = other.transformer
    rainfusion.disable(pipe)
    assert ATTRIBUTE not in vars(first)


def test_one_transformer_under_two_names():
    pipe = offline_pipelines.wan()
    pipe.register_modules(transformer_2=pipe.transformer)
    before = snapshot(pipe.transformer)
    rainfusion.enable(pipe, min_tokens=0)
    rainfusion.disable(pipe)
    assert snapshot(pipe.transformer) == before


def test_a_default_device_changes_nothing():
    model, inputs, expected = tiny_models.ALL["wan"]()
    with torch.device("meta"):
        handle = rainfusion.enable(model, min_tokens=0)
    forward(model, inputs)
    assert handle.stats().sparse_calls == expected.calls


def test_processors_lent_to_another_model_do_not_make_it_sparse():
    one, inputs, expected = wide_wan()
    other, _, _ = wide_wan()
    dense = forward(other, inputs)
    handle = rainfusion.enable(one, min_tokens=0)
    forward(one, inputs)
    other.set_attn_processor(dict(one.attn_processors))
    assert torch.equal(forward(other, inputs), dense)
    assert handle.stats().sparse_calls == expected.calls


def test_ids_are_read_in_any_thread():
    rule = models.MODELS["FluxTransformer2DModel"].grid
    failures = []

    def read():
        try:
            for _ in range(300):
                ids = tiny_models.image_ids(4, 6)
                assert rule({"img_ids": ids}, {}) == [(1, 4, 6)]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_ids_that_are_no_rectangle_or_change():
    from rainfusion.integrations.diffusers.grids import NoGrid

    rule = models.MODELS["FluxTransformer2DModel"].grid
    ids = torch.cat([tiny_models.image_ids(4, 6), tiny_models.image_ids(4, 3)])
    with pytest.raises(NoGrid, match="whole pictures"):
        rule({"img_ids": ids}, {})
    ids = tiny_models.image_ids(4, 6)
    assert rule({"img_ids": ids}, {}) == [(1, 4, 6)]
    ids.copy_(tiny_models.image_ids(6, 4))
    assert rule({"img_ids": ids}, {}) == [(1, 6, 4)]


# --- bad input -------------------------------------------------------------------------------------------------------


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
        patch.setattr(calls, "run", broken)
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
    from rainfusion.integrations import settings

    assert settings.check_layers(settings.layers(text), 39, "model") == layers


def test_a_diffusers_without_the_private_names_is_refused(monkeypatch):
    model, _, _ = tiny_models.ALL["wan"]()
    hub.dispatch_module.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(attention_dispatch._AttentionBackendRegistry, "_supported_arg_names")
        with pytest.raises(ImportError, match=r"has no _AttentionBackendRegistry\._supported_arg_names"):
            rainfusion.enable(model)
    hub.dispatch_module.cache_clear()
    rainfusion.enable(model)


def test_without_diffusers(monkeypatch):
    import sys

    hub.dispatch_module.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
        with pytest.raises(ImportError, match="pip install diffusers"):
            rainfusion.enable(Unknown())
    hub.dispatch_module.cache_clear()


# --- models of one's own ---------------------------------------------------------------------------------------------


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))


class OwnAttention(torch.nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class OwnModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(OwnAttention() for _ in range(3))

    def forward(self, tokens, size):
        for block in self.blocks:
            tokens = tokens + block(tokens)
        return tokens


@pytest.mark.usefixtures("rows")
def test_register_model():
    rainfusion.register_model(
        OwnModel, attention=["blocks.*"], grid=lambda arguments, config: [arguments["size"]], others="after",
        call="sdpa",
    )  # fmt: skip
    model, tokens = OwnModel().eval(), torch.randn(1, 3 * 16 * 24 + 30, 16)
    with torch.no_grad():
        dense = model(tokens, (3, 16, 24))
        with rainfusion.enabled(model, sparsity=0.5, min_tokens=0) as handle:
            sparse = model(tokens, size=(3, 16, 24))
    assert handle.stats().layouts == {"grid 3x16x24, 30 tokens after": 3}
    assert handle.layers == ["blocks.0", "blocks.1", "blocks.2"]
    assert 0 < (sparse - dense).norm() / dense.norm() < 0.5
    rainfusion.register_model("OwnModel", attention="nothing", grid=lambda *_: [(1, 1, 1)])
    with pytest.raises(ValueError, match="has no modules that match nothing"):
        rainfusion.enable(model)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(attention=[]), TypeError, "attention must be names"),
        (dict(grid=3), TypeError, "grid must be a function"),
        (dict(others=None), TypeError, "others must be"),
        (dict(model=3), TypeError, "model must be a class"),
        (dict(call="x"), ValueError, "call must be one of"),
    ],
)
@pytest.mark.usefixtures("rows")
def test_wrong_rows(kwargs, error, message):
    with pytest.raises(error, match=message):
        rainfusion.register_model(**{**dict(model="X", attention=["a"], grid=lambda *_: [(1, 1, 1)]), **kwargs})


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("found", [(2, 4, 6), None, [(2, 4)], [(2.5, 4, 6)], [(0, 4, 6)]])
def test_a_grid_function_that_returns_something_else(found):
    rainfusion.register_model(OwnModel, attention="blocks.*", grid=lambda *_: found, call="sdpa", unless="nothing")
    model = OwnModel().eval()
    rainfusion.enable(model)
    with torch.no_grad(), pytest.raises(ValueError, match=r"grid function must return \[\(t, h, w\), \.\.\.\], got"):
        model(torch.randn(1, 48, 16), (2, 4, 6))


@pytest.mark.usefixtures("rows")
def test_unless_takes_one_name():
    rainfusion.register_model(OwnModel, attention="blocks.*", grid=lambda *_: [(2, 4, 6)], call="sdpa", unless="size")
    model = OwnModel().eval()
    handle = rainfusion.enable(model, min_tokens=0)
    with torch.no_grad():
        model(torch.randn(1, 48, 16), (2, 4, 6))
    assert list(handle.stats().reasons) == ["no grid: with size the tokens lie in another order"]


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
