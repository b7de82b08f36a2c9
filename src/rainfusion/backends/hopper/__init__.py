"""Block-sparse attention for Hopper GPUs (H100, H200): `triton`'s passes around a kernel of its own.

`precision="fp8"` and `"int8"` quantise k and v in the pass that reorders them, and q inside the kernel.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.backends import triton
from rainfusion.backends.triton import LOG2E, Keys, Scales, choose_blocks, device_guard, predict
from rainfusion.blockmask import BlockMask
from rainfusion.checks import Options
from rainfusion.layout import TokenLayout
from rainfusion.prediction.pooling import live_blocks

__all__ = ["attend", "attend_blocks", "choose_blocks", "predict", "prepare", "why_not"]

TESTED_TRITON = ("3.6.0",)  # Gluon is experimental: other versions may compile it to something slow or wrong
PRECISIONS = ("native", "fp8", "int8")
MAX_HEAD_DIM = 128
_BLOCK = 128


def why_not(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, options: Options | None = None, precision: str = "native"
) -> str | None:
    if q.device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), found {_device(q)}"
    if not triton.installed():
        return triton.NOT_INSTALLED
    if triton_version() not in TESTED_TRITON:
        return f"was tested with Triton {' and '.join(TESTED_TRITON)} only, found {triton_version()}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {q.shape[3]}"
    multiple = 8 if precision == "native" else 16
    if q.shape[3] % multiple:
        return f"takes head dims that are multiples of {multiple} with precision={precision!r}, got {q.shape[3]}"
    block_size = mask.block_size if mask is not None else options.block_size if options is not None else _BLOCK
    if block_size != _BLOCK:
        return f"takes blocks of {_BLOCK} tokens, got {block_size}"
    if options is not None and options.is_causal:
        return "has no causal kernel"
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    *,
    keep: Tensor | None,
    bias: Tensor | None,
    options: Options,
    numbers: list[int],
    return_lse: bool,
) -> tuple[Tensor, Tensor | None, BlockMask]:
    """Same contract as `triton.attend`."""
    with device_guard(q):
        if mask is None and options.strategy == "ada_bsa" and options.precision != "native":
            mask = predict(q, k, keep, options, numbers, q_layout, k_layout)  # from k as it is
        keys = prepare(
            k, v, k_layout, keep, bias, pool=triton.pooled_parts(mask, options), stand_ins=options.compensate,
            precision=options.precision,
        )  # fmt: skip
        mask, rows = choose_blocks(q, keys, mask, q_layout, k_layout, keep, options, numbers)
        out, lse = attend_blocks(
            q, keys, mask, rows, q_layout, scale=options.scale, is_causal=False, inner_precise=options.inner_precise,
            return_lse=return_lse,
        )  # fmt: skip
    return out, lse, mask


def prepare(
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    keep: Tensor | None,
    bias: Tensor | None,
    *,
    pool: int,
    stand_ins: bool = False,
    precision: str = "native",
) -> Keys:
    """Same contract as `triton.prepare`, and quantises."""
    if precision == "native":
        copy = not (_suits_copy_engine(k) and _suits_copy_engine(v))
        return triton.prepare(k, v, layout, keep, bias, pool=pool, stand_ins=stand_ins, copy=copy)

    from rainfusion.backends.hopper.kernels import quantise

    batch, heads, length, head_dim = k.shape
    blocks, padded = layout.num_blocks, _padded(head_dim)
    key_bias = None if keep is None else triton.key_bias(layout, keep, bias)
    weights = triton.stand_in_weights(layout, key_bias, k.device) if stand_ins else None
    spare = triton.stand_in_blocks(weights, _BLOCK)
    flags = None if keep is None else triton.as_bytes(keep)
    sizes = dict(D=head_dim, D_PAD=padded, BLOCK=_BLOCK, HAS_ORDER=not layout.is_identity, HAS_KEEP=keep is not None)
    strides = (*k.stride(), *v.stride(), heads, length, blocks)
    means, largest = (k.new_empty((batch, heads, blocks, head_dim), dtype=torch.float32) for _ in range(2))
    v_means = torch.empty_like(means) if stand_ins else None
    k_mean, v_scale = (k.new_empty((batch, heads, head_dim), dtype=torch.float32) for _ in range(2))
    k_scale = k.new_empty((batch, heads, blocks + spare), dtype=torch.float32)
    k_type = torch.int8 if precision == "int8" else torch.float8_e4m3fn
    k_out = k.new_empty((batch, heads, (blocks + spare) * _BLOCK, head_dim), dtype=k_type)
    v_out = k.new_empty((batch, heads, (blocks + spare) * padded, _BLOCK), dtype=torch.float8_e4m3fn)
    grid = (batch * heads * blocks,)
    quantise.statistics_kernel[grid](
        k, v, layout.order, flags, means, v_means, largest, *strides, **sizes, num_warps=triton.row_warps(k)
    )
    quantise.channels_kernel[(batch * heads,)](
        means, largest, k_mean, v_scale, blocks, D=head_dim, D_PAD=padded, ROWS=32, num_warps=4
    )
    found = (k_mean, v_scale, k_out, v_out, k_scale)
    total = dict(ALL=blocks + spare, INT8=precision == "int8", num_warps=2 * triton.row_warps(k))
    quantise.quantise_kernel[grid](k, v, layout.order, flags, *found, *strides, FIRST=0, **total, **sizes)
    if v_means is not None:  # the means, as blocks of keys and values behind the others
        live = None if keep is None else triton.as_bytes(live_blocks(layout, keep))
        quantise.quantise_kernel[(batch * heads * spare,)](
            means, v_means, layout.order, live, *found, *means.stride(), *v_means.stride(), heads, blocks, spare,
            FIRST=blocks, **total, **dict(sizes, HAS_ORDER=False),
        )  # fmt: skip
    if pool > 1:
        means = triton.block_means(k, layout, keep, pool)
    return Keys(k_out, v_out, means, key_bias, length, weights, Scales(k_scale, v_scale, k_mean))


def attend_blocks(
    q: Tensor,
    keys: Keys,
    mask: BlockMask,
    rows: Tensor,
    q_layout: TokenLayout,
    *,
    scale: float,
    is_causal: bool,
    inner_precise: int,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Same contract as `triton.attend_blocks`. The kernel has one arithmetic, whatever `inner_precise` is."""
    from rainfusion.backends.hopper.kernels.attention import hopper_attention_kernel

    assert not is_causal
    batch, heads, q_len, head_dim = q.shape
    padded = _padded(head_dim)
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device) if return_lse else None
    spare = triton.stand_in_blocks(keys.weights, _BLOCK)
    flags = None
    if keys.bias is not None:  # which blocks have a bias at all
        biased = (keys.bias != 0).view(batch, -1, _BLOCK).any(-1)
        flags = triton.as_bytes(F.pad(biased, (0, spare)) if spare else biased)
    quant = 0 if keys.scales is None else 2 if keys.k.dtype == torch.int8 else 1
    k_scale, v_scale, k_mean = keys.scales or (None, None, None)
    hopper_attention_kernel[(batch * heads * mask.num_q_blocks,)](
        q, _descriptor(keys.k, _BLOCK, padded), _descriptor(keys.v, *((padded, _BLOCK) if quant else (_BLOCK, padded))),
        out, lse, mask.counts.contiguous(), mask.indices.contiguous(), rows,
        None if q_layout.is_identity else q_layout.order, keys.bias, flags,
        triton.stand_in_bias(mask, keys), k_scale, v_scale, k_mean,
        *q.stride(), *out.stride(), rows.stride(0) if rows.dim() == 2 else 0, abs(scale) * LOG2E,
        mask.num_q_blocks, mask.num_k_blocks, mask.num_k_blocks + spare, heads, heads // keys.k.shape[1], q_len,
        keys.length,
        D=padded, D_REAL=head_dim, NS=_stages(padded, quant), QUANT=quant, NEGATE=scale < 0, num_warps=4,
    )  # fmt: skip
    return out, lse


