"""`rainfusion demo`: clips of the lab model with full and with sparse attention, side by side."""

import re
import sys

import pytest
from PIL import Image

from rainfusion import cli
from rainfusion.lab import demo
from rainfusion.qualities import QUALITIES

PNG = b"\x89PNG"
QUICK_DEMO = ("demo", "--quick", "--device", "cpu")


def run(capsys, *words):
    status = cli.main(list(words))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def refused(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_demo_draws_full_and_sparse_side_by_side(capsys, tmp_path):
    status, out, err = run(capsys, *QUICK_DEMO, "--out", str(tmp_path / "new"))
    assert status == 0
    assert re.search(r"^full +\d+\.\d\d s +\d+\.\d\d s +1\.00", out, re.MULTILINE)
    assert re.search(r"^sparse at 0.85 +\d+\.\d\d s +\d+\.\d\d s +0\.\d\d +\d+\.\d dB$", out, re.MULTILINE)
    assert re.search(r"^speed-up +\d+\.\d\dx +\d+\.\d\dx", out, re.MULTILINE)
    assert f"Prompt: {demo.PROMPT}" in out
    assert err == ""  # no bars where stderr is no terminal
    gif, sheet = tmp_path / "new" / demo.GIF, tmp_path / "new" / demo.SHEET
    assert f"wrote {gif}\nwrote {sheet}" in out
    assert sheet.read_bytes().startswith(PNG)
    with Image.open(gif) as picture:
        assert picture.n_frames == 9
        assert picture.width > 3 * 3 * 36  # three panels
        first = picture.convert("RGB").tobytes()
        picture.seek(2)
        assert picture.convert("RGB").tobytes() != first


def test_demo_takes_a_prompt_and_dense_steps(capsys, tmp_path):
    prompt = "background up; red disc, from left, right; blue square, from top, down; white star, from right, up left"
    words = (*QUICK_DEMO, "--out", str(tmp_path), "--frames", "5", "--guidance", "2", "--sparsity", "1", "--seed", "3")
    _, out, _ = run(capsys, *words, "--prompt", prompt, "--dense-steps", "1")
    assert f"Prompt: {prompt}" in out
    assert "304 tokens,\nin 2 steps" in out
    assert "The first 1 of 2 steps are dense in both" in out
    assert "sparse at 1 " in out


def test_demo_takes_a_word_instead_of_a_sparsity(capsys, tmp_path):
    for frames, sparsity in ((5, QUALITIES["fast"].video), (1, QUALITIES["fast"].image)):
        _, out, _ = run(capsys, *QUICK_DEMO, "--out", str(tmp_path), "--frames", str(frames), "--quality", "fast")
        assert f"sparse at {sparsity} " in out


def test_demo_without_a_difference_when_nothing_is_skipped(capsys, tmp_path):
    _, out, _ = run(capsys, *QUICK_DEMO, "--out", str(tmp_path), "--steps", "1", "--frames", "1", "--sparsity", "0")
    row = next(line for line in out.splitlines() if line.startswith("sparse at 0"))
    density, psnr = re.search(r" (\S+) +(\S+) dB$", row).groups()
    assert density == "1.00" and float(psnr) > 80


def test_demo_draws_a_bar_in_a_terminal(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, _, err = run(capsys, *QUICK_DEMO, "--out", str(tmp_path), "--frames", "1")
    assert "full attention: 100%" in err and "sparse attention: 100%" in err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--sparsity", "1.5"), "--sparsity"),
        (("--quality", "best"), "argument --quality: invalid choice: 'best'"),
        (("--quality", "fast", "--sparsity", "0.5"), "argument --sparsity: not allowed with argument --quality"),
        (("--steps", "0"), "--steps"),
        (("--steps", "3", "--dense-steps", "3"), "--dense-steps"),
        (("--frames", "0"), "--frames"),
        (
            ("--frames", "8"),
            "--frames must be 1 and a multiple of 4, since later tokens have so many frames, got 8; try 5",
        ),
        (("--size", "32"), "--size must be a multiple of 3, the side of this model's patches, got 32; try 30 or 33"),
        (("--size", "0"), "--size must be at least 1, got 0"),
        (("--guidance", "nan"), "--guidance must be a finite number, got nan"),
        (("--guidance", "inf"), "--guidance must be a finite number, got inf"),
        (("--sparsity", "nan"), "--sparsity must be in [0, 1], got nan"),
        (("--dense-steps", "-1"), "--dense-steps must be in 0..1 for 2 steps, got -1"),
        (("--seed", "-1"), "--seed must be in [0, 4294967295], got -1"),
        (("--seed", "99999999999999999999999"), "--seed must be in [0, 4294967295], got 9999"),
        (("--device", "meta"), "--device must be a torch device of this machine, got 'meta'"),
        (("--prompt", "a cat"), "a prompt must begin with 'background'"),
        (("--prompt", "background up; red disc"), "a shape must be"),
        (("--prompt", "background up"), "shapes must be 3"),
        (("--device", "nothing"), "--device"),
    ],
)
def test_demo_says_what_is_wrong_before_it_starts(words, name, capsys, tmp_path):
    assert name in refused(capsys, *QUICK_DEMO, "--out", str(tmp_path), *words)


def test_demo_says_when_a_clip_is_not_finite(capsys, tmp_path):
    assert "the clip is not finite: --guidance must be smaller" in refused(
        capsys, *QUICK_DEMO, "--out", str(tmp_path), "--frames", "1", "--guidance", "1e30"
    )


@pytest.mark.parametrize(("module", "package"), [("PIL", "pillow"), ("safetensors", "safetensors")])
def test_demo_names_the_package_that_it_lacks(module, package, capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == module else object())
    assert f"needs {package}: pip install {package}\n" in refused(capsys, *QUICK_DEMO)
