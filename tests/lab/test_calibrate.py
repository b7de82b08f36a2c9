"""The command `rainfusion calibrate`, on the lab model at a small size and on a pipeline in a folder."""

import pytest

from helpers import offline_pipelines
from rainfusion import Profile, cli, lab


def test_the_lab_is_calibrated_and_sampled(tmp_path, capsys):
    out = tmp_path / "lab.json"
    words = ["calibrate", "lab", "--sparsity", "0.4", "--samples", "1", "--steps", "1", "--frames", "13"]
    assert cli.main([*words, "--height", "36", "--guidance", "1", "--device", "cpu", "--out", str(out)]) == 0
    printed, told = capsys.readouterr()
    assert told == ""  # stderr is no terminal here: no bar is drawn
    assert "sparsity of 0.4 in all" in printed and f"wrote {out}" in printed
    profile = Profile.load(out)
    assert list(profile.sparsities) == [str(layer) for layer in range(8)]
    assert profile.options["first_frame"] == "free" and profile.notes["calls"] == 8
    assert (tmp_path / "lab.png").read_bytes().startswith(b"\x89PNG")
    model, prompt = lab.load(), lab.random_prompts(1, lab_generator())
    clip = lab.sample(model, prompt, attention=lab.sparse(profile=profile), steps=1, frames=13, size=36, guidance=1.0)
    assert clip.shape == (1, 3, 13, 36, 36)


def lab_generator():
    import torch

    return torch.Generator().manual_seed(0)


def test_a_pipeline_is_calibrated_from_its_folder(tmp_path, capsys):
    folder = tmp_path / "pipe"
    offline_pipelines.wan().save_pretrained(folder)
    out = tmp_path / "wan.json"
    words = ["calibrate", str(folder), "--sparsity", "0.3", "--steps", "2", "--height", "256", "--width", "384"]
    words += ["--frames", "9", "--prompt", "a cat", "--dtype", "fp32", "--device", "cpu", "--out", str(out)]
    capsys.readouterr()  # saving the folder draws bars of its own
    assert cli.main(words) == 0
    profile = Profile.load(out)
    assert len(profile.sparsities) == 2 and profile.notes["prompts"] == ["a cat"]
    printed, told = capsys.readouterr()
    assert "rainfusion.enable(pipe, profile=" in printed
    assert "%|" not in told  # no bars of diffusers either


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["some/model"], "--prompt must be given at least once"),
        (["lab", "--sparsity", "1.5"], r"--sparsity must be in (0, 1], got 1.5"),
        (["lab", "--samples", "0"], "--samples must be at least 1, got 0"),
        (["lab", "--frames", "0"], "--frames must be at least 1, got 0"),
        (["lab", "--height", "0"], "--height must be at least 1, got 0"),
        (["lab", "--height", "32"], "--height must be a multiple of 3, the side of this model's patches, got 32"),
        (["lab", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["lab", "--steps", "-2"], "--steps must be at least 1, got -2"),
        (["lab", "--guidance", "nan"], "--guidance must be a finite number, got nan"),
        (["lab", "--sparsity", "nan"], "--sparsity must be in (0, 1], got nan"),
        (["lab", "--token-order", "hilbert"], "--token-order must be one of 'window'"),
        (["lab", "--width", "64"], "--width is not for the lab, which draws squares"),
        (["lab", "--prompt", "a cat"], "--prompt is not for the lab, which draws prompts of its own"),
        (["lab", "--dtype", "fp16"], "--dtype is not for the lab"),
        (["some/model", "--samples", "3"], "--samples is for the lab"),
        (["some/model", "--prompt", "a cat", "--width", "0"], "--width must be at least 1, got 0"),
    ],
)
def test_wrong_words_are_errors_that_say_so(words, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["calibrate", *words, "--device", "cpu", "--out", str(tmp_path / "p.json")])
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["calibrate", "--help"])
    assert "  rainfusion calibrate lab --sparsity 0.7" in capsys.readouterr().out
