"""Every example of the README runs, and its tables say what the code says."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch

import rainfusion
from rainfusion import cli

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_examples_run():
    first, *rest = blocks("python")
    names = dict(t=2, h=8, w=8)
    names["q"], names["k"], names["v"] = torch.randn(3, 1, 2, 128, 16).unbind()
    exec(first, names)
    assert names["out"].shape == (1, 2, 128, 16)
    names = {}
    for example in rest:
        exec(example, names)
        assert names["out"].isfinite().all()
        assert names["out"].shape == names["q"].shape
    assert len(rest) >= 6


def test_the_commands_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("rainfusion ")]
    assert len(lines) >= 3
    for line in lines:
        if line.endswith("--help"):
            with pytest.raises(SystemExit, match="0"):
                cli.main(shlex.split(line)[1:])
        else:
            assert cli.main(shlex.split(line)[1:]) == 0
    assert (tmp_path / "pictures" / "order.png").exists()


def test_the_make_targets_exist():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert f"\n{target}:" in makefile


def test_the_parameter_table_is_complete():
    table = README[README.index("### Parameters") : README.index("### How to choose")]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"\w+", row)}
    assert listed == set(inspect.signature(rainfusion.sparse_attention).parameters)


@pytest.mark.parametrize("picture", re.findall(r"!\[.*?\]\((.*?)\)", README))
def test_the_pictures_exist(picture):
    assert (Path(__file__).parent.parent / picture).read_bytes().startswith(b"\x89PNG")
