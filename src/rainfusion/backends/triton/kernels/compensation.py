"""Which blocks a row skips, as a bias for the means that stand in for them (see `prediction.compensation`)."""

import triton
import triton.language as tl

from rainfusion.backends.triton.kernels.arguments import ANYWHERE, SIZES
from rainfusion.backends.triton.kernels.blocks import tokens_at


@triton.jit
def _log2(x):
    """log2 of x >= 1 to 2e-6, 0 of 1, NaN of what is not finite. The language's own takes twice as long."""
    bits = x.to(tl.int32, bitcast=True)
    b_t = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0  # x = 2^n * (1 + t), 0 <= t < 1
    b_p = tl.fma(b_t, -0.0264550169, 0.123444568)
    b_p = tl.fma(b_t, b_p, -0.27953112)
    b_p = tl.fma(b_t, b_p, 0.458267912)
    b_p = tl.fma(b_t, b_p, -0.718281591)
    b_p = tl.fma(b_t, b_p, 1.44255318)
    return tl.fma(b_t, b_p, tl.fma(x, 0.0, ((bits >> 23) - 127).to(tl.float32)))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def stand_ins_kernel(
    counts, indices, weights, key_bias, spreads, q, order, bias,
    q_stride_b, q_stride_h, q_stride_s, weights_stride, gain, H, SHARED, NQ, NK, TILES, Sq, Sk,
    UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, LIST: tl.constexpr, EVERY: tl.constexpr, HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """bias[row, j] = weights[b, j] where the row skips block j, -inf where it attends to it, in units of log2.

    Behind that, at WIDTH = TILES * BLOCK, the bias of the last BLOCK keys, or fewer, that the row attends to: of its
    list in parts of BLOCK keys, the last part, which may be ragged. So it is [B, H, NQ, WIDTH + BLOCK], of the weights'
    type. weights [B, WIDTH], or one for all with a weights_stride of 0, which counts BLOCKs: log2 of the number of keys
    in each block of KEYS; -inf where there is none, and past NK. key_bias fp32 [B, NK * KEYS] or None.

    With spreads fp32 [B, Hk, NK] a weight has more on top, log2(1 + gain * power * spreads[j]), with the power of every
    EVERYth query of the row: see `prediction.spread`.

    A program has ROWS rows of a head, BN columns of them or LIST places of their lists at a time.
    """
    WIDTH = TILES * BLOCK
    EACH: tl.constexpr = BLOCK // EVERY
    TOGETHER: tl.constexpr = BLOCK // KEYS
    tiles = tl.cdiv(NQ, ROWS)
    pid = tl.program_id(0).to(tl.int64)
    bh, tile = pid // tiles, (pid % tiles).to(tl.int32)
    b, h = bh // H, bh % H
    o_r = tile * ROWS + tl.arange(0, ROWS)
    m_r = o_r < NQ
    p_bias = bias + ((bh * NQ + o_r) * (WIDTH + BLOCK))[:, None]
    p_list = indices + ((bh * NQ + o_r) * NK)[:, None]
    b_count = tl.load(counts + bh * NQ + o_r, mask=m_r, other=0)
    b_factor = tl.zeros([ROWS], tl.float32)
    p_spread = spreads
    if spreads is not None:
        o_pos = tile * (ROWS * BLOCK) + tl.arange(0, ROWS * EACH) * EVERY
        o_token, m_token = tokens_at(o_pos, order, None, b, Sq, HAS_ORDER, False)
        o_d = tl.arange(0, D_PAD)
        p_q = q + (b * q_stride_b + h * q_stride_h) * UNIT + o_token[:, None] * (q_stride_s * UNIT) + o_d[None, :]
        b_q = tl.load(p_q, mask=m_token[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
        b_sum = tl.sum(tl.reshape(tl.sum(b_q * b_q, 1), [ROWS, EACH]), 1)
        b_number = tl.sum(tl.reshape(m_token.to(tl.int32), [ROWS, EACH]), 1) * D
        b_factor = gain * b_sum / tl.maximum(b_number, 1).to(tl.float32)
        p_spread = spreads + (b * (H // SHARED) + h // SHARED) * NK
    o_n = tl.arange(0, BN)
    for first in range(0, WIDTH, BN):
        m_n = first + o_n < WIDTH
        b_w = tl.load(weights + b * weights_stride * BLOCK + first + o_n, mask=m_n, other=0.0)
        b_w = tl.broadcast_to(b_w[None, :], [ROWS, BN])
        if spreads is not None:
            b_spread = tl.load(p_spread + first + o_n, mask=first + o_n < NK, other=0.0)
            b_more = _log2(tl.fma(b_factor[:, None], b_spread[None, :], 1.0))
            b_w = (b_w.to(tl.float32) + b_more).to(bias.dtype.element_ty)
        tl.store(p_bias + (first + o_n)[None, :], b_w, mask=m_r[:, None] & m_n[None, :])
    o_last = tl.arange(0, BLOCK)
    o_slot = (tl.maximum(tl.cdiv(b_count, TOGETHER) - 1, 0) * TOGETHER)[:, None] + (o_last // KEYS)[None, :]
    m_last = o_slot < b_count[:, None]
    o_key = tl.load(p_list + o_slot, mask=m_last, other=0).to(tl.int32) * KEYS + (o_last % KEYS)[None, :]
    m_last = m_last & (o_key < Sk)
    b_last = tl.where(m_last, 0.0, float("-inf"))
    if key_bias is not None:
        b_last = tl.load(key_bias + b * (NK * KEYS) + o_key, mask=m_last, other=float("-inf"))
    tl.store(p_bias + WIDTH + o_last[None, :], b_last, mask=m_r[:, None])
    tl.debug_barrier()  # the weights are there before some of them are taken back
    o_l = tl.arange(0, LIST)
    for first in range(0, tl.max(b_count, 0), LIST):
        m_kept = (first + o_l)[None, :] < b_count[:, None]
        o_kept = tl.load(p_list + (first + o_l)[None, :], mask=m_kept, other=0).to(tl.int32)
        tl.store(p_bias + o_kept, tl.full([ROWS, LIST], float("-inf"), bias.dtype.element_ty), mask=m_kept)
