"""Skipped blocks that count through their means."""

import pytest
import torch

from helpers import oracle
from helpers.inputs import qkv, randn
from helpers.planned import request
from rainfusion import BlockMask, sparse_attention
from rainfusion.backends import triton as triton_backend
from rainfusion.prediction import spread

pytestmark = pytest.mark.timeout(1800)  # Triton's interpreter, compilers

GRID, TXT = (3, 8, 9), 20
LENGTH = 3 * 8 * 9 + TXT  # 236: a ragged last block
VIDEO = dict(sparse_type="rf_v2", sparsity=0.8, latent_shape_q=GRID, txt_len=TXT, block_size=64)
PLAIN = dict(sparse_type="rf_v2", sparsity=0.7, block_size=64)
CALLS = {
    "video": (VIDEO, LENGTH),
    "no grid": (PLAIN, 300),
    "submeans": (dict(VIDEO, predictor="submeans"), LENGTH),
    "spread": (dict(VIDEO, predictor="spread"), LENGTH),
    "spread, no grid": (dict(PLAIN, predictor="spread"), 300),
    "spread in blocks of 128": (dict(PLAIN, predictor="spread", block_size=128), 700),
    "blocks of 128": (dict(PLAIN, block_size=128), 700),
    "ada_bsa": (dict(sparse_type="ada_bsa", sparsity=0.8, keep_sink=False), 700),
}
BACKENDS = ["portable", "reference", "triton"]


def layout_of(kwargs, length):
    if kwargs["sparse_type"] == "ada_bsa":
        return list(range(length))
    shared = kwargs.get("txt_len", 0), None, "window", kwargs["block_size"]
    return oracle.layout(length, kwargs.get("latent_shape_q"), *shared)[0]


