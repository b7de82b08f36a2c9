"""The portable Triton kernels, on the GPU where there is one, else under Triton's interpreter (see conftest.py).

Outputs and LSE are compared with float64 attention over the same mask, and may lose 1.5 times what torch's own
attention loses. Masks are compared with float64 scores, and bit for bit with the CPU path where sums are exact.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.accuracy import EPS, error
from helpers.fuzz import examples
from helpers.inputs import qkv
from helpers.triton_calls import DEVICE, MARKS, attend, key_mask, same, surrounded
from rainfusion import (
    BlockMask,
    TokenLayout,
    block_sparse_attention,
    predict_mask,
    sparse_attention,
)
from rainfusion.backends import triton as triton_backend
from rainfusion.prediction import selection

pytestmark = MARKS

# the interpreter multiplies bf16 numbers as if they were integers
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
FP32 = EPS[torch.float32]

VIDEO, TXT = (4, 4, 12), 20
IMAGE = (1, 16, 24)
SPANS = [{"start": 10, "latent_shape": (2, 8, 8)}, {"start": 150, "latent_shape": (1, 9, 11)}]
RF_V2 = dict(sparse_type="rf_v2", sparsity=0.6)
RF_V2_64 = dict(sparse_type="rf_v2", sparsity=0.7, block_size=64)
ON_GRID = dict(RF_V2_64, latent_shape_q=VIDEO, latent_shape_k=VIDEO, txt_len=TXT)
ADA_BSA = dict(sparse_type="ada_bsa", sparsity=0.5, cdf_threshold=0.8)

# name: arguments, tokens of q, tokens of k
CALLS = {
    "rf_v2": (RF_V2, 300, 300),
    "rf_v2 in 64s": (RF_V2_64, 300, 300),
    "image": (dict(RF_V2, latent_shape_q=IMAGE, txt_len=TXT), 404, 404),
    "video": (ON_GRID, 212, 212),
    "window": (dict(ON_GRID, token_order=(2, 4, 8)), 212, 212),
    "mindiesd": (dict(ON_GRID, token_order="mindiesd"), 212, 212),
    "raster": (dict(ON_GRID, token_order="raster"), 212, 212),
    "text": (dict(RF_V2_64, txt_len=70), 300, 300),
    "spans": (dict(RF_V2_64, video_spans=SPANS), 270, 270),
    "cross": (dict(ON_GRID, latent_shape_k=(3, 6, 7)), 212, 146),
    "submeans": (dict(ON_GRID, predictor="submeans"), 212, 212),
    "submeans in 64s": (dict(RF_V2_64, predictor="submeans"), 300, 300),
    "spread": (dict(ON_GRID, predictor="spread"), 212, 212),
    "spread in 64s": (dict(RF_V2_64, predictor="spread"), 300, 300),
    "first frame's keys": (dict(ON_GRID, first_frame="keys"), 212, 212),
    "free first frame": (dict(ON_GRID, first_frame="free", block_size=64), 212, 212),
    "exact budget": (dict(ON_GRID, exact_budget=True, block_size=64), 212, 212),
    "ada_bsa": (ADA_BSA, 150, 513),
    "ada_bsa unforced": (dict(ADA_BSA, cdf_threshold=1.0, keep_sink=False, keep_recent=False), 150, 430),
    "causal": (dict(ADA_BSA, sparsity=0.3, is_causal=True), 300, 300),
    "dense": ({}, 150, 300),
    "dense causal": (dict(is_causal=True), 300, 300),
}


# ---------------------------------------------------------------------------------------------------------------------
# what every result has to be


def layouts(q_len, k_len, block_size=128, **kwargs):
    """(order, protected) of q and of k."""
    latent_q, latent_k = kwargs.get("latent_shape_q"), kwargs.get("latent_shape_k")
    if q_len == k_len:
        latent_q, latent_k = latent_q or latent_k, latent_k or latent_q
    rest = kwargs.get("txt_len", 0), kwargs.get("video_spans"), kwargs.get("token_order", "window"), block_size
    first = kwargs.get("first_frame", "protected")
    return (
        oracle.layout(q_len, latent_q, *rest, first == "protected"),
        oracle.layout(k_len, latent_k, *rest, first != "free"),
    )


def assert_attends(out, lse, mask, q, k, v, attn_mask=None, **kwargs):
    """`out` and `lse` are attention over `mask`, and no worse than torch's would be."""
    scale = kwargs.get("scale", q.shape[3] ** -0.5)
    (order_q, _), (order_k, _) = layouts(q.shape[2], k.shape[2], **dict(kwargs, block_size=mask.block_size))
    tokens = oracle.expand(mask.to_dense(), order_q, order_k, mask.block_size)
    exact, exact_lse = oracle.attention(q, k, v, tokens, attn_mask, scale, kwargs.get("is_causal", False))
    seen = exact_lse > -math.inf
    assert (out[~seen] == 0).all()
    assert torch.isneginf(lse[~seen]).all()
    if not seen.any():
        return

    keep, bias = oracle.kept_keys(attn_mask, k.shape[0], k.shape[2])
    tokens = tokens & keep[:, None, None]
    if kwargs.get("is_causal"):
        tokens = tokens & torch.ones(tokens.shape[2:], dtype=torch.bool).tril()
    bias = bias[:, None, None].masked_fill(~tokens, -math.inf)
    shared = q.shape[1] // k.shape[1]
    keys, values = (x.masked_fill(~keep[:, None, :, None], 0.0).repeat_interleave(shared, 1) for x in (k, v))
    turned = q if scale > 0 else -q if scale < 0 else q * 0  # torch's own is for positive scales
    torchs = F.scaled_dot_product_attention(turned, keys, values, bias.to(q.dtype), scale=abs(scale) or 1.0)
    # the last bit of a half-precision output; in fp32, sums taken in another order
    floor = EPS[q.dtype] * (8 if q.dtype == torch.float32 else 1)
    assert error(out[seen], exact[seen]) <= 1.5 * max(error(torchs[seen], exact[seen]), floor)

    logits = q.float() @ keys.float().mT * scale + bias.float()
    torchs_lse = (logits.logsumexp(-1) - exact_lse)[seen].abs().max()
    floor = 4 * FP32 * max(1.0, exact_lse[seen].abs().max(), logits[logits > -math.inf].abs().max())
    assert (lse - exact_lse)[seen].abs().max() <= 1.5 * max(torchs_lse, floor)


