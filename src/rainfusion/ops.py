"""The pipeline as custom ops: `torch.compile` sees one opaque node, and `meta` tensors have shapes.

An op knows tensors and numbers only, so a `BlockMask` crosses as counts and indices, and `Options` as its fields.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rainfusion import pipeline
from rainfusion.autocast import own_precision
from rainfusion.blockmask import BlockMask
from rainfusion.checks import Options

_OPTIONS = (
    "float scale, bool is_causal, SymInt inner_precise, str precision, str strategy, str predictor, bool compensate, "
    "float sparsity, float[] head_sparsity, float target_error, bool exact_budget, str first_frame, "
    "float cdf_threshold, bool keep_sink, bool keep_recent, SymInt block_size, SymInt txt_len, SymInt[] latent_q, "
    "SymInt[] latent_k, SymInt[] video_spans, str token_order, SymInt[] window"
)  # the fields of Options, in their order


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    mask: BlockMask | None,
    options: Options,
    runner: str,
    may_be_dense: bool,
    return_lse: bool,
    return_mask: bool,
) -> tuple[Tensor, Tensor, BlockMask | None]:
    """-> out, lse (empty unless asked for), and the mask: the given one, or the predicted one if asked for."""
    given = (None, None) if mask is None else (mask.counts, mask.indices)
    wanted = return_mask and mask is None
    out, lse, counts, indices = _sparse_attention(
        q, k, v, keep, bias, *given, runner, may_be_dense, return_lse, wanted, *options
    )
    return out, lse, _block_mask(q, k, counts, indices, options) if wanted else mask


def predict_mask(q: Tensor, k: Tensor, keep: Tensor | None, options: Options, runner: str) -> BlockMask:
    counts, indices = _predict_mask(q, k, keep, runner, *options)
    return _block_mask(q, k, counts, indices, options)


def _block_mask(q: Tensor, k: Tensor, counts: Tensor, indices: Tensor, options: Options) -> BlockMask:
    return BlockMask(counts, indices, options.block_size, q.shape[2], k.shape[2])


@torch.library.custom_op(
    "rainfusion::sparse_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? bias, Tensor? counts, Tensor? indices, str runner, "
    f"bool may_be_dense, bool return_lse, bool return_mask, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    indices: Tensor | None,
    runner: str,
    may_be_dense: bool,
    return_lse: bool,
    return_mask: bool,
    *fields: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> out, lse, counts, indices; empty tensors for what was not asked for."""
    options = Options(*fields)
    given = None if counts is None or indices is None else BlockMask(counts, indices, options.block_size)
    with own_precision(q.device):
        out, lse, mask = pipeline.attend(q, k, v, keep, bias, given, options, runner, may_be_dense, return_lse)
    lse = q.new_empty(0, dtype=torch.float32) if lse is None else lse
    if return_mask and mask is not None:
        return out, lse, mask.counts, mask.indices
    return out, lse, q.new_empty(0, dtype=torch.int32), q.new_empty(0, dtype=torch.int32)


@_sparse_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Any, keep: Any, bias: Any, counts: Any, indices: Any, runner: str,
    may_be_dense: bool, return_lse: bool, return_mask: bool, *fields: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    lse = q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)
    if return_mask:
        return torch.empty_like(q), lse, *_fake_mask(q, k, Options(*fields))
    return torch.empty_like(q), lse, *(q.new_empty(0, dtype=torch.int32) for _ in range(2))


@torch.library.custom_op(
    "rainfusion::predict_mask",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor? keep, str runner, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _predict_mask(q: Tensor, k: Tensor, keep: Tensor | None, runner: str, *fields: Any) -> tuple[Tensor, Tensor]:
    """-> counts, indices."""
    options = Options(*fields)
    with own_precision(q.device):
        mask = pipeline.predict(q, k, keep, options, *pipeline.layouts(q, k, options), runner)
    return mask.counts, mask.indices


@_predict_mask.register_fake
def _(q: Tensor, k: Tensor, keep: Any, runner: str, *fields: Any) -> tuple[Tensor, Tensor]:
    return _fake_mask(q, k, Options(*fields))


def _fake_mask(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """counts and indices without contents."""
    rows, columns = (-(-x.shape[2] // options.block_size) for x in (q, k))
    shape = (q.shape[0], q.shape[1], rows)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty((*shape, columns), dtype=torch.int32)
