"""Skipped blocks through their means, added to attention over the kept ones (see `rainfusion.compensation`)."""

import triton
import triton.language as tl


@triton.jit
def compensate_kernel(
    q, out, lse, kept, k_means, v_means, weights, order,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d, out_stride_b, out_stride_h, out_stride_s, out_stride_d,
    scale_log2, H, SHARED, NQ, NK, Sq,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program has BM queries of a block; out and lse are changed where they stand.

    kept uint8 [B, H, NQ, NK]; means [B, Hk, NK, D] in q's dtype; weights fp32 [B, NK] in units of log2
    """
    TILES: tl.constexpr = BLOCK // BM
    pid = tl.program_id(0).to(tl.int64)
    flat = pid // TILES  # the row of blocks, counted over all heads
    bh, row = flat // NQ, flat % NQ
    b, h = bh // H, bh % H
    k_bh = b * (H // SHARED) + h // SHARED
    o_pos = row * BLOCK + (pid % TILES) * BM + tl.arange(0, BM)
    m_row = o_pos < Sq
    o_token = o_pos
    if HAS_ORDER:
        o_token = tl.load(order + o_pos, mask=m_row, other=0).to(tl.int64)
    o_d = tl.arange(0, D_PAD)
    m_x = m_row[:, None] & (o_d < D)[None, :]
    p_q = q + b * q_stride_b + h * q_stride_h + o_token[:, None] * q_stride_s + o_d[None, :] * q_stride_d
    p_out = out + b * out_stride_b + h * out_stride_h + o_token[:, None] * out_stride_s + o_d[None, :] * out_stride_d
    p_lse = lse + bh * Sq + o_token
    b_q = tl.load(p_q, mask=m_x, other=0.0)
    # attention over the kept blocks, as one key of weight exp2(m)
    b_m = tl.load(p_lse, mask=m_row, other=0.0) * 1.4426950408889634
    b_base = tl.where(b_m == float("-inf"), 0.0, b_m)
    b_l = tl.exp2(b_m - b_base)
    b_acc = tl.load(p_out, mask=m_x, other=0.0).to(tl.float32) * b_l[:, None]
    for first in range(0, NK, BN):
        o_n = first + tl.arange(0, BN)
        m_n = o_n < NK
        m_kv = m_n[:, None] & (o_d < D)[None, :]
        o_kv = (k_bh * NK + o_n)[:, None] * D + o_d[None, :]
        b_k = tl.load(k_means + o_kv, mask=m_kv, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2  # [BM, BN]
        b_w = tl.load(weights + b * NK + o_n, mask=m_n, other=float("-inf"))
        b_kept = tl.load(kept + flat * NK + o_n, mask=m_n, other=1) != 0
        b_s = tl.where(b_kept[None, :], float("-inf"), b_s + b_w[None, :])
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_next = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_scale = tl.exp2(b_base - b_next)
        b_p = tl.exp2(b_s - b_next[:, None])
        b_v = tl.load(v_means + o_kv, mask=m_kv, other=0.0)
        b_l = b_l * b_scale + tl.sum(b_p, 1)
        b_acc = b_acc * b_scale[:, None] + tl.dot(b_p.to(b_q.dtype), b_v, input_precision=PRECISION)
        b_m, b_base = b_new, b_next
    b_out = b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_x)
    tl.store(p_lse, (b_base + tl.log2(b_l)) * 0.6931471805599453, mask=m_row)
