"""Budgets: sparsity by task and by a word, profiles and their calibration, errors to allow."""

from dataclasses import replace

import pytest
import torch

import rainfusion
from helpers import offline_pipelines, tiny_models
from helpers.enabling import forward, snapshot, wide_wan
from rainfusion.integrations.settings import Settings
from rainfusion.options import FINE_VIDEO_SPARSITY, IMAGE_SPARSITY
from rainfusion.qualities import QUALITIES, Quality
from rainfusion.schedules import Schedule


def test_a_profile_is_made_saved_and_used(tmp_path):
    model, inputs, _ = wide_wan()
    before, dense = snapshot(model), forward(model, inputs)
    seen = []
    options = dict(predictor="mean", compensate=False)
    profile = rainfusion.calibrate(model, lambda: seen.append(forward(model, inputs)), sparsity=0.5, **options)
    assert snapshot(model) == before and torch.equal(seen[0], dense)  # dense meanwhile, and off again
    heads = [share for layer in profile.sparsities.values() for share in layer]
    assert len(profile.sparsities) == 2 and sum(heads) / len(heads) == pytest.approx(0.5, abs=1e-3)
    own = dict(token_order="window", first_frame="free", block_size=(128, 32), **options)
    assert profile.options == own and profile.notes["calls"] == 2
    profile.save(tmp_path / "wan.json")
    assert rainfusion.Profile.load(tmp_path / "wan.json") == profile
    with rainfusion.enabled(model, profile=tmp_path / "wan.json", min_tokens=0) as handle:
        sparse = forward(model, inputs)
    stats = handle.stats()
    assert stats.sparse_calls == 2 and stats.mean_density == pytest.approx(0.5, abs=1 / 12)
    assert 0 < (sparse - dense).norm() / dense.norm() < 0.5


def test_a_profile_of_before_has_blocks_of_128():
    model, inputs, _ = wide_wan()
    content = dict(sparsities={f"blocks.{i}.attn1": [0.5, 0.5] for i in (0, 1)}, sparsity=0.5, options={})
    handle = rainfusion.enable(model, profile={"format": "rainfusion profile 1", **content}, min_tokens=0)
    forward(model, inputs)
    assert handle.stats().sparse_calls == 2 and handle.settings.method_for("blocks.0.attn1", 3).block_size == 128


def test_a_profile_has_the_sparsity_of_enable_where_none_is_given():
    model, inputs, _ = wide_wan()
    for options, sparsity in ((dict(), 0.85), (dict(block_size=128), 0.8), (dict(sparsity=0.6), 0.6)):
        assert rainfusion.calibrate(model, lambda: forward(model, inputs), **options).sparsity == sparsity
        method = rainfusion.Method.recommended(**options)
        assert rainfusion.calibrate(model, lambda: forward(model, inputs), method=method).sparsity == sparsity


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
    with rainfusion.enabled(model, min_tokens=0, sparsity=0.85) as handle:
        forward(model, inputs)
    assert handle.stats().mean_density == video
    model, inputs, _ = tiny_models.ALL["flux"](h=32, w=48, text=64)
    with rainfusion.enabled(model, min_tokens=0) as handle:
        forward(model, inputs)
    image = handle.stats().mean_density
    with rainfusion.enabled(model, min_tokens=0, sparsity=0.6) as handle:
        forward(model, inputs)
    assert handle.stats().mean_density == image


# ---------------------------------------------------------------------------------------------------------------------
# words


def density(make, **options):
    model, inputs, _ = make()
    with rainfusion.enabled(model, min_tokens=0, **options) as handle:
        forward(model, inputs)
    return handle.stats().mean_density


@pytest.mark.parametrize("word", QUALITIES)
def test_a_word_is_a_sparsity_by_task(word):
    def image():
        return tiny_models.ALL["flux"](h=32, w=48, text=64)

    assert density(wide_wan, quality=word) == density(wide_wan, sparsity=QUALITIES[word].video)
    assert density(image, quality=word) == density(image, sparsity=QUALITIES[word].image)


