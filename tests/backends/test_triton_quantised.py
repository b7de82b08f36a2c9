"""int8 and fp8 of the portable Triton kernels, on the GPU where there is one, else under Triton's interpreter.

Outputs are compared with float64 attention over the same mask, within what eight bits lose on normal data; and with
float64 attention over keys, values and queries that were rounded as they should be, which is much nearer.
"""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.accuracy import error
from helpers.fuzz import examples
from helpers.inputs import qkv
from helpers.interpreter import with_exact_e4m3
from helpers.planned import request
from helpers.triton_calls import DEVICE, MARKS, attend, key_mask, same, surrounded
from rainfusion import BlockMask, Method, backends, predict_mask, sparse_attention
from rainfusion.backends import triton
from rainfusion.backends.triton import quantising
from rainfusion.calls import Call, Shapes
from rainfusion.geometry import Geometry

pytestmark = MARKS

# the interpreter multiplies bf16 numbers as if they were integers
DTYPES = [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# relative, on normal data, as on Hopper; nearer with values and their weights of 16 bits
MOST = {"fp8": 0.06, "int8": 0.045, "int8, 16-bit values": 0.016}
# against numbers that were rounded alike: only the weights still differ
ROUNDED = {"fp8": 0.05, "int8": 0.05, "int8, 16-bit values": 0.003}
LARGEST = {"fp8": 448.0, "int8": 127.0}

VIDEO, TXT = (4, 4, 12), 20
RF_V2 = dict(sparse_type="rf_v2", sparsity=0.6)
ON_GRID = dict(RF_V2, latent_shape_q=VIDEO, latent_shape_k=VIDEO, txt_len=TXT)
ADA_BSA = dict(sparse_type="ada_bsa", sparsity=0.5, cdf_threshold=0.8)

# name: arguments, tokens of q, tokens of k
CALLS = {
    "rf_v2": (RF_V2, 300, 300),
    "in 64s": (dict(ON_GRID, block_size=64), 212, 212),
    "64 keys": (dict(ON_GRID, block_size=(128, 64)), 212, 212),
    "32 keys": (dict(ON_GRID, block_size=(128, 32)), 212, 212),
    "cross": (dict(ON_GRID, block_size=64, latent_shape_k=(3, 6, 7)), 212, 146),
    "submeans": (dict(ON_GRID, block_size=64, predictor="submeans"), 212, 212),
    "spread": (dict(ON_GRID, block_size=(128, 32), predictor="spread"), 212, 212),
    "ada_bsa": (ADA_BSA, 150, 513),
    "causal": (dict(ADA_BSA, sparsity=0.3, is_causal=True), 300, 300),
    "dense": ({}, 150, 300),
    "dense causal": (dict(is_causal=True), 300, 300),
}


@pytest.fixture(autouse=True)
def exact_e4m3(monkeypatch):
    if DEVICE == "cpu":
        with_exact_e4m3(monkeypatch)


@pytest.fixture(params=["int8, 16-bit values", "int8", "fp8"])
def precision(request, monkeypatch):
    """Values of 16 bits: as on a GPU that does not multiply e4m3."""
    precision, _, values = request.param.partition(", ")
    if DEVICE == "cuda":
        reason = refusal(precision, "cuda")
        if reason is not None:
            pytest.skip(reason)
    if values or DEVICE == "cpu":
        monkeypatch.setattr(triton, "multiplies_e4m3", lambda x: not values)
    elif precision == "int8" and not rounds_values(precision):
        pytest.skip("this GPU does not multiply e4m3")
    return precision


def rounds_values(precision):
    """Whether they are e4m3, for the GPU at hand or for one that is played."""
    return precision == "fp8" or triton.multiplies_e4m3(torch.empty(0, device=DEVICE))


def bound(bounds, precision):
    return bounds[precision if rounds_values(precision) else f"{precision}, 16-bit values"]


def refusal(precision, device, dtype=torch.float16, name="triton"):
    """What the backend says of a usual call."""
    method = Method(sparse_type="rf_v2", sparsity=0.5, precision=precision)
    call = Call(method, Geometry(), 1.0, False, name, False, False, False, False)
    size = (1, 2, 500, 128)
    return backends.why_not(name, call, Shapes(size, size, dtype, torch.device(device)))


def orders(q_len, k_len, **kwargs):
    latent_q, latent_k = kwargs.get("latent_shape_q"), kwargs.get("latent_shape_k")
    txt, order = kwargs.get("txt_len", 0), kwargs.get("token_order", "window")
    sizes = oracle.sides(kwargs.get("block_size", 128))
    return [
        oracle.layout(length, latent, txt, None, order, size)[0]
        for length, latent, size in ((q_len, latent_q, sizes[0]), (k_len, latent_k, sizes[1]))
    ]


def eight_bits(x, scale, precision):
    """x in multiples of `scale`, as int8 or e4m3 has them."""
    x = x / scale
    return (x.round() if precision == "int8" else x.float().to(torch.float8_e4m3fn).double()) * scale


def rounded(q, k, v, order_k, block_size, attn_mask, precision):
    """q, k, v in float64 as the kernel should have them; and the mean that was taken from k."""
    keep, _ = oracle.kept_keys(attn_mask, k.shape[0], k.shape[2])
    q_size, k_size = oracle.sides(block_size)
    removed, largest = ~keep[:, None, :, None], LARGEST[precision]
    q, k, v = q.double(), k.double().masked_fill(removed, 0.0), v.double().masked_fill(removed, 0.0)
    padding = -len(order_k) % k_size

    def in_blocks(x):
        return F.pad(x[:, :, order_k], (0, 0, 0, padding)).unflatten(2, (-1, k_size))

    number = keep.sum(1).clamp(min=1)[:, None, None]
    mean = k.sum(2) / number
    smoothed = (k - mean[:, :, None]).masked_fill(removed, 0.0)
    blocks = in_blocks(smoothed)
    scale = blocks.abs().amax((3, 4) if k_size == q_size else (2, 3, 4), keepdim=True).clamp(min=1e-30) / largest
    blocks = eight_bits(blocks, scale, precision).flatten(2, 3)
    k = torch.empty_like(k)
    k[:, :, order_k] = blocks[:, :, : len(order_k)]
    q = eight_bits(q, q.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest, precision)
    if rounds_values(precision):
        v_mean = (v.sum(2) / number)[:, :, None]
        scale = (v.abs().amax(2, keepdim=True) + v_mean.abs()).clamp(min=1e-30) / LARGEST["fp8"]
        v = eight_bits(v - v_mean, scale, "fp8") + v_mean
    return q, k, v, mean


def assert_attends(out, lse, mask, q, k, v, attn_mask=None, *, precision, most=None, lse_within=0.1, **kwargs):
    """`out` and `lse` are attention over `mask`, of numbers that were rounded; with `most` not far from that of others.

    Such a bound is for normal data and logits of usual size.
    """
    scale, causal = kwargs.get("scale", q.shape[3] ** -0.5), kwargs.get("is_causal", False)
    order_q, order_k = orders(q.shape[2], k.shape[2], **dict(kwargs, block_size=mask.block_size))
    tokens = oracle.expand(mask.to_dense(), order_q, order_k, mask.block_size)
    rest = tokens, attn_mask, scale, causal
    exact, exact_lse = oracle.attention(q, k, v, *rest)
    seen = exact_lse > -math.inf
    assert (out[~seen] == 0).all()
    assert torch.isneginf(lse[~seen]).all()
    if not exact.any():
        assert not out.any()
        return
    if most is not None:
        assert error(out[seen], exact[seen]) <= most
        assert (lse - exact_lse)[seen].abs().max() <= lse_within

    *eight, mean = rounded(q, k, v, order_k, mask.block_size, attn_mask, precision)
    near, near_lse = oracle.attention(*eight, *rest)
    mean = mean.repeat_interleave(q.shape[1] // k.shape[1], 1)
    near_lse = near_lse + (q.double() * mean[:, :, None]).sum(-1) * scale
    assert error(out[seen], near[seen]) <= bound(ROUNDED, precision)
    size = 1.0 + exact_lse[seen].abs().max().item()
    # a number between two of eight bits may become either
    assert (lse - near_lse)[seen].abs().max() <= 0.02 * size


def assert_right(q, k, v, attn_mask=None, *, precision, most=None, lse_within=0.1, **kwargs):
    out, lse, mask = attend(q, k, v, attn_mask, precision=precision, **kwargs)
    bounds = dict(most=bound(MOST, precision) if most is None else most, lse_within=lse_within)
    assert_attends(out, lse, mask, q, k, v, attn_mask, precision=precision, **bounds, **kwargs)
    return mask


# ---------------------------------------------------------------------------------------------------------------------
# calls of every kind


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_calls(name, precision, dtype):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 1, q_len, 64, k_len=k_len, dtype=dtype)
    mask = assert_right(q, k, v, precision=precision, **kwargs)
    if kwargs.get("sparse_type"):  # what is kept does not depend on it
        there = predict_mask(q.to(DEVICE), k.to(DEVICE), **kwargs, backend="triton")
        assert same(there, mask)


@pytest.mark.parametrize("mask_kind", ["bool", "float"])
@pytest.mark.parametrize("name", ["rf_v2", "in 64s", "32 keys", "ada_bsa", "causal", "dense"])
def test_key_masks(name, mask_kind, precision):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(2, 1, q_len, 64, k_len=k_len, dtype=torch.float16)
    assert_right(q, k, v, key_mask(mask_kind, 2, k_len), precision=precision, lse_within=0.2, **kwargs)


@pytest.mark.parametrize("dim", [1, 8, 40, 72, 128, 256])
def test_head_dims(dim, precision):
    """Of few channels the roundings do not even out: they are bounded by what was rounded only."""
    q, k, v = qkv(1, 1, 70, dim, k_len=236, dtype=torch.float16)
    few = dict(most=math.inf, lse_within=math.inf) if dim < 16 else {}
    assert_right(q, k, v, precision=precision, **few, **RF_V2, block_size=64)


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (129, 129), (1, 257), (257, 1)])
@pytest.mark.parametrize("block_size", [128, 64, (128, 32)])
def test_tails_of_one_token(q_len, k_len, block_size, precision):
    q, k, v = qkv(1, 1, q_len, 64, k_len=k_len, dtype=torch.float16)
    assert_right(q, k, v, precision=precision, **RF_V2, block_size=block_size)


