"""The laboratory: clips follow their prompts, training goes on where it stopped, sampling takes any attention."""

import dataclasses
import json
import math

import pytest
import torch

import rainfusion
from rainfusion.lab import data, model, pictures, sampling, training, weights
from rainfusion.lab.model import Config, DiT
from rainfusion.lab.training import Batch, Phase, Recipe, Trainer
from rainfusion.qualities import QUALITIES, Quality

pytest.importorskip("safetensors")

SMALL = Config(frames=17, size=32, patch=2, dim=64, depth=2, mlp=128)  # 5 x 16 x 16 tokens: 11 blocks with the text
RECIPE = Recipe(
    config=Config(frames=5, size=16, patch=4, dim=64, depth=2, mlp=128),
    phases=(
        Phase(0.5, (Batch(1, 16, 3, 0.5), Batch(5, 16, 2, 0.5))),
        Phase(0.5, (Batch(5, 16, 2, 0.5), Batch(5, 16, 2, 0.5, image=True))),
    ),
    steps=8,
    warmup=2,
)
STILL = ("disc", "blue", "still", "bottom right", "still")
KEYS = dict(first_frame="keys", compensate=False)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def clip_of(pan, *shapes, frames=9, seed=0):
    return data.render(data.encode(pan, *shapes)[None], frames, 64, 64, generator(seed))[0]


def colour_centre(picture, name):
    """(y, x) of the pixels of [3, H, W] that look most like a colour."""
    wanted = torch.tensor(data.COLOURS[name])[:, None, None]
    like = ((picture - wanted).square().sum(0) < 0.35).float()
    assert like.sum() > 20, f"no {name} in the picture"
    y, x = torch.meshgrid(*(torch.arange(n).float() for n in like.shape), indexing="ij")
    return (y * like).sum() / like.sum(), (x * like).sum() / like.sum()


def random_model(config, seed=0):
    """With weights that do something: those of a new model leave its input alone."""
    torch.manual_seed(seed)
    made = DiT(config)
    with torch.no_grad():
        for weight in (made.modulation.weight, made.last.weight, made.first_pixels.weight, made.pixels.weight):
            weight.normal_(0, 0.05)
        for block in made.blocks:
            block.offset.normal_(0, 0.5)
    return made.requires_grad_(False)


# data


def test_a_seed_gives_the_same_clips_and_another_seed_others():
    clips, prompts = data.batch(3, 5, 32, 32, generator(1))
    again, same_prompts = data.batch(3, 5, 32, 32, generator(1))
    others, _ = data.batch(3, 5, 32, 32, generator(2))
    assert torch.equal(clips, again) and torch.equal(prompts, same_prompts)
    assert not torch.equal(clips, others)


def test_clips_are_in_range_and_use_it():
    clips, prompts = data.batch(64, 3, 32, 32, generator())
    assert clips.shape == (64, 3, 3, 32, 32) and clips.dtype == torch.float32
    assert clips.min() >= -1 and clips.max() <= 1 and clips.std() > 0.3
    assert (clips.abs() == 1).float().mean() < 0.05  # little is cut off
    assert prompts.shape == (64, data.TEXT_TOKENS) and prompts.min() > data.EMPTY and prompts.max() < data.VOCABULARY


@pytest.mark.parametrize(("motion", "dy", "dx"), [("right", 0, 1), ("up", -1, 0), ("down left", 1, -1)])
def test_a_shape_moves_as_its_prompt_says(motion, dy, dx):
    hidden = ("ring", "green", "still", "top left", "still")
    clip = clip_of("still", hidden, STILL, ("disc", "red", motion, "centre", "still"), frames=33)
    first, last = (colour_centre(clip[:, f], "red") for f in (0, 32))
    moved = 32 * data.SPEED * 64
    assert last[0] - first[0] == pytest.approx(dy * moved, abs=1.0)
    assert last[1] - first[1] == pytest.approx(dx * moved, abs=1.0)


