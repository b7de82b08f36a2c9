"""The door: checks the arguments, then runs the pipeline.

    q, k, v --layout--> reorder --> pool --> score --> select --> attend --> restore --> out

`_pipeline` is that line. It is one custom op, so `torch.compile` sees a single opaque node and `meta` tensors have
shapes. Inside there is one tensor layout, [B, H, S, D]; a BSND caller's tensors are transposed views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion import arguments, backends
from rainfusion.arguments import Options, VideoSpan
from rainfusion.blockmask import BlockMask
from rainfusion.layout import TokenLayout, cached_layout
from rainfusion.pooling import block_means, live_blocks
from rainfusion.predictors import antidiagonal_mass, mean_scores
from rainfusion.selection import keep_best, keep_mass


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    head_num: int | None = None,
    input_layout: str = "BNSD",
    inner_precise: int = 0,
    sparse_type: str | None = None,
    txt_len: int = 0,
    block_size: int = 128,
    latent_shape_q: Sequence[int] | None = None,
    latent_shape_k: Sequence[int] | None = None,
    keep_sink: bool = True,
    keep_recent: bool = True,
    cdf_threshold: float = 1.0,
    sparsity: float = 0.0,
    *,
    video_spans: Sequence[VideoSpan] | None = None,
    precision: str = "native",
    token_order: str | Sequence[int] = "window",
    mask: BlockMask | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_mask: bool = False,
) -> Any:
    """softmax(scale * q k^T + bias) v over the key blocks that matter, for inference.

    Args:
        q, k, v: `[B, N, S, D]` or, with `input_layout="BSND"`, `[B, S, N, D]`; fp16, bf16, fp32 or fp64, any strides.
            k and v may have fewer heads (GQA) and another length than q.
        attn_mask: key mask `[B, Sk]` or `[B, 1, 1, Sk]` in the caller's token order: bool (True = attend) or an
            additive float, which removes a key at -1e4 or less.
        scale: of the logits, `D ** -0.5` by default.
        is_causal: with `sparse_type` None or `"ada_bsa"`, and q and k of one length.
        head_num: q's heads, checked when given.
        inner_precise: 0 for fp32 softmax and accumulation, 1 for the backend's fastest arithmetic in the same dtype.
        sparse_type: None (dense), `"rf_v2"` (also called `"rf_v3"`) or `"ada_bsa"`.
        txt_len: rf_v2: the first `txt_len` tokens of q and of k are text, which is never dropped.
        block_size: 128, or 64 with rf_v2.
        latent_shape_q, latent_shape_k: rf_v2: the grid `[t, h, w]` of the tokens after the text. None keeps the
            caller's order and protects no first frame.
        keep_sink, keep_recent: ada_bsa: always keep the first block; the diagonal (causal) or last one.
        cdf_threshold: ada_bsa: the share of the predicted attention mass to keep, in (0, 1].
        sparsity: the share of key blocks to skip, 0 to 1. Start from 0.6 for images, 0.8 for video.
        video_spans: rf_v2: several clips, `[{"start": 0, "latent_shape": [t, h, w]}, ...]`; all other tokens are
            context that is never dropped.
        precision: `"native"`; `"fp8"` and `"int8"` where a backend has quantised kernels.
        token_order: rf_v2: `"window"`, a window `(wt, wh, ww)`, `"mindiesd"` or `"raster"`.
        mask: a `BlockMask` to use instead of predicting one; `sparsity` is then ignored.
        backend: `"auto"`, `"portable"` or `"reference"`.
        return_lse: also return the log-sum-exp of the logits, fp32 `[B, N, Sq]`; -inf for fully masked rows.
        return_mask: also return the `BlockMask`.

    Returns:
        `out` in q's shape and layout, then `lse`, then `mask`, as asked for.
    """
    q, k, v = arguments.tensors(q, k, v, input_layout, head_num)
    options = arguments.options(
        q, k, scale=scale, is_causal=is_causal, inner_precise=inner_precise, sparse_type=sparse_type, txt_len=txt_len,
        block_size=block_size, latent_shape_q=latent_shape_q, latent_shape_k=latent_shape_k, keep_sink=keep_sink,
        keep_recent=keep_recent, cdf_threshold=cdf_threshold, sparsity=sparsity, video_spans=video_spans,
        token_order=token_order, predicts=mask is None,
    )  # fmt: skip
    return_lse, return_mask = arguments.flag("return_lse", return_lse), arguments.flag("return_mask", return_mask)
    if mask is not None:
        arguments.block_mask(mask, q, k, options.block_size)
    keep, bias = arguments.key_mask(attn_mask, q, k)
    runner = backends.choose(backend, precision, q, k, v, mask)

    if mask is not None or options.strategy != "dense":
        out, lse, mask = _run(q, k, v, keep, bias, mask, options, runner, return_lse, return_mask)
    else:
        if backend == "auto" and not return_lse and _sdpa_can(options, keep):
            out, lse = _sdpa(q, k, v, keep, bias, options), None
        else:  # in blocks of 128 whatever the mask's blocks are: dense attention is the same to the last bit
            out, lse, _ = _run(q, k, v, keep, bias, None, options._replace(block_size=128), runner, return_lse, False)
        mask = full_mask(q, k, options) if return_mask else None
    out = out.transpose(1, 2) if input_layout == "BSND" else out
    if not (return_lse or return_mask):
        return out
    return (out, *([lse] if return_lse else []), *([mask] if return_mask else []))


def predict_mask(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    head_num: int | None = None,
    input_layout: str = "BNSD",
    inner_precise: int = 0,
    sparse_type: str | None = None,
    txt_len: int = 0,
    block_size: int = 128,
    latent_shape_q: Sequence[int] | None = None,
    latent_shape_k: Sequence[int] | None = None,
    keep_sink: bool = True,
    keep_recent: bool = True,
    cdf_threshold: float = 1.0,
    sparsity: float = 0.0,
    *,
    video_spans: Sequence[VideoSpan] | None = None,
    precision: str = "native",
    token_order: str | Sequence[int] = "window",
    backend: str = "auto",
) -> BlockMask:
    """The mask that `sparse_attention` would use: one per query head, over blocks of reordered tokens.

    The arguments are those of `sparse_attention`. With `sparse_type=None` the mask is full, or block-causal.
    """
    q, k, _ = arguments.tensors(q, k, k, input_layout, head_num)
    options = arguments.options(
        q, k, scale=scale, is_causal=is_causal, inner_precise=inner_precise, sparse_type=sparse_type, txt_len=txt_len,
        block_size=block_size, latent_shape_q=latent_shape_q, latent_shape_k=latent_shape_k, keep_sink=keep_sink,
        keep_recent=keep_recent, cdf_threshold=cdf_threshold, sparsity=sparsity, video_spans=video_spans,
        token_order=token_order, predicts=True,
    )  # fmt: skip
    keep, _ = arguments.key_mask(attn_mask, q, k)
    backends.choose(backend, precision, q, k, k, None)
    counts, indices = _predict_op(q, k, keep, *options)
    return BlockMask(counts, indices, options.block_size, q.shape[2], k.shape[2])


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    input_layout: str = "BNSD",
    *,
    backend: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Attention over the blocks of `mask`, in the order that the tokens have: nothing is predicted or reordered.

    Returns `out`, or `(out, lse)` with `return_lse`. The other arguments are those of `sparse_attention`.
    """
    q, k, v = arguments.tensors(q, k, v, input_layout, None)
    arguments.block_mask(mask, q, k, None)
    options = arguments.options(q, k, scale=scale, is_causal=is_causal, block_size=mask.block_size, predicts=False)
    return_lse = arguments.flag("return_lse", return_lse)
    keep, bias = arguments.key_mask(attn_mask, q, k)
    runner = backends.choose(backend, "native", q, k, v, mask)
    out, lse, _ = _run(q, k, v, keep, bias, mask, options, runner, return_lse, False)
    out = out.transpose(1, 2) if input_layout == "BSND" else out
    return (out, lse) if return_lse else out