@pytest.mark.parametrize("block_size", [64, (128, 32)])
def test_query_heads_share_key_heads(block_size, precision):
    q, k, v = qkv(2, 4, 30, 64, k_heads=2, k_len=236, dtype=torch.float16)
    assert_right(q, k, v, precision=precision, **RF_V2, block_size=block_size)


@pytest.mark.parametrize("scale", [-0.1, 0.0])
@pytest.mark.parametrize("name", ["in 64s", "32 keys", "causal"])
def test_scales_of_other_signs(name, scale, precision):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 1, q_len, 64, k_len=k_len, dtype=torch.float16)
    assert_right(q, k, v, precision=precision, scale=scale, **kwargs)


def test_any_strides(precision):
    kwargs, q_len, k_len = CALLS["cross"]
    q, k, v = (x.to(DEVICE) for x in qkv(2, 2, q_len, 24, k_len=k_len, dtype=torch.float16))
    expected = attend(q, k, v, precision=precision, **kwargs)
    backwards = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]
    for inputs in (*([surrounded(x, by) for x in (q, k, v)] for by in (3, 8)), backwards):
        assert not any(x.is_contiguous() for x in inputs)
        found = attend(*inputs, precision=precision, **kwargs)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_what_all_keys_share_does_not_spoil_them(precision):
    q, k, v = qkv(1, 2, 300, 64, dtype=torch.float16)
    k = k + 10 * torch.randn(1, 2, 1, 64).half()
    assert_right(q, k, v, precision=precision, **RF_V2)