def test_a_shape_starts_where_its_prompt_says():
    for place, (y, x) in {"top left": (-1, -1), "right": (0, 1), "bottom": (1, 0)}.items():
        hidden = ("ring", "green", "still", "centre", "still")
        clip = clip_of("still", hidden, hidden, ("disc", "red", "still", place, "still"), frames=1)
        found = colour_centre(clip[:, 0], "red")
        for got, wanted in zip(found, (y, x), strict=True):
            assert got == pytest.approx(31.5 + 64 * data.SPACING * wanted, abs=0.05 * 64 + 1)


def test_the_background_pans_as_its_prompt_says():
    hidden = ("ring", "green", "still", "centre", "still")
    clip = clip_of("right", hidden, hidden, hidden, frames=6)
    pixels = round(64 * 5 * data.PAN)
    rows = slice(0, 12)  # above the shapes
    assert pixels == 2 and torch.allclose(clip[:, 5, rows, pixels:], clip[:, 0, rows, :-pixels], atol=1e-4)
    assert not torch.allclose(clip[:, 5, rows], clip[:, 0, rows], atol=1e-2)


def test_a_clockwise_turn_is_clockwise():
    """The picture of a later frame, turned back around the shape, is that of the first."""
    square = ("square", "red", "still", "centre", "clockwise")
    clip = clip_of("still", STILL, STILL, square, frames=13)
    y, x = colour_centre(clip[:, 0], "red")

    def turned(angle):
        """The colours on a circle in the shape, read from a bearing (clockwise from the right) on."""
        bearing = torch.arange(360).deg2rad() + angle
        rows, columns = (y + 6 * bearing.sin()).round().long(), (x + 6 * bearing.cos()).round().long()
        return clip[:, 0, rows, columns], clip[:, 12, rows, columns]

    first, _ = turned(0.0)
    errors = {way: (first - turned(way * 12 * data.TURN)[1]).abs().mean() for way in (-1, 0, 1)}
    assert errors[1] < 0.5 * errors[0] and errors[1] < 0.5 * errors[-1]


def test_later_shapes_are_in_front():
    back, front = (("disc", colour, "still", "centre", "still") for colour in ("red", "cyan"))
    for shapes, seen in [((back, front, STILL), "cyan"), ((front, back, STILL), "red")]:
        picture = clip_of("still", *shapes, frames=1)[:, 0]
        middle = picture[:, 28:36, 28:36].mean((1, 2))
        assert (middle - torch.tensor(data.COLOURS[seen])).abs().max() < 0.3


def test_an_image_is_the_first_frame_of_its_clip():
    prompts = data.random_prompts(4, generator())
    image, clip = (data.render(prompts, frames, 32, 32, generator(3)) for frames in (1, 5))
    assert torch.allclose(image[:, :, 0], clip[:, :, 0], atol=1e-5)


def test_shapes_of_random_prompts_head_for_the_centre():
    words = [data.describe(prompt) for prompt in data.random_prompts(200, generator())]
    assert not any("from left, left" in w or "from top right, up" in w or "from bottom, down" in w for w in words)


def test_a_prompt_of_unknown_words_is_refused():
    with pytest.raises(ValueError, match=r"colour must be one of red, .*, got 'mauve'"):
        data.encode("left", ("disc", "mauve", "still", "top", "still"), STILL, STILL)
    with pytest.raises(ValueError, match="shapes must be 3 times"):
        data.encode("left", STILL)


# model


def test_the_default_model_is_small_enough_to_ship(tmp_path):
    made = DiT(Config())
    assert sum(p.numel() for p in made.parameters()) <= 8_000_000
    weights.save(tmp_path / "w.safetensors", Config(), dict(made.named_parameters()), {})
    assert (tmp_path / "w.safetensors").stat().st_size < 16_000_000


