"""Whole transformers with random weights: what `rainfusion bench --model` builds, runs, prints and keeps."""

import csv
import inspect
import json
import math
import re
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from commands import refused, run
from torch import nn

import rainfusion
from rainfusion import cli
from rainfusion.bench import models, results
from rainfusion.bench.architectures import MODELS, Size
from rainfusion.bench.models import AttentionMeter, Job, ModelRow

diffusers = pytest.importorskip("diffusers")

CPU = torch.device("cpu")
SMALL = dict(num_attention_heads=2, attention_head_dim=16, ffn_dim=64, num_layers=3, text_dim=32)
TINY = replace(
    MODELS["wan2.1-1.3b"], name="tiny", config={**MODELS["wan2.1-1.3b"].config, **SMALL}, size=Size(128, 128, 9)
)
WORDS = ("bench", "--model", "tiny", "--device", "cpu", "--repeats", "1")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", TINY)
    monkeypatch.setattr(models, "LEAST_TOKENS", 100)  # 192 tokens are the picture here


class StandIn:
    """For `rainfusion.enabled`: adds a tenth to the output, and says what it is told to."""

    def __init__(self, monkeypatch, **stats):
        self.asked = []
        self.stats = {
            **dict(sparse_calls=6, dense_calls=0, reasons={}, density={"a": 0.2, "b": 0.4, "c": None}),
            **stats,
        }
        monkeypatch.setattr(rainfusion, "enabled", self.enabled, raising=False)

    @contextmanager
    def enabled(self, transformer, **asked):
        self.asked.append(asked)
        handle = transformer.proj_out.register_forward_hook(lambda module, args, out: 1.1 * out)
        yield SimpleNamespace(stats=lambda: SimpleNamespace(**self.stats))
        handle.remove()


def narrow(name):
    """A model with its own inputs and few, thin layers."""
    model = MODELS[name]
    config = {**model.config, "num_attention_heads": 1, **dict.fromkeys(model.stacks, 1)}
    if "ffn_dim" in config:
        config["ffn_dim"] = 64
    return replace(model, config=config)


# --- the models ------------------------------------------------------------------------------------------------------

REAL = [name for name in MODELS if name != "tiny"]


@pytest.mark.parametrize("name", REAL)
def test_models_have_as_many_parameters_as_they_are_known_for(name):
    model = MODELS[name]
    known = inspect.signature(getattr(diffusers, model.class_name).__init__).parameters
    assert set(model.config) <= set(known)
    with torch.device("meta"):
        transformer = getattr(diffusers, model.class_name)(**model.config)
    assert sum(p.numel() for p in transformer.parameters()) / 1e9 == pytest.approx(model.billions, abs=0.05)
    assert model.layers() == sum(len(blocks) for blocks in _stacks(transformer))


def _stacks(transformer):
    return [child for name, child in transformer.named_children() if isinstance(child, nn.ModuleList)]


def test_default_sizes_are_the_published_ones():
    tokens = {name: MODELS[name].tokens(MODELS[name].size) for name in REAL}
    assert tokens == {
        "wan2.2-a14b": 75600,
        "wan2.1-1.3b": 32760,
        "hunyuanvideo-1.5": 31 * 45 * 80 + 1000 + 256 + 729,
        "qwen-image": 4096 + 256,
        "flux": 4096 + 512,
    }
    assert {name: MODELS[name].forwards for name in REAL if MODELS[name].forwards == 1} == {"flux": 1}
    assert {MODELS[name].sparsity for name in ("qwen-image", "flux")} == {0.6}


@pytest.mark.parametrize("name", REAL)
def test_every_model_runs_and_its_tokens_are_counted_right(name):
    model = narrow(name)
    size = Size(64, 96, 5 if model.size.frames > 1 else 1)
    transformer, _ = models.build(model, None, CPU, torch.float32)
    inputs = model.inputs(model.config, size, CPU, torch.float32)
    with torch.inference_mode(), AttentionMeter(CPU, least_tokens=0) as meter:
        out = transformer(**inputs, return_dict=False)[0]
    assert out.isfinite().all() and out.std() > 0
    assert meter.lengths[-1] == max(meter.lengths) == model.tokens(size)


