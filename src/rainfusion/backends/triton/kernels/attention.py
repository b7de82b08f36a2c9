"""Attention over the kept blocks in plain Triton, for every GPU that Triton compiles for."""

import triton
import triton.language as tl

from rainfusion.backends.triton.kernels.arguments import ANYWHERE, SIZES


@triton.jit
def _quantised(b_x, TYPE: tl.constexpr, LARGEST: tl.constexpr):
    """-> b_x / scale in TYPE, and the scale of each row. A NaN or infinity makes the scale NaN, and so shows."""
    b_scale = tl.maximum(tl.max(tl.abs(b_x), 1), 1e-30) / LARGEST + tl.sum(b_x * 0.0, 1)
    b_x = b_x * (1.0 / b_scale)[:, None]
    if TYPE == tl.int8:
        b_x = (b_x + 12582912.0) - 12582912.0  # to the nearest integer
    return b_x.to(TYPE), b_scale


@triton.jit
def _logits(b_q, b_k, factor, scales, block, PRECISION: tl.constexpr):
    """In units of log2. factor: a number, or [BM, 1] if quantised; times what `scales` has for this block, if any."""
    # [BM, D_PAD] @ [D_PAD, BN] -> [BM, BN]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION).to(tl.float32) * factor
    if scales is not None:  # a product of factor and scale would go through shared memory, to where its rows belong
        b_s = b_s * tl.load(scales + block)
    return b_s


