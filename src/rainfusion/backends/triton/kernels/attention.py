"""Attention over the kept blocks in plain Triton, for every GPU that Triton compiles for.

What keeps it fast, learnt by measuring and by reading the machine code:

- All steps but the last ones of a list have all of their keys, and run in a loop without masks, whose only arithmetic
  is the softmax: a multiply-add and an exponential to a logit. The ragged block of keys, if kept, is the last of its
  list, which ascends; it and a tile that is filled in part have a loop of their own, as has all of a list where keys
  have a bias or a causal order.
- Where products read shared memory themselves (Hopper, the large Blackwell), tensor descriptors bring keys and values
  there: no addresses, no masks, fewer registers. See `tuning`.
- The loop over the list comes before all others: with an accumulator that is not zero when it begins, ptxas lets every
  product wait for the one before it. So does a branch around the rescaling, for steps in which no maximum moved.
- Quantised values stand in the order in which lanes have their weights: see `_weights`.
"""

import triton
import triton.language as tl

from rainfusion.backends.triton.kernels.arguments import ANYWHERE, SIZES

# 1.5 * 2^23: added to an integer's bits it makes the float of that integer, 1.5 * 2^23 too large
_INT_BITS: tl.constexpr = tl.constexpr(0x4B400000)
_INT_FLOAT: tl.constexpr = tl.constexpr(12582912.0)
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # finite: from it to -inf there is a difference


@triton.jit
def _quantised(b_x, TYPE: tl.constexpr, LARGEST: tl.constexpr):
    """-> b_x / scale in TYPE, and the scale of each row. A NaN or infinity makes the scale NaN, and so shows."""
    b_scale = tl.maximum(tl.max(tl.abs(b_x), 1), 1e-30) / LARGEST + tl.sum(b_x * 0.0, 1)
    b_x = b_x * (1.0 / b_scale)[:, None]
    if TYPE == tl.int8:
        b_x = (b_x + _INT_FLOAT) - _INT_FLOAT  # to the nearest integer
    return b_x.to(TYPE), b_scale


@triton.jit
def _products(b_q, b_k, PRECISION: tl.constexpr):
    """[BM, D_PAD] @ [D_PAD, BN] -> fp32 [BM, BN]; of integers _INT_FLOAT too large: so they need no conversion."""
    if b_k.dtype == tl.int8:
        b_start = tl.full([b_q.shape[0], b_k.shape[0]], _INT_BITS, tl.int32)
        return tl.dot(b_q, tl.trans(b_k), b_start, out_dtype=tl.int32).to(tl.float32, bitcast=True)
    else:
        return tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)


@triton.jit
def _logits(b_s, b_factor, INTEGERS: tl.constexpr):
    """[BM, BN] of `_products`, times factor [BM]."""
    if INTEGERS:
        return b_s * b_factor[:, None] - (b_factor * _INT_FLOAT)[:, None]
    else:
        return b_s * b_factor[:, None]


