"""Which blocks a row skips, as a bias for the means that stand in for them (see `prediction.compensation`)."""

import triton
import triton.language as tl

from rainfusion.backends.triton.kernels.arguments import ANYWHERE, SIZES
from rainfusion.backends.triton.kernels.blocks import tokens_at


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def stand_ins_kernel(
    counts, indices, weights, key_bias, spreads, q, order, bias,
    q_stride_b, q_stride_h, q_stride_s, weights_stride, gain, H, SHARED, NQ, NK, TILES, Sq, Sk,
    UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    BN: tl.constexpr, EVERY: tl.constexpr, HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """bias[row, j] = weights[b, j] where the row skips block j, -inf where it attends to it, in units of log2.

    Behind that, at WIDTH = TILES * BLOCK, the bias of the last BLOCK keys, or fewer, that the row attends to: of its
    list in parts of BLOCK keys, the last part, which may be ragged. So it is [B, H, NQ, WIDTH + BLOCK], of the weights'
    type. weights [B, WIDTH], or one for all with a weights_stride of 0, which counts BLOCKs: log2 of the number of keys
    in each block of KEYS; -inf where there is none, and past NK. key_bias fp32 [B, NK * KEYS] or None.

    With spreads fp32 [B, Hk, NK] a weight has more on top, log2(1 + gain * power * spreads[j]), with the power of every
    EVERYth query of the row: see `prediction.spread`.
    """
    WIDTH = TILES * BLOCK
    row = tl.program_id(0).to(tl.int64)
    b, h = row // (NQ * H), row // NQ % H
    p_spread = spreads
    factor = 0.0
    if spreads is not None:
        o_pos = row % NQ * BLOCK + tl.arange(0, BLOCK // EVERY) * EVERY
        o_token, m_row = tokens_at(o_pos, order, None, b, Sq, HAS_ORDER, False)
        o_d = tl.arange(0, D_PAD)
        p_q = q + (b * q_stride_b + h * q_stride_h) * UNIT + o_token[:, None] * (q_stride_s * UNIT) + o_d[None, :]
        b_q = tl.load(p_q, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
        number = tl.sum(m_row.to(tl.int32), 0) * D
        factor = gain * tl.sum(tl.sum(b_q * b_q, 1), 0) / number.to(tl.float32)
        p_spread = spreads + (b * (H // SHARED) + h // SHARED) * NK
    p_bias = bias + row * (WIDTH + BLOCK)
    p_list = indices + row * NK
    o_n = tl.arange(0, BN)
    for first in range(0, WIDTH, BN):
        m_n = first + o_n < WIDTH
        b_w = tl.load(weights + b * weights_stride * BLOCK + first + o_n, mask=m_n, other=0.0)
        if spreads is not None:
            b_spread = tl.load(p_spread + first + o_n, mask=first + o_n < NK, other=0.0)
            b_w = (b_w.to(tl.float32) + tl.math.log2(1.0 + factor * b_spread)).to(bias.dtype.element_ty)
        tl.store(p_bias + first + o_n, b_w, mask=m_n)
    count = tl.load(counts + row)
    TOGETHER: tl.constexpr = BLOCK // KEYS
    o_last = tl.arange(0, BLOCK)
    o_slot = tl.maximum(tl.cdiv(count, TOGETHER) - 1, 0) * TOGETHER + o_last // KEYS
    m_last = o_slot < count
    o_key = tl.load(p_list + o_slot, mask=m_last, other=0).to(tl.int32) * KEYS + o_last % KEYS
    m_last = m_last & (o_key < Sk)
    b_last = tl.where(m_last, 0.0, float("-inf"))
    if key_bias is not None:
        b_last = tl.load(key_bias + b * (NK * KEYS) + o_key, mask=m_last, other=float("-inf"))
    tl.store(p_bias + WIDTH + o_last, b_last)
    tl.debug_barrier()  # the weights are there before some of them are taken back
    for first in range(0, count, BN):
        m_kept = first + o_n < count
        o_kept = tl.load(p_list + first + o_n, mask=m_kept, other=0).to(tl.int32)
        tl.store(p_bias + o_kept, tl.full([BN], float("-inf"), bias.dtype.element_ty), mask=m_kept)
