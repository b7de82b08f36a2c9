"""`rainfusion bench` on named shapes: what it measures, checks, prints and refuses."""

import json
import re

import pytest
import torch
from commands import refused, run
from made_up import TINY

import rainfusion
from rainfusion import BlockMask
from rainfusion.bench import attention as bench
from rainfusion.bench import inputs, synthetic
from rainfusion.bench.shapes import SHAPES, token_sweep


def test_bench_prints_a_table(capsys):
    words = ("bench", "qwen-image-512", "--repeats", "1", "--heads", "1", "--sparse-type", "rf_v2,ada_bsa")
    status, out, err = run(capsys, *words, "--device", "cpu")
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith("qwen-image-512")]
    assert len(rows) == 2
    assert all(re.search(r"\d\.\d\dx ", row) for row in rows)
    assert err == ""  # seconds of work need no line in a log


def test_what_is_named_twice_is_measured_once(capsys):
    twice = "bench qwen-image-512 qwen-image-512 --sparse-type rf_v2,rf_v2"
    _, out, _ = run(capsys, f"{twice} --repeats 1 --heads 1 --device cpu")
    assert len([line for line in out.splitlines() if line.startswith("qwen-image-512")]) == 1


def test_bench_prints_json(capsys):
    _, out, _ = run(capsys, "bench qwen-image-512 --repeats 1 --heads 1 --json --dtype bf16 --device cpu")
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


def test_bench_takes_several_sparsities(capsys):
    words = ("bench", "--latent-shape", "3", "8", "16", "--head-dim", "16", "--repeats", "1", "--sparsity", "0.5,0.9")
    _, out, _ = run(capsys, *words, "--json", "--device", "cpu")
    assert [record["sparsity"] for record in json.loads(out)] == [0.5, 0.9]


def test_bench_refuses_what_it_does_not_know(capsys):
    assert "wan-720p" in refused(capsys, "bench", "sora")
    assert "--repeats must be at least 1, got 0" in refused(capsys, "bench", "--repeats", "0")
    assert "sparsity must be in [0, 1], got 3.0" in refused(capsys, "bench", "qwen-image-512", "--sparsity", "3")
    assert "--device" in refused(capsys, "bench", "--device", "abacus")
    assert "--sparse-type" in refused(capsys, "bench", "--sparse-type", "rf_v2,rf_v9")
    assert "--head-dim" in refused(capsys, "bench", "--head-dim", "0")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sparsity nan", "--sparsity must be in [0, 1], got nan"),
        ("--seconds nan", "--seconds must be a finite number, got nan"),
        ("--seconds inf", "--seconds must be a finite number, got inf"),
        ("--seconds -1", "--seconds must be above 0, got -1.0"),
        ("--heads 0", "--heads must be at least 1, got 0"),
        ("--batch 0", "--batch must be at least 1, got 0"),
        ("--seed -1", "--seed must be in [0, 4294967295], got -1"),
        ("--latent-shape 3 8 0", "--latent-shape[2] must be at least 1, got 0"),
        ("--latent-shape 3 8 16 --txt-len -1", "--txt-len must be at least 0, got -1"),
        ("--txt-len 77", "--txt-len needs --latent-shape"),
        ("--head-dim 64", "--head-dim needs --latent-shape or --sweep tokens"),
        ("--device meta", "--device must be a torch device of this machine, got 'meta'"),
    ],
)
def test_numbers_out_of_their_range_are_refused_before_the_work(words, said, capsys, monkeypatch):
    monkeypatch.setattr(bench, "run", lambda plan: pytest.fail("it began to work"))
    assert said in refused(capsys, f"bench qwen-image-512 {words}")


def test_bench_takes_batches_of_different_clips(capsys):
    words = ("bench", "--latent-shape", "3", "8", "16", "--head-dim", "16", "--heads", "1", "--batch", "2")
    _, out, _ = run(capsys, *words, "--repeats", "1", "--json", "--device", "cpu")
    (record,) = json.loads(out)
    assert (record["batch"], record["right"]) == (2, True)
    q, _, _ = inputs.attention_inputs(TINY, batch=2, heads=1, dtype=torch.float32, device=torch.device("cpu"))
    assert q.shape == (2, 1, 404, 16)
    assert not torch.equal(q[0], q[1])
    assert SHAPES["image-4096"].batch == 2 and SHAPES["image-4096"].seq_len == 4096


def test_sweeps_refuse_what_they_choose_themselves(capsys):
    assert "--sweep tokens" in refused(capsys, "bench", "wan-480p", "--sweep", "tokens")
    assert "--sweep sparsity" in refused(capsys, "bench", "--sweep", "sparsity", "--sparsity", "0.5")
    assert "--seconds" in refused(capsys, "bench", "--seconds", "0")
    lengths = [shape.seq_len for shape in token_sweep(heads=3, head_dim=64)]
    assert lengths == sorted(lengths) and lengths[0] == 2048 and lengths[-1] > 150_000
    assert {shape.heads for shape in token_sweep()} == {12}


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
