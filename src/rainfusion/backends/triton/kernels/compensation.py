"""Which blocks a row skips, as a bias for the means that stand in for them (see `prediction.compensation`)."""

import triton
import triton.language as tl


@triton.jit
def stand_ins_kernel(
    counts, indices, weights, key_bias, bias, weights_stride, H, NQ, NK, WIDTH, Sk,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """bias[row, j] = weights[b, j] where the row skips block j, -inf where it attends to it, in units of log2.

    Behind that, at WIDTH, the bias of the last BLOCK keys, or fewer, that the row attends to: of its list in parts of
    BLOCK keys, the last part, which may be ragged. So it is [B, H, NQ, WIDTH + BLOCK], of the weights' type. weights
    [B, WIDTH]: log2 of the number of keys in each block of KEYS; -inf where there is none, and past NK. key_bias fp32
    [B, NK * KEYS] or None.
    """
    row = tl.program_id(0).to(tl.int64)
    b = row // (NQ * H)
    p_bias = bias + row * (WIDTH + BLOCK)
    p_list = indices + row * NK
    o_n = tl.arange(0, BN)
    for first in range(0, WIDTH, BN):
        m_n = first + o_n < WIDTH
        b_w = tl.load(weights + b * weights_stride + first + o_n, mask=m_n, other=0.0)
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
