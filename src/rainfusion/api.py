"""The door: the public functions, each of them check -> ask -> plan -> run.

checks, options, geometry   what came, in one plain form
planning                    what will run, and why not something faster
ops, pipeline               reorder, pool, score, select, attend, restore: one node for torch.compile
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from rainfusion import ops, planning
from rainfusion.blockmask import BlockMask
from rainfusion.calls import Attended
from rainfusion.geometry import VideoSpan
from rainfusion.options import FirstFrame, InputLayout, Method, Precision, Predictor, SparseType, TokenOrder
from rainfusion.planning import CallOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    head_num: int | None = None,
    input_layout: InputLayout = "BNSD",
    inner_precise: int = 0,
    sparse_type: SparseType | None = None,
    txt_len: int = 0,
    block_size: int | tuple[int, int] = 128,
    latent_shape_q: Sequence[int] | None = None,
    latent_shape_k: Sequence[int] | None = None,
    keep_sink: bool = True,
    keep_recent: bool = True,
    cdf_threshold: float = 1.0,
    sparsity: float | Sequence[float] | None = 0.0,
    *,
    video_spans: Sequence[VideoSpan] | None = None,
    precision: Precision = "native",
    token_order: TokenOrder | Sequence[int] = "window",
    predictor: Predictor = "mean",
    compensate: bool = False,
    first_frame: FirstFrame = "protected",
    exact_budget: bool = False,
    target_error: float | None = None,
    method: Method | None = None,
    mask: BlockMask | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
    return_mask: Literal[False] = False,
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, input_layout: InputLayout = "BNSD",
    mask: BlockMask | None = None, return_lse: Literal[True], return_mask: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, input_layout: InputLayout = "BNSD",
    mask: BlockMask | None = None, return_lse: Literal[False] = False, return_mask: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, BlockMask]: ...  # fmt: skip


@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, input_layout: InputLayout = "BNSD",
    mask: BlockMask | None = None, return_lse: Literal[True], return_mask: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor, BlockMask]: ...  # fmt: skip


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    head_num: int | None = None,
    input_layout: InputLayout = "BNSD",
    inner_precise: int = 0,
    sparse_type: SparseType | None = None,
    txt_len: int = 0,
    block_size: int | tuple[int, int] = 128,
    latent_shape_q: Sequence[int] | None = None,
    latent_shape_k: Sequence[int] | None = None,
    keep_sink: bool = True,
    keep_recent: bool = True,
    cdf_threshold: float = 1.0,
    sparsity: float | Sequence[float] | None = 0.0,
    *,
    video_spans: Sequence[VideoSpan] | None = None,
    precision: Precision = "native",
    token_order: TokenOrder | Sequence[int] = "window",
    predictor: Predictor = "mean",
    compensate: bool = False,
    first_frame: FirstFrame = "protected",
    exact_budget: bool = False,
    target_error: float | None = None,
    method: Method | None = None,
    mask: BlockMask | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_mask: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, BlockMask] | tuple[Tensor, Tensor, BlockMask]:
    """softmax(scale * q k^T + bias) v over the key blocks that matter, for inference.

    Args:
        q: queries `[B, N, S, D]` or, with `input_layout="BSND"`, `[B, S, N, D]`; fp16, bf16, fp32 or fp64, any strides.
        k: keys, in q's layout and dtype. They may have fewer heads (GQA) and another length than q.
        v: values, of k's shape.
        attn_mask: key mask `[B, Sk]` or `[B, 1, 1, Sk]` in the caller's token order: bool (True = attend) or an
            additive float, which removes a key at -1e4 or less.
        scale: of the logits, `D ** -0.5` by default.
        is_causal: with `sparse_type` None or `"ada_bsa"`, and q and k of one length.
        head_num: q's heads, checked when given.
        input_layout: `"BNSD"` or `"BSND"`, of q, k, v and the result.
        inner_precise: 0 for fp32 softmax and accumulation, 1 for the backend's fastest arithmetic in the same dtype.
        sparse_type: None (dense), `"rf_v2"` (also called `"rf_v3"`) or `"ada_bsa"`.
        txt_len: rf_v2: the first `txt_len` tokens of q and of k are text, which is never dropped.
        block_size: tokens of a block: 128; 64 with rf_v2; or a pair `(queries, keys)`, see `Method`.
        latent_shape_q: rf_v2: the grid `[t, h, w]` of q's tokens after the text. None keeps the caller's order and
            protects no first frame.
        latent_shape_k: the same for k; where q and k have one length, one of the two serves both.
        keep_sink: ada_bsa: always keep the first block.
        keep_recent: ada_bsa: always keep the diagonal block (causal) or the last one.
        cdf_threshold: ada_bsa: the share of the predicted attention mass to keep, in (0, 1].
        sparsity: the share of key blocks to skip, 0 to 1. Start from 0.6 for images, 0.8 for video. rf_v2 also takes
            one for each query head; None is 0.6 for images, 0.8 for video (0.85 with blocks of 32 keys).
        video_spans: rf_v2: several clips, `[{"start": 0, "latent_shape": [t, h, w]}, ...]`; all other tokens are
            context that is never dropped.
        precision: `"native"`; `"int8"` (q and k), on NVIDIA GPUs from 8.0 on; `"fp8"` (e4m3), from 8.9 on; MI300 too.
        token_order: rf_v2: `"window"`, a window `(wt, wh, ww)`, `"mindiesd"` or `"raster"`.
        predictor: rf_v2: `"mean"`, one mean for each block; `"submeans"`, four, between which attention is predicted;
            or `"spread"`, by what is lost if the mean of a block stands for it.
        compensate: blocks that are skipped count through their mean key and mean value, in the softmax and in the LSE.
        first_frame: rf_v2, of a video: `"protected"`, it attends to everything and everything to it; `"keys"`, its
            keys are never dropped; `"free"`, it is like the other frames.
        exact_budget: rf_v2: protected blocks count in `sparsity` too, so that about 1 - sparsity of all is computed
            (never fewer than the protected ones and one more a row).
        target_error: rf_v2: instead of `sparsity`, the error |out - dense| / |dense| to allow in each head; a sample
            of dense rows says how many blocks that takes.
        method: all options of the method as one object, instead of those above: `Method.recommended(sparsity=0.8)`.
        mask: a `BlockMask` to use instead of predicting one, from a call whose tokens have the same order (one made for
            another is refused); `sparsity` is then ignored.
        backend: `"auto"`: the fastest that can, torch's dense attention where that is faster and only the output is
            asked for (`explain` says which and why); or `"hopper"`, `"triton"`, `"portable"`, `"reference"`.
        return_lse: also return the log-sum-exp of the logits, fp32 `[B, N, Sq]`; -inf for fully masked rows.
        return_mask: also return the `BlockMask`.

    Returns:
        `out` in q's shape and layout, then `lse`, then `mask`, as asked for.
    """
    inputs = planning.check(q, k, v, attn_mask, mask, input_layout=input_layout, head_num=head_num)
    call = planning.ask_flat(
        inputs,
        scale=scale,
        is_causal=is_causal,
        inner_precise=inner_precise,
        sparse_type=sparse_type,
        txt_len=txt_len,
        block_size=block_size,
        latent_shape_q=latent_shape_q,
        latent_shape_k=latent_shape_k,
        keep_sink=keep_sink,
        keep_recent=keep_recent,
        cdf_threshold=cdf_threshold,
        sparsity=sparsity,
        video_spans=video_spans,
        precision=precision,
        token_order=token_order,
        predictor=predictor,
        compensate=compensate,
        first_frame=first_frame,
        exact_budget=exact_budget,
        target_error=target_error,
        method=method,
        backend=backend,
        return_lse=return_lse,
        return_mask=return_mask,
    )
    out, lse, used = _in_layout(ops.attend(inputs, call), input_layout)
    if lse is not None and return_lse:
        return (out, lse, used) if used is not None and return_mask else (out, lse)
    return (out, used) if used is not None and return_mask else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    input_layout: InputLayout | None = None,
    mask: BlockMask | None = None,
    return_lse: bool = False,
    return_mask: bool = False,
    **options: Unpack[CallOptions],
) -> str:
    """How `sparse_attention` with these arguments would run, and why not faster: one line each. Computes nothing.

    It is the call itself up to its plan, so that the two cannot disagree.

    Args:
        q: queries, as for `sparse_attention`.
        k: keys.
        v: values.
        attn_mask: key mask.
        args: further arguments of `sparse_attention`, in its order.
        input_layout: `"BNSD"` or `"BSND"`; None, where it is not among `args`: `"BNSD"`.
        mask: a given `BlockMask`.
        return_lse: whether the log-sum-exp is wanted, which torch's attention does not give.
        return_mask: whether the mask is wanted.
        options: the other keywords of `sparse_attention`.

    Returns:
        lines of text: what runs, then why each faster backend does not.

    >>> import torch
    >>> q = torch.zeros(1, 2, 4096, 64)
    >>> print(*explain(q, q, q, sparse_type="rf_v2", sparsity=0.5).splitlines()[:2], sep="\\n")
    runs with 'portable'
    not with 'hopper': it needs an NVIDIA GPU of compute capability 9.0 (H100, H200), found cpu tensors
    """
    asked = dict(mask=mask, return_lse=return_lse, return_mask=return_mask, **options)
    if input_layout is not None:
        asked["input_layout"] = input_layout
    bound = _SIGNATURE.bind(q, k, v, attn_mask, *args, **asked)
    bound.apply_defaults()
    given = bound.arguments
    tensors = [given.pop(name) for name in ("q", "k", "v", "attn_mask", "mask")]
    inputs = planning.check(*tensors, input_layout=given.pop("input_layout"), head_num=given.pop("head_num"))
    return str(planning.plan(planning.ask_flat(inputs, **given), inputs.shapes))


_SIGNATURE = inspect.signature(sparse_attention)


def predict_mask(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    head_num: int | None = None,
    input_layout: InputLayout = "BNSD",
    inner_precise: int = 0,
    sparse_type: SparseType | None = None,
    txt_len: int = 0,
    block_size: int | tuple[int, int] = 128,
    latent_shape_q: Sequence[int] | None = None,
    latent_shape_k: Sequence[int] | None = None,
    keep_sink: bool = True,
    keep_recent: bool = True,
    cdf_threshold: float = 1.0,
    sparsity: float | Sequence[float] | None = 0.0,
    *,
    video_spans: Sequence[VideoSpan] | None = None,
    precision: Precision = "native",
    token_order: TokenOrder | Sequence[int] = "window",
    predictor: Predictor = "mean",
    compensate: bool = False,
    first_frame: FirstFrame = "protected",
    exact_budget: bool = False,
    method: Method | None = None,
    backend: str = "auto",
) -> BlockMask:
    """The mask that `sparse_attention` would use: one per query head, over blocks of reordered tokens.

    With `sparse_type=None` the mask is full, or block-causal. There is no `target_error`, which needs v.

    Args:
        q: queries `[B, N, S, D]` or, with `input_layout="BSND"`, `[B, S, N, D]`; fp16, bf16, fp32 or fp64, any strides.
        k: keys, in q's layout and dtype. They may have fewer heads (GQA) and another length than q.
        attn_mask: key mask `[B, Sk]` or `[B, 1, 1, Sk]` in the caller's token order: bool (True = attend) or an
            additive float, which removes a key at -1e4 or less.
        scale: of the logits, `D ** -0.5` by default.
        is_causal: with `sparse_type` None or `"ada_bsa"`, and q and k of one length.
        head_num: q's heads, checked when given.
        input_layout: `"BNSD"` or `"BSND"`, of q, k, v and the result.
        inner_precise: 0 for fp32 softmax and accumulation, 1 for the backend's fastest arithmetic in the same dtype.
        sparse_type: None (dense), `"rf_v2"` (also called `"rf_v3"`) or `"ada_bsa"`.
        txt_len: rf_v2: the first `txt_len` tokens of q and of k are text, which is never dropped.
        block_size: tokens of a block: 128; 64 with rf_v2; or a pair `(queries, keys)`, see `Method`.
        latent_shape_q: rf_v2: the grid `[t, h, w]` of q's tokens after the text. None keeps the caller's order and
            protects no first frame.
        latent_shape_k: the same for k; where q and k have one length, one of the two serves both.
        keep_sink: ada_bsa: always keep the first block.
        keep_recent: ada_bsa: always keep the diagonal block (causal) or the last one.
        cdf_threshold: ada_bsa: the share of the predicted attention mass to keep, in (0, 1].
        sparsity: the share of key blocks to skip, 0 to 1. Start from 0.6 for images, 0.8 for video. rf_v2 also takes
            one for each query head; None is 0.6 for images, 0.8 for video (0.85 with blocks of 32 keys).
        video_spans: rf_v2: several clips, `[{"start": 0, "latent_shape": [t, h, w]}, ...]`; all other tokens are
            context that is never dropped.
        precision: `"native"`; `"int8"` (q and k), on NVIDIA GPUs from 8.0 on; `"fp8"` (e4m3), from 8.9 on; MI300 too.
        token_order: rf_v2: `"window"`, a window `(wt, wh, ww)`, `"mindiesd"` or `"raster"`.
        predictor: rf_v2: `"mean"`, one mean for each block; `"submeans"`, four, between which attention is predicted;
            or `"spread"`, by what is lost if the mean of a block stands for it.
        compensate: blocks that are skipped count through their mean key and mean value, in the softmax and in the LSE.
        first_frame: rf_v2, of a video: `"protected"`, it attends to everything and everything to it; `"keys"`, its
            keys are never dropped; `"free"`, it is like the other frames.
        exact_budget: rf_v2: protected blocks count in `sparsity` too, so that about 1 - sparsity of all is computed
            (never fewer than the protected ones and one more a row).
        method: all options of the method as one object, instead of those above: `Method.recommended(sparsity=0.8)`.
        backend: `"auto"`: the fastest that can, torch's dense attention where that is faster and only the output is
            asked for (`explain` says which and why); or `"hopper"`, `"triton"`, `"portable"`, `"reference"`.

    Returns:
        the mask: it knows the lengths and the order it was made for.
    """
    inputs = planning.check(q, k, k, attn_mask, input_layout=input_layout, head_num=head_num)
    call = planning.ask_flat(
        inputs,
        scale=scale,
        is_causal=is_causal,
        inner_precise=inner_precise,
        sparse_type=sparse_type,
        txt_len=txt_len,
        block_size=block_size,
        latent_shape_q=latent_shape_q,
        latent_shape_k=latent_shape_k,
        keep_sink=keep_sink,
        keep_recent=keep_recent,
        cdf_threshold=cdf_threshold,
        sparsity=sparsity,
        video_spans=video_spans,
        precision=precision,
        token_order=token_order,
        predictor=predictor,
        compensate=compensate,
        first_frame=first_frame,
        exact_budget=exact_budget,
        method=method,
        backend=backend,
    )
    if call.method.target_error is not None:
        raise ValueError("target_error must be None: how many blocks it takes depends on v; use return_mask=True")
    return ops.predict_mask(inputs, call)


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, attn_mask: Tensor | None = None, scale: float | None = None,
    is_causal: bool = False, input_layout: InputLayout = "BNSD", *, backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, attn_mask: Tensor | None = None, scale: float | None = None,
    is_causal: bool = False, input_layout: InputLayout = "BNSD", *, backend: str = "auto", return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    input_layout: InputLayout = "BNSD",
    *,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the blocks of `mask`, in the order that the tokens have: nothing is predicted or reordered.

    Args:
        q: queries `[B, N, S, D]` or, with `input_layout="BSND"`, `[B, S, N, D]`.
        k: keys; they may have fewer heads (GQA) and another length than q.
        v: values, of k's shape.
        mask: the blocks. One that was predicted for a reordered sequence wants q, k and v in that order, see
            `TokenLayout.reorder`.
        attn_mask: key mask `[B, Sk]` or `[B, 1, 1, Sk]`, bool (True = attend) or additive.
        scale: of the logits, `D ** -0.5` by default.
        is_causal: with q and k of one length.
        input_layout: `"BNSD"` or `"BSND"`.
        backend: `"auto"` or a name, as for `sparse_attention`.
        return_lse: also return the log-sum-exp of the logits, fp32 `[B, N, Sq]`.

    Returns:
        `out`, or `(out, lse)` with `return_lse`.
    """
    inputs = planning.check(q, k, v, attn_mask, mask, input_layout=input_layout)
    planning.check_mask(mask, inputs.q, inputs.k)
    inputs = inputs._replace(mask=replace(mask, orders=None))  # the tokens are where the caller has put them
    call = planning.ask_flat(
        inputs,
        block_size=mask.block_size,
        scale=scale,
        is_causal=is_causal,
        backend=backend,
        return_lse=return_lse,
    )
    out, lse, _ = _in_layout(ops.attend(inputs, call), input_layout)
    return out if lse is None else (out, lse)


def _in_layout(result: Attended, input_layout: str) -> Attended:
    return result._replace(out=result.out.transpose(1, 2)) if input_layout == "BSND" else result
