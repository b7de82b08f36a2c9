"""The passes over tokens before attention: gather tokens into blocks, in order, with their means on the way.

And how far they are from their mean, see `prediction.spread`.
"""

import triton
import triton.language as tl

from rainfusion.backends.triton.kernels.arguments import ANYWHERE, SIZES


@triton.jit
def tokens_at(o_pos, order, keep, b, S, HAS_ORDER: tl.constexpr, HAS_KEEP: tl.constexpr):
    """Positions in block order -> the caller's tokens there (int64), and which of them exist and take part."""
    m_row = o_pos < S
    o_token = o_pos.to(tl.int64)
    if HAS_ORDER:
        o_token = tl.load(order + o_pos, mask=m_row, other=0).to(tl.int64)
    if HAS_KEEP:
        m_row = m_row & (tl.load(keep + b * S + o_token, mask=m_row, other=0) != 0)
    return o_token, m_row


@triton.jit
def block_spread(b_x, b_mean, m_row, number):
    """Mean of |x - mean|^2 over the tokens m_row of a block: b_x [BLOCK, D_PAD], zero elsewhere; b_mean [D_PAD]."""
    b_apart = tl.fma(m_row.to(tl.float32)[:, None], -b_mean[None, :], b_x)  # exact: it multiplies by 1 or 0
    return tl.sum(tl.sum(b_apart * b_apart, 1), 0) / number


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def pool_kernel(
    x, order, keep, means, spreads,
    stride_b, stride_h, stride_s, H, S, N,
    UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, SEVERAL: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    """Of the kept tokens of block n of x [B, H, S, D]: means[b, h, n] [B, H, N, D], spreads[b, h, n] fp32 [B, H, N].

    Either may be None. A program has SEVERAL blocks: more than one only without spreads.
    """
    tl.static_assert(SEVERAL == 1 or spreads is None)
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(N, SEVERAL)
    bh, tile = pid // tiles, pid % tiles
    b, h = bh // H, bh % H
    o_pos = tile * (SEVERAL * BLOCK) + tl.arange(0, SEVERAL * BLOCK)
    o_token, m_row = tokens_at(o_pos, order, keep, b, S, HAS_ORDER, HAS_KEEP)
    o_d = tl.arange(0, D_PAD)
    p_x = x + (b * stride_b + h * stride_h) * UNIT + o_token[:, None] * (stride_s * UNIT) + o_d[None, :]
    m_x = m_row[:, None] & (o_d < D)[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)  # [SEVERAL * BLOCK, D_PAD]
    p_means = means
    if means is not None:
        p_means = means + (bh * N + tile * SEVERAL) * D + o_d
    if SEVERAL > 1:
        number = tl.maximum(tl.sum(tl.reshape(m_row.to(tl.int32), [SEVERAL, BLOCK]), 1), 1).to(tl.float32)
        b_mean = tl.sum(tl.reshape(b_x, [SEVERAL, BLOCK, D_PAD]), 1) / number[:, None]
        o_n = tl.arange(0, SEVERAL)[:, None]
        m_mean = (tile * SEVERAL + o_n < N) & (o_d < D)[None, :]
        tl.store(p_means[None, :] + o_n * D, b_mean.to(means.dtype.element_ty), mask=m_mean)
    else:
        number = tl.maximum(tl.sum(m_row.to(tl.int32), 0), 1).to(tl.float32)
        b_mean = tl.sum(b_x, 0) / number
        if means is not None:
            tl.store(p_means, b_mean.to(means.dtype.element_ty), mask=o_d < D)
        if spreads is not None:
            tl.store(spreads + bh * N + tile, block_spread(b_x, b_mean, m_row, number))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def gather_kernel(
    k, v, order, keep, k_out, v_out, means, spreads, turns,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, H, S, N, SPARE,
    UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_KEEP: tl.constexpr, POOL: tl.constexpr, STAND_INS: tl.constexpr,
):  # fmt: skip
    """k, v [B, H, S, D] -> [B, H, (N + SPARE) * BLOCK, D] in block order, and k's block means; and spreads.

    Rows past the end, and keys that were removed, are zero. STAND_INS: the means of block j are also row
    N * BLOCK + j, a key and a value like others; SPARE blocks hold them. turns: None, or what becomes 0.
    """
    pid = tl.program_id(0).to(tl.int64)
    if turns is not None:
        tl.store(turns, 0, mask=pid == 0)
    bh, block = pid // N, pid % N
    b, h = bh // H, bh % H
    o_pos = block * BLOCK + tl.arange(0, BLOCK)
    o_token, m_row = tokens_at(o_pos, order, keep, b, S, HAS_ORDER, HAS_KEEP)
    o_d = tl.arange(0, D_PAD)
    m_d = (o_d < D)[None, :]
    m_x = m_row[:, None] & m_d
    base = bh * (N + SPARE) * BLOCK
    o_row = tl.arange(0, BLOCK)
    o_out = (base + block * BLOCK + o_row)[:, None] * D + o_d[None, :]
    p_k = k + (b * k_stride_b + h * k_stride_h) * UNIT + o_token[:, None] * (k_stride_s * UNIT) + o_d[None, :]
    p_v = v + (b * v_stride_b + h * v_stride_h) * UNIT + o_token[:, None] * (v_stride_s * UNIT) + o_d[None, :]
    b_k = tl.load(p_k, mask=m_x, other=0.0)  # [BLOCK, D_PAD]
    b_v = tl.load(p_v, mask=m_x, other=0.0)
    tl.store(k_out + o_out, b_k, mask=m_d)
    tl.store(v_out + o_out, b_v, mask=m_d)
    if POOL or STAND_INS or spreads is not None:
        number = tl.maximum(tl.sum(m_row.to(tl.int32), 0), 1).to(tl.float32)
        b_mean = tl.sum(b_k.to(tl.float32), 0) / number
        if POOL:
            tl.store(means + pid * D + o_d, b_mean.to(means.dtype.element_ty), mask=o_d < D)
        if spreads is not None:
            tl.store(spreads + pid, block_spread(b_k.to(tl.float32), b_mean, m_row, number))
        if STAND_INS:
            o_mean = (base + N * BLOCK + block) * D + o_d
            b_value = tl.sum(b_v.to(tl.float32), 0) / number
            tl.store(k_out + o_mean, b_mean.to(k_out.dtype.element_ty), mask=o_d < D)
            tl.store(v_out + o_mean, b_value.to(v_out.dtype.element_ty), mask=o_d < D)
            if block == N - 1:  # the rows behind the last mean
                nothing = tl.zeros([BLOCK, D_PAD], k_out.dtype.element_ty)
                for first in range(N, SPARE * BLOCK, BLOCK):
                    o_rest = (base + N * BLOCK + first + o_row)[:, None] * D + o_d[None, :]
                    m_rest = (first + o_row < SPARE * BLOCK)[:, None] & m_d
                    tl.store(k_out + o_rest, nothing, mask=m_rest)
                    tl.store(v_out + o_rest, nothing, mask=m_rest)