@pytest.mark.parametrize("name", ["in 64s", "32 keys", "causal", "dense"])
@pytest.mark.parametrize("mask_kind", [None, "bool"])
def test_what_all_values_share_does_not_spoil_them(name, mask_kind, precision):
    """The output differs from it by as much as without: what is lost is measured against that."""
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(2, 2, q_len, 32, k_len=k_len, dtype=torch.float16)
    attn_mask = key_mask(mask_kind, 2, k_len)
    shared = 8 * torch.randn(1, 2, 1, 32).half()
    moved = (v + shared).half()
    assert_right(q, k, moved, attn_mask, precision=precision, lse_within=0.2, **kwargs)
    out, lse, mask = attend(q, k, moved, attn_mask, precision=precision, **kwargs)
    order_q, order_k = orders(q_len, k_len, **kwargs)
    tokens = oracle.expand(mask.to_dense(), order_q, order_k, mask.block_size)
    exact, exact_lse = oracle.attention(q, k, moved, tokens, attn_mask, None, kwargs.get("is_causal", False))
    seen = exact_lse > -math.inf
    apart = (exact - shared.double())[seen]
    rounding = torch.finfo(torch.float16).eps * exact[seen].abs().amax() * apart.numel() ** 0.5  # of the output itself
    assert (out.double() - exact)[seen].norm() <= bound(MOST, precision) * apart.norm() + rounding
    assert torch.isneginf(lse[~seen]).all()


