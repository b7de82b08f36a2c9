"""examples/fastest_wan.py: each stage of the stack, alone and on top of the others, and the page that describes it."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from helpers import needs_diffusers, offline_pipelines

needs_diffusers()
pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fastest_wan.md").read_text()
SIZE = ["--height", "64", "--width", "128", "--frames", "9", "--device", "cpu"]
STEPS, LAYERS, FORWARDS = 8, 2, 2  # of the tiny pipeline; forwards a step, for guidance
ALL = STEPS * LAYERS * FORWARDS


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("fastest_wan")


@pytest.fixture
def run(script, monkeypatch, capsys):
    """main() -> what it printed, the frames that it would write."""
    written = []
    monkeypatch.setattr(script.common, "write", lambda frames, args: written.append(frames))

    def run(*options):
        script.main([*SIZE, *options])
        return capsys.readouterr().out, written[-1]

    return run


@pytest.fixture
def torchao(script, monkeypatch):
    """With its refusal of CPUs lifted, which compute fp8 as well, and without its settings for the whole process."""
    pytest.importorskip("torchao")
    from torchao.quantization import quant_api, utils

    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    monkeypatch.setattr(utils, "recommended_inductor_config_setter", lambda: None)
    monkeypatch.setattr(script, "has_fp8", lambda device: True)


@pytest.fixture
def graphs(monkeypatch):
    """-> a list with the number of runs of each graph that was compiled, quickly: by aot_eager."""
    torch._dynamo.reset()
    runs = []

    def backend(graph, inputs):
        number, compiled = len(runs), aot_eager(graph, inputs)
        runs.append(0)

        def run(*args):
            runs[number] += 1
            return compiled(*args)

        return run

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend=backend, **options))
    yield runs
    torch._dynamo.reset()


def same(frames, others):
    return all(frame.tobytes() == other.tobytes() for frame, other in zip(frames, others, strict=True))


def test_without_options_a_cpu_caches_and_is_sparse(run):
    printed, _ = run("--cache-threshold", "0")
    assert printed.startswith("sampling: first-block cache, sparse attention\n")
    assert f"{ALL} sparse and 0 dense attention calls" in printed
    assert f"0 of {ALL} attention calls were left to the cache" in printed
    assert re.search(r"^\d+\.\d\d s for the whole pipeline$", printed, re.MULTILINE)


def test_all_stages_can_be_left_out(run):
    printed, _ = run("--linear", "native", "--no-compile", "--cache", "none", "--no-sparse")
    assert printed.startswith("sampling: baseline\n") and "calls" not in printed


@pytest.mark.parametrize("linear", ["int8", "fp8"])
def test_the_linear_layers_of_the_blocks_are_quantised_and_no_others(linear, run, script, torchao, monkeypatch):
    pipe = script.random_weights.wan_t2v_two_experts()
    monkeypatch.setattr(script.random_weights, "wan_t2v_two_experts", lambda: pipe)
    printed, _ = run("--linear", linear, "--cache", "none", "--each")
    kind = {"int8": "Int8Tensor", "fp8": "Float8Tensor"}[linear]
    for model in (pipe.transformer, pipe.transformer_2):
        layers = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        quantised = {name for name, module in layers.items() if type(module.weight).__name__ == kind}
        assert quantised == {name for name in layers if name.startswith("blocks.")} and len(quantised) == 2 * 10
    assert rows(printed)[1][0] == f"+ {linear} linear layers"
    assert 30 < float(rows(printed)[1][3]) < 100  # dB: something was rounded, and not much of it


@pytest.mark.parametrize("cache", ["none", "first-block", "mag"])
@pytest.mark.parametrize("linear", ["native", "int8"])
def test_compiled_blocks_are_a_full_graph_under_any_cache(cache, linear, run, graphs, request):
    if linear != "native":
        request.getfixturevalue("torchao")
    threshold = [] if cache == "none" else ["--cache-threshold", "0.3"]
    eager, frames = run("--no-compile", "--linear", linear, "--cache", cache, *threshold)
    assert not graphs
    printed, compiled = run("--compile", "--linear", linear, "--cache", cache, *threshold)
    calls = int(re.search(r"(\d+) sparse and 0 dense", printed)[1])
    assert calls == ALL if cache == "none" else LAYERS <= calls < ALL
    assert len(graphs) == (2 if cache == "mag" else 1)  # one more, dense, to measure its ratios
    assert graphs[-1] >= calls  # the warm-up, too
    assert f"{calls} sparse and 0 dense" in eager
    difference = max(
        abs(a - b)
        for frame, other in zip(frames, compiled, strict=True)
        for a, b in zip(frame.tobytes(), other.tobytes(), strict=True)
    )
    assert difference <= 2


@pytest.mark.parametrize("cache", ["first-block", "mag"])
@pytest.mark.parametrize("before", ["compile_blocks", "cache_steps"])
def test_sparse_attention_may_come_earlier(cache, before, run, script, graphs, monkeypatch):
    """Before the blocks are compiled, or between that and the cache."""
    monkeypatch.setattr(script, "magnitudes", lambda shares, *_: [[1.0] * steps for _, steps in shares])
    options = ["--compile", "--cache", cache, "--cache-threshold", "0.3"]
    _, last = run(*options)
    stage, enable = getattr(script, before), script.enable_sparse_attention
    handles = []

    def earlier(pipe, *rest):
        handles.append(enable(pipe, script.parse([*SIZE])))
        return stage(pipe, *rest)

    monkeypatch.setattr(script, before, earlier)
    monkeypatch.setattr(script, "enable_sparse_attention", lambda pipe, args: handles[0])
    torch._dynamo.reset()
    graphs.clear()
    printed, frames = run(*options)
    assert re.search(r"[1-9]\d* sparse and 0 dense", printed) and len(graphs) == 1
    assert same(frames, last)


@pytest.mark.parametrize("cache", ["first-block", "mag"])
def test_blocks_compiled_as_modules_are_no_full_graph_under_a_cache(cache, run, script, graphs, monkeypatch):
    """Why the script compiles `forward`. Once diffusers can do it, the script and its page may be simpler."""
    full = dict(fullgraph=True)

    def compile_modules(pipe):
        for model in script.transformers(pipe):
            model.compile_repeated_blocks(**full)

    monkeypatch.setattr(script, "compile_blocks", compile_modules)
    monkeypatch.setattr(script, "magnitudes", lambda shares, *_: [[1.0] * steps for _, steps in shares])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run("--compile", "--cache", cache)
    torch._dynamo.reset()
    graphs.clear()
    full.clear()
    run("--compile", "--cache", cache)
    assert len(graphs) > 1 if cache == "first-block" else not graphs


@pytest.mark.parametrize("cache", ["first-block", "mag"])
def test_a_cache_skips_what_its_threshold_allows(cache, run):
    plain, all_computed = run("--cache", "none")
    assert "cache" not in plain
    printed, frames = run("--cache", cache, "--cache-threshold", "0")
    assert f"0 of {ALL} attention calls were left to the cache" in printed
    assert same(frames, all_computed)
    printed, frames = run("--cache", cache, "--cache-threshold", "0.5")
    skipped, calls = map(int, re.search(r"(\d+) of (\d+) attention calls were left to the cache", printed).groups())
    assert 0 < skipped < calls == ALL and f"{ALL - skipped} sparse" in printed
    assert not same(frames, all_computed)


def test_the_ratios_of_magcache_are_kept(run, tmp_path, capsys):
    file = tmp_path / "ratios.json"
    printed, first = run("--cache", "mag", "--mag-ratios", str(file))
    assert "measuring the ratios of MagCache: 8 steps" in printed
    ratios = json.loads(file.read_text())
    assert [len(each) for each in ratios] == [3, 5]  # steps above 0.875 of the noise, and below
    assert all(each[0] == 1.0 and all(0.5 < ratio < 2.0 for ratio in each) for each in ratios)
    printed, second = run("--cache", "mag", "--mag-ratios", str(file))
    assert "measuring" not in printed and same(first, second)
    assert "measuring" not in run("--cache", "mag", "--mag-ratios", str(file), "--steps", "6")[0]  # interpolated
    file.write_text("[[1.0, 1.0]]")
    with pytest.raises(SystemExit, match=r"ratios.json is of 1 transformers, and 2 have steps"):
        run("--cache", "mag", "--mag-ratios", str(file))


def test_the_options_of_sparse_attention_arrive(run, script, monkeypatch):
    asked = []
    enable = script.rainfusion.enable
    monkeypatch.setattr(script.rainfusion, "enable", lambda pipe, **options: asked.append(options) or enable(pipe))
    run("--quality", "fast", "--precision", "fp8", "--start-step", "0.25", "--skip-layers", "0", "--steps", "2")
    assert asked == [dict(quality="fast", precision="fp8", start_step=0.25, skip_layers="0", min_tokens=0)]


def rows(printed):
    """The cells of the table of --each, without its head; units are taken off."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["stage", "seconds", "speed-up", "PSNR"] and len({len(line) for line in lines}) == 1
    return [
        [name, seconds, ratio.removesuffix("x"), psnr.removesuffix(" dB")] for name, seconds, ratio, psnr in cells[2:]
    ]


