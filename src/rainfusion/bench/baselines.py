"""What attention is compared with: torch's dense kernels, and other libraries where they are installed.

A baseline has `why_not`, which says in words why it cannot run here, and `prepare`, which returns the calls to time:
one for each set of inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.layout import TokenLayout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

Call = Callable[[], Tensor]


class Setting(NamedTuple):
    """One attention call. q, k, v [B, H, S, D] in the caller's order; the mask is in the layout's."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    layout: TokenLayout


class Baseline(Protocol):
    """Something else that computes attention, to compare with."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    @property
    def dense(self) -> bool:
        """Whether it computes every block."""

    @property
    def exact(self) -> bool:
        """Whether it computes in the inputs' precision; the best dense baseline is one that does."""

    @property
    def same_blocks(self) -> bool:
        """Whether it attends to our blocks (or to all, if dense), so that rows can be checked."""

    def why_not(self, q: Tensor) -> str | None:
        """Says in words why it cannot run on tensors like q; None where it can."""

    def prepare(self, settings: Sequence[Setting]) -> list[Call]:
        """Returns the calls to time, one for each setting: the same call on different memory."""

    @property
    def reordered(self) -> bool:
        """Whether its calls return tokens in the layout's order."""


def _needs_half_on_cuda(q: Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"needs a CUDA device, got {q.device.type} tensors"
    if q.dtype.itemsize != 2:
        return f"takes float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    return None


def _not_importable(module: str, *names: str) -> str | None:
    """Says why these names cannot be had from a module; None where they can."""
    try:
        found = find_spec(module) is not None
    except Exception as error:  # of a package that it would be in
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is None or not f"{module}.".startswith(f"{absent}."):
            return f"{module} cannot be imported: {first_line(error)}"
        found = False
    if not found:
        return f"{module} is not installed"
    try:
        imported = import_module(module)
    except Exception as error:  # a package built for another torch fails in its own ways
        return f"{module} cannot be imported: {first_line(error)}"
    missing = [name for name in names if not hasattr(imported, name)]
    return f"{module} has no {', '.join(missing)}" if missing else None


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


@dataclass(frozen=True)
class TorchKernel:
    """Dense attention by one of torch's own kernels."""

    name: str
    backend: str  # a name of torch.nn.attention.SDPBackend
    dense: bool = True
    exact: bool = True
    same_blocks: bool = True
    reordered: bool = False

    def why_not(self, q: Tensor) -> str | None:
        reason = _needs_half_on_cuda(q)
        if reason is not None:
            return reason
        from torch.backends import cuda

        can_use = getattr(
            cuda, {"CUDNN_ATTENTION": "can_use_cudnn_attention"}.get(self.backend, "can_use_flash_attention")
        )
        params = cuda.SDPAParams(q, q, q, None, 0.0, False, False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if can_use(params, True):
                return None
        return "; ".join(str(warning.message).splitlines()[0] for warning in said) or "torch does not offer it here"

    def prepare(self, settings: Sequence[Setting]) -> list[Call]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, self.backend)

        def call(setting: Setting) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(setting.q, setting.k, setting.v)

        return [partial(call, setting) for setting in settings]


@dataclass(frozen=True)
class TorchDefault:
    """Dense attention by the kernel that torch takes by itself, where neither cuDNN nor FlashAttention runs."""

    name: str = "torch"
    dense: bool = True
    exact: bool = True
    same_blocks: bool = True
    reordered: bool = False

    def why_not(self, q: Tensor) -> str | None:
        return "takes cuDNN or FlashAttention here" if _needs_half_on_cuda(q) is None else None

    def prepare(self, settings: Sequence[Setting]) -> list[Call]:
        return [partial(F.scaled_dot_product_attention, s.q, s.k, s.v) for s in settings]


def _by_token(*tensors: Tensor) -> list[Tensor]:
    """[B, H, S, D] -> [B, S, H, D]"""
    return [x.transpose(1, 2) for x in tensors]


def _flash_attention(function: Callable[..., object], q: Tensor, k: Tensor, v: Tensor, **kwargs: object) -> Tensor:
    """On tensors [B, S, H, D]; some versions return the LSE as well."""
    result = function(q, k, v, **kwargs)
    out: Tensor = result[0] if isinstance(result, tuple) else result  # type: ignore[assignment]
    return out.transpose(1, 2)


@dataclass(frozen=True)
class FlashAttention3:
    """Dense attention by FlashAttention-3, on Hopper GPUs."""

    name: str = "FlashAttention-3"
    dense: bool = True
    exact: bool = True
    same_blocks: bool = True
    reordered: bool = False

    def why_not(self, q: Tensor) -> str | None:
        reason = _needs_half_on_cuda(q) or _not_importable("flash_attn_interface", "flash_attn_func")
        if reason is None and torch.cuda.get_device_capability(q.device) != (9, 0):
            return "needs compute capability 9.0, found {}.{}".format(*torch.cuda.get_device_capability(q.device))
        return reason

    def prepare(self, settings: Sequence[Setting]) -> list[Call]:
        flash_attn_func = import_module("flash_attn_interface").flash_attn_func

        return [partial(_flash_attention, flash_attn_func, *_by_token(*setting[:3])) for setting in settings]


@dataclass(frozen=True)
class FlashAttention4:
    """Dense attention by FlashAttention-4, which is written in CuTe-DSL (`pip install flash-attn-4`)."""

    name: str = "FlashAttention-4"
    dense: bool = True
    exact: bool = True
    same_blocks: bool = True
    reordered: bool = False

    def why_not(self, q: Tensor) -> str | None:
        return _needs_half_on_cuda(q) or _not_importable("flash_attn.cute", "flash_attn_func")

    def prepare(self, settings: Sequence[Setting]) -> list[Call]:
        flash_attn_func = import_module("flash_attn.cute").flash_attn_func

        return [partial(_flash_attention, flash_attn_func, *_by_token(*setting[:3])) for setting in settings]


@dataclass(frozen=True)
class SageAttention:
    """Dense attention with int8 and fp8 products."""

    name: str = "SageAttention"
    dense: bool = True
    exact: bool = False
    same_blocks: bool = True
    reordered: bool = False

    def why_not(self, q: Tensor) -> str | None:
        return _needs_half_on_cuda(q) or _not_importable("sageattention", "sageattn")

    def prepare(self, settings: Sequence[Setting]) -> list[Call]:
        sageattn = import_module("sageattention").sageattn

        return [partial(sageattn, s.q, s.k, s.v, tensor_layout="HND", is_causal=False) for s in settings]


@dataclass(frozen=True)
class SpargeAttention:
    """Sparse attention by SpargeAttn: the whole call, which chooses as many blocks as ours; int8 and fp8 products."""

    name: str = "SpargeAttn"
    dense: bool = False
    exact: bool = False
    same_blocks: bool = False
    reordered: bool = False

    def why_not(self, q: Tensor) -> str | None:
        reason = _needs_half_on_cuda(q)
        if reason is None and q.shape[3] not in (64, 128):
            return f"takes head dims 64 and 128, got {q.shape[3]}"
        return reason or _not_importable("spas_sage_attn", "spas_sage2_attn_meansim_topk_cuda")

    def prepare(self, settings: Sequence[Setting]) -> list[Call]:
        attend = import_module("spas_sage_attn").spas_sage2_attn_meansim_topk_cuda

        share = settings[0].mask.density()
        return [partial(attend, s.q, s.k, s.v, topk=share, is_causal=False, tensor_layout="HND") for s in settings]


@dataclass(frozen=True)
class FlexAttention:
    """torch's FlexAttention over our blocks, its inputs reordered beforehand: the attention kernel alone."""

    name: str = "FlexAttention"
    dense: bool = False
    exact: bool = True
    same_blocks: bool = True
    reordered: bool = True

    def why_not(self, q: Tensor) -> str | None:
        reason = _needs_half_on_cuda(q)
        if reason is None and q.shape[3] & (q.shape[3] - 1):
            return f"takes head dims that are powers of two, got {q.shape[3]}"
        return reason or (None if find_spec("triton") else "needs Triton, which is not installed here")

    def prepare(self, settings: Sequence[Setting]) -> list[Call]:
        from torch.nn.attention import flex_attention as flex

        torch._dynamo.reset()  # without it torch gives up compiling after a few shapes, and holds all logits at once
        attend: Any = torch.compile(flex.flex_attention, dynamic=False)
        mask = settings[0].mask
        block_mask = flex_block_mask(mask, settings[0].q.shape[2], settings[0].k.shape[2])
        inputs = [tuple(s.layout.reorder(x).contiguous() for x in (s.q, s.k, s.v)) for s in settings]
        # TMA loads are the faster way where there are some, but not every shape compiles with them
        hopper = torch.cuda.get_device_capability(settings[0].q.device) >= (9, 0)
        ways: list[dict[str, Any]] = [{"USE_TMA": True}, {}] if hopper else [{}]
        for way in ways:
            try:
                attend(*inputs[0], block_mask=block_mask, kernel_options=way)
            except Exception:
                if way is ways[-1]:
                    raise
                continue
            break

        def call(qkv: tuple[Tensor, ...]) -> Tensor:
            return attend(*qkv, block_mask=block_mask, kernel_options=way)  # type: ignore[no-any-return]

        return [partial(call, qkv) for qkv in inputs]


@dataclass(frozen=True)
class FlashAttention4Blocks:
    """FlashAttention-4 over our blocks, its inputs reordered beforehand: the attention kernel alone."""

    name: str = "FlashAttention-4 blocks"
    dense: bool = False
    exact: bool = True
    same_blocks: bool = True
    reordered: bool = True

    def why_not(self, q: Tensor) -> str | None:
        return FlashAttention4().why_not(q)

    def prepare(self, settings: Sequence[Setting]) -> list[Call]:
        flash_attn_func = import_module("flash_attn.cute").flash_attn_func
        lists = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
        mask = settings[0].mask
        indices = mask.indices.int()
        # every kept block is a full one; none has elements that are masked
        blocks = lists(
            torch.zeros_like(mask.counts), indices, mask.counts, indices, block_size=(mask.q_block, mask.k_block)
        )
        inputs = [
            [x.contiguous() for x in _by_token(*(s.layout.reorder(x) for x in (s.q, s.k, s.v)))] for s in settings
        ]
        return [partial(_flash_attention, flash_attn_func, *qkv, block_sparse_tensors=blocks) for qkv in inputs]


def flex_block_mask(mask: BlockMask, q_len: int, k_len: int) -> FlexBlockMask:
    """Our mask as one of FlexAttention. Every kept block is a full one: no element is masked but the ragged end."""
    from torch.nn.attention import flex_attention as flex

    indices = mask.indices.int()
    return flex.BlockMask.from_kv_blocks(
        torch.zeros_like(mask.counts),
        indices,
        mask.counts,
        indices,
        BLOCK_SIZE=mask.block_size,
        seq_lengths=(q_len, k_len),
    )


DENSE: tuple[Baseline, ...] = (
    TorchKernel("cuDNN", "CUDNN_ATTENTION"),
    TorchKernel("FlashAttention", "FLASH_ATTENTION"),
    TorchDefault(),
    FlashAttention3(),
    SageAttention(),
)
SPARSE: tuple[Baseline, ...] = (SpargeAttention(),)
SLOW_TO_COMPILE: tuple[Baseline, ...] = (FlexAttention(), FlashAttention4(), FlashAttention4Blocks())
