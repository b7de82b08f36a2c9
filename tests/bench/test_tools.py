"""The command line and what it prints, draws and measures."""

import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import rainfusion
from rainfusion import BlockMask, TokenLayout, cli
from rainfusion.bench import attention as bench
from rainfusion.bench import baselines, contest, inputs, pictures, results, synthetic, timing
from rainfusion.bench.results import Row
from rainfusion.bench.shapes import SHAPES, SWEEP_SPARSITIES, Shape, token_sweep
from rainfusion.bench.verification import verify
from rainfusion.lab import demo

PNG = b"\x89PNG"
TINY = Shape("tiny", 2, 16, (3, 8, 16), 20, 0.5, "for tests", small=True)


def run(capsys, *words):
    status = cli.main(list(words))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def refused(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "inspect", "demo"])
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"  rainfusion {command}" in capsys.readouterr().out


def test_bench_prints_a_table(capsys):
    words = ("bench", "qwen-image-512", "--repeats", "1", "--heads", "1", "--sparse-type", "rf_v2,ada_bsa")
    status, out, err = run(capsys, *words, "--device", "cpu")
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith("qwen-image-512")]
    assert len(rows) == 2
    assert all(re.search(r"\d\.\d\dx ", row) for row in rows)
    assert "bench" in err  # progress


def test_bench_prints_json(capsys):
    words = (
        "bench",
        "qwen-image-512",
        "--repeats",
        "1",
        "--heads",
        "1",
        "--json",
        "--dtype",
        "bf16",
        "--device",
        "cpu",
    )
    _, out, _ = run(capsys, *words)
    (record,) = json.loads(out)
    assert record["shape"] == "qwen-image-512"
    assert record["right"] is True
    assert 0.4 <= record["density"] <= 1
    assert record["error_to_float64"] <= record["allowed_error"]
    assert record["peak_mb"] > 0


def test_no_speed_up_is_printed_for_a_wrong_result(capsys, monkeypatch):
    right = rainfusion.sparse_attention

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result

    monkeypatch.setattr(rainfusion, "sparse_attention", wrong)
    status, out, _ = run(capsys, "bench", "qwen-image-512", "--repeats", "1", "--heads", "1", "--device", "cpu")
    assert status == 1
    assert "WRONG" in out
    assert "x " not in out.splitlines()[-2]


@pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_measure_is_right_for_grids_with_text(sparse_type, dtype):
    result = bench.measure(TINY, sparse_type=sparse_type, dtype=dtype, repeats=1)
    assert result.right
    assert result.tokens == 3 * 8 * 16 + 20


def test_verification_finds_one_wrong_row():
    q, k, v = torch.randn(3, 1, 1, 128, 16).unbind()
    out, mask = rainfusion.sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.5, return_mask=True)
    layout = TokenLayout.build(128)
    assert verify(q, k, v, out, mask, layout).right
    out[0, 0, 5] += 0.01
    assert not verify(q, k, v, out, mask, layout).right
    assert not verify(q, k, v, out * torch.nan, mask, layout).right


def test_the_named_shapes_are_the_real_ones():
    assert SHAPES["wan-720p"].seq_len == 75600
    assert SHAPES["wan-480p"].seq_len == 32760
    assert SHAPES["tokens-8k"].seq_len == 8192
    assert bench.default_shapes(torch.device("cpu")) == [s for s in SHAPES.values() if s.small]


def test_bench_takes_a_shape_of_ones_own(capsys):
    words = ("bench", "--latent-shape", "3", "8", "16", "--txt-len", "20", "--head-dim", "16", "--repeats", "1")
    _, out, _ = run(capsys, *words, "--json", "--device", "cpu")
    (record,) = json.loads(out)
    assert (record["shape"], record["tokens"], record["heads"], record["sparsity"]) == ("3x8x16", 404, 4, 0.8)


def test_bench_refuses_what_it_does_not_know(capsys):
    assert "wan-720p" in refused(capsys, "bench", "sora")
    assert "--repeats must be at least 1, got 0" in refused(capsys, "bench", "--repeats", "0")
    assert "sparsity must be in [0, 1], got 3.0" in refused(capsys, "bench", "qwen-image-512", "--sparsity", "3")
    assert "--device" in refused(capsys, "bench", "--device", "abacus")
    assert "--sparse-type" in refused(capsys, "bench", "--sparse-type", "rf_v2,rf_v9")
    assert "--head-dim" in refused(capsys, "bench", "--head-dim", "0")