# ---------------------------------------------------------------------------------------------------------------------
# the pipeline, on [B, H, S, D] and checked arguments


@torch.library.custom_op("rainfusion::sparse_attention", mutates_args=())
def _pipeline(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    indices: Tensor | None,
    runner: str,
    return_lse: bool,
    return_mask: bool,
    scale: float,
    is_causal: bool,
    inner_precise: int,
    strategy: str,
    sparsity: float,
    cdf_threshold: float,
    keep_sink: bool,
    keep_recent: bool,
    block_size: int,
    txt_len: int,
    latent_q: list[int],
    latent_k: list[int],
    video_spans: list[int],
    token_order: str,
    window: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> out, lse, counts, indices; the last three are empty where they were not asked for."""
    options = Options(
        scale, is_causal, inner_precise, strategy, sparsity, cdf_threshold, keep_sink, keep_recent, block_size,
        txt_len, latent_q, latent_k, video_spans, token_order, window,
    )  # fmt: skip
    q_layout, k_layout = layouts(q, k, options)
    if counts is None or indices is None:
        mask = predict(q, k, keep, options, q_layout, k_layout)
    else:
        mask = BlockMask(counts, indices, block_size)
        mask.check_values()
    out, lse = backends.BACKENDS[runner].attend(
        q, k, v, mask, q_layout, k_layout,
        keep=keep, bias=bias, scale=scale, is_causal=is_causal, inner_precise=inner_precise, return_lse=return_lse,
    )  # fmt: skip
    lse = q.new_empty(0, dtype=torch.float32) if lse is None else lse
    if not return_mask:
        return out, lse, mask.counts.new_empty(0), mask.counts.new_empty(0)
    return out, lse, mask.counts, mask.indices


@_pipeline.register_fake
def _(q, k, v, keep, bias, counts, indices, runner, return_lse, return_mask, *options):  # type: ignore[no-untyped-def]
    lse = q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)
    if return_mask:
        return torch.empty_like(q), lse, *_fake_mask(q, k, Options(*options).block_size)
    return torch.empty_like(q), lse, *(q.new_empty(0, dtype=torch.int32) for _ in range(2))


def layouts(q: Tensor, k: Tensor, options: Options) -> tuple[TokenLayout, TokenLayout]:
    q_spec, k_spec = options.layout_specs(q.shape[2], k.shape[2])
    return cached_layout(q_spec, q.device), cached_layout(k_spec, k.device)


def predict(
    q: Tensor, k: Tensor, keep: Tensor | None, options: Options, q_layout: TokenLayout, k_layout: TokenLayout
) -> BlockMask:
    """pool -> score -> select."""
    if options.strategy == "dense" or 0 in (*q.shape, *k.shape):
        return full_mask(q, k, options)
    live = None if keep is None else live_blocks(k_layout, keep)
    if options.strategy == "rf_v2":
        q_means, k_means = block_means(q, q_layout), block_means(k, k_layout, keep)
        scores = mean_scores(q_means, k_means, options.scale, live)
        dense = keep_best(scores, options.sparsity, q_layout.protected, k_layout.protected)
    else:
        mass = antidiagonal_mass(q, k, options.scale, keep, options.is_causal)
        dense = keep_mass(
            mass, options.sparsity, options.cdf_threshold,
            keep_sink=options.keep_sink, keep_recent=options.keep_recent, is_causal=options.is_causal, live=live,
        )  # fmt: skip
    return BlockMask.from_dense(dense, options.block_size)


def full_mask(q: Tensor, k: Tensor, options: Options) -> BlockMask:
    batch, heads, q_len, _ = q.shape
    return BlockMask.full(
        batch, heads, q_len, k.shape[2],
        block_size=options.block_size, is_causal=options.is_causal, device=q.device,
    )  # fmt: skip


@torch.library.custom_op("rainfusion::predict_mask", mutates_args=())
def _predict_op(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    scale: float,
    is_causal: bool,
    inner_precise: int,
    strategy: str,
    sparsity: float,
    cdf_threshold: float,
    keep_sink: bool,
    keep_recent: bool,
    block_size: int,
    txt_len: int,
    latent_q: list[int],
    latent_k: list[int],
    video_spans: list[int],
    token_order: str,
    window: list[int],
) -> tuple[Tensor, Tensor]:
    """-> counts, indices."""
    options = Options(
        scale, is_causal, inner_precise, strategy, sparsity, cdf_threshold, keep_sink, keep_recent, block_size,
        txt_len, latent_q, latent_k, video_spans, token_order, window,
    )  # fmt: skip
    mask = predict(q, k, keep, options, *layouts(q, k, options))
    return mask.counts, mask.indices


@_predict_op.register_fake
def _(q, k, keep, *options):  # type: ignore[no-untyped-def]
    return _fake_mask(q, k, Options(*options).block_size)


def _fake_mask(q: Tensor, k: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    rows, columns = -(-q.shape[2] // block_size), -(-k.shape[2] // block_size)
    shape = (q.shape[0], q.shape[1], rows)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty((*shape, columns), dtype=torch.int32)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    mask: BlockMask | None,
    options: Options,
    runner: str,
    return_lse: bool,
    return_mask: bool,
) -> tuple[Tensor, Tensor, BlockMask | None]:
    """The pipeline with a BlockMask on either side of the op, which knows tensors only."""
    given = (None, None) if mask is None else (mask.counts, mask.indices)
    predicts = return_mask and mask is None
    out, lse, counts, indices = _pipeline(q, k, v, keep, bias, *given, runner, return_lse, predicts, *options)
    if predicts:
        mask = BlockMask(counts, indices, options.block_size, q.shape[2], k.shape[2])
    return out, lse, mask


# ---------------------------------------------------------------------------------------------------------------------
# dense attention is torch's own


def _sdpa_can(options: Options, keep: Tensor | None) -> bool:
    """torch's function takes either a mask or `is_causal`, and `is_causal` gives NaN on a CPU if scale <= 0."""
    return not options.is_causal or (keep is None and options.scale > 0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, options: Options) -> Tensor:
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if keep is None:
        return F.scaled_dot_product_attention(q, k, v, scale=options.scale, is_causal=options.is_causal, **grouped)
    removed = ~keep[:, None, :, None]  # [B, 1, Sk, 1]
    k, v = k.masked_fill(removed, 0.0), v.masked_fill(removed, 0.0)  # a removed key may hold anything, NaN too
    logit_bias = torch.zeros_like(keep, dtype=q.dtype) if bias is None else bias.to(q.dtype)
    logit_bias = logit_bias.masked_fill(~keep, -torch.inf)[:, None, None, :]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=logit_bias, scale=options.scale, **grouped)
    return out.masked_fill(~keep.any(-1)[:, None, None, None], 0.0)  # fully masked: 0 on every device