@pytest.mark.parametrize("gain", [1e-3, 100.0])
def test_values_of_any_size(gain, precision):
    q, k, v = qkv(1, 1, 300, 64, dtype=torch.float16)
    assert_right(q, k, v * gain, precision=precision, **RF_V2)
    assert_right(q * gain, k / gain, v, precision=precision, **RF_V2)


# ---------------------------------------------------------------------------------------------------------------------
# means that stand in for blocks


@pytest.mark.parametrize(
    ("block_size", "predictor", "mask_kind"),
    [(64, "mean", None), (128, "mean", "bool"), (128, "spread", None), ((128, 64), "mean", "float"),
     ((128, 32), "mean", None), ((128, 32), "spread", "bool")],
)  # fmt: skip
def test_means_stand_in_for_what_is_skipped(block_size, predictor, mask_kind, precision):
    q, k, v = qkv(2, 2, 420, 64, k_heads=1, dtype=torch.float16)
    attn_mask = key_mask(mask_kind, 2, 420)
    kwargs = dict(sparse_type="rf_v2", sparsity=0.8, block_size=block_size, predictor=predictor, compensate=True)
    out, lse, mask = attend(q, k, v, attn_mask, precision=precision, **kwargs)
    plain = range(420)
    rest = mask.to_dense(), plain, plain, block_size, attn_mask
    exact, exact_lse = oracle.compensated(q, k, v, *rest, spreads=predictor == "spread")
    assert error(out, exact) <= bound(MOST, precision)
    assert (lse - exact_lse).abs().max() <= 0.2


def test_more_means_than_a_tile_has(precision):
    """140 blocks: of the second tile of means only twelve are there."""
    q, k, v = qkv(1, 1, 130, 32, k_len=140 * 32 - 5, dtype=torch.float16)
    kwargs = dict(sparse_type="rf_v2", sparsity=0.95, block_size=(128, 32), compensate=True)
    out, lse, mask = attend(q, k, v, precision=precision, **kwargs)
    order_q, order_k = range(130), range(k.shape[2])
    exact, exact_lse = oracle.compensated(q, k, v, mask.to_dense(), order_q, order_k, (128, 32))
    assert error(out, exact) <= 1.2 * bound(MOST, precision)
    assert (lse - exact_lse).abs().max() <= 0.1


# ---------------------------------------------------------------------------------------------------------------------
# masks that are given