def test_rope_sees_only_how_far_apart_tokens_are():
    q, k = torch.randn(2, 50, 64, dtype=torch.float64).unbind(0)
    positions = torch.randint(0, 30, (50, 3)).double()

    def logits(shift):
        turns = model.angles(positions + torch.tensor(shift))
        turned = [model.rotate(x, (turns.cos(), turns.sin())) for x in (q, k)]
        return turned[0] @ turned[1].T

    assert torch.allclose(logits([0, 0, 0]), logits([3, -7, 11]), atol=1e-4)
    assert not torch.allclose(logits([0, 0, 0]), q @ k.T, atol=0.1)
    for axis in range(3):  # and every axis counts
        moved = positions.clone()
        moved[0, axis] += 1
        here, there = (model.rotate(q[:1], (a.cos(), a.sin())) for a in map(model.angles, (positions[:1], moved[:1])))
        assert not torch.allclose(here, there, atol=1e-3)


def test_a_coarse_grid_spans_the_same_positions_as_a_fine_one():
    fine, coarse = (model.grid_positions(grid, 8).view(*grid, 3) for grid in ((1, 8, 8), (1, 4, 4)))
    assert torch.allclose(fine.unflatten(1, (4, 2)).unflatten(3, (4, 2)).mean((2, 4)), coarse)


def test_patches_round_trip_and_the_first_frame_is_alone():
    clips = torch.randn(2, 3, 9, 8, 12)
    first, others, grid = model.to_patches(clips, 2, 4)
    assert first.shape == (2, 4 * 6, 12) and others.shape == (2, 2 * 4 * 6, 48) and grid == (3, 4, 6)
    assert torch.equal(first[0, 1], clips[0, :, 0, :2, 2:4].flatten())  # the second patch of the first row
    assert torch.equal(others[0, 24 + 1], clips[0, :, 5:9, :2, 2:4].flatten())
    assert torch.equal(model.from_patches(first, others, grid, 2), clips)
    image = clips[:, :, :1]
    first, others, grid = model.to_patches(image, 2, 4)
    assert others.shape == (2, 0, 48) and grid == (1, 4, 6)
    assert torch.equal(model.from_patches(first, others, grid, 2), image)


def test_attention_is_told_where_it_is_called():
    places = []

    def spy(q, k, v, place):
        assert q.shape == k.shape == v.shape == (2, SMALL.heads, 16 + 5 * 16 * 16, 64)
        places.append(place)
        return model.dense(q, k, v, place)

    sampling.sample(random_model(SMALL), data.random_prompts(1, generator()), attention=spy, steps=2)
    assert [(p.layer, p.step) for p in places] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {(p.grid, p.text) for p in places} == {((5, 16, 16), 16)}


def test_the_prompt_reaches_the_picture_through_attention():
    made, prompts = random_model(SMALL), data.random_prompts(2, generator())
    clips, time = torch.randn(1, 3, 17, 32, 32), torch.tensor([0.5])
    first, second = (made(clips, time, prompt[None]) for prompt in prompts)
    assert not torch.allclose(first, second, atol=1e-4)
    blind = [made(clips, time, prompt[None], lambda q, k, v, place: torch.zeros_like(q)) for prompt in prompts]
    assert torch.equal(*blind)


def test_an_image_reaches_the_first_frame_itself_and_the_others_through_attention():
    made, prompts = random_model(SMALL), data.random_prompts(1, generator())
    clips, time = torch.randn(1, 3, 17, 32, 32), torch.tensor([0.5])
    images = [None, *torch.randn(2, 1, 3, 32, 32)]
    seen = [made(clips, time, prompts, image=image) for image in images]
    blind = [made(clips, time, prompts, lambda q, k, v, place: torch.zeros_like(q), image=image) for image in images]
    for i, j in ((0, 1), (1, 2)):
        for frames in (slice(0, 1), slice(1, None)):
            assert not torch.allclose(seen[i][:, :, frames], seen[j][:, :, frames], atol=1e-4)
        assert not torch.allclose(blind[i][:, :, :1], blind[j][:, :, :1], atol=1e-4)
        assert torch.equal(blind[i][:, :, 1:], blind[j][:, :, 1:])


