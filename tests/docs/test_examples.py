"""The scripts in examples/: each runs offline with tiny random weights, and with a checkpoint from a folder."""

import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from helpers import offline_pipelines

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "wan_t2v": ["--height", "64", "--width", "128", "--frames", "9"],
    "wan_i2v": ["--height", "64", "--width", "128", "--frames", "9"],
    "fastest_wan": ["--height", "64", "--width", "128", "--frames", "9"],  # more of it: test_fastest_wan.py
    "qwen_image_edit": ["--height", "128", "--width", "192"],
    "flux": ["--height", "256", "--width", "384"],
}
VIDEOS = {"wan_t2v", "wan_i2v", "fastest_wan"}
CALLS = {name: 2 if name == "flux" else 2 * 2 for name in SCRIPTS}  # a step: layers, and guidance


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """main() of a script, as if run from its folder -> what it printed, the file it wrote, opened."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name, *options):
        script = importlib.import_module(name)
        assert Path(script.__file__).parent == EXAMPLES
        out = tmp_path / ("out.gif" if name in VIDEOS else "out.png")
        assert script.main([*SCRIPTS[name], "--device", "cpu", "--steps", "2", "--out", str(out), *options]) is None
        picture = Image.open(out)
        picture.load()
        return capsys.readouterr().out, picture

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_sparse_throughout(name, run):
    printed, picture = run(name)
    assert f"{2 * CALLS[name]} sparse and 0 dense attention calls" in printed
    assert "dense:" not in printed
    assert "noise" in printed
    height, width = int(SCRIPTS[name][1]), int(SCRIPTS[name][3])
    assert picture.size == (width, height)
    assert getattr(picture, "n_frames", 1) == (9 if name in VIDEOS else 1)
    assert len(set(picture.convert("L").tobytes())) > 10  # not one colour, as of NaN


def test_every_script_has_a_row_in_the_readme_and_a_test():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - {"common", "random_weights"}
    assert scripts == set(SCRIPTS)
    commands = re.findall(r"python examples/(\w+)\.py --model", (EXAMPLES / "README.md").read_text())
    assert set(commands) == scripts


def test_compare_and_dense(run):
    printed, sparse = run("flux", "--compare", "--sparsity", "0.9")
    assert re.search(r"^speed-up \d+\.\d\dx, PSNR \d+\.\d dB$", printed, re.MULTILINE)
    assert printed.count("warming up") == 2
    alone, dense = run("flux", "--dense")
    assert alone.startswith("dense attention: ") and "calls" not in alone
    assert sparse.tobytes() != dense.tobytes()  # blocks were skipped


def test_no_speed_up_is_printed_where_nothing_was_sparse(run):
    printed, _ = run("flux", "--compare", "--sparsity", "0.0")
    assert "dense: 4 calls: sparsity is 0" in printed
    assert "nothing to compare: no call was sparse" in printed and "speed-up" not in printed


def test_psnr(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    psnr = importlib.import_module("common").psnr
    black, dark, white = (Image.new("RGB", (8, 8), (level,) * 3) for level in (0, 51, 255))
    assert psnr([black, white], [black, white]) == float("inf")
    assert psnr([black, black], [white, white]) == 0.0
    assert psnr([black], [dark]) == pytest.approx(20 * math.log10(5))


def test_steps_and_layers_stay_dense(run):
    printed, _ = run("wan_t2v", "--start-step", "1", "--skip-layers", "0")
    assert "2 sparse and 6 dense attention calls" in printed
    assert "dense: 4 calls: the layer is in skip_layers" in printed
    assert "dense: 2 calls: the first steps are dense (start_step)" in printed
    assert "2 sparse and 6 dense" in run("wan_t2v", "--start-step", "0.5", "--skip-layers", "1")[0]


def test_seed_prompt_and_picture_matter(run, tmp_path):
    Image.new("RGB", (200, 100), "green").save(tmp_path / "green.png")
    changes = [[], ["--seed", "1"], ["--prompt", "another"], ["--image", str(tmp_path / "green.png")]]
    pictures = [run("wan_i2v", *change)[1].tobytes() for change in changes]
    assert len(set(pictures)) == 4
    assert run("wan_i2v")[1].tobytes() == pictures[0]


def test_compiled_blocks(run, monkeypatch):
    torch._dynamo.reset()
    compiled = []
    module_compile = torch.nn.Module.compile

    def quickly(module, **kwargs):
        compiled.append(kwargs)
        module_compile(module, backend="aot_eager", **kwargs)  # the default takes a minute

    eager, picture = run("flux", "--compare")
    monkeypatch.setattr(torch.nn.Module, "compile", quickly)
    printed, same = run("flux", "--compare", "--compile")
    assert compiled == [dict(fullgraph=True)] * 2
    assert "4 sparse and 0 dense" in eager and "4 sparse and 0 dense" in printed
    largest = max(abs(a - b) for a, b in zip(picture.tobytes(), same.tobytes(), strict=True))
    assert largest <= 2


@pytest.mark.parametrize("name", ["wan_t2v", "flux"])
def test_a_checkpoint_from_a_folder(name, run, tmp_path):
    make = {"wan_t2v": offline_pipelines.wan_two_experts, "flux": offline_pipelines.flux}[name]
    make().save_pretrained(tmp_path / "checkpoint")
    size = ["--height", "32", "--width", "48"]
    printed, picture = run(name, *size, "--model", str(tmp_path / "checkpoint"))
    assert re.search(r"dense: \d+ calls: fewer than 2048 tokens \(min_tokens\)", printed)
    assert printed.startswith("dense attention: ") and "noise" not in printed
    printed, picture = run(name, *size, "--model", str(tmp_path / "checkpoint"), "--min-tokens", "0")
    assert re.search(r"[1-9]\d* sparse and 0 dense attention calls", printed)
    assert picture.size == (48, 32)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_has_an_example_to_copy(name, run, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(name, "--help")
    printed = capsys.readouterr().out
    assert f"python examples/{name}.py --model" in printed
    assert ("--image" in printed) == (name in ("wan_i2v", "qwen_image_edit"))
    assert ("--frames" in printed) == (name in VIDEOS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "out.txt"], "--out must end in .gif or .mp4, got out.txt"),
        (["--image", "nowhere.png"], "--image: there is no file nowhere.png"),
        (["--dense", "--compare"], "not allowed with"),
    ],
)
def test_mistakes_are_told_before_the_work(options, message, run, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("wan_i2v", *options)
    assert message in capsys.readouterr().err