@pytest.mark.parametrize("block_size", [64, 128, (128, 64), (128, 32)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask_kind", [None, "float"])
def test_given_masks(block_size, is_causal, mask_kind, precision):
    """Rows with no block at all, lists that end in the middle of a tile, blocks above the diagonal."""
    q_len, k_len = (200, 200) if is_causal else (200, 300)
    q, k, v = qkv(2, 2, q_len, 64, k_heads=1, k_len=k_len, dtype=torch.float16)
    q_size, k_size = oracle.sides(block_size)
    dense = torch.rand(2, 2, -(-q_len // q_size), -(-k_len // k_size)) < 0.5
    dense[0, 0, 1] = False
    dense[1, 1] = False
    mask = BlockMask.from_dense(dense, block_size)
    attn_mask = key_mask(mask_kind, 2, k_len)
    kwargs = dict(block_size=block_size, is_causal=is_causal, precision=precision)
    out, lse, _ = attend(q, k, v, attn_mask, mask=mask.to(DEVICE), **kwargs)
    assert (out[1, 1] == 0).all()
    assert_attends(out, lse, mask, q, k, v, attn_mask, precision=precision, is_causal=is_causal)


@pytest.mark.parametrize("name", ["in 64s", "32 keys"])
def test_results_do_not_depend_on_what_is_asked_for(name, precision):
    kwargs, q_len, _ = CALLS[name]
    q, k, v = (x.to(DEVICE) for x in qkv(1, 1, q_len, 64, dtype=torch.float16))
    out, _, mask = attend(q, k, v, precision=precision, **kwargs)
    alone = sparse_attention(q, k, v, precision=precision, **kwargs, backend="triton")
    assert torch.equal(alone.cpu(), out)
    again, _, _ = attend(q, k, v, precision=precision, **dict(kwargs, sparsity=0.0), mask=mask.to(DEVICE))
    assert torch.equal(again, out)


# ---------------------------------------------------------------------------------------------------------------------
# NaN, nothing, and what cannot be


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("block_size", [64, 128, (128, 32)])
def test_what_is_not_a_number_in_a_key_shows(block_size, bad, precision):
    """In every query that keeps its block; the heads of other keys do not notice."""
    q, k, v = qkv(1, 4, 300, 32, k_heads=2, dtype=torch.float16)
    q_size, k_size = oracle.sides(block_size)
    dense = torch.rand(1, 4, -(-300 // q_size), -(-300 // k_size)) < 0.5
    dense[..., 0] = True
    dense[:, 1, 0, 140 // k_size], dense[:, 1, 1, 140 // k_size] = True, False
    mask = BlockMask.from_dense(dense, block_size)
    kwargs = dict(precision=precision, mask=mask.to(DEVICE), block_size=block_size)
    clean = attend(q, k, v, **kwargs)
    k[0, 0, 140, 3] = bad
    out, lse, _ = attend(q, k, v, **kwargs)
    shows = oracle.expand(dense, range(300), range(300), block_size)[0, :2, :, 140]
    assert torch.equal(out[0, :2].isnan(), shows[..., None].expand(2, 300, 32))
    if precision == "fp8" or block_size == q_size:  # integers have no NaN: with finer keys their values show it
        assert torch.equal(lse[0, :2].isnan(), shows)
    assert torch.equal(out[0, 2:], clean[0][0, 2:])


def test_what_is_not_a_number_in_a_query_or_a_value_shows(precision):
    q, k, v = qkv(1, 1, 300, 16, dtype=torch.float16)
    q[0, 0, 77, 5] = math.nan
    out, lse, _ = attend(q, k, v, precision=precision, **CALLS["rf_v2"][0])
    assert out[0, 0].isnan().all(-1).nonzero().tolist() == out[0, 0].isnan().any(-1).nonzero().tolist() == [[77]]
    assert lse[0, 0].isnan().nonzero().tolist() == [[77]]
    q, k, v = qkv(1, 1, 300, 16, dtype=torch.float16)
    v[0, 0, 140, 3] = math.nan
    out, lse, _ = attend(q, k, v, precision=precision)
    assert lse.isfinite().all()
    assert out[..., 3].isnan().all()
    assert out.isnan().sum() == 300


@pytest.mark.parametrize("name", ["cross", "32 keys", "ada_bsa", "dense"])
def test_removed_keys_may_hold_anything(name, precision):
    kwargs, q_len, k_len = CALLS[name]
    q, k, v = qkv(1, 1, q_len, 16, k_len=k_len, dtype=torch.float16)
    keep = key_mask("bool", 1, k_len)
    junk = [x.masked_fill(~keep[:, None, :, None], math.nan) for x in (k, v)]
    out, lse, mask = attend(q, k, v, keep, precision=precision, **kwargs)
    junk_out, junk_lse, junk_mask = attend(q, *junk, keep, precision=precision, **kwargs)
    assert torch.equal(out, junk_out)
    assert torch.equal(lse, junk_lse)
    assert same(mask, junk_mask)


@pytest.mark.parametrize("compensate", [False, True])
def test_without_a_key_there_are_zeros(compensate, precision):
    q, k, v = qkv(2, 1, 300, 16, dtype=torch.float16)
    keep = torch.zeros(2, 300, dtype=torch.bool)
    keep[1, 100:] = True
    kwargs = dict(RF_V2, precision=precision, compensate=compensate)
    out, lse, _ = attend(q, k, v, keep, **kwargs)
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()
    out, lse, _ = attend(q, k[:, :, :0], v[:, :, :0], **kwargs)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    assert attend(q[:0], k[:0], v[:0], **kwargs)[0].shape == (0, 1, 300, 16)


@pytest.mark.parametrize("block_size", [128, (128, 32)])
def test_zeros_are_numbers_too(block_size, precision):
    q, k, v = qkv(1, 1, 300, 32, dtype=torch.float16)
    for inputs in ((q * 0, k, v), (q, k * 0, v), (q, k, v * 0), (q * 0, k * 0, v * 0)):
        assert_right(*inputs, precision=precision, **RF_V2, block_size=block_size)


def test_huge_logits_do_not_overflow(precision):
    q, k, v = qkv(1, 1, 300, 16, dtype=torch.float16)
    out, lse, _ = attend(200 * q, 200 * k, v, precision=precision, **RF_V2)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def on_a_gpu(monkeypatch, capability=(8, 0), amd=None):
    """As if there were such a GPU, for who asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.version, "hip", None if amd is None else "7.0")
    named = type("Properties", (), dict(gcnArchName=amd))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: named)


@pytest.mark.parametrize(
    ("precision", "gpu", "words"),
    [
        ("int8", dict(capability=(7, 5)), "needs compute capability 8.0 or newer, found 7.5"),
        ("int8", dict(capability=(8, 0)), None),
        ("int8", dict(capability=(12, 0)), None),
        ("fp8", dict(capability=(8, 6)), "needs compute capability 8.9 or newer for fp8 .*found 8.6, which has int8"),
        ("fp8", dict(capability=(8, 9)), None),
        ("fp8", dict(capability=(9, 0)), None),
        ("fp8", dict(capability=(10, 0)), None),
        ("int8", dict(amd="gfx942:sramecc+:xnack-"), None),
        ("fp8", dict(amd="gfx942:sramecc+:xnack-"), None),
        ("int8", dict(amd="gfx1100"), r"has int8 kernels for one AMD GPU, gfx942 \(MI300\), found gfx1100"),
    ],
    ids=str,
)
def test_which_gpus_have_them(precision, gpu, words, monkeypatch):
    on_a_gpu(monkeypatch, **gpu)
    reason = refusal(precision, "cuda", torch.bfloat16)
    assert reason is None if words is None else re.fullmatch(words, reason)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_hopper_keeps_its_own_kernel(precision, monkeypatch):
    from rainfusion.backends import hopper

    on_a_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(triton, "triton_version", lambda: hopper.TESTED_TRITON[0])
    method = Method(sparse_type="rf_v2", sparsity=0.5, precision=precision)
    size = (1, 2, 500, 128)
    shapes = Shapes(size, size, torch.bfloat16, torch.device("cuda"))
    call = Call(method, Geometry(), 1.0, False, "auto", False, False, False, False)
    assert backends.choose(call, shapes) == "hopper"
    assert backends.choose(call._replace(is_causal=True), shapes) == "triton"
    on_a_gpu(monkeypatch, (8, 9))
    assert backends.choose(call, shapes) == "triton"


def test_the_e4m3_of_amd(monkeypatch):
    """It reaches 240, and so weights are 2^7 at most. The interpreter does not have it: ours is taken up to there."""
    if DEVICE == "cuda":
        pytest.skip("for the interpreter")
    q, k, v = qkv(1, 2, 300, 64, dtype=torch.float16)
    with monkeypatch.context() as patch:
        patch.setitem(quantising.LARGEST, torch.float8_e4m3fn, quantising.LARGEST[torch.float8_e4m3fnuz])
        assert quantising.shift(torch.float8_e4m3fn) == 7
        for kwargs in (RF_V2, dict(RF_V2, block_size=(128, 32))):
            out, lse, mask = attend(q, k, v, precision="fp8", **kwargs)
            tokens = oracle.expand(mask.to_dense(), range(300), range(300), mask.block_size)
            exact, exact_lse = oracle.attention(q, k, v, tokens)
            assert error(out, exact) <= MOST["fp8"]
            assert (lse - exact_lse).abs().max() <= 0.1
    asked = request(q, k, v, **RF_V2)
    asked = asked._replace(method=Method(**RF_V2, precision="fp8"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert quantising.form(asked)[:2] == (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz)
    assert not quantising.form(asked).permuted


@pytest.mark.parametrize(
    ("capability", "v_type"),
    [((8, 0), torch.float16), ((8, 6), torch.float16), ((8, 9), torch.float8_e4m3fn), ((9, 0), torch.float8_e4m3fn),
     ((12, 0), torch.float8_e4m3fn), ("hip", torch.float8_e4m3fnuz)],
    ids=str,
)  # fmt: skip
def test_int8_has_values_of_eight_bits_where_the_gpu_multiplies_them(capability, v_type, monkeypatch):
    asked = request(*qkv(1, 1, 300, 64, dtype=torch.float16), **RF_V2)
    asked = asked._replace(method=Method(**RF_V2, precision="int8"))
    monkeypatch.setattr(triton, "_capability", lambda x: capability)
    monkeypatch.setattr(torch.version, "hip", "7.0" if capability == "hip" else None)
    assert quantising.form(asked)[:2] == (torch.int8, v_type)


# ---------------------------------------------------------------------------------------------------------------------
# any call


@st.composite
def calls(draw):
    """Lengths that are multiples of nothing, shared heads, key masks, grids, every strategy and size of block."""
    strategy = draw(st.sampled_from(["rf_v2", "grid", "ada_bsa", None]))
    q_len, k_len = draw(st.integers(1, 270)), draw(st.integers(1, 270))
    grid = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
    kwargs = dict(sparsity=draw(st.sampled_from([0.2, 0.6, 0.9, 1.0])), scale=draw(st.sampled_from([0.3, 0.1, -0.2])))
    if strategy == "grid":
        txt, latent_q, latent_k = draw(st.sampled_from([0, 3, 70])), draw(grid), draw(grid)
        q_len, k_len = txt + math.prod(latent_q), txt + math.prod(latent_k)
        kwargs.update(latent_shape_q=latent_q, latent_shape_k=latent_k, txt_len=txt)
    if strategy in ("rf_v2", "grid"):
        order = draw(st.sampled_from(["window", "raster", "mindiesd"]))
        block_size = draw(st.sampled_from([64, 128, (128, 64), (128, 32)]))
        kwargs.update(sparse_type="rf_v2", block_size=block_size, token_order=order)
    else:
        kwargs.update(sparse_type=strategy, is_causal=draw(st.booleans()))
        k_len = q_len if kwargs["is_causal"] else k_len
    heads, k_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    return dict(
        shape=(draw(st.integers(1, 2)), heads, q_len, draw(st.sampled_from([7, 32, 64]))),
        k_heads=k_heads,
        k_len=k_len,
        dtype=draw(st.sampled_from(DTYPES)),
        mask=draw(st.sampled_from([None, "bool", "float"])),
        precision=draw(st.sampled_from(["int8", "fp8"])),
        e4m3=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
        kwargs=kwargs,
    )


@settings(max_examples=examples(12))
@given(calls())
def test_any_call(call):
    if DEVICE == "cuda" and refusal(call["precision"], "cuda"):
        return
    torch.manual_seed(call["seed"])
    kwargs, k_len, precision = call["kwargs"], call["k_len"], call["precision"]
    q, k, v = qkv(*call["shape"], dtype=call["dtype"], seed=call["seed"], k_heads=call["k_heads"], k_len=k_len)
    attn_mask = key_mask(call["mask"], q.shape[0], k_len)
    inputs = [surrounded(x.to(DEVICE)) for x in (q, k, v)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        if DEVICE == "cpu":
            with_exact_e4m3(monkeypatch)
            monkeypatch.setattr(triton, "multiplies_e4m3", lambda x: call["e4m3"])
        out, lse, mask = attend(*inputs, attn_mask, precision=precision, **kwargs)
        assert_attends(out, lse, mask, q, k, v, attn_mask, precision=precision, **kwargs)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(inputs, (q, k, v), strict=True)), "an input was modified"
