"""When dense attention is faster, and how a user learns it."""

from pathlib import Path

import pytest
import torch

from rainfusion import explain, predict_mask, sparse_attention
from rainfusion.backends import crossover
from rainfusion.bench import results
from rainfusion.bench.shapes import SHAPES
from rainfusion.checks import options

BEST = dict(predictor="submeans", compensate=True)


def call(q, k, **kwargs):
    return options(q, k, predicts=True, sparse_type="rf_v2", **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(sparsity=0.7),
        dict(sparsity=0.7, txt_len=200),
        dict(sparsity=0.9, latent_shape_q=[5, 20, 21], txt_len=100),
        dict(sparsity=1.0, latent_shape_q=[5, 20, 21], txt_len=100),
        dict(sparsity=0.6, video_spans=[{"start": 0, "latent_shape": [3, 20, 20]}]),
        dict(sparsity=0.5, block_size=64, latent_shape_q=[1, 44, 50]),
    ],
)
def test_the_expected_density_is_what_a_prediction_keeps(kwargs):
    q, k = torch.randn(2, 1, 8, 2200, 32)
    density = predict_mask(q, k, sparse_type="rf_v2", **kwargs).density()
    assert crossover.expected_density(call(q, k, **kwargs), 2200, 2200) == pytest.approx(density, abs=0.02)


def test_ada_bsa_keeps_what_the_data_says():
    q = torch.zeros(1, 1, 2000, 32)
    capped = options(q, q, predicts=True, sparse_type="ada_bsa", sparsity=0.4, cdf_threshold=0.9)
    free = options(q, q, predicts=True, sparse_type="ada_bsa", cdf_threshold=0.9)
    assert crossover.expected_density(capped, 2000, 2000) == pytest.approx(0.6)
    assert crossover.expected_density(free, 2000, 2000) is None


def times(shape, sparsity, runner="hopper", **kwargs):
    q = torch.empty(shape.batch, shape.heads, shape.seq_len, shape.head_dim, dtype=torch.bfloat16, device="meta")
    grid = list(shape.latent_shape) if shape.latent_shape else None
    checked = call(q, q, sparsity=sparsity, latent_shape_q=grid, txt_len=shape.txt_len, **kwargs)
    density = crossover.expected_density(checked, shape.seq_len, shape.seq_len)
    return crossover._times(runner, q, q, density, checked)


def test_options_have_their_price():
    """5 blocks of means beside 142, and a pass over k. An H200 took 46.7 ms without and 50.7 with them."""
    plain, best = (times(SHAPES["wan-720p"], 0.8, first_frame="keys", **more)[1] for more in ({}, BEST))
    assert 1.03 < best / plain < 1.09


@pytest.mark.parametrize("name", ["wan-720p", "wan-480p", "image-4096", "qwen-image-2048"])
def test_sparse_pays_on_the_shapes_it_is_for(name):
    dense, sparse = times(SHAPES[name], SHAPES[name].sparsity)
    assert sparse < dense


def test_dense_wins_where_there_is_little_to_skip():
    dense, sparse = times(SHAPES["qwen-image-512"], 0.6)  # short
    assert dense < sparse
    dense, sparse = times(SHAPES["wan-480p"], 0.2, "triton")  # most is kept, by a kernel slower than the dense one
    assert dense < sparse


def test_the_model_agrees_with_the_measurements():
    rows = results.newest(results.read(Path(__file__).parents[2] / "benchmarks/results/attention.csv"))
    measured = [row for row in rows if row.precision == "native" and row.head_dim == 128]
    seconds = [
        (row, _modelled(row)[0 if row.contender == "cuDNN" else 1])
        for row in measured
        if row.contender == "cuDNN" or (row.contender == "hopper graph" and row.sparsity > 0)
    ]
    assert len(seconds) > 30
    assert all(0.7 < 1000 * model / row.ms < 1.3 for row, model in seconds)


def _modelled(row):
    q = torch.empty(row.batch, row.heads, row.tokens, row.head_dim, dtype=torch.bfloat16, device="meta")
    return crossover._times("hopper", q, q, row.density, call(q, q, sparsity=row.sparsity))


def test_options_of_an_empty_call_and_of_another_strategy_cost_nothing():
    q, nothing = torch.empty(1, 2, 256, 64, device="meta"), torch.empty(1, 2, 0, 64, device="meta")
    best = call(q, nothing, sparsity=0.5, **BEST)
    assert crossover._times("hopper", q, nothing, 1.0, best)[1] < 1e-4
    for kwargs in (dict(), dict(predictor="submeans")):
        ada = options(q, q, predicts=True, sparse_type="ada_bsa", sparsity=0.5, **kwargs)
        assert crossover._times("hopper", q, q, 0.5, ada)[1] == crossover._times("hopper", q, q, 0.5, call(q, q))[1]


def test_on_a_cpu_nothing_is_switched():
    q = torch.zeros(1, 2, 256, 64)
    assert crossover.why_dense("portable", q, q, call(q, q, sparsity=0.5)) is None


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_a_call_that_runs_dense_is_dense_and_compiles(monkeypatch, layout):
    monkeypatch.setattr(crossover, "why_dense", lambda *_: "because")
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 2, 200, 200, 16).unbind()
    q, k, v = (x[:, :, :4] if layout == "BSND" else x[:, :4] for x in (q, k, v))  # strided

    def call(q, k, v, **kwargs):
        return sparse_attention(q, k, v, input_layout=layout, sparse_type="rf_v2", sparsity=0.9, **kwargs)

    dense = sparse_attention(q, k, v, input_layout=layout)
    assert torch.equal(call(q, k, v), dense)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(compiled, dense) and compiled.stride() == call(q, k, v).stride()
    for asked in (dict(return_lse=True), dict(return_mask=True)):  # then the blocks matter
        assert not torch.equal(call(q, k, v, **asked)[0], dense)
    assert not torch.equal(call(q, k, v, backend="portable"), dense)


def test_explain_says_what_runs_and_why_not_faster():
    q = torch.zeros(1, 2, 256, 64)
    text = explain(q, q, q, sparse_type="rf_v2", sparsity=0.5)
    assert text.startswith("runs with 'portable'\n")
    assert "not with 'hopper': it needs an NVIDIA GPU of compute capability 9.0" in text
    assert explain(q, q, q).startswith("runs with torch's attention: nothing is to be skipped")
    assert explain(q, q, q, return_lse=True).startswith("runs with 'portable'")
    assert explain(q, q, q, sparse_type="rf_v2", sparsity=0.5, backend="reference").startswith("runs with 'reference'")


def test_explain_checks_arguments_as_the_call_does():
    q = torch.zeros(1, 2, 256, 64)
    with pytest.raises(ValueError, match="sparsity must be in"):
        explain(q, q, q, sparsity=2.0)
    with pytest.raises(ValueError, match=r"'hopper' needs an NVIDIA GPU .* found cpu tensors"):
        explain(q, q, q, backend="hopper")
    with pytest.raises(TypeError, match="unexpected keyword argument 'sparcity'"):
        explain(q, q, q, sparcity=0.5)
