"""The passes over keys and values for quantised attention: statistics, then eight bits in block order.

k is smoothed by its mean over tokens first: a vector that all keys share moves every logit of a query alike, which the
softmax does not see, but it would take most of the range of eight bits. So are quantised values, whose mean the output
gets back: tensor cores keep 14 bits of a sum of eight-bit products, and where those of a channel have one sign, a sum
over thousands of keys loses as much as a quarter.
"""

import triton
import triton.language as tl

from rainfusion.backends.triton.kernels.arguments import ANYWHERE, SIZES
from rainfusion.backends.triton.kernels.blocks import block_spread, tokens_at


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def statistics_kernel(
    k, v, order, keep, numbers, k_sums, v_sums, v_largest, k_bounds, means, v_means, spreads,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, H, S, N, EACH,
    UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, KEYS: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_KEEP: tl.constexpr,
):  # fmt: skip
    """Of every EACH blocks of KEYS tokens, G of them in a head, fp32: numbers [B, H, G], sums of keys [B, H, G, D].

    And if asked for: sums of values, and the largest magnitude of their channels, v_largest [B, H, G, D]; the least and
    the greatest finite number of k's, k_bounds [B, H, G, 2, D]. And of each block: the mean of its keys, means
    [B, H, N, D], and of its values, v_means; how far keys are from their mean, spreads fp32 [B, H, N].
    """
    pid = tl.program_id(0).to(tl.int64)
    groups = tl.cdiv(N, EACH)
    bh, group = pid // groups, (pid % groups).to(tl.int32)
    b, h = bh // H, bh % H
    o_d = tl.arange(0, D_PAD)
    m_d = o_d < D
    p_k = k + (b * k_stride_b + h * k_stride_h) * UNIT + o_d[None, :]
    p_v = v + (b * v_stride_b + h * v_stride_h) * UNIT + o_d[None, :]
    b_k_all = tl.zeros([D_PAD], tl.float32)
    b_v_all = tl.zeros([D_PAD], tl.float32)
    b_max = tl.zeros([D_PAD], tl.float32)
    b_least = tl.full([D_PAD], float("inf"), tl.float32)
    b_greatest = tl.full([D_PAD], float("-inf"), tl.float32)
    tokens = 0
    begin, end = group * EACH, tl.minimum((group + 1) * EACH, N)
    for block in range(begin, end):
        o_token, m_row = tokens_at(block * KEYS + tl.arange(0, KEYS), order, keep, b, S, HAS_ORDER, HAS_KEEP)
        m_x = m_row[:, None] & m_d[None, :]
        b_k = tl.load(p_k + o_token[:, None] * (k_stride_s * UNIT), mask=m_x, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + o_token[:, None] * (v_stride_s * UNIT), mask=m_x, other=0.0).to(tl.float32)
        here = tl.sum(m_row.to(tl.int32), 0)
        tokens += here
        at = bh * N + block
        number = tl.maximum(here, 1).to(tl.float32)
        b_sum = tl.sum(b_v, 0)
        if v_sums is not None:
            b_v_all += b_sum
            b_max = tl.maximum(b_max, tl.max(tl.abs(b_v), 0))
        if v_means is not None:  # and then values need no registers any more
            tl.store(v_means + at * D + o_d, (b_sum / number).to(v_means.dtype.element_ty), mask=m_d)
        b_sum = tl.sum(b_k, 0)
        b_k_all += b_sum
        if means is not None:
            tl.store(means + at * D + o_d, (b_sum / number).to(means.dtype.element_ty), mask=m_d)
        if spreads is not None:
            tl.store(spreads + at, block_spread(b_k, b_sum / number, m_row, number))
        if k_bounds is not None:
            b_least, b_greatest = tl.minimum(b_least, tl.min(b_k, 0)), tl.maximum(b_greatest, tl.max(b_k, 0))
    tl.store(numbers + pid, tokens.to(tl.float32))
    tl.store(k_sums + pid * D + o_d, b_k_all, mask=m_d)
    if k_bounds is not None:
        # NaN is neither the least nor the greatest, but zeros in the place of keys, or an infinity, might be
        if (tokens < (end - begin) * KEYS) | (tl.max(tl.maximum(b_greatest, -b_least), 0) == float("inf")):
            b_least = tl.full([D_PAD], float("inf"), tl.float32)
            b_greatest = tl.full([D_PAD], float("-inf"), tl.float32)
            for block in range(begin, end):
                o_token, m_row = tokens_at(block * KEYS + tl.arange(0, KEYS), order, keep, b, S, HAS_ORDER, HAS_KEEP)
                m_x = m_row[:, None] & m_d[None, :]
                b_k = tl.load(p_k + o_token[:, None] * (k_stride_s * UNIT), mask=m_x, other=0.0).to(tl.float32)
                m_x = m_x & (tl.abs(b_k) < float("inf"))
                b_least = tl.minimum(b_least, tl.min(tl.where(m_x, b_k, float("inf")), 0))
                b_greatest = tl.maximum(b_greatest, tl.max(tl.where(m_x, b_k, float("-inf")), 0))
        tl.store(k_bounds + pid * 2 * D + o_d, b_least, mask=m_d)
        tl.store(k_bounds + pid * 2 * D + D + o_d, b_greatest, mask=m_d)
    if v_sums is not None:
        tl.store(v_sums + pid * D + o_d, b_v_all, mask=m_d)
        tl.store(v_largest + pid * D + o_d, b_max, mask=m_d)


