"""Every example of the README and of docs/ runs, links lead somewhere, and tables say what the code says."""

import dataclasses
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import rainfusion
from helpers import stand_in_comfyui
from helpers.offline_pipelines import PIPELINES
from rainfusion import cli
from rainfusion.integrations import comfyui, mindiesd
from rainfusion.integrations.diffusers import models
from rainfusion.lab import comparison
from rainfusion.qualities import QUALITIES, Quality

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {
    **{f"docs/{path.relative_to(ROOT / 'docs')}": path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))},
    **{name: (ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")},
    "examples/README.md": (ROOT / "examples" / "README.md").read_text(),
}
REPOSITORY = "https://github.com/rainfusion/rainfusion/"
RAW = "https://raw.githubusercontent.com/rainfusion/rainfusion/main/"


def blocks(language, text):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(examples, **names):
    """One after the other, as one program -> what they left."""
    assert examples
    for example in examples:
        exec(compile(example, "an example", "exec"), names)
    return names


# ---------------------------------------------------------------------------------------------------------------------
# examples in Python

RUN_BELOW = {
    "adding_a_model.md", "combinations.md", "comfyui.md", "diffusers.md", "migrating.md", "quality.md", "quantised.md",
    "several_gpus.md", "sglang.md", "sparse_attention.md", "sparsity.md", "vllm_omni.md",
    "fastest_wan.md",  # in test_fastest_wan.py
}  # fmt: skip


def test_every_page_with_examples_is_run_below():
    assert {name for name, text in DOCS.items() if blocks("python", text)} == RUN_BELOW


def test_the_readme_runs():
    pipeline, *calls = blocks("python", README)
    pipe = PIPELINES["flux"][0]()
    names = run([pipeline], pipe=pipe)
    assert len(names["handle"].layers) > 0
    rainfusion.disable(pipe)
    q, k, v = torch.randn(3, 1, 2, 4 * 8 * 8, 16).unbind()
    names = run(calls, q=q, k=k, v=v, t=4, h=8, w=8)
    assert names["out"].isfinite().all() and names["out"].shape == q.shape


def test_the_page_on_sparse_attention_runs():
    names, examples = {}, blocks("python", DOCS["sparse_attention.md"])
    assert len(examples) >= 10
    for example in examples:
        names = run([example], **names)
        assert names["out"].isfinite().all() and names["out"].shape == names["q"].shape


@pytest.fixture
def tiny_sequences(monkeypatch):
    """The pipelines of the tests are tiny, and enabled nevertheless."""
    real = rainfusion.enable

    def enable(pipe, *args, **kwargs):
        return real(pipe, *args, **{"min_tokens": 0, **kwargs})

    monkeypatch.setattr(rainfusion, "enable", enable)
    monkeypatch.setattr("rainfusion.integrations.diffusers.enable", enable)


def test_the_page_on_diffusers_runs(tiny_sequences):
    make, inputs, _ = PIPELINES["wan"]
    names = run(blocks("python", DOCS["diffusers.md"]), pipe=make(), inputs=inputs)
    assert names["stats"].sparse_calls > 0


def test_the_page_on_combinations_runs(tiny_sequences):
    make, inputs, _ = PIPELINES["wan"]
    pipe = make()
    names = run(blocks("python", DOCS["combinations.md"]), pipe=pipe, inputs=inputs)
    stats = names["handle"].stats()
    assert stats.sparse_calls > 0 and not stats.reasons
    names["handle"].reset()
    pipe(**inputs)
    assert names["handle"].stats().sparse_calls == 4 * 2 * 2  # steps, forwards a step, layers


def test_the_table_of_enable_is_complete():
    page = DOCS["diffusers.md"]
    table = page[page.index("## Arguments of") : page.index("## What happened")]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"\w+", row)}
    _, *parameters = inspect.signature(rainfusion.enable).parameters.values()
    own = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    assert listed == own | {field.name for field in dataclasses.fields(rainfusion.Method)}


