"""The door: the public functions check their arguments here, turn [B, S, N, D] into views, and hand over.

arguments -> checked Options      what came, in one plain form
backends  -> who attends          the fastest that can, or the one asked for
ops       -> pipeline             reorder, pool, score, select, attend, restore: one node for torch.compile
crossover -> dense instead        where that is faster, and nothing but the output is wanted
dense     -> torch's attention    where nothing is skipped
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rainfusion import backends, checks, ops
from rainfusion.backends import crossover, dense
from rainfusion.blockmask import BlockMask
from rainfusion.checks import Options, VideoSpan
from rainfusion.pipeline import full_mask


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
    sparsity: float | Sequence[float] = 0.0,
    *,
    video_spans: Sequence[VideoSpan] | None = None,
    precision: str = "native",
    token_order: str | Sequence[int] = "window",
    predictor: str = "mean",
    compensate: bool = False,
    first_frame: str = "protected",
    exact_budget: bool = False,
    target_error: float | None = None,
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
        sparsity: the share of key blocks to skip, 0 to 1. Start from 0.6 for images, 0.8 for video. rf_v2 also takes
            one for each query head.
        video_spans: rf_v2: several clips, `[{"start": 0, "latent_shape": [t, h, w]}, ...]`; all other tokens are
            context that is never dropped.
        precision: `"native"`; `"fp8"` (e4m3) and `"int8"` (q and k; p and v e4m3) on Hopper GPUs.
        token_order: rf_v2: `"window"`, a window `(wt, wh, ww)`, `"mindiesd"` or `"raster"`.
        predictor: rf_v2: `"mean"`, one mean for each block, or `"submeans"`, four, between which attention is
            predicted.
        compensate: blocks that are skipped count through their mean key and mean value, in the softmax and in the LSE.
        first_frame: rf_v2, of a video: `"protected"`, it attends to everything and everything to it; `"keys"`, its
            keys are never dropped; `"free"`, it is like the other frames.
        exact_budget: rf_v2: protected blocks count in `sparsity` too, so that about 1 - sparsity of all is computed
            (never fewer than the protected ones and one more a row).
        target_error: rf_v2: instead of `sparsity`, the error |out - dense| / |dense| to allow in each head; a sample
            of dense rows says how many blocks that takes.
        mask: a `BlockMask` to use instead of predicting one, from a call with the same layout arguments; `sparsity` is
            then ignored.
        backend: `"auto"`: the fastest that can, torch's dense attention where that is faster and only the output is
            asked for (`explain` says which and why); or `"hopper"`, `"triton"`, `"portable"`, `"reference"`.
        return_lse: also return the log-sum-exp of the logits, fp32 `[B, N, Sq]`; -inf for fully masked rows.
        return_mask: also return the `BlockMask`.

    Returns:
        `out` in q's shape and layout, then `lse`, then `mask`, as asked for.
    """
    q, k, v = checks.tensors(input_layout, head_num, q=q, k=k, v=v)
    options = checks.options(
        q, k, scale=scale, is_causal=is_causal, inner_precise=inner_precise, precision=precision,
        sparse_type=sparse_type, txt_len=txt_len, block_size=block_size, latent_shape_q=latent_shape_q,
        latent_shape_k=latent_shape_k, keep_sink=keep_sink,
        keep_recent=keep_recent, cdf_threshold=cdf_threshold, sparsity=sparsity, video_spans=video_spans,
        token_order=token_order, predictor=predictor, compensate=compensate, first_frame=first_frame,
        exact_budget=exact_budget, target_error=target_error, predicts=mask is None,
    )  # fmt: skip
    return_lse, return_mask = checks.flag("return_lse", return_lse), checks.flag("return_mask", return_mask)
    if mask is not None:
        checks.block_mask(mask, q, k, options.block_size)
    runner = backends.choose(backend, q, k, v, mask, _attended(options, mask))
    keep, bias = checks.key_mask(attn_mask, q, k)

    if options.strategy != "dense" or mask is not None:
        only_out = backend == "auto" and mask is None and not (return_lse or return_mask)
        out, lse, mask = ops.sparse_attention(
            q, k, v, keep, bias, mask, options, runner, only_out, return_lse, return_mask
        )
    else:
        if backend == "auto" and not return_lse and dense.why_not(q, keep, bias, options) is None:
            out, lse = dense.attend(q, k, v, keep, bias, options), None
        else:
            whole = _attended(options, None)
            out, lse, _ = ops.sparse_attention(q, k, v, keep, bias, None, whole, runner, False, return_lse, False)
        mask = full_mask(q, k, options) if return_mask else None
    out = out.transpose(1, 2) if input_layout == "BSND" else out
    if not (return_lse or return_mask):
        return out
    return (out, *([lse] if return_lse else []), *([mask] if return_mask else []))


