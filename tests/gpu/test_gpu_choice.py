"""Which backend runs, and what it says where none can."""

import pytest
import torch

from helpers import gpu, oracle
from helpers.gpu import BACKENDS, BF16, CALL, FP16, FP32, LENGTH, RF_V2, same
from rainfusion import explain, sparse_attention

pytestmark = gpu.ON_GPU


@pytest.mark.parametrize(
    ("dtype", "dim"), [(BF16, 128), (BF16, 64), (FP16, 128), (FP32, 128), (BF16, 256), (BF16, 32)], ids=str
)
def test_auto_takes_the_fastest_that_can(dtype, dim):
    q, k, v = gpu.qkv(dim=dim, dtype=dtype)
    chosen, result = gpu.chosen_backend(q, k, v, **CALL, return_lse=True)
    if gpu.must_run("hopper", dtype, dim):
        assert chosen == "hopper"
    elif dtype == FP32:
        assert chosen == "triton"
    assert chosen in BACKENDS  # never the slow one on a GPU
    assert same(result, sparse_attention(q, k, v, **CALL, return_lse=True, backend=chosen))


def test_auto_runs_dense_where_that_is_faster_and_says_so():
    q, k, v = gpu.qkv(1000)
    assert explain(q, k, v, **RF_V2).startswith("runs with torch's attention: dense attention is expected to be faster")
    assert same(sparse_attention(q, k, v, **RF_V2), sparse_attention(q, k, v))
    assert "torch's" not in explain(q, k, v, **RF_V2, return_mask=True)
    long = torch.randn(1, 8, 32768, 128, dtype=BF16, device=gpu.DEVICE)
    assert explain(long, long, long, **RF_V2).startswith("runs with 'hopper'")


@pytest.mark.parametrize(
    ("dtype", "dim", "kwargs", "reason"),
    [
        (torch.float64, 64, {}, "float64"),
        (BF16, 320, {}, "head dim.*320"),
        (FP32, 128, dict(precision="fp8"), "fp8|float32"),
        (BF16, 320, dict(precision="int8"), "int8|head dim.*320"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_an_error_that_says_why(backend, dtype, dim, kwargs, reason):
    q, k, v = gpu.qkv(dim=dim, dtype=dtype)
    with pytest.raises(ValueError, match=f"{backend}.*({reason}|compute capability)"):
        sparse_attention(q, k, v, **CALL, backend=backend, **kwargs)


def test_a_float64_call_still_runs():
    q, k, v = gpu.qkv(dim=16, dtype=torch.float64)
    with gpu.at_ease():
        out, mask = sparse_attention(q, k, v, **CALL, return_mask=True)
        exact, _ = oracle.attention(q, k, v, gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, CALL))
        assert gpu.distances(out, exact)[0] < 1e-12
