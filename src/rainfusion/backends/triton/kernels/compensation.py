"""Which blocks a row skips, as a bias for the means that stand in for them (see `prediction.compensation`)."""

import triton
import triton.language as tl


@triton.jit
def stand_ins_kernel(
    counts, indices, weights, key_bias, bias, weights_stride, H, NQ, NK, WIDTH, Sk,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, N_PAD: tl.constexpr,
):  # fmt: skip
    """bias[row, j] = weights[b, j] where the row skips block j, -inf where it attends to it, in units of log2.

    Behind that, at WIDTH, the bias of the last BLOCK keys, or fewer, that the row attends to: of its list in parts of
    BLOCK keys, the last part, which may be ragged. So it is fp32 [B, H, NQ, WIDTH + BLOCK]. weights fp32 [B, WIDTH]:
    log2 of the number of keys in each block of KEYS; -inf where there is none, and past NK. key_bias fp32
    [B, NK * KEYS] or None.
    """
    row = tl.program_id(0).to(tl.int64)
    b = row // (NQ * H)
    p_bias = bias + row * (WIDTH + BLOCK)
    o_n = tl.arange(0, N_PAD)
    m_n = o_n < WIDTH
    tl.store(p_bias + o_n, tl.load(weights + b * weights_stride + o_n, mask=m_n, other=0.0), mask=m_n)
    count = tl.load(counts + row)
    TOGETHER: tl.constexpr = BLOCK // KEYS
    o_last = tl.arange(0, BLOCK)
    o_slot = tl.maximum(tl.cdiv(count, TOGETHER) - 1, 0) * TOGETHER + o_last // KEYS
    m_last = o_slot < count
    o_key = tl.load(indices + row * NK + o_slot, mask=m_last, other=0) * KEYS + o_last % KEYS
    m_last = m_last & (o_key < Sk)
    b_last = tl.where(m_last, 0.0, float("-inf"))
    if key_bias is not None:
        b_last = tl.load(key_bias + b * (NK * KEYS) + o_key, mask=m_last, other=float("-inf"))
    tl.store(p_bias + WIDTH + o_last, b_last)
    tl.debug_barrier()  # the weights are there before some of them are taken back
    m_kept = (o_n < count) & (o_n < NK)
    o_kept = tl.load(indices + row * NK + o_n, mask=m_kept, other=0)
    tl.store(p_bias + o_kept, tl.full([N_PAD], float("-inf"), tl.float32), mask=m_kept)