def explain(*args: Any, **kwargs: Any) -> str:
    """How `sparse_attention` with these arguments would run, and why not faster: one line each. Computes nothing.

    >>> import torch
    >>> q = torch.zeros(1, 2, 256, 64)
    >>> print(*explain(q, q, q, sparse_type="rf_v2", sparsity=0.5).splitlines()[:2], sep="\\n")
    runs with 'portable'
    not with 'hopper': it needs an NVIDIA GPU of compute capability 9.0 (H100, H200), found cpu tensors
    """
    bound = inspect.signature(sparse_attention).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    q, k, v = checks.tensors(given["input_layout"], given["head_num"], q=given["q"], k=given["k"], v=given["v"])
    names = inspect.signature(checks.options).parameters.keys() & given.keys() - {"q", "k"}
    mask, name = given["mask"], given["backend"]
    options = checks.options(q, k, predicts=mask is None, **{n: given[n] for n in names})
    runner = backends.choose(name, q, k, v, mask, _attended(options, mask))
    keep, bias = checks.key_mask(given["attn_mask"], q, k)
    plain = name == "auto" and mask is None and not (given["return_lse"] or given["return_mask"])
    slower = crossover.why_dense(runner, q, k, options) if plain and options.strategy != "dense" else None
    dense_runs = plain and (options.strategy == "dense" or slower) and dense.why_not(q, keep, bias, options) is None
    if dense_runs:
        lines = [f"runs with torch's attention: {slower or 'nothing is to be skipped'}"]
    else:
        lines = [f"runs with {runner!r}"]
    for other in backends.FASTEST_FIRST:
        reason = None if other == runner else backends.why_not(other, q, k, v, mask, _attended(options, mask))
        if reason:
            lines.append(f"not with {other!r}: it {reason}")
    return "\n".join(lines)


def _attended(options: Options, mask: BlockMask | None) -> Options:
    """What attention itself is asked for: dense comes in blocks of 128, with the same bits at every block size."""
    dense_call = options.strategy == "dense" and mask is None
    return options._replace(block_size=128) if dense_call else options


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
    sparsity: float | Sequence[float] = 0.0,
    *,
    video_spans: Sequence[VideoSpan] | None = None,
    precision: str = "native",
    token_order: str | Sequence[int] = "window",
    predictor: str = "mean",
    compensate: bool = False,
    first_frame: str = "protected",
    exact_budget: bool = False,
    backend: str = "auto",
) -> BlockMask:
    """The mask that `sparse_attention` would use: one per query head, over blocks of reordered tokens.

    The arguments are those of `sparse_attention`, without `target_error`, which needs v. With `sparse_type=None` the
    mask is full, or block-causal.
    """
    q, k = checks.tensors(input_layout, head_num, q=q, k=k)
    options = checks.options(
        q, k, scale=scale, is_causal=is_causal, inner_precise=inner_precise, precision=precision,
        sparse_type=sparse_type, txt_len=txt_len, block_size=block_size, latent_shape_q=latent_shape_q,
        latent_shape_k=latent_shape_k, keep_sink=keep_sink,
        keep_recent=keep_recent, cdf_threshold=cdf_threshold, sparsity=sparsity, video_spans=video_spans,
        token_order=token_order, predictor=predictor, compensate=compensate, first_frame=first_frame,
        exact_budget=exact_budget, predicts=True,
    )  # fmt: skip
    runner = backends.choose(backend, q, k, k, None, options)
    keep, _ = checks.key_mask(attn_mask, q, k)
    return ops.predict_mask(q, k, keep, options, runner)


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
    q, k, v = checks.tensors(input_layout, None, q=q, k=k, v=v)
    checks.block_mask(mask, q, k, None)
    options = checks.options(q, k, scale=scale, is_causal=is_causal, block_size=mask.block_size, predicts=False)
    return_lse = checks.flag("return_lse", return_lse)
    runner = backends.choose(backend, q, k, v, mask, options)
    keep, bias = checks.key_mask(attn_mask, q, k)
    out, lse, _ = ops.sparse_attention(q, k, v, keep, bias, mask, options, runner, False, return_lse, False)
    out = out.transpose(1, 2) if input_layout == "BSND" else out
    return (out, lse) if return_lse else out
