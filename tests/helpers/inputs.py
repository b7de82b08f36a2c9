"""Random inputs on the CPU. They are drawn in float64 and rounded, so that every dtype sees the same numbers."""

import torch


def randn(*shape, dtype=torch.float32, seed=0):
    return _normal(shape, torch.Generator().manual_seed(seed), dtype)


def qkv(batch, heads, q_len, dim, *, k_heads=None, k_len=None, dtype=torch.float32, seed=0):
    """q [B, H, Sq, D], k and v [B, Hk, Sk, D]; keys have as many heads and tokens as queries unless told otherwise."""
    generator = torch.Generator().manual_seed(seed)
    k_shape = (batch, k_heads or heads, q_len if k_len is None else k_len, dim)
    return tuple(_normal(shape, generator, dtype) for shape in ((batch, heads, q_len, dim), k_shape, k_shape))


def _normal(shape, generator, dtype):
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