def test_images_are_first_frames_that_do_not_depend_on_their_batch():
    prompts = data.random_prompts(3, generator())
    drawn = data.images(prompts, 32, seed=4)
    assert drawn.shape == (3, 3, 32, 32) and drawn.min() >= 0 and drawn.max() <= 1
    assert torch.equal(drawn[2:], data.images(prompts[2:], 32, seed=6))
    clip = data.render(prompts[:1], 5, 32, 32, generator(4))
    torch.testing.assert_close(drawn[:1], clip[:, :, 0] / 2 + 0.5, atol=1e-5, rtol=0)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="dim must be a multiple of 64, got 100"):
        Config(dim=100)
    with pytest.raises(ValueError, match="size must be a multiple of patch 4, got 30"):
        Config(size=30, patch=4)
    with pytest.raises(ValueError, match="frames must be 1 and a multiple of together 4, got 8"):
        Config(frames=8)


# sampling


def test_sparsity_zero_gives_the_dense_sample_bit_for_bit_and_half_a_little_else():
    made, prompts = random_model(SMALL), data.random_prompts(1, generator())

    def sample(attention):
        return sampling.sample(made, prompts, attention=attention, steps=4)

    full = sample(model.dense)
    assert full.shape == (1, 3, 17, 32, 32) and full.min() >= 0 and full.max() <= 1
    assert torch.equal(full, sample(model.dense))
    assert torch.equal(full, sample(model.sparse(0.0)))
    error = (full - sample(model.sparse(0.5))).square().mean().sqrt()
    assert 0 < error < 0.05


def test_the_sparse_attention_is_the_library_s_own():
    q = torch.randn(1, 2, 16 + 5 * 16 * 16, 64)
    place = model.Place(0, 0, (5, 16, 16), 16)
    video = dict(sparse_type="rf_v2", txt_len=16, latent_shape_q=(5, 16, 16), sparsity=0.6, token_order="raster")
    options = dict(predictor="spread", compensate=True, first_frame="free", block_size=(128, 32))  # of `enable`
    best, keys = (rainfusion.sparse_attention(q, q, q, **{**video, **options, **own}) for own in ({}, KEYS))
    assert torch.equal(model.sparse(0.6, token_order="raster")(q, q, q, place), best)
    assert torch.equal(model.sparse(0.6, token_order="raster", **KEYS)(q, q, q, place), keys)
    profile = rainfusion.Profile({"0": (0.6, 0.4)}, 0.5, dict(predictor="mean", block_size=128, **KEYS))
    video.update(sparsity=[0.6, 0.4], exact_budget=True)
    wanted = rainfusion.sparse_attention(q, q, q, **{**video, "token_order": "window", **KEYS})
    assert torch.equal(model.sparse(profile=profile)(q, q, q, place), wanted)
    plain = rainfusion.sparse_attention(q, q, q, sparse_type="ada_bsa", sparsity=0.6)
    assert torch.equal(model.sparse(0.6, sparse_type="ada_bsa")(q, q, q, place), plain)


def test_a_word_instead_of_a_sparsity(monkeypatch):
    q = torch.randn(1, 2, 16 + 5 * 16 * 16, 64)
    for grid, sparsity in (((5, 16, 16), QUALITIES["fast"].video), ((1, 40, 32), QUALITIES["fast"].image)):
        place = model.Place(0, 1, grid, 16, 4)
        assert torch.equal(model.sparse(quality="fast")(q, q, q, place), model.sparse(sparsity)(q, q, q, place))
    others = dict(sparsity=0.5), dict(target_error=0.1), dict(profile=rainfusion.Profile({"0": (0.5, 0.5)}, 0.5, {}))
    for other in others:
        with pytest.raises(ValueError, match=f"quality and {next(iter(other))} both say how much to skip"):
            model.sparse(quality="fast", **other)
    monkeypatch.setattr("rainfusion.qualities.QUALITIES", {"calm": Quality(0.5, 0.4, "falling", 0.25)})
    first, second = (model.Place(0, step, (5, 16, 16), 16, 4) for step in (0, 1))
    calm = model.sparse(quality="calm")
    assert torch.equal(calm(q, q, q, first), model.dense(q, q, q, first))
    later = model.Place(0, 0, (5, 16, 16), 16, 3)  # the first of three that are sparse
    assert torch.equal(calm(q, q, q, second), model.sparse(0.5, schedule="falling")(q, q, q, later))


