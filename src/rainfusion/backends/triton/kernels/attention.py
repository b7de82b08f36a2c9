"""Attention over the kept blocks in plain Triton, for every GPU that Triton compiles for."""

import triton
import triton.language as tl

from rainfusion.backends.triton.kernels.arguments import ANYWHERE, SIZES


@triton.jit
def _added(b_s, b_v, b_m, b_l, b_acc, PRECISION: tl.constexpr):
    """Keys with logits b_s [BM, BN], in units of log2, and values b_v [BN, D_PAD], into the running softmax."""
    b_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # no key so far: exp2(-inf) rather than NaN
    b_p = tl.math.exp2(b_s - b_base[:, None])
    b_alpha = tl.math.exp2(b_m - b_base)
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_acc = b_acc * b_alpha[:, None]
    # [BM, BN] @ [BN, D_PAD] -> [BM, D_PAD]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_new, b_l, b_acc


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def attention_kernel(
    q, k, v, out, lse, counts, indices, schedule, order, bias, stand_ins,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    out_stride_b, out_stride_h, out_stride_s, schedule_stride, scale_log2, H, SHARED, NQ, NK, SPARE, Sq, Sk,
    UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LSE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, STAND_INS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program has BM queries of one row of blocks.

    BLOCK tokens are a block of queries, KEYS one of keys: BN keys at a time are part of a block, or several blocks.
    q rows are read, and out rows written, through `order`; k and v are in block order already. bias fp32
    [B, NK * KEYS], in units of log2, -inf where a key does not count. stand_ins fp32 or fp16
    [B, H, NQ, SPARE * KEYS + BLOCK]: the same for the means behind the keys, see `stand_ins_kernel`.
    """
    PARTS: tl.constexpr = BLOCK // BM  # programs to a row of blocks
    SUB: tl.constexpr = KEYS // BN if KEYS > BN else 1  # steps to a key block
    pid = tl.program_id(0).to(tl.int64)
    part = (pid % PARTS).to(tl.int32)
    bh, slot = pid // PARTS // NQ, pid // PARTS % NQ
    row = tl.load(schedule + bh * schedule_stride + slot)
    b, h = bh // H, bh % H
    o_pos = row * BLOCK + part * BM + tl.arange(0, BM)
    m_m = o_pos < Sq
    if HAS_ORDER:
        o_token = tl.load(order + o_pos, mask=m_m, other=0).to(tl.int64)
    else:
        o_token = o_pos.to(tl.int64)
    o_d = tl.arange(0, D_PAD)
    m_d = (o_d < D)[None, :]
    p_q = q + (b * q_stride_b + h * q_stride_h) * UNIT + o_token[:, None] * (q_stride_s * UNIT) + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d, other=0.0)  # [BM, D_PAD]
    o_n = tl.arange(0, BN)
    p_k = k + (b * k_stride_b + (h // SHARED) * k_stride_h) * UNIT + o_d[None, :]
    p_v = v + (b * v_stride_b + (h // SHARED) * v_stride_h) * UNIT + o_d[None, :]
    p_index = indices + (bh * NQ + row) * NK
    count = tl.load(counts + bh * NQ + row)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, D_PAD], tl.float32)
    if STAND_INS:
        for ahead in tl.range(0, SPARE * KEYS, BN, num_stages=1):
            o_mean = (NK * KEYS + ahead + o_n).to(tl.int64)
            b_k = tl.load(p_k + o_mean[:, None] * (k_stride_s * UNIT), mask=m_d, other=0.0)
            b_v = tl.load(p_v + o_mean[:, None] * (v_stride_s * UNIT), mask=m_d, other=0.0)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
            p_bias = stand_ins + ((bh * NQ + row) * (SPARE * KEYS + BLOCK) + ahead)
            b_s = b_s + tl.load(p_bias + o_n).to(tl.float32)[None, :]
            b_m, b_l, b_acc = _added(b_s, b_v, b_m, b_l, b_acc, PRECISION)
    for step in range(0, tl.cdiv(count * KEYS, BN)):
        if KEYS >= BN:
            first = tl.load(p_index + step // SUB).to(tl.int64) * KEYS + (step % SUB) * BN
            o_key = first + o_n
            m_n = o_key < Sk
            some_missing, some_later = first + BN > Sk, first + BN > row * BLOCK + part * BM
        else:  # from several places; the last step may have fewer
            o_at = step * BN + o_n
            m_n = o_at < count * KEYS
            o_key = tl.load(p_index + o_at // KEYS, mask=m_n, other=0).to(tl.int64) * KEYS + o_at % KEYS
            m_n = m_n & (o_key < Sk)
            some_missing, some_later = True, True
        b_k = tl.load(p_k + o_key[:, None] * (k_stride_s * UNIT), mask=m_n[:, None] & m_d, other=0.0)
        b_v = tl.load(p_v + o_key[:, None] * (v_stride_s * UNIT), mask=m_n[:, None] & m_d, other=0.0)
        # [BM, D_PAD] @ [D_PAD, BN] -> [BM, BN]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        if HAS_BIAS:
            b_s = b_s + tl.load(bias + b * (NK * KEYS) + o_key, mask=m_n, other=float("-inf"))[None, :]
        elif some_missing:
            b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        if IS_CAUSAL and some_later:
            b_s = tl.where(o_key[None, :] <= o_pos[:, None], b_s, float("-inf"))
        b_m, b_l, b_acc = _added(b_s, b_v, b_m, b_l, b_acc, PRECISION)
    b_out = b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
    p_out = out + (b * out_stride_b + h * out_stride_h) * UNIT
    p_out = p_out + o_token[:, None] * (out_stride_s * UNIT) + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m[:, None] & m_d)
    if HAS_LSE:
        b_lse = tl.where(b_l == 0.0, float("-inf"), (b_m + tl.math.log2(b_l)) * 0.6931471805599453)
        tl.store(lse + bh * Sq + o_token, b_lse, mask=m_m)
