"""Budgets: sparsity by task, profiles and their calibration, errors to allow."""

import pytest
import torch

import rainfusion
from helpers import offline_pipelines, tiny_models
from helpers.enabling import forward, snapshot, wide_wan


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
        "mean",
        "keys",
        False,
        "raster",
    )
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
    with pytest.raises(
        TypeError, match="options of enable but profile, quality, schedule and target_error, got profile, sparseness"
    ):
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
