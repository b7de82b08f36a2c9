"""Block-sparse attention in Triton: every stage a kernel, nothing read back to the host.

    k, v --gather--> blocks in order, means      one pass, the only copy
    q    --pool----> means                       one pass, no copy
    means --> scores --> best blocks --> list    on the device
    q rows through `order` --> attention --> out rows through `order`

`prepare`, `predict` and `attend_blocks` are these stages; `attend` is the whole call. `hopper` shares all but the last.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from importlib.util import find_spec
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.checks import Options
from rainfusion.layout import TokenLayout
from rainfusion.prediction import budgets, compensation
from rainfusion.prediction.pooling import live_blocks, present
from rainfusion.prediction.predictors import live_groups

T = TypeVar("T")

MAX_HEAD_DIM = 256
PRECISIONS = ("native",)
NOT_INSTALLED = "needs Triton, which is not installed here (pip install triton; torch for CUDA and ROCm brings it)"
LOG2E = math.log2(math.e)


def why_not(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, options: Options | None = None, precision: str = "native"
) -> str | None:
    if not installed():
        return NOT_INSTALLED
    if q.device.type != "cuda" and not (q.device.type == "cpu" and _interpreted()):
        return f"needs a CUDA or ROCm device, got {q.device.type} tensors"
    if q.device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(q.device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(q.device)
        return f"needs compute capability 8.0 or newer, found {major}.{minor}"
    if q.dtype == torch.float64:
        return "takes float16, bfloat16 and float32, got float64"
    if q.shape[3] > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {q.shape[3]}"
    if precision not in PRECISIONS:
        return f"has no {precision} kernels"
    return None


def answers_once(function: Callable[[], T]) -> Callable[[], T]:
    """A question about this machine, asked once; compilers take the answer and do not trace the asking."""
    cached = lru_cache(maxsize=1)(function)

    @wraps(function)
    def ask() -> T:
        return cached()

    # what torch.compiler.assume_constant_result does, which would import the compiler, and Triton with it
    ask._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return ask


@answers_once
def installed() -> bool:
    """Without importing it."""
    return find_spec("triton") is not None


class Scales(NamedTuple):
    """What turns quantised keys and values back, all fp32."""

    k: Tensor  # [B, Hk, blocks]
    v: Tensor  # [B, Hk, D]
    k_mean: Tensor  # [B, Hk, D], which was subtracted from every key


class Keys(NamedTuple):
    """Keys and values in block order, and what was found on the way."""

    k: Tensor  # [B, Hk, at least Sk, D]; the means that stand in for blocks, if asked for, from NK * block_size on
    v: Tensor  # the same; quantised [B, Hk, blocks * padded D, 128], its blocks transposed
    means: Tensor | None  # fp32 [B, Hk, NK * parts, D], if asked for
    bias: Tensor | None  # fp32 [B, NK * block_size] in units of log2, -inf where a key does not count
    length: int  # Sk
    weights: Tensor | None = None  # fp32 [B or 1, whole blocks of means] of those that stand in: log2 of their keys
    scales: Scales | None = None  # if quantised


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
    """-> out, lse if asked for, and the mask: the given one, or the one that was predicted.

    `numbers`: blocks that rf_v2 keeps in a row, see `budgets.numbers`.
    """
    with device_guard(q):
        parts = pooled_parts(mask, options)
        keys = prepare(k, v, k_layout, keep, bias, pool=parts, stand_ins=options.compensate)
        mask, rows = choose_blocks(q, keys, mask, q_layout, k_layout, keep, options, numbers)
        out, lse = attend_blocks(
            q, keys, mask, rows, q_layout, scale=options.scale, is_causal=options.is_causal,
            inner_precise=options.inner_precise, return_lse=return_lse,
        )  # fmt: skip
    return out, lse, mask


def pooled_parts(mask: BlockMask | None, options: Options) -> int:
    """Means of a block that the keys are needed with; 0: none."""
    return options.parts if mask is None and options.strategy == "rf_v2" else 0


def choose_blocks(
    q: Tensor,
    keys: Keys,
    mask: BlockMask | None,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    keep: Tensor | None,
    options: Options,
    numbers: list[int],
) -> tuple[BlockMask, Tensor]:
    """-> the mask, predicted unless given, and the order in which to take its rows, heavy ones first."""
    if mask is None and options.strategy == "rf_v2":  # light rows are all alike
        assert keys.means is not None
        found = _scores(block_means(q, q_layout, parts=options.parts), keys.means, keep, options, q_layout, k_layout)
        return _best_blocks(found, numbers, options, q_layout, k_layout), q_layout.protected_first
    if mask is None and options.strategy == "ada_bsa":
        mask = _keep_mass(q, keys.k, keep, options, keys.length)
    if mask is None:
        batch, heads, q_len, _ = q.shape
        mask = BlockMask.full(
            batch, heads, q_len, keys.length,
            block_size=options.block_size, is_causal=options.is_causal, device=q.device,
        )  # fmt: skip
    return mask, heavy_first(mask)


def predict(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    options: Options,
    numbers: list[int],
    q_layout: TokenLayout,
    k_layout: TokenLayout,
) -> BlockMask:
    """The mask alone, of rf_v2 or ada_bsa: the same as `attend` would use, bit for bit."""
    with device_guard(q):
        if options.strategy == "rf_v2":
            found = scores(q, k, keep, options, q_layout, k_layout)
            return _best_blocks(found, numbers, options, q_layout, k_layout)
        clean = k if keep is None else k.masked_fill(~keep[:, None, :, None], 0.0)
        return _keep_mass(q, clean, keep, options, k.shape[2])


# ---------------------------------------------------------------------------------------------------------------------
# stages


def prepare(
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    keep: Tensor | None,
    bias: Tensor | None,
    *,
    pool: int,
    stand_ins: bool = False,
    copy: bool = False,
) -> Keys:
    """k, v [B, Hk, Sk, D] -> in block order. Without an order or a mask nothing is copied, unless asked for.

    `pool`: so many means of each block; one is found on the way. `stand_ins`: the means of k and v follow the last
    block, for blocks that are skipped.
    """
    total_bias = None if keep is None else key_bias(layout, keep, bias)
    if layout.is_identity and keep is None and not (copy or stand_ins):
        return Keys(k, v, block_means(k, layout, parts=pool) if pool else None, total_bias, k.shape[2])

    from rainfusion.backends.triton.kernels import blocks

    batch, heads, length, head_dim = k.shape
    weights = stand_in_weights(layout, total_bias, k.device) if stand_ins else None
    spare = stand_in_blocks(weights, layout.block_size)
    rows = (layout.num_blocks + spare) * layout.block_size
    k_out, v_out = (k.new_empty((batch, heads, rows, head_dim)) for _ in range(2))
    means = k.new_empty((batch, heads, layout.num_blocks, head_dim), dtype=torch.float32) if pool == 1 else None
    blocks.gather_kernel[(batch * heads * layout.num_blocks,)](
        k, v, layout.order, None if keep is None else as_bytes(keep), k_out, v_out, means, *k.stride(), *v.stride(),
        heads, length, layout.num_blocks, spare,
        D=head_dim, D_PAD=_padded(head_dim), BLOCK=layout.block_size, HAS_ORDER=not layout.is_identity,
        HAS_KEEP=keep is not None, POOL=pool == 1, STAND_INS=stand_ins, num_warps=2 * row_warps(k),
    )  # fmt: skip
    if pool > 1:
        means = block_means(k, layout, keep, pool)
    return Keys(k_out, v_out, means, total_bias, length, weights)


def block_means(x: Tensor, layout: TokenLayout, keep: Tensor | None = None, parts: int = 1) -> Tensor:
    """`pooling.block_means` in one read of x."""
    from rainfusion.backends.triton.kernels import blocks

    batch, heads, length, head_dim = x.shape
    number = layout.num_blocks * parts
    means = x.new_empty((batch, heads, number, head_dim), dtype=torch.float32)
    blocks.pool_kernel[(batch * heads * number,)](
        x, layout.order, None if keep is None else as_bytes(keep), means, *x.stride(), heads, length, number,
        D=head_dim, D_PAD=_padded(head_dim), BLOCK=layout.block_size // parts, HAS_ORDER=not layout.is_identity,
        HAS_KEEP=keep is not None, num_warps=row_warps(x),
    )  # fmt: skip
    return means


def scores(
    q: Tensor, k: Tensor, keep: Tensor | None, options: Options, q_layout: TokenLayout, k_layout: TokenLayout
) -> Tensor:
    """rf_v2's, fp32 [B, H, NQ, NK]."""
    with device_guard(q):
        q_means = block_means(q, q_layout, parts=options.parts)
        k_means = block_means(k, k_layout, keep, options.parts)
        return _scores(q_means, k_means, keep, options, q_layout, k_layout)


