"""Dense attention: torch's own, wherever it does what was asked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.autocast import own_precision
from rainfusion.checks import Options


def why_not(q: Tensor, keep: Tensor | None, bias: Tensor | None, options: Options) -> str | None:
    """Why torch's `scaled_dot_product_attention` cannot run this call, or None if it can."""
    if options.precision != "native":
        return "it has no quantised kernels"
    if options.is_causal and keep is not None:
        return "it takes a mask or is_causal, not both"
    if options.scale <= 0:
        return "its kernels give NaN for scale <= 0 with a mask or is_causal"
    if bias is not None and bias.dtype != q.dtype and q.device.type != "cpu" and q.dtype.itemsize == 2:
        return "it would round the mask to half precision"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, options: Options) -> Tensor:
    """softmax(scale * q k^T + bias) v; keep bool [B, Sk], bias [B, Sk]."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q)
    q, k, v = (x if _suits(x) else x.contiguous() for x in (q, k, v))
    gqa = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210 - a bool, also where sizes are symbols
    with own_precision(q.device):
        if keep is None:
            causal = options.is_causal
            return F.scaled_dot_product_attention(q, k, v, scale=options.scale, is_causal=causal, enable_gqa=gqa)
        removed = ~keep[:, None, :, None]  # [B, 1, Sk, 1]
        k, v = k.masked_fill(removed, 0.0), v.masked_fill(removed, 0.0)  # a removed key may hold anything, NaN too
        total = _logit_bias(q, keep, bias)[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=total, scale=options.scale, enable_gqa=gqa)
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
