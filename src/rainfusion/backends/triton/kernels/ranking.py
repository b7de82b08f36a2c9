"""From pooled tokens to a `BlockMask`: scores, the best blocks of each row, their packed list.

Everything is exact and deterministic: the k-th best score of a row is found bit by bit, and ties go to the lower index.
"""

import triton
import triton.language as tl

from rainfusion.backends.triton.kernels.arguments import ANYWHERE, SIZES


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
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
def _shown(b_s):
    """A NaN or +inf takes the row's whole mass: its block is then kept, and shows in the output."""
    return tl.where((b_s != b_s) | (b_s == float("inf")), 3.4028234663852886e38, b_s)


@triton.jit
def _normaliser(b_s, b_m, b_l, scale):
    """Rows' maxima and sums of exponentials -> with logits b_s * scale too, in units of log2. scale: positive."""
    b_new = tl.maximum(b_m, tl.max(b_s, 1) * scale)
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.math.exp2(tl.fma(b_s, scale, -b_base[:, None]))
    return b_new, b_l * tl.math.exp2(b_m - b_base) + tl.sum(b_p, 1)


@triton.jit
def _finished(b_m, b_l, m_row):
    """-> rows' maxima, and log2 of their sums: +inf for rows of padding, and that see no key, which have no mass."""
    b_base = tl.where(b_m == float("-inf"), 0.0, b_m)
    return b_base, tl.where((b_l > 0) & m_row, tl.math.log2(tl.where(b_l > 0, b_l, 1.0)), float("inf"))