def test_each_stage_has_a_row(run, graphs, torchao):
    printed, _ = run("--each", "--linear", "int8", "--compile", "--cache-threshold", "0.5")
    found = rows(printed)
    names = ["baseline", "+ int8 linear layers", "+ compiled blocks", "+ first-block cache", "+ sparse attention"]
    assert [row[0] for row in found] == names
    assert re.findall(r"^sampling: (.*)$", printed, re.MULTILINE) == [name.removeprefix("+ ") for name in names]
    assert found[0][2:] == ["1.00", ""] and len(graphs) == 2  # dense and sparse
    for _, seconds, ratio, psnr in found[1:]:
        assert float(ratio) == pytest.approx(float(found[0][1]) / float(seconds), rel=0.2)
        assert float(psnr) > 20
    assert f"of {ALL} attention calls were left to the cache" in printed


def test_each_compares_with_the_baseline(run, script):
    printed, frames = run("--each", "--cache-threshold", "0.5")
    _, baseline = run("--cache", "none", "--no-sparse")
    assert rows(printed)[-1][3] == f"{script.common.psnr(baseline, frames):.1f}"
    assert rows(run("--each", "--cache", "none", "--no-sparse")[0])[0][0] == "baseline"
    # what changes nothing is infinitely near
    assert rows(run("--each", "--cache-threshold", "0", "--no-sparse")[0])[1][3] == "inf"