@triton.jit
def _mean(b_sum, tokens):
    """0 if it is not finite: it would spoil every token, instead of those that are not."""
    b_mean = b_sum / tl.maximum(tokens, 1.0)
    return tl.where(tl.abs(b_mean) < float("inf"), b_mean, 0.0)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def channels_kernel(
    numbers, k_sums, v_sums, v_largest, k_bounds, k_mean, k_scale, v_scale, turns, N,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, K_LARGEST: tl.constexpr, V_LARGEST: tl.constexpr,
):  # fmt: skip
    """Over the N statistics of a head: the mean of its keys, k_mean fp32 [B, H, D].

    With v_sums the scales of its values' channels, and their means, v_scale fp32 [B, H, 2, D]; with k_bounds one scale
    for all its keys, k_scale fp32 [B, H, 1]. K_LARGEST, V_LARGEST: what the types of quantised keys and values reach.
    turns: None, or what becomes 0.
    """
    bh = tl.program_id(0).to(tl.int64)
    if turns is not None:
        tl.store(turns, 0, mask=bh == 0)
    o_d = tl.arange(0, D_PAD)
    m_d = o_d < D
    # added up where they lie, and over rows in the end: a reduction takes longer than all loads of a step
    b_tokens = tl.zeros([ROWS], tl.float32)
    b_k = tl.zeros([ROWS, D_PAD], tl.float32)
    b_v = tl.zeros([ROWS, D_PAD], tl.float32)
    b_max = tl.zeros([ROWS, D_PAD], tl.float32)
    b_least = tl.full([ROWS, D_PAD], float("inf"), tl.float32)
    b_greatest = tl.full([ROWS, D_PAD], float("-inf"), tl.float32)
    for first in range(0, N, ROWS):
        o_n = first + tl.arange(0, ROWS)
        o_x = (bh * N + o_n)[:, None] * D + o_d[None, :]
        m_x = (o_n < N)[:, None] & m_d[None, :]
        b_tokens += tl.load(numbers + bh * N + o_n, mask=o_n < N, other=0.0)
        b_k += tl.load(k_sums + o_x, mask=m_x, other=0.0)
        if v_sums is not None:
            b_v += tl.load(v_sums + o_x, mask=m_x, other=0.0)
            b_max = tl.maximum(b_max, tl.load(v_largest + o_x, mask=m_x, other=0.0))
        if k_bounds is not None:
            p_bounds = k_bounds + (bh * N + o_n)[:, None] * 2 * D + o_d[None, :]
            b_least = tl.minimum(b_least, tl.load(p_bounds, mask=m_x, other=float("inf")))
            b_greatest = tl.maximum(b_greatest, tl.load(p_bounds + D, mask=m_x, other=float("-inf")))
    tokens = tl.sum(b_tokens, 0)
    b_k = tl.sum(b_k, 0)
    b_v = tl.sum(b_v, 0)
    b_max = tl.max(b_max, 0)
    b_least = tl.min(b_least, 0)
    b_greatest = tl.max(b_greatest, 0)
    b_k = _mean(b_k, tokens)
    tl.store(k_mean + bh * D + o_d, b_k, mask=m_d)
    if v_sums is not None:  # no less than what is left of the largest; how much more does not matter to floats
        b_v = _mean(b_v, tokens)
        tl.store(v_scale + bh * 2 * D + o_d, tl.maximum(b_max + tl.abs(b_v), 1e-30) / V_LARGEST, mask=m_d)
        tl.store(v_scale + bh * 2 * D + D + o_d, b_v, mask=m_d)
    if k_bounds is not None:
        largest = tl.max(tl.maximum(b_greatest - b_k, b_k - b_least), 0)
        tl.store(k_scale + bh, tl.maximum(largest, 1e-30) / K_LARGEST)