def test_only_layers_asked_for_are_built():
    assert MODELS["flux"].layers() == 57 and MODELS["flux"].layers(1) == 2 and MODELS["flux"].layers(20) == 39
    transformer, _ = models.build(TINY, 2, CPU, torch.float32)
    assert len(transformer.blocks) == 2


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "qwen-image"])
def test_weights_are_random_and_tables_are_real(name):
    model = narrow(name)
    before = nn.Module.register_parameter
    transformer, billions = models.build(model, None, CPU, torch.bfloat16)
    assert nn.Module.register_parameter is before
    usual = getattr(diffusers, model.class_name)(**model.config)
    assert billions == sum(p.numel() for p in usual.parameters()) / 1e9
    assert {k: v.shape for k, v in transformer.state_dict().items()} == {
        k: v.shape for k, v in usual.state_dict().items()
    }
    for (_, made), (_, expected) in zip(transformer.named_buffers(), usual.named_buffers(), strict=True):
        assert made.dtype == expected.dtype and torch.equal(made, expected)
    if name == "qwen-image":
        assert torch.equal(transformer.pos_embed.pos_freqs, usual.pos_embed.pos_freqs)
    else:  # what diffusers keeps in fp32 when it loads in bf16
        assert transformer.blocks[0].scale_shift_table.dtype == torch.float32
        assert transformer.blocks[0].norm2.weight.dtype == torch.float32
    matrices = [p for p in transformer.parameters() if p.ndim == 2 and p.numel() > 1000]
    assert all(0.8 < p.float().std() * math.sqrt(p.shape[1]) < 1.2 for p in matrices)
    assert {p.dtype for p in matrices} <= {torch.bfloat16, torch.float32}
    assert transformer.proj_out.weight.dtype == torch.bfloat16


def test_the_same_seed_gives_the_same_weights():
    first, again, other = (models.build(TINY, 1, CPU, torch.float32, seed)[0].proj_out.weight for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


# --- attention's share -----------------------------------------------------------------------------------------------


def test_the_meter_counts_long_self_attention_only():
    long, short, text = (torch.randn(1, 2, tokens, 8) for tokens in (300, 100, 77))
    with AttentionMeter(CPU, least_tokens=100) as meter:
        out = F.scaled_dot_product_attention(long, long, long)
        F.scaled_dot_product_attention(query=long, key=long, value=long)
        F.scaled_dot_product_attention(long, text, text)
        F.scaled_dot_product_attention(short, short, short)
    assert meter.lengths == [300, 300]
    assert 0 < meter.milliseconds() < meter.whole_milliseconds()
    assert torch.equal(out, F.scaled_dot_product_attention(long, long, long))


def test_attention_is_a_part_of_the_dense_forward(monkeypatch):
    StandIn(monkeypatch)
    outcome = models.measure(Job(TINY, Size(256, 256, 9), CPU, torch.float32))
    dense, _ = outcome.rows
    assert dense.dense_calls == 3  # layers
    assert 0 < dense.attention_share < 1


# --- the command -----------------------------------------------------------------------------------------------------


def test_dense_and_sparse_forwards_are_printed(capsys, monkeypatch):
    stand_in = StandIn(monkeypatch)
    status, out, err = run(capsys, *WORDS, "--precision", "native", "int8", "--sparsity", "0.7", "--steps", "10")
    assert status == 0
    *_, header, _, dense, native, int8 = out.splitlines()
    assert header.split()[:2] == ["model", "size"]
    assert re.search(r"tiny +128x128x9 +192 +dense +float32 .* 1\.00x +\d+% +0/3 +- +0\.0000$", dense)
    assert re.search(r"rf_v2 +float32 +0\.70 +0\.300 .*\dx +- +3/3 +- +0\.1000$", native)
    assert re.search(r"rf_v2 +int8 ", int8)
    assert "10 x = " in native
    assert "random weights" in out and "no measure of quality" in out and "two forwards" in out
    assert "LAYERS" not in out.upper()
    dense_line, native_line, int8_line = err.splitlines()
    assert "dense: " in dense_line and "rf_v2 at 0.7 in native: " in native_line and "in int8: " in int8_line
    asked = dict(sparse_type="rf_v2", sparsity=0.7, backend="auto", min_tokens=0, start_step=0)
    assert stand_in.asked == [{**asked, "precision": precision} for precision in ("native", "int8")]


def test_one_model_is_run_with_several_sparsities(capsys, monkeypatch):
    """Each once, in every precision, beside one dense row."""
    stand_in = StandIn(monkeypatch)
    words = ["--sparsity", "0.8,0.85,0.8", "--precision", "native", "fp8", "--json"]
    status, out, _ = run(capsys, *WORDS, *words)
    rows = [(row["attention"], row["sparsity"], row["precision"]) for row in json.loads(out)]
    ways = [("rf_v2", 0.8, "native"), ("rf_v2", 0.8, "fp8"), ("rf_v2", 0.85, "native"), ("rf_v2", 0.85, "fp8")]
    assert status == 0 and rows == [("dense", 0.0, "native"), *ways]
    assert [(asked["sparsity"], asked["precision"]) for asked in stand_in.asked] == [way[1:] for way in ways]


def test_fewer_layers_are_said_loudly(capsys, monkeypatch):
    StandIn(monkeypatch, sparse_calls=2)
    _, out, err = run(capsys, *WORDS, "--layers", "1")
    warning = "NOT THE WHOLE MODEL: 1 of the 3 layers of tiny"
    assert warning in out and warning in err
    assert "tiny (1 of 3 layers)" in out.splitlines()[-1]


def test_rows_say_what_a_step_takes(capsys, monkeypatch):
    StandIn(monkeypatch)
    _, out, _ = run(capsys, *WORDS, "--json")
    dense, sparse = (ModelRow(**record) for record in json.loads(out))
    assert (dense.attention, dense.precision, dense.sparsity, dense.speedup) == ("dense", "native", 0.0, 1.0)
    assert sparse.sparsity == TINY.sparsity
    assert sparse.speedup == pytest.approx(dense.seconds / sparse.seconds)
    assert sparse.step_seconds == pytest.approx(2 * sparse.seconds)
    assert sparse.density == pytest.approx(0.3)
    assert sparse.error_to_dense == pytest.approx(0.1, rel=1e-3)
    assert (sparse.diffusers, sparse.layers, sparse.tokens) == (diffusers.__version__, 3, 192)


def test_measuring_again_replaces_the_row_of_a_model(capsys, monkeypatch, tmp_path):
    StandIn(monkeypatch)
    path = tmp_path / "results" / "end_to_end.csv"
    for precision in (["native"], ["native", "int8"]):
        run(capsys, *WORDS, "--precision", *precision, "--csv", str(path))
    run(capsys, *WORDS, "--height", "256", "--csv", str(path))
    run(capsys, *WORDS, "--layers", "2", "--csv", str(path))
    rows = results.read(path, ModelRow)
    found = [(row.attention, row.precision, row.height, row.layers) for row in rows]
    assert found == [
        ("dense", "native", 128, 3),
        ("rf_v2", "native", 128, 3),
        ("rf_v2", "int8", 128, 3),
        ("dense", "native", 256, 3),
        ("rf_v2", "native", 256, 3),
        ("dense", "native", 128, 2),
        ("rf_v2", "native", 128, 2),
    ]
    status, out, _ = run(capsys, "bench", "--model", "tiny", "--from-csv", str(path))
    assert status == 0 and out.count("\ntiny") == 7
    assert "rows of flux" in refused(capsys, "bench", "--model", "flux", "--from-csv", str(path))
    assert "missing: shape" in refused(capsys, "bench", "--from-csv", str(path))


def test_every_part_of_the_key_makes_a_row_of_its_own(tmp_path, monkeypatch):
    StandIn(monkeypatch)
    row = results.rounded(models.measure(Job(TINY, TINY.size, CPU, torch.float32)).rows[1])
    changes = [
        {name: {str: "another", int: 99, float: 0.5, bool: True}[type(getattr(row, name))]} for name in models.KEY
    ]
    others = [replace(row, **change) for change in changes]
    path = tmp_path / "r.csv"
    results.update(path, [row, *others])
    results.update(path, [replace(row, seconds=7.0)])
    again, *rest = results.read(path, ModelRow)
    assert again.seconds == 7.0 and rest == others


def test_a_file_of_another_kind_is_refused_before_the_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "build", lambda *args: pytest.fail("built"))
    path = tmp_path / "attention.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerow(results.columns(results.Row))
    assert "missing: model, height" in refused(capsys, *WORDS, "--csv", str(path))


