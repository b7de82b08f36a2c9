"""Whole pipelines: steps, experts, copies, threads."""

import copy
import threading

import pytest
import torch

import rainfusion
from helpers import offline_pipelines
from helpers.enabling import snapshot
from helpers.offline_pipelines import PIPELINES, sample
from rainfusion.integrations.diffusers.host import ATTRIBUTE


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
        name: sum(sparse for layer, (sparse, _) in stats.decider.items() if layer.startswith(f"{name}."))
        for name in ("transformer", "transformer_2")
    }
    assert sum(by_expert.values()) == 2 * 2 * 2  # two steps, two forwards, two layers
    assert stats.dense_calls == 8 and by_expert["transformer_2"] > 0


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


@pytest.mark.parametrize("strength", [0.5, 0.8])
def test_a_run_that_begins_in_the_middle_of_the_schedule(strength):
    """Video to video; its pipeline does not tell the scheduler where it begins."""
    from diffusers import WanVideoToVideoPipeline

    pipe = WanVideoToVideoPipeline(
        **{
            name: part
            for name, part in offline_pipelines.wan().components.items()
            if name in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
        }
    )
    pipe.set_progress_bar_config(disable=True)
    handle = rainfusion.enable(pipe, min_tokens=0, start_step=1, end_step=1)
    video = [torch.rand(3, 32, 48) for _ in range(9)]
    pipe(
        video=torch.stack(video)[None],
        num_inference_steps=10,
        strength=strength,
        prompt_embeds=torch.randn(1, 16, 32),
        negative_prompt_embeds=torch.randn(1, 16, 32),
        height=32,
        width=48,
        output_type="latent",
    )
    steps = round(10 * strength)
    per_step = 2 * 2  # forwards, layers
    assert handle.stats().sparse_calls == (steps - 2) * per_step
    assert set(handle.stats().reasons.values()) == {per_step}


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
