"""Attention over the kept blocks on Hopper, in Gluon: one producer warp feeds two consumer warpgroups.

    producer     takes a row of blocks after the other, walks its list and copies K_j and V_{j-1} by TMA into one of NS
                 stages; it is ahead of the consumers, by the first tiles of the next row if need be
    consumers    64 query rows each: S = Q K_j^T, softmax while P_{j-1} V_{j-1} still runs, then P_j is next

There is a program for each multiprocessor, and a counter in memory hands out rows: as the hardware does with programs,
but what is at the start and the end of a row in one warpgroup runs beside the products of the other one.

What keeps it fast, learnt by measuring and by reading the machine code (docs/performance.md has the numbers):

- K_j and V_{j-1} share a stage and are released together: every release costs a barrier of 128 threads.
- The wait for K_{j+1} stands between the softmax and the wait for P V: a wait loop ends a basic block, and without it
  ptxas moves the wait for P V above the softmax, and nothing overlaps.
- The list is walked from its end, so that the ragged block, if kept, comes first, and the loop is free of masks.
- Means that stand in for skipped blocks are blocks of keys too, ahead of the list, in a loop of their own.
- Finer blocks of keys fill the same tile from several places, by a box of the copy engine for each; the last tile of a
  list, which comes first, may be filled in part.
- Row sums stay per lane until the end, and row maxima are reduced as a shallow tree.
- P is carried from step to step two values to a register, packed by hand: the compiler would take them apart.
- The first tile always has a bias, of zeros or of -inf where it has no key: with branches around it, ptxas finds one
  maximum after the other in the loop, with nothing beside it.
- The card runs at its power limit, so that an instruction saved is worth more than one hidden.

Q rows are gathered, and out rows scattered, through `order`, by the consumers themselves: Q of the next row while they
work on this one, out from their registers.
Quantised (QUANT = 1: e4m3, 2: int8 for Q and K, P and V e4m3): q is quantised here, row by row; K per block of keys, or
per head where blocks are finer: a scale for each part of a tile costs 14% more instructions in the loop. V per channel,
its blocks transposed, their keys permuted so that P's registers are already what wgmma reads. Rows of P are summed by
the tensor cores, times a tile of ones: as it is rounded, and for no instruction. Tensor cores keep 14 bits of sums of
eight-bit products, and cut off what is small beside the sum so far: so they sum one tile, and registers add up tiles.

In e4m3 the softmax would take twice as long as the products, so it is done on pairs of f16, without exponentials:

- S is f16. q and k reach 16 rather than 448, where e4m3 is as fine, so that S stays below 128 * 16 * 16.
- Bits of e4m3 grow by 8 for every power of two: 8 log2 P, rounded to an integer, is P, 1 + f in the place of 2^f. That
  is as much as 6% too large, and 4% on average, which the row's sum has, too: the rest adds a fifth to P's rounding.
- What is subtracted is a multiple of 1/2 that f16 holds: not less than the largest logit, and it seldom moves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rainfusion.backends.triton.kernels.arguments import ANYWHERE, SIZES

_TO_E4M3: gl.constexpr = gl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
    "mov.b32 $0, {lo, hi}; }"
)
_TO_BYTES: gl.constexpr = gl.constexpr(" ".join(f"prmt.b32 ${i}, ${i + 4}, ${i + 8}, 0x6420;" for i in range(4)))
# $1 * $2 - 120, or a little more: a number that f16 holds, then a multiple of 4
_ROUND_UP: gl.constexpr = gl.constexpr(
    "{ .reg .f32 x, y; fma.rn.f32 x, $1, $2, 0fC2F00000; mul.f32 y, x, 0f3F802000; max.f32 x, x, y; "
    "and.b32 x, x, 0xFFFFE000; add.rp.f32 x, x, 0f4C400000; sub.f32 $0, x, 0f4C400000; }"
)
_LINE: gl.constexpr = gl.constexpr(0.0575)  # log2 of the mean of (1 + f) / 2^f
# 1.5 * 2^23: added to an integer's bits it makes the float of that integer, 1.5 * 2^23 too large
_INT_BITS: gl.constexpr = gl.constexpr(0x4B400000)
_INT_FLOAT: gl.constexpr = gl.constexpr(12582912.0)
_SLOTS: gl.constexpr = gl.constexpr(4)  # for numbers of rows on their way from the producer to the consumers


def _scaled_unless_never() -> str:
    """32 pairs of f16, $32 on, times $64 on, plus $80 on, or 0 if that is less, and NaN if it is NaN.

    A branch, never taken, keeps them where they stand: where it is asked for the compiler would move them behind the
    wait for P V.
    """
    copies = " ".join(f"mov.b32 ${i}, ${i + 32};" for i in range(32))
    lines = " ".join(f"fma.rn.relu.f16x2 ${i}, ${i}, ${64 + i % 16}, ${80 + i % 16};" for i in range(32))
    return (
        "{ .reg .pred never, any; setp.eq.b32 never, $64, 0xFFFFFFFF; vote.sync.any.pred any, never, 0xffffffff; "
        f"{copies} @any bra DONE; {lines} DONE: }}"
    )


def _rescale_unless_one() -> str:
    """32 accumulators of a lane times their row's factor, $64 or $66, skipped where all of the warp's factors are 1.

    In a lane's registers two neighbours are of its first row, the next two of its second, and so on.
    """
    copies = " ".join(f"mov.f32 ${i}, ${i + 32};" for i in range(32))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${64 + i % 4 // 2 * 2};" for i in range(32))
    return (
        "{ .reg .pred moved, any; setp.neu.f32 moved, $64, 0f3F800000; setp.neu.or.f32 moved, $66, 0f3F800000, moved; "
        f"vote.sync.any.pred any, moved, 0xffffffff; {copies} @!any bra DONE; {products} DONE: }}"
    )


_RESCALE: gl.constexpr = gl.constexpr(_rescale_unless_one())
_SCALE: gl.constexpr = gl.constexpr(_scaled_unless_never())
_SCALE_REGISTERS: gl.constexpr = gl.constexpr(",".join(["=r"] * 32 + ["r"] * 64))
_RESCALE_REGISTERS: gl.constexpr = gl.constexpr(",".join(["=f"] * 32 + ["f"] * 64))


@gluon.jit
def _exp2(x):
    # one instruction: exp2 of the language adds code for denormals
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _advance(stage, phase, NS: gl.constexpr):
    following = stage + 1
    wraps = following == NS
    return gl.where(wraps, 0, following), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _row_max(s, LAYOUT: gl.constexpr):
    # column = 32 a + 8 b + 2 lane + e: in-thread axes first, as a shallow tree, lanes last
    t = gl.max(s.reshape([s.shape[0], s.shape[1] // 32, 4, 4, 2]), 4)
    t = gl.max(t, 2)
    t = gl.max(t, 1)
    return gl.convert_layout(gl.max(t, 1), LAYOUT)


@gluon.jit
def _pairs(s, PACK: gl.constexpr, TYPES: gl.constexpr, LAYOUT: gl.constexpr):
    """[M, N] -> neighbours as f16 in a register, two of int32 [M, N / 16, 4]: 16 g + 2 c, and 16 g + 8 + 2 c."""
    t = s.reshape([s.shape[0], s.shape[1] // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    x, y = gl.split(t)
    x, y = gl.split(gl.inline_asm_elementwise(PACK, TYPES, [x, y], dtype=gl.int32, is_pure=True, pack=1))
    return gl.convert_layout(x, LAYOUT), gl.convert_layout(y, LAYOUT)


@gluon.jit
def _twice(x, LAYOUT: gl.constexpr):
    """fp32 [M] as f16, twice in a register, for the pairs of its row."""
    t = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)
    t = gl.convert_layout(t, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return t[:, None, None] + gl.zeros([x.shape[0], 8, 4], gl.int32, LAYOUT)


@gluon.jit
def _on_pairs(INSTRUCTION: gl.constexpr, x, y, z):
    return gl.inline_asm_elementwise(INSTRUCTION, "=r,r,r,r", [x, y, z], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _max_of_pairs(x, y):
    return gl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _row_max_of_pairs(x, y, LAYOUT: gl.constexpr):
    t = _max_of_pairs(x, y).reshape([x.shape[0], 2, 2, 2, 4])
    t = gl.reduce(t, 3, _max_of_pairs)
    t = gl.reduce(t, 2, _max_of_pairs)
    t = gl.reduce(t, 1, _max_of_pairs)
    t = gl.reduce(t, 1, _max_of_pairs)
    t = gl.inline_asm_elementwise(
        "{ .reg .b16 x, y; mov.b32 {x, y}, $1; max.f16 x, x, y; cvt.f32.f16 $0, x; }", "=f,r", [t],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(t, LAYOUT)


@gluon.jit
def _rounded(x):
    """Pairs of f16 from 0 to 127 -> integers, in the low bytes of both; NaN has those of NaN in e4m3."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 x; mov.b32 x, 0x64006400; add.rn.f16x2 $0, $1, x; }", "=r,r", [x],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _e4m3_softmax(s, c, own, m, KEPT: gl.constexpr, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """f16 [M, N], its factor, what is then added to its columns or None, and the maxima so far, in units of log2.

    KEPT: see `_scaled_unless_never`.
    -> the bits of P as `_pairs` would have it, maxima, and what they scale earlier sums by.
    """
    x, y = _pairs(s, "mov.b32 $0, {$1, $2};", "=r,h,h", LAYOUT)
    c = (c * 8.0).to(gl.float16).to(gl.float32)
    if own is not None:
        own = (own * 8.0)[None, :] + gl.zeros_like(s).to(gl.float32)
        x_own, y_own = _pairs(own, "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", LAYOUT)
        factor = _twice(c, LAYOUT)
        x = _on_pairs("fma.rn.f16x2 $0, $1, $2, $3;", x, factor, x_own)
        y = _on_pairs("fma.rn.f16x2 $0, $1, $2, $3;", y, factor, y_own)
        c = gl.zeros_like(c) + 1.0
    largest = _row_max_of_pairs(x, y, ROWS)
    largest = gl.inline_asm_elementwise(_ROUND_UP, "=f,f,f", [largest, c], dtype=gl.float32, is_pure=True, pack=1)
    m_new = gl.maximum(m, largest * 0.125 + 15.0)
    base = m_new
    if own is not None:
        base = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far: 0 rather than NaN
    factor = _twice(c, LAYOUT)
    start = 120.0 - base * 8.0  # of the bits of 2^8
    start = _twice(gl.where(gl.abs(start) > 65504.0, float("nan"), start), LAYOUT)  # what f16 cannot hold shows
    if KEPT:
        x, y = gl.inline_asm_elementwise(
            _SCALE, _SCALE_REGISTERS, [x, y, factor, start], dtype=(gl.int32, gl.int32), is_pure=True, pack=16
        )
    else:
        x = _on_pairs("fma.rn.relu.f16x2 $0, $1, $2, $3;", x, factor, start)
        y = _on_pairs("fma.rn.relu.f16x2 $0, $1, $2, $3;", y, factor, start)
    return _rounded(x), _rounded(y), m_new, _exp2(m - base)


@gluon.jit
def _weights_of_bits(x, y, LAYOUT: gl.constexpr):
    """P as the left operand of P V: keys 16 g + 8 h + 2 c + e at 16 g + 4 c + 2 h + e, as `_weights` has them."""
    # of a lane's four registers the k-th is that of the k-th result, whose four bytes are where the registers were
    t_0, t_1, t_2, t_3 = gl.inline_asm_elementwise(
        _TO_BYTES, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [x, y],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4,
    )  # fmt: skip
    t = gl.join(gl.join(t_0, t_2), gl.join(t_1, t_3))  # g / 4 and byte, c, upper and lower bit of k
    t = t.reshape([x.shape[0], x.shape[1] // 4, 4, 4, 2, 2]).permute((0, 1, 4, 5, 3, 2))
    return gl.convert_layout(t.reshape([x.shape[0], x.shape[1] * 16]), LAYOUT)


@gluon.jit
def _row_sums(b_p, s_ones, LAYOUT: gl.constexpr):
    """Of one tile of quantised P, [M, 8], on their way."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4)
    nothing = gl.zeros([b_p.shape[0], 8], gl.float32, LAYOUT)
    return warpgroup_mma(gl.convert_layout(b_p, OPERAND), s_ones, nothing, use_acc=False, is_async=True)


@gluon.jit
def _lane_sums(p):
    # [M, 4]: each lane's own columns
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _row_at(turn, rows, rows_stride, NQ, TURNS):
    """-> head, counted over the batch, and row of blocks whose turn it is; the last one past the end."""
    turn = gl.minimum(turn, TURNS - 1)
    bh = turn // NQ
    row = gl.load(rows + bh.to(gl.int64) * rows_stride + turn % NQ)
    return bh, row


@gluon.jit
def _next_turn(turn, NQ, TURNS, TOGETHER):
    """Of the turns NQ * head + rank of a row in its head's schedule, the one that is taken as the turn-th.

    One head goes after the other, since they share what L2 holds; but the last TOGETHER side by side, the heavy rows of
    all of them first, so that none is left for the end.
    """
    last = turn - (TURNS - TOGETHER * NQ)
    beside = (TURNS // NQ - TOGETHER + last % TOGETHER) * NQ + last // TOGETHER
    return gl.where((last >= 0) & (turn < TURNS), beside, turn)


@gluon.jit
def _places(bh, H, SHARED):
    """-> batch element, head, key head."""
    h = bh % H
    return bh // H, h, h // SHARED


@gluon.jit
def _block_at(j, p_index, n, NK, ALL, STAND_INS: gl.constexpr):
    """The j-th block of a row, or its last: those of means, NK up to ALL, then the list of n from its end."""
    if STAND_INS:
        ahead = ALL - NK
        block = gl.load(p_index - gl.minimum(gl.maximum(j - ahead, 0), gl.maximum(n - 1, 0))).to(gl.int32)
        return gl.where(j < ahead, NK + j, gl.where(n > 0, block, NK))
    else:
        return gl.load(p_index - gl.minimum(n - 1, j)).to(gl.int32)


@gluon.jit
def _tiles(listed, NK, ALL, PIECES: gl.constexpr):
    """How many tiles of 128 keys a row has: of means, and of its list, the last of them perhaps in part."""
    return (listed + PIECES - 1) // PIECES + (ALL - NK) // PIECES


@gluon.jit
def _piece_at(j, r, p_list, listed, NK, ALL, PIECES: gl.constexpr):
    """The r-th block of the j-th tile: those of means, NK up to ALL, then the list's tiles from its end.

    Where the list has no r-th block its last one is given, which does not count.
    """
    ahead = (ALL - NK) // PIECES
    last = (listed + PIECES - 1) // PIECES - 1
    slot = (last - gl.maximum(j - ahead, 0)) * PIECES + r
    block = gl.load(p_list + gl.maximum(gl.minimum(slot, listed - 1), 0)).to(gl.int32)
    return gl.where(j < ahead, NK + j * PIECES + r, block)


@gluon.jit
def _copy_tile(
    desc, boxes, full, j, stage, b, kh, p_list, listed, NK, ALL, ROWS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """The j-th tile of K or V into a stage: by blocks of so many rows, and by 128 bytes of them, as it lies there."""
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    CHUNKS: gl.constexpr = boxes.shape[0] // (full.shape[0] * PIECES)
    mbarrier.expect(full.index(stage), PIECES * CHUNKS * desc.block_type.nbytes)
    for r in gl.static_range(PIECES):
        block = _piece_at(j, r, p_list, listed, NK, ALL, PIECES)
        for chunk in gl.static_range(CHUNKS):
            box = boxes.index((stage * CHUNKS + chunk) * PIECES + r)
            tma.async_copy_global_to_shared(desc, [b, kh, block * ROWS, chunk * WIDTH], full.index(stage), box)


@gluon.jit
def _copy_fine_tiles(
    k_desc, v_desc, p_list, boxes, barriers, stage, phase, b, kh, listed, NK, ALL,
    NS: gl.constexpr, V_ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """What `_producer` does, where a tile's keys are in several blocks."""
    PIECES: gl.constexpr = 128 // KEYS
    k_boxes, v_boxes = boxes
    k_full, v_full, empty = barriers
    n = _tiles(listed, NK, ALL, PIECES)
    if n > 0:
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _copy_tile(k_desc, k_boxes, k_full, 0, stage, b, kh, p_list, listed, NK, ALL, KEYS, PIECES)
        mbarrier.arrive(v_full.index(stage), count=1)  # there is no V in the first stage
        stage, phase = _advance(stage, phase, NS)
        for j in range(1, n):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            _copy_tile(k_desc, k_boxes, k_full, j, stage, b, kh, p_list, listed, NK, ALL, KEYS, PIECES)
            _copy_tile(v_desc, v_boxes, v_full, j - 1, stage, b, kh, p_list, listed, NK, ALL, V_ROWS, PIECES)
            stage, phase = _advance(stage, phase, NS)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _copy_tile(v_desc, v_boxes, v_full, n - 1, stage, b, kh, p_list, listed, NK, ALL, V_ROWS, PIECES)
        mbarrier.arrive(k_full.index(stage), count=1)  # nor a K in the last
        stage, phase = _advance(stage, phase, NS)
    return stage, phase


@gluon.jit
def _keys_of_tile(t, o_n, p_list, listed, Sk, KEYS: gl.constexpr):
    """Of the t-th tile of the list: where its keys are, and which there are."""
    o_slot = t * (128 // KEYS) + o_n // KEYS
    m_slot = o_slot < listed
    o_key = gl.load(p_list + o_slot, mask=m_slot, other=0).to(gl.int32) * KEYS + o_n % KEYS
    return o_key, m_slot & (o_key < Sk)


@gluon.jit
def _producer(
    k_desc, v_desc, counts, indices, rows, turns, boxes, barriers, hints, rows_stride, NQ, NK, ALL, H, SHARED, TURNS,
    TOGETHER, NS: gl.constexpr, V_ROWS: gl.constexpr, STAND_INS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    s_turn, told, heard = hints
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    turn = gl.program_id(0)
    while turn < TURNS:
        following = gl.num_programs(0) + gl.atomic_add(turns, 1, sem="relaxed")
        following = _next_turn(following, NQ, TURNS, TOGETHER)
        mbarrier.wait(heard.index(slot), slot_phase ^ 1)
        s_turn.index(slot).store(gl.full([1], 0, gl.int32, ONE) + following)
        mbarrier.arrive(told.index(slot), count=1)
        slot, slot_phase = _advance(slot, slot_phase, _SLOTS)
        bh, row = _row_at(turn, rows, rows_stride, NQ, TURNS)
        b, h, kh = _places(bh, H, SHARED)
        flat = bh.to(gl.int64) * NQ + row
        listed = gl.load(counts + flat)
        p_list = indices + flat * NK
        if KEYS == 128:
            stage, phase = _copy_tiles(
                k_desc, v_desc, p_list, boxes, barriers, stage, phase, b, kh, listed, NK, ALL, NS, V_ROWS, STAND_INS
            )
        else:
            stage, phase = _copy_fine_tiles(
                k_desc, v_desc, p_list, boxes, barriers, stage, phase, b, kh, listed, NK, ALL, NS, V_ROWS, KEYS
            )
        turn = following
    # nobody takes another: each row was followed by one
    gl.store(turns, 0, mask=turn == gl.num_programs(0) + TURNS - 1)


@gluon.jit
def _copy_tiles(
    k_desc, v_desc, p_list, boxes, barriers, stage, phase, b, kh, listed, NK, ALL,
    NS: gl.constexpr, V_ROWS: gl.constexpr, STAND_INS: gl.constexpr,
):  # fmt: skip
    s_k, s_v = boxes
    k_full, v_full, empty = barriers
    n = listed + (ALL - NK)
    if n > 0:
        p_index = p_list + gl.maximum(listed - 1, 0)
        block = _block_at(0, p_index, listed, NK, ALL, STAND_INS)
        following = _block_at(1, p_index, listed, NK, ALL, STAND_INS)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [b, kh, block * 128, 0], k_full.index(stage), s_k.index(stage))
        mbarrier.arrive(v_full.index(stage), count=1)  # there is no V in the first stage
        stage, phase = _advance(stage, phase, NS)
        for j in range(1, n):
            later = _block_at(j + 1, p_index, listed, NK, ALL, STAND_INS)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [b, kh, following * 128, 0], k_full.index(stage), s_k.index(stage))
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [b, kh, block * V_ROWS, 0], v_full.index(stage), s_v.index(stage))
            stage, phase = _advance(stage, phase, NS)
            block = following
            following = later
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [b, kh, block * V_ROWS, 0], v_full.index(stage), s_v.index(stage))
        mbarrier.arrive(k_full.index(stage), count=1)  # nor a K in the last
        stage, phase = _advance(stage, phase, NS)
    return stage, phase


@gluon.jit
def _quantised_q(x, TYPE: gl.constexpr, QUANT: gl.constexpr):
    """-> x / scale in TYPE, and the scale of each row. A NaN or infinity makes the scale NaN, and so shows."""
    LARGEST: gl.constexpr = 127.0 if QUANT == 2 else 16.0
    scale = gl.maximum(gl.max(gl.abs(x), 1), 1e-30) / LARGEST + gl.sum(x * 0.0, 1)
    x = x / scale[:, None]
    if QUANT == 2:
        x = (x + _INT_FLOAT) - _INT_FLOAT  # to the nearest integer
    return x.to(TYPE), scale


@gluon.jit
def _logits_start(M: gl.constexpr, N: gl.constexpr, QUANT: gl.constexpr, LAYOUT: gl.constexpr):
    """What Q K^T is added to. For integers a number that makes their bits those of a float: no conversion needed."""
    if QUANT == 2:
        return gl.full([M, N], _INT_BITS, gl.int32, LAYOUT)
    elif QUANT == 1:
        return gl.zeros([M, N], gl.float16, LAYOUT)
    else:
        return gl.zeros([M, N], gl.float32, LAYOUT)


@gluon.jit
def _as_floats(s, QUANT: gl.constexpr):
    if QUANT == 2:
        return s.to(gl.float32, bitcast=True)
    else:
        return s


@gluon.jit
def _logits(s, c, QUANT: gl.constexpr):
    """In units of log2. c: their factor, one for all rows, or one a row if quantised."""
    if QUANT == 0:
        return s * c
    else:
        return s * c[:, None] - (c * _INT_FLOAT)[:, None]


@gluon.jit
def _largest_logit(s, c, QUANT: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows' maxima of `_logits(s, c)`, where c > 0."""
    if QUANT == 2:
        return _row_max(s, LAYOUT) * c - c * _INT_FLOAT
    else:
        return _row_max(s, LAYOUT) * c


@gluon.jit
def _powers(s, c, m, SHIFT: gl.constexpr, QUANT: gl.constexpr):
    """exp2(_logits(s, c) - m + SHIFT): one multiply-add before the exponential."""
    if QUANT == 0:
        return _exp2(s * c - m[:, None])
    else:
        return _exp2(s * c[:, None] - (m + (c * _INT_FLOAT - SHIFT))[:, None])


@gluon.jit
def _rescaled(acc, alpha, QUANT: gl.constexpr):
    """acc * alpha[:, None]. Quantised kernels wait for their instructions, so they skip it where no maximum moved."""
    if QUANT != 0:
        factors = alpha[:, None] + gl.zeros_like(acc)
        return gl.inline_asm_elementwise(
            _RESCALE, _RESCALE_REGISTERS, [acc, factors], dtype=gl.float32, is_pure=True, pack=32
        )
    else:
        return acc * alpha[:, None]


@gluon.jit
def _weights(p, LAYOUT: gl.constexpr):
    """P in e4m3 as the left operand of P V."""
    # keys 16 g + 8 h + 2 c + e -> 16 g + 4 c + 2 h + e: a lane's four values are then neighbours, as wgmma wants
    p = p.reshape([p.shape[0], p.shape[1] // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([p.shape[0], p.shape[1]])
    p = gl.convert_layout(p, LAYOUT)
    # four values to a register; `p.to(gl.float8e4nv)` would take them apart again
    return gl.inline_asm_elementwise(_TO_E4M3, "=r,f,f,f,f", [p], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _packed(p, TYPE: gl.constexpr):
    """fp32 [M, N] -> int32 [M, N / 2], neighbours in one: as two bytes each they would travel one to a register."""
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    if TYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def _unpacked(x, TYPE: gl.constexpr, LAYOUT: gl.constexpr):
    low = x.to(gl.int16).to(TYPE, bitcast=True)
    high = (x >> 16).to(gl.int16).to(TYPE, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([x.shape[0], x.shape[1] * 2]), LAYOUT)


@gluon.jit
def _values(s_v, stage, N: gl.constexpr, D: gl.constexpr, QUANT: gl.constexpr):
    """V's tile of a stage as the right operand of P V, [N, D]."""
    if QUANT != 0:
        return s_v.index(stage).reshape([D, N]).permute((1, 0))
    else:
        return s_v.index(stage).reshape([N, D])


@gluon.jit
def _fetch_queries(
    s_raw, q, order, bh, row, q_stride_b, q_stride_h, q_stride_s, H, Sq,
    M: gl.constexpr, D: gl.constexpr, D_REAL: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Q rows of a warpgroup, through `order`, on their way to shared memory."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16 bytes a thread, whole rows
    UNIT: gl.constexpr = 8  # elements that strides count: 16 bytes, which rows are a multiple of
    o_pos = row * 128 + WG * M + gl.arange(0, M, gl.SliceLayout(1, WIDE))
    o_d = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    m_q = (o_pos < Sq)[:, None] & (o_d < D_REAL)[None, :]
    if order is None:
        o_token = o_pos.to(gl.int64)
    else:
        o_token = gl.load(order + o_pos, mask=o_pos < Sq, other=0).to(gl.int64)
    p_q = q + ((bh // H).to(gl.int64) * q_stride_b + (bh % H).to(gl.int64) * q_stride_h) * UNIT
    async_copy.async_copy_global_to_shared(s_raw, p_q + o_token[:, None] * (q_stride_s * UNIT) + o_d[None, :], mask=m_q)
    async_copy.commit_group()


@gluon.jit
def _consumer(
    q, out, lse, counts, indices, rows, order, bias, flags, stand_ins, k_scale, v_scale, k_mean, buffers, barriers,
    hints,
    q_stride_b, q_stride_h, q_stride_s, out_stride_b, out_stride_h, out_stride_s,
    rows_stride, scale_log2, NQ, NK, ALL, H, SHARED, Sq, Sk, TURNS,
    D: gl.constexpr, D_REAL: gl.constexpr, NS: gl.constexpr, WG: gl.constexpr, QUANT: gl.constexpr,
    NEGATE: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    s_raw, s_q, s_k, s_v, s_ones = buffers
    s_turn, told, heard = hints
    k_full, v_full, empty = barriers
    M: gl.constexpr = 64
    N: gl.constexpr = 128
    V_TYPE: gl.constexpr = s_v.dtype
    K_STEP: gl.constexpr = 32 if QUANT != 0 else 16
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, K_STEP])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, K_STEP])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, K_STEP // 8)
    L_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, K_STEP])
    # of pairs, [M, N / 16, 4]: a lane's neighbours are those of one row
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [8, 0, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [M, N // 16, 4],
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    # for out: 8 bytes a thread and 32 of a row side by side, one exchange between neighbours away from O_LAYOUT
    OUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]] + ([[0, 64]] if D == 128 else []),
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [M, D],
    )
    O_TYPE: gl.constexpr = out.dtype.element_ty
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    UNIT: gl.constexpr = 8  # elements that strides count
    # quantised P is in 0 ... 2^8, where e4m3 has its range
    SHIFT: gl.constexpr = 8.0 + _LINE if QUANT == 1 else 8.0 if QUANT == 2 else 0.0
    HAS_BIAS: gl.constexpr = bias is not None
    STAND_INS: gl.constexpr = stand_ins is not None
    FINE: gl.constexpr = KEYS < 128
    PIECES: gl.constexpr = 128 // KEYS
    # whether sums of P V are added up in registers; with int8's logits there are too few of them for 128 channels
    BY_TILE: gl.constexpr = QUANT == 1 or (QUANT == 2 and D == 64)
    # whether consumers need to know which block they have: finer ones share a scale, and find their bias by the list
    STREAM: gl.constexpr = not FINE and (HAS_BIAS or QUANT != 0)

    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    turn = gl.program_id(0)
    bh, row = _row_at(turn, rows, rows_stride, NQ, TURNS)
    _fetch_queries(s_raw.index(WG), q, order, bh, row, q_stride_b, q_stride_h, q_stride_s, H, Sq, M, D, D_REAL, WG)
    flat = bh.to(gl.int64) * NQ + row
    listed = gl.load(counts + flat)
    while turn < TURNS:
        b, h, kh = _places(bh, H, SHARED)
        n = _tiles(listed, NK, ALL, PIECES)
        ahead = (ALL - NK) // PIECES
        k_bh = b.to(gl.int64) * (H // SHARED) + kh
        if STAND_INS:
            p_stand_ins = stand_ins + flat * ((ahead + 1) * 128)
        o_n = gl.arange(0, N, COLUMNS)
        p_list = indices + flat * NK
        p_index = p_list + gl.maximum(listed - 1, 0)

        # ---- Q of this row; those of the next one on their way
        mbarrier.wait(told.index(slot), slot_phase)
        following = gl.max(s_turn.index(slot).load(ONE), 0)
        next_bh, next_row = _row_at(following, rows, rows_stride, NQ, TURNS)
        async_copy.wait_group(0)
        gl.thread_barrier()
        mbarrier.arrive(heard.index(slot), count=1)
        slot, slot_phase = _advance(slot, slot_phase, _SLOTS)
        scale = scale_log2
        if QUANT != 0:
            x = s_raw.index(WG).load(WIDE).to(gl.float32)
            if NEGATE:
                x = -x
            if lse is not None:  # what smoothing took from the logits
                o_d = gl.arange(0, D, gl.SliceLayout(0, WIDE))
                b_mean = gl.load(k_mean + k_bh * D_REAL + o_d, mask=o_d < D_REAL, other=0.0)
                shift = gl.convert_layout(gl.sum(x * b_mean[None, :], 1), ROWS) * scale_log2
            x, q_scale = _quantised_q(x, s_q.dtype, QUANT)
            scale = gl.convert_layout(q_scale, ROWS) * scale_log2
            s_q.index(WG).store(x)
            fence_async_shared()
            b_q = s_q.index(WG)
        else:
            b_q = s_raw.index(WG).load(gl.DotOperandLayout(0, S_LAYOUT, K_STEP // 8))
            if NEGATE:
                b_q = -b_q
        gl.thread_barrier()
        _fetch_queries(
            s_raw.index(WG), q, order, next_bh, next_row, q_stride_b, q_stride_h, q_stride_s, H, Sq, M, D, D_REAL, WG
        )
        next_flat = next_bh.to(gl.int64) * NQ + next_row
        next_listed = gl.load(counts + next_flat)

        o_pos = row * 128 + WG * M + gl.arange(0, M, gl.SliceLayout(1, OUT))
        if n > 0:
            if STREAM:
                block = _block_at(0, p_index, listed, NK, ALL, STAND_INS)
            if HAS_BIAS:
                p_bias = bias + b.to(gl.int64) * (NK * KEYS)
            if HAS_BIAS and not FINE:
                p_flags = flags + b.to(gl.int64) * ALL
            if QUANT != 0 and not FINE:
                p_scale = k_scale + k_bh * ALL
            # ---- first block: of means, or the only one that can be ragged
            c = scale
            if QUANT != 0:
                c = scale * gl.load(k_scale + k_bh if FINE else p_scale + block)
            if STREAM:
                block = _block_at(1, p_index, listed, NK, ALL, STAND_INS)
                later = _block_at(2, p_index, listed, NK, ALL, STAND_INS)
                if QUANT != 0:
                    k_sc = gl.load(p_scale + block)
                if HAS_BIAS:
                    flag = gl.load(p_flags + block)
            if STAND_INS:
                own = gl.load(p_stand_ins + o_n).to(gl.float32)
            elif HAS_BIAS and not FINE:
                own = gl.load(p_bias + gl.load(p_index).to(gl.int32) * 128 + o_n)
            elif FINE:
                o_key, m_key = _keys_of_tile(n - 1, o_n, p_list, listed, Sk, KEYS)
                if HAS_BIAS:
                    own = gl.load(p_bias + o_key, mask=m_key, other=float("-inf"))
                else:
                    own = gl.where(m_key, 0.0, float("-inf"))
            else:
                own = gl.where(o_n < Sk - gl.load(p_index).to(gl.int32) * 128, 0.0, float("-inf"))
            # there is no V, but a phase that nobody waits for looks like a mistake to tools
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.wait(k_full.index(stage), phase)
            start = _logits_start(M, N, QUANT, S_LAYOUT)
            b_k = s_k.index(stage).reshape([N, D]).permute((1, 0))
            s_token = warpgroup_mma(b_q, b_k, start, use_acc=QUANT == 2, is_async=True)
            s = _as_floats(warpgroup_mma_wait(0, deps=[s_token]), QUANT)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = _advance(stage, phase, NS)
            if QUANT == 1:
                none = gl.full([M], float("-inf"), gl.float32, ROWS)
                even, odd, m, alpha = _e4m3_softmax(s, c, own, none, False, PAIRS, ROWS)
            else:
                s = _logits(s, c, QUANT) + own[None, :]
                m = _row_max(s, ROWS)
                base = gl.where(m == float("-inf"), 0.0, m)  # no key so far: exp2(-inf) rather than NaN
                p = _exp2(s - (base - SHIFT)[:, None])
            if QUANT == 0:
                l = _lane_sums(p)
                p = _packed(p, V_TYPE)
            else:
                l = gl.zeros([M, 8], gl.float32, L_LAYOUT)
            acc = gl.zeros([M, D], gl.float32, O_LAYOUT)
            late = gl.full([M], 1.0, gl.float32, O_ROWS)
            v_stage = stage
            v_phase = phase
            mbarrier.wait(k_full.index(stage), phase)
            # ---- the others: with a bias of their own, up to the first of the list; then those that need none
            for part in gl.static_range(1 - STAND_INS, 2):
                begin = ahead + 1 if STAND_INS and part == 1 else 1
                end = n if part == 1 else gl.minimum(ahead + 1, n)
                for j in range(begin, end):
                    if QUANT == 0:
                        b_p = _unpacked(p, V_TYPE, P_LAYOUT)
                    elif QUANT == 1:
                        b_p = _weights_of_bits(even, odd, P_LAYOUT)
                    else:
                        b_p = _weights(p, P_LAYOUT)
                    gl.thread_barrier()  # one is needed since the last release: here it costs least
                    start = _logits_start(M, N, QUANT, S_LAYOUT)
                    b_k = s_k.index(stage).reshape([N, D]).permute((1, 0))
                    s_token = warpgroup_mma(b_q, b_k, start, use_acc=QUANT == 2, is_async=True)
                    mbarrier.wait(v_full.index(v_stage), v_phase)
                    sums = gl.zeros([M, D], gl.float32, O_LAYOUT) if BY_TILE else acc
                    values = _values(s_v, v_stage, N, D, QUANT)
                    acc_token = warpgroup_mma(b_p, values, sums, use_acc=not BY_TILE, is_async=True)
                    if QUANT != 0:
                        l_token = _row_sums(b_p, s_ones, L_LAYOUT)
                    if QUANT != 0 and not FINE:
                        c = scale * k_sc
                    if HAS_BIAS and not FINE:
                        has_bias = flag
                        p_here = p_bias + block * 128
                    if STREAM:
                        block = later
                        if QUANT != 0:
                            k_sc = gl.load(p_scale + block)
                        if HAS_BIAS:
                            flag = gl.load(p_flags + block)
                        later = _block_at(j + 2, p_index, listed, NK, ALL, STAND_INS)
                    s = _as_floats(warpgroup_mma_wait(2 if QUANT != 0 else 1, deps=[s_token]), QUANT)
                    stage, phase = _advance(stage, phase, NS)
                    if QUANT == 1:
                        if part == 0 or HAS_BIAS:
                            if part == 0:
                                here = gl.load(p_stand_ins + j * 128 + o_n).to(gl.float32)
                            elif FINE:
                                o_key, m_key = _keys_of_tile(n - 1 - j, o_n, p_list, listed, Sk, KEYS)
                                here = gl.load(p_bias + o_key, mask=m_key, other=float("-inf"))
                            else:
                                here = gl.load(p_here + o_n, mask=(o_n < N) & (has_bias != 0), other=0.0)
                            even, odd, m_new, alpha = _e4m3_softmax(s, c, here, m, HAS_BIAS, PAIRS, ROWS)
                        else:
                            even, odd, m_new, alpha = _e4m3_softmax(s, c, None, m, False, PAIRS, ROWS)
                    elif part == 0 or HAS_BIAS:
                        s = _logits(s, c, QUANT)
                        if part == 0:
                            s = s + gl.load(p_stand_ins + j * 128 + o_n).to(gl.float32)[None, :]
                        elif FINE:
                            o_key, m_key = _keys_of_tile(n - 1 - j, o_n, p_list, listed, Sk, KEYS)
                            s = s + gl.load(p_bias + o_key, mask=m_key, other=float("-inf"))[None, :]
                        elif has_bias != 0:
                            s = s + gl.load(p_here + o_n)[None, :]
                        m_new = gl.maximum(m, _row_max(s, ROWS))
                        base = gl.where(m_new == float("-inf"), 0.0, m_new)
                        alpha = _exp2(m - base)
                        p = _exp2(s - (base - SHIFT)[:, None])
                    else:
                        m_new = gl.maximum(m, _largest_logit(s, c, QUANT, ROWS))
                        alpha = _exp2(m - m_new)
                        p = _powers(s, c, m_new, SHIFT, QUANT)
                    m = m_new
                    if QUANT == 0:
                        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + _lane_sums(p)
                    mbarrier.wait(k_full.index(stage), phase)
                    if QUANT == 0:
                        sums = warpgroup_mma_wait(0, deps=[acc_token])
                    else:
                        sums, row_sums = warpgroup_mma_wait(0, deps=[acc_token, l_token])
                        l = (l + row_sums) * gl.convert_layout(alpha, gl.SliceLayout(1, L_LAYOUT))[:, None]
                    mbarrier.arrive(empty.index(v_stage), count=1)
                    v_stage, v_phase = _advance(v_stage, v_phase, NS)
                    if BY_TILE:  # what there was before still wants the last factor
                        acc = acc * late[:, None] + sums
                        late = gl.convert_layout(alpha, O_ROWS)
                    else:
                        acc = _rescaled(sums, gl.convert_layout(alpha, O_ROWS), QUANT)
                    if QUANT == 0:
                        p = _packed(p, V_TYPE)
            # ---- the last P V
            if QUANT == 0:
                b_p = _unpacked(p, V_TYPE, P_LAYOUT)
            elif QUANT == 1:
                b_p = _weights_of_bits(even, odd, P_LAYOUT)
            else:
                b_p = _weights(p, P_LAYOUT)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            sums = gl.zeros([M, D], gl.float32, O_LAYOUT) if BY_TILE else acc
            values = _values(s_v, v_stage, N, D, QUANT)
            acc_token = warpgroup_mma(b_p, values, sums, use_acc=not BY_TILE, is_async=True)
            if QUANT == 0:
                sums = warpgroup_mma_wait(0, deps=[acc_token])
                total = gl.convert_layout(gl.sum(l, 1), ROWS)
            else:
                l_token = _row_sums(b_p, s_ones, L_LAYOUT)
                sums, row_sums = warpgroup_mma_wait(0, deps=[acc_token, l_token])
                total = gl.convert_layout(gl.max(l + row_sums, 1), ROWS)  # all of its columns are the same
            acc = acc * late[:, None] + sums if BY_TILE else sums
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = _advance(stage, phase, NS)
            if QUANT == 1 and not HAS_BIAS:  # then there is a key: its logit was less than f16 holds
                total = gl.where(total == 0.0, float("nan"), total)
            norm = 1.0 / gl.where(total == 0.0, 1.0, total)
            acc = acc * gl.convert_layout(norm, O_ROWS)[:, None]
            if QUANT != 0:
                o_c = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
                p_back = v_scale + k_bh * (2 * D_REAL) + o_c
                acc = acc * gl.load(p_back, mask=o_c < D_REAL, other=0.0)[None, :]
                v_mean = gl.load(p_back + D_REAL, mask=o_c < D_REAL, other=0.0)
                some = gl.convert_layout(gl.where(total == 0.0, 0.0, 1.0), O_ROWS)
                acc = acc + some[:, None] * v_mean[None, :]
            y = gl.convert_layout(acc.to(O_TYPE), OUT)
            if lse is not None:
                value = m - SHIFT + gl.log2(total)
                if QUANT != 0:
                    value = value + shift
                value = value * 0.6931471805599453
                value = gl.where(total == 0.0, float("-inf"), value)
        else:
            y = gl.zeros([M, D], O_TYPE, OUT)
            if lse is not None:
                value = gl.full([M], float("-inf"), gl.float32, ROWS)
        # ---- out rows, to their place
        if order is None:
            o_token = o_pos.to(gl.int64)
        else:
            o_token = gl.load(order + o_pos, mask=o_pos < Sq, other=0).to(gl.int64)
        o_d = gl.arange(0, D, gl.SliceLayout(0, OUT))
        m_out = (o_pos < Sq)[:, None] & (o_d < D_REAL)[None, :]
        p_out = out + (b.to(gl.int64) * out_stride_b + h.to(gl.int64) * out_stride_h) * UNIT
        gl.store(p_out + o_token[:, None] * (out_stride_s * UNIT) + o_d[None, :], y, mask=m_out)
        if lse is not None:
            l_pos = row * 128 + WG * M + gl.arange(0, M, ROWS)
            if order is None:
                l_token = l_pos.to(gl.int64)
            else:
                l_token = gl.load(order + l_pos, mask=l_pos < Sq, other=0).to(gl.int64)
            gl.store(lse + (b.to(gl.int64) * H + h) * Sq + l_token, value, mask=l_pos < Sq)
        turn = following
        bh = next_bh
        row = next_row
        flat = next_flat
        listed = next_listed
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def hopper_attention_kernel(
    q, k_desc, v_desc, out, lse, counts, indices, rows, order, bias, flags, stand_ins, k_scale, v_scale, k_mean, turns,
    q_stride_b, q_stride_h, q_stride_s, out_stride_b, out_stride_h, out_stride_s,
    rows_stride, scale_log2, NQ, NK, ALL, H, SHARED, Sq, Sk, TURNS, TOGETHER,
    D: gl.constexpr, D_REAL: gl.constexpr, NS: gl.constexpr, QUANT: gl.constexpr, NEGATE: gl.constexpr,
    KEYS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Programs take TURNS rows of blocks, 128 queries each, one after the other. KEYS: of a block, 128, 64 or 32.

    The rows of the last TOGETHER heads, which come after the first row of each program, go side by side.
    turns int32 [1], 0: how many rows were taken beyond the first of each program; 0 again at the end.
    k_desc [B, Hk, ALL * KEYS, D]; v_desc the same, or if quantised transposed block by block, [B, Hk, ALL * D, KEYS]
    seen as rows of 128 bytes. k_scale [B, Hk, ALL], or [B, Hk] for finer blocks; v_scale [B, Hk, 2, D_REAL]: of
    channels, and their means, which were subtracted.
    stand_ins: the means behind the NK blocks take part in every row, with these biases; else ALL is NK.
    """
    K_TYPE: gl.constexpr = k_desc.dtype
    O_TYPE: gl.constexpr = out.dtype.element_ty
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], K_TYPE)
    RAW_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], O_TYPE)
    s_raw = gl.allocate_shared_memory(O_TYPE, [2, 64, D], RAW_SHARED)
    if KEYS == 128:
        s_k = gl.allocate_shared_memory(K_TYPE, [NS] + k_desc.block_type.shape, k_desc.layout)
        s_v = gl.allocate_shared_memory(v_desc.dtype, [NS] + v_desc.block_type.shape, v_desc.layout)
        boxes = (s_k, s_v)
    else:
        # as the copy engine writes it, a tile is 128 bytes of the rows of all its blocks, then the next 128, ...
        K_BOXES: gl.constexpr = NS * (128 // KEYS) * (D // k_desc.block_type.shape[3])
        V_BOXES: gl.constexpr = NS * (128 // KEYS) if QUANT != 0 else K_BOXES
        boxes = (
            gl.allocate_shared_memory(K_TYPE, [K_BOXES] + k_desc.block_type.shape, k_desc.layout),
            gl.allocate_shared_memory(v_desc.dtype, [V_BOXES] + v_desc.block_type.shape, v_desc.layout),
        )
        # ... and so it is for tensor cores; transposed, its blocks are columns: KEYS bytes of all rows, then the next
        K_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], K_TYPE)
        s_k = boxes[0]._reinterpret(K_TYPE, [NS, 128, D], K_TILE)
        if QUANT != 0:
            V_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=KEYS, element_bitwidth=8)
            s_v = boxes[1]._reinterpret(v_desc.dtype, [NS, D, 128], V_TILE)
        else:
            s_v = boxes[1]._reinterpret(K_TYPE, [NS, 128, D], K_TILE)
    if QUANT != 0:  # s_raw: as they came
        s_q = gl.allocate_shared_memory(K_TYPE, [2, 64, D], Q_SHARED)
        ONES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        ONES_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 128], gl.float8e4nv)
        # by its bits: ptxas leaves half of the bytes unset where a constant is converted
        ones = gl.full([8, 128], 0x38, gl.int8, ONES).to(gl.float8e4nv, bitcast=True)
        s_ones = gl.allocate_shared_memory(gl.float8e4nv, [8, 128], ONES_SHARED, ones).permute((1, 0))
    else:
        s_q = s_raw
        s_ones = s_raw
    s_turn = gl.allocate_shared_memory(gl.int32, [_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_SLOTS):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=2)
    hints = (s_turn, told, heard)
    k_full = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    buffers = (s_raw, s_q, s_k, s_v, s_ones)
    barriers = (k_full, v_full, empty)
    V_ROWS: gl.constexpr = D * KEYS // 128 if QUANT != 0 else KEYS  # of a block
    gl.warp_specialize(
        [
            (_consumer, (
                q, out, lse, counts, indices, rows, order, bias, flags, stand_ins, k_scale, v_scale, k_mean, buffers,
                barriers, hints,
                q_stride_b, q_stride_h, q_stride_s, out_stride_b, out_stride_h, out_stride_s,
                rows_stride, scale_log2, NQ, NK, ALL, H, SHARED, Sq, Sk, TURNS, D, D_REAL, NS, 0, QUANT, NEGATE, KEYS,
            )),
            (_consumer, (
                q, out, lse, counts, indices, rows, order, bias, flags, stand_ins, k_scale, v_scale, k_mean, buffers,
                barriers, hints,
                q_stride_b, q_stride_h, q_stride_s, out_stride_b, out_stride_h, out_stride_s,
                rows_stride, scale_log2, NQ, NK, ALL, H, SHARED, Sq, Sk, TURNS, D, D_REAL, NS, 1, QUANT, NEGATE, KEYS,
            )),
            (_producer, (
                k_desc, v_desc, counts, indices, rows, turns, boxes, barriers, hints, rows_stride, NQ, NK, ALL, H,
                SHARED, TURNS, TOGETHER, NS, V_ROWS, stand_ins is not None, KEYS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