def assert_chooses(mask, q, k, attn_mask=None, **kwargs):
    """`mask` is what the strategy chooses, unless fp32 cannot tell the blocks in question apart."""
    scale = kwargs.get("scale", q.shape[3] ** -0.5)
    is_causal, sparsity = kwargs.get("is_causal", False), kwargs.get("sparsity", 0.0)
    chosen = mask.to_dense()
    assert (mask.q_len, mask.k_len) == (q.shape[2], k.shape[2])
    keep, _ = oracle.kept_keys(attn_mask, k.shape[0], k.shape[2])
    if kwargs.get("sparse_type") == "rf_v2":
        (order_q, protected_q), (order_k, protected_k) = layouts(q.shape[2], k.shape[2], **kwargs)
        rest = order_q, order_k, keep, mask.block_size
        scores = oracle.SCORES[kwargs.get("predictor", "mean")](q, k, scale, *rest)
        exact = kwargs.get("exact_budget", False)
        wrong = chosen != oracle.rf_v2_rows(scores, sparsity, protected_q, protected_k, exact)
        ranked = scores.masked_fill(torch.tensor(protected_k), -math.inf) if exact else scores
        last = torch.empty(scores.shape[:3]).double()
        for h, share in enumerate(sparsity if isinstance(sparsity, list) else q.shape[1] * [sparsity]):
            number = max(1, oracle.budget(len(protected_k), share))
            number = oracle.free_budget(protected_q, protected_k, share) if exact else number
            last[:, h] = ranked[:, h].sort(-1, descending=True).values[..., number - 1]
        rounding = score_rounding(q, k, scale, *rest, predictor=kwargs.get("predictor", "mean"))
        rounding = rounding.amax(-1, keepdim=True)
        undecided = (scores - last.unsqueeze(-1)).abs() <= 2 * rounding  # False where both are -inf: a tie
        assert not (wrong & ~undecided).any()
    elif kwargs.get("sparse_type") == "ada_bsa":
        mass = oracle.ada_bsa_mass(q, k, scale, keep, is_causal)
        loss = mass_rounding(q, k, scale, keep)
        rule = sparsity, kwargs.get("cdf_threshold", 1.0)
        rule += kwargs.get("keep_sink", True), kwargs.get("keep_recent", True), is_causal, keep
        right = torch.zeros(chosen.shape[:3], dtype=torch.bool)
        for slack in (0.0, 2 * loss, -2 * loss):  # a sum may reach the threshold a little earlier or later
            expected = oracle.ada_bsa_rows(mass, *rule, slack=slack)
            swapped = torch.where(chosen != expected, mass, math.nan)  # blocks of equal mass may stand for each other
            spread = swapped.nan_to_num(-math.inf).amax(-1) - swapped.nan_to_num(math.inf).amin(-1)
            same_number = chosen.sum(-1) == expected.sum(-1)
            right |= same_number & ~(spread > 2 * loss * mass.amax(-1))
        assert right.all()
    else:
        blocks = torch.ones(chosen.shape, dtype=torch.bool)
        assert torch.equal(chosen, blocks.tril() if is_causal else blocks)


def score_rounding(q, k, scale, *rest, predictor="mean"):
    """[B, H, NQ, NK]: a few roundings of the terms that a score is the sum of."""
    if predictor == "mean":
        return 4 * FP32 * oracle.mean_scores(q.abs(), k.abs(), abs(scale), *rest).clamp(min=0.0)
    # a probability is off by as much as the worst logit, and by a few roundings more
    part = rest[3] // 4 if predictor == "submeans" else (8, 32)
    largest = oracle.mean_scores(q.abs(), k.abs(), abs(scale), *rest[:3], part).amax().clamp(min=0.0).item()
    return 16 * FP32 * (1.0 + largest) * oracle.SCORES[predictor](q, k, scale, *rest).clamp(min=0.0)


def mass_rounding(q, k, scale, keep):
    """Relative: a few roundings of a probability and of the largest logit that there may be."""
    k = k.masked_fill(~keep[:, None, :, None], 0.0)
    largest = abs(scale) * q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    return 16 * FP32 * (1.0 + largest.item())


def assert_right(q, k, v, attn_mask=None, **kwargs):
    out, lse, mask = attend(q, k, v, attn_mask, **kwargs)
    assert_chooses(mask, q, k, attn_mask, **kwargs)
    assert_attends(out, lse, mask, q, k, v, attn_mask, **kwargs)
    return mask


# ---------------------------------------------------------------------------------------------------------------------
# calls of every kind


@pytest.mark.parametrize("exact_budget", [False, True])
def test_budgets_by_head(exact_budget):
    q, k, v = qkv(2, 4, 300, 40, k_heads=2)
    sparsity = [0.9, 0.3, 0.0, 0.5]
    mask = assert_right(q, k, v, **dict(RF_V2_64, sparsity=sparsity, txt_len=70), exact_budget=exact_budget)
    assert mask.counts[0, 2].min() == 5 > mask.counts[0, 0].min()


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 1, q_len, 64, k_len=k_len)
    assert_right(2 * q, k, v, **kwargs)