@triton.jit
def _inverse(scale):
    """A little less than 1 / scale: although it is rounded, the largest number does not pass what its type reaches."""
    return 0.99999952 / scale


@triton.jit
def _quantise_keys(
    p_k, order, keep, k_mean, k_out, k_scale, k_stride_s, b, bh, tile, place, S, N,
    UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_KEEP: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One tile of them. -> fp32 [BLOCK / KEYS], of finer blocks: NaN for those with a number that is not finite."""
    PIECES: tl.constexpr = BLOCK // KEYS
    o_d = tl.arange(0, D_PAD)
    o_row = tl.arange(0, BLOCK)
    o_token, m_row = tokens_at(tile * BLOCK + o_row, order, keep, b, S, HAS_ORDER, HAS_KEEP)
    m_x = m_row[:, None] & (o_d < D)[None, :]
    b_k = tl.load(p_k + o_token[:, None] * (k_stride_s * UNIT) + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_mean = tl.load(k_mean + bh * D + o_d, mask=o_d < D, other=0.0)
    b_k = tl.fma(m_row.to(tl.float32)[:, None], -b_mean[None, :], b_k)  # removed keys stay zero
    m_out = (o_d < WIDTH)[None, :]  # zeros past D
    b_nothing = tl.zeros([PIECES], tl.float32)
    if PIECES == 1:
        bits = tl.max(tl.max(b_k.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)  # NaN is the largest of them
        scale = tl.maximum(bits.to(tl.float32, bitcast=True), 1e-30) / LARGEST
        scale = tl.where(bits < 0x7F800000, scale, float("nan"))  # what is not finite shows
        tl.store(k_scale + place, scale)
    else:
        scale = tl.load(k_scale + bh)
        b_nothing = tl.sum(tl.reshape(tl.sum(b_k * 0.0, 1), [PIECES, KEYS]), 1)
        m_tile = tile * PIECES + o_row // KEYS < N  # [BLOCK]: the last tile may be one in part
        m_out = m_tile[:, None] & m_out
    b_k = b_k * _inverse(scale)
    if k_out.dtype.element_ty == tl.int8:
        b_k = (b_k + 12582912.0) - 12582912.0  # to the nearest integer
    elif PIECES > 1:
        b_k = b_k + b_k * 0.0
    o_out = (place * KEYS + o_row)[:, None] * WIDTH + o_d[None, :]
    tl.store(k_out + o_out, b_k.to(k_out.dtype.element_ty), mask=m_out)
    return b_nothing


@triton.jit
def _quantise_values(
    p_v, order, keep, v_scale, v_out, b_nothing, v_stride_s, b, bh, tile, place, S, N,
    UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_KEEP: tl.constexpr, PERMUTED: tl.constexpr,
    SWIZZLED: tl.constexpr,
):  # fmt: skip
    """One tile of them. b_nothing: None, or what the values of each block show of its keys."""
    PIECES: tl.constexpr = BLOCK // KEYS
    o_d = tl.arange(0, D_PAD)
    o_row = tl.arange(0, BLOCK)
    o_key = o_row
    if PERMUTED:
        o_key = (o_row // 16) * 16 + ((o_row // 2) % 2) * 8 + ((o_row // 4) % 4) * 2 + o_row % 2
    o_token, m_row = tokens_at(tile * BLOCK + o_key, order, keep, b, S, HAS_ORDER, HAS_KEEP)
    m_x = m_row[:, None] & (o_d < D)[None, :]
    b_v = tl.load(p_v + o_token[:, None] * (v_stride_s * UNIT) + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    if v_scale is not None:
        p_scale = v_scale + bh * 2 * D + o_d
        b_mean = tl.load(p_scale + D, mask=o_d < D, other=0.0)
        b_v = tl.fma(m_row.to(tl.float32)[:, None], -b_mean[None, :], b_v)  # removed values stay zero
        b_v = b_v * _inverse(tl.load(p_scale, mask=o_d < D, other=1.0))[None, :]
    if b_nothing is not None:
        b_v = b_v + tl.reshape(tl.broadcast_to(b_nothing[:, None], [PIECES, KEYS]), [BLOCK])[:, None]
    b_v = b_v.to(v_out.dtype.element_ty)
    m_tile = tile * PIECES + o_row // KEYS < N
    if v_scale is None:
        o_out = (place * KEYS + o_row)[:, None] * WIDTH + o_d[None, :]
        tl.store(v_out + o_out, b_v, mask=m_tile[:, None] & (o_d < WIDTH)[None, :])
    elif PIECES == 1:
        tl.store(v_out + (place * D_PAD + o_d)[:, None] * BLOCK + o_row[None, :], tl.trans(b_v))
    else:
        o_block = ((place + o_row // KEYS) * D_PAD * KEYS + o_row % KEYS)[None, :]
        o_channel = (o_d ^ (o_d // 8 % PIECES) if SWIZZLED else o_d)[:, None]
        tl.store(v_out + o_block + o_channel * KEYS, tl.trans(b_v), mask=m_tile[None, :])


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def quantise_kernel(
    k, v, order, keep, k_mean, v_scale, k_out, v_out, k_scale,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, H, S, N, FIRST, ALL,
    UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_KEEP: tl.constexpr, LARGEST: tl.constexpr, PERMUTED: tl.constexpr,
    SWIZZLED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """k -> [B, H, ALL * KEYS, WIDTH], of a type that reaches LARGEST; v -> the same, in its own type.

    With v_scale v is quantised, too, less its means -> [B, H, ALL * D_PAD, KEYS], blocks turned: that is how tensor
    cores want it.

    The N blocks of a head are those from FIRST on of its ALL; a program has BLOCK tokens, one of them or several; with
    APART either their keys or their values, so that more programs run at once. The last ones come first:
    `statistics_kernel` has read them last, and they may still be in the cache.
    k_scale: found here, one for each block; or where blocks are finer than BLOCK given, one for each head.

    PERMUTED: in a block of v, key 16 g + 8 h + 2 c + e stands at 16 g + 4 c + 2 h + e: see `_weights` of the kernels.

    SWIZZLED, for `hopper`: a finer block is copied as rows of 128 bytes and read as rows of KEYS, and the copy engine
    and the tensor cores differ in the bits by which they swizzle such rows: channel d stands at
    d ^ (d / 8 mod BLOCK / KEYS), which makes up for it.
    """
    PIECES: tl.constexpr = BLOCK // KEYS
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    is_k = pid % 2 == 0
    if APART:
        pid = pid // 2
    tiles = tl.cdiv(N, PIECES)
    bh, tile = pid // tiles, pid % tiles
    b, h = bh // H, bh % H
    place = bh * ALL + FIRST + tile * PIECES
    p_k = k + (b * k_stride_b + h * k_stride_h) * UNIT
    p_v = v + (b * v_stride_b + h * v_stride_h) * UNIT
    if not APART:  # integers have no NaN: the values show it
        b_nothing = _quantise_keys(
            p_k, order, keep, k_mean, k_out, k_scale, k_stride_s, b, bh, tile, place, S, N,
            UNIT, D, D_PAD, WIDTH, BLOCK, KEYS, HAS_ORDER, HAS_KEEP, LARGEST,
        )  # fmt: skip
        _quantise_values(
            p_v, order, keep, v_scale, v_out, b_nothing, v_stride_s, b, bh, tile, place, S, N,
            UNIT, D, D_PAD, WIDTH, BLOCK, KEYS, HAS_ORDER, HAS_KEEP, PERMUTED, SWIZZLED,
        )  # fmt: skip
    elif is_k:
        _quantise_keys(
            p_k, order, keep, k_mean, k_out, k_scale, k_stride_s, b, bh, tile, place, S, N,
            UNIT, D, D_PAD, WIDTH, BLOCK, KEYS, HAS_ORDER, HAS_KEEP, LARGEST,
        )  # fmt: skip
    else:
        _quantise_values(
            p_v, order, keep, v_scale, v_out, None, v_stride_s, b, bh, tile, place, S, N,
            UNIT, D, D_PAD, WIDTH, BLOCK, KEYS, HAS_ORDER, HAS_KEEP, PERMUTED, SWIZZLED,
        )  # fmt: skip