@pytest.mark.parametrize("masked", [None, "bool", "float"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_the_definition_says(name, backend, masked):
    kwargs, length = CALLS[name]
    q, k, v = qkv(2, 2, length, 24, k_heads=1)
    attn_mask = None
    if masked is not None:
        attn_mask = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.7
        attn_mask[:, 64:200] = False  # blocks without a key
        if masked == "float":
            attn_mask = torch.randn(2, length).masked_fill(~attn_mask, -1e4)
    out, lse, mask = sparse_attention(
        q, k, v, attn_mask, **kwargs, compensate=True, backend=backend, return_lse=True, return_mask=True
    )
    assert mask.density() < 0.95
    order = layout_of(kwargs, length)
    spreads = kwargs.get("predictor") == "spread"
    exact, exact_lse = oracle.compensated(
        q, k, v, mask.to_dense(), order, order, mask.block_size, attn_mask, spreads=spreads
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-5)


def test_it_is_nearer_to_dense_attention():
    """And nearer still with what keys are apart from their means, some blocks more than others."""
    torch.manual_seed(0)
    q, k, v = (x.clone() for x in qkv(2, 1, 1400, 24))
    k *= torch.rand(11).repeat_interleave(128)[:1400, None]
    k += 2 * torch.randn(11, 24).repeat_interleave(128, 0)[:1400]  # blocks with something in common
    dense = sparse_attention(q, k, v)
    options = dict(compensate=False), dict(compensate=True), dict(compensate=True, predictor="spread")
    errors = [(sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.8, **kw) - dense).norm() for kw in options]
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < 0.8 * errors[1]


def test_nothing_skipped_is_nothing_added():
    q, k, v = qkv(2, 2, 300, 24, k_heads=1)
    full = BlockMask.full(2, 2, 300, 300)
    plain = sparse_attention(q, k, v, sparse_type="rf_v2", mask=full)
    torch.testing.assert_close(sparse_attention(q, k, v, sparse_type="rf_v2", mask=full, compensate=True), plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_stands_behind_the_counts_of_a_mask_does_not_matter(backend):
    q, k, v = qkv(2, 2, 600, 24, k_heads=1)
    dense = torch.zeros(2, 2, 5, 5, dtype=torch.bool)
    dense[..., :2] = True
    tidy = BlockMask.from_dense(dense)
    untidy = BlockMask(tidy.counts, tidy.indices.clone())
    untidy.indices[..., 2:] = 0
    assert torch.equal(untidy.to_dense(), dense)
    kwargs = dict(sparse_type="rf_v2", compensate=True, backend=backend)
    assert torch.equal(sparse_attention(q, k, v, mask=untidy, **kwargs), sparse_attention(q, k, v, mask=tidy, **kwargs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_default_dtype_changes_nothing(backend):
    q, k, v = qkv(2, 2, 300, 24, k_heads=1)
    kwargs = dict(PLAIN, compensate=True, backend=backend, return_lse=True)
    expected = sparse_attention(q, k, v, **kwargs)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = sparse_attention(q, k, v, **kwargs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_where_nothing_is_skipped_no_means_are_made(monkeypatch):
    q, k, v = qkv(2, 2, 300, 24, k_heads=1)
    asked = []
    prepare = triton_backend.prepare
    monkeypatch.setattr(
        triton_backend, "prepare", lambda request: (asked.append(request.method.compensate), prepare(request))[1]
    )
    for sparsity in (0.0, 0.7):
        sparse_attention(q, k, v, **dict(PLAIN, sparsity=sparsity), compensate=True, backend="triton", return_lse=True)
    sparse_attention(q, k, v, compensate=True, backend="triton", return_lse=True)
    assert asked == [False, True, False]


@pytest.mark.parametrize("predictor", ["mean", "spread"])
def test_keys_that_are_all_alike_give_dense_attention(predictor):
    """Then the mean of a block is each of its keys."""
    q, k, v = qkv(2, 2, 600, 24, k_heads=1)
    k, v = k[:, :, :1].expand(-1, -1, 600, -1), v[:, :, :1].expand(-1, -1, 600, -1)
    options = dict(sparse_type="rf_v2", sparsity=0.8, predictor=predictor, compensate=True)
    out, lse = sparse_attention(q, k, v, **options, return_lse=True)
    dense, dense_lse = sparse_attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, dense)
    torch.testing.assert_close(lse, dense_lse)


@pytest.mark.parametrize(
    ("dtype", "bias", "kept"),
    [
        (torch.float16, None, torch.float16),
        (torch.float32, None, torch.float32),
        (torch.float16, 3000.25, torch.float32),
    ],
    ids=str,
)
def test_biases_are_kept_in_as_many_bits_as_they_need(dtype, bias, kept):
    """Numbers of keys fit fp16, a bias may not; one that all keys have changes nothing but the LSE."""
    q, k, v = (x.to(dtype) for x in qkv(1, 2, 300, 16))
    mask = BlockMask.from_dense(torch.rand(1, 2, 5, 5) < 0.5, 64)
    added = None if bias is None else torch.full((1, 300), bias)
    asked = request(q, k, v, None if bias is None else torch.ones(1, 300, dtype=torch.bool), mask, compensate=True,
                    sparse_type="rf_v2", block_size=64, sparsity=0.5)._replace(bias=added)  # fmt: skip
    keys = triton_backend.prepare(asked)
    assert keys.weights.dtype == triton_backend.stand_in_bias(asked, mask, keys).dtype == kept
    call = dict(sparse_type="rf_v2", block_size=64, mask=mask, compensate=True, return_lse=True)
    out, lse = sparse_attention(q, k, v, added, **call, backend="triton")
    exact, exact_lse = sparse_attention(*(x.double() for x in (q, k, v)), added, **call, backend="reference")
    torch.testing.assert_close(out.double(), exact, rtol=4e-3 if dtype == torch.float16 else 1e-5, atol=1e-3)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 6])
def test_a_mean_counts_for_more_by_the_power_of_its_row(rows, dtype):
    """Of several rows at a time, where a list may be longer than what is read of it at once."""
    blocks, sizes = 800, torch.tensor([0.0, 0.1, 1.0, 100.0])  # factors of 1, of hardly more, and of thousands
    q, k = randn(1, 4, rows * 128 - 37, 16) * sizes[:, None, None], randn(1, 2, 32 * blocks - 5, 16, seed=1)
    q, k = q.to(dtype), k.to(dtype)
    dense = torch.rand(1, 4, rows, blocks, generator=torch.Generator().manual_seed(3)) < 0.1
    dense[:, 1:, 0] = torch.rand(blocks, generator=torch.Generator().manual_seed(4)) < 0.7
    dense[:, 0, -1] = False
    mask = BlockMask.from_dense(dense, (128, 32))
    call = dict(sparse_type="rf_v2", block_size=(128, 32), predictor="spread", compensate=True, sparsity=0.5)
    asked = request(q, k, mask=mask, **call)
    keys = triton_backend.prepare(asked)
    found = triton_backend.stand_in_bias(asked, mask, keys)[..., :blocks]
    assert found.dtype == dtype and mask.counts.max() > 512
    power, spreads = spread.power(q, asked.q_layout).double(), spread.of_keys(k, asked.k_layout).double()
    more = spread.gain(power[..., None], spreads.repeat_interleave(2, 1)[:, :, None], 0.25).log2()
    assert not more[:, 0].any() and 1e-2 > more[:, 1].min() > 1e-4 and more.max() > 11
    number = torch.full((blocks,), 32.0, dtype=torch.double)
    number[-1] = 27
    expected = (number.log2() + more).masked_fill(dense, -torch.inf)
    torch.testing.assert_close(found.double(), expected, rtol=2**-10 if dtype == torch.float16 else 1e-6, atol=4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("predictor", ["mean", "spread"])
def test_rows_without_any_key_are_zero(backend, predictor):
    q, k, v = qkv(2, 2, 300, 24, k_heads=1)
    nothing = torch.zeros(2, 300, dtype=torch.bool)
    call = dict(PLAIN, predictor=predictor, compensate=True, backend=backend, return_lse=True)
    out, lse = sparse_attention(q, k, v, nothing, **call)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("predictor", ["mean", "spread"])
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_shows(backend, predictor, where):
    q, k, v = (x.clone() for x in qkv(2, 2, 300, 24, k_heads=1))
    q[0, 0, 5], {"k": k, "v": v}[where][1, 0, 250] = torch.nan, torch.nan
    out = sparse_attention(q, k, v, **dict(PLAIN, predictor=predictor), compensate=True, backend=backend)
    assert out[0, 0, 5].isnan().all() and out[1].isnan().all()
    assert out[0, 1].isfinite().all()


def test_it_compiles():
    torch._dynamo.reset()
    q, k, v = qkv(2, 2, 300, 24, k_heads=1)

    def call(q, k, v):
        return sparse_attention(q, k, v, **PLAIN, compensate=True)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))


def test_double_precision():
    q, k, v = qkv(2, 2, 300, 24, k_heads=1, dtype=torch.float64)
    out, mask = sparse_attention(q, k, v, **PLAIN, compensate=True, return_mask=True)
    order = layout_of(PLAIN, 300)
    exact, _ = oracle.compensated(q, k, v, mask.to_dense(), order, order, 64)
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-6)  # the means are fp32


def test_not_with_causal_attention():
    q, k, v = qkv(2, 2, 300, 24, k_heads=1)
    with pytest.raises(ValueError, match="compensate must be False with is_causal"):
        sparse_attention(q, k, v, sparse_type="ada_bsa", is_causal=True, compensate=True)
    with pytest.raises(TypeError, match="compensate must be True or False"):
        sparse_attention(q, k, v, **PLAIN, compensate="yes")
