"""Calls of the `triton` backend, on the GPU where there is one, else under Triton's interpreter (see conftest.py)."""

import math
import sys

import pytest
import torch

from rainfusion import sparse_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARKS = [
    pytest.mark.timeout(1800),  # the interpreter is slow
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only"),
    # the interpreter's: log2(0), inf - inf, NaN as an integer; int() of an array of one number
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore:Conversion of an array:DeprecationWarning"),
]


def attend(q, k, v, attn_mask=None, **kwargs):
    """-> out, lse and mask, computed on the device and brought to the CPU."""
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    attn_mask = None if attn_mask is None else attn_mask.to(DEVICE)
    kwargs = dict(dict(backend="triton", return_lse=True, return_mask=True), **kwargs)
    out, lse, mask = sparse_attention(q, k, v, attn_mask, **kwargs)
    assert (out.dtype, out.shape, lse.dtype) == (q.dtype, q.shape, torch.float32)
    return out.cpu(), lse.cpu(), mask.to("cpu")


def key_mask(kind, batch, k_len):
    """Every other key or so, and whole blocks without one."""
    if kind is None:
        return None
    keep = torch.rand(batch, k_len) < 0.6
    keep[0, k_len // 4 : k_len // 4 + 140] = False
    return keep if kind == "bool" else torch.randn(batch, 1, 1, k_len).masked_fill(~keep[:, None, None], -1e4)


def same(mask, other):
    return torch.equal(mask.counts.cpu(), other.counts) and torch.equal(mask.indices.cpu(), other.indices)


def surrounded(x, by=8):
    """x in the midst of NaN, so that a read past an edge shows. Rows of 8 channels more are read where they are."""
    batch, heads, length, dim = x.shape
    large = torch.full((batch, heads + 1, length + 5, dim + 2 * by), math.nan, dtype=x.dtype, device=x.device)
    large[:, :heads, 2 : length + 2, by : dim + by] = x
    return large[:, :heads, 2 : length + 2, by : dim + by]
