"""NaN, infinity, zeros and large numbers, and how far they spread."""

import math

import pytest
import torch

from helpers import gpu, oracle
from helpers.gpu import (
    BF16,
    CALL,
    FP16,
    FP32,
    LENGTH,
    MOST,
    PRECISIONS,
    QUANTISED,
    RF_V2,
    TOKEN,
    USUAL,
    check_quantised,
    same,
)
from rainfusion import BlockMask

pytestmark = gpu.ON_GPU


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("token", [TOKEN, LENGTH - 1])
def test_nan_in_a_key_shows_where_its_block_is_kept_and_nowhere_else(backend, dtype, token):
    q, k, v = gpu.qkv(dtype=dtype)
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    clean = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if clean is None:
        return
    k[0, 0, token, 5] = math.nan  # of query heads 0 and 1
    out, lse = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    shows = torch.zeros_like(lse, dtype=torch.bool)
    shows[0, :2] = gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, {})[0, :2, :, token]
    assert torch.equal(out.isnan(), shows.unsqueeze(-1).expand(out.shape))
    assert torch.equal(lse.isnan(), shows)
    assert torch.equal(out[~shows], clean[0][~shows])
    assert torch.equal(lse[~shows], clean[1][~shows])


@pytest.mark.parametrize("kwargs", [CALL, dict(sparse_type="ada_bsa", sparsity=0.6), RF_V2], ids=str)
def test_nan_in_a_key_takes_its_block_into_every_row(backend, kwargs):
    q, k, v = gpu.qkv(batch=1)
    k[0, 1, TOKEN, 3] = math.nan
    result = gpu.attend(backend, q, k, v, **kwargs, return_lse=True)
    if result is not None:
        for x in result:
            assert x[0, 2:].isnan().all()
            assert x[0, :2].isfinite().all()


@pytest.mark.parametrize("precision", QUANTISED)
def test_quantising_does_not_hide_a_nan(backend, precision):
    """It reaches every query that keeps its block; the heads of other keys do not notice."""
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    clean = gpu.attend(backend, q, k, v, mask=mask, precision=precision, return_lse=True)
    if clean is None:
        return
    k[0, 0, TOKEN, 5] = math.nan
    out, _ = gpu.attend(backend, q, k, v, mask=mask, precision=precision, return_lse=True)
    shows = gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, {})[0, :2, :, TOKEN]
    assert torch.equal(out[0, :2].isnan(), shows.unsqueeze(-1).expand(out[0, :2].shape))
    assert torch.equal(out[0, 2:], clean[0][0, 2:])
    assert torch.equal(out[1], clean[0][1])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero", ["q", "k", "q and k", "v", "everything"])
def test_zeros_are_numbers_too(backend, precision, zero):
    """No division by a scale of 0: without q or k the result is the mean of the values, without v it is 0."""
    q, k, v = gpu.qkv()
    q, k, v = (x * (name not in zero and zero != "everything") for name, x in zip("qkv", (q, k, v), strict=True))
    for kwargs in (RF_V2, CALL):
        if precision == "native":
            gpu.check(backend, q, k, v, **kwargs)
        else:
            check_quantised(backend, precision, q, k, v, **kwargs, most=MOST[precision])


def test_nan_in_a_query_stays_in_its_row(backend):
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    clean = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if clean is None:
        return
    q[1, 3, TOKEN] = math.nan
    result = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    for ours, before in zip(result, clean, strict=True):
        assert ours[1, 3, TOKEN].isnan().all()
        ours[1, 3, TOKEN] = before[1, 3, TOKEN]
    assert same(result, clean)


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, precision) for name in ("rf_v2", "video", "compensated") for precision in PRECISIONS),
     ("ada_bsa", "native"), ("dense", "native")],
)  # fmt: skip
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_removed_keys_may_hold_anything(backend, name, precision, junk):
    ada_bsa = dict(sparse_type="ada_bsa", sparsity=0.6)
    calls = {"rf_v2": RF_V2, "video": CALL, "compensated": USUAL, "ada_bsa": ada_bsa, "dense": {}}
    kwargs = dict(calls[name], precision=precision, return_lse=True)
    q, k, v = gpu.qkv()
    keep = gpu.key_mask("blocks", 2, LENGTH)
    spoilt = [x.masked_fill(~keep[:, None, :, None], junk) for x in (k, v)]
    clean = gpu.attend(backend, q, k, v, keep, **kwargs)
    result = gpu.attend(backend, q, *spoilt, keep, **kwargs)
    assert (clean is None) == (result is None)
    if result is not None:
        assert result[0].isfinite().all()
        assert same(result, clean)


def test_inf_in_a_key_is_what_it_is_in_dense_attention(backend):
    """+inf in a logit makes its row NaN, -inf takes the key out of it."""
    q, k, v = gpu.qkv()
    k[0, 0, TOKEN, 5] = math.inf
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    result = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if result is None:
        return
    out = result[0]
    with gpu.at_ease():
        exact, _ = oracle.attention(q, k, v, gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, {}))
        assert exact.isnan().any() and exact[0, 0].isfinite().all(-1).any()
        assert torch.equal(out.isnan(), exact.isnan())
        gap = (out.double() - exact).nan_to_num(0.0).norm() / exact.nan_to_num(0.0).norm()
        assert gap <= 2 * torch.finfo(out.dtype).eps


def test_inf_in_a_value_shows_in_its_column(backend):
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    result = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if result is None:
        return
    clean = result[0]
    v[0, 0, TOKEN, 5] = -math.inf
    out, _ = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    shows = torch.zeros_like(out, dtype=torch.bool)
    shows[0, :2, :, 5] = gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, {})[0, :2, :, TOKEN]
    assert torch.equal(~out.isfinite(), shows)
    assert torch.equal(out[~shows], clean[~shows])


def test_large_logits_do_not_overflow(backend):
    for dtype in (FP16, BF16):
        q, k, v = gpu.qkv(dtype=dtype)
        gpu.check(backend, q * 30, k * 30, v, **CALL)
