"""Rows of 128 queries that choose among blocks of 64 or 32 keys, against the reference."""

import math

import pytest
import torch

from helpers import gpu
from helpers.gpu import BF16, FP16, FP32
from rainfusion import BlockMask, sparse_attention
from rainfusion.backends import triton

pytestmark = [*gpu.ON_GPU, pytest.mark.parametrize("pair", [(128, 64), (128, 32)], ids=str)]

GRID, TXT = (3, 9, 13), 21
VIDEO = dict(sparse_type="rf_v2", sparsity=0.7, latent_shape_q=GRID, txt_len=TXT, predictor="submeans")
LENGTH = TXT + math.prod(GRID)


def compare(result, q, k, v, attn_mask, **kwargs):
    """out and LSE with float64 on the CPU over the same mask, within twice what rounding inputs and output costs."""
    out, lse, mask = result
    there = [x.double().cpu() for x in (q, k, v)]
    mask_there = None if attn_mask is None else attn_mask.cpu()
    kwargs = dict(kwargs, mask=mask.to("cpu"), return_lse=True, backend="reference")
    exact, exact_lse = sparse_attention(*there, mask_there, **kwargs)
    most = max(8 * torch.finfo(q.dtype).eps, 2e-5)
    assert (out.double().cpu() - exact).abs().max() <= most * exact.abs().max()
    seen = exact_lse > -math.inf
    assert (out.cpu()[~seen] == 0).all() and lse.cpu()[~seen].isneginf().all()
    assert (lse.cpu() - exact_lse)[seen].abs().max() <= most * max(1.0, exact_lse[seen].abs().max())


@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize(("dtype", "dim"), [(BF16, 128), (BF16, 64), (FP16, 80), (FP32, 128)], ids=str)
def test_it_is_that_of_the_reference(backend, pair, dtype, dim, kind, compensate):
    q, k, v = gpu.qkv(LENGTH, LENGTH, dim=dim, dtype=dtype)
    attn_mask = gpu.key_mask(kind, 2, LENGTH)
    call = dict(VIDEO, block_size=pair, compensate=compensate)
    result = gpu.attend(backend, q, k, v, attn_mask, **call, return_lse=True, return_mask=True)
    if result is not None:
        compare(result, q, k, v, attn_mask, **call)


@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("k_len", [1, 31, 33, 64, 129, 4200])
def test_lists_that_end_in_the_middle_of_a_tile(backend, pair, k_len, compensate):
    """Of any length, none among them, and with more means than a tile holds."""
    q, k, v = gpu.qkv(300, k_len, batch=1)
    generator = torch.Generator().manual_seed(5)
    dense = torch.rand(1, q.shape[1], 3, -(-k_len // pair[1]), generator=generator) < 0.15
    dense[0, 0, 1], dense[0, 0, 2] = False, True
    dense[0, 1, 0], dense[0, 1, 0, -1] = False, True  # the ragged block alone
    mask = BlockMask.from_dense(dense.to(gpu.DEVICE), pair)
    call = dict(sparse_type="rf_v2", block_size=pair, compensate=compensate)
    result = gpu.attend(backend, q, k, v, mask=mask, **call, return_lse=True)
    if result is not None:
        compare((*result, mask), q, k, v, None, **call)


def test_heads_that_share_keys(backend, pair):
    q, k, v = gpu.qkv(LENGTH, LENGTH)
    k, v = k[:, :1].contiguous(), v[:, :1].contiguous()
    call = dict(VIDEO, block_size=pair, compensate=True)
    result = gpu.attend(backend, q, k, v, **call, return_lse=True, return_mask=True)
    if result is not None:
        compare(result, q, k, v, None, **call)


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


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_quantised_kernels_say_that_they_have_none(pair, precision):
    q, k, v = gpu.qkv(LENGTH, LENGTH)
    with pytest.raises(ValueError, match="finer blocks of keys"):
        sparse_attention(q, k, v, **VIDEO, block_size=pair, precision=precision, backend="hopper")
