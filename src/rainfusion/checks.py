"""Checks of what callers pass: each names the argument, what came and what is allowed, before any work is done.

A check that concerns one argument stands alone; tensors, key masks and block masks, which must fit together, follow.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INPUT_LAYOUTS = ("BNSD", "BSND")

REMOVED_AT = -1e4  # an additive key bias of this or less removes the key
REMOVED_AT_BF16 = -9984.0  # what -1e4 is in a bf16 mask

Grid = tuple[int, int, int]  # t, h, w


# ---------------------------------------------------------------------------------------------------------------------
# one argument


def integer(name: str, value: Any, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        try:
            if isinstance(value, (bool, Tensor)):
                raise TypeError
            value = operator.index(value)  # a NumPy integer, say
        except TypeError:
            raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})") from None
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value  # type: ignore[no-any-return]


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float, got an int of {value.bit_length()} bits") from None  # type: ignore[union-attr]


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def choice(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    # isinstance first: comparing an array with == would not give a bool
    if not (value is None or isinstance(value, str)) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def one_of(name: str, value: Any, allowed: Sequence[int]) -> int:
    chosen = integer(name, value, minimum=0)
    if chosen not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(str, allowed))}, got {chosen}")
    return chosen


def fraction(name: str, value: Any, *, zero: bool) -> float:
    share = number(name, value)
    if not isinstance(value, (int, float)):  # of a NumPy fp32, whose 0.7 is a little less
        share = round(share, 7)
    if not (0.0 <= share <= 1.0) or (share == 0.0 and not zero):  # the first test is False for NaN
        raise ValueError(f"{name} must be in {'[' if zero else '('}0, 1], got {share}")
    return share


def one_or_several_fractions(name: str, value: Any) -> float | tuple[float, ...]:
    """A number from 0 to 1, or a sequence of them: a list, a tuple, or a vector on the CPU."""
    if isinstance(value, numbers.Real):
        return fraction(name, value, zero=True)
    if not isinstance(value, Sequence) and getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist"):
        if isinstance(value, Tensor) and value.device.type != "cpu":
            raise ValueError(f"{name} must be a list of floats or a tensor on the CPU, got one on a device")
        value = [round(share, 7) if isinstance(share, float) else share for share in value.tolist()]
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return fraction(name, value, zero=True)
    return tuple(fraction(f"{name}[{i}]", share, zero=True) for i, share in enumerate(value))


def checked_scale(value: Any, head_dim: int) -> float:
    if value is None:
        return 1.0 / math.sqrt(head_dim)  # as torch computes it, to the last bit
    scale = number("scale", value)
    if not abs(scale) < math.inf:  # math.isfinite would not compile for a symbolic scale
        raise ValueError(f"scale must be finite, got {scale}; None means head_dim ** -0.5 = {head_dim**-0.5:.4g}")
    return scale


def grid(name: str, value: Any) -> Grid:
    """A latent shape [t, h, w]."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list or tuple [t, h, w], got {value!r} ({type(value).__name__})")
    if len(value) != 3:
        raise ValueError(f"{name} must have three numbers [t, h, w], got {list(value)}")
    t, h, w = (integer(f"{name}[{i}]", size, minimum=1) for i, size in enumerate(value))
    return t, h, w


# ---------------------------------------------------------------------------------------------------------------------
# what must fit together


def tensors(input_layout: Any, head_num: Any, **named: Any) -> list[Tensor]:
    """q, k and v as [B, H, S, D] views."""
    choice("input_layout", input_layout, INPUT_LAYOUTS)
    for name, x in named.items():
        _check_dense(name, x)
        if x.dim() != 4:
            letters = ", ".join(input_layout)
            raise ValueError(f"{name} must have 4 dimensions [{letters}], got {x.dim()}: shape {list(x.shape)}")
    q = named["q"]
    for name, x in named.items():
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {_dtype(x)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {_dtype(q)}, got {_dtype(x)}; convert with .to(q.dtype)")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}; move it with .to(q.device)")
    named = {name: x.resolve_neg() for name, x in named.items()}  # kernels read memory, which has the other sign there
    views = {name: x.transpose(1, 2) if input_layout == "BSND" else x for name, x in named.items()}
    _check_shapes(**views)
    heads = views["q"].shape[1]
    if head_num is not None and integer("head_num", head_num, minimum=0) != heads:
        raise ValueError(
            f"head_num must be q's number of heads, {heads} in input_layout={input_layout!r}, got {head_num}; if "
            f"{head_num} is right, the other input_layout may be meant"
        )
    return list(views.values())


def _check_dense(name: str, x: Any) -> None:
    """A plain tensor without a gradient to come."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")
    if _has_tangent(x):
        raise ValueError(f"{name} has a tangent, but sparse attention is for inference: it has no derivative")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but sparse attention is for inference and has no backward: call it under "
            f"torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
        )


def _has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation goes through x."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Batch, heads and head dim of [B, H, S, D] views."""
    q_heads, k_heads = q.shape[1], k.shape[1]
    wrong = None
    if v.shape != k.shape:
        wrong = f"v must have k's shape, got {list(v.shape)}"
    elif k.shape[0] != q.shape[0]:
        wrong = f"k must have q's batch size {q.shape[0]}, got {k.shape[0]}"
    elif k.shape[3] != q.shape[3]:
        wrong = f"k must have q's head dim {q.shape[3]}, got {k.shape[3]}"
    elif q.shape[3] == 0:
        wrong = "q must have a head dim of at least 1, got 0"
    elif q_heads != k_heads and (k_heads == 0 or q_heads % k_heads != 0):
        wrong = f"q's heads must be a multiple of k's heads, got {q_heads} and {k_heads}"
    if wrong is not None:
        raise ValueError(f"{wrong}; as [B, N, S, D] q is {list(q.shape)} and k is {list(k.shape)}")


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def key_mask(attn_mask: Any, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`attn_mask` -> (keep, bias): bool [B, Sk], True where the key takes part; the mask's float [B, Sk], or None."""
    if attn_mask is None:
        return None, None
    _check_dense("attn_mask", attn_mask)
    batch, k_len = k.shape[0], k.shape[2]
    if attn_mask.shape != (batch, k_len) and attn_mask.shape != (batch, 1, 1, k_len):
        raise ValueError(
            f"attn_mask must be a key mask of shape [B, Sk] = [{batch}, {k_len}] or [{batch}, 1, 1, {k_len}], got "
            f"{list(attn_mask.shape)}. One mask for all: attn_mask.expand({batch}, -1); a mask per query is not "
            "supported, use torch's scaled_dot_product_attention"
        )
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask must be on q's device {q.device}, got {attn_mask.device}")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        hint = "; use attn_mask.bool() if 1 means attend" if not attn_mask.is_floating_point() else ""
        raise TypeError(f"attn_mask must be bool (True = attend) or an additive float, got {_dtype(attn_mask)}{hint}")
    attn_mask = attn_mask.reshape(batch, k_len)
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    # NaN is not removed: it shows in the output, as it would in dense attention
    keep = ~(attn_mask <= (REMOVED_AT_BF16 if attn_mask.dtype == torch.bfloat16 else REMOVED_AT))
    return keep, attn_mask.masked_fill(~keep, 0.0)