@triton.jit
def _turned_values(p_v, o_key, m_key, o_d, D_PAD: tl.constexpr, KEYS: tl.constexpr):
    """[BN, D_PAD], of blocks that are [D_PAD, KEYS]: products of eight bits want neighbouring keys side by side."""
    o_v = o_d[:, None] * KEYS + (o_key // KEYS * (D_PAD * KEYS) + o_key % KEYS)[None, :]
    if m_key is None:
        return tl.trans(tl.load(p_v + o_v))
    else:
        return tl.trans(tl.load(p_v + o_v, mask=m_key[None, :], other=0.0))


@triton.jit
def _added(b_s, b_v, b_m, b_l, b_acc, SHIFT: tl.constexpr, PRECISION: tl.constexpr):
    """Keys with logits b_s [BM, BN], in units of log2, and values b_v [BN, D_PAD], into the running softmax.

    Its weights are in 0 ... 2^SHIFT: where eight bits have their range.
    """
    b_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # no key so far: exp2(-inf) rather than NaN
    b_p = tl.math.exp2(b_s - (b_base - SHIFT)[:, None])
    b_alpha = tl.math.exp2(b_m - b_base)
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_acc = b_acc * b_alpha[:, None]
    # [BM, BN] @ [BN, D_PAD] -> [BM, D_PAD]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_new, b_l, b_acc


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def attention_kernel(
    q, k, v, out, lse, counts, indices, schedule, order, bias, stand_ins, k_scale, v_scale, k_mean,
    q_stride_b, q_stride_h, q_stride_s, out_stride_b, out_stride_h, out_stride_s, k_stride_b, k_stride_h, k_stride_s,
    v_stride_b, v_stride_h, v_stride_s, schedule_stride, scale_log2, H, SHARED, NQ, NK, SPARE, Sq, Sk,
    UNIT: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LSE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    STAND_INS: tl.constexpr, PRECISION: tl.constexpr, LARGEST: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One program has BM queries of one row of blocks.

    BLOCK tokens are a block of queries, KEYS one of keys: BN keys at a time are part of a block, or several blocks.
    q rows are read, and out rows written, through `order`; k and v are in block order already, WIDTH channels wide:
    D, or if quantised zeros up to whole words. Strides of q and out are in units of UNIT elements, those of k and v,
    whose types may be others, of K_UNIT and V_UNIT. bias fp32 [B, NK * KEYS], in units of log2, -inf where a key does
    not count. stand_ins fp32 or fp16 [B, H, NQ, SPARE * KEYS + BLOCK]: the same for the means behind the keys, see
    `stand_ins_kernel`.

    Quantised, with k_scale: q is quantised here, row by row, to k's type, which reaches LARGEST. k_scale fp32
    [B, Hk, NK + SPARE], or [B, Hk] for blocks of keys finer than those of queries; k_mean fp32 [B, Hk, D] was taken
    from all keys. With v_scale fp32 [B, Hk, D] v is quantised too, its blocks turned, and so are the weights: see
    `_turned_values` and `_added`.
    """
    QUANTISED: tl.constexpr = k_scale is not None
    TURNED: tl.constexpr = v_scale is not None
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
    k_bh = b * (H // SHARED) + h // SHARED
    factor = scale_log2
    scales = None  # of blocks of keys
    if QUANTISED:
        b_q = b_q.to(tl.float32)
        if HAS_LSE:  # what smoothing took from the logits
            b_mean = tl.load(k_mean + k_bh * D + o_d, mask=o_d < D, other=0.0)
            b_shift = tl.sum(b_q * b_mean[None, :], 1) * scale_log2
        b_q, b_scale = _quantised(b_q, k.dtype.element_ty, LARGEST)
        factor = (b_scale * scale_log2)[:, None]
        if KEYS == BLOCK:
            scales = k_scale + k_bh * (NK + SPARE)
        else:
            factor = factor * tl.load(k_scale + k_bh)
    o_n = tl.arange(0, BN)
    m_k = (o_d < WIDTH)[None, :]
    p_k = k + (b * k_stride_b + (h // SHARED) * k_stride_h) * K_UNIT + o_d[None, :]
    p_values = v + (b * v_stride_b + (h // SHARED) * v_stride_h) * V_UNIT
    p_v = p_values + o_d[None, :]
    p_index = indices + (bh * NQ + row) * NK
    count = tl.load(counts + bh * NQ + row)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, D_PAD], tl.float32)
    if STAND_INS:
        for ahead in tl.range(0, SPARE * KEYS, BN, num_stages=1):
            o_mean = (NK * KEYS + ahead + o_n).to(tl.int64)
            b_k = tl.load(p_k + o_mean[:, None] * (k_stride_s * K_UNIT), mask=m_k, other=0.0)
            if TURNED:
                b_v = _turned_values(p_values, o_mean, None, o_d, D_PAD, KEYS)
            else:
                b_v = tl.load(p_v + o_mean[:, None] * (v_stride_s * V_UNIT), mask=m_k, other=0.0)
            b_s = _logits(b_q, b_k, factor, scales, NK + ahead // KEYS, PRECISION)
            p_bias = stand_ins + ((bh * NQ + row) * (SPARE * KEYS + BLOCK) + ahead)
            b_s = b_s + tl.load(p_bias + o_n).to(tl.float32)[None, :]
            b_m, b_l, b_acc = _added(b_s, b_v, b_m, b_l, b_acc, SHIFT, PRECISION)
    for step in range(0, tl.cdiv(count * KEYS, BN)):
        if KEYS >= BN:
            block = tl.load(p_index + step // SUB).to(tl.int64)
            first = block * KEYS + (step % SUB) * BN
            o_key = first + o_n
            m_n = o_key < Sk
            m_slot = None  # what is quantised has zeros up to the end of the block
            some_missing, some_later = first + BN > Sk, first + BN > row * BLOCK + part * BM
        else:  # from several places; the last step may have fewer
            block = 0
            o_at = step * BN + o_n
            m_slot = o_at < count * KEYS
            o_key = tl.load(p_index + o_at // KEYS, mask=m_slot, other=0).to(tl.int64) * KEYS + o_at % KEYS
            m_n = m_slot & (o_key < Sk)
            some_missing, some_later = True, True
        b_k = tl.load(p_k + o_key[:, None] * (k_stride_s * K_UNIT), mask=m_n[:, None] & m_k, other=0.0)
        if TURNED:
            b_v = _turned_values(p_values, o_key, m_slot, o_d, D_PAD, KEYS)
        else:
            b_v = tl.load(p_v + o_key[:, None] * (v_stride_s * V_UNIT), mask=m_n[:, None] & m_k, other=0.0)
        b_s = _logits(b_q, b_k, factor, scales, block, PRECISION)
        if HAS_BIAS:
            b_s = b_s + tl.load(bias + b * (NK * KEYS) + o_key, mask=m_n, other=float("-inf"))[None, :]
        elif QUANTISED:  # one multiply-add with the scale, and fewer registers than a branch takes
            b_s = b_s + tl.where(m_n, 0.0, float("-inf"))[None, :]
        elif some_missing:
            b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        if IS_CAUSAL and some_later:
            b_s = tl.where(o_key[None, :] <= o_pos[:, None], b_s, float("-inf"))
        b_m, b_l, b_acc = _added(b_s, b_v, b_m, b_l, b_acc, SHIFT, PRECISION)
    b_out = b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
    if v_scale is not None:
        b_out = b_out * tl.load(v_scale + k_bh * D + o_d, mask=o_d < D, other=0.0)[None, :]
    p_out = out + (b * out_stride_b + h * out_stride_h) * UNIT
    p_out = p_out + o_token[:, None] * (out_stride_s * UNIT) + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m[:, None] & m_d)
    if HAS_LSE:
        b_lse = b_m - SHIFT + tl.math.log2(b_l)
        if QUANTISED:
            b_lse = b_lse + b_shift
        b_lse = tl.where(b_l == 0.0, float("-inf"), b_lse * 0.6931471805599453)
        tl.store(lse + bh * Sq + o_token, b_lse, mask=m_m)