def test_what_does_not_go_together_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(models, "build", lambda *args: pytest.fail("built"))
    assert "--model must be one of wan2.2-a14b, " in refused(capsys, "bench", "--model", "sora")
    for words in (["--heads", "2"], ["--sweep", "tokens"], ["--flex"], ["--latent-shape", "1", "2", "3"]):
        assert f"{words[0]} is for attention alone, not for --model" in refused(capsys, *WORDS, *words)
    assert "SHAPE is for attention alone" in refused(capsys, "bench", "wan-480p", "--model", "tiny")
    for words in (["--height", "64"], ["--layers", "1"], ["--compile"], ["--steps", "4"]):
        assert f"{words[0]} needs --model" in refused(capsys, "bench", *words)
    assert "--height must be a multiple of 16, got 725" in refused(capsys, *WORDS, "--height", "725")
    assert "--frames must be 1 more than a multiple of 4, got 80" in refused(capsys, *WORDS, "--frames", "80")
    assert "--frames must be 1 for flux" in refused(capsys, "bench", "--model", "flux", "--frames", "5")
    assert "--layers must be in [1, 3] for tiny, got 4" in refused(capsys, *WORDS, "--layers", "4")
    assert "--sparsity must be in [0, 1], got 3.0" in refused(capsys, *WORDS, "--sparsity", "3")
    assert "--sparsity must be in [0, 1], got 2.0" in refused(capsys, *WORDS, "--sparsity", "0.8,2")
    assert "several with commas, got '0.8;0.9'" in refused(capsys, *WORDS, "--sparsity", "0.8;0.9")
    assert "--steps must be at least 1" in refused(capsys, *WORDS, "--steps", "0")