def test_a_clip_does_not_depend_on_its_batch_and_guidance_one_is_the_prompt_alone():
    made, prompts = random_model(RECIPE.config), data.random_prompts(3, generator())
    together = sampling.sample(made, prompts, steps=2, seed=5)
    alone = sampling.sample(made, prompts[2:], steps=2, seed=7)
    assert torch.allclose(together[2:], alone, atol=1e-5)
    assert not torch.allclose(together, sampling.sample(made, prompts, steps=2, seed=5, guidance=1.0), atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (dict(size=33), "size must be a multiple of 2, the side of this model's patches, got 33; try 32 or 34"),
        (dict(size=1), "size must be a multiple of 2, the side of this model's patches, got 1; try 2"),
        (dict(size=0), "size must be a multiple of 2, the side of this model's patches, got 0; try 2"),
        (dict(size=-4), "size must be a multiple of 2, the side of this model's patches, got -4; try 2"),
        (dict(frames=0), "frames must be at least 1, got 0"),
        (
            dict(frames=16),
            "frames must be 1 and a multiple of 4, since later tokens have so many frames, got 16; try 13 or 17",
        ),
        (
            dict(image=torch.zeros(2, 3, 32, 32)),
            r"image must be one picture for each prompt, \[1, 3, 32, 32\], got \[2, 3, 32, 32\]",
        ),
        (dict(steps=0), "steps must be at least 1, got 0"),
        (dict(guidance=math.nan), "guidance must be a finite number, got nan"),
    ],
)
def test_a_clip_that_cannot_be_sampled_is_refused(asked, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        sampling.sample(random_model(SMALL), data.random_prompts(1, generator()), **asked)


def test_times_run_from_noise_to_data():
    schedule = sampling.times(10)
    assert schedule[0] == 1 and schedule[-1] == 0 and (schedule.diff() < 0).all() and schedule[5] > 0.5
    assert torch.allclose(sampling.times(4, shift=1.0), torch.tensor([1, 0.75, 0.5, 0.25, 0]))


# training


def test_the_model_overfits_two_clips():
    torch.manual_seed(0)
    config = RECIPE.config
    made = DiT(config)
    clips, prompts = data.batch(2, config.frames, config.size, config.size, generator())
    noise, time = torch.randn_like(clips), torch.tensor([0.6, 0.8])
    optimiser = torch.optim.AdamW(made.parameters(), 5e-3)
    losses = []
    for _ in range(60):
        loss = training.flow_loss(made, clips, time, prompts, noise, model.dense)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_a_resumed_run_gives_the_losses_of_an_unbroken_one(tmp_path):
    unbroken = Trainer(RECIPE)
    losses = [unbroken.advance().item() for _ in range(6)]
    first = Trainer(RECIPE)
    resumed_losses = [first.advance().item() for _ in range(3)]
    first.save(tmp_path / "lab.pt")
    torch.rand(7)  # what others draw does not matter
    second = Trainer.restore(tmp_path / "lab.pt")
    assert second.step == 3 and second.recipe == RECIPE
    resumed_losses += [second.advance().item() for _ in range(3)]
    assert resumed_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(unbroken.ema.values(), second.ema.values(), strict=True))


def test_an_interrupted_save_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    trainer = Trainer(RECIPE)
    trainer.save(tmp_path / "lab.pt")
    trainer.advance()

    def fail(state, path):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        trainer.save(tmp_path / "lab.pt")
    assert Trainer.restore(tmp_path / "lab.pt").step == 0


def test_batches_come_in_their_shares_and_phases():
    recipe = Recipe()
    assert sum(phase.share for phase in recipe.phases) == pytest.approx(1)
    begin = 0.0
    for phase in recipe.phases:
        end = begin + phase.share * recipe.steps
        steps = range(math.ceil(begin), math.ceil(end - 1e-6))
        for kind in phase.kinds:
            share = sum(recipe.batch(step) == kind for step in steps) / len(steps)
            assert share == pytest.approx(kind.share, abs=0.01)
        begin = end


