"""Steps that share one budget: a shape of density over the steps of a run."""

import math

import pytest
import torch

import rainfusion
from helpers.offline_pipelines import PIPELINES, from_image_inputs, wan_from_image
from rainfusion import lab
from rainfusion.integrations.decider import Decider
from rainfusion.integrations.scenes import Scene
from rainfusion.integrations.settings import Settings
from rainfusion.lab import methods
from rainfusion.schedules import Schedule

GRID = (4, 16, 24)
SHAPES = [
    "auto",
    "constant",
    "falling",
    [1],
    [5, 3, 1],
    [1, 0, 0, 0],
    [0.0, 1.0],
    lambda share: 1 + math.cos(math.pi * share),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.05, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 4, 50])
def test_the_mean_is_kept_as_far_as_it_can_be(shape, mean, steps):
    schedule = Schedule.of(shape)
    found = schedule.densities(mean, steps)
    assert len(found) == steps and all(0.0 <= density <= 1.0 for density in found)
    shape = schedule.for_steps(steps)
    weights = [shape.at(step / (steps - 1) if steps > 1 else 0.5) for step in range(steps)]
    most = sum(weight > 0 for weight in weights) / steps or 1.0  # steps without weight compute nothing
    assert sum(found) / steps == pytest.approx(min(mean, most))


def test_ratios_are_those_of_the_shape():
    assert Schedule.of([4, 2]).densities(0.3, 3) == pytest.approx((0.4, 0.3, 0.2))
    assert Schedule.of("constant").densities(0.3, 3) == pytest.approx((0.3, 0.3, 0.3))
    assert Schedule.of(lambda share: 2 - share).densities(0.3, 3) == pytest.approx((0.4, 0.3, 0.2))


@pytest.mark.parametrize(
    ("shape", "error"),
    [("rising", ValueError), ([], TypeError), ([0, 0], ValueError), ([1, -1], ValueError), ([math.nan], ValueError),
     (3, TypeError), (["a"], TypeError), (lambda share: math.inf, ValueError)],
)  # fmt: skip
def test_what_is_no_shape_says_so(shape, error):
    with pytest.raises(error, match="schedule"):
        Schedule.of(shape)


def densities(settings, steps, total, grid=GRID, made=None):
    decider = Decider(settings, ["attention"])
    q, k, v = torch.randn(3, 1, 2, math.prod(grid), 16, generator=torch.Generator().manual_seed(0)).unbind()
    for step in range(steps):
        decider.begin(Scene((grid,)), step=step if total else None, steps=total, made=made)
        decider.attend(0, q, k, v, None, lambda: q)
    return decider.stats()


def test_every_step_has_its_share():
    settings = Settings.check(changes=dict(sparsity=0.7), schedule=[5, 1], min_tokens=0)
    stats = densities(settings, 5, 5)
    assert list(stats.steps) == [0, 1, 2, 3, 4] and sorted(stats.steps.values(), reverse=True) == list(
        stats.steps.values()
    )
    for found, share in zip(stats.steps.values(), (0.5, 0.4, 0.3, 0.2, 0.1), strict=True):
        assert found == pytest.approx(share, abs=0.1)  # of 12 blocks
    assert "blocks computed, step by step: 5" in stats.summary


def test_dense_steps_are_left_out_of_it():
    settings = Settings.check(changes=dict(sparsity=0.5), schedule=[3, 1], min_tokens=0, start_step=2, end_step=1)
    stats = densities(settings, 6, 6)
    assert list(stats.steps) == [2, 3, 4] and stats.dense_calls == 3
    assert stats.steps[2] > stats.steps[3] > stats.steps[4]


def test_without_the_number_of_steps_it_is_dense_and_counted():
    decider = Decider(Settings.check(schedule="falling", min_tokens=0), ["attention"])
    q = torch.randn(1, 2, math.prod(GRID), 16)
    for step in range(2):
        decider.begin(Scene((GRID,)), step=step)
        decider.attend(0, q, q, q, None, lambda: q)
    assert decider.stats().reasons == {"how many steps there are is not known, and schedule depends on it": 2}