def test_diffusers_is_named_if_it_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "diffusers" else object())
    assert "needs diffusers: pip install diffusers" in refused(capsys, *WORDS)


def test_a_way_that_breaks_leaves_the_others_and_fails_the_run(capsys, monkeypatch):
    stand_in = StandIn(monkeypatch)

    def enabled(transformer, **asked):
        if asked["precision"] == "fp8":
            raise ValueError("fp8 needs compute capability 9.0")
        if asked["precision"] == "int8":
            raise RuntimeError("an illegal instruction")
        return stand_in.enabled(transformer, **asked)

    monkeypatch.setattr(rainfusion, "enabled", enabled)
    status, out, _ = run(capsys, *WORDS, "--precision", "fp8", "native")
    assert status == 0 and "left out: rf_v2 in fp8: fp8 needs compute capability 9.0" in out
    status, out, _ = run(capsys, *WORDS, "--precision", "int8", "native")
    assert status == 1 and "BROKEN: rf_v2 in int8: RuntimeError: an illegal instruction" in out
    assert len(re.findall("^tiny  .* rf_v2 ", out, re.MULTILINE)) == 1
    status, out, _ = run(capsys, *WORDS, "--precision", "fp8")
    assert status == 1


def test_attention_that_was_never_sparse_is_no_row(capsys, monkeypatch):
    StandIn(monkeypatch, sparse_calls=0, dense_calls=6, reasons={"too short": 6})
    status, out, _ = run(capsys, *WORDS)
    assert status == 1
    assert "left out: rf_v2 in native: no attention ran sparse: too short (6)" in out
    assert len(re.findall("^tiny  .* rf_v2 ", out, re.MULTILINE)) == 0


def test_calls_that_were_dense_are_told(capsys, monkeypatch):
    StandIn(monkeypatch, sparse_calls=4, dense_calls=2, reasons={"a mask": 2})
    _, out, _ = run(capsys, *WORDS)
    assert "dense calls among those of rf_v2 in native: a mask (2)" in out
    assert " 2/3 " in out.splitlines()[-1]


def test_no_speed_up_is_printed_for_an_output_that_is_not_finite(capsys, monkeypatch):
    stand_in = StandIn(monkeypatch)

    @contextmanager
    def enabled(transformer, **asked):
        with stand_in.enabled(transformer, **asked) as handle:
            hook = transformer.proj_out.register_forward_hook(lambda module, args, out: out / 0)
            yield handle
            hook.remove()

    monkeypatch.setattr(rainfusion, "enabled", enabled)
    status, out, _ = run(capsys, *WORDS)
    assert status == 1
    assert "WRONG" in out.splitlines()[-1] and "x " not in out.splitlines()[-1].split("=")[1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_a_dense_forward_that_breaks_leaves_the_sparse_one(capsys, monkeypatch, error):
    StandIn(monkeypatch)

    def out_of_memory(self):
        raise error("tried to allocate 900 GiB")

    monkeypatch.setattr(models._Measurement, "meter", out_of_memory)
    status, out, _ = run(capsys, *WORDS)
    assert status == 1 and f"BROKEN: dense: {error.__name__}: tried to allocate 900 GiB" in out
    row = out.splitlines()[-1]
    assert " rf_v2 " in row and not re.search(r"\dx ", row.split("=")[1])


def test_blocks_are_compiled_for_both_if_asked(capsys, monkeypatch):
    StandIn(monkeypatch)
    compiled = []
    monkeypatch.setattr(
        diffusers.WanTransformer3DModel, "compile_repeated_blocks", lambda self, **how: compiled.append(how)
    )
    _, out, _ = run(capsys, *WORDS)
    assert compiled == [] and "not compiled" in out
    _, out, _ = run(capsys, *WORDS, "--compile")
    assert compiled == [dict(fullgraph=True)] and "compiled blocks" in out and "not compiled" not in out


@pytest.mark.skipif(not hasattr(rainfusion, "enabled"), reason="this rainfusion has no enabled()")
@pytest.mark.parametrize("name", ["tiny", *REAL])
def test_the_real_thing_runs_sparse(name):
    model = TINY if name == "tiny" else narrow(name)
    size = Size(256, 384, 9 if model.size.frames > 1 else 1)
    outcome = models.measure(Job(model, size, CPU, torch.float32, repeats=1))
    assert not outcome.broken and not outcome.left_out
    _, sparse = outcome.rows
    assert sparse.sparse_calls == model.layers() and sparse.dense_calls == 0
    assert sparse.density < 1 and 0 < sparse.error_to_dense < 0.5 and sparse.right
