"""The passes over keys and values for quantised attention: statistics, then e4m3 or int8 in block order.

k is smoothed by its mean over tokens first: a vector that all keys share moves every logit of a query alike, which the
softmax does not see, but it would take most of the range of eight bits.
"""

import triton
import triton.language as tl

from rainfusion.backends.triton.kernels.blocks import tokens_at


@triton.jit
def statistics_kernel(
    k, v, order, keep, k_means, v_means, v_largest,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d, v_stride_b, v_stride_h, v_stride_s, v_stride_d, H, S, N,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    """fp32 [B, H, N, D] each: the mean of a block's keys and of its values (if asked for), and their channels' largest
    magnitude."""
    pid = tl.program_id(0).to(tl.int64)
    bh, block = pid // N, pid % N
    b, h = bh // H, bh % H
    o_pos = block * BLOCK + tl.arange(0, BLOCK)
    o_token, m_row = tokens_at(o_pos, order, keep, b, S, HAS_ORDER, HAS_KEEP)
    o_d = tl.arange(0, D_PAD)
    m_d = o_d < D
    m_x = m_row[:, None] & m_d[None, :]
    p_k = k + b * k_stride_b + h * k_stride_h + o_token[:, None] * k_stride_s + o_d[None, :] * k_stride_d
    p_v = v + b * v_stride_b + h * v_stride_h + o_token[:, None] * v_stride_s + o_d[None, :] * v_stride_d
    b_k = tl.load(p_k, mask=m_x, other=0.0).to(tl.float32)
    b_v = tl.load(p_v, mask=m_x, other=0.0).to(tl.float32)
    number = tl.maximum(tl.sum(m_row.to(tl.int32), 0), 1)
    tl.store(k_means + pid * D + o_d, tl.sum(b_k, 0) / number.to(tl.float32), mask=m_d)
    if v_means is not None:
        tl.store(v_means + pid * D + o_d, tl.sum(b_v, 0) / number.to(tl.float32), mask=m_d)
    tl.store(v_largest + pid * D + o_d, tl.max(tl.abs(b_v), 0), mask=m_d)


@triton.jit
def channels_kernel(
    k_means, v_largest, k_mean, v_scale, N, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Over all blocks of a head: fp32 [B, H, D], the mean of the block means, and the scale of v's channels."""
    bh = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, D_PAD)
    m_d = o_d < D
    b_sum = tl.zeros([D_PAD], tl.float32)
    b_max = tl.zeros([D_PAD], tl.float32)
    number = 0.0  # of blocks with a key left: the mean of the others is 0, and not to be counted
    for first in range(0, N, ROWS):
        o_n = first + tl.arange(0, ROWS)
        o_x = (bh * N + o_n)[:, None] * D + o_d[None, :]
        m_x = (o_n < N)[:, None] & m_d[None, :]
        b_means = tl.load(k_means + o_x, mask=m_x, other=0.0)
        b_sum += tl.sum(b_means, 0)
        number += tl.sum((tl.max(tl.abs(b_means), 1) > 0).to(tl.float32), 0)
        b_max = tl.maximum(b_max, tl.max(tl.load(v_largest + o_x, mask=m_x, other=0.0), 0))
    # a mean that is not finite would spoil every key, instead of the ones that are not
    b_mean = b_sum / tl.maximum(number, 1.0)
    b_mean = tl.where(tl.abs(b_mean) < float("inf"), b_mean, 0.0)
    tl.store(k_mean + bh * D + o_d, b_mean, mask=m_d)
    tl.store(v_scale + bh * D + o_d, tl.maximum(b_max, 1e-30) / 448.0, mask=m_d)


@triton.jit
def quantise_kernel(
    k, v, order, keep, k_mean, v_scale, k_out, v_out, k_scale,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d, v_stride_b, v_stride_h, v_stride_s, v_stride_d, H, S, N,
    FIRST, ALL, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_KEEP: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """k -> [B, H, ALL * BLOCK, D] and a scale for each block; v -> e4m3 [B, H, ALL * D_PAD, BLOCK], blocks transposed.

    The N blocks of a head are those from FIRST on of its ALL. In a block of v, key 16 g + 8 h + 2 c + e stands at
    16 g + 4 c + 2 h + e: see `kernels.hopper._weights`.
    """
    pid = tl.program_id(0).to(tl.int64)
    bh, block = pid // N, pid % N
    b, h = bh // H, bh % H
    place = bh * ALL + FIRST + block
    o_d = tl.arange(0, D_PAD)
    m_d = o_d < D
    o_row = tl.arange(0, BLOCK)

    o_token, m_row = tokens_at(block * BLOCK + o_row, order, keep, b, S, HAS_ORDER, HAS_KEEP)
    m_x = m_row[:, None] & m_d[None, :]
    p_k = k + b * k_stride_b + h * k_stride_h + o_token[:, None] * k_stride_s + o_d[None, :] * k_stride_d
    b_mean = tl.load(k_mean + bh * D + o_d, mask=m_d, other=0.0)
    b_k = tl.where(m_x, tl.load(p_k, mask=m_x, other=0.0).to(tl.float32) - b_mean[None, :], 0.0)
    LARGEST: tl.constexpr = 127.0 if INT8 else 448.0
    scale = tl.maximum(tl.max(tl.max(tl.abs(b_k), 1), 0), 1e-30) / LARGEST
    scale = scale + tl.sum(tl.sum(b_k * 0.0, 1), 0)  # a NaN or infinity makes it NaN, and so shows
    b_k = b_k / scale
    if INT8:
        b_k = (b_k + 12582912.0) - 12582912.0  # to the nearest integer
    tl.store(k_scale + place, scale)
    tl.store(
        k_out + (place * BLOCK + o_row)[:, None] * D + o_d[None, :], b_k.to(k_out.dtype.element_ty), mask=m_d[None, :]
    )

    o_key = (o_row // 16) * 16 + ((o_row // 2) % 2) * 8 + ((o_row // 4) % 4) * 2 + o_row % 2
    o_token, m_key = tokens_at(block * BLOCK + o_key, order, keep, b, S, HAS_ORDER, HAS_KEEP)
    p_v = v + b * v_stride_b + h * v_stride_h + o_token[:, None] * v_stride_s + o_d[None, :] * v_stride_d
    b_v = tl.load(p_v, mask=m_key[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_v = b_v / tl.load(v_scale + bh * D + o_d, mask=m_d, other=1.0)[None, :]
    b_v = tl.trans(b_v.to(v_out.dtype.element_ty))  # [D_PAD, BLOCK]
    tl.store(v_out + (place * D_PAD + o_d)[:, None] * BLOCK + o_row[None, :], b_v)