class MyTransformer(torch.nn.Module):
    class Block(torch.nn.Module):
        class Attention(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.project = torch.nn.Linear(32, 32)

            def forward(self, x):
                q = self.project(x).unflatten(-1, (2, 16)).transpose(1, 2)
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
    examples = blocks("python", DOCS["adding_a_model.md"])
    names = run(examples, MyTransformer=MyTransformer, model=MyTransformer(), tokens=tokens)
    assert names["handle"].stats().layouts == {"grid 3x16x24, 20 tokens before": 2}
    rainfusion.register_model("Other", attention=["attn"], grid=lambda arguments, config: [(1, 8, 8)], others="after")


def test_the_page_on_several_gpus_runs():
    """With one process. Its first example is of two: tests/helpers/context_parallel.py."""
    examples = blocks("python", DOCS["several_gpus.md"])
    assert len(examples) == 3 and "enable_parallelism" in examples[0]
    for example in examples[1:]:
        names = run([example])
        assert names["out"].isfinite().all() and names["out"].shape == names["q"].shape


def test_the_page_on_several_gpus_runs_in_two_processes(tmp_path):
    (tmp_path / "attend.py").write_text(blocks("python", DOCS["several_gpus.md"])[1])
    assert "torchrun --nproc-per-node 2 attend.py\n" in blocks("console", DOCS["several_gpus.md"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "attend.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"process {rank} of 2: torch.Size([1, 8, 1760, 64])" in done.stdout


def test_the_page_on_migrating_runs():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the precision that a CPU does not have
            names = run(blocks("python", DOCS["migrating.md"]))
    finally:
        mindiesd.uninstall()
    assert names["out"].isfinite().all() and names["out"].shape == names["q"].shape


def test_the_page_on_comfyui_runs(monkeypatch):
    stand_in_comfyui.install(monkeypatch)
    names = run(blocks("python", DOCS["comfyui.md"]), model=stand_in_comfyui.Patcher(stand_in_comfyui.WanModel()))
    assert len(comfyui.stats(names["fast"]).calls) == 2


def test_the_folder_to_link_into_comfyui_is_the_one_that_is_printed():
    (code,) = re.findall(r"python -c '(.*?)'", DOCS["comfyui.md"])
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(printed) == comfyui.FOLDER and (comfyui.FOLDER / "__init__.py").is_file()


def test_the_table_of_the_comfyui_node_is_complete():
    page = DOCS["comfyui.md"]
    table = page[page.index("## Tune") : page.index("## Models")]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    _, *parameters = inspect.signature(comfyui.apply).parameters
    assert listed == [name for name in parameters if name not in ("on_unsupported", "backend")]


@pytest.mark.parametrize("engine", ["vllm_omni", "sglang"])
def test_the_pages_on_serving_engines_run(engine, capsys):
    """Their commands: tests/hosts."""
    names = run(blocks("python", DOCS[f"{engine}.md"]))
    assert isinstance(names["stats"], rainfusion.Stats)
    assert capsys.readouterr().out.startswith("0 sparse and 0 dense attention calls")


@pytest.mark.parametrize("page", ["quantised.md", "sparsity.md"])
def test_the_short_pages_run(page):
    names = run(blocks("python", DOCS[page]))
    assert names["out"].isfinite().all() and names["out"].shape == names["q"].shape


def test_the_page_on_quality_runs():
    names = run(blocks("python", DOCS["quality.md"]))
    assert names["full"].shape == names["fast"].shape == (1, 3, 5, 36, 36)
    assert 0.0 < names["mask"].density() <= 1.0 and names["out"].isfinite().all()


def test_merging_two_results_by_their_lse_is_attention_to_all_keys():
    """Also where one part, or both, have no key for a row."""
    merge = next(text for text in blocks("python", DOCS["sparse_attention.md"]) if "logaddexp" in text)
    merge = merge[merge.index("share = ") :]
    q, k, v = torch.randn(3, 3, 2, 20, 8, dtype=torch.float64).unbind()
    keys = torch.ones(3, 20, dtype=torch.bool)
    keys[1, :12], keys[2] = False, False
    whole, lse = rainfusion.sparse_attention(q, k, v, attn_mask=keys, return_lse=True)
    names = dict(torch=torch)
    for name, part in (("1", slice(0, 12)), ("2", slice(12, None))):
        names[f"out{name}"], names[f"lse{name}"] = rainfusion.sparse_attention(
            q, k[:, :, part], v[:, :, part], attn_mask=keys[:, part], return_lse=True
        )
    names = run([merge], **names)
    torch.testing.assert_close(names["out"], whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(names["lse"], lse)
    assert (names["out"][2] == 0).all() and (names["lse"][2] == -torch.inf).all()


# ---------------------------------------------------------------------------------------------------------------------
# commands


def lines(language):
    """(page, line) of all pages."""
    return [
        (name, line.split("  #")[0].strip())
        for name, text in PAGES.items()
        for block in blocks(language, text)
        for line in block.splitlines()
        if line.strip()
    ]


def commands(*starts):
    return list(dict.fromkeys(line for _, line in lines("console") if line.startswith(starts)))


def test_every_command_is_run_or_checked_below():
    checked = ("rainfusion ", "make ", "pip install ", "torchrun --nproc-per-node 2 ", "$ python examples/wan_t2v.py")
    for name, line in lines("console"):
        assert line.startswith(checked) or name == "examples/README.md", line


def test_the_commands_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = commands("rainfusion ")
    assert {line.split()[1] for line in found} == {"bench", "inspect", "demo", "quality", "calibrate", "warmup"}
    for line in found:
        if line.endswith("--help"):
            with pytest.raises(SystemExit, match="0"):
                cli.main(shlex.split(line)[1:])
        else:
            assert cli.main(shlex.split(line)[1:]) == 0
    assert (tmp_path / "pictures" / "order.png").exists()


@pytest.mark.parametrize("line", [line for _, line in lines("bash")])
def test_the_commands_for_a_card_have_their_options(line, capsys):
    """They take hours, or a download: every option that they name is one that the command has."""
    words = shlex.split(line)
    if words[0] == "rainfusion":
        with pytest.raises(SystemExit, match="0"):
            cli.main([words[1], "--help"])
        usage = capsys.readouterr().out
    elif words[1] == "-m":
        usage = Path(importlib.util.find_spec(words[2]).origin).read_text()
    else:
        assert words[0] == "python"
        usage = (ROOT / words[1]).read_text()
    options = [word for word in words if word.startswith("--")]
    assert options and all(re.search(rf"{option}\b", usage) for option in options)


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for name, text in PAGES.items():
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
            assert f"\n{target}:" in makefile, (name, target)


def test_the_extras_exist():
    project = (ROOT / "pyproject.toml").read_text()
    for line in commands("pip install "):
        for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", line))):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), line


def test_the_example_prints_what_its_page_shows(tmp_path, monkeypatch, capsys):
    (shown,) = blocks("console", PAGES["examples/README.md"])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    importlib.import_module("wan_t2v").main([])

    def without_seconds(text):
        return [re.sub(r"\d+\.\d\d s", "", line) for line in text.splitlines()]

    assert without_seconds(capsys.readouterr().out) == without_seconds(shown)[1:]


# ---------------------------------------------------------------------------------------------------------------------
# links, pictures, numbers, the site


def test_the_page_on_quality_says_what_was_measured():
    page = DOCS["quality.md"]
    rows = [row for row in comparison.read(ROOT / "benchmarks" / "results").rows if row.psnr and row.family != "dense"]
    assert len(rows) > 40
    for row in rows:
        mean, error = comparison.mean_and_error(row.psnr)
        assert f"{mean:.2f} ± {error:.2f}" in page, row.method


def test_the_page_on_quality_says_what_the_words_mean():
    page = DOCS["quality.md"]
    table = page[page.index("## What the words mean") : page.index("## Natural video")]
    rows = re.findall(r'^\| `"(\w+)"` \| (\S+) \| (\S+) \| `"(\w+)"` \| (\S+) \| (.*) \|$', table, re.MULTILINE)
    found = {
        word: Quality(float(video), float(image), name, float(dense)) for word, video, image, name, dense, _ in rows
    }
    assert found == QUALITIES
    samples = comparison.read(ROOT / "benchmarks" / "results").rows
    for word, numbers in ((row[0], row[5]) for row in rows):
        (own,) = (
            row
            for row in samples
            if row.method == "rf_v2 2x8x8 free spread compensate, 32 keys, falling"
            and row.nominal == QUALITIES[word].video
        )
        psnr, ssim = (comparison.mean_and_error(values)[0] for values in (own.psnr, own.ssim))
        assert numbers.startswith(f"{psnr:.1f} dB, {ssim:.3f} |")
    for word in ("high", "balanced", "fast"):
        assert f'`"{word}"` ({QUALITIES[word].video}' in rainfusion.enable.__doc__
    words = '"high")  # {0.video} of the blocks are skipped for video, {0.image} for images'
    assert words.format(QUALITIES["high"]) in DOCS["diffusers.md"]


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Relative ones, and addresses of files of this repository; whether the web has the others is not asked."""
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        target, _, anchor = link.partition("#")
        if target.startswith(REPOSITORY + "blob/main/"):
            path = ROOT / target.removeprefix(REPOSITORY + "blob/main/")
        elif target.startswith(RAW):
            path = ROOT / target.removeprefix(RAW)
        elif target.startswith(("http:", "https:")):
            assert not target.startswith(REPOSITORY) or target == REPOSITORY + "security", link
            continue
        else:
            path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path.read_text()), link


def test_the_links_of_pages_that_are_shown_elsewhere_are_whole():
    """A package index shows the README, the site shows the others in a folder of its own."""
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)\s]+)\)", PAGES[name])
        assert all(link.startswith("https://") for link in links), name


@pytest.mark.parametrize("page", PAGES)
def test_the_pictures_are_pictures(page):
    for link in re.findall(r"!\[.*?\]\((.*?)\)", PAGES[page]):
        path = ROOT / link.removeprefix(RAW) if link.startswith(RAW) else (ROOT / page).parent / link
        assert path.read_bytes().startswith({".png": b"\x89PNG", ".gif": b"GIF89a"}[path.suffix]), link


def test_every_public_name_is_in_the_reference():
    reference = "\n".join(text for name, text in PAGES.items() if name.startswith("docs/api/"))
    described = set(re.findall(r"^::: rainfusion\.(\w+)$", reference, re.MULTILINE))
    assert described == set(rainfusion.__all__)


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "index.html").read_text()
    assert "Wan2.2-A14B" in index  # the table of the README
    loaded = re.findall(r'(?:<script[^>]* src|<link[^>]*stylesheet"[^>]* href)="([^"]*)"', index)
    assert loaded and not any(source.startswith("http") for source in loaded)  # nothing from elsewhere
    assert "sparse_attention" in (tmp_path / "api" / "attention" / "index.html").read_text()


def test_the_map_names_what_there_is():
    source = ROOT / "src" / "rainfusion"
    (tree,) = (text for text in blocks("text", DOCS["architecture.md"]) if text.startswith("rainfusion/"))
    named = dict(re.findall(r"^  (\S+) +(.*)$", tree, re.MULTILINE))
    modules = {path.name for path in source.glob("[!_]*.py")}
    folders = {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    assert set(named) == (modules | folders) - {"plugin.py", "compat.py", "plugin/", "compat/"}  # former places
    for folder in ("prediction/", "backends/", "integrations/"):
        for module in re.findall(r"\w+", named[folder].split(";")[0]):
            assert (source / folder / f"{module}.py").exists(), module


def test_ci_runs_on_every_python_that_the_package_names():
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.search(r"python: \[(.*)\]", workflow)[1] == ", ".join(f'"{version}"' for version in named)
    oldest = re.search(r'"torch>=(.*?)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"torch=={oldest}.*" in workflow