def test_the_learning_rate_rises_and_ends_at_nothing():
    recipe = Recipe()
    rates = [recipe.learning_rate(step) for step in range(recipe.steps + 1)]
    assert rates[0] < recipe.rate / 100 and max(rates) == recipe.rate and rates[-1] < 1e-6 * recipe.rate
    assert rates[recipe.steps // 2] == recipe.rate
    assert rates[3 * recipe.steps // 4] == pytest.approx(recipe.rate / 2)


def test_a_recipe_survives_json():
    recipe = dataclasses.replace(training.RECIPES["tiny"], seed=3)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_the_command_trains_resumes_and_exports(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(training.RECIPES, "tiny", RECIPE)
    out, export = tmp_path / "lab.pt", tmp_path / "w.safetensors"
    command = ["--size", "tiny", "--out", str(out), "--device", "cpu", "--log-every", "2"]
    assert training.main([*command, "--seconds", "0"]) == 0
    with pytest.raises(SystemExit):
        training.main(command)
    assert "pass --resume to go on with it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        training.main([*command, "--resume", "--steps", "9"])
    assert "has another recipe: python -m rainfusion.lab.training --size tiny --steps 8" in capsys.readouterr().err
    assert training.main([*command, "--resume", "--export", str(export)]) == 0
    printed = capsys.readouterr().out
    assert "step 8/8  loss 5x16x16" in printed and weights.digest(export) in printed
    notes = weights.about(export)
    assert notes["step"] == "8" and float(notes["loss"]) < 2
    assert "--size tiny --steps 8" in notes["command"] and str(tmp_path) not in "".join(notes.values())


def test_training_looks_at_its_options_before_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "run", lambda *args, **kwargs: pytest.fail("it began to train"))
    checkpoint = tmp_path / "lab.pt"
    for words, said in [
        (["--out", str(tmp_path)], "--out must name a file, got the folder"),
        (["--out", str(checkpoint), "--export", str(tmp_path)], "--export must name a file, got the folder"),
        (["--out", str(checkpoint), "--export", str(checkpoint)], "--export must be another file than --out"),
        (["--out", str(checkpoint), "--steps", "0"], "--steps must be at least 1, got 0"),
        (["--out", str(checkpoint), "--log-every", "0"], "--log-every must be at least 1, got 0"),
        (["--out", str(checkpoint), "--rate", "nan"], "--rate must be a finite number, got nan"),
        (["--out", str(checkpoint), "--rate", "-1"], "--rate must be above 0, got -1.0"),
        (["--out", str(checkpoint), "--seconds", "nan"], "--seconds must be at least 0, got nan"),
        (["--out", str(checkpoint), "--seed", "-3"], "--seed must be in [0, "),
    ]:
        with pytest.raises(SystemExit, match="2"):
            training.main(["--size", "tiny", "--device", "cpu", *words])
        assert said in capsys.readouterr().err


def test_an_interrupted_training_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(training.RECIPES, "tiny", RECIPE)
    command = ["--size", "tiny", "--device", "cpu", "--out", str(tmp_path / "lab.pt")]

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "advance", interrupt)
    assert training.main(command) == 130
    assert f"interrupted; {tmp_path / 'lab.pt'} was not written yet" in capsys.readouterr().err
    Trainer(RECIPE).save(tmp_path / "lab.pt")
    assert training.main([*command, "--resume"]) == 130
    assert "the same command with --resume goes on with it" in capsys.readouterr().err


def test_a_loss_that_is_not_a_number_stops_the_run_before_it_is_saved(tmp_path):
    trainer = Trainer(RECIPE)
    trainer.save(tmp_path / "lab.pt")
    with torch.no_grad():
        trainer.model.slots.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="step 1: go back to the last checkpoint"):
        training.run(trainer, tmp_path / "lab.pt", float("inf"), log_every=1)
    assert Trainer.restore(tmp_path / "lab.pt").step == 0