@pytest.mark.parametrize(
    ("name", "mask_kind"),
    [("rf_v2", "bool"), ("video", "bool"), ("video", "float"), ("spans", "float"), ("ada_bsa", "bool"),
     ("causal", "float"), ("dense", "bool"), ("dense", "float")],
)  # fmt: skip
def test_key_masks(name, mask_kind):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(2, 1, q_len, 64, k_len=k_len)
    assert_right(2 * q, k, v, key_mask(mask_kind, 2, k_len), **kwargs)


@pytest.mark.parametrize("mask_kind", [None, "float"])
@pytest.mark.parametrize("name", ["video", "causal", "dense"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision(name, mask_kind, dtype):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 1, q_len, 64, dtype=dtype, k_len=k_len)
    assert_right(2 * q, k, v, key_mask(mask_kind, 1, k_len), **kwargs)


@pytest.mark.parametrize("dim", [1, 32, 40, 80, 128, 256])
@pytest.mark.parametrize(
    ("kwargs", "dtype"), [(ADA_BSA, torch.float32), *((RF_V2_64, dtype) for dtype in DTYPES)]
)  # fmt: skip
def test_head_dims(kwargs, dtype, dim):
    q, k, v = qkv(1, 1, 70, dim, dtype=dtype, k_len=4 * kwargs.get("block_size", 128) - 20)
    assert_right(q, k, v, **kwargs)


@pytest.fixture
def described(monkeypatch):
    """Keys come by tensor descriptors, as on a Hopper GPU: the interpreter has them too."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_backend, "_capability", lambda x: (9, 0))
        own, made = triton_backend._descriptor, []
        monkeypatch.setattr(triton_backend, "_descriptor", lambda *x: made.append(x) or own(*x))
        yield
        assert made
    else:
        yield


@pytest.mark.parametrize("mask_kind", [None, "float"])
@pytest.mark.parametrize("name", ["rf_v2", "video", "cross", "ada_bsa", "causal", "dense"])
def test_descriptors(name, mask_kind, described):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(2, 4, q_len, 72, dtype=torch.float16, k_len=k_len, k_heads=2)
    assert_right(2 * q, surrounded(k), surrounded(v), key_mask(mask_kind, 2, k_len), **kwargs)


def test_descriptors_of_keys_that_heads_share(described):
    """A stride of 0, which the copy engine has not."""
    q, k, v = qkv(2, 2, 300, 64, dtype=torch.float16, k_heads=1)
    assert_right(2 * q, *(x[:1].expand(2, 2, -1, -1) for x in (k, v)), **RF_V2)


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (129, 129), (1, 257), (257, 1)])
@pytest.mark.parametrize("name", ["rf_v2", "rf_v2 in 64s", "ada_bsa", "dense"])
def test_tails_of_one_token(name, q_len, k_len):
    q, k, v = qkv(1, 1, q_len, 32, k_len=k_len)
    assert_right(q, k, v, **CALLS[name][0])


@pytest.mark.parametrize("kwargs", [RF_V2_64, ADA_BSA])
def test_query_heads_share_key_heads(kwargs):
    q, k, v = qkv(2, 4, 30, 32, k_heads=2, k_len=4 * kwargs.get("block_size", 128) - 20)
    assert_right(q, k, v, **kwargs)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("name", ["rf_v2 in 64s", "video", "causal"])
def test_scales_of_other_signs(name, scale):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 1, q_len, 32, k_len=k_len)
    mask = assert_right(q, k, v, scale=scale, **kwargs)
    if scale == 0.0:  # all scores are zeros of either sign
        assert same(mask, predict_mask(q, k, scale=scale, **kwargs, backend="reference"))


@pytest.mark.parametrize("name", ["rf_v2", "cross", "ada_bsa"])
def test_any_strides(name):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = (x.to(DEVICE) for x in qkv(1, 1, q_len, 24, k_len=k_len))
    backwards = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]
    one_for_two_heads = [x.expand(-1, 2, -1, -1) for x in (q, k, v)]  # stride 0
    for inputs in (*([surrounded(x, by) for x in (q, k, v)] for by in (3, 8)), backwards, one_for_two_heads):
        assert not any(x.is_contiguous() for x in inputs)
        out, lse, mask = attend(*inputs, **kwargs)
        here = [x.cpu() for x in inputs]
        assert_chooses(mask, *here[:2], **kwargs)
        assert_attends(out, lse, mask, *here, **kwargs)


@pytest.mark.parametrize("name", ["rf_v2", "ada_bsa"])
def test_views_with_the_other_sign_are_what_they_show(name):
    """Memory has the numbers that they had before."""
    kwargs, q_len, k_len = CALLS[name]
    inputs = [x.to(DEVICE) for x in qkv(1, 1, q_len, 16, k_len=k_len)]
    expected = attend(*inputs, **kwargs)
    found = attend(*(torch._neg_view(-x) for x in inputs), **kwargs)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and same(found[2], expected[2])


@pytest.mark.parametrize("name", ["cross", "ada_bsa"])
def test_both_layouts_agree(name):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 2, q_len, 32, k_heads=1, k_len=k_len)
    expected, expected_lse, expected_mask = attend(q, k, v, **kwargs)
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out, lse, mask = attend(*swapped, input_layout="BSND", **kwargs)
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(lse, expected_lse)
    assert same(mask, expected_mask)


@pytest.mark.parametrize("name", ["rf_v2", "ada_bsa", "dense"])
def test_results_do_not_depend_on_what_is_asked_for(name):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = (x.to(DEVICE) for x in qkv(1, 1, q_len, 32, k_len=k_len))
    _, lse, mask = attend(q, k, v, **kwargs)
    out = sparse_attention(q, k, v, **kwargs, backend="triton")
    assert_attends(out.cpu(), lse, mask, *(x.cpu() for x in (q, k, v)), **kwargs)
    assert same(predict_mask(q, k, **kwargs, backend="triton"), mask)


@pytest.mark.parametrize("name", ["video", "ada_bsa"])
def test_predict_mask_agrees_under_a_key_mask(name):
    """One pools while it copies the keys, the other only reads them."""
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = (x.to(DEVICE) for x in qkv(1, 1, q_len, 32, k_len=k_len))
    keep = key_mask("bool", 1, k_len).to(DEVICE)
    assert same(predict_mask(q, k, keep, **kwargs, backend="triton"), attend(q, k, v, keep, **kwargs)[2])


def test_batch_elements_are_independent_to_the_last_bit():
    kwargs, q_len, k_len = CALLS["cross"]
    q, k, v = qkv(2, 1, q_len, 32, k_len=k_len)
    keep = key_mask("bool", 2, k_len)
    together = attend(q, k, v, keep, **kwargs)
    alone = attend(q[1:], k[1:], v[1:], keep[1:], **kwargs)
    assert torch.equal(together[0][1:], alone[0])
    assert torch.equal(together[1][1:], alone[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fastest_arithmetic_stays_close(dtype):
    """inner_precise=1: fp32 products may be rounded as tf32 does."""
    q, k, v = qkv(1, 1, 212, 64, dtype=dtype)
    out, _, mask = attend(q, k, v, **ON_GRID, inner_precise=1)
    (order, _), _ = layouts(212, 212, **ON_GRID)
    exact, _ = oracle.attention(q, k, v, oracle.expand(mask.to_dense(), order, order, 64))
    assert error(out, exact) <= 4 * max(EPS[dtype], 2**-11)


def test_huge_logits_do_not_overflow():
    q, k, v = qkv(1, 1, 300, 16, dtype=torch.float16)
    out, lse, _ = attend(200 * q, 200 * k, v, **RF_V2)
    assert out.isfinite().all()
    assert lse.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# masks that are given


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask_kind", [None, "float"])
def test_given_masks(block_size, is_causal, mask_kind):
    """Rows with no block at all, and in causal attention blocks above the diagonal, which hold nothing to see."""
    q_len, k_len = (200, 200) if is_causal else (200, 300)
    q, k, v = qkv(2, 2, q_len, 32, k_heads=1, k_len=k_len)
    rows, columns = -(-q_len // block_size), -(-k_len // block_size)
    dense = torch.rand(2, 2, rows, columns) < 0.5
    dense[0, 0, 1] = False
    dense[1, 1] = False
    mask = BlockMask.from_dense(dense, block_size)
    attn_mask = key_mask(mask_kind, 2, k_len)
    out, lse = block_sparse_attention(
        *(x.to(DEVICE) for x in (q, k, v)), mask.to(DEVICE), None if attn_mask is None else attn_mask.to(DEVICE),
        is_causal=is_causal, backend="triton", return_lse=True,
    )  # fmt: skip
    out, lse = out.cpu(), lse.cpu()
    assert (out[1, 1] == 0).all()
    assert torch.isneginf(lse[0, 0, block_size : 2 * block_size]).all()
    assert_attends(out, lse, mask, q, k, v, attn_mask, is_causal=is_causal)


@pytest.mark.parametrize("name", ["rf_v2", "cross", "causal"])
def test_a_predicted_mask_can_be_used_again(name):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 1, q_len, 32, k_len=k_len)
    out, lse, mask = attend(q, k, v, **kwargs)
    again, again_lse, _ = attend(q, k, v, **dict(kwargs, sparsity=0.0), mask=mask.to(DEVICE))
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)


def test_one_mask_for_every_head_and_element():
    """Expanded tensors: stride 0 over heads and batch."""
    q, k, v = qkv(2, 3, 300, 16)
    one = BlockMask.from_dense(torch.rand(1, 1, 5, 5) < 0.5, 64)
    mask = BlockMask(one.counts.expand(2, 3, -1), one.indices.expand(2, 3, -1, -1), 64)
    out, lse, _ = attend(q, k, v, mask=mask.to(DEVICE), block_size=64)
    assert_attends(out, lse, mask, q, k, v)


def test_heavy_rows_come_first():
    counts = torch.randint(0, 5, (2, 2, 150), dtype=torch.int32)
    indices = torch.arange(4, dtype=torch.int32).expand(2, 2, 150, 4)
    schedule = triton_backend.heavy_first(BlockMask(counts, indices).to(DEVICE))
    assert torch.equal(schedule.cpu().long(), counts.flatten(0, 1).argsort(descending=True, stable=True))


# ---------------------------------------------------------------------------------------------------------------------
# masks that are predicted, bit for bit


def in_blocks(contents, order):
    """Tokens [B, H, S, D] in block order -> in the caller's order."""
    x = torch.empty_like(contents)
    x[:, :, order] = contents
    return x


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("block_size", "layout", "sparsity"),
    [
        (64, {}, 0.3),
        (64, {}, 0.6),
        (128, {}, 1.0),
        (64, dict(txt_len=70), 0.6),
        (128, dict(txt_len=70), 0.3),
        (64, dict(latent_shape_q=(3, 8, 16), txt_len=64), 0.6),
        (128, dict(latent_shape_q=(3, 8, 16), txt_len=64), 0.3),
    ],
)
def test_rf_v2_masks_on_exact_scores(block_size, layout, sparsity, masked):
    """Whole numbers, and a power of two of them in a block: sums are exact in fp32, and many scores are equal."""
    length = 3 * 8 * 16 + 64 if "latent_shape_q" in layout else 5 * block_size + 1
    (order, protected), _ = layouts(length, length, block_size, **layout)
    kwargs = dict(sparse_type="rf_v2", sparsity=sparsity, block_size=block_size, scale=0.5, **layout)
    numbers = len(protected)
    q = torch.randint(-1, 2, (1, 1, length, 32)).float()
    distinct = torch.randint(-1, 2, (1, 1, 2, block_size, 32)).float()
    k = in_blocks(distinct[:, :, torch.arange(numbers) % 2].flatten(2, 3)[:, :, :length], order)
    attn_mask = None
    if masked:
        lengths = torch.tensor([32, 64, 32, 64, 0, 0, 1])[:numbers]
        positions = torch.arange(length)
        attn_mask = torch.zeros(1, length, dtype=torch.bool)
        attn_mask[:, order] = positions % block_size < lengths[positions // block_size]

    there = None if attn_mask is None else attn_mask.to(DEVICE)
    mask = predict_mask(q.to(DEVICE), k.to(DEVICE), there, **kwargs, backend="triton")
    assert same(mask, predict_mask(q, k, attn_mask, **kwargs, backend="reference"))
    keep, _ = oracle.kept_keys(attn_mask, 1, length)
    scores = oracle.mean_scores(q, k, 0.5, order, order, keep, block_size)
    assert torch.equal(mask.to_dense().cpu(), oracle.rf_v2_rows(scores, sparsity, protected, protected))
    ranked = scores.sort(-1, descending=True).values
    number = max(1, oracle.budget(numbers, sparsity))
    assert (ranked[..., number - 1] == ranked[..., number]).any(), "no tie decides anything"


@pytest.mark.parametrize("forced", [(True, True), (False, False)])
@pytest.mark.parametrize(("sparsity", "cdf"), [(0.0, 0.5), (0.6, 1.0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_ada_bsa_masks_on_exact_masses(is_causal, sparsity, cdf, forced):
    """1, 2 or 4 key blocks share a row's mass, the others have none: a power of two each, ties everywhere."""
    rows, columns = (6, 6) if is_causal else (3, 6)
    hot = torch.zeros(columns, rows, dtype=torch.bool)
    for row in range(rows):
        before = row if is_causal else columns  # not the diagonal, of which a query sees a part
        number = max(n for n in ((0, 1, 2) if row % 2 else (0, 1, 2, 4)) if n <= before)
        hot[torch.randperm(before)[:number], row] = True
    # a query of block i sees -16384 or 0 at key block j, whose keys have that number in dimension i
    q = F.one_hot(torch.arange(rows), 16).repeat_interleave(128, 0).float()[None, None]
    k = F.pad(torch.where(hot, 0.0, -16384.0), (0, 16 - rows)).repeat_interleave(128, 0)[None, None]
    q = q[:, :, :-123]  # the last block has 5 tokens
    k = k[:, :, :-123] if is_causal else F.pad(k, (0, 0, 0, 40), value=-16384.0)
    kwargs = dict(
        sparse_type="ada_bsa", sparsity=sparsity, cdf_threshold=cdf, keep_sink=forced[0], keep_recent=forced[1],
        is_causal=is_causal, scale=1.0,
    )  # fmt: skip
    mask = predict_mask(q.to(DEVICE), k.to(DEVICE), **kwargs, backend="triton")
    assert same(mask, predict_mask(q, k, **kwargs, backend="reference"))
    keep = torch.ones(1, k.shape[2], dtype=torch.bool)
    mass = oracle.ada_bsa_mass(q, k, 1.0, keep, is_causal)
    assert torch.equal(mask.to_dense().cpu(), oracle.ada_bsa_rows(mass, sparsity, cdf, *forced, is_causal, keep))


class Spy:
    """In a kernel's place: keeps a copy of its first argument."""

    def __getitem__(self, grid):
        return self.launch

    def launch(self, first, *args, **kwargs):
        self.first = first.cpu().clone()


@pytest.mark.parametrize("mask_kind", [None, "bool"])
@pytest.mark.parametrize("name", ["rf_v2 in 64s", "cross", "ada_bsa", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_and_masses(name, mask_kind, dtype, monkeypatch):
    """What is ranked, against float64: within the rounding of fp32 sums."""
    from rainfusion.backends.triton.kernels import ranking

    kwargs, q_len, k_len = CALLS[name]
    q, k, _ = qkv(1, 2, q_len, 40, dtype=dtype, k_heads=1, k_len=k_len)
    attn_mask = key_mask(mask_kind, 1, k_len)
    keep, _ = oracle.kept_keys(attn_mask, 1, k_len)
    spy = Spy()
    monkeypatch.setattr(ranking, "keep_best_kernel", spy)
    monkeypatch.setattr(ranking, "keep_mass_kernel", spy)
    there = None if attn_mask is None else attn_mask.to(DEVICE)
    predict_mask(q.to(DEVICE), k.to(DEVICE), there, **kwargs, backend="triton")
    scale = 40**-0.5
    if kwargs["sparse_type"] == "rf_v2":
        (order_q, _), (order_k, _) = layouts(q_len, k_len, **kwargs)
        rest = order_q, order_k, keep, kwargs["block_size"]
        predictor = kwargs.get("predictor", "mean")
        exact = oracle.SCORES[predictor](q, k, scale, *rest)
        rounding = score_rounding(q, k, scale, *rest, predictor=predictor)
    else:
        exact = oracle.ada_bsa_mass(q, k, scale, keep, kwargs.get("is_causal", False))
        rounding = exact * mass_rounding(q, k, scale, keep)
    assert (((spy.first - exact).abs() <= rounding) | (spy.first == exact)).all()  # -inf, and no mass at all, exactly


NEXT = 0.25 + 2.0**-25  # to 0.25 in fp32
SCORES = st.sampled_from([-math.inf, -1.5, -1e-40, -0.0, 0.0, 0.25, 0.25, NEXT, 3e38, math.inf, math.nan, -math.nan])


@settings(max_examples=examples(15))
@given(st.data(), st.integers(1, 3), st.sampled_from([1, 2, 7, 16, 33]), st.integers(0, 2**20))
def test_rf_v2_ranks_any_number(data, rows, columns, seed):
    """NaN above all, whatever its sign; zeros of either sign, infinities and equal numbers by their index."""
    from rainfusion.backends.triton.kernels import ranking

    scores = torch.tensor(data.draw(st.lists(SCORES, min_size=rows * columns, max_size=rows * columns)))
    scores = scores.view(1, 1, rows, columns)
    generator = torch.Generator().manual_seed(seed)
    protected_q, protected_k = (torch.rand(n, generator=generator) < 0.2 for n in (rows, columns))
    sparsity = data.draw(st.sampled_from([0.1, 0.5, 0.8, 1.0]))
    free_only, per_head = data.draw(st.booleans()), data.draw(st.booleans())
    number = max(1, selection.budget(columns, sparsity))
    numbers = torch.tensor([number], dtype=torch.int32)
    expected = selection.keep_best(scores[0], numbers, protected_q, protected_k, free_only)
    expected = BlockMask.from_dense(expected[None])
    counts = torch.empty(1, 1, rows, dtype=torch.int32, device=DEVICE)
    memory = scores.to(DEVICE, copy=True)
    short = data.draw(st.booleans())
    # the list takes the scores' place, or is shorter
    indices = torch.empty_like(memory, dtype=torch.int16) if short else memory.view(torch.int32)
    free = int((~protected_k).sum())
    candidates = free if free_only else columns
    part = data.draw(st.sampled_from([4, 16]))  # a row in registers, or in part
    ranking.keep_best_kernel[(rows,)](
        memory, protected_q.to(DEVICE, torch.uint8), protected_k.to(DEVICE, torch.uint8), counts, indices,
        0 if per_head else number, numbers.to(DEVICE) if per_head else None, 1, candidates, columns - free, rows,
        columns, PART=part, PER_HEAD=per_head, FREE_ONLY=free_only, num_warps=1,
    )  # fmt: skip
    assert same(BlockMask(counts, indices.int()), expected)


@pytest.mark.parametrize("spread", [1e-6, 1.0, 30.0])
@pytest.mark.parametrize(("columns", "part"), [(255, 256), (591, 128), (700, 128), (640, 128), (591, 16), (2048, 32)])
def test_rf_v2_ranks_many_numbers(columns, part, spread):
    """As they come in videos: every budget, of masses that are nearly alike and of such that are not at all.

    Rows have one part, up to five, which registers hold, or more.
    """
    from rainfusion.backends.triton.kernels import ranking

    budgets = torch.tensor([1, 2, columns // 5, columns // 2, columns - 1, columns, columns + 3], dtype=torch.int32)
    scores = torch.exp2(torch.randn(len(budgets), 2, columns) * spread - 10)
    scores[:, 1] = scores[:, 1, :1] * (1 + torch.randint(0, 4, scores[:, 1].shape) * FP32)  # neighbours, many equal
    nothing = torch.zeros(columns, dtype=torch.bool)
    expected = selection.keep_best(scores, budgets, nothing[:2], nothing)
    counts = torch.empty(1, len(budgets), 2, dtype=torch.int32, device=DEVICE)
    indices = torch.empty(1, *scores.shape, dtype=torch.int16, device=DEVICE)
    flags = nothing.to(DEVICE, torch.uint8)
    ranking.keep_best_kernel[(2 * len(budgets),)](
        scores.to(DEVICE), flags, flags, counts, indices, 0, budgets.to(DEVICE), len(budgets), columns, 0, 2, columns,
        PART=part, PER_HEAD=True, FREE_ONLY=False, num_warps=1,
    )  # fmt: skip
    assert same(BlockMask(counts, indices.int()), BlockMask.from_dense(expected[None]))


@settings(max_examples=examples(10))
@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 5, 10]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.75, 0.5, 0.25]),
    st.sampled_from([0.0, 0.25, 0.5, 0.7, 0.9, 1.0]),
    st.booleans(),
    st.sampled_from([4, 16]),
    st.integers(0, 2**20),
)
@example(1, 10, False, False, False, 1.0, 0.7, False, 16, 0)  # 10 * (1 - 0.7) is a little more than 3
@example(4, 10, False, True, False, 0.5, 0.1, True, 4, 0)  # most columns are not in registers
def test_ada_bsa_chooses_exactly(rows, columns, causal, sink, recent, cdf, sparsity, masked, wide, seed):
    """On masses in sixteenths sums, ties and thresholds are exact, so the choice must be too."""
    from rainfusion.backends.triton.kernels import ranking

    rows, columns = (min(rows, columns),) * 2 if causal else (rows, columns)
    generator = torch.Generator().manual_seed(seed)
    mass = torch.randint(0, 8, (1, 1, rows, columns), generator=generator).float() / 16
    live = torch.rand(columns, generator=generator) < 0.8 if masked else torch.ones(columns, dtype=torch.bool)
    mass = mass.masked_fill(~live, 0.0)
    mass = mass.tril() if causal else mass
    keep = live.repeat_interleave(128)[None]
    expected = oracle.ada_bsa_rows(mass.double(), sparsity, cdf, sink, recent, causal, keep)
    counts = torch.empty(1, 1, rows, dtype=torch.int32, device=DEVICE)
    memory = mass.to(DEVICE, copy=True)
    indices = memory.view(torch.int32)
    ranking.keep_mass_kernel[(rows,)](
        memory, live.to(DEVICE, torch.uint8) if masked else None, counts, indices, triton_backend._bits(1.0 - sparsity),
        cdf, 1, rows, columns, WIDE=wide, IS_CAUSAL=causal, KEEP_SINK=sink, KEEP_RECENT=recent, HAS_THRESHOLD=cdf < 1.0,
        num_warps=1,
    )  # fmt: skip
    assert same(BlockMask(counts, indices), BlockMask.from_dense(expected))


# ---------------------------------------------------------------------------------------------------------------------
# NaN, nothing, and what cannot be


@pytest.mark.parametrize(
    ("name", "sign"), [("rf_v2 in 64s", 1), ("rf_v2 in 64s", -1), ("cross", 1), ("ada_bsa", -1), ("causal", 1)]
)
def test_nan_in_a_key_is_kept_and_shows(name, sign):
    kwargs, q_len, k_len = CALLS[name]
    kwargs = dict(kwargs, sparsity=1.0)
    q, k, v = qkv(1, 2, q_len, 16, k_len=k_len)
    k[0, 1, 140, 3] = math.copysign(math.nan, sign)
    out, lse, mask = attend(q, k, v, **kwargs)
    expected, expected_lse, expected_mask = sparse_attention(
        q, k, v, **kwargs, backend="reference", return_lse=True, return_mask=True
    )
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    assert same(mask, expected_mask)
    assert not out[0, 0].isnan().any()
    assert out[0, 1, 140:].isnan().all()
    assert out[0, 1, :140].isnan().all() != kwargs.get("is_causal", False)


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("kind", ["nan in k", "inf in k", "nan in q", "overflow", "large", "huge"])
@pytest.mark.parametrize("predictor", ["submeans", "spread"])
def test_masses_of_parts_with_logits_of_any_size(predictor, kind, scale):
    """Of one row in a tile, and of many tiles of keys: only some of them look for what is not finite."""
    q, k, _ = qkv(1, 1, 300, 16, k_len=64 * 20)
    if kind == "nan in q":
        q[0, 0, 77, 5] = math.nan
    elif kind == "large":
        q[0, 0, 64:128] *= 1e4
    elif kind == "huge":
        q[0, 0, 64:128] *= 1e30
    elif kind == "overflow":  # of one sign: infinities of both would add up to NaN, or not, as sums are ordered
        q[0, 0, 64:128], k[0, 0, 140] = 1e20, 1e20
    else:
        k[0, 0, 140, 3] = math.nan if kind == "nan in k" else math.inf
    kwargs = dict(RF_V2_64, predictor=predictor, scale=scale)
    mask = predict_mask(q.to(DEVICE), k.to(DEVICE), **kwargs, backend="triton")
    assert same(mask, predict_mask(q, k, **kwargs, backend="reference"))


@pytest.mark.parametrize("name", ["rf_v2 in 64s", "ada_bsa"])
def test_nan_in_a_query_shows_in_its_row(name):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 1, q_len, 16, k_len=k_len)
    q[0, 0, 77, 5] = math.nan
    out, lse, _ = attend(q, k, v, **kwargs)
    assert out[0, 0].isnan().all(-1).nonzero().tolist() == out[0, 0].isnan().any(-1).nonzero().tolist() == [[77]]
    assert lse[0, 0].isnan().nonzero().tolist() == [[77]]


@pytest.mark.parametrize("block_size", [64, 128, (128, 32)])
def test_keys_that_count_nothing_may_come_first(block_size):
    """A whole step, or all of a list, has logits of -inf; others follow."""
    q, k, v = qkv(1, 1, 300, 16)
    q[..., 3] = -1.0 - q[..., 3].abs()
    k[:, :, :200, 3] = math.inf
    out, lse, _ = attend(q, k, v, block_size=block_size)
    exact, exact_lse, _ = attend(q, k[:, :, 200:], v[:, :, 200:], block_size=block_size)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)


@pytest.mark.parametrize("name", ["cross", "ada_bsa", "dense"])
def test_removed_keys_may_hold_anything(name):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 1, q_len, 16, k_len=k_len)
    keep = key_mask("bool", 1, k_len)
    junk = [x.masked_fill(~keep[:, None, :, None], math.nan) for x in (k, v)]
    out, lse, mask = attend(q, k, v, keep, **kwargs)
    junk_out, junk_lse, junk_mask = attend(q, *junk, keep, **kwargs)
    assert torch.equal(out, junk_out)
    assert torch.equal(lse, junk_lse)
    assert same(mask, junk_mask)
    if kwargs:
        assert same(predict_mask(q.to(DEVICE), junk[0].to(DEVICE), keep.to(DEVICE), **kwargs, backend="triton"), mask)


@pytest.mark.parametrize("name", ["video", "ada_bsa", "dense"])
def test_fully_masked_elements_give_zeros(name):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(2, 1, q_len, 16, k_len=k_len)
    keep = torch.zeros(2, k_len, dtype=torch.bool)
    keep[1, 100:] = True
    out, lse, mask = attend(q, k, v, keep, **kwargs)
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()
    assert_chooses(mask, q, k, keep, **kwargs)
    assert_attends(out, lse, mask, q, k, v, keep, **kwargs)


@pytest.mark.parametrize("shape", [(0, 2, 300, 8), (2, 2, 0, 8), (2, 0, 300, 8)])
@pytest.mark.parametrize("sparse_type", [None, "rf_v2", "ada_bsa"])
@pytest.mark.parametrize("compensate", [False, True])
def test_empty_inputs_give_empty_outputs(shape, sparse_type, compensate):
    q = torch.randn(shape)
    out, lse, mask = attend(q, q, q, sparse_type=sparse_type, sparsity=0.5, compensate=compensate)
    blocks = -(-shape[2] // 128)
    assert out.shape == shape
    assert lse.shape == shape[:3]
    assert mask.indices.shape == (*shape[:2], blocks, blocks)


@pytest.mark.parametrize("sparse_type", [None, "rf_v2", "ada_bsa"])
@pytest.mark.parametrize("compensate", [False, True])
def test_no_keys_at_all_give_zeros(sparse_type, compensate):
    q, k = torch.randn(2, 2, 300, 8), torch.randn(2, 2, 0, 8)
    out, lse, _ = attend(q, k, k, sparse_type=sparse_type, sparsity=0.5, compensate=compensate)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(dtype=torch.float64), "takes float16, bfloat16 and float32, got float64"),
        (dict(dim=257), "takes head dims up to 256, got 257"),
        (dict(precision="int8"), "takes float16 and bfloat16 with precision='int8', got float32"),
    ],
)
def test_what_it_cannot_do_is_said(change, words):
    change = dict(change)
    q = torch.zeros(1, 1, 16, change.pop("dim", 8), dtype=change.pop("dtype", torch.float32), device=DEVICE)
    with pytest.raises(ValueError, match=words):
        sparse_attention(q, q, q, **RF_V2, backend="triton", **change)


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    q = torch.zeros(1, 1, 16, 8)
    monkeypatch.setattr(triton_backend, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA or ROCm device, got cpu tensors"):
        sparse_attention(q, q, q, **RF_V2, backend="triton")


def test_nobody_gets_the_interpreter_unasked(monkeypatch):
    q = torch.zeros(1, 1, 16, 8)
    monkeypatch.setattr(triton_backend, "prepare", lambda request: pytest.fail("it was asked to work"))
    assert sparse_attention(q, q, q, **RF_V2).shape == q.shape


def test_one_graph_when_compiled(monkeypatch):
    monkeypatch.setattr(triton_backend, "_interpreted", lambda: True)  # nothing that a compiler can trace
    torch._dynamo.reset()
    q, k, v = (x.to(DEVICE) for x in qkv(1, 1, 212, 16))

    def call(q, k, v):
        return sparse_attention(q, k, v, **ON_GRID, backend="triton", return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(compiled(q, k, v), call(q, k, v), strict=True):
        assert torch.equal(ours, plain)
        assert ours.stride() == plain.stride()


def test_the_parts_work_together():
    q, k, v = (x.to(DEVICE) for x in qkv(1, 1, 212, 16))
    layout = TokenLayout.build(212, VIDEO, TXT, block_size=64).to(DEVICE)
    mask = predict_mask(q, k, **ON_GRID, backend="triton")
    parts = [layout.reorder(x) for x in (q, k, v)]
    out = layout.restore(block_sparse_attention(*parts, mask, backend="triton"))
    torch.testing.assert_close(out, sparse_attention(q, k, v, **ON_GRID, backend="triton"))


# ---------------------------------------------------------------------------------------------------------------------
# any call


@st.composite
def calls(draw):
    """Lengths that are multiples of nothing, shared heads, key masks, grids and clips, every strategy."""
    strategy = draw(st.sampled_from(["rf_v2", "grid", "spans", "ada_bsa", None]))
    q_len, k_len = draw(st.integers(1, 270)), draw(st.integers(1, 270))
    grid = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
    kwargs = dict(sparsity=draw(st.sampled_from([0.2, 0.6, 0.9, 1.0])), scale=draw(st.sampled_from([0.5, 0.1, -0.3])))
    if strategy == "grid":
        txt, latent_q, latent_k = draw(st.sampled_from([0, 3, 70])), draw(grid), draw(grid)
        q_len, k_len = txt + math.prod(latent_q), txt + math.prod(latent_k)
        kwargs.update(latent_shape_q=latent_q, latent_shape_k=latent_k, txt_len=txt)
    if strategy == "spans":
        first, second, gap = draw(grid), draw(grid), draw(st.integers(0, 70))
        start = gap + math.prod(first) + gap // 2
        kwargs.update(video_spans=[dict(start=gap, latent_shape=first), dict(start=start, latent_shape=second)])
        q_len = k_len = start + math.prod(second) + draw(st.sampled_from([0, 30]))
    if strategy in ("rf_v2", "grid", "spans"):
        order = draw(st.sampled_from(["window", "raster", "mindiesd"]))
        kwargs.update(sparse_type="rf_v2", block_size=draw(st.sampled_from([64, 128])), token_order=order)
    else:
        kwargs.update(
            sparse_type=strategy, is_causal=draw(st.booleans()), cdf_threshold=draw(st.sampled_from([0.6, 1.0]))
        )
        k_len = q_len if kwargs["is_causal"] else k_len
    heads, k_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    return dict(
        shape=(draw(st.integers(1, 2)), heads, q_len, draw(st.sampled_from([1, 7, 32, 64]))),
        k_heads=k_heads,
        k_len=k_len,
        dtype=draw(st.sampled_from(DTYPES)),
        mask=draw(st.sampled_from([None, "bool", "float"])),
        seed=draw(st.integers(0, 2**20)),
        kwargs=kwargs,
    )


@settings(max_examples=examples(12))
@given(calls())
def test_any_call(call):
    torch.manual_seed(call["seed"])
    kwargs, k_len = call["kwargs"], call["k_len"]
    q, k, v = qkv(*call["shape"], dtype=call["dtype"], seed=call["seed"], k_heads=call["k_heads"], k_len=k_len)
    attn_mask = key_mask(call["mask"], q.shape[0], k_len)
    inputs = [surrounded(x.to(DEVICE)) for x in (q, k, v)]
    out, lse, mask = attend(*inputs, attn_mask, **kwargs)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(inputs, (q, k, v), strict=True)), "an input was modified"
    assert_chooses(mask, q, k, attn_mask, **kwargs)
    assert_attends(out, lse, mask, q, k, v, attn_mask, **kwargs)