def test_words_are_in_order():
    high, balanced, fast = (QUALITIES[word] for word in ("high", "balanced", "fast"))
    assert high.video < balanced.video < fast.video and high.image < balanced.image < fast.image
    assert all(word.image < word.video for word in QUALITIES.values())


def test_balanced_is_what_no_word_is():
    assert QUALITIES["balanced"] == Quality(FINE_VIDEO_SPARSITY, IMAGE_SPARSITY, "auto", 0.0)
    plain, word = Settings.check(), Settings.check(quality="balanced")
    assert replace(word, quality=None) == plain
    for frames in (1, 21):
        assert word.method_for("", frames) == plain.method_for("", frames)


def test_the_handle_knows_the_word():
    model, _, _ = wide_wan()
    assert rainfusion.enable(model, quality="high").settings.quality == "high"
    with pytest.warns(UserWarning, match="the new settings replace the old ones"):
        assert rainfusion.enable(model).settings.quality is None


def test_other_options_go_with_a_word():
    options = dict(predictor="mean", block_size=(128, 64), first_frame="keys", token_order="raster")
    found = Settings.check(None, options, quality="fast", schedule=[3, 1], start_step=2, skip_layers="0")
    sparsity = QUALITIES["fast"].video
    plain = Settings.check(None, {**options, "sparsity": sparsity}, schedule=[3, 1], start_step=2, skip_layers="0")
    assert found.method_for("", 21) == plain.method_for("", 21)
    assert (found.schedule, found.start_step, found.skip_layers) == (plain.schedule, 2, plain.skip_layers)
    method = rainfusion.Method.recommended(precision="int8", sparse_type="ada_bsa")
    assert Settings.check(method, quality="high").method_for("", 21) == replace(
        method, sparsity=QUALITIES["high"].video
    )


def test_a_word_may_have_a_schedule_and_dense_steps(monkeypatch):
    """Those that the user names go before."""
    monkeypatch.setattr("rainfusion.qualities.QUALITIES", {"calm": Quality(0.5, 0.4, "falling", 0.25)})
    found = Settings.check(quality="calm")
    assert (found.schedule, found.start_step) == (Schedule.of("falling"), 0.25)
    found = Settings.check(quality="calm", schedule="constant", start_step=1)
    assert found.schedule.is_constant and found.start_step == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(quality="best"), "quality must be one of 'high', 'balanced', 'fast', got 'best'"),
        (dict(quality=1), "quality must be one of 'high', 'balanced', 'fast', got 1"),
        (dict(quality="high", sparsity=0.5), "pass one of them, got quality='high' and sparsity=0.5"),
        (dict(quality="high", sparsity=0.0), "pass one of them, got quality='high' and sparsity=0.0"),
        (dict(quality="high", sparsity=[0.5, 0.7]), r"quality and sparsity both .* sparsity=\(0.5, 0.7\)"),
        (dict(quality="high", method=rainfusion.Method.recommended(sparsity=0.7)), "quality and sparsity both say"),
        (dict(quality="fast", target_error=0.1), "quality and target_error both say how much to skip"),
        (dict(quality="fast", profile="wan.json"), "quality and profile both .* and profile='wan.json'"),
        (dict(quality="fast", sparse_type="ada_bsa", cdf_threshold=0.9), "quality and cdf_threshold both"),
    ],
)
def test_a_word_is_the_only_budget(kwargs, message):
    model = tiny_models.ALL["wan"]()[0]
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        rainfusion.enable(model, **kwargs)
    assert snapshot(model) == before


def test_a_word_in_a_pipeline():
    pipe = offline_pipelines.wan_two_experts()
    stats = []
    for budget in (dict(quality="fast"), dict(sparsity=QUALITIES["fast"].video)):
        with rainfusion.enabled(pipe, min_tokens=0, **budget) as handle:
            pipe("a cat", num_inference_steps=4, height=256, width=384, num_frames=9, output_type="latent")
        stats.append(handle.stats())
    assert stats[0] == stats[1] and stats[0].steps and not stats[0].dense_calls
