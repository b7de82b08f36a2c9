"""The lab's weights: found in a clone, passed as a file, missing in a wheel, which stays small without them."""

from pathlib import Path

import pytest
import torch

from rainfusion import cli, lab
from rainfusion.lab import weights
from rainfusion.lab.model import Config, DiT

pytest.importorskip("safetensors")

ROOT = Path(__file__).parents[2]
MOST_BYTES = 2_000_000  # of a wheel
TINY = Config(frames=5, size=32, patch=2, dim=64, depth=1, mlp=64)


def refused(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.safetensors"
    weights.save(path, TINY, dict(DiT(TINY).named_parameters()), {})
    return path


def test_a_clone_has_the_weights_that_the_code_knows():
    assert weights.find() == ROOT / "weights" / "lab.safetensors"
    assert weights.digest(weights.find()) == weights.SHA256
    assert "config" in weights.about()


def test_an_installed_package_says_what_to_do_before_it_makes_a_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "CLONE", tmp_path / "site-packages")
    with pytest.raises(FileNotFoundError, match=r"clone https://github.com/rainfusion/rainfusion.*lab\.load\(path\)"):
        lab.load()
    out = tmp_path / "out"
    for command in (["demo"], ["quality"], ["calibrate", "lab"]):
        said = refused(capsys, *command, "--device", "cpu", "--out", str(out))
        assert "clone https://github.com/rainfusion/rainfusion" in said and "--weights FILE" in said
    assert not out.exists()


def test_weights_are_passed_as_a_file(capsys, tmp_path, monkeypatch, file):
    pytest.importorskip("PIL")
    monkeypatch.setattr(weights, "CLONE", tmp_path / "site-packages")
    words = ["--weights", str(file), "--device", "cpu", "--steps", "1", "--guidance", "1"]
    demo = ["demo", *words, "--dense-steps", "0", "--out", str(tmp_path / "demo")]
    assert cli.main(demo) == 0
    assert "A video DiT of 0.1 M parameters draws 5 frames of 32x32 pixels" in capsys.readouterr().out
    calibrate = ["calibrate", "lab", *words, "--sparsity", "0.2", "--samples", "1", "--out", str(tmp_path / "p.json")]
    assert cli.main(calibrate) == 0
    said = refused(capsys, "calibrate", "a/model", "--prompt", "a cat", *words, "--out", str(tmp_path / "p.json"))
    assert "--weights is for the lab" in said


def test_another_file_is_no_model(tmp_path, capsys, file):
    safetensors = pytest.importorskip("safetensors.torch")
    text, other, cut = (tmp_path / name for name in ("text", "other.safetensors", "cut.safetensors"))
    text.write_text("no tensors")
    safetensors.save_file({"a": torch.zeros(1)}, other)
    state = dict(DiT(TINY).named_parameters())
    state.pop("slots")
    weights.save(cut, TINY, state, {})
    for path, said in [
        (text, "must be a safetensors file of a lab model"),
        (other, "must hold a lab model with its configuration, got another: 'config'"),
        (cut, "must hold a lab model with its configuration, got another: Error"),
        (tmp_path, "no weights at"),
    ]:
        words = ["demo", "--quick", "--device", "cpu", "--out", str(tmp_path / "out"), "--weights", str(path)]
        assert said in refused(capsys, *words)


def test_the_wheel_is_small(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds the wheel")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    assert Path(path).stat().st_size < MOST_BYTES


def test_the_package_has_no_large_file():
    """What a wheel would hold, where hatchling is not installed to build one."""
    package = ROOT / "src" / "rainfusion"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 50 and not list(package.rglob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    wheel = settings()["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["src/rainfusion"] and "*.safetensors" in wheel["exclude"]


def settings():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and later read TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_a_package_index_has_links_to_follow():
    project = settings()["project"]
    assert set(project["urls"]) == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    assert project["urls"]["Repository"] == weights.REPOSITORY
    extras = project["optional-dependencies"]
    assert set(extras) == {"cli", "dev", "diffusers", "docs", "lab"}
    assert "rainfusion[cli,diffusers,docs,lab]" in extras["dev"]
