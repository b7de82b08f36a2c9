"""Results are checked against float64: wrong rows are found, and quantised ones may lose more."""

import pytest
import torch

import rainfusion
from rainfusion import TokenLayout
from rainfusion.bench.verification import verify


def test_verification_finds_one_wrong_row():
    q, k, v = torch.randn(3, 1, 1, 128, 16).unbind()
    out, mask = rainfusion.sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.5, return_mask=True)
    layout = TokenLayout.build(128)
    assert verify(q, k, v, out, mask, layout).right
    out[0, 0, 5] += 0.01
    assert not verify(q, k, v, out, mask, layout).right
    assert not verify(q, k, v, out * torch.nan, mask, layout).right


def test_quantised_results_may_lose_more():
    q, k, v = torch.randn(3, 1, 1, 128, 16).unbind()
    out, mask = rainfusion.sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.5, return_mask=True)
    layout = TokenLayout.build(128)
    assert not verify(q, k, v, out * 1.05, mask, layout).right
    verdict = verify(q, k, v, out * 1.05, mask, layout, allowed=0.06)
    assert verdict.right and verdict.error == pytest.approx(0.05, rel=1e-3)
    assert not verify(q, k, v, out * 1.07, mask, layout, allowed=0.06).right


@pytest.mark.parametrize("predictor", ["mean", "spread"])
def test_means_count_as_the_predictor_says(predictor):
    q, k, v = torch.randn(3, 1, 1, 700, 16).unbind()
    call = dict(sparse_type="rf_v2", sparsity=0.7, predictor=predictor, compensate=True, block_size=(128, 32))
    out, mask = rainfusion.sparse_attention(q, k, v, **call, return_mask=True)
    spreads = predictor == "spread"
    assert verify(q, k, v, out, mask, TokenLayout.build(700), compensate=True, spreads=spreads).right
    assert not verify(q, k, v, out, mask, TokenLayout.build(700), compensate=True, spreads=not spreads).right
