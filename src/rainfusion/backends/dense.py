"""Dense attention: torch's own, wherever it does what was asked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.autocast import own_precision
from rainfusion.calls import Call, Inputs, Shapes


def why_not(call: Call, shapes: Shapes) -> str | None:
    """Why torch's `scaled_dot_product_attention` cannot run this call, or None if it can."""
    if call.keeps_everything and call.method.precision != "native":
        return "it has no quantised kernels"
    if call.is_causal and shapes.has_key_mask:
        return "it takes a mask or is_causal, not both"
    if call.scale <= 0:
        return "its kernels give NaN for scale <= 0 with a mask or is_causal"
    half = shapes.dtype.itemsize == 2
    if half and shapes.bias_dtype not in (None, shapes.dtype) and shapes.device.type != "cpu":
        return "it would round the mask to half precision"
    return None


def attend(inputs: Inputs, call: Call) -> Tensor:
    """softmax(scale * q k^T + bias) v."""
    q, k, v, keep, bias = inputs[:5]
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q)
    q, k, v = (x if _suits(x) else x.contiguous() for x in (q, k, v))
    gqa = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210 - a bool, also where sizes are symbols
    with own_precision(q.device):
        if keep is None:
            causal = call.is_causal
            return F.scaled_dot_product_attention(q, k, v, scale=call.scale, is_causal=causal, enable_gqa=gqa)
        removed = ~keep[:, None, :, None]  # [B, 1, Sk, 1]
        k, v = k.masked_fill(removed, 0.0), v.masked_fill(removed, 0.0)  # a removed key may hold anything, NaN too
        total = _logit_bias(q, keep, bias)[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=total, scale=call.scale, enable_gqa=gqa)
    return out.masked_fill_(~keep.any(-1)[:, None, None, None], 0.0)  # fully masked: 0 on every device


def _suits(x: Tensor) -> bool:
    """Strides that torch's kernels take: else they hold all logits at once, or read wrongly (cuDNN, unaligned rows)."""
    aligned = all(stride * x.dtype.itemsize % 16 == 0 for stride in x.stride()[:-1])
    return x.is_contiguous() or (x.stride(-1) == 1 and aligned)


def _logit_bias(q: Tensor, keep: Tensor, bias: Tensor | None) -> Tensor:
    """[B, Sk], -inf for removed keys. In fp32 where rounding to q's dtype would lose some of it."""
    if bias is None:
        return torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, -torch.inf)
    wide = q.dtype.itemsize == 2 and bias.dtype != q.dtype
    return bias.to(torch.float32 if wide else q.dtype).masked_fill(~keep, -torch.inf)