def _scores(
    q_means: Tensor,
    k_means: Tensor,
    keep: Tensor | None,
    options: Options,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
) -> Tensor:
    """From the means of blocks, or of their parts."""
    from rainfusion.backends.triton.kernels import ranking

    if options.parts > 1:
        return _part_mass(q_means, k_means, keep, options, q_layout, k_layout)
    batch, heads, _, head_dim = q_means.shape
    rows, columns = q_layout.num_blocks, k_layout.num_blocks
    found = q_means.new_empty((batch, heads, rows, columns))
    live = None if keep is None else as_bytes(live_blocks(k_layout, keep))
    tile = 64
    ranking.mean_scores_kernel[(batch * heads * math.ceil(rows / tile) * math.ceil(columns / tile),)](
        q_means, k_means, live, found, options.scale, heads, heads // k_means.shape[1], rows, columns,
        D=head_dim, BM=tile, BN=tile, BD=32, HAS_LIVE=live is not None, PRECISION=_exact_products(q_means), num_warps=4,
    )  # fmt: skip
    return found


def _part_mass(
    q_means: Tensor,
    k_means: Tensor,
    keep: Tensor | None,
    options: Options,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
) -> Tensor:
    """`predictors.part_mass`"""
    from rainfusion.backends.triton.kernels import ranking, tuning

    parts, size = options.parts, options.block_size // options.parts
    batch, heads, _, head_dim = q_means.shape
    rows, columns = q_layout.num_blocks, k_layout.num_blocks
    mass = q_means.new_empty((batch, heads, rows, columns))
    live = present(k_layout, parts, k_means.device)[None] if keep is None else live_blocks(k_layout, keep, parts)
    tile = tuning.part_tile(_capability(q_means), _padded(head_dim))
    ranking.part_mass_kernel[(batch * heads * math.ceil(rows * parts / tile.queries),)](
        q_means, k_means, as_bytes(live), mass, columns * parts if len(live) > 1 else 0, options.scale, heads,
        heads // k_means.shape[1], rows, columns, math.ceil(q_layout.seq_len / size),
        D=head_dim, D_PAD=_padded(head_dim), PARTS=parts, BM=tile.queries, BN=tile.keys,
        # products of tf32: means of 32 tokens say less than their eleven bits
        PRECISION=_products(q_means, 1), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if keep is not None:
        mass.masked_fill_(~live.unflatten(1, (columns, parts)).any(2)[:, None, None], -torch.inf)
    return mass


def _best_blocks(
    scores: Tensor, numbers: list[int], options: Options, q_layout: TokenLayout, k_layout: TokenLayout
) -> BlockMask:
    """numbers: one for each head, or one for all, which needs no tensor."""
    number = budgets.on_device(numbers, scores.device) if len(numbers) > 1 else numbers[0]
    return keep_best(scores, number, options.exact_budget, options.block_size, q_layout, k_layout)


def keep_best(
    scores: Tensor,
    number: int | Tensor,
    free_only: bool,
    block_size: int,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
) -> BlockMask:
    """`selection.keep_best`; number: one for all rows, or int32 [H] or [B * H].

    The list takes the scores' memory: a row is read whole before it is written.
    """
    from rainfusion.backends.triton.kernels import ranking

    batch, heads, rows, columns = scores.shape
    counts = torch.empty((batch, heads, rows), dtype=torch.int32, device=scores.device)
    indices = scores.view(torch.int32)
    one, several, of = (0, number, len(number)) if isinstance(number, Tensor) else (number, None, 1)
    with device_guard(scores):
        ranking.keep_best_kernel[(batch * heads * rows,)](
            scores, as_bytes(q_layout.protected), as_bytes(k_layout.protected), counts, indices, one, several, of, rows,
            columns, N_PAD=_power_of_two(columns), PER_HEAD=several is not None, FREE_ONLY=free_only,
            num_warps=_ranking_warps(columns),
        )  # fmt: skip
    return BlockMask(counts, indices, block_size)


def _keep_mass(q: Tensor, k: Tensor, keep: Tensor | None, options: Options, k_len: int) -> BlockMask:
    """ada_bsa's scores and selection; k has zeros where keys were removed."""
    from rainfusion.backends.triton.kernels import ranking, tuning

    batch, heads, q_len, head_dim = q.shape
    rows, columns = math.ceil(q_len / 128), math.ceil(k_len / 128)
    mass = q.new_empty((batch, heads, rows, columns), dtype=torch.float32)
    groups = as_bytes(live_groups(keep, batch, k_len, columns, k.device)).contiguous()
    tile = tuning.mass_tile(_capability(q), _padded(head_dim), q.dtype.itemsize)
    ranking.group_mass_kernel[(batch * heads * math.ceil(rows * 16 / tile.queries),)](
        q, k, groups, mass, *q.stride(), *k.stride(), options.scale / 8, heads, heads // k.shape[1], rows, columns,
        q_len, k_len, D=head_dim, BM=tile.queries, BN=tile.keys, BD=_padded(head_dim) if q.dtype.itemsize == 2 else 32,
        IS_CAUSAL=options.is_causal, PRECISION=_exact_products(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    counts = torch.empty((batch, heads, rows), dtype=torch.int32, device=q.device)
    live = None if keep is None else as_bytes(groups.view(batch, columns, 16).amax(2))
    ranking.keep_mass_kernel[(batch * heads * rows,)](
        mass, live, counts, mass.view(torch.int32), _bits(1.0 - options.sparsity), options.cdf_threshold, heads, rows,
        columns, N_PAD=_power_of_two(columns), HAS_LIVE=live is not None, IS_CAUSAL=options.is_causal,
        KEEP_SINK=options.keep_sink, KEEP_RECENT=options.keep_recent, HAS_THRESHOLD=options.cdf_threshold < 1.0,
        num_warps=_ranking_warps(columns),
    )  # fmt: skip
    return BlockMask(counts, mass.view(torch.int32), options.block_size)


def heavy_first(mask: BlockMask) -> Tensor:
    """int32 [B * H, NQ]: each head's rows, those with the most blocks first, so that none is left for the end."""
    from rainfusion.backends.triton.kernels import ranking

    batch, heads, rows = mask.counts.shape
    counts = mask.counts.contiguous()
    schedule = torch.empty((batch * heads, rows), dtype=torch.int32, device=counts.device)
    ranking.heavy_first_kernel[(batch * heads * math.ceil(rows / 64),)](counts, schedule, rows, BM=64, BN=128)
    return schedule


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
    """The attention kernel. `rows` int32 [NQ] or [B * H, NQ]: the order in which to take the rows of blocks."""
    from rainfusion.backends.triton.kernels import attention, tuning

    batch, heads, q_len, head_dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device) if return_lse else None
    stand_ins = stand_in_bias(mask, keys)
    tile = tuning.attention_tile(_capability(q), _padded(head_dim), q.dtype.itemsize, stand_ins is not None)
    counts, indices = mask.counts.contiguous(), mask.indices.contiguous()
    queries = min(tile.queries, mask.block_size)
    attention.attention_kernel[(batch * heads * mask.num_q_blocks * (mask.block_size // queries),)](
        q, keys.k, keys.v, out, lse, counts, indices, rows, q_layout.order, keys.bias, stand_ins,
        *q.stride(), *keys.k.stride(), *keys.v.stride(), *out.stride(), rows.stride(0) if rows.dim() == 2 else 0,
        scale * LOG2E, heads, heads // keys.k.shape[1], mask.num_q_blocks, mask.num_k_blocks,
        stand_in_blocks(keys.weights, mask.block_size), q_len, keys.length,
        D=head_dim, D_PAD=_padded(head_dim), BLOCK=mask.block_size, BM=queries, BN=min(tile.keys, mask.block_size),
        HAS_ORDER=not q_layout.is_identity, HAS_BIAS=keys.bias is not None, HAS_LSE=return_lse, IS_CAUSAL=is_causal,
        STAND_INS=stand_ins is not None, PRECISION=_products(q, inner_precise), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def stand_in_weights(layout: TokenLayout, bias: Tensor | None, device: torch.device) -> Tensor:
    """fp32 [B or 1, whole blocks]: log2 of the number of keys in each block; -inf where there is none, and behind."""
    blocks, size = layout.num_blocks, layout.block_size
    width = math.ceil(blocks / size) * size
    if bias is not None:
        weights = torch.logsumexp(bias.unflatten(1, (blocks, size)) / LOG2E, 2) * LOG2E
        return F.pad(weights, (0, width - blocks), value=-torch.inf).contiguous()
    weights = torch.full((1, width), -torch.inf, dtype=torch.float32, device=device)
    weights[:, :blocks] = math.log2(size)
    weights[:, blocks - 1] = math.log2(layout.seq_len - (blocks - 1) * size)
    return weights


def stand_in_blocks(weights: Tensor | None, block_size: int) -> int:
    """How many blocks the means fill."""
    return 0 if weights is None else weights.shape[1] // block_size


def stand_in_bias(mask: BlockMask, keys: Keys) -> Tensor | None:
    """What the means that stand in for blocks count in each row, see `stand_ins_kernel`; None if there are none."""
    from rainfusion.backends.triton.kernels.compensation import stand_ins_kernel

    if keys.weights is None:
        return None
    weights = keys.weights
    batch, heads, rows, columns = mask.indices.shape
    width = weights.shape[1]
    bias = torch.empty((batch, heads, rows, width + mask.block_size), dtype=torch.float32, device=weights.device)
    stand_ins_kernel[(batch * heads * rows,)](
        mask.counts.contiguous(), mask.indices.contiguous(), weights, keys.bias, bias,
        weights.stride(0) if len(weights) > 1 else 0, heads, rows, columns, width, keys.length,
        BLOCK=mask.block_size, N_PAD=_power_of_two(width), num_warps=_ranking_warps(width),
    )  # fmt: skip
    return bias


# ---------------------------------------------------------------------------------------------------------------------
# small pieces


def device_guard(q: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device: make it q's."""
    return torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext()


def key_bias(layout: TokenLayout, keep: Tensor, bias: Tensor | None) -> Tensor:
    """`compensation.key_bias` in units of log2."""
    return (compensation.key_bias(layout, keep, bias, len(keep), keep.device) * LOG2E).contiguous()


@answers_once
def _interpreted() -> bool:
    """TRITON_INTERPRET=1: Triton runs kernels on the CPU, slowly, which is how they are tested without a GPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _capability(x: Tensor) -> tuple[int, int] | str:
    if x.device.type != "cuda":
        return (8, 0)
    return "hip" if torch.version.hip is not None else torch.cuda.get_device_capability(x.device)


def _exact_products(x: Tensor) -> str:
    """How tl.dot multiplies fp32: as good as fp32, on tensor cores where there are some for it."""
    return "ieee" if x.device.type != "cuda" or torch.version.hip is not None else "tf32x3"


def _products(x: Tensor, inner_precise: int) -> str:
    """The same, or the fastest there is if `inner_precise` is 1."""
    exact = _exact_products(x)
    return "tf32" if inner_precise == 1 and exact == "tf32x3" else exact


def as_bytes(flags: Tensor) -> Tensor:
    """Bools as uint8, without a copy where there is none needed."""
    return flags.contiguous().view(torch.uint8)


def _bits(x: float) -> int:
    """A double as an integer: Triton would pass it as fp32."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _padded(head_dim: int) -> int:
    return max(16, _power_of_two(head_dim))


def row_warps(x: Tensor) -> int:
    """Warps for one block of tokens [block_size, D] that is read once: about 128 bytes of a row to a warp."""
    return min(8, max(1, _padded(x.shape[-1]) * x.dtype.itemsize // 128))


def _ranking_warps(columns: int) -> int:
    """About 32 columns a lane."""
    return min(16, max(1, _power_of_two(columns) // 1024))
