"""The calls that are measured: synthetic q, k and v for a named shape, and the arguments that go with them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from rainfusion.bench import synthetic
from rainfusion.bench.shapes import Shape
from rainfusion.options import RECOMMENDED

_DISTINCT_HEADS = 4  # heads that are made on the CPU; on a GPU the others are these with other noise, which is quick
_NOISE = 0.1

Strategy = Literal["rf_v2", "ada_bsa"]
SparseType = Literal["rf_v2", "ada_bsa", "enable"]  # the last: rf_v2 with the options that `enable` has
Precision = Literal["native", "fp8", "int8"]


def attention_inputs(
    shape: Shape, *, batch: int, heads: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Synthetic q, k and v [batch, heads, S, D] for a shape."""
    if device.type != "cuda":
        parts = [_one(shape, heads, dtype, device, seed + b) for b in range(batch)]
        q, k, v = (torch.cat(part) for part in zip(*parts, strict=True))
        return q, k, v
    few = min(heads, _DISTINCT_HEADS)
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (_spread(x[0], batch, heads, generator) for x in _one(shape, few, dtype, device, seed))
    return q, k, v


@lru_cache(maxsize=1)  # a sweep over sparsities has the same inputs every time, and nobody writes into them
def _one(shape: Shape, heads: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    if shape.latent_shape is None:
        return synthetic.tokens_qkv(shape.tokens, heads, shape.head_dim, seed=seed, dtype=dtype, device=device)
    latent = synthetic.video_latent(shape.latent_shape, seed=seed)
    return synthetic.video_qkv(
        latent, heads, shape.head_dim, txt_len=shape.txt_len, seed=seed, dtype=dtype, device=device
    )


def _spread(x: Tensor, batch: int, heads: int, generator: torch.Generator) -> Tensor:
    """Repeats a few heads [few, S, D] to [batch, heads, S, D], with noise on all but the first few."""
    few = x.shape[0]
    out = x.new_empty((batch, heads, *x.shape[1:]))
    for number, part in enumerate(out.view(batch * heads, *x.shape[1:])):
        part.copy_(x[number % few])
        if number >= few:
            part.add_(torch.randn(part.shape, generator=generator, device=x.device, dtype=x.dtype), alpha=_NOISE)
    return out


def call_arguments(shape: Shape, sparse_type: SparseType, sparsity: float) -> dict[str, Any]:
    """Keywords of `sparse_attention` for a shape, beside the tensors."""
    if sparse_type == "enable":
        return {**call_arguments(shape, "rf_v2", sparsity), **RECOMMENDED}
    arguments: dict[str, Any] = dict(sparse_type=sparse_type, sparsity=sparsity)
    if sparse_type == "rf_v2":
        latent = None if shape.latent_shape is None else list(shape.latent_shape)
        arguments.update(latent_shape_q=latent, latent_shape_k=latent, txt_len=shape.txt_len)
    return arguments
