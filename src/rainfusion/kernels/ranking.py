"""From pooled tokens to a `BlockMask`: scores, the best blocks of each row, their packed list.

Everything is exact and deterministic: the k-th best score of a row is found bit by bit, and ties go to the lower index.
"""

import triton
import triton.language as tl


@triton.jit
def mean_scores_kernel(
    q_means, k_means, live, scores, scale, H, SHARED, NQ, NK,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HAS_LIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """scores[i, j] = scale * q_means[i] . k_means[j], -inf where block j has no key: fp32 [B, H, NQ, NK]."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_m, tiles_n = tl.cdiv(NQ, BM), tl.cdiv(NK, BN)
    bh = pid // (tiles_m * tiles_n)
    tile = pid % (tiles_m * tiles_n)
    b, h = bh // H, bh % H
    k_bh = b * (H // SHARED) + h // SHARED
    o_m = (tile // tiles_n) * BM + tl.arange(0, BM)
    o_n = (tile % tiles_n) * BN + tl.arange(0, BN)
    p_q = q_means + (bh * NQ + o_m)[:, None] * D
    p_k = k_means + (k_bh * NK + o_n)[:, None] * D
    b_s = tl.zeros([BM, BN], tl.float32)
    for first in range(0, D, BD):
        o_d = (first + tl.arange(0, BD))[None, :]
        b_q = tl.load(p_q + o_d, mask=(o_m < NQ)[:, None] & (o_d < D), other=0.0)
        b_k = tl.load(p_k + o_d, mask=(o_n < NK)[:, None] & (o_d < D), other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=PRECISION)  # [BM, BN]
    b_s = b_s * scale
    if HAS_LIVE:
        b_live = tl.load(live + b * NK + o_n, mask=o_n < NK, other=0) != 0
        b_s = tl.where(b_live[None, :], b_s, float("-inf"))
    p_s = scores + (bh * NQ + o_m)[:, None] * NK + o_n[None, :]
    tl.store(p_s, b_s, mask=(o_m < NQ)[:, None] & (o_n < NK)[None, :])


@triton.jit
def _group_logits(
    p_q, p_k, live, q_stride_s, q_stride_d, k_stride_s, k_stride_d, o_m, o_n, Sq, Sk, groups_k, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """[BM, BN] logits of STRIDE antidiagonal pairs, sum_i q[8a + 7 - i] . k[8b + i] for 8; -inf where nothing is seen.

    o_m [BM], o_n [BN]: the groups a and b.
    """
    CHUNKS: tl.constexpr = (D + BD - 1) // BD
    b_s = tl.zeros([BM, BN], tl.float32)
    for step in range(STRIDE * CHUNKS):
        i = step // CHUNKS
        o_q, o_k = o_m * STRIDE + (STRIDE - 1 - i), o_n * STRIDE + i
        o_d = (step % CHUNKS) * BD + tl.arange(0, BD)
        m_d = (o_d < D)[None, :]
        b_q = tl.load(
            p_q + o_q[:, None] * q_stride_s + o_d[None, :] * q_stride_d, mask=(o_q < Sq)[:, None] & m_d, other=0.0
        )
        b_k = tl.load(
            p_k + o_k[:, None] * k_stride_s + o_d[None, :] * k_stride_d, mask=(o_k < Sk)[:, None] & m_d, other=0.0
        )
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=PRECISION)
    b_s = b_s * scale
    # a NaN or +inf takes the row's whole mass: its block is then kept, and shows in the output
    b_s = tl.where((b_s != b_s) | (b_s == float("inf")), 3.4028234663852886e38, b_s)
    m_s = (tl.load(live + o_n, mask=o_n < groups_k, other=0) != 0)[None, :]
    if IS_CAUSAL:
        m_s = m_s & (o_n[None, :] <= o_m[:, None])
    return tl.where(m_s, b_s, float("-inf"))


@triton.jit
def group_mass_kernel(
    q, k, live, mass,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d, k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    scale, H, SHARED, NQ, NK, Sq, Sk,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, STRIDE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """mass[i, j] = sum over the groups a, b of a block pair, GROUPS on each side, of softmax_b(logit of a and b).

    ada_bsa: 16 groups of 8 tokens, whose logit is the mean of antidiagonal pairs. Part means: each is a group of one.
    One program has BM groups of q. It walks over k twice: once for the softmax's normaliser, once for the masses.
    live uint8 [B, NK * GROUPS]: groups with a key left -> fp32 [B, H, NQ, NK].
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0).to(tl.int64)
    tiles_m = tl.cdiv(NQ * GROUPS, BM)
    bh, tile = pid // tiles_m, tiles_m - 1 - pid % tiles_m
    b, h = bh // H, bh % H
    o_m = tile * BM + tl.arange(0, BM)
    p_q = q + b * q_stride_b + h * q_stride_h
    p_k = k + b * k_stride_b + (h // SHARED) * k_stride_h
    p_live = live + b * (NK * GROUPS)
    end = NK * GROUPS
    if IS_CAUSAL:
        end = tl.minimum(end, (tile + 1) * BM)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    for first in range(0, end, BN):
        o_n = (first + tl.arange(0, BN)).to(tl.int64)
        b_s = _group_logits(
            p_q, p_k, p_live, q_stride_s, q_stride_d, k_stride_s, k_stride_d, o_m, o_n, Sq, Sk, NK * GROUPS, scale,
            D, BM, BN, BD, IS_CAUSAL, PRECISION, STRIDE,
        )  # fmt: skip
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.math.exp2((b_s - b_base[:, None]) * LOG2E)
        b_l = b_l * tl.math.exp2((b_m - b_base) * LOG2E) + tl.sum(b_p, 1)
        b_m = b_new
    b_base = tl.where(b_m == float("-inf"), 0.0, b_m)
    # rows of padding, and rows that see no key, count nothing
    b_norm = tl.where((b_l > 0) & (o_m * STRIDE < Sq), 1.0 / tl.where(b_l > 0, b_l, 1.0), 0.0)
    o_i = tile * (BM // GROUPS) + tl.arange(0, BM // GROUPS)
    for first in range(0, tl.cdiv(NK * GROUPS, BN) * BN, BN):
        b_sum = tl.zeros([BM // GROUPS, BN // GROUPS], tl.float32)
        if first < end:
            o_n = (first + tl.arange(0, BN)).to(tl.int64)
            b_s = _group_logits(
                p_q, p_k, p_live, q_stride_s, q_stride_d, k_stride_s, k_stride_d, o_m, o_n, Sq, Sk, NK * GROUPS, scale,
                D, BM, BN, BD, IS_CAUSAL, PRECISION, STRIDE,
            )  # fmt: skip
            b_p = tl.math.exp2((b_s - b_base[:, None]) * LOG2E) * b_norm[:, None]
            b_p = tl.reshape(b_p, [BM // GROUPS, GROUPS, BN // GROUPS, GROUPS])
            b_sum = tl.sum(tl.sum(b_p, 3), 1)
        o_j = first // GROUPS + tl.arange(0, BN // GROUPS)
        p_out = mass + (bh * NQ + o_i)[:, None] * NK + o_j[None, :]
        tl.store(p_out, b_sum, mask=(o_i < NQ)[:, None] & (o_j < NK)[None, :])


@triton.jit
def _sort_key(x, m_valid):
    """fp32 -> uint32 that sorts the same way, NaN above all, columns that are not up for choice (0) below all."""
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 ties with 0.0
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    key = tl.where(x != x, 0xFFFFFFFF, key).to(tl.uint32)
    return tl.where(m_valid, key, 0).to(tl.uint32)


@triton.jit
def _best(key, number):
    """bool [N]: the `number` largest keys, ties to the lower index."""
    kth = tl.zeros([1], tl.uint32)  # the largest value that `number` keys reach, found bit by bit
    i = 0
    while i < 32:
        tried = kth | (tl.full([1], 1, tl.uint32) << (31 - i))
        reach = tl.sum((key >= tried).to(tl.int32), 0)
        kth = tl.where(reach >= number, tried, kth)
        i = tl.where(reach == number, 32, i + 1)  # exactly so many: lower bits change nothing
    above = key > kth
    tied = (key == kth) & (key > 0)
    rank = tl.cumsum(tied.to(tl.int32), 0) - 1
    return above | (tied & (rank < number - tl.sum(above.to(tl.int32), 0)))


@triton.jit
def _pack(kept, o_n, row, counts, indices, NK):
    """counts[row], and indices[row]: kept blocks ascending, then all the others ascending."""
    m_n = o_n < NK
    kept = kept & m_n
    rank = tl.cumsum(kept.to(tl.int32), 0)
    count = tl.sum(kept.to(tl.int32), 0)
    position = tl.where(kept, rank - 1, count + o_n - rank)
    tl.store(counts + row, count)
    tl.store(indices + row * NK + position, o_n, mask=m_n)


@triton.jit
def keep_best_kernel(
    scores, protected_rows, protected_columns, counts, indices, number, numbers, heads, NQ, NK,
    N_PAD: tl.constexpr, PER_HEAD: tl.constexpr, FREE_ONLY: tl.constexpr,
):  # fmt: skip
    """rf_v2: the `number` best columns of each row and the protected blocks. `indices` may be the scores' memory.

    PER_HEAD: numbers int32 [heads], by head or by batch and head. FREE_ONLY: the best of those not protected.
    """
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, N_PAD)
    m_n = o_n < NK
    b_s = tl.load(scores + row * NK + o_n, mask=m_n, other=0.0)
    protected = tl.load(protected_columns + o_n, mask=m_n, other=0) != 0
    m_free = m_n
    if FREE_ONLY:
        m_free = m_n & (protected == 0)
    if PER_HEAD:
        number = tl.load(numbers + row // NQ % heads)
    kept = _best(_sort_key(b_s, m_free), number) | protected
    kept = kept | (tl.load(protected_rows + row % NQ) != 0)
    tl.debug_barrier()  # every score was read before the list takes its place
    _pack(kept, o_n, row, counts, indices, NK)


@triton.jit
def keep_mass_kernel(
    mass, live, counts, indices, share_bits, cdf_threshold, H, NQ, NK,
    N_PAD: tl.constexpr, HAS_LIVE: tl.constexpr, IS_CAUSAL: tl.constexpr, KEEP_SINK: tl.constexpr,
    KEEP_RECENT: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
):  # fmt: skip
    """ada_bsa: the forced columns, and of the others the fewest that reach the threshold, at most the cap.

    share_bits: 1 - sparsity, a double's bits. `indices` may be the masses' memory.
    """
    row = tl.program_id(0).to(tl.int64)
    i = (row % NQ).to(tl.int32)
    b = row // (NQ * H)
    o_n = tl.arange(0, N_PAD)
    m_n = o_n < NK
    visible = m_n
    if IS_CAUSAL:
        visible = visible & (o_n <= i)
    forced = o_n < 0
    if KEEP_SINK:
        forced = forced | (o_n == 0)
    if KEEP_RECENT:
        forced = forced | (o_n == (i if IS_CAUSAL else NK - 1))
    others = visible & (forced == 0)
    b_mass = tl.load(mass + row * NK + o_n, mask=m_n, other=0.0)
    if HAS_LIVE:
        b_mass = tl.where(tl.load(live + b * NK + o_n, mask=m_n, other=0) != 0, b_mass, -1.0)
    key = _sort_key(b_mass, others)
    available = tl.sum(others.to(tl.int32), 0)
    wanted = available
    if HAS_THRESHOLD:
        # in fixed point, so that sums do not depend on the order of adding
        fixed = tl.where(others & (b_mass > 0), b_mass, 0.0) * 4294967296.0
        fixed = fixed.to(tl.int64)
        enough = cdf_threshold * tl.sum(fixed, 0).to(tl.float32)
        bound = tl.zeros([1], tl.uint32)  # the lowest value whose larger keys do not reach the threshold
        for bit in range(32):
            step = tl.full([1], 1, tl.uint32) << (31 - bit)
            larger = tl.sum(tl.where(key > (bound | (step - 1)), fixed, 0), 0)
            bound = tl.where(larger.to(tl.float32) < enough, bound, bound | step)
        above = others & (key > bound)
        tied = others & (key == bound)
        before = tl.sum(tl.where(above, fixed, 0), 0) + (tl.cumsum(tied.to(tl.int64), 0) - 1) * fixed
        wanted = tl.sum((above | (tied & (before.to(tl.float32) < enough))).to(tl.int32), 0)
    seen = tl.sum(visible.to(tl.int32), 0).to(tl.float64)
    cap = tl.ceil(seen * share_bits.to(tl.int64).to(tl.float64, bitcast=True) - 1e-9).to(tl.int32)
    number = tl.minimum(tl.maximum(tl.minimum(wanted, cap), 1), available)
    kept = (_best(key, number) & others) | forced
    tl.debug_barrier()
    _pack(kept & visible, o_n, row, counts, indices, NK)


@triton.jit
def heavy_first_kernel(counts, schedule, NQ, BM: tl.constexpr, BN: tl.constexpr):
    """schedule[bh]: a head's rows, those with the most blocks first, ties in order: int32 [B * H, NQ]."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(NQ, BM)
    bh = pid // tiles
    o_m = (pid % tiles).to(tl.int32) * BM + tl.arange(0, BM)
    own = tl.load(counts + bh * NQ + o_m, mask=o_m < NQ, other=-1)
    rank = tl.zeros([BM], tl.int32)
    for first in range(0, NQ, BN):
        o_n = first + tl.arange(0, BN)
        other = tl.load(counts + bh * NQ + o_n, mask=o_n < NQ, other=-1)[None, :]
        earlier = (other > own[:, None]) | ((other == own[:, None]) & (o_n[None, :] < o_m[:, None]))
        rank += tl.sum((earlier & (o_n < NQ)[None, :]).to(tl.int32), 1)
    tl.store(schedule + bh * NQ + rank, o_m, mask=o_m < NQ)
