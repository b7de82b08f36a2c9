"""Rows of 128 queries that choose among blocks of 64 or 32 keys, against the reference."""

import math

import pytest
import torch

from helpers import gpu
from helpers.gpu import BF16, FP16, FP32, MOST, QUANTISED, same
from rainfusion import BlockMask, sparse_attention
from rainfusion.backends import triton

pytestmark = [*gpu.ON_GPU, pytest.mark.parametrize("pair", [(128, 64), (128, 32)], ids=str)]

GRID, TXT = (3, 9, 13), 21
VIDEO = dict(sparse_type="rf_v2", sparsity=0.7, latent_shape_q=GRID, txt_len=TXT, predictor="submeans")
LENGTH = TXT + math.prod(GRID)


@pytest.mark.parametrize(("predictor", "compensate"), [("submeans", False), ("submeans", True), ("spread", True)])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize(("dtype", "dim"), [(BF16, 128), (BF16, 64), (FP16, 80), (FP32, 128)], ids=str)
def test_it_is_that_of_the_reference(backend, pair, dtype, dim, kind, predictor, compensate):
    q, k, v = gpu.qkv(LENGTH, LENGTH, dim=dim, dtype=dtype)
    attn_mask = gpu.key_mask(kind, 2, LENGTH)
    call = dict(VIDEO, block_size=pair, predictor=predictor, compensate=compensate)
    result = gpu.attend(backend, q, k, v, attn_mask, **call, return_lse=True, return_mask=True)
    if result is not None:
        gpu.compare(result, q, k, v, attn_mask, **call)


@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("kind", [None, "bool", "float", "nothing left"])
@pytest.mark.parametrize(("dtype", "dim"), [(BF16, 128), (BF16, 64), (FP16, 80), (BF16, 48)], ids=str)
@pytest.mark.parametrize("precision", QUANTISED)
def test_quantised_it_is_as_near_as_with_128_keys(backend, pair, precision, dtype, dim, kind, compensate):
    q, k, v = gpu.qkv(LENGTH, LENGTH, dim=dim, dtype=dtype)
    attn_mask = gpu.key_mask(kind, 2, LENGTH)
    call = dict(VIDEO, block_size=pair, compensate=compensate)
    kwargs = dict(call, precision=precision, return_lse=True, return_mask=True)
    result = gpu.attend(backend, q, k, v, attn_mask, **kwargs)
    if result is not None:
        within = 0.2 if kind == "float" else 0.05  # with a bias a few keys decide, and so does their rounding
        gpu.compare_quantised(result, q, k, v, attn_mask, MOST[precision], within, **call)