def test_auto_falls_in_videos_and_gently_with_few_steps():
    auto = Settings.check(changes=dict(sparsity=0.7), min_tokens=0)
    assert auto.schedule.is_auto, "the default"
    for total, made, shape in ((9, None, "falling"), (8, None, [2, 1]), (100, 4, [2, 1]), (100, 9, "falling")):
        asked = Settings.check(changes=dict(sparsity=0.7), min_tokens=0, schedule=shape)
        assert densities(auto, 4, total, made=made).steps == densities(asked, 4, total).steps


def test_auto_is_constant_in_images_and_where_steps_are_not_known():
    auto, constant = (
        Settings.check(changes=dict(sparsity=0.7), min_tokens=0, schedule=s) for s in ("auto", "constant")
    )
    known, unknown = densities(auto, 4, 8), densities(auto, 4, None)
    assert known.density != unknown.density == densities(constant, 4, 8).density
    assert unknown.sparse_calls == 4 and not unknown.steps
    image = (1, 32, 48)
    found = densities(auto, 4, 8, image)
    assert found.density == densities(constant, 4, 8, image).density and len(set(found.steps.values())) == 1


@pytest.mark.parametrize("options", [dict(target_error=0.1), dict(sparse_type="ada_bsa")], ids=str)
def test_auto_leaves_other_budgets_alone(options):
    assert Settings.check(changes=options).schedule.is_constant


@pytest.mark.parametrize("options", [dict(target_error=0.1), dict(sparse_type="ada_bsa")], ids=str)
def test_budgets_that_are_no_sparsity_have_none(options):
    with pytest.raises(ValueError, match="schedule shares out a sparsity"):
        Settings.check(changes=options, schedule="falling")


def test_each_head_keeps_its_own_mean():
    method = Schedule.of([3, 1]).method_at(rainfusion.Method(sparse_type="rf_v2", sparsity=(0.8, 0.6)), 0, 3)
    assert method.sparsity == pytest.approx((0.7, 0.4))
    profile = rainfusion.Profile(sparsities={"0": (0.8, 0.6)}, sparsity=0.7, options={})
    q, k, v = torch.randn(3, 1, 2, 16 + math.prod(GRID), 16, generator=torch.Generator().manual_seed(0)).unbind()
    place = lab.Place(0, 0, GRID, 16, 3)
    scheduled = lab.sparse(profile=profile, schedule=[3, 1])(q, k, v, place)
    assert not torch.equal(scheduled, lab.sparse(profile=profile)(q, k, v, place)), "a profile is shared out, too"


def test_in_a_pipeline():
    make, inputs, _ = PIPELINES["wan"]
    pipe = make()
    with rainfusion.enabled(pipe, sparsity=0.6, schedule="falling", min_tokens=0) as handle:
        pipe(**inputs)
        stats = handle.stats()
    assert stats.sparse_calls and not stats.dense_calls
    assert list(stats.steps) == list(range(inputs["num_inference_steps"]))


@pytest.mark.parametrize("word", [dict(sparsity=0.6), dict(quality="high")], ids=str)
def test_auto_is_constant_in_a_pipeline_that_takes_an_image(word):
    make, inputs, _ = PIPELINES["wan"]
    shapes = {}
    for pipe, own in ((make(), inputs), (wan_from_image(), from_image_inputs())):
        with rainfusion.enabled(pipe, **word, min_tokens=0) as handle:
            pipe(**own)
            stats = handle.stats()
        assert stats.sparse_calls and not stats.dense_calls
        shapes[type(pipe).__name__] = handle.settings.schedule, list(stats.steps)
    steps = list(range(inputs["num_inference_steps"]))
    assert shapes == {
        "WanPipeline": (Schedule.of("auto"), steps),
        "WanImageToVideoPipeline": (Schedule.of("constant"), []),
    }