@triton.jit
def _weights(b_p, TYPE: tl.constexpr, PERMUTED: tl.constexpr):
    """b_p [BM, BN] as products want it.

    PERMUTED: key 16 g + 8 h + 2 c + e is at 16 g + 4 c + 2 h + e, and so it is in v. On NVIDIA GPUs a lane has two
    neighbouring columns of each eight, and wants four of eight bits: as they are permuted, these are its own.
    """
    if PERMUTED:
        BM: tl.constexpr = b_p.shape[0]
        BN: tl.constexpr = b_p.shape[1]
        b_p = b_p.reshape([BM, BN // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([BM, BN])
    return b_p.to(TYPE)


@triton.jit
def _factor(b_factor, scales, block, b_l):
    """[BM], what makes logits of products: times what `scales` has for this block, if any."""
    if scales is not None:
        # zeros of b_l's layout, which is that of products' rows: else every step brings the factors there
        b_factor = b_factor * (tl.load(scales + block) + 0.0 * b_l)
    return b_factor


@triton.jit
def _rows(x, b, h, first, o_row, mask, stride, BN: tl.constexpr, D_PAD: tl.constexpr, DESCRIBED: tl.constexpr):
    """[BN, D_PAD] of k or v. x: a descriptor, which reads from `first` on, or a head's rows, of which `o_row`."""
    if DESCRIBED:
        return x.load([b, h, first, 0]).reshape([BN, D_PAD])
    else:
        return tl.load(x + o_row[:, None] * stride, mask=mask, other=0.0)


@triton.jit
def _turned_rows(
    x, b, h, first, o_block, o_in, mask, o_d,
    BN: tl.constexpr, D_PAD: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """The same of v in blocks that are [D_PAD, KEYS]: products of eight bits want neighbouring keys side by side.

    Pointers are to keys `o_in` of blocks `o_block`, from which the compiler sees that they are neighbours.
    """
    if DESCRIBED:
        b_v = x.load([b, h, first // KEYS * D_PAD, first % KEYS]).reshape([D_PAD, BN])
    else:
        p_v = x + o_d[:, None] * KEYS + (o_block * (D_PAD * KEYS) + o_in)[None, :]
        if mask is None:
            b_v = tl.load(p_v)
        else:
            b_v = tl.load(p_v, mask=mask[None, :], other=0.0)
    return tl.trans(b_v)


@triton.jit
def _added(
    b_s, factor, b_v, b_m, b_l, b_acc,
    SHIFT: tl.constexpr, PRECISION: tl.constexpr, INTEGERS: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """Keys with products b_s [BM, BN] times factor [BM] and values b_v [BN, D_PAD] into the running softmax.

    Logits are in units of log2, weights in 0 ... 2^SHIFT: where eight bits have their range. Without a factor b_s are
    logits already. They may all be -inf: b_m is finite.
    """
    if factor is None:
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.math.exp2(b_s - (b_new - SHIFT)[:, None])
    else:  # factor >= 0: it may wait until one multiply-add has it
        b_largest = tl.max(b_s, 1)
        if INTEGERS:
            b_new = tl.maximum(b_m, (b_largest - _INT_FLOAT) * factor)
            b_base = b_new - SHIFT + factor * _INT_FLOAT
        else:
            b_new = tl.maximum(b_m, b_largest * factor)
            b_base = b_new - SHIFT
        b_p = tl.math.exp2(b_s * factor[:, None] - b_base[:, None])
    b_alpha = tl.math.exp2(b_m - b_new)
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_acc = b_acc * b_alpha[:, None]
    # [BM, BN] @ [BN, D_PAD] -> [BM, D_PAD]
    b_acc = tl.dot(_weights(b_p, b_v.dtype, PERMUTED), b_v, b_acc, input_precision=PRECISION)
    return b_new, b_l, b_acc


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def attention_kernel(
    q, k, v, out, lse, counts, indices, schedule, order, bias, stand_ins, k_scale, v_scale, k_mean,
    q_stride_b, q_stride_h, q_stride_s, out_stride_b, out_stride_h, out_stride_s, k_stride_b, k_stride_h, k_stride_s,
    v_stride_b, v_stride_h, v_stride_s, schedule_stride, scale_log2, H, SHARED, NQ, NK, SPARE, Sq, Sk,
    UNIT: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DESCRIBED: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LSE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, STAND_INS: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr,
    LARGEST: tl.constexpr, SHIFT: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """One program has BM queries of one row of blocks.

    BLOCK tokens are a block of queries, KEYS one of keys: BN keys at a time are part of a block, or several blocks.
    q rows are read, and out rows written, through `order`; k and v are in block order already, WIDTH channels wide:
    D, or if quantised zeros up to whole words. They are DESCRIBED, by descriptors of BN keys, or pointers. Strides of q
    and out are in units of UNIT elements, those of k and v, whose types may be others, of K_UNIT and V_UNIT. scale_log2
    is not negative: with NEGATE q is negated instead, so that the largest product is the largest logit. bias fp32
    [B, NK * KEYS], in units of log2, -inf where a key does not count, as past the last one. stand_ins fp32 or fp16
    [B, H, NQ, SPARE * KEYS + BLOCK]: the same for the means behind the keys, see `stand_ins_kernel`.

    Quantised, with k_scale: q is quantised here, row by row, to k's type, which reaches LARGEST. k_scale fp32
    [B, Hk, NK + SPARE], or [B, Hk] for blocks of keys finer than those of queries; k_mean fp32 [B, Hk, D] was taken
    from all keys. With v_scale fp32 [B, Hk, 2, D] v is quantised too, less the means behind its scales, its blocks
    turned, and so are the weights: see `_turned_rows` and `_added`; for PERMUTED `_weights`.
    """
    QUANTISED: tl.constexpr = k_scale is not None
    K_TYPE: tl.constexpr = k.dtype if DESCRIBED else k.dtype.element_ty
    INTEGERS: tl.constexpr = K_TYPE == tl.int8
    TURNED: tl.constexpr = v_scale is not None
    ALL_GUARDED: tl.constexpr = HAS_BIAS or IS_CAUSAL
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
    if NEGATE:
        b_q = -b_q
    k_h = h // SHARED
    k_bh = b * (H // SHARED) + k_h
    scales = None  # of blocks of keys
    if QUANTISED:
        b_q = b_q.to(tl.float32)
        if HAS_LSE:  # what smoothing took from the logits
            b_mean = tl.load(k_mean + k_bh * D + o_d, mask=o_d < D, other=0.0)
            b_shift = tl.sum(b_q * b_mean[None, :], 1) * scale_log2
        b_q, b_scale = _quantised(b_q, K_TYPE, LARGEST)
        b_factor = b_scale * scale_log2
        if KEYS == BLOCK:
            scales = k_scale + k_bh * (NK + SPARE)
        else:
            b_factor = b_factor * tl.load(k_scale + k_bh)
    else:
        b_factor = tl.full([BM], scale_log2, tl.float32)
    o_n = tl.arange(0, BN)
    m_k = (o_d < WIDTH)[None, :]
    k_stride, v_stride = k_stride_s * K_UNIT, v_stride_s * V_UNIT
    if DESCRIBED:
        x_k, x_v = k, v
    else:
        x_k = k + (b * k_stride_b + k_h * k_stride_h) * K_UNIT + o_d[None, :]
        x_v = v + (b * v_stride_b + k_h * v_stride_h) * V_UNIT
        if not TURNED:
            x_v = x_v + o_d[None, :]
    b_at, h_at = b.to(tl.int32), k_h.to(tl.int32)
    p_index = indices + (bh * NQ + row) * NK
    count = tl.load(counts + bh * NQ + row)
    b_m = tl.full([BM], _LOWEST, tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, D_PAD], tl.float32)
    steps = tl.cdiv(count * KEYS, BN)
    whole = 0  # steps that are sure to have all of their keys
    if not ALL_GUARDED:
        last = tl.load(p_index + tl.maximum(count - 1, 0)).to(tl.int32)
        is_whole = (last + 1) * KEYS <= Sk
        if KEYS < BN:
            is_whole = is_whole & (count % (BN // KEYS) == 0)
        whole = tl.where(is_whole, steps, tl.maximum(steps - SUB, 0))
    for GUARDED in tl.static_range(ALL_GUARDED, 2):
        first_step, end = (whole, steps) if GUARDED else (0, whole)
        for step in tl.range(first_step, end, num_stages=1 if GUARDED and not ALL_GUARDED else None):
            m_slot = None
            if KEYS >= BN:
                block = tl.load(p_index + step // SUB).to(tl.int32)
                first = block * KEYS + (step % SUB) * BN
                o_block, o_in = block.to(tl.int64), (step % SUB) * BN + o_n
                some_later = first + BN > row * BLOCK + part * BM
            else:  # from several places; the last step may have fewer
                block, first = 0, 0
                o_at, o_in = step * BN + o_n, o_n % KEYS
                if GUARDED:
                    m_slot = o_at < count * KEYS
                    o_block = tl.load(p_index + o_at // KEYS, mask=m_slot, other=0).to(tl.int64)
                else:
                    o_block = tl.load(p_index + o_at // KEYS).to(tl.int64)
                some_later = True
            o_key = o_block * KEYS + o_in
            o_at_key = o_key.to(tl.int32) if KEYS >= BN else o_key  # for comparisons: of half as many registers
            m_n = o_at_key < Sk
            if m_slot is not None:
                m_n = m_slot & m_n
            m_kv = m_n[:, None] & m_k if GUARDED else m_k
            b_k = _rows(x_k, b_at, h_at, first, o_key, m_kv, k_stride, BN, D_PAD, DESCRIBED)
            if TURNED:
                b_v = _turned_rows(x_v, b_at, h_at, first, o_block, o_in, m_slot, o_d, BN, D_PAD, KEYS, DESCRIBED)
            else:
                b_v = _rows(x_v, b_at, h_at, first, o_key, m_kv, v_stride, BN, D_PAD, DESCRIBED)
            b_s = _products(b_q, b_k, PRECISION)
            b_c = _factor(b_factor, scales, block, b_l)
            if GUARDED:
                b_s = _logits(b_s, b_c, INTEGERS)
                if HAS_BIAS and KEYS >= BN:
                    b_s = b_s + tl.load(bias + b * (NK * KEYS) + o_key)[None, :]
                elif HAS_BIAS:
                    b_s = b_s + tl.load(bias + b * (NK * KEYS) + o_key, mask=m_slot, other=float("-inf"))[None, :]
                else:
                    b_s = b_s + tl.where(m_n, 0.0, float("-inf"))[None, :]
                if IS_CAUSAL and some_later:
                    b_s = tl.where(o_at_key[None, :] <= o_pos[:, None], b_s, float("-inf"))
                b_m, b_l, b_acc = _added(b_s, None, b_v, b_m, b_l, b_acc, SHIFT, PRECISION, INTEGERS, PERMUTED)
            else:
                b_m, b_l, b_acc = _added(b_s, b_c, b_v, b_m, b_l, b_acc, SHIFT, PRECISION, INTEGERS, PERMUTED)
    if STAND_INS:
        for ahead in tl.range(0, SPARE * KEYS, BN, num_stages=1):
            first = NK * KEYS + ahead
            o_mean = (first + o_n).to(tl.int64)
            b_k = _rows(x_k, b_at, h_at, first, o_mean, m_k, k_stride, BN, D_PAD, DESCRIBED)
            if TURNED:
                o_block, o_in = o_mean // KEYS, o_mean % KEYS
                b_v = _turned_rows(x_v, b_at, h_at, first, o_block, o_in, None, o_d, BN, D_PAD, KEYS, DESCRIBED)
            else:
                b_v = _rows(x_v, b_at, h_at, first, o_mean, m_k, v_stride, BN, D_PAD, DESCRIBED)
            b_c = _factor(b_factor, scales, NK + ahead // KEYS, b_l)
            b_s = _logits(_products(b_q, b_k, PRECISION), b_c, INTEGERS)
            p_bias = stand_ins + ((bh * NQ + row) * (SPARE * KEYS + BLOCK) + ahead)
            b_s = b_s + tl.load(p_bias + o_n).to(tl.float32)[None, :]
            b_m, b_l, b_acc = _added(b_s, None, b_v, b_m, b_l, b_acc, SHIFT, PRECISION, INTEGERS, PERMUTED)
    b_out = b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
    if v_scale is not None:
        p_scale = v_scale + k_bh * 2 * D + o_d
        b_out = b_out * tl.load(p_scale, mask=o_d < D, other=0.0)[None, :]
        b_mean = tl.load(p_scale + D, mask=o_d < D, other=0.0)
        b_out += tl.where(b_l == 0.0, 0.0, 1.0)[:, None] * b_mean[None, :]
    p_out = out + (b * out_stride_b + h * out_stride_h) * UNIT
    p_out = p_out + o_token[:, None] * (out_stride_s * UNIT) + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m[:, None] & m_d)
    if HAS_LSE:
        b_lse = b_m - SHIFT + tl.math.log2(b_l)
        if QUANTISED:
            b_lse = b_lse + b_shift
        b_lse = tl.where(b_l == 0.0, float("-inf"), b_lse * 0.6931471805599453)
        tl.store(lse + bh * Sq + o_token, b_lse, mask=m_m)
