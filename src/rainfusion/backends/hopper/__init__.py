"""Block-sparse attention for Hopper GPUs (H100, H200): `triton`'s passes around a kernel of its own.

`precision="fp8"` and `"int8"` quantise k and v in the pass that reorders them, and q inside the kernel.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.backends import triton
from rainfusion.backends.protocol import Keys, Request, Speed
from rainfusion.backends.triton import LOG2E, choose, scores, select
from rainfusion.blockmask import BlockMask
from rainfusion.calls import Call, Shapes
from rainfusion.replaying import launch

__all__ = ["READS_BACK", "SPEEDS", "attend", "choose", "prepare", "scores", "select", "why_not"]

READS_BACK = False
# of an H200, see `crossover`
SPEEDS = {
    "cuda": {
        "native": Speed(650e12, 15e-6, 660e12, 2.0e12, 25e-6, 0.36e-3, 0.1e-3, 0.12e-3),
        "int8": Speed(650e12, 15e-6, 800e12, 2.0e12, 70e-6, 0.44e-3, 0.12e-3, 0.15e-3),
        "fp8": Speed(650e12, 15e-6, 1100e12, 2.0e12, 70e-6, 0.44e-3, 0.12e-3, 0.15e-3),
    }
}
TESTED_TRITON = ("3.6.0",)  # Gluon is experimental: other versions may compile it to something slow or wrong
PRECISIONS = ("native", "fp8", "int8")
MAX_HEAD_DIM = 128
_BLOCK = 128
_E4M3_LARGEST = 16.0  # of keys: products over all channels are summed in f16, see the kernel


def why_not(call: Call, shapes: Shapes) -> str | None:
    """Why this kernel cannot run the call, or None if it can."""
    device, precision = shapes.device, call.method.precision
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), found {_device(device)}"
    if not triton.installed():
        return triton.NOT_INSTALLED
    if triton.triton_version() not in TESTED_TRITON:
        return f"was tested with Triton {' and '.join(TESTED_TRITON)} only, found {triton.triton_version()}"
    if shapes.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {str(shapes.dtype).removeprefix('torch.')}"
    if shapes.head_dim > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {shapes.head_dim}"
    multiple = 8 if precision == "native" else 16
    if shapes.head_dim % multiple:
        return f"takes head dims that are multiples of {multiple} with precision={precision!r}, got {shapes.head_dim}"
    if call.method.q_block != _BLOCK and not call.keeps_everything:
        return f"takes blocks of {_BLOCK} queries, got {call.method.block_size}"
    if call.is_causal:
        return "has no causal kernel"
    return triton.too_long(call, shapes)


def prepare(request: Request) -> Keys:
    """What `triton.prepare` does, and quantises. If there is a pass, it makes the counter of rows 0 on the way."""
    precision = request.method.precision
    turns = request.q.new_empty(1, dtype=torch.int32)
    if precision == "native":
        keys = triton.prepare(request, turns)
        return keys._replace(k=triton.for_copy_engine(keys.k), v=triton.for_copy_engine(keys.v))

    from rainfusion.backends.triton import quantising

    common = _common_bias(request)
    if common is not None and request.bias is not None:
        request = request._replace(bias=request.bias - common[:, None])
    k_type, largest = (torch.int8, None) if precision == "int8" else (torch.float8_e4m3fn, _E4M3_LARGEST)
    padded = _padded(request.k.shape[3])
    form = quantising.Form(
        k_type, torch.float8_e4m3fn, _BLOCK, padded, permuted=True, swizzled=True, k_largest=largest
    )  # fmt: skip
    return quantising.prepare(request, form, turns)


def attend(request: Request, keys: Keys, mask: BlockMask) -> tuple[Tensor, Tensor | None]:
    """The kernel has one arithmetic, whatever `inner_precise` is."""
    from rainfusion.backends.hopper.kernels.attention import hopper_attention_kernel

    q, q_layout = triton.whole_rows(request.q), request.q_layout
    batch, heads, q_len, head_dim = q.shape
    padded = _padded(head_dim)
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device) if request.return_lse else None
    size = mask.k_block
    rows, spare = triton.row_schedule(request, mask), triton.stand_in_blocks(keys.weights, size)
    flags = None
    if keys.bias is not None and size == _BLOCK:  # which blocks have a bias at all
        biased = (keys.bias != 0).view(batch, -1, _BLOCK).any(-1)
        flags = triton.as_bytes(F.pad(biased, (0, spare)) if spare else biased)
    quant = 0 if keys.scales is None else 2 if keys.k.dtype == torch.int8 else 1
    k_scale, v_scale, k_mean = keys.scales or (None, None, None)
    number, programs = batch * heads * mask.num_q_blocks, _multiprocessors(q.device)
    launch(
        hopper_attention_kernel, min(number, programs),
        q, *_descriptors(keys, size, padded, bool(quant)),
        out, lse, mask.counts.contiguous(), mask.indices.contiguous(), rows,
        None if q_layout.is_identity else q_layout.order, keys.bias, flags,
        triton.stand_in_bias(request, mask, keys), k_scale, v_scale, k_mean,
        keys.turns if keys.turns is not None else torch.zeros(1, dtype=torch.int32, device=q.device),
        *triton.row_strides(q, out), rows.stride(0) if rows.dim() == 2 else 0,
        abs(request.scale) * LOG2E, mask.num_q_blocks, mask.num_k_blocks, mask.num_k_blocks + spare, heads,
        request.gqa_ratio, q_len, keys.length, number,
        # with budgets by head rows of one weigh as much as each other, and one head goes after the other
        1 if len(request.budgets) > 1 else heads_side_by_side(batch * heads, mask.num_q_blocks, programs),
        D=padded, D_REAL=head_dim, NS=_stages(padded, quant), QUANT=quant, NEGATE=request.scale < 0, KEYS=size,
        num_warps=4,
    )  # fmt: skip
    if lse is not None and (common := _common_bias(request)) is not None:
        lse += common[:, None, None]
    return out, lse


def heads_side_by_side(heads: int, rows: int, programs: int) -> int:
    """How many of the last heads are taken side by side: those with the last three rows of each program.

    All multiprocessors wait for a heavy row that begins last. The first rows of programs are not among them.
    """
    return max(1, min(-(-3 * programs // rows), heads - -(-programs // rows)))


def _common_bias(request: Request) -> Tensor | None:
    """fp32 [B]: what fp8's logits go without, since they are f16: the bias nearest to 0 of a key that takes part.

    A softmax does not see it, and the LSE has it added again. Not the largest: in rows that do not keep that key all
    others would be far from 0.
    """
    bias, keep = request.bias, request.keep
    if request.method.precision != "fp8" or bias is None or keep is None:
        return None
    usable = keep & bias.isfinite()
    least = torch.where(usable, bias.float(), torch.inf).amin(1)
    most = torch.where(usable, bias.float(), -torch.inf).amax(1)
    return torch.where(usable.any(1), torch.zeros_like(most).clamp(least, most), 0.0)


def _descriptors(keys: Keys, size: int, padded: int, quantised: bool) -> tuple[object, object]:
    """Of k and v: whole blocks; finer ones by 128 bytes of their rows, as they lie in a tile of several."""
    if quantised:  # v: a block of [padded, size], as rows of 128 bytes
        as_rows = keys.v.view(*keys.v.shape[:2], -1, _BLOCK)
        return _descriptor(keys.k, size, padded), _descriptor(as_rows, padded * size // _BLOCK, _BLOCK)
    columns = 64 if size < _BLOCK else padded
    return _descriptor(keys.k, size, columns), _descriptor(keys.v, size, columns)


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


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _padded(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128


def _stages(padded: int, quant: int) -> int:
    """As many as shared memory holds: 3 for 128 channels of 2 bytes, with Q."""
    return 3 if padded == 128 and not quant else 4


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type} tensors"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