def test_a_shape_that_was_asked_for_holds_from_an_image_too():
    handle = rainfusion.enable(wan_from_image(), schedule="falling")
    assert handle.settings.schedule == Schedule.of("falling")


def test_an_image_that_may_be_left_out_counts_as_one():
    class Both(type(PIPELINES["wan"][0]())):
        def __call__(self, prompt, image=None):
            """As pipelines have it that make videos from either."""

    parts = PIPELINES["wan"][0]().components
    kept = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")
    handle = rainfusion.enable(Both(**{name: parts[name] for name in kept}))
    assert handle.settings.schedule.is_constant


def test_a_transformer_alone_does_not_know_its_steps():
    with pytest.raises(ValueError, match="schedule needs the number of steps"):
        rainfusion.enable(PIPELINES["wan"][0]().transformer, schedule="falling")


def test_in_the_lab():
    q, k, v = torch.randn(3, 1, 2, 16 + math.prod(GRID), 16, generator=torch.Generator().manual_seed(0)).unbind()
    attend = lab.sparse(0.7, schedule=[3, 1])
    for step, density in enumerate((0.45, 0.3, 0.15)):
        place = lab.Place(0, step, GRID, 16, 3)
        torch.testing.assert_close(
            attend(q, k, v, place), lab.sparse(1 - density, schedule="constant")(q, k, v, place), rtol=0, atol=0
        )


@pytest.mark.parametrize("own", [dict(grid=(1, 32, 48)), dict(from_image=True)], ids=str)
def test_auto_in_the_lab_is_constant_where_enable_has_it_so(own):
    place = lab.Place(0, 0, GRID, 16, 12)._replace(**own)
    tokens = place.text + math.prod(place.grid)
    q, k, v = torch.randn(3, 1, 2, tokens, 16, generator=torch.Generator().manual_seed(0)).unbind()
    auto, constant = (lab.sparse(0.7, schedule=name)(q, k, v, place) for name in ("auto", "constant"))
    torch.testing.assert_close(auto, constant, rtol=0, atol=0)
    by_name = {}
    for name in ("auto", "constant"):
        attend = methods.Attend(methods.ours("ours", schedule=name, token_order=(2, 8, 8)), 0.3, "portable")
        by_name[name] = attend(q, k, v, place)
    torch.testing.assert_close(by_name["auto"], by_name["constant"], rtol=0, atol=0)


def test_a_sample_says_where_it_comes_from():
    seen = []

    def watched(q, k, v, place):
        seen.append(place.from_image)
        return lab.dense(q, k, v, place)

    model = lab.DiT(lab.Config(frames=5, size=12, dim=64, depth=1, mlp=64)).eval()
    prompts = lab.random_prompts(1, torch.Generator().manual_seed(0))
    for image in (None, lab.images(prompts, 12)):
        lab.sample(model, prompts, attention=watched, steps=2, image=image)
    assert seen == [False, False, True, True]


def test_a_sample_says_how_many_steps_it_has():
    seen = []

    def watched(q, k, v, place):
        seen.append((place.step, place.steps))
        return lab.dense(q, k, v, place)

    model = lab.DiT(lab.Config(frames=5, size=12, dim=64, depth=1, mlp=64)).eval()
    lab.sample(model, lab.random_prompts(1, torch.Generator().manual_seed(0)), attention=watched, steps=3)
    assert seen == [(0, 3), (1, 3), (2, 3)]


def test_a_method_of_the_comparison_shares_out_its_amount():
    method = methods.ours("falling", schedule="falling", token_order=(2, 8, 8), first_frame="free")
    attend = methods.Attend(method, 0.3, "portable")
    q, k, v = torch.randn(3, 1, 2, 16 + math.prod(GRID), 16, generator=torch.Generator().manual_seed(0)).unbind()
    for step in range(4):
        attend(q, k, v, lab.Place(0, step, GRID, 16, 4))
    kept = [int(count) for count in attend.kept]
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[-1]
    assert "ratios 5.0, 1.0" in method.signature