def test_bench_takes_batches_of_different_clips(capsys):
    words = ("bench", "--latent-shape", "3", "8", "16", "--head-dim", "16", "--heads", "1", "--batch", "2")
    _, out, _ = run(capsys, *words, "--repeats", "1", "--json", "--device", "cpu")
    (record,) = json.loads(out)
    assert (record["batch"], record["right"]) == (2, True)
    q, _, _ = inputs.attention_inputs(TINY, batch=2, heads=1, dtype=torch.float32, device=torch.device("cpu"))
    assert q.shape == (2, 1, 404, 16)
    assert not torch.equal(q[0], q[1])
    assert SHAPES["image-4096"].batch == 2 and SHAPES["image-4096"].seq_len == 4096


# --- results ---------------------------------------------------------------------------------------------------------

A_ROW = Row(
    gpu="NVIDIA H200", shape="wan-480p", batch=1, heads=12, tokens=32760, head_dim=128, dtype="bfloat16",
    precision="native", sparse_type="rf_v2", sparsity=0.8, contender="hopper call", rainfusion="0.2.0", torch="2.11.0",
    triton="3.6.0", density=0.28, ms=4.0, low_ms=3.9, high_ms=4.1, rounds=50, tflops=470.0, matmul_tflops=776.0,
    speedup=2.5, speedup_cudnn=2.6, around_percent=5.0, peak_mb=200.0, error_to_dense=0.02, error_to_float64=0.002,
    allowed_error=0.004, right=True, measured="2026-01-02T03:04:05Z",
)  # fmt: skip


def made_up_rows():
    """Two sweeps and a few shapes, as an H200 might give them."""
    rows = []
    for precision, factor in (("native", 0.8), ("int8", 1.15)):
        for sparsity in SWEEP_SPARSITIES:
            density = 1 - 0.95 * sparsity
            change = dict(sparsity=sparsity, density=density, precision=precision, speedup=factor / density)
            rows.append(replace(A_ROW, **change))
        for shape in token_sweep():
            reached = factor * 4.6 * shape.seq_len / (shape.seq_len + 9000)
            for contender, share in (("hopper call", 0.9), ("hopper graph", 1.0), ("hopper kernel", 1.1)):
                change = dict(shape=shape.name, tokens=shape.seq_len, density=0.2, contender=contender)
                rows.append(replace(A_ROW, **change, precision=precision, speedup=reached * share))
        for name in ("wan-720p", "flux-1024", "image-4096"):
            change = dict(shape=name, precision=precision, speedup=factor * SHAPES[name].seq_len ** 0.1)
            rows.append(replace(A_ROW, **change, sparsity=SHAPES[name].sparsity))
    return rows


def test_measuring_again_replaces_the_row_and_leaves_the_others(tmp_path):
    path = tmp_path / "new" / "attention.csv"
    others = [
        replace(A_ROW, **change)
        for change in (
            dict(gpu="NVIDIA A100"), dict(shape="wan-720p"), dict(batch=2), dict(heads=40), dict(tokens=75600),
            dict(head_dim=64), dict(dtype="float16"), dict(precision="fp8"), dict(sparse_type="ada_bsa"),
            dict(sparsity=0.9), dict(contender="hopper kernel"), dict(rainfusion="0.3.0"), dict(torch="2.13.0"),
            dict(triton="3.7.0"),
        )
    ]  # fmt: skip
    results.update(path, [A_ROW, *others])
    assert results.read(path) == [A_ROW, *others]
    again = replace(A_ROW, ms=3.0, speedup=None, error_to_float64=float("nan"), right=False)
    results.update(path, [again])
    first, *rest = results.read(path)
    assert (first.ms, first.speedup, first.right) == (3.0, None, False)
    assert rest == others
    assert [p.name for p in path.parent.iterdir()] == ["attention.csv"]


def test_a_row_is_found_again_whatever_its_digits_are(tmp_path):
    row = replace(A_ROW, sparsity=1 / 3, ms=1 / 7)
    for _ in range(2):
        results.update(tmp_path / "r.csv", [row])
    assert len(results.read(tmp_path / "r.csv")) == 1


