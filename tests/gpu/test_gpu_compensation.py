"""Skipped blocks that count through their means, against the reference."""

import math

import pytest
import torch

from helpers import gpu
from helpers.gpu import BF16, FP16, FP32, MOST, PRECISIONS, SUBMEANS
from rainfusion import BlockMask, sparse_attention

pytestmark = gpu.ON_GPU


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize("name", ["plain", "video", "blocks of 64"])
@pytest.mark.parametrize("predictor", ["submeans", "spread"])
def test_compensation_is_that_of_the_reference(backend, dtype, kind, name, predictor):
    """Against the same mask in float64 on the CPU, within twice what rounding inputs and output costs."""
    q, k, v = gpu.qkv(dtype=dtype)
    attn_mask = gpu.key_mask(kind, 2, q.shape[2])
    kwargs = dict(SUBMEANS[name], predictor=predictor, compensate=True, return_lse=True)
    result = gpu.attend(backend, q, k, v, attn_mask, **kwargs, return_mask=True)
    if result is None:
        return
    out, lse, mask = result
    there = [x.double().cpu() for x in (q, k, v)]
    mask_there = None if attn_mask is None else attn_mask.cpu()
    exact, exact_lse = sparse_attention(*there, mask_there, **kwargs, mask=mask.to("cpu"), backend="reference")
    scale = exact.abs().max()
    eps = torch.finfo(dtype).eps
    assert (out.double().cpu() - exact).abs().max() <= max(8 * eps, 2e-5) * scale
    seen = exact_lse > -math.inf
    assert (lse.cpu() - exact_lse)[seen].abs().max() <= max(8 * eps, 2e-5) * max(1.0, exact_lse[seen].abs().max())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", [64, 72, 128])
@pytest.mark.parametrize("kind", [None, "float", "blocks", "nothing"])
@pytest.mark.parametrize("predictor", ["mean", "spread"])
def test_compensation_in_every_precision(backend, precision, dim, kind, predictor):
    """More keys than 128 blocks have, rows that keep none of them, other lengths of q and k: against the definition.

    The LSE within twice what the same precision loses without compensation.
    """
    q, k, v = gpu.qkv(300, 128 * 130 + 40, batch=1, dim=dim)
    k = k + gpu.randn(131, dim, seed=9).repeat_interleave(128, 0)[: k.shape[2]]  # blocks with something in common
    attn_mask = torch.zeros(1, k.shape[2], dtype=torch.bool, device=gpu.DEVICE)
    attn_mask = attn_mask if kind == "nothing" else gpu.key_mask(kind, 1, k.shape[2])
    dense = gpu.random_mask(q, k, density=0.2)
    dense[0, 0, 1], dense[0, 1, 0] = False, True
    mask, there = BlockMask.from_dense(dense), [None if x is None else x.cpu() for x in (q, k, v, attn_mask)]
    there[:3] = [x.float() for x in there[:3]]
    off = 0.0
    for compensate in (False, True):
        kwargs = dict(sparse_type="rf_v2", predictor=predictor, compensate=compensate, return_lse=True)
        result = gpu.attend(backend, q, k, v, attn_mask, precision=precision, mask=mask, **kwargs)
        if result is None:
            return
        out, lse = result
        exact, exact_lse = sparse_attention(*there, mask=mask.to("cpu"), **kwargs)
        if not compensate:
            off = (lse.cpu() - exact_lse)[exact_lse.isfinite()].abs().max() if exact_lse.isfinite().any() else 0.0
    if kind == "nothing":
        assert (out == 0).all() and lse.isneginf().all()
        return
    most = {"native": 0.004, **MOST}[precision]
    assert (out.cpu() - exact).norm() <= 1.2 * most * exact.norm()
    gpu.assert_lse(lse.cpu(), exact_lse.double(), max(2 * float(off), 0.005))