# weights and pictures


def test_exported_weights_are_the_running_mean_in_bf16(tmp_path):
    trainer = Trainer(RECIPE)
    trainer.advance()
    trainer.export(tmp_path / "w.safetensors", "command")
    loaded = weights.load(tmp_path / "w.safetensors", sha256=weights.digest(tmp_path / "w.safetensors"))
    assert loaded.config == RECIPE.config and not loaded.training
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, trainer.ema[name].bfloat16().float()), name


def test_missing_and_altered_weights_are_refused(tmp_path):
    file = tmp_path / "w.safetensors"
    with pytest.raises(FileNotFoundError, match=r"train them with `python -m rainfusion\.lab\.training"):
        weights.load(file)
    weights.save(file, RECIPE.config, dict(DiT(RECIPE.config).named_parameters()), {})
    with pytest.raises(ValueError, match="must have the SHA-256 0000, got "):
        weights.load(file, sha256="0000")


def test_a_contact_sheet_has_frames_across_and_clips_down(tmp_path):
    image = pytest.importorskip("PIL.Image")
    clips = torch.zeros(2, 3, 4, 8, 8)
    clips[1, 0, 3] = 1.0  # the second clip's last frame is red
    sheet = pictures.contact_sheet(clips, zoom=2)
    assert sheet.size == (4 * 16 + 3 * 2, 2 * 16 + 2)
    assert sheet.getpixel((60, 26)) == (255, 0, 0) and sheet.getpixel((10, 26)) == (0, 0, 0)
    assert pictures.contact_sheet(clips, ["one", "two"]).height > sheet.height
    assert pictures.contact_sheet(clips, zoom=2, frames=2).size == (2 * 16 + 2, 2 * 16 + 2)
    few = pictures.some_frames(torch.arange(81.0).expand(2, 3, 81).reshape(2, 3, 81, 1, 1), 27)[0, 0, :, 0, 0]
    assert few.tolist()[:3] == [0.0, 3.0, 6.0] and few[-1] == 80.0 and len(few) == 27
    clips[1, 0, 0] = 0.5  # equal frames of a GIF are stored as one
    clips[1, 1, 1] = 0.5
    pictures.write_gif(clips[1], tmp_path / "clip.gif")
    assert image.open(tmp_path / "clip.gif").n_frames == 4


def test_clips_side_by_side_have_captions_above_and_a_title_below(tmp_path):
    image = pytest.importorskip("PIL.Image")
    clips = torch.zeros(2, 3, 2, 8, 8)
    clips[0, 0], clips[1, 2] = 1.0, 1.0  # red and blue
    clips[:, 1, 1] = 1.0  # with green: yellow and cyan
    sizes = {}
    for title in ("", "a title that is longer than two clips are wide"):
        pictures.write_side_by_side(clips, ["one", "two"], tmp_path / "both.gif", title=title, zoom=10)
        with image.open(tmp_path / "both.gif") as both:
            assert both.n_frames == 2
            for frame, colours in enumerate([((255, 0, 0), (0, 0, 255)), ((255, 255, 0), (0, 255, 255))]):
                both.seek(frame)
                assert (*map(both.convert("RGB").getpixel, ((40, 60), (122, 60))),) == colours
            sizes[title] = both.size
    (width, plain), (same, titled) = sizes.values()
    assert width == same == 162 and titled > plain + 2 * 14  # two lines or more
    with pytest.raises(ValueError, match="captions must be one for each of 2 clips, got 1"):
        pictures.write_side_by_side(clips, ["one"], tmp_path / "both.gif")


def test_prompts_are_read_as_they_are_described():
    for prompt in data.random_prompts(20, generator()):
        assert torch.equal(data.parse(data.describe(prompt)), prompt)
    with pytest.raises(ValueError, match="colour must be one of red"):
        data.parse("background up; mauve disc, from top, down; red disc, from left, up; red disc, from right, up")