def test_the_warm_up_reaches_both_transformers_and_sparse_attention(script):
    pipe = script.random_weights.wan_t2v_two_experts()

    def warm_up(*options):
        return script.warm_up_steps(pipe, script.parse([*SIZE, *options]))

    assert warm_up() == 2
    assert warm_up("--steps", "1") == 1
    assert warm_up("--start-step", "2") == 4
    assert warm_up("--start-step", "0.5") == 2
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=12.0)
    steps = warm_up("--steps", "20")
    assert 2 < steps < 20
    assert [len(script.steps_of_transformers(pipe, n)) for n in (steps - 1, steps)] == [1, 2]


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("cache", ["first-block", "mag"])
def test_a_checkpoint_from_a_folder(experts, cache, run, graphs, tmp_path):
    needs_diffusers("transformers", "tokenizers")
    offline_pipelines.wan(experts=experts, layers=3).save_pretrained(tmp_path)
    options = ["--height", "32", "--width", "48", "--steps", "6", "--linear", "native", "--cache", cache]
    printed, _ = run(*options, "--model", str(tmp_path), "--min-tokens", "0", "--cache-threshold", "0.5")
    assert f"compiled blocks, {cache} cache, sparse attention\n" in printed
    skipped, calls = map(int, re.search(r"(\d+) of (\d+) attention calls were left to the cache", printed).groups())
    assert 0 < skipped < calls == 6 * 3 * FORWARDS
    assert f"{calls - skipped} sparse and 0 dense" in printed
    assert len(graphs) == (2 if cache == "mag" else 1)


def test_the_defaults_are_for_the_device_and_the_model(script, monkeypatch):
    tiny, real = script.parse([*SIZE]), script.parse([*SIZE, "--model", "wan"])
    assert (tiny.linear, tiny.compile, tiny.cache, tiny.cache_threshold) == ("native", False, "first-block", 0.05)
    assert (real.linear, real.compile, real.steps, real.min_tokens) == ("native", True, 40, None)
    assert script.parse(["--device", "cpu", "--cache", "mag"]).cache_threshold == 0.06
    monkeypatch.setattr(script, "has_fp8", lambda device: True)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    assert script.parse(["--device", "cuda", "--model", "wan"]).linear == "fp8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--linear", "int8"], "--linear int8 needs `pip install torchao`; --linear native needs nothing"),
        (["--linear", "fp4"], "invalid choice: 'fp4'"),
        (["--cache", "none", "--cache-threshold", "0.1"], "--cache-threshold needs a cache, got --cache none"),
        (["--mag-ratios", "ratios.json"], "--mag-ratios needs --cache mag, got first-block"),
        (["--no-sparse", "--quality", "fast"], "--quality and --precision are of sparse attention"),
        (["--out", "out.png"], "--out must end in .gif or .mp4, got out.png"),
    ],
)
def test_mistakes_are_told_before_the_work(options, message, script, monkeypatch, capsys):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)  # nothing is installed
    with pytest.raises(SystemExit, match="2"):
        script.main([*SIZE, *options])
    assert message in capsys.readouterr().err


def test_fp8_is_refused_where_it_would_not_run(script, monkeypatch, capsys):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(SystemExit, match="2"):
        script.main([*SIZE, "--linear", "fp8"])
    assert "--linear fp8 needs a GPU of compute capability 8.9 or later, got cpu" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# the page


def test_the_code_of_the_page_is_the_stack(script, torchao, graphs, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    pipe = script.random_weights.wan_t2v_two_experts()
    enable = script.rainfusion.enable
    monkeypatch.setattr(script.rainfusion, "enable", lambda pipe, **options: enable(pipe, min_tokens=0, **options))
    inputs = dict(prompt="a cat", height=64, width=128, num_frames=9, num_inference_steps=8, output_type="pil")
    names = dict(pipe=pipe, inputs=inputs)
    exec(compile(code, "the page", "exec"), names)
    stats = names["handle"].stats()
    assert stats.sparse_calls > 0 and not stats.dense_calls and len(graphs) == 1
    for model in (pipe.transformer, pipe.transformer_2):
        assert model.is_cache_enabled
        assert type(model.blocks[0].attn1.to_q.weight).__name__ == "Float8Tensor"


def test_the_commands_of_the_page_are_understood(script, monkeypatch):
    monkeypatch.setattr(script, "has_fp8", lambda device: True)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(script.common, "is_imageio_available", lambda: True)
    commands = re.findall(r"^python examples/fastest_wan\.py .*$", PAGE, re.MULTILINE)
    assert commands
    for command in commands:
        args = script.parse(shlex.split(command)[2:])
        assert args.model and args.each