def test_a_file_of_another_kind_is_refused_before_the_work(capsys, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert "missing: gpu, shape" in refused(capsys, "bench", "qwen-image-512", "--csv", str(path))
    results.update(tmp_path / "r.csv", [A_ROW])
    text = (tmp_path / "r.csv").read_text().replace(",12,32760,", ",twelve,32760,")
    (tmp_path / "r.csv").write_text(text)
    assert "line 2" in refused(capsys, "bench", "--from-csv", str(tmp_path / "r.csv"))
    (tmp_path / "r.csv").write_text(text + "1,2,3\n")
    assert "bench" in refused(capsys, "bench", "--from-csv", str(tmp_path / "r.csv"))
    assert "no.csv" in refused(capsys, "bench", "--from-csv", str(tmp_path / "no.csv"))


def test_the_table_says_what_was_wrong():
    wrong = replace(A_ROW, speedup=None, speedup_cudnn=None, right=False, contender="hopper kernel")
    dense = replace(A_ROW, contender="cuDNN", sparse_type="dense", speedup=1.0, speedup_cudnn=1.0, around_percent=None)
    header, _, *lines = results.format_rows([dense, A_ROW, wrong, replace(A_ROW, precision="int8")]).splitlines()
    assert header.split()[:3] == ["shape", "contender", "precision"]
    assert "WRONG" in lines[2] and "x" not in lines[2].split("bfloat16")[1]
    assert "2.50x" in lines[1] and "2.60x" in lines[1] and "+5.0%" in lines[1] and "61%" in lines[1]
    assert " int8 " in lines[3] and "bfloat16" not in lines[3]


# --- timing ----------------------------------------------------------------------------------------------------------


class FakeClock:
    """Calls are numbers of milliseconds; it remembers which were made."""

    def __init__(self):
        self.made = []

    def milliseconds(self, calls):
        self.made.append(list(calls))
        return float(sum(calls))


def test_contenders_take_turns_within_their_time():
    clock = FakeClock()
    fast, slow = timing.take_turns([[10.0], [400.0]], clock, repeats=20, seconds=1.0)
    assert (fast.ms, fast.rounds) == (10.0, 20)
    assert (slow.ms, slow.rounds) == (400.0, 3)  # 1.2 s
    firsts = [calls[0] for calls in clock.made]
    turns = [sorted(firsts[-23:][i : i + 2]) for i in (0, 2, 4)]
    assert turns == [[10.0, 400.0]] * 3 and firsts[-17:] == [10.0] * 17
    (one,) = timing.take_turns([[5000.0]], FakeClock(), repeats=1, seconds=0.1)
    assert one.rounds == 1


def test_rounds_differ_in_their_order():
    clock = FakeClock()
    timing.take_turns([[float(ms)] for ms in (10, 20, 30, 40)], clock, repeats=10, seconds=1.0)
    firsts = [calls[0] for calls in clock.made][-40:]
    rounds = {tuple(firsts[i : i + 4]) for i in range(0, 40, 4)}
    assert all(sorted(turn) == [10.0, 20.0, 30.0, 40.0] for turn in rounds) and len(rounds) > 5


def test_short_calls_are_timed_in_bursts_over_all_inputs():
    clock = FakeClock()
    (timed,) = timing.take_turns([[0.1, 0.3]], clock, repeats=4, seconds=1.0)
    assert all(len(calls) >= 2.0 / 0.3 for calls in clock.made[1:])
    assert all({0.1, 0.3} == set(calls) for calls in clock.made[1:])
    assert 0.15 < timed.ms < 0.25
    assert timed.low_ms <= timed.ms <= timed.high_ms


def test_inputs_rotate_only_if_the_cache_would_hold_them():
    qkv = [torch.empty(1, 1, 1024, 128, dtype=torch.bfloat16)] * 3  # 0.75 MB
    assert timing.copies_needed(qkv, 0) == 1
    assert timing.copies_needed(qkv, 3 * 2**20 // 8) == 1
    assert timing.copies_needed(qkv, 2**20) == 4
    assert timing.copies_needed(qkv, 2**30) == 16


# --- contenders ------------------------------------------------------------------------------------------------------


def test_work_is_counted_on_the_kept_blocks():
    q = torch.empty(2, 3, 300, 64)
    assert contest.dense_tflop(q, torch.empty(2, 3, 500, 64)) == pytest.approx(4 * 2 * 3 * 300 * 500 * 64 / 1e12)
    mask = BlockMask.from_dense(torch.tensor([[[[1, 0, 1], [0, 1, 0]]]], dtype=torch.bool))
    assert contest.kept_tflop(mask, 64) == pytest.approx(4 * 64 * 128 * 128 * 3 / 1e12)


def test_baselines_say_why_they_do_not_run_on_a_cpu():
    q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16)
    everyone = (*baselines.DENSE, *baselines.SPARSE, *baselines.FLEX)
    reasons = {baseline.name: baseline.why_not(q) for baseline in everyone}
    assert reasons.pop("torch") is None
    assert set(reasons) == {
        "cuDNN", "FlashAttention", "FlashAttention-3", "SageAttention", "SpargeAttn", "FlexAttention"
    }  # fmt: skip
    assert set(reasons.values()) == {"needs a CUDA device, got cpu tensors"}


def test_a_library_that_cannot_be_imported_is_a_reason_and_no_exception(tmp_path, monkeypatch):
    (tmp_path / "half_built.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    (tmp_path / "renamed.py").write_text("attention = print")
    monkeypatch.syspath_prepend(tmp_path)
    assert baselines._not_importable("not_there_at_all", "f") == "not_there_at_all is not installed"
    assert "OSError: undefined symbol" in baselines._not_importable("half_built", "f")
    assert baselines._not_importable("renamed", "attend") == "renamed has no attend"
    assert baselines._not_importable("renamed", "attention") is None


def test_flex_attention_gets_our_blocks():
    dense = torch.rand(1, 2, 3, 4) < 0.5
    theirs = baselines.flex_block_mask(BlockMask.from_dense(dense), 300, 500)
    assert torch.equal(theirs.to_dense().bool(), dense)
    assert theirs.seq_lengths == (300, 500)
    assert theirs.full_kv_num_blocks.sum() == dense.sum() and theirs.kv_num_blocks.sum() == 0


@pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
def test_a_contest_on_a_cpu(sparse_type):
    outcome = contest.measure(
        TINY, sparse_type=sparse_type, dtype=torch.float32, device="cpu", batch=2, repeats=2, seconds=0.05
    )
    dense, ours = outcome.rows
    assert (dense.contender, dense.sparse_type, dense.speedup, dense.density) == ("torch", "dense", 1.0, 1.0)
    assert (ours.contender, ours.sparse_type, ours.sparsity) == ("portable call", sparse_type, 0.5)
    assert ours.speedup == pytest.approx(dense.ms / ours.ms) and ours.speedup_cudnn is None
    assert ours.right and ours.error_to_float64 <= ours.allowed_error
    assert (ours.batch, ours.heads, ours.tokens, ours.head_dim) == (2, 2, 404, 16)
    blocks = ours.density * 2 * 2 * 4 * 4
    assert ours.tflops * ours.ms / 1000 == pytest.approx(4 * 16 * 128**2 * blocks / 1e12)
    assert "cuDNN" in outcome.left_out and "portable kernel" in outcome.left_out
    assert not outcome.broken


def test_the_kernel_alone_is_timed_beside_the_whole_call():
    """Under Triton's interpreter, which must be on before Triton is imported."""
    script = (
        "import json, torch\n"
        "from dataclasses import asdict\n"
        "from rainfusion.bench import contest\n"
        "from rainfusion.bench.shapes import Shape\n"
        "shape = Shape('tiny', 1, 16, (3, 8, 16), 0, 0.5, '')\n"
        "options = dict(dtype=torch.float32, device='cpu', backend='triton', repeats=1, seconds=0.1)\n"
        "outcome = contest.measure(shape, **options)\n"
        "print(json.dumps([outcome.broken, *(asdict(row) for row in outcome.rows)]))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    broken, *rows = json.loads(done.stdout)
    assert broken == {}
    kernel, call = (row for row in rows if row["contender"].startswith("triton "))
    assert (kernel["contender"], call["contender"]) == ("triton kernel", "triton call")
    assert kernel["right"] and call["right"]
    assert call["around_percent"] == pytest.approx(100 * (call["ms"] / kernel["ms"] - 1))


def test_a_wrong_or_broken_contender_fails_the_run(capsys, monkeypatch, tmp_path):
    right = rainfusion.sparse_attention

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return result if isinstance(result, tuple) else result * 1.01

    def broken(*args, **kwargs):
        raise RuntimeError("an illegal instruction")

    words = ("bench", "qwen-image-512", "--repeats", "1", "--heads", "1", "--device", "cpu")
    monkeypatch.setattr(rainfusion, "sparse_attention", wrong)
    status, out, _ = run(capsys, *words, "--csv", str(tmp_path / "r.csv"))
    assert status == 1
    assert "WRONG" in out.splitlines()[-1]
    assert [row.speedup for row in results.read(tmp_path / "r.csv")] == [1.0, None]
    monkeypatch.setattr(rainfusion, "sparse_attention", broken)
    status, out, _ = run(capsys, *words, "--csv", str(tmp_path / "r.csv"))
    assert status == 1
    assert "BROKEN: portable call in native: RuntimeError: an illegal instruction" in out


def test_precisions_that_are_not_there_are_left_out(capsys, tmp_path):
    words = ("bench", "qwen-image-512", "--repeats", "1", "--heads", "1", "--device", "cpu")
    csv = ("--csv", str(tmp_path / "r.csv"))
    status, out, _ = run(capsys, *words, *csv, "--precision", "native", "fp8")
    assert status == 0
    assert "left out: ours in fp8: " in out
    assert "precision='fp8'" in refused(capsys, *words, *csv, "--precision", "fp8")
    assert "precision='fp8'" in refused(capsys, *words, "--precision", "fp8")


def test_quantised_results_may_lose_more():
    q, k, v = torch.randn(3, 1, 1, 128, 16).unbind()
    out, mask = rainfusion.sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.5, return_mask=True)
    layout = TokenLayout.build(128)
    assert not verify(q, k, v, out * 1.05, mask, layout).right
    verdict = verify(q, k, v, out * 1.05, mask, layout, allowed=0.06)
    assert verdict.right and verdict.error == pytest.approx(0.05, rel=1e-3)
    assert not verify(q, k, v, out * 1.07, mask, layout, allowed=0.06).right


# --- sweeps and plots ------------------------------------------------------------------------------------------------


def test_a_sweep_leaves_rows_and_a_picture_that_can_be_drawn_again(capsys, tmp_path, monkeypatch):
    points = SWEEP_SPARSITIES[::3]  # the others would take long
    monkeypatch.setattr(cli.bench, "SWEEP_SPARSITIES", points)
    csv, plot, again = tmp_path / "r.csv", tmp_path / "pictures" / "a.png", tmp_path / "b.png"
    words = (
        "--latent-shape",
        "3",
        "8",
        "16",
        "--head-dim",
        "16",
        "--heads",
        "1",
        "--repeats",
        "1",
        "--seconds",
        "0.01",
    )
    status, out, _ = run(capsys, "bench", "--sweep", "sparsity", *words, "--device", "cpu", "--csv", str(csv),
                         "--plot", str(plot))  # fmt: skip
    assert status == 0
    assert f"wrote {plot}" in out
    calls = [row for row in results.read(csv) if row.contender == "portable call"]
    assert [row.sparsity for row in calls] == list(points)
    assert plot.read_bytes().startswith(PNG)
    status, out, _ = run(capsys, "bench", "--from-csv", str(csv), "--plot", str(again), "--sweep", "sparsity")
    assert (status, out) == (0, f"wrote {again}\n")
    assert again.read_bytes().startswith(PNG)
    status, out, _ = run(capsys, "bench", "--from-csv", str(csv))
    assert out.count("portable call") == len(points)
    status, out, _ = run(capsys, "bench", "--from-csv", str(csv), "--json")
    assert [Row(**record) for record in json.loads(out)] == results.read(csv)
    assert "nothing to draw against tokens" in refused(
        capsys, "bench", "--from-csv", str(csv), "--plot", str(again), "--sweep", "tokens"
    )


def test_sweeps_refuse_what_they_choose_themselves(capsys):
    assert "--sweep tokens" in refused(capsys, "bench", "wan-480p", "--sweep", "tokens")
    assert "--sweep sparsity" in refused(capsys, "bench", "--sweep", "sparsity", "--sparsity", "0.5")
    assert "--seconds" in refused(capsys, "bench", "--seconds", "0")
    lengths = [shape.seq_len for shape in token_sweep(heads=3, head_dim=64)]
    assert lengths == sorted(lengths) and lengths[0] == 2048 and lengths[-1] > 150_000
    assert {shape.heads for shape in token_sweep()} == {12}


def test_plots_show_speedups_and_the_ideal():
    figure = pictures.speedup_figure(made_up_rows())
    against_sparsity, against_tokens, by_shape = figure.axes
    assert "NVIDIA H200" in figure.get_suptitle()
    lines = {line.get_label(): line for line in against_sparsity.get_lines()}
    assert {"ideal: 1 / density", "hopper bfloat16", "hopper int8"} <= set(lines)
    assert list(lines["hopper bfloat16"].get_xdata()) == list(SWEEP_SPARSITIES)
    ideal = [1 / (1 - 0.95 * sparsity) for sparsity in SWEEP_SPARSITIES]
    assert list(lines["ideal: 1 / density"].get_ydata()) == pytest.approx(ideal)
    assert list(lines["hopper int8"].get_ydata()) == pytest.approx([1.15 * x for x in ideal])
    lines = {line.get_label(): line for line in against_tokens.get_lines()}
    assert {"hopper bfloat16", "hopper bfloat16, CUDA graph", "hopper int8"} <= set(lines)
    assert list(lines["hopper int8"].get_xdata()) == [shape.seq_len for shape in token_sweep()]
    assert len(by_shape.patches) == 2 * 4  # wan-480p too
    for axis in figure.axes:
        assert axis.get_xlabel() and axis.get_title()
    (only,) = pictures.speedup_figure(made_up_rows(), ["tokens"]).axes
    assert only.get_xlabel() == "tokens"


def test_plots_take_the_newest_version_and_one_gpu():
    rows = made_up_rows()
    old = [replace(row, rainfusion="0.0.9", speedup=0.1, measured="2025-01-01T00:00:00Z") for row in rows]
    other = [replace(row, gpu="NVIDIA A100", speedup=0.1, measured="2025-01-01T00:00:00Z") for row in rows]
    figure = pictures.speedup_figure([*rows, *old, *other], ["sparsity"])
    (line,) = (line for line in figure.axes[0].get_lines() if line.get_label() == "hopper int8")
    assert min(line.get_ydata()) > 1
    with pytest.raises(ValueError, match="nothing to draw"):
        pictures.speedup_figure([replace(A_ROW, speedup=None)])


# --- benchmarks/tune.py ----------------------------------------------------------------------------------------------


@pytest.fixture
def tune():
    path = Path(__file__).parents[2] / "benchmarks" / "tune.py"
    spec = importlib.util.spec_from_file_location("tune", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tune_has_help_with_an_example_and_says_what_it_needs(tune, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="0"):
        tune.main(["--help"])
    assert "  python benchmarks/tune.py --head-dim 128" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "needs a CUDA or ROCm device" in capsys.readouterr().err


def test_tune_prints_the_best_tile_as_a_line_of_the_table(tune):
    trials = [
        tune.Trial(128, "bf16", tune.Tile(128, 64, 8, 2), 1.25),
        tune.Trial(128, "bf16", tune.Tile(128, 64, 4, 3), 1.0),
        tune.Trial(128, "bf16", tune.Tile(128, 128, 4, 4), None, "out of shared memory"),
        tune.Trial(64, "fp32", tune.Tile(64, 32, 8, 2), None, "took more than 90 s"),
    ]
    text = tune.report(trials, (9, 0))
    assert text.endswith("rainfusion/kernels/tuning.py:\n    ((9, 0), 128, 2, Tile(128, 64, 4, 3)),")
    assert "2 of 3 ran" in text and "out of shared memory" in text and "took more than 90 s" in text
    assert tune.report(trials, "hip").endswith("    (128, 2, Tile(128, 64, 4, 3)),")


@pytest.mark.parametrize(
    ("script", "ms", "problem"),
    [
        ('print(\'{"ms": 2.5, "right": true}\')', 2.5, ""),
        ('print(\'{"ms": 2.5, "right": false}\')', None, "WRONG"),
        ("raise MemoryError('out of shared memory')", None, "MemoryError: out of shared memory"),
        ("import time; time.sleep(60)", None, "took more than 3 s"),
    ],
)
def test_tune_survives_a_candidate_that_fails_or_hangs(tune, tmp_path, script, ms, problem):
    (tmp_path / "candidate.py").write_text(script)
    tune.__file__ = str(tmp_path / "candidate.py")
    args = tune._parser().parse_args(["--limit", "3"])
    trial = tune.try_one(128, "bf16", tune.Tile(128, 64, 4, 2), args, tmp_path / "lock")
    assert (trial.ms, trial.problem) == (ms, problem)


# --- inspect and demo ------------------------------------------------------------------------------------------------


def test_inspect_shows_order_and_masks(capsys, tmp_path):
    status, out, _ = run(capsys, "inspect", "--latent-shape", "5", "8", "16", "--txt-len", "10", "--heads", "3",
                         "--out", str(tmp_path / "new"))  # fmt: skip
    assert status == 0
    assert "frame 0\n" + "................\n" * 8 in out
    assert "frames 1 to 2\nAAAAAAAABBBBBBBB\n" in out
    assert "|█" in out
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mask.png", "order.png"]
    assert all(path.read_bytes().startswith(PNG) for path in (tmp_path / "new").iterdir())


def test_inspect_takes_a_call_of_ones_own(capsys, tmp_path):
    q, k = torch.randn(2, 1, 2, 3 * 8 * 16, 16).unbind()
    torch.save({"q": q, "k": k}, tmp_path / "call.pt")
    words = ("inspect", "--latent-shape", "3", "8", "16", "--tensors", str(tmp_path / "call.pt"), "--sparsity", "0.5")
    _, out, _ = run(capsys, *words)
    mask = rainfusion.predict_mask(q, k, sparse_type="rf_v2", sparsity=0.5, latent_shape_q=[3, 8, 16])
    assert pictures.mask_text(mask) in out
    torch.save({"q": q.transpose(1, 2), "k": k.transpose(1, 2)}, tmp_path / "call.pt")
    assert pictures.mask_text(mask) in run(capsys, *words, "--input-layout", "BSND")[1]
    torch.save([q, k], tmp_path / "call.pt")
    assert "--tensors" in refused(capsys, *words)
    assert "no.pt" in refused(capsys, "inspect", "--tensors", "no.pt")


@pytest.mark.parametrize("order", [["mindiesd"], ["raster"], ["2", "8", "8"]])
def test_inspect_knows_every_order(order, capsys):
    status, out, _ = run(capsys, "inspect", "--latent-shape", "2", "9", "16", "--token-order", *order, "--heads", "1")
    assert status == 0
    assert "frame 1" in out


def test_inspect_says_what_is_wrong(capsys):
    assert "token_order" in refused(capsys, "inspect", "--token-order", "hilbert")
    assert "--token-order" in refused(capsys, "inspect", "--token-order", "4", "x", "8")
    assert "latent_shape" in refused(capsys, "inspect", "--latent-shape", "0", "4", "4")


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "tqdm" else object())
    assert "needs tqdm: pip install tqdm" in refused(capsys, "bench")


def test_a_large_mask_is_shrunk_for_the_terminal():
    dense = torch.zeros(1, 1, 300, 200, dtype=torch.bool)
    dense[..., :100] = True
    lines = pictures.mask_text(BlockMask.from_dense(dense), size=40).splitlines()
    assert len(lines) == 42
    assert lines[1] == "|" + "█" * 20 + " " * 20 + "|"


def test_figures_show_every_head_and_some_frames():
    figure = pictures.mask_figure(BlockMask.full(1, 6, 300, 300), heads=range(6))
    assert [axis.get_title() for axis in figure.axes[:6]] == [f"head {head}: density 1.00" for head in range(6)]
    layout = TokenLayout.build(20 * 4 * 8, latent_shape=[20, 4, 8])
    figure = pictures.order_figure(layout, [20, 4, 8])
    assert [axis.get_title() for axis in figure.axes] == [f"frame {f}" for f in (0, 1, 2, 3, 4, 19)]


def test_synthetic_attention_has_structure():
    """On it a prediction beats chance by far: the kept fifth of the blocks holds most of the attention."""
    latent = synthetic.video_latent((5, 16, 32))
    q, k, v = synthetic.video_qkv(latent, 2, 32)
    kwargs = dict(sparse_type="rf_v2", sparsity=0.8, latent_shape_q=[5, 16, 32])
    dense = rainfusion.sparse_attention(q, k, v)
    mask = rainfusion.predict_mask(q, k, **kwargs)
    generator = torch.Generator().manual_seed(0)
    shuffled = mask.to_dense()[..., torch.randperm(mask.num_k_blocks, generator=generator)]
    chance = rainfusion.sparse_attention(q, k, v, mask=BlockMask.from_dense(shuffled), **kwargs)
    ours = rainfusion.sparse_attention(q, k, v, **kwargs)
    assert (ours - dense).norm() < 0.2 * (chance - dense).norm()


def test_a_file_that_would_run_code_is_refused(capsys, tmp_path):
    class Bad:
        def __reduce__(self):
            return (print, ("ran",))

    (tmp_path / "bad.pt").write_bytes(pickle.dumps(Bad(), protocol=2))
    printed = refused(capsys, "inspect", "--tensors", str(tmp_path / "bad.pt"))
    assert "--tensors" in printed
    assert "ran" not in printed.split()


QUICK_DEMO = ("demo", "--quick", "--device", "cpu")


def test_demo_draws_full_and_sparse_side_by_side(capsys, tmp_path):
    status, out, err = run(capsys, *QUICK_DEMO, "--out", str(tmp_path / "new"))
    assert status == 0
    assert re.search(r"^full +\d+\.\d\d s +\d+\.\d\d s +1\.00", out, re.MULTILINE)
    assert re.search(r"^sparse at 0.8 +\d+\.\d\d s +\d+\.\d\d s +0\.\d\d +\d+\.\d dB$", out, re.MULTILINE)
    assert re.search(r"^speed-up +\d+\.\d\dx +\d+\.\d\dx", out, re.MULTILINE)
    assert f"Prompt: {demo.PROMPT}" in out
    assert "sparse attention" in err  # progress
    gif, sheet = tmp_path / "new" / demo.GIF, tmp_path / "new" / demo.SHEET
    assert f"wrote {gif}\nwrote {sheet}" in out
    assert sheet.read_bytes().startswith(PNG)
    with Image.open(gif) as picture:
        assert picture.n_frames == 3
        assert picture.width > 3 * 4 * 32  # three panels
        first = picture.convert("RGB").tobytes()
        picture.seek(2)
        assert picture.convert("RGB").tobytes() != first


def test_demo_takes_a_prompt_and_dense_steps(capsys, tmp_path):
    prompt = "background up; red disc, from left, right; blue square, from top, down; white star, from right, up left"
    words = (*QUICK_DEMO, "--out", str(tmp_path), "--frames", "2", "--guidance", "2", "--sparsity", "1", "--seed", "3")
    _, out, _ = run(capsys, *words, "--prompt", prompt, "--dense-steps", "1")
    assert f"Prompt: {prompt}" in out
    assert "528 tokens,\nin 2 steps" in out
    assert "The first 1 of 2 steps are dense in both" in out
    assert "sparse at 1 " in out


def test_demo_without_a_difference_when_nothing_is_skipped(capsys, tmp_path):
    _, out, _ = run(capsys, *QUICK_DEMO, "--out", str(tmp_path), "--steps", "1", "--frames", "1", "--sparsity", "0")
    row = next(line for line in out.splitlines() if line.startswith("sparse at 0"))
    density, psnr = re.search(r" (\S+) +(\S+) dB$", row).groups()
    assert density == "1.00" and float(psnr) > 80


def test_demo_says_its_progress_without_tqdm(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    _, _, err = run(capsys, *QUICK_DEMO, "--out", str(tmp_path), "--frames", "1")
    assert err.splitlines() == [f"{name} attention: step {n} of 2" for name in ("full", "sparse") for n in (1, 2)]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--sparsity", "1.5"), "--sparsity"),
        (("--steps", "0"), "--steps"),
        (("--steps", "3", "--dense-steps", "3"), "--dense-steps"),
        (("--frames", "0"), "--frames"),
        (("--size", "33"), "--size"),
        (("--prompt", "a cat"), "a prompt must begin with 'background'"),
        (("--prompt", "background up; red disc"), "a shape must be"),
        (("--prompt", "background up"), "shapes must be 3"),
        (("--device", "nothing"), "--device"),
    ],
)
def test_demo_says_what_is_wrong_before_it_starts(words, name, capsys, tmp_path):
    assert name in refused(capsys, *QUICK_DEMO, "--out", str(tmp_path), *words)


@pytest.mark.parametrize(("module", "package"), [("PIL", "pillow"), ("safetensors", "safetensors")])
def test_demo_names_the_package_that_it_lacks(module, package, capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == module else object())
    assert f"needs {package}: pip install {package}\n" in refused(capsys, *QUICK_DEMO)