def _descriptor(x: Tensor, rows: int, columns: int) -> object:
    """How the copy engine reads one block of x [B, Hk, S, D]; it fills with zeros past either end."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _shared_layout(x.dtype, rows, columns)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns], layout)


@lru_cache(maxsize=64)
def _shared_layout(dtype: torch.dtype, rows: int, columns: int) -> object:
    """How a block lies in shared memory. Kept: making it takes as long as launching a kernel."""
    from triton.experimental.gluon import language as gl

    types = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int8: gl.int8,
        torch.float8_e4m3fn: gl.float8e4nv,
    }  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], types[dtype])


def _suits_copy_engine(x: Tensor) -> bool:
    """It wants contiguous rows, and strides and address in multiples of 16 bytes."""
    outer = x.stride()[:-1]
    aligned = all(stride > 0 and stride * x.dtype.itemsize % 16 == 0 for stride in outer)
    return x.stride(-1) == 1 and aligned and x.data_ptr() % 16 == 0


def _padded(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128


def _stages(padded: int, quant: int) -> int:
    """As many as shared memory holds: 3 for 128 channels of 2 bytes, with Q."""
    return 3 if padded == 128 and not quant else 4


@triton.answers_once
def triton_version() -> str:
    """From its metadata: importing Triton takes longer."""
    return version("triton")


def _device(q: Tensor) -> str:
    if q.device.type != "cuda":
        return f"{q.device.type} tensors"
    major, minor = torch.cuda.get_device_capability(q.device)
    return f"{torch.cuda.get_device_name(q.device)} ({major}.{minor})"
