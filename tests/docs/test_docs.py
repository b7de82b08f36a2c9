"""Every example of the README and of the pages in docs/ runs, and the tables say what the code says."""

import inspect
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch

import rainfusion
from helpers.offline_pipelines import PIPELINES
from rainfusion import cli
from rainfusion.integrations import mindiesd
from rainfusion.integrations.diffusers import models
from rainfusion.lab import comparison

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run_page(name, **names):
    """All examples of a page, one after the other -> what they left."""
    examples = blocks("python", (ROOT / "docs" / name).read_text())
    assert examples
    for example in examples:
        exec(compile(example, name, "exec"), names)
    return names


def test_the_python_examples_run():
    plug_in, first, *rest = blocks("python")
    pipe = PIPELINES["flux"][0]()
    exec(plug_in, dict(pipe=pipe))
    rainfusion.disable(pipe)
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


def test_the_page_on_diffusers_runs():
    make, inputs, _ = PIPELINES["wan"]
    pipe = make()
    real = rainfusion.enable

    def enable(pipe, **kwargs):  # the pipeline of the tests is tiny
        return real(pipe, **{"min_tokens": 0, **kwargs})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rainfusion, "enable", enable)
        patch.setattr("rainfusion.integrations.diffusers.enable", enable)
        names = run_page("diffusers.md", pipe=pipe, inputs=inputs)
    assert names["stats"].sparse_calls > 0
    table = (ROOT / "docs" / "diffusers.md").read_text()
    table = table[table.index("## Arguments of") : table.index("## What happened")]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"\w+", row)}
    assert listed == set(inspect.signature(real).parameters)


class MyTransformer(torch.nn.Module):
    class Block(torch.nn.Module):
        class Attention(torch.nn.Module):
            def forward(self, x):
                q = x.unflatten(-1, (2, 16)).transpose(1, 2)
                return torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

        def __init__(self):
            super().__init__()
            self.attn = self.Attention()

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, tokens, grid):
        for block in self.blocks:
            tokens = tokens + block.attn(tokens)
        return tokens


def test_the_page_on_adding_a_model_runs(monkeypatch):
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    tokens = torch.randn(1, 20 + 3 * 16 * 24, 32)
    names = run_page("adding_a_model.md", MyTransformer=MyTransformer, model=MyTransformer(), tokens=tokens)
    assert names["handle"].stats().layouts == {"grid 3x16x24, 20 tokens before": 2}


def test_the_page_on_several_gpus_runs():
    """With one process. Its first example is of two: tests/context_parallel.py."""
    examples = blocks("python", (ROOT / "docs" / "several_gpus.md").read_text())
    assert len(examples) == 3 and "enable_parallelism" in examples[0]
    for example in examples[1:]:
        names = {}
        exec(example, names)
        assert names["out"].isfinite().all() and names["out"].shape == names["q"].shape


def test_the_page_on_migrating_runs():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the precision that a CPU does not have
            names = run_page("migrating.md")
    finally:
        mindiesd.uninstall()
    assert names["out"].isfinite().all() and names["out"].shape == names["q"].shape


def test_the_page_on_quality_runs():
    names = run_page("quality.md")
    assert names["full"].shape == names["fast"].shape == (1, 3, 5, 32, 32)
    assert 0.0 < names["mask"].density() <= 1.0 and names["out"].isfinite().all()


def test_the_page_on_quality_says_what_was_measured():
    page = (ROOT / "docs" / "quality.md").read_text()
    rows = [row for row in comparison.read(ROOT / "benchmarks" / "results").rows if row.psnr and row.family != "dense"]
    assert len(rows) > 40
    for row in rows:
        mean, error = comparison.mean_and_error(row.psnr)
        assert f"{mean:.2f} ± {error:.2f}" in page, row.method


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page):
    path = ROOT / page
    for link in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_the_make_targets_exist():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert f"\n{target}:" in makefile


def test_the_parameter_table_is_complete():
    table = README[README.index("### Parameters") : README.index("### How to choose")]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"\w+", row)}
    assert listed == set(inspect.signature(rainfusion.sparse_attention).parameters)


@pytest.mark.parametrize("picture", re.findall(r"!\[.*?\]\((.*?)\)", README))
def test_the_pictures_exist(picture):
    assert (ROOT / picture).read_bytes().startswith({".png": b"\x89PNG", ".gif": b"GIF89a"}[Path(picture).suffix])
