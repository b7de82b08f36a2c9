"""Block-sparse attention in Triton: every stage a kernel, nothing read back to the host.

    k, v --gather--> blocks in order, means      one pass, the only copy
    q    --pool----> means                       one pass, no copy
    means --> scores --> best blocks --> list    on the device
    q rows through `order` --> attention --> out rows through `order`

`hopper` shares all stages but the last. Where `precision` asks for eight bits, the first quantises: see `quantising`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.backends.protocol import Keys, Request, Speed
from rainfusion.blockmask import BlockMask, index_dtype
from rainfusion.calls import Call, Shapes
from rainfusion.graphs import is_capturing, keep_if_captured
from rainfusion.layout import TokenLayout
from rainfusion.prediction import budgets as budget_table
from rainfusion.prediction import compensation, spread
from rainfusion.prediction.pooling import live_blocks
from rainfusion.prediction.predictors import live_groups
from rainfusion.replaying import launch
from rainfusion.slabs import even_slabs

T = TypeVar("T")

READS_BACK = False
_NATIVE = Speed(650e12, 15e-6, 540e12, 2.0e12, 25e-6, 0.36e-3, 0.1e-3, 0.12e-3)  # of an H200
# 1.4 times the native rate: an H200 has 1.2 to 1.6, other GPUs may have other ratios
_QUANTISED = _NATIVE._replace(sparse_rate=760e12, start=70e-6, host=0.44e-3, host_of_option=0.12e-3, host_again=0.15e-3)
SPEEDS = {"cuda": {"native": _NATIVE, "int8": _QUANTISED, "fp8": _QUANTISED}}
MAX_HEAD_DIM = 256
_AT_ONCE = 16384  # keys whose blocks are counted at a time while a row is ranked
_RANKED = 131072  # for ada_bsa: keys whose blocks registers hold then
MAX_KEYS = 128 * _AT_ONCE
NOT_INSTALLED = "needs Triton, which is not installed here (pip install triton; torch for CUDA and ROCm brings it)"
LOG2E = math.log2(math.e)
_WEIGHTS: dict[object, Tensor] = {}  # of `_weights_of_whole_blocks`
_FEW_SCORES, _MANY_SCORES = 16 * 2**20, 128 * 2**20  # bytes of them at once, where a list cannot take their memory


def why_not(call: Call, shapes: Shapes) -> str | None:
    """Why these kernels cannot run the call, or None if they can."""
    kind = shapes.device.type
    if not installed():
        return NOT_INSTALLED
    if kind != "cuda" and not (kind == "cpu" and _interpreted()):
        return f"needs a CUDA or ROCm device, got {kind} tensors"
    if kind == "cpu" and call.backend == "auto":
        return "is run by Triton's interpreter on a CPU, which is slow: ask for it by name"
    if kind == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(shapes.device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(shapes.device)
        return f"needs compute capability 8.0 or newer, found {major}.{minor}"
    if shapes.dtype == torch.float64:
        return "takes float16, bfloat16 and float32, got float64"
    if shapes.head_dim > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {shapes.head_dim}"
    reason = None if call.method.precision == "native" else _why_not_quantised(call.method.precision, shapes)
    return reason or too_long(call, shapes)


def _why_not_quantised(precision: str, shapes: Shapes) -> str | None:
    """Eight bits need tensor cores for them."""
    if shapes.dtype.itemsize != 2:
        dtype = str(shapes.dtype).removeprefix("torch.")
        return f"takes float16 and bfloat16 with precision={precision!r}, got {dtype}"
    if shapes.device.type != "cuda":
        return None
    if torch.version.hip is not None:
        found = torch.cuda.get_device_properties(shapes.device).gcnArchName.partition(":")[0]
        return None if found == "gfx942" else f"has {precision} kernels for one AMD GPU, gfx942 (MI300), found {found}"
    major, minor = torch.cuda.get_device_capability(shapes.device)
    if precision == "fp8" and (major, minor) < (8, 9):
        return (
            f"needs compute capability 8.9 or newer for fp8 (RTX 40, L40, H100 and later), found {major}.{minor}, "
            "which has int8"
        )
    return None


def too_long(call: Call, shapes: Shapes) -> str | None:
    """Why the blocks of so many keys cannot be ranked, or None if they can."""
    if shapes.k_len <= MAX_KEYS or call.given_mask or call.keeps_everything:
        return None
    return f"chooses blocks of up to {MAX_KEYS} keys, got {shapes.k_len}"


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
    """Whether there is a Triton, without importing it."""
    return find_spec("triton") is not None


@answers_once
def triton_version() -> str:
    """From its metadata: importing Triton takes longer."""
    return version("triton")


# ---------------------------------------------------------------------------------------------------------------------
# stages


def prepare(request: Request, turns: Tensor | None = None) -> Keys:
    """k and v in block order. Without an order, a mask or stand-ins nothing is copied, and `turns` is not made 0.

    One mean of each block is found on the way; the means of k and v that stand in for skipped blocks follow the last
    block, from NK * block_size on.
    """
    if request.method.precision != "native":
        from rainfusion.backends.triton import quantising

        return quantising.prepare(request, quantising.form(request))
    k, v, layout, keep = whole_rows(request.k), whole_rows(request.v), request.k_layout, request.keep
    parts, stand_ins = pooled_parts(request), request.method.compensate
    bias = None if keep is None else key_bias(layout, keep, request.bias)
    if layout.is_identity and keep is None and not stand_ins:
        means, spreads = pooled_keys(request, k) if parts else (None, None)
        return Keys(k, v, means, bias, k.shape[2], spreads=spreads)

    from rainfusion.backends.triton.kernels import blocks

    batch, heads, length, head_dim = k.shape
    weights = stand_in_weights(request, bias, request.q_layout.block_size) if stand_ins else None
    spare = stand_in_blocks(weights, layout.block_size)
    rows = (layout.num_blocks + spare) * layout.block_size
    k_out, v_out = (k.new_empty((batch, heads, rows, head_dim)) for _ in range(2))
    dtype = spread.means_dtype(request.method, k.dtype)
    means = k.new_empty((batch, heads, layout.num_blocks, head_dim), dtype=dtype) if parts == 1 else None
    spreads = new_spreads(request)
    launch(
        blocks.gather_kernel, batch * heads * layout.num_blocks,
        k, v, layout.order, None if keep is None else as_bytes(keep), k_out, v_out, means, spreads, turns,
        *row_strides(k, v), heads, length, layout.num_blocks, spare,
        UNIT=row_unit(k), D=head_dim, D_PAD=_padded(head_dim), BLOCK=layout.block_size,
        HAS_ORDER=not layout.is_identity, HAS_KEEP=keep is not None, POOL=parts == 1, STAND_INS=stand_ins,
        num_warps=block_warps(k, layout.block_size),
    )  # fmt: skip
    if parts > 1:
        means = block_means(k, layout, keep, parts, dtype)
    return Keys(k_out, v_out, means, bias, length, weights, spreads=spreads, turns=turns)


def pooled_parts(request: Request) -> int:
    """Means of a block that the keys are needed with; 0: none."""
    return request.method.k_parts if request.predicts and request.method.strategy == "rf_v2" else 0


def block_means(
    x: Tensor, layout: TokenLayout, keep: Tensor | None = None, parts: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`pooling.block_means` in one read of x."""
    batch, heads, _, head_dim = x.shape
    means = x.new_empty((batch, heads, layout.num_blocks * parts, head_dim), dtype=dtype)
    size = layout.block_size // parts
    # of small blocks one warp has several, so that it asks for enough at once
    several = max(1, min(32, 4096 // _padded(head_dim)) // size)
    _pool(x, layout, keep, size, means, None, min(max(1, size // 8), row_warps(x)), several)
    return means


def new_spreads(request: Request) -> Tensor | None:
    """Room for `spread.of_keys`, if it is asked for."""
    k = request.k
    shape = (*k.shape[:2], request.k_layout.num_blocks)
    return k.new_empty(shape, dtype=torch.float32) if request.method.spreads else None


def pooled_keys(request: Request, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """The means of k that a prediction wants, and spreads: with as many warps as `gather` has, and so the same bits."""
    layout, keep, parts = request.k_layout, request.keep, request.method.k_parts
    dtype, spreads = spread.means_dtype(request.method, k.dtype), new_spreads(request)
    means = k.new_empty((*k.shape[:2], layout.num_blocks, k.shape[3]), dtype=dtype) if parts == 1 else None
    if means is not None or spreads is not None:
        _pool(k, layout, keep, layout.block_size, means, spreads, block_warps(k, layout.block_size))
    return block_means(k, layout, keep, parts, dtype) if means is None else means, spreads


def _pool(
    x: Tensor,
    layout: TokenLayout,
    keep: Tensor | None,
    size: int,
    means: Tensor | None,
    spreads: Tensor | None,
    warps: int,
    several: int = 1,
) -> None:
    from rainfusion.backends.triton.kernels import blocks

    x = whole_rows(x)
    batch, heads, length, head_dim = x.shape
    number = layout.num_blocks * (layout.block_size // size)
    launch(
        blocks.pool_kernel, batch * heads * math.ceil(number / several),
        x, layout.order, None if keep is None else as_bytes(keep), means, spreads, *row_strides(x), heads, length,
        number,
        UNIT=row_unit(x), D=head_dim, D_PAD=_padded(head_dim), BLOCK=size, SEVERAL=several,
        HAS_ORDER=not layout.is_identity, HAS_KEEP=keep is not None, num_warps=warps,
    )  # fmt: skip


class _Means(NamedTuple):
    """What rf_v2's scores are found from."""

    q: Tensor  # [B, H, NQ * q_parts, D], of `spread.means_dtype`
    k: Tensor  # [B, Hk, NK * k_parts, D]
    live: Tensor | None  # bool [B, NK * k_parts]: blocks, or parts, with a key left; None: all have one but for padding
    spreads: Tensor | None  # fp32 [B, Hk, NK], with predictor="spread"
    wide: Tensor | None  # [B, Hk, W, D], with spreads where means stand for blocks: `spread.Wide`
    farthest: Tensor | None  # fp32 [B, Hk, pieces], likewise: the largest distances of means from their wide ones
    numbers: Tensor | None  # uint8 [B, W], likewise, if `live` is not None

    def of(self, b: int, heads: slice, gqa_ratio: int) -> _Means:
        """Some heads of a batch element."""
        k_heads = slice(heads.start // gqa_ratio, heads.stop // gqa_ratio)
        here, k_here = slice(b, b + 1), (slice(b, b + 1), k_heads)
        return _Means(
            whole_rows(self.q[here, heads]),
            whole_rows(self.k[k_here]),
            None if self.live is None else self.live[here],
            None if self.spreads is None else self.spreads[k_here],
            None if self.wide is None else whole_rows(self.wide[k_here]),
            None if self.farthest is None else self.farthest[k_here],
            None if self.numbers is None else self.numbers[here],
        )


def choose(request: Request, keys: Keys | None) -> BlockMask:
    """`select` of `scores`. A list of int16 cannot take their memory: with it half of the heads are scored at a time.

    So list and scores together take no more than scores alone.
    """
    method, (batch, heads) = request.method, request.q.shape[:2]
    rows, columns = request.q_layout.num_blocks, request.k_layout.num_blocks
    dtype, head_bytes = index_dtype(method.block_size, columns), rows * columns * 4
    at_once = min(_MANY_SCORES, max(_FEW_SCORES, batch * heads * head_bytes // 2))
    if dtype == torch.int32 or batch * heads * head_bytes <= at_once:
        return select(request, scores(request, keys), request.budgets, method.exact_budget)
    means, budgets = _means(request, keys), request.budgets
    counts = torch.empty((batch, heads, rows), dtype=torch.int32, device=request.q.device)
    indices = torch.empty((batch, heads, rows, columns), dtype=dtype, device=request.q.device)
    for b in range(batch):
        for slab in even_slabs(heads, head_bytes, at_once, request.gqa_ratio):
            found = _rf_v2_scores(request, means.of(b, slab, request.gqa_ratio))
            own = budgets[slab] if len(budgets) > 1 else budgets
            _keep_best(request, found, own, method.exact_budget, counts[b, slab], indices[b, slab])
            del found  # before the next ones are made
    return BlockMask(counts, indices, method.block_size)


def scores(request: Request, keys: Keys | None) -> Tensor:
    """fp32 [B, H, NQ, NK], the same with keys that were prepared as without, bit for bit."""
    keep = request.keep
    if request.method.strategy == "ada_bsa":
        if keys is not None and keys.scales is None:
            return _group_mass(request, keys.k)
        clean = request.k if keep is None else request.k.masked_fill(~keep[:, None, :, None], 0.0)
        return _group_mass(request, clean)
    return _rf_v2_scores(request, _means(request, keys))


def _means(request: Request, keys: Keys | None) -> _Means:
    method, keep = request.method, request.keep
    dtype = spread.means_dtype(method, request.q.dtype)
    q_means = block_means(request.q, request.q_layout, None, method.q_parts, dtype)
    if keys is None or keys.means is None:
        k_means, spreads = pooled_keys(request, whole_rows(request.k))
    else:
        k_means, spreads = keys.means, keys.spreads
    live = None if keep is None else live_blocks(request.k_layout, keep, method.k_parts)
    if not (method.spreads and method.compensate):
        return _Means(q_means, k_means, live, spreads, None, None, None)
    return _Means(q_means, k_means, live, spreads, *_widened(k_means, live, _present(request.k_layout, method.k_parts)))


def _widened(means: Tensor, live: Tensor | None, present: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """`spread.widened`, how far means are from theirs, and numbers where not all but the last are TOGETHER.

    Without `live` the first `present` means are those of keys. Distances are the largest of pieces of a head.
    """
    from rainfusion.backends.triton.kernels import ranking

    batch, heads, number, head_dim = means.shape
    groups, at_once = math.ceil(number / spread.TOGETHER), 4096 // _padded(head_dim)
    pieces = math.ceil(groups / at_once)
    wide = means.new_empty((batch, heads, groups, head_dim))
    farthest = means.new_empty((batch, heads, pieces), dtype=torch.float32)
    launch(
        ranking.widen_kernel, batch * heads * pieces,
        means, None if live is None else as_bytes(live), wide, farthest, number, groups, heads, present,
        D=head_dim, D_PAD=_padded(head_dim), PER_WIDE=spread.TOGETHER, ROWS=at_once, num_warps=8,
    )  # fmt: skip
    if live is None:
        return wide, farthest, None
    padded = F.pad(live, (0, groups * spread.TOGETHER - number))
    return wide, farthest, padded.unflatten(1, (groups, spread.TOGETHER)).sum(2, dtype=torch.uint8)


def _present(layout: TokenLayout, parts: int) -> int:
    """How many parts of blocks are not padding."""
    return math.ceil(layout.seq_len / (layout.block_size // parts))


def _rf_v2_scores(request: Request, means: _Means) -> Tensor:
    return _mean_scores(request, means) if request.method.q_parts == 1 else _part_scores(request, means)


def _mean_scores(request: Request, means: _Means) -> Tensor:
    """`predictors.mean_scores`"""
    from rainfusion.backends.triton.kernels import ranking

    batch, heads, rows, head_dim = means.q.shape
    columns = means.k.shape[2]
    found = means.q.new_empty((batch, heads, rows, columns))
    live = None if means.live is None else as_bytes(means.live)
    tile = 64
    launch(
        ranking.mean_scores_kernel, batch * heads * math.ceil(rows / tile) * math.ceil(columns / tile),
        means.q, means.k, live, found, request.scale, heads, request.gqa_ratio, rows, columns,
        D=head_dim, BM=tile, BN=tile, BD=32, HAS_LIVE=live is not None, PRECISION=_exact_products(means.q), num_warps=4,
    )  # fmt: skip
    return found


def _part_scores(request: Request, means: _Means) -> Tensor:
    """`predictors.part_mass`, or with spreads `predictors.part_errors`."""
    from rainfusion.backends.triton.kernels import ranking, tuning

    q_layout, k_layout = request.q_layout, request.k_layout
    parts, k_parts = request.method.q_parts, request.method.k_parts
    batch, heads, _, head_dim = means.q.shape
    rows, columns = q_layout.num_blocks, k_layout.num_blocks
    found = means.q.new_empty((batch, heads, rows, columns), dtype=torch.float32)
    live = None if means.live is None else as_bytes(means.live)
    tile = tuning.part_tile(_capability(means.q), _padded(head_dim), means.q.dtype.itemsize)
    programs = batch * heads * math.ceil(rows * parts / tile.queries)
    sizes = dict(
        D=head_dim, D_PAD=_padded(head_dim), PARTS=parts, K_PARTS=k_parts, PER_WIDE=spread.TOGETHER,
        BM=tile.queries, BN=tile.keys,
        # products of tf32: means of 32 tokens say less than their eleven bits
        PRECISION=_products(means.q, 1), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tile.registers is not None:
        sizes["maxnreg"] = tile.registers
    groups, pieces = (0 if x is None else x.shape[2] for x in (means.wide, means.farthest))
    launch(
        ranking.part_scores_kernel, programs,
        means.q, means.k, means.wide, means.farthest, live, means.numbers, means.spreads, found,
        request.scale * LOG2E, heads, request.gqa_ratio, rows, columns, groups, pieces,
        _present(q_layout, parts), _present(k_layout, k_parts), **sizes,
    )  # fmt: skip
    if means.live is not None:
        found.masked_fill_(~means.live.unflatten(1, (columns, k_parts)).any(2)[:, None, None], -torch.inf)
    return found


def _group_mass(request: Request, k: Tensor) -> Tensor:
    """`predictors.antidiagonal_mass`; k has zeros where keys were removed, and may be longer than the sequence."""
    from rainfusion.backends.triton.kernels import ranking, tuning

    q, k, k_len = whole_rows(request.q), whole_rows(k), request.k.shape[2]
    batch, heads, q_len, head_dim = q.shape
    rows, columns = request.q_layout.num_blocks, request.k_layout.num_blocks
    mass = q.new_empty((batch, heads, rows, columns), dtype=torch.float32)
    groups = as_bytes(live_groups(request.keep, batch, k_len, columns, k.device)).contiguous()
    tile = tuning.mass_tile(_capability(q), _padded(head_dim), q.dtype.itemsize)
    launch(
        ranking.group_mass_kernel, batch * heads * math.ceil(rows * 16 / tile.queries),
        q, k, groups, mass, *row_strides(q, k), request.scale / 8 * LOG2E, heads, request.gqa_ratio, rows,
        columns, q_len, k_len,
        UNIT=row_unit(q), D=head_dim, BM=tile.queries, BN=tile.keys,
        BD=_padded(head_dim) if q.dtype.itemsize == 2 else 32, IS_CAUSAL=request.is_causal,
        PRECISION=_exact_products(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return mass


def select(request: Request, scores: Tensor, budgets: tuple[int, ...] | Tensor, free_only: bool) -> BlockMask:
    """`selection.keep_best` or `keep_mass`. A list of int32 takes the scores' memory: a row is read, then written."""
    block_size = request.method.block_size
    dtype = index_dtype(block_size, scores.shape[3])
    counts = torch.empty(scores.shape[:3], dtype=torch.int32, device=scores.device)
    indices = scores.view(dtype) if dtype == torch.int32 else torch.empty_like(scores, dtype=dtype)
    if request.method.strategy == "rf_v2":
        _keep_best(request, scores, budgets, free_only, counts, indices)
    else:
        _keep_mass(request, scores, counts, indices)
    return BlockMask(counts, indices, block_size)


def _keep_best(
    request: Request,
    scores: Tensor,
    budgets: tuple[int, ...] | Tensor,
    free_only: bool,
    counts: Tensor,
    indices: Tensor,
) -> None:
    """One budget for all rows needs no tensor; else int32 [H] or [B * H]."""
    from rainfusion.backends.triton.kernels import ranking

    batch, heads, rows, columns = scores.shape
    several, one = None, 0
    if isinstance(budgets, Tensor):
        several = budgets.flatten()
    elif len(request.budgets) > 1:  # also where these are of one head alone
        several = budget_table.on_device(budgets, scores.device)
    else:
        one = budgets[0]
    protected = request.k_layout.num_protected
    part = _AT_ONCE // request.method.k_block
    is_long = columns > 64 * part  # more than a million keys
    # one warp has a row, and registers for sixteen rows at a time; AMD GPUs with 32 lanes to a warp have too few
    sizes = dict(num_warps=1 if torch.version.hip is None else 2)
    if torch.version.hip is None and not is_long:
        sizes["maxnreg"] = 128
    launch(
        ranking.keep_best_kernel, batch * heads * rows,
        scores, as_bytes(request.q_layout.protected), as_bytes(request.k_layout.protected), counts, indices, one,
        several, 1 if several is None else len(several), columns - protected if free_only else columns, protected,
        rows, columns,
        PART=2 * part if is_long else part, PER_HEAD=several is not None, FREE_ONLY=free_only, **sizes,
        budget="number" if several is None else None,
    )  # fmt: skip


def _keep_mass(request: Request, mass: Tensor, counts: Tensor, indices: Tensor) -> None:
    from rainfusion.backends.triton.kernels import ranking

    batch, heads, rows, columns = mass.shape
    method = request.method
    live = None if request.keep is None else as_bytes(live_blocks(request.k_layout, request.keep))
    launch(
        ranking.keep_mass_kernel, batch * heads * rows,
        mass, live, counts, indices, _bits(1.0 - method.mean_sparsity), method.cdf_threshold, heads, rows, columns,
        WIDE=_RANKED // method.k_block, IS_CAUSAL=request.is_causal, KEEP_SINK=method.keep_sink,
        KEEP_RECENT=method.keep_recent, HAS_THRESHOLD=method.cdf_threshold < 1.0, num_warps=1,
    )  # fmt: skip


def row_schedule(request: Request, mask: BlockMask) -> Tensor:
    """int32 [NQ] or [B * H, NQ]: the order in which to take the rows of blocks, heavy ones first.

    Rows that rf_v2 chose are all alike but for the protected ones, which are known beforehand.
    """
    if request.predicts and request.method.strategy == "rf_v2":
        return request.q_layout.protected_first
    return heavy_first(mask)


def heavy_first(mask: BlockMask) -> Tensor:
    """int32 [B * H, NQ]: each head's rows, those with the most blocks first, so that none is left for the end."""
    from rainfusion.backends.triton.kernels import ranking

    batch, heads, rows = mask.counts.shape
    counts = mask.counts.contiguous()
    schedule = torch.empty((batch * heads, rows), dtype=torch.int32, device=counts.device)
    launch(ranking.heavy_first_kernel, batch * heads * math.ceil(rows / 64), counts, schedule, rows, BM=64, BN=128)
    return schedule


def attend(request: Request, keys: Keys, mask: BlockMask) -> tuple[Tensor, Tensor | None]:
    """The attention kernel: reads q's rows, and writes those of out, through the order of the layout."""
    from rainfusion.backends.triton import quantising
    from rainfusion.backends.triton.kernels import attention, tuning

    q, q_layout, block = whole_rows(request.q), request.q_layout, mask.q_block
    batch, heads, q_len, head_dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device) if request.return_lse else None
    rows, stand_ins = row_schedule(request, mask), stand_in_bias(request, mask, keys)
    describable = mask.k_block if row_unit(keys.k) > 1 else 0
    if keys.scales is None:
        padded = _padded(head_dim)
        tile = tuning.attention_tile(_capability(q), padded, q.dtype.itemsize, describable)
    else:
        padded = quantising.padded(head_dim)
        tile = tuning.quantised_tile(_capability(q), padded, describable)
    k_scale, v_scale, k_mean = keys.scales or (None, None, None)
    counts, indices = mask.counts.contiguous(), mask.indices.contiguous()
    queries, at_once = min(tile.queries, block), min(tile.keys, block)
    k: object = keys.k
    v: object = keys.v
    if tile.described:
        k = _descriptor(keys.k, at_once, padded)
        v = _descriptor(keys.v, *((at_once, padded) if v_scale is None else (padded, at_once)))
    launch(
        attention.attention_kernel, batch * heads * mask.num_q_blocks * (block // queries),
        q, k, v, out, lse, counts, indices, rows, q_layout.order, keys.bias, stand_ins,
        k_scale, v_scale, k_mean, *row_strides(q, out), *row_strides(keys.k), *row_strides(keys.v),
        rows.stride(0) if rows.dim() == 2 else 0, abs(request.scale) * LOG2E, heads, request.gqa_ratio,
        mask.num_q_blocks, mask.num_k_blocks, stand_in_blocks(keys.weights, mask.k_block), q_len, keys.length,
        UNIT=row_unit(q), K_UNIT=row_unit(keys.k), V_UNIT=row_unit(keys.v), D=head_dim, D_PAD=padded,
        WIDTH=keys.k.shape[3], BLOCK=block, KEYS=mask.k_block, BM=queries, BN=at_once,
        DESCRIBED=tile.described, HAS_ORDER=not q_layout.is_identity, HAS_BIAS=keys.bias is not None,
        HAS_LSE=request.return_lse, IS_CAUSAL=request.is_causal, STAND_INS=stand_ins is not None,
        NEGATE=request.scale < 0, PRECISION=_products(q, request.method.inner_precise),
        LARGEST=quantising.LARGEST.get(keys.k.dtype), SHIFT=quantising.shift(keys.v.dtype),
        PERMUTED=quantising.permuted(keys.v.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def _descriptor(x: Tensor, rows: int, columns: int) -> object:
    """Of x [B, Hk, S, D]: so many rows at once, and zeros past either end. Only x's type makes another kernel."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = for_copy_engine(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def for_copy_engine(x: Tensor) -> Tensor:
    """x, of whole rows, or a copy: it wants strides in multiples of 16 bytes, and none of 0."""
    suits = all(stride > 0 and stride * x.dtype.itemsize % 16 == 0 for stride in x.stride()[:3])
    return x if suits else x.clone(memory_format=torch.contiguous_format)


def stand_in_weights(request: Request, bias: Tensor | None, tile: int) -> Tensor:
    """[B or 1, whole tiles]: log2 of each block's number of keys; -inf where there are none, and past the end.

    fp16, in which numbers of keys are exact, or off by 0.14%, where inputs have no more digits themselves; fp32 where a
    bias adds other values.
    """
    layout, k = request.k_layout, request.k
    blocks, size = layout.num_blocks, layout.block_size
    width = math.ceil(blocks / tile) * tile
    dtype = torch.float16 if request.bias is None and k.dtype.itemsize == 2 else torch.float32
    if bias is not None:
        weights = torch.logsumexp(bias.unflatten(1, (blocks, size)) / LOG2E, 2) * LOG2E
        return F.pad(weights, (0, width - blocks), value=-torch.inf).to(dtype).contiguous()
    return _weights_of_whole_blocks(blocks, size, layout.seq_len, width, dtype, k.device)


def _weights_of_whole_blocks(
    blocks: int, size: int, length: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Where every key takes part: made once, and not by the stream of one caller, for all of them."""
    key = (blocks, size, length, width, dtype, device)
    found = _WEIGHTS.get(key)
    if found is None:
        capturing = is_capturing(device)  # then its memory is the graph's
        found = torch.full((1, width), -torch.inf, dtype=dtype, device=device if capturing else "cpu")
        found[:, :blocks] = math.log2(size)
        found[:, blocks - 1] = math.log2(length - (blocks - 1) * size)
        if not capturing:
            found = found.to(device)
            if len(_WEIGHTS) >= 1024:  # of a few KB each
                _WEIGHTS.pop(next(iter(_WEIGHTS)), None)
            _WEIGHTS[key] = found
    keep_if_captured(device, found)
    return found


def stand_in_blocks(weights: Tensor | None, block_size: int) -> int:
    """How many blocks the means fill."""
    return 0 if weights is None else weights.shape[1] // block_size


def stand_in_bias(request: Request, mask: BlockMask, keys: Keys) -> Tensor | None:
    """What the means that stand in for blocks count in each row, see `stand_ins_kernel`; None if there are none."""
    from rainfusion.backends.triton.kernels.compensation import stand_ins_kernel

    if keys.weights is None:
        return None
    q, layout, weights = request.q, request.q_layout, keys.weights
    q = whole_rows(q) if keys.spreads is not None else q  # else it is not read
    batch, heads, rows, columns = mask.indices.shape
    tiles, at_once = weights.shape[1] // mask.q_block, 4
    bias = weights.new_empty((batch, heads, rows, (tiles + 1) * mask.q_block))
    launch(
        stand_ins_kernel, batch * heads * math.ceil(rows / at_once),
        mask.counts.contiguous(), mask.indices.contiguous(), weights, keys.bias, keys.spreads,
        None if keys.spreads is None else q, layout.order, bias, *row_strides(q), tiles if len(weights) > 1 else 0,
        spread.GAIN * request.scale**2, heads, request.gqa_ratio, rows, columns, tiles, q.shape[2], keys.length,
        UNIT=row_unit(q), D=q.shape[3], D_PAD=_padded(q.shape[3]), BLOCK=mask.q_block, KEYS=mask.k_block,
        ROWS=at_once, BN=512, LIST=512, EVERY=spread.EVERY, HAS_ORDER=not layout.is_identity,
        num_warps=4 if q.shape[3] <= 128 else 8,
    )  # fmt: skip
    return bias


# ---------------------------------------------------------------------------------------------------------------------
# small pieces


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


def multiplies_e4m3(x: Tensor) -> bool:
    """Whether x's GPU does, of those that have kernels of eight bits."""
    capability = _capability(x)
    return isinstance(capability, str) or capability >= (8, 9)


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


def row_unit(x: Tensor) -> int:
    """Elements of 16 bytes, which kernels read at once, if rows of x [B, H, S, D] are a multiple of that; else 1."""
    unit = 16 // x.element_size()
    return 1 if x.shape[3] % unit else unit


def whole_rows(x: Tensor) -> Tensor:
    """x [B, H, S, D], or a copy if its channels are apart, or its rows not where `row_unit` has them.

    So kernels have no variants for strides.
    """
    unit, (b, h, s, d) = row_unit(x), x.stride()
    if d == 1 and x.data_ptr() % 16 == 0:
        if not (b % unit or h % unit or s % unit):
            return x
        sides = zip((b, h, s), x.shape, strict=False)  # the stride of a side of 1 is never used
        if not any(stride % unit for stride, number in sides if number > 1):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def row_strides(*tensors: Tensor) -> list[int]:
    """Of batch, heads and tokens, of one tensor after the other, in units of the first one's `row_unit`."""
    unit = row_unit(tensors[0])
    return [stride // unit for x in tensors for stride in x.stride()[:3]]


def _padded(head_dim: int) -> int:
    return max(16, _power_of_two(head_dim))


def row_warps(x: Tensor) -> int:
    """Warps for one block of tokens [block_size, D] that is read once: about 128 bytes of a row to a warp."""
    return min(8, max(1, _padded(x.shape[-1]) * x.dtype.itemsize // 128))


def block_warps(x: Tensor, size: int) -> int:
    """Of the passes that find means and spreads of keys in blocks of so many: of all alike, for sums of the same bits.

    Few, since those that share a sum wait for each other.
    """
    return 1 if size < 64 else 2 * row_warps(x)