@triton.jit
def _lane_rows(BM: tl.constexpr, PARTS: tl.constexpr):
    """int32 [BM]: which row of blocks of PARTS each column of a product has, so that sums over blocks are cheap.

    Of every eight columns of a product a lane holds two, the same two in each: all that it has are rows of one block,
    or of several, and only blocks of more than BM / 4 rows are shared between lanes.
    """
    OWN: tl.constexpr = min(PARTS, BM // 4)  # rows of a block that a lane has
    SHARE: tl.constexpr = PARTS // OWN  # lanes to a block
    EACH: tl.constexpr = BM // 4 // OWN  # blocks to a lane
    o_m = tl.arange(0, BM)
    lane, own = o_m % 8 // 2, o_m // 8 * 2 + o_m % 2
    return ((lane // SHARE * EACH + own // OWN) * SHARE + lane % SHARE) * OWN + own % OWN


@triton.jit
def _lane_blocks(BM: tl.constexpr, PARTS: tl.constexpr):
    """int32 [BM // PARTS]: which block each of `_lane_sums` is of."""
    SHARE: tl.constexpr = PARTS // min(PARTS, BM // 4)
    o_i = tl.arange(0, BM // PARTS)
    return o_i % (4 // SHARE) * (BM // PARTS // (4 // SHARE)) + o_i // (4 // SHARE)


@triton.jit
def _lane_sums(b_p, PARTS: tl.constexpr):
    """Sums over the columns of each block: [N, BM], in the order of `_lane_rows` -> [N, BM // PARTS]."""
    N: tl.constexpr = b_p.shape[0]
    BM: tl.constexpr = b_p.shape[1]
    OWN: tl.constexpr = min(PARTS, BM // 4)
    SHARE: tl.constexpr = PARTS // OWN
    b_p = tl.reshape(b_p, [N, BM // 4 // OWN, OWN // 2, 4 // SHARE, SHARE, 2])
    return tl.reshape(tl.sum(tl.sum(tl.sum(b_p, 5), 2), 3), [N, BM // PARTS])


@triton.jit
def _near_rows(BN: tl.constexpr, PARTS: tl.constexpr):
    """int32 [BN]: which of the rows of blocks of PARTS, 1 to 16, each row of a product has: sums over them are cheap.

    A lane holds two rows of a product, eight apart: they are the halves of a block, whose other rows are next to them.
    """
    NEAR: tl.constexpr = max(1, PARTS // 2)
    o_n = tl.arange(0, BN)
    if PARTS > 1:
        o_n = (o_n // 16 * (8 // NEAR) + o_n % 8 // NEAR) * PARTS + o_n // 8 % 2 * NEAR + o_n % NEAR
    return o_n


@triton.jit
def _near_sums(b_p, PARTS: tl.constexpr):
    """Sums over the rows of each block: [BN, M], in the order of `_near_rows` -> [BN // PARTS, M]."""
    NEAR: tl.constexpr = max(1, PARTS // 2)
    if PARTS > 1:
        BN: tl.constexpr = b_p.shape[0]
        M: tl.constexpr = b_p.shape[1]
        b_p = tl.reshape(b_p, [BN // 16, 2, 8 // NEAR, NEAR, M])
        b_p = tl.reshape(tl.sum(tl.sum(b_p, 1), 2), [BN // PARTS, M])
    return b_p


@triton.jit
def _part_means(p_k, o_n, o_d, end, D: tl.constexpr, CAREFUL: tl.constexpr):
    """Means of parts o_n [BN] of the keys: [BN, D_PAD]."""
    m_k = (o_d < D)[None, :]
    if CAREFUL:
        m_k = m_k & (o_n < end)[:, None]
    return tl.load(p_k + o_n[:, None] * D + o_d[None, :], mask=m_k, other=0.0)


@triton.jit
def _careful(b_s, scale, live, o_n, parts, EACH: tl.constexpr, DIM: tl.constexpr):
    """Logits b_s * scale of means o_n, along axis DIM, each of EACH of the parts: -inf where none of those has a key.

    Those before `parts` have keys, or as many of EACH as `live` says. With fewer a mean counts for so much less.
    """
    b_number = tl.minimum(tl.maximum(parts - o_n * EACH, 0), EACH)
    if live is not None:
        b_number = tl.load(live + o_n, mask=b_number > 0, other=0).to(tl.int32)
    b_s = _shown(b_s * scale)
    if EACH > 1:
        tl.static_assert(EACH == 4)  # log2 of number / 4; the language's own takes as long as everything else here
        b_less = tl.where(b_number == 4, 0.0, tl.where(b_number == 3, -0.41503749927884376, b_number - 3.0))
        b_s += tl.expand_dims(b_less, 1 - DIM)
    return tl.where(tl.expand_dims(b_number > 0, 1 - DIM), b_s, float("-inf"))


@triton.jit
def _below_largest(b_s, b_base):
    """b_s - b_base, 0 where logits are so large that only their rounding is between them and b_base.

    That is the largest of a row, or of its wide means, by a product that is not transposed and may add up its channels
    in another order. Where logits are 1e9 a last bit of them is the difference between all of the mass and none. So
    parts beside a wide mean that is as large are not told apart from 1e6 on.
    """
    b_s = b_s - b_base
    rounding = tl.maximum(tl.abs(b_base) * 2.0**-16 - 1.0, 0.0)  # 0 up to 65536
    return tl.where(tl.abs(b_s) <= rounding, 0.0, b_s)


@triton.jit
def _part_normaliser(
    b_q, p_k, live, b_m, b_l, begin, end, parts, scale, D: tl.constexpr, BN: tl.constexpr, EACH: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_normaliser` over the means of keys from `begin` to `end`, each of EACH of all the parts."""
    o_d = tl.arange(0, b_q.shape[1])
    last = tl.cdiv(parts, EACH)
    for first in range(begin, end, BN):
        o_n = first + tl.arange(0, BN)
        b_s = tl.dot(b_q, tl.trans(_part_means(p_k, o_n, o_d, last, D, CAREFUL)), input_precision=PRECISION)
        if CAREFUL:
            b_m, b_l = _normaliser(_careful(b_s, scale, live, o_n, parts, EACH, 1), b_m, b_l, 1.0)
        else:
            b_m, b_l = _normaliser(b_s, b_m, b_l, scale)
    return b_m, b_l


@triton.jit
def _part_sums(
    b_q, p_k, live, parts, scale_log2, m_row, D: tl.constexpr, BN: tl.constexpr, EACH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of rows' exponentials over all means of keys: maxima, log2 of sums (see `_finished`), and whether to be careful.

    Only the last tile is careful of parts without keys, and of NaN and infinities; all tiles are if a row has shown
    some, with a key mask, or if the scale is not positive, when the largest product is not the largest logit.
    """
    b_m = tl.full([b_q.shape[0]], float("-inf"), tl.float32)
    b_l = tl.zeros([b_q.shape[0]], tl.float32)
    whole = 0  # means before it are of EACH parts with keys
    if live is None:
        whole = tl.where(scale_log2 > 0, parts // EACH // BN * BN, 0)
        b_m, b_l = _part_normaliser(
            b_q, p_k, live, b_m, b_l, 0, whole, parts, scale_log2, D, BN, EACH, False, PRECISION
        )  # fmt: skip
        if _is_odd(b_m, b_l) & (whole > 0):
            whole = 0
            b_m = tl.full([b_q.shape[0]], float("-inf"), tl.float32)
            b_l = tl.zeros([b_q.shape[0]], tl.float32)
    end = tl.cdiv(parts, EACH)
    b_m, b_l = _part_normaliser(b_q, p_k, live, b_m, b_l, whole, end, parts, scale_log2, D, BN, EACH, True, PRECISION)
    b_base, b_log = _finished(b_m, b_l, m_row)
    return b_base, b_log, (live is not None) | (scale_log2 <= 0) | _is_odd(b_m, b_l)


@triton.jit
def _is_odd(b_m, b_l):
    """Whether rows have shown NaN or infinities, or logits so large that one multiply-add has too few digits left."""
    return tl.min(((tl.abs(b_m) < 4096.0) & (b_l == b_l)).to(tl.int32), 0) == 0


@triton.jit
def _shares(
    b_q, p_k, live, o_n, o_d, parts, scale_log2, b_base, b_log, D: tl.constexpr, K_PARTS: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What parts of q give blocks of keys, of `_part_sums`: [BN // K_PARTS, BM]; o_n [BN]: as `_near_rows` has them.

    The product is transposed, so that a lane has whole blocks of q to sum over.
    """
    b_k = _part_means(p_k, o_n, o_d, parts, D, CAREFUL)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BM]
    if CAREFUL:
        b_s = _careful(b_s, scale_log2, live, o_n, parts, 1, 0)
        b_s = _below_largest(b_s, b_base[None, :]) - b_log[None, :]
    else:
        b_s = tl.fma(b_s, scale_log2, -(b_base + b_log)[None, :])
    return _near_sums(tl.math.exp2(b_s), K_PARTS)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def widen_kernel(
    means, live, wide, farthest, N, W, H, parts_k, D: tl.constexpr, D_PAD: tl.constexpr, PER_WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """wide[w] = the mean of PER_WIDE parts' means, of those that have a key: [B, H, N, D] -> [B, H, W, D].

    live uint8 [B, N]: which those are; None: the first parts_k. farthest fp32 [B, H, ceil(W / ROWS)]: how far a mean is
    from its wide one, at most, among those of ROWS wide ones, which a program has.
    """
    pid = tl.program_id(0).to(tl.int64)
    pieces = tl.cdiv(W, ROWS)
    bh = pid // pieces
    o_w = (pid % pieces).to(tl.int32) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, D_PAD)
    m_d = (o_d < D)[None, :]
    p_means = means + bh * N * D + o_d[None, :]
    b_sum = tl.zeros([ROWS, D_PAD], tl.float32)
    b_number = tl.zeros([ROWS], tl.int32)
    for i in tl.static_range(PER_WIDE):
        o_n = o_w * PER_WIDE + i
        m_n = _has_key(live, bh // H * N, o_n, parts_k)
        b_sum += tl.load(p_means + o_n[:, None] * D, mask=m_n[:, None] & m_d, other=0.0).to(tl.float32)
        b_number += m_n.to(tl.int32)
    b_mean = (b_sum / tl.maximum(b_number, 1).to(tl.float32)[:, None]).to(wide.dtype.element_ty)
    tl.store(wide + (bh * W + o_w)[:, None] * D + o_d[None, :], b_mean, mask=(o_w < W)[:, None] & m_d)
    b_far = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(PER_WIDE):
        o_n = o_w * PER_WIDE + i
        m_n = _has_key(live, bh // H * N, o_n, parts_k)
        b_apart = tl.load(p_means + o_n[:, None] * D, mask=m_n[:, None] & m_d, other=0.0).to(tl.float32)
        b_apart = b_apart - b_mean.to(tl.float32)
        b_apart = tl.sum(b_apart * b_apart, 1)
        b_apart = tl.where(b_apart == b_apart, b_apart, float("inf"))  # maxima leave NaN out
        b_far = tl.maximum(b_far, tl.where(m_n, b_apart, 0.0))
    tl.store(farthest + pid, tl.sqrt(tl.max(b_far, 0)))


@triton.jit
def _has_key(live, start, o_n, parts_k):
    """Which parts o_n have a key."""
    m_n = o_n < parts_k
    if live is not None:
        m_n = tl.load(live + start + o_n, mask=m_n, other=0) != 0
    return m_n


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def part_scores_kernel(
    q_means, k_means, wide, farthest, live, numbers, spreads, scores, scale_log2, H, SHARED, NQ, NK, W, pieces,
    parts_q, parts_k,
    D: tl.constexpr, D_PAD: tl.constexpr, PARTS: tl.constexpr, K_PARTS: tl.constexpr, PER_WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores[i, j] = sum over the parts a of block i of share[a, j], fp32 [B, H, NQ, NK]: `predictors.part_mass`.

    share[a, j] = sum over the parts b of block j of softmax_b(scale * q_means[a] . k_means[b]). With spreads fp32
    [B, Hk, NK] the root of the sum of their squares, times spreads[j]; with `wide`, too, from which shares are
    normalised then, times its square: `predictors.part_errors`.

    means [B, H, NQ * PARTS, D] and [B, Hk, NK * K_PARTS, D]; parts_q and parts_k: how many of them are not padding;
    live uint8 [B, NK * K_PARTS]: parts with a key left, or None. wide [B, Hk, W, D], farthest [B, Hk, pieces]: see
    `widen_kernel`; numbers uint8 [B, W]: how many parts of a wide mean have a key, given with `live`.

    One program has BM parts of q. It walks over all parts of keys, or over `wide`, for what shares are normalised by,
    and then over all parts. A logit is at most |q| * farthest above that of its wide mean: only if a share might reach
    2^60 there is a walk over all parts between, and rows that have such a share are normalised by that.
    """
    MOST: tl.constexpr = 60.0
    pid = tl.program_id(0).to(tl.int64)
    tiles_m = tl.cdiv(NQ * PARTS, BM)
    bh, tile = pid // tiles_m, pid % tiles_m
    b, h = bh // H, bh % H
    o_m = tile * BM + _lane_rows(BM, PARTS)
    o_d = tl.arange(0, D_PAD)
    p_q = q_means + (bh * NQ * PARTS + o_m)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_q, mask=(o_m < NQ * PARTS)[:, None] & (o_d < D)[None, :], other=0.0)
    k_bh = b * (H // SHARED) + h // SHARED
    p_k = k_means + k_bh * NK * K_PARTS * D
    p_live, p_numbers = live, numbers
    if live is not None:
        p_live = live + b * NK * K_PARTS
    if numbers is not None:
        p_numbers = numbers + b * W
    m_row = o_m < parts_q
    if wide is None:
        b_base, b_log, careful = _part_sums(b_q, p_k, p_live, parts_k, scale_log2, m_row, D, BN, 1, PRECISION)
    else:
        above = tl.max(tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1), 0)  # rows with NaN show in the first walk
        far = tl.full([], 0.0, tl.float32)
        for first in range(0, pieces, 32):
            o_f = first + tl.arange(0, 32)
            far = tl.maximum(far, tl.max(tl.load(farthest + k_bh * pieces + o_f, mask=o_f < pieces, other=0.0), 0))
        above = tl.sqrt(above) * far * tl.abs(scale_log2)
        b_base, b_log, careful = _part_sums(
            b_q, wide + k_bh * W * D, p_numbers, parts_k, scale_log2, m_row, D, BN, PER_WIDE, PRECISION
        )  # fmt: skip
        b_log += tl.math.log2(1.0 * PER_WIDE)
        if (above < MOST) == 0:
            b_top, b_sum, large = _part_sums(b_q, p_k, p_live, parts_k, scale_log2, m_row, D, BN, 1, PRECISION)
            careful = careful | large  # what parts have may be gone from their mean
            m_above = b_top - (b_base + b_log) >= MOST
            b_base, b_log = tl.where(m_above, b_top, b_base), tl.where(m_above, b_sum, b_log)
    whole = tl.where(careful, 0, parts_k // BN * BN)
    o_i = tile * (BM // PARTS) + _lane_blocks(BM, PARTS)
    for CAREFUL in tl.static_range(0 if live is None else 1, 2):
        for first in range(whole if CAREFUL else 0, parts_k if CAREFUL else whole, BN):
            o_n = first + _near_rows(BN, K_PARTS)
            b_p = _shares(
                b_q, p_k, p_live, o_n, o_d, parts_k, scale_log2, b_base, b_log, D, K_PARTS, CAREFUL == 1, PRECISION
            )  # fmt: skip
            o_j = first // K_PARTS + tl.arange(0, BN // K_PARTS)
            m_out = (o_i < NQ)[None, :] & (o_j < NK)[:, None]
            if spreads is None:
                b_score = _lane_sums(b_p, PARTS)
            else:
                b_spread = tl.load(spreads + k_bh * NK + o_j, mask=o_j < NK, other=0.0)
                b_score = tl.sqrt(_lane_sums(b_p * b_p, PARTS)) * b_spread[:, None]
                if wide is not None:  # by itself: its square may be infinite
                    b_score *= b_spread[:, None]
            tl.store(scores + (bh * NQ + o_i)[None, :] * NK + o_j[:, None], b_score, mask=m_out)


@triton.jit
def _group_logits(
    p_q, p_k, live, q_stride_s, k_stride_s, o_m, o_n, Sq, Sk, groups_k, scale_log2,
    UNIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BM, BN] logits of 8 antidiagonal pairs, sum_i q[8a + 7 - i] . k[8b + i]; -inf where nothing is seen.

    In units of log2. o_m [BM], o_n [BN]: the groups a and b.
    """
    CHUNKS: tl.constexpr = (D + BD - 1) // BD
    b_s = tl.zeros([BM, BN], tl.float32)
    for step in range(8 * CHUNKS):
        i = step // CHUNKS
        o_q, o_k = o_m * 8 + 7 - i, o_n * 8 + i
        o_d = (step % CHUNKS) * BD + tl.arange(0, BD)
        m_d = (o_d < D)[None, :]
        m_q, m_k = (o_q < Sq)[:, None] & m_d, (o_k < Sk)[:, None] & m_d
        b_q = tl.load(p_q + o_q[:, None] * (q_stride_s * UNIT) + o_d[None, :], mask=m_q, other=0.0)
        b_k = tl.load(p_k + o_k[:, None] * (k_stride_s * UNIT) + o_d[None, :], mask=m_k, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=PRECISION)
    b_s = _shown(b_s * scale_log2)
    m_s = (tl.load(live + o_n, mask=o_n < groups_k, other=0) != 0)[None, :]
    if IS_CAUSAL:
        m_s = m_s & (o_n[None, :] <= o_m[:, None])
    return tl.where(m_s, b_s, float("-inf"))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def group_mass_kernel(
    q, k, groups, mass,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    scale_log2, H, SHARED, NQ, NK, Sq, Sk,
    UNIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ada_bsa: mass[i, j] = sum over the 16x16 groups of a block pair of softmax_b(mean logit of antidiagonal pairs).

    One program has BM groups of q. It walks over k twice: once for the softmax's normaliser, once for the masses.
    groups uint8 [B, NK * 16]: those with a key left -> fp32 [B, H, NQ, NK].
    """
    GROUPS: tl.constexpr = 16
    pid = tl.program_id(0).to(tl.int64)
    tiles_m = tl.cdiv(NQ * GROUPS, BM)
    bh, tile = pid // tiles_m, tiles_m - 1 - pid % tiles_m
    b, h = bh // H, bh % H
    o_m = tile * BM + tl.arange(0, BM)
    p_q = q + (b * q_stride_b + h * q_stride_h) * UNIT
    p_k = k + (b * k_stride_b + (h // SHARED) * k_stride_h) * UNIT
    p_live = groups + b * (NK * GROUPS)
    end = NK * GROUPS
    if IS_CAUSAL:
        end = tl.minimum(end, (tile + 1) * BM)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    for first in range(0, end, BN):
        o_n = (first + tl.arange(0, BN)).to(tl.int64)
        b_s = _group_logits(
            p_q, p_k, p_live, q_stride_s, k_stride_s, o_m, o_n, Sq, Sk, NK * GROUPS,
            scale_log2, UNIT, D, BM, BN, BD, IS_CAUSAL, PRECISION,
        )  # fmt: skip
        b_m, b_l = _normaliser(b_s, b_m, b_l, 1.0)
    b_base, b_log = _finished(b_m, b_l, o_m * 8 < Sq)
    b_norm = tl.math.exp2(-b_log)
    o_i = tile * (BM // GROUPS) + tl.arange(0, BM // GROUPS)
    for first in range(0, tl.cdiv(NK * GROUPS, BN) * BN, BN):
        b_sum = tl.zeros([BM // GROUPS, BN // GROUPS], tl.float32)
        if first < end:
            o_n = (first + tl.arange(0, BN)).to(tl.int64)
            b_s = _group_logits(
                p_q, p_k, p_live, q_stride_s, k_stride_s, o_m, o_n, Sq, Sk, NK * GROUPS,
                scale_log2, UNIT, D, BM, BN, BD, IS_CAUSAL, PRECISION,
            )  # fmt: skip
            b_p = tl.math.exp2(b_s - b_base[:, None]) * b_norm[:, None]
            b_p = tl.reshape(b_p, [BM // GROUPS, GROUPS, BN // GROUPS, GROUPS])
            b_sum = tl.sum(tl.sum(b_p, 1), 2)
        o_j = first // GROUPS + tl.arange(0, BN // GROUPS)
        p_out = mass + (bh * NQ + o_i)[:, None] * NK + o_j[None, :]
        tl.store(p_out, b_sum, mask=(o_i < NQ)[:, None] & (o_j < NK)[None, :])


@triton.jit
def _sort_key(x, m_valid):
    """fp32 -> uint32 that sorts the same way, NaN above all, columns that are not up for choice (0) below all."""
    x = x + 0.0  # -0.0 ties with 0.0
    bits = x.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    key = tl.where(x != x, 0xFFFFFFFF, key).to(tl.uint32)
    return tl.where(m_valid, key, 0).to(tl.uint32)


@triton.jit
def _ranks(kept):
    """Of each of the columns [N], how many up to it are kept, and how many are in all.

    Columns are counted along the lanes of a warp, four sets of them in the bytes of one number.
    """
    LANES: tl.constexpr = min(32, kept.shape[0])
    BYTES: tl.constexpr = min(4, kept.shape[0] // LANES)
    sets = tl.reshape(kept, [kept.shape[0] // (LANES * BYTES), BYTES, LANES]).to(tl.uint32)
    shift = 8 * tl.arange(0, BYTES)[None, :, None]
    packed = tl.sum(sets << shift, 1)
    each = tl.sum(packed, 1)
    several = each * 0x01010101  # a byte has the sum of those up to it
    number = several >> (8 * BYTES - 8) & 255
    # what a lane holds all of is added up in place: a scan would go through shared memory
    SETS: tl.constexpr = number.shape[0]
    o_set = tl.arange(0, SETS)
    earlier = tl.zeros_like(number)
    for i in tl.static_range(SETS - 1):
        earlier += tl.where(o_set > i, tl.sum(tl.where(o_set == i, number, 0), 0), 0)
    ranks = (tl.cumsum(packed, 1) + ((several - each)[:, None]))[:, None, :] >> shift & 255
    ranks += earlier[:, None, None]
    return tl.reshape(ranks, [kept.shape[0]]).to(tl.int32), tl.sum(number, 0).to(tl.int32)


@triton.jit
def _place_row(flags, count, p_list, NK, PART: tl.constexpr):
    """A row's list: kept columns ascending, then the others ascending. flags [PART]: bit i for column i * PART + ..."""
    earlier = 0
    for first in range(0, NK, PART):
        o_n = first + tl.arange(0, PART)
        kept = (flags & 1).to(tl.int32)
        flags = flags >> 1
        rank, number = _ranks(kept)
        rank += earlier
        tl.store(p_list + tl.where(kept != 0, rank - 1, count + o_n - rank), o_n, mask=o_n < NK)
        earlier += number


@triton.jit
def _above(key, bound, left):
    """Which keys are above `bound`, and of those that equal it the first `left`; and how many of them are left then."""
    kept = key > bound
    if left > 0:
        tied = (key == bound).to(tl.int32)
        kept = kept | ((tied != 0) & (tl.cumsum(tied, 0) <= left))
        left -= tl.sum(tied, 0)
    return kept, left


@triton.jit
def _row_keys(p_scores, protected, o_n, NK, FREE_ONLY: tl.constexpr):
    """Sort keys of a row's columns o_n, and which of them are protected."""
    m_n = o_n < NK
    b_s = tl.load(p_scores + o_n, mask=m_n, other=0.0)
    always = tl.load(protected + o_n, mask=m_n, other=0) != 0
    if FREE_ONLY:
        m_n = m_n & (always == 0)
    return _sort_key(b_s, m_n), always


@triton.jit
def _upper_keys(p_scores, protected, first, NK, N: tl.constexpr, FREE_ONLY: tl.constexpr):
    """Upper 31 bits of the keys of N columns; 0 past the end, and nothing is read if all of them are."""
    key = tl.zeros([N], tl.uint32)
    o_n = tl.arange(0, N)
    if first + N <= NK:  # with all columns there it takes half the instructions
        key = _sort_key(tl.load(p_scores + first + o_n), True)
        if FREE_ONLY:
            key = tl.where(tl.load(protected + first + o_n) != 0, 0, key).to(tl.uint32)
        key = key >> 1
    elif first < NK:
        key = _row_keys(p_scores, protected, first + o_n, NK, FREE_ONLY)[0] >> 1
    return key


@triton.jit
def _reached(held, p_scores, protected, number, candidates, NK, PART: tl.constexpr, FREE_ONLY: tl.constexpr):
    """-> the largest key that `number` keys reach, or any that just so many reach; and how many do.

    Keys have 31 bits, and are 0 where they are no candidates. held: those of the first columns, PART by PART, so that
    the ones past the end take no time; the others, if there are, are read again in each step. The next guess is nearer
    to the bound that is off by less, as their roots say, and the middle in the end: so few steps usually, and never
    many. Lanes count by themselves as long as they can: adding them up takes as long as a hundred instructions.
    """
    HELD: tl.constexpr = len(held) * PART
    b_low, b_high = held[0] - 1, held[0]
    for i in tl.static_range(1, len(held)):
        b_low, b_high = tl.minimum(b_low, held[i] - 1), tl.maximum(b_high, held[i])
    for first in range(HELD, NK, PART):
        key, _ = _row_keys(p_scores, protected, first + tl.arange(0, PART), NK, FREE_ONLY)
        key = key >> 1
        b_low, b_high = tl.minimum(b_low, key - 1), tl.maximum(b_high, key)
    low, high = tl.min(b_low, 0) + 1, tl.max(b_high, 0) + 1
    at_low, at_high = tl.full([], candidates, tl.int32), tl.full([], 0, tl.int32)
    reach = at_low
    step = 0
    while (reach != number) & (high - low > 1):
        above, below = tl.sqrt((at_low - number).to(tl.float32)), tl.sqrt((number - at_high).to(tl.float32))
        share = tl.where(step > 12, 0.5, above / (above + below))
        guess = low + ((high - low).to(tl.float32) * share).to(tl.uint32)
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        b_less = (held[0] - guess) >> 31  # 1 below it: the sign of a difference takes less than comparing
        for i in tl.static_range(1, len(held)):
            b_less += (held[i] - guess) >> 31
        for first in range(HELD, NK, PART):
            key, _ = _row_keys(p_scores, protected, first + tl.arange(0, PART), NK, FREE_ONLY)
            b_less += ((key >> 1) - guess) >> 31
        reach = tl.maximum(tl.cdiv(NK, PART) * PART, HELD) - tl.sum(b_less, 0).to(tl.int32)
        enough = reach >= number
        low, at_low = tl.where(enough, guess, low), tl.where(enough, reach, at_low)
        high, at_high = tl.where(enough, high, guess), tl.where(enough, at_high, reach)
        step += 1
    return low, reach


@triton.jit
def _last_of_equals(p_scores, protected, kth, number, NK, PART: tl.constexpr, FREE_ONLY: tl.constexpr):
    """-> the `number`-th largest key, whose upper 31 bits are kth, and the column before which equals are kept."""
    above, reach = 0, 0  # keys with larger upper bits; and with those, the ones that end in 1
    for first in range(0, NK, PART):
        key, _ = _row_keys(p_scores, protected, first + tl.arange(0, PART), NK, FREE_ONLY)
        above += tl.sum((key >> 1 > kth).to(tl.int32), 0)
        reach += tl.sum((key > kth * 2).to(tl.int32), 0)
    if reach >= number:
        bound, left = kth * 2 + 1, number - above
    else:
        bound, left = kth * 2, number - reach
    end = 0
    for first in range(0, NK, PART):
        o_n = first + tl.arange(0, PART)
        key, _ = _row_keys(p_scores, protected, o_n, NK, FREE_ONLY)
        tied = (key == bound) & (o_n < NK)
        rank, tied_here = _ranks(tied.to(tl.int32))
        end = tl.maximum(end, tl.max(tl.where(tied & (rank <= left), o_n + 1, 0), 0))
        left -= tied_here
    return bound, end


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def keep_best_kernel(
    scores, protected_rows, protected_columns, counts, indices, number, numbers, heads, candidates, protected, NQ, NK,
    PART: tl.constexpr, PER_HEAD: tl.constexpr, FREE_ONLY: tl.constexpr,
):  # fmt: skip
    """rf_v2: the `number` best columns of each row and the protected blocks. `indices` may be the scores' memory.

    The first 5 * PART columns of a row are held in registers while it is ranked, all others are read PART by PART;
    there may be 64 * PART. PER_HEAD: numbers int32 [heads], by head or by batch and head. FREE_ONLY: the best of those
    not protected. candidates: how many columns those are; protected: how many are.
    """
    row = tl.program_id(0).to(tl.int64)
    p_scores = scores + row * NK
    if PER_HEAD:
        number = tl.load(numbers + row // NQ % heads)
    number = tl.minimum(number, candidates)
    held = (
        _upper_keys(p_scores, protected_columns, 0, NK, PART, FREE_ONLY),
        _upper_keys(p_scores, protected_columns, PART, NK, PART, FREE_ONLY),
        _upper_keys(p_scores, protected_columns, 2 * PART, NK, PART, FREE_ONLY),
        _upper_keys(p_scores, protected_columns, 3 * PART, NK, PART, FREE_ONLY),
        _upper_keys(p_scores, protected_columns, 4 * PART, NK, PART, FREE_ONLY),
    )
    kth, reach = _reached(held, p_scores, protected_columns, number, candidates, NK, PART, FREE_ONLY)
    parts = tl.cdiv(NK, PART)
    o_n = tl.arange(0, PART)
    flags = tl.zeros([PART], tl.int64)
    bound, end, again = kth * 2 - 1, 0, tl.minimum(parts, len(held))  # parts from there on are read again
    if reach == number:
        kept = (held[0] > kth - 1).to(tl.int32)
        for i in tl.static_range(1, len(held)):
            kept = kept | ((held[i] > kth - 1).to(tl.int32) << i)
        flags = kept.to(tl.int64)
    else:  # the last bit, and the index, decide
        bound, end = _last_of_equals(p_scores, protected_columns, kth, number, NK, PART, FREE_ONLY)
        again = 0
    for part in range(again, parts):
        key, _ = _row_keys(p_scores, protected_columns, part * PART + o_n, NK, FREE_ONLY)
        kept = (key > bound) | ((key == bound) & (part * PART + o_n < end))
        flags = flags | (kept.to(tl.int64) << part)
    count = number
    for part in range(0, parts if protected != 0 else 0):
        m_n = part * PART + o_n < NK
        always = tl.load(protected_columns + part * PART + o_n, mask=m_n, other=0).to(tl.int64)
        count += tl.sum((always & ~(flags >> part)).to(tl.int32) & 1, 0)
        flags = flags | (always << part)
    if tl.load(protected_rows + row % NQ) != 0:
        flags, count = tl.full([PART], -1, tl.int64), NK
    tl.debug_barrier()  # every score was read before the list takes its place
    tl.store(counts + row, count)
    _place_row(flags, count, indices + row * NK, NK, PART)


@triton.jit
def _mass_keys(
    p_mass, p_live, o_n, i, NK,
    IS_CAUSAL: tl.constexpr, KEEP_SINK: tl.constexpr, KEEP_RECENT: tl.constexpr,
):  # fmt: skip
    """Of the columns o_n of row i: sort keys, 0 if not up for choice; masses in fixed point; which are kept anyway.

    In fixed point sums do not depend on the order of adding.
    """
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
    b_mass = tl.load(p_mass + o_n, mask=m_n, other=0.0)
    if p_live is not None:
        b_mass = tl.where(tl.load(p_live + o_n, mask=m_n, other=0) != 0, b_mass, -1.0)
    fixed = (tl.where(others & (b_mass > 0), b_mass, 0.0) * 4294967296.0).to(tl.int64)
    return _sort_key(b_mass, others), fixed, forced & visible


@triton.jit
def _larger_mass(key, fixed, bound):
    """The mass of keys above `bound`."""
    return tl.sum(tl.where(key > bound, fixed, 0), 0)


@triton.jit
def _number_wanted(
    key, fixed, p_mass, p_live, i, NK, share, PART: tl.constexpr,
    IS_CAUSAL: tl.constexpr, KEEP_SINK: tl.constexpr, KEEP_RECENT: tl.constexpr,
):  # fmt: skip
    """How many of the largest keys have a share of the mass. key, fixed [WIDE]: the first columns."""
    WIDE: tl.constexpr = key.shape[0]
    o_n = tl.arange(0, PART)
    total = tl.sum(fixed, 0)
    for first in range(WIDE, NK, PART):
        keys, more, _ = _mass_keys(p_mass, p_live, first + o_n, i, NK, IS_CAUSAL, KEEP_SINK, KEEP_RECENT)
        total += tl.sum(more, 0)
    enough = share * total.to(tl.float32)
    bound = tl.full([], 0, tl.uint32)  # the lowest value whose larger keys do not reach the threshold
    for bit in range(32):
        step = tl.full([], 1, tl.uint32) << (31 - bit)
        larger = _larger_mass(key, fixed, bound | (step - 1))
        for first in range(WIDE, NK, PART):
            keys, more, _ = _mass_keys(p_mass, p_live, first + o_n, i, NK, IS_CAUSAL, KEEP_SINK, KEEP_RECENT)
            larger += _larger_mass(keys, more, bound | (step - 1))
        bound = tl.where(larger.to(tl.float32) < enough, bound, bound | step)
    # those above it, and of those that equal it, which all have the same mass, as many as are needed
    above, each = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    wanted, tied = 0, 0
    for first in range(0, NK, PART):
        keys, more, _ = _mass_keys(p_mass, p_live, first + o_n, i, NK, IS_CAUSAL, KEEP_SINK, KEEP_RECENT)
        above += _larger_mass(keys, more, bound)
        wanted += tl.sum((keys > bound).to(tl.int32), 0)
        tied += tl.sum(((keys == bound) & (keys > 0)).to(tl.int32), 0)
        each = tl.maximum(each, tl.max(tl.where(keys == bound, more, 0), 0))
    for first in range(0, tied, PART):
        before = above + (first + o_n).to(tl.int64) * each
        wanted += tl.sum(((first + o_n < tied) & (before.to(tl.float32) < enough)).to(tl.int32), 0)
    return wanted


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def keep_mass_kernel(
    mass, live, counts, indices, share_bits: tl.int64, cdf_threshold, H, NQ, NK,
    WIDE: tl.constexpr, IS_CAUSAL: tl.constexpr, KEEP_SINK: tl.constexpr, KEEP_RECENT: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
):  # fmt: skip
    """ada_bsa: the forced columns, and of the others the fewest that reach the threshold, at most the cap.

    live: None if all blocks have a key left. share_bits: 1 - sparsity, a double's bits. `indices` may be the masses'
    memory. WIDE: as in `keep_best_kernel`.
    """
    PART: tl.constexpr = WIDE // 4
    row = tl.program_id(0).to(tl.int64)
    i = (row % NQ).to(tl.int32)
    p_mass, p_live = mass + row * NK, live
    if live is not None:
        p_live = live + row // (NQ * H) * NK
    o_n = tl.arange(0, PART)
    key, fixed, first_forced = _mass_keys(p_mass, p_live, tl.arange(0, WIDE), i, NK, IS_CAUSAL, KEEP_SINK, KEEP_RECENT)
    available = tl.sum((key > 0).to(tl.int32), 0)
    for first in range(WIDE, NK, PART):
        keys, _, _ = _mass_keys(p_mass, p_live, first + o_n, i, NK, IS_CAUSAL, KEEP_SINK, KEEP_RECENT)
        available += tl.sum((keys > 0).to(tl.int32), 0)
    wanted = available
    if HAS_THRESHOLD:
        wanted = _number_wanted(
            key, fixed, p_mass, p_live, i, NK, cdf_threshold, PART, IS_CAUSAL, KEEP_SINK, KEEP_RECENT
        )  # fmt: skip
    seen = tl.minimum(NK, i + 1) if IS_CAUSAL else NK
    share = share_bits.to(tl.int64).to(tl.float64, bitcast=True)
    cap = tl.ceil(seen.to(tl.float64) * share - 1e-9).to(tl.int32)
    number = tl.minimum(tl.maximum(tl.minimum(wanted, cap), 1), available)
    kth = tl.full([], 0, tl.uint32)  # the largest value that `number` keys reach, found bit by bit
    bit = 0
    while bit < 32:
        tried = kth | (tl.full([], 1, tl.uint32) << (31 - bit))
        reach = tl.sum((key >= tried).to(tl.int32), 0)
        for first in range(WIDE, NK, PART):
            keys, _, _ = _mass_keys(p_mass, p_live, first + o_n, i, NK, IS_CAUSAL, KEEP_SINK, KEEP_RECENT)
            reach += tl.sum((keys >= tried).to(tl.int32), 0)
        kth = tl.where(reach >= number, tried, kth)
        bit = tl.where(reach == number, 32, bit + 1)  # exactly so many: lower bits change nothing
    left = number
    for first in range(0, NK, PART):
        keys, _, _ = _mass_keys(p_mass, p_live, first + o_n, i, NK, IS_CAUSAL, KEEP_SINK, KEEP_RECENT)
        left -= tl.sum((keys > kth).to(tl.int32), 0)
    flags = tl.zeros([PART], tl.int64)
    count = 0
    for first in range(0, NK, PART):
        keys, _, forced = _mass_keys(p_mass, p_live, first + o_n, i, NK, IS_CAUSAL, KEEP_SINK, KEEP_RECENT)
        kept, left = _above(keys, kth, left)
        kept = kept | forced
        flags = flags | (kept.to(tl.int64) << (first // PART))
        count += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()  # every mass was read before the list takes its place
    tl.store(counts + row, count)
    _place_row(flags, count, indices + row * NK, NK, PART)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
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