def some_lists(q, k_len, pair):
    """Of any length, none among them, all, and the ragged block alone."""
    generator = torch.Generator().manual_seed(5)
    dense = torch.rand(1, q.shape[1], 3, -(-k_len // pair[1]), generator=generator) < 0.15
    dense[0, 0, 1], dense[0, 0, 2] = False, True
    dense[0, 1, 0], dense[0, 1, 0, -1] = False, True
    return BlockMask.from_dense(dense.to(gpu.DEVICE), pair)


@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("k_len", [1, 31, 33, 64, 129, 4200])
def test_lists_that_end_in_the_middle_of_a_tile(backend, pair, k_len, compensate):
    """And with more means than a tile holds."""
    q, k, v = gpu.qkv(300, k_len, batch=1)
    mask = some_lists(q, k_len, pair)
    call = dict(sparse_type="rf_v2", block_size=pair, compensate=compensate)
    result = gpu.attend(backend, q, k, v, mask=mask, **call, return_lse=True)
    if result is not None:
        gpu.compare((*result, mask), q, k, v, None, **call)


@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("k_len", [1, 31, 33, 64, 129, 4200])
@pytest.mark.parametrize("precision", QUANTISED)
def test_quantised_lists_that_end_in_the_middle_of_a_tile(backend, pair, precision, k_len, compensate):
    q, k, v = gpu.qkv(300, k_len, batch=1)
    mask = some_lists(q, k_len, pair)
    call = dict(sparse_type="rf_v2", block_size=pair, compensate=compensate)
    result = gpu.attend(backend, q, k, v, mask=mask, **call, precision=precision, return_lse=True)
    if result is not None:  # where few keys are seen, the rounding of one logit is the LSE's
        gpu.compare_quantised((*result, mask), q, k, v, None, MOST[precision], 0.2, **call)


def test_heads_that_share_keys(backend, pair):
    q, k, v = gpu.qkv(LENGTH, LENGTH)
    k, v = k[:, :1].contiguous(), v[:, :1].contiguous()
    call = dict(VIDEO, block_size=pair, compensate=True)
    result = gpu.attend(backend, q, k, v, **call, return_lse=True, return_mask=True)
    if result is not None:
        gpu.compare(result, q, k, v, None, **call)


def test_a_cuda_graph_holds_heads_that_are_scored_one_after_the_other(backend, pair, monkeypatch):
    monkeypatch.setattr(triton, "_MANY_SCORES", 1)
    held, call = gpu.qkv(LENGTH, LENGTH), dict(VIDEO, block_size=pair, compensate=True, return_mask=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if gpu.attend(backend, *held, **call) is None:
            return
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sparse_attention(*held, **call, backend=backend)
    fresh = gpu.qkv(LENGTH, LENGTH, seed=5)
    for old, new in zip(held, fresh, strict=True):
        old.copy_(new)
    graph.replay()
    assert gpu.same(result, gpu.attend(backend, *fresh, **call))


@pytest.mark.parametrize("precision", QUANTISED)
def test_quantised_heads_that_share_keys(backend, pair, precision):
    """With keys that have a large mean in common, another one in each head."""
    q, k, v = gpu.qkv(LENGTH, LENGTH)
    k, v = (k + 10 * gpu.randn(2, 2, 1, 128, seed=9))[:, :1].contiguous(), v[:, :1].contiguous()
    call = dict(VIDEO, block_size=pair, compensate=True)
    result = gpu.attend(backend, q, k, v, **call, precision=precision, return_lse=True, return_mask=True)
    if result is not None:
        gpu.compare_quantised(result, q, k, v, None, MOST[precision], 0.1, **call)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("predictor", ["mean", "submeans"])
def test_a_quantised_call_predicts_as_the_native_one_does(backend, pair, precision, predictor):
    q, k, v = gpu.qkv(LENGTH, LENGTH)
    kwargs = dict(VIDEO, block_size=pair, predictor=predictor, return_mask=True)
    result = gpu.attend(backend, q, k, v, **kwargs, precision=precision)
    if result is not None:
        assert same(result[-1], gpu.attend(backend, q, k, v, **kwargs)[-1])


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_quantised_call_knows_how_far_keys_are_from_their_means(backend, pair, precision):
    """Means are added up in another order, and rounded: two blocks may change places in a row."""
    q, k, v = gpu.qkv(LENGTH, LENGTH)
    call = dict(VIDEO, block_size=pair, predictor="spread", compensate=True)
    result = gpu.attend(backend, q, k, v, **call, precision=precision, return_lse=True, return_mask=True)
    if result is None:
        return
    native = gpu.attend(backend, q, k, v, **call, return_mask=True)[-1]
    differ = (result[-1].to_dense() != native.to_dense()).sum(-1)
    assert (differ > 0).float().mean() < 0.02 and differ.max() <= 2
    gpu.compare_quantised(result, q, k, v, None, MOST[precision], 0.1, **call)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_quantising_does_not_hide_what_is_not_a_number(backend, pair, precision, bad):
    """It reaches every query that keeps its block, and no other; the heads of other keys do not notice."""
    q, k, v = gpu.qkv(300, 1000)
    token, blocks = 500, -(-1000 // pair[1])
    dense = gpu.uniform(2, 4, 3, blocks) < 0.4
    mask = BlockMask.from_dense(dense, pair)
    kwargs = dict(mask=mask, sparse_type="rf_v2", block_size=pair, precision=precision, return_lse=True)
    clean = gpu.attend(backend, q, k, v, **kwargs)
    if clean is None:
        return
    k[0, 0, token, 5] = bad  # of query heads 0 and 1
    out, lse = gpu.attend(backend, q, k, v, **kwargs)
    shows = dense[0, :2, :, token // pair[1]].repeat_interleave(128, 1)[:, :300]
    assert shows.any() and not shows.all()
    assert torch.equal(out[0, :2].isnan(), shows.unsqueeze(-1).expand(out[0, :2].shape))
    if precision == "fp8":  # integers have no NaN, only the values show it
        assert torch.equal(lse[0, :2].isnan(), shows)
    assert same(out[0, 2:], clean[0][0, 2:]) and same(out[1], clean[0][1])
    assert same(lse[0, 2:], clean[1][0, 2:]) and same(lse[1], clean[1][1])


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_removed_keys_may_hold_anything(backend, pair, precision, junk):
    q, k, v = gpu.qkv(LENGTH, LENGTH)
    keep = gpu.key_mask("blocks", 2, LENGTH)
    kwargs = dict(VIDEO, block_size=pair, compensate=True, precision=precision, return_lse=True)
    clean = gpu.attend(backend, q, k, v, keep, **kwargs)
    if clean is not None:
        spoilt = [x.masked_fill(~keep[:, None, :, None], junk) for x in (k, v)]
        assert clean[0].isfinite().all()
        assert same(gpu.attend(backend, q, *spoilt, keep, **kwargs), clean)
