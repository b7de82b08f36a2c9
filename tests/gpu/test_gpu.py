"""The kernels on a GPU, `pytest -m gpu`: against float64, and what a program around them relies on.

Most run for `hopper` and for `triton`. What a backend cannot do must be an error that says so (`gpu.attend`); what it
may not refuse is in `gpu.must_run`.
"""

import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers import fuzz, gpu, oracle
from helpers.gpu import BACKENDS, BF16, FP16, FP32, LAYOUTS, LENGTH, VIDEO
from rainfusion import BlockMask, block_sparse_attention, explain, predict_mask, sparse_attention
from rainfusion.bench import synthetic
from rainfusion.bench.memory import peak_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu.DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

RF_V2 = dict(sparse_type="rf_v2", sparsity=0.6)
CALL = dict(RF_V2, **VIDEO)  # the usual one
COMPENSATED = dict(CALL, predictor="submeans", compensate=True, first_frame="keys")  # that of a pipeline
TOKEN = LENGTH // 4  # one somewhere
QUANTISED = ["fp8", "int8"]
PRECISIONS = ["native", *QUANTISED]

HUGE, HUGE_GRID = (1, 140, 131072, 128), (1, 256, 512)  # 2.3e9 elements
WAN_720P, WAN_HEADS = (21, 45, 80), 40


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def same(a, b):
    """Bit for bit, NaN equal to NaN."""
    if isinstance(a, BlockMask):
        return torch.equal(a.counts, b.counts) and torch.equal(a.indices, b.indices)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a.nan_to_num(0.125), b.nan_to_num(0.125)) and torch.equal(a.isnan(), b.isnan())


# --- the error of native precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "dim"), [(BF16, 64), (BF16, 128), (BF16, 256), (FP16, 72), (FP16, 128), (FP32, 128)], ids=str
)
def test_a_video_with_text_in_every_dtype(backend, dtype, dim):
    gpu.check(backend, *gpu.qkv(dim=dim, dtype=dtype), **CALL)


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [*((BF16, dim) for dim in (32, 40, 80, 96, 192)), (FP16, 64),
     *((FP32, dim) for dim in (32, 64, 256))], ids=str,
)  # fmt: skip
def test_head_dims_with_a_given_mask(backend, dtype, dim):
    q, k, v = gpu.qkv(1030, LENGTH, dim=dim, dtype=dtype)
    gpu.check(backend, q, k, v, mask=BlockMask.from_dense(gpu.random_mask(q, k)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(backend, name):
    length, layout = LAYOUTS[name]
    gpu.check(backend, *gpu.qkv(length), **RF_V2, **layout)


@pytest.mark.parametrize(
    ("q_len", "k_len"),
    [(1, 1), (63, 1000), (128, 128), (129, 4200), (1000, 64), (4200, 127), (4200, 4200)],
)
def test_lengths(backend, q_len, k_len):
    gpu.check(backend, *gpu.qkv(q_len, k_len, batch=1), **RF_V2)


def test_each_side_has_its_own_grid(backend):
    q, k, v = gpu.qkv(1030 + 20, LENGTH)
    for layout in (
        dict(latent_shape_q=(5, 10, 21), latent_shape_k=gpu.GRID, txt_len=0),
        dict(latent_shape_q=(1, 25, 40), latent_shape_k=gpu.GRID, txt_len=gpu.TXT),
        dict(latent_shape_k=gpu.GRID, txt_len=gpu.TXT),
    ):
        tokens = layout["txt_len"] + 1300
        gpu.check(backend, q, k[:, :, :tokens], v[:, :, :tokens], **RF_V2, **layout)


@pytest.mark.parametrize("k_heads", [8, 4, 2])
@pytest.mark.parametrize("layout", [{}, VIDEO], ids=["none", "video"])
def test_heads_that_share_keys(backend, k_heads, layout):
    gpu.check(backend, *gpu.qkv(heads=8, k_heads=k_heads), **RF_V2, **layout)


@pytest.mark.parametrize("kind", gpu.KEY_MASKS)
@pytest.mark.parametrize("name", ["none", "video", "mindiesd"])
def test_key_masks(backend, kind, name):
    gpu.check(backend, *gpu.qkv(), gpu.key_mask(kind, 2, LENGTH), **RF_V2, **LAYOUTS[name][1])


@pytest.mark.parametrize("kind", [None, "float"])
@pytest.mark.parametrize("name", ["none", "video"])
def test_key_masks_in_fp32(backend, kind, name):
    gpu.check(backend, *gpu.qkv(dtype=FP32), gpu.key_mask(kind, 2, LENGTH), **RF_V2, **LAYOUTS[name][1])


@pytest.mark.parametrize(
    ("name", "kind"), [("none", "blocks"), ("video", None), ("video", "bool"), ("spans", "float"), ("mindiesd", None)]
)
def test_blocks_of_64(backend, name, kind):
    gpu.check(backend, *gpu.qkv(), gpu.key_mask(kind, 2, LENGTH), **RF_V2, **LAYOUTS[name][1], block_size=64)


@pytest.mark.parametrize("sparsity", [0.05, 0.9, 1.0])
@pytest.mark.parametrize("name", ["none", "video"])
def test_sparsities(backend, sparsity, name):
    gpu.check(backend, *gpu.qkv(), sparse_type="rf_v2", sparsity=sparsity, **LAYOUTS[name][1])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("scale", [-0.3, -2.0, 0.0, 1e-3, 4.0, 100.0])
def test_scales(backend, dtype, scale):
    gpu.check(backend, *gpu.qkv(dtype=dtype), **RF_V2, scale=scale)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 100.0])
def test_scales_with_a_key_mask(backend, scale):
    gpu.check(backend, *gpu.qkv(), gpu.key_mask("bool", 2, LENGTH), **CALL, scale=scale)


ADA_BSA = [
    dict(sparsity=0.5),
    dict(sparsity=0.0, cdf_threshold=0.9, keep_sink=False, keep_recent=False),
    dict(sparsity=0.3, is_causal=True),
    dict(sparsity=0.2, cdf_threshold=0.8, is_causal=True, keep_sink=False),
]


@pytest.mark.parametrize("kwargs", ADA_BSA, ids=str)
@pytest.mark.parametrize("kind", [None, "float", "blocks"])
def test_ada_bsa(backend, kwargs, kind):
    q, k, v = gpu.qkv()
    gpu.check(backend, q * 2, k, v, gpu.key_mask(kind, 2, LENGTH), sparse_type="ada_bsa", **kwargs)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_ada_bsa_in_other_dtypes(backend, dtype):
    gpu.check(backend, *gpu.qkv(dtype=dtype), sparse_type="ada_bsa", sparsity=0.5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", [None, "float"])
def test_dense(backend, is_causal, kind):
    gpu.check(backend, *gpu.qkv(), gpu.key_mask(kind, 2, LENGTH), is_causal=is_causal)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_fastest_arithmetic(backend, dtype):
    gpu.check(backend, *gpu.qkv(dtype=dtype), **CALL, inner_precise=1)


def test_calls_without_lse(backend):
    gpu.check(backend, *gpu.qkv(), lse=False, **CALL)


def strided(kind, x):
    """The same numbers as x, laid out otherwise."""
    if kind == "every second column":
        return torch.stack([x, x.flip(2)], -1)[..., 0]
    if kind == "tokens side by side":
        return x.mT.contiguous().mT
    if kind == "slice at an odd address":
        return torch.nn.functional.pad(x, (3, 5, 2, 7))[:, :, 2:-7, 3:-5]
    if kind == "part of a fused qkv":  # [B, S, 3, N, D] -> [B, N, S, D]
        return torch.stack([x, x.flip(2), x.flip(3)], 1).permute(0, 3, 1, 2, 4).contiguous()[:, :, 0].transpose(1, 2)
    assert kind == "one head for all"
    return x[:1, :1].expand(x.shape)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("every second column", "video"), ("tokens side by side", "none"), ("slice at an odd address", "none"),
     ("slice at an odd address", "video"), ("part of a fused qkv", "none"), ("part of a fused qkv", "video"),
     ("one head for all", "none"), ("one head for all", "video")],
)  # fmt: skip
def test_strides(backend, kind, name):
    gpu.check(backend, *(strided(kind, x) for x in gpu.qkv()), **RF_V2, **LAYOUTS[name][1])


def test_bsnd_is_the_same_to_the_last_bit(backend):
    q, k, v = gpu.qkv()
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    result = gpu.check(backend, *swapped, **CALL, input_layout="BSND")
    plain = gpu.attend(backend, q, k, v, **CALL, return_lse=True, return_mask=True)
    assert (result is None) == (plain is None)
    if result is not None:
        assert result[0].is_contiguous()
        assert same((result[0].transpose(1, 2).contiguous(), *result[1:]), plain)


def random_call(seed):
    """Lengths stay within the classes that kernels are compiled for (see `gpu.LENGTH`)."""
    draw = random.Random(seed)
    block_size = draw.choice([128, 128, 64])

    def fits(n):
        return n % 16 and 1152 < n <= 1920 and -(-n // 128) % 16 and -(-n // 64) % 16

    def grid(total):
        """[t, h, w] of a size that fits, and the text before it."""
        while True:
            t, h = draw.choice([1, 2, 3, 5, 7, 9]), draw.randint(2, 30)
            txt = draw.choice([0, 1, 50, 128, 300])
            w = (total - txt) // (t * h)
            if w >= 1 and fits(txt + t * h * w):
                return (t, h, w), txt

    kwargs = dict(sparse_type="rf_v2", sparsity=draw.choice([0.1, 0.5, 0.7, 0.9, 1.0]), block_size=block_size)
    kind = draw.choice(["none", "grid", "grid", "grids", "spans", "ada_bsa"])
    q_len, k_len = (draw.choice([1153, 1200 + 30, LENGTH, 1501, 1777]) for _ in range(2))
    if kind in ("grid", "grids"):
        latent_q, txt = grid(draw.randint(1200, 1900))
        q_len = k_len = math.prod(latent_q) + txt
        kwargs.update(latent_shape_q=latent_q, txt_len=txt, token_order=draw.choice(["window", "mindiesd", "raster"]))
        if kind == "grids":
            k_len = draw.choice([n for n in (1153, 1350, 1501) if n != q_len])
    elif kind == "spans":
        q_len = k_len = LENGTH
        kwargs.update(video_spans=gpu.SPANS, token_order=draw.choice(["window", "raster", "mindiesd"]))
    elif kind == "none":
        kwargs.update(txt_len=draw.choice([0, 129]))
    else:
        kwargs = dict(sparse_type="ada_bsa", sparsity=draw.choice([0.2, 0.7, 1.0]))
    heads, k_heads = draw.choice([(4, 2), (8, 2)])
    tensors = dict(batch=draw.choice([1, 2]), heads=heads, k_heads=k_heads, seed=seed)
    tensors["dtype"] = draw.choice([BF16, BF16, FP32]) if block_size == 128 and kind != "ada_bsa" else BF16
    layout = draw.choice(["BNSD", "BSND"])
    return q_len, k_len, tensors, draw.choice([None, None, *gpu.KEY_MASKS]), layout, kwargs


@pytest.mark.parametrize("seed", range(fuzz.examples(40)))
def test_random_calls(backend, seed):
    q_len, k_len, tensors, kind, layout, kwargs = random_call(seed)
    inputs = gpu.qkv(q_len, k_len, **tensors)
    before = [x.clone() for x in inputs]
    attn_mask = gpu.key_mask(kind, len(inputs[0]), k_len, seed)
    if layout == "BSND":
        inputs = [x.transpose(1, 2) for x in inputs]
    gpu.check(backend, *inputs, attn_mask, **kwargs, input_layout=layout)
    if layout == "BSND":
        inputs = [x.transpose(1, 2) for x in inputs]
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "an input was modified"


# --- odd masks and values --------------------------------------------------------------------------------------------


def blocks(dense):
    return BlockMask.from_dense(torch.tensor(dense, dtype=torch.bool, device=gpu.DEVICE).expand(2, 4, -1, -1))


ODD_MASKS = [
    (300, 300, [[0, 0, 0], [0, 0, 1], [1, 0, 0]]),  # no block, the ragged one only, one whole
    (300, 300, [[0, 0, 0]] * 3),
    (300, 257, [[0, 0, 1]] * 3),  # a block of one key
    (300, 300, [[1, 1, 1], [1, 0, 1], [0, 1, 1]]),
]


@pytest.mark.parametrize(
    ("q_len", "k_len", "dense"),
    [
        *ODD_MASKS,
        (70, 700, [[0, 1, 0, 0, 1, 1]]),  # one row of blocks
        (700, 70, [[1], [0], [1], [1], [0], [1]]),  # one column
        (5, 5, [[1]]),
        (5, 5, [[0]]),
    ],
)
def test_odd_block_masks(backend, q_len, k_len, dense):
    gpu.check(backend, *gpu.qkv(q_len, k_len), mask=blocks(dense))


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("q_len", "k_len", "dense"), ODD_MASKS)
def test_odd_block_masks_quantised(backend, q_len, k_len, dense, precision):
    check_quantised(
        backend, precision, *gpu.qkv(q_len, k_len), mask=blocks(dense), most=MOST[precision], lse_within=0.5
    )


def test_block_sparse_attention_is_the_call_with_a_mask(backend):
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    result = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if result is not None:
        assert same(block_sparse_attention(q, k, v, mask, backend=backend, return_lse=True), result)


def test_a_predicted_mask_can_be_used_again(backend):
    q, k, v = gpu.qkv()
    result = gpu.attend(backend, q, k, v, **CALL, return_lse=True, return_mask=True)
    if result is None:
        return
    mask = result[-1]
    assert same(predict_mask(q, k, **CALL, backend=backend), mask)
    again = sparse_attention(q, k, v, **CALL, mask=mask, backend=backend, return_lse=True, return_mask=True)
    assert same(again, result)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("token", [TOKEN, LENGTH - 1])
def test_nan_in_a_key_shows_where_its_block_is_kept_and_nowhere_else(backend, dtype, token):
    q, k, v = gpu.qkv(dtype=dtype)
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    clean = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if clean is None:
        return
    k[0, 0, token, 5] = math.nan  # of query heads 0 and 1
    out, lse = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    shows = torch.zeros_like(lse, dtype=torch.bool)
    shows[0, :2] = gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, {})[0, :2, :, token]
    assert torch.equal(out.isnan(), shows.unsqueeze(-1).expand(out.shape))
    assert torch.equal(lse.isnan(), shows)
    assert torch.equal(out[~shows], clean[0][~shows])
    assert torch.equal(lse[~shows], clean[1][~shows])


@pytest.mark.parametrize("kwargs", [CALL, dict(sparse_type="ada_bsa", sparsity=0.6), RF_V2], ids=str)
def test_nan_in_a_key_takes_its_block_into_every_row(backend, kwargs):
    q, k, v = gpu.qkv(batch=1)
    k[0, 1, TOKEN, 3] = math.nan
    result = gpu.attend(backend, q, k, v, **kwargs, return_lse=True)
    if result is not None:
        for x in result:
            assert x[0, 2:].isnan().all()
            assert x[0, :2].isfinite().all()


@pytest.mark.parametrize("precision", QUANTISED)
def test_quantising_does_not_hide_a_nan(backend, precision):
    """It reaches every query that keeps its block; the heads of other keys do not notice."""
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    clean = gpu.attend(backend, q, k, v, mask=mask, precision=precision, return_lse=True)
    if clean is None:
        return
    k[0, 0, TOKEN, 5] = math.nan
    out, _ = gpu.attend(backend, q, k, v, mask=mask, precision=precision, return_lse=True)
    shows = gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, {})[0, :2, :, TOKEN]
    assert torch.equal(out[0, :2].isnan(), shows.unsqueeze(-1).expand(out[0, :2].shape))
    assert torch.equal(out[0, 2:], clean[0][0, 2:])
    assert torch.equal(out[1], clean[0][1])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero", ["q", "k", "q and k", "v", "everything"])
def test_zeros_are_numbers_too(backend, precision, zero):
    """No division by a scale of 0: without q or k the result is the mean of the values, without v it is 0."""
    q, k, v = gpu.qkv()
    q, k, v = (x * (name not in zero and zero != "everything") for name, x in zip("qkv", (q, k, v), strict=True))
    for kwargs in (RF_V2, CALL):
        if precision == "native":
            gpu.check(backend, q, k, v, **kwargs)
        else:
            check_quantised(backend, precision, q, k, v, **kwargs, most=MOST[precision])


def test_nan_in_a_query_stays_in_its_row(backend):
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    clean = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if clean is None:
        return
    q[1, 3, TOKEN] = math.nan
    result = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    for ours, before in zip(result, clean, strict=True):
        assert ours[1, 3, TOKEN].isnan().all()
        ours[1, 3, TOKEN] = before[1, 3, TOKEN]
    assert same(result, clean)


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, precision) for name in ("rf_v2", "video", "compensated") for precision in PRECISIONS),
     ("ada_bsa", "native"), ("dense", "native")],
)  # fmt: skip
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_removed_keys_may_hold_anything(backend, name, precision, junk):
    ada_bsa = dict(sparse_type="ada_bsa", sparsity=0.6)
    calls = {"rf_v2": RF_V2, "video": CALL, "compensated": COMPENSATED, "ada_bsa": ada_bsa, "dense": {}}
    kwargs = dict(calls[name], precision=precision, return_lse=True)
    q, k, v = gpu.qkv()
    keep = gpu.key_mask("blocks", 2, LENGTH)
    spoilt = [x.masked_fill(~keep[:, None, :, None], junk) for x in (k, v)]
    clean = gpu.attend(backend, q, k, v, keep, **kwargs)
    result = gpu.attend(backend, q, *spoilt, keep, **kwargs)
    assert (clean is None) == (result is None)
    if result is not None:
        assert result[0].isfinite().all()
        assert same(result, clean)


def test_inf_in_a_key_is_what_it_is_in_dense_attention(backend):
    """+inf in a logit makes its row NaN, -inf takes the key out of it."""
    q, k, v = gpu.qkv()
    k[0, 0, TOKEN, 5] = math.inf
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    result = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if result is None:
        return
    out = result[0]
    with gpu.at_ease():
        exact, _ = oracle.attention(q, k, v, gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, {}))
        assert exact.isnan().any() and exact[0, 0].isfinite().all(-1).any()
        assert torch.equal(out.isnan(), exact.isnan())
        gap = (out.double() - exact).nan_to_num(0.0).norm() / exact.nan_to_num(0.0).norm()
        assert gap <= 2 * torch.finfo(out.dtype).eps


def test_inf_in_a_value_shows_in_its_column(backend):
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    result = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if result is None:
        return
    clean = result[0]
    v[0, 0, TOKEN, 5] = -math.inf
    out, _ = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    shows = torch.zeros_like(out, dtype=torch.bool)
    shows[0, :2, :, 5] = gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, {})[0, :2, :, TOKEN]
    assert torch.equal(~out.isfinite(), shows)
    assert torch.equal(out[~shows], clean[~shows])


def test_large_logits_do_not_overflow(backend):
    for dtype in (FP16, BF16):
        q, k, v = gpu.qkv(dtype=dtype)
        gpu.check(backend, q * 30, k * 30, v, **CALL)


# --- memory that is not theirs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, torch.float8_e4m3fn], ids=str)
def test_fresh_memory_is_poisoned_here_too(dtype):
    """Else a read before a write would not show in any of these tests."""
    x = torch.empty(3, 1000, dtype=dtype, device=gpu.DEVICE)
    for fresh in (x, torch.empty_like(x), x.new_empty(7, 500), torch.empty_strided((9, 9), (1, 20), device=gpu.DEVICE)):
        assert fresh.float().isnan().all()
    assert (torch.empty(1000, dtype=torch.int32, device=gpu.DEVICE) == 2**31 - 1).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("none", None), ("video", None), ("none", "float"), ("video", "float"), ("ada_bsa", None), ("compensated", None),
     ("compensated", "float")],
)  # fmt: skip
def test_nothing_outside_the_inputs_is_read(backend, precision, dtype, name, kind):
    """Each input lies in a sea of NaN, and the result does not change by a bit."""
    q, k, v = gpu.qkv(dtype=dtype)
    others = {"ada_bsa": dict(sparse_type="ada_bsa", sparsity=0.6), "compensated": COMPENSATED}
    kwargs = dict(others[name]) if name in others else dict(RF_V2, **LAYOUTS[name][1])
    attn_mask = gpu.key_mask(kind, 2, LENGTH)
    kwargs.update(precision=precision, return_lse=True, return_mask=True)
    plain = gpu.attend(backend, q, k, v, attn_mask, **kwargs)
    if plain is None:
        return
    if kind:
        sea = torch.full((2, LENGTH + 64), math.nan, device=gpu.DEVICE)
        sea[:, 32:-32] = attn_mask
        attn_mask = sea[:, 32:-32]
    islands = [gpu.island(x) for x in (q, k, v)]
    assert same(gpu.attend(backend, *islands, attn_mask, **kwargs), plain)
    assert all(torch.equal(x, y) for x, y in zip(islands, (q, k, v), strict=True)), "an input was modified"


@pytest.mark.parametrize("length", [1, 65, 127, 129, 257])
def test_nothing_past_a_short_end_is_read(backend, length):
    q, k, v = gpu.qkv(200, length)
    plain = gpu.attend(backend, q, k, v, **RF_V2, return_lse=True)
    if plain is not None:
        assert same(gpu.attend(backend, *(gpu.island(x) for x in (q, k, v)), **RF_V2, return_lse=True), plain)


# --- masks -----------------------------------------------------------------------------------------------------------


EXACT_LENGTH = 1288  # the last block has 8 tokens, so that its mean is exact
EXACT_LAYOUTS = {
    "none": {},
    "video": dict(latent_shape_q=(3, 16, 26), txt_len=40),
    "first frame's keys": dict(latent_shape_q=(3, 16, 26), txt_len=40, first_frame="keys"),
    "free first frame": dict(latent_shape_q=(3, 16, 26), txt_len=40, first_frame="free"),
    "exact budget": dict(latent_shape_q=(3, 16, 26), txt_len=40, exact_budget=True),
    "mindiesd": dict(latent_shape_q=(3, 16, 26), txt_len=40, token_order="mindiesd"),
}


@pytest.mark.parametrize("name", EXACT_LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("removed", [None, slice(256, 640)], ids=str)
@pytest.mark.parametrize("sparsity", [0.3, 0.7, 1.0])
def test_masks_are_those_of_the_cpu_where_sums_are_exact(backend, name, dtype, removed, sparsity):
    """On small integers every order of adding gives the same sum, so masks are equal bit for bit, ties too."""
    q = gpu.integers(2, 4, EXACT_LENGTH, 64, dtype=dtype)
    k = gpu.integers(2, 2, EXACT_LENGTH, 64, dtype=dtype, seed=1)
    kwargs = dict(sparse_type="rf_v2", sparsity=sparsity, **EXACT_LAYOUTS[name])
    keep = None
    if removed is not None:
        keep = torch.ones(2, EXACT_LENGTH, dtype=torch.bool, device=gpu.DEVICE)
        keep[1, removed] = False
        if name != "none":  # other numbers of tokens would be left in blocks
            keep[1] = False
    result = gpu.attend(backend, q, k, k, keep, **kwargs, return_lse=True, return_mask=True)
    if result is None:
        return
    there = predict_mask(q.cpu(), k.cpu(), None if keep is None else keep.cpu(), **kwargs, backend="portable")
    assert same(result[-1].to("cpu"), there)
    assert same(predict_mask(q, k, keep, **kwargs, backend=backend).to("cpu"), there)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_budgets_by_head_are_those_of_the_cpu(backend, dtype):
    q = gpu.integers(2, 4, EXACT_LENGTH, 64, dtype=dtype)
    kwargs = dict(EXACT_LAYOUTS["video"], sparse_type="rf_v2", sparsity=[0.9, 0.5, 0.7, 0.0])
    for exact_budget in (False, True):
        there = predict_mask(q.cpu(), q.cpu(), **kwargs, exact_budget=exact_budget)
        result = gpu.attend(backend, q, q, q, **kwargs, exact_budget=exact_budget, return_mask=True)
        assert result is None or same(result[-1].to("cpu"), there)


SUBMEANS = {
    "plain": dict(RF_V2, predictor="submeans"),
    "video": dict(CALL, predictor="submeans"),
    "blocks of 64": dict(CALL, predictor="submeans", block_size=64),
}


@pytest.mark.parametrize("name", SUBMEANS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("kind", [None, "bool", "blocks"])
def test_submeans_choose_what_the_cpu_does_but_for_near_ties(backend, name, dtype, kind):
    """Products of tf32 there, of fp32 here: a row may swap two blocks, and one of them may be protected anyway."""
    q, k, v = gpu.qkv(dtype=dtype)
    attn_mask = gpu.key_mask(kind, 2, q.shape[2])
    kwargs = SUBMEANS[name]
    result = gpu.attend(backend, q, k, v, attn_mask, **kwargs, return_mask=True)
    if result is None:
        return
    there = predict_mask(q.cpu(), k.cpu(), None if attn_mask is None else attn_mask.cpu(), **kwargs)
    differ = (result[-1].to_dense().cpu() != there.to_dense()).sum(-1)
    assert (differ > 0).float().mean() < 0.02
    assert differ.max() <= 2


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize("name", ["plain", "video", "blocks of 64"])
def test_compensation_is_that_of_the_reference(backend, dtype, kind, name):
    """Against the same mask in float64 on the CPU, within twice what rounding inputs and output costs."""
    q, k, v = gpu.qkv(dtype=dtype)
    attn_mask = gpu.key_mask(kind, 2, q.shape[2])
    kwargs = dict(SUBMEANS[name], compensate=True, return_lse=True)
    result = gpu.attend(backend, q, k, v, attn_mask, **kwargs, return_mask=True)
    if result is None:
        return
    out, lse, mask = result
    there = [x.double().cpu() for x in (q, k, v)]
    mask_there = None if attn_mask is None else attn_mask.cpu()
    exact, exact_lse = sparse_attention(*there, mask_there, **kwargs, mask=mask.to("cpu"), backend="reference")
    scale = exact.abs().max()
    eps = torch.finfo(dtype).eps
    assert (out.double().cpu() - exact).abs().max() <= max(8 * eps, 2e-5) * scale
    seen = exact_lse > -math.inf
    assert (lse.cpu() - exact_lse)[seen].abs().max() <= max(8 * eps, 2e-5) * max(1.0, exact_lse[seen].abs().max())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", [64, 72, 128])
@pytest.mark.parametrize("kind", [None, "float", "blocks", "nothing"])
def test_compensation_in_every_precision(backend, precision, dim, kind):
    """More keys than 128 blocks have, rows that keep none of them, other lengths of q and k: against the definition.

    The LSE within twice what the same precision loses without compensation.
    """
    q, k, v = gpu.qkv(300, 128 * 130 + 40, batch=1, dim=dim)
    k = k + gpu.randn(131, dim, seed=9).repeat_interleave(128, 0)[: k.shape[2]]  # blocks with something in common
    attn_mask = torch.zeros(1, k.shape[2], dtype=torch.bool, device=gpu.DEVICE)
    attn_mask = attn_mask if kind == "nothing" else gpu.key_mask(kind, 1, k.shape[2])
    dense = gpu.random_mask(q, k, density=0.2)
    dense[0, 0, 1], dense[0, 1, 0] = False, True
    mask, there = BlockMask.from_dense(dense), [None if x is None else x.cpu() for x in (q, k, v, attn_mask)]
    there[:3] = [x.float() for x in there[:3]]
    off = 0.0
    for compensate in (False, True):
        kwargs = dict(sparse_type="rf_v2", compensate=compensate, return_lse=True)
        result = gpu.attend(backend, q, k, v, attn_mask, precision=precision, mask=mask, **kwargs)
        if result is None:
            return
        out, lse = result
        exact, exact_lse = sparse_attention(*there, mask=mask.to("cpu"), **kwargs)
        if not compensate:
            off = (lse.cpu() - exact_lse)[exact_lse.isfinite()].abs().max() if exact_lse.isfinite().any() else 0.0
    if kind == "nothing":
        assert (out == 0).all() and lse.isneginf().all()
        return
    most = {"native": 0.004, **MOST}[precision]
    assert (out.cpu() - exact).norm() <= 1.2 * most * exact.norm()
    gpu.assert_lse(lse.cpu(), exact_lse.double(), max(2 * float(off), 0.005))


def test_a_target_error_is_kept_on_the_device_as_on_the_cpu(backend):
    q, k, v = gpu.qkv(dtype=BF16)
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), enable_gqa=True)
    for target in (0.5, 0.2):
        result = gpu.attend(backend, q, k, v, sparse_type="rf_v2", target_error=target, return_mask=True)
        if result is None:
            return
        there = sparse_attention(q.cpu(), k.cpu(), v.cpu(), sparse_type="rf_v2", target_error=target, return_mask=True)[
            1
        ]
        assert abs(result[-1].density() - there.density()) < 0.05
        error = (result[0].double() - dense).norm() / dense.norm()
        assert error <= 1.3 * target


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("kind", [None, "bool", "blocks"])
def test_rf_v2_masks_follow_the_definition(backend, name, dtype, kind):
    """Rows differ, from float64 or from the CPU, only where fp32 cannot tell the two decisive scores apart."""
    length, layout = LAYOUTS[name]
    q, k, v = gpu.qkv(length, dtype=dtype)
    attn_mask = gpu.key_mask(kind, 2, length)
    result = gpu.attend(backend, q, k, v, attn_mask, **RF_V2, **layout, return_lse=True, return_mask=True)
    if result is None:
        return
    here = result[-1].to_dense()
    expected, tied = gpu.rf_v2(q, k, attn_mask, dict(RF_V2, **layout))
    assert tied.float().mean() < 0.05  # else the test would say little
    assert not ((here != expected).any(-1) & ~tied).any()
    there = predict_mask(q.cpu(), k.cpu(), None if attn_mask is None else attn_mask.cpu(), **RF_V2, **layout)
    assert not ((here.cpu() != there.to_dense()).any(-1) & ~tied.cpu()).any()


@pytest.mark.parametrize("kwargs", [*ADA_BSA, dict(sparsity=1.0), dict(sparsity=0.1)], ids=str)
@pytest.mark.parametrize("kind", [None, "bool"])
def test_ada_bsa_masks_follow_the_definition(backend, kwargs, kind):
    q, k, v = gpu.qkv()
    q = q * 3
    attn_mask = gpu.key_mask(kind, 2, LENGTH)
    kwargs = dict(kwargs, sparse_type="ada_bsa")
    result = gpu.attend(backend, q, k, v, attn_mask, **kwargs, return_lse=True, return_mask=True)
    if result is None:
        return
    here = result[-1].to_dense()
    del kwargs["sparse_type"]
    gpu.assert_ada_bsa(here, gpu.ada_bsa_mass(q, k, attn_mask, kwargs.get("is_causal", False)), **kwargs)
    keep = None if attn_mask is None else attn_mask.cpu()
    there = predict_mask(q.cpu(), k.cpu(), keep, sparse_type="ada_bsa", **kwargs)
    assert (here.cpu() != there.to_dense()).any(-1).float().mean() <= 0.02


def test_masks_ascend_and_are_permutations(backend):
    q, k, v = gpu.qkv()
    for kwargs in (CALL, dict(sparse_type="ada_bsa", **ADA_BSA[1])):
        result = gpu.attend(backend, q, k, v, **kwargs, return_lse=True, return_mask=True)
        if result is not None:
            assert same(result[-1], BlockMask.from_dense(result[-1].to_dense()))


# --- quantised precision ---------------------------------------------------------------------------------------------

# Relative L2 error on normal random data. The same rounding done in fp32 gives 0.047 to 0.054 and 0.033 to 0.039.
MOST = {"fp8": 0.06, "int8": 0.042}


def check_quantised(backend, precision, q, k, v, attn_mask=None, *, most, lse_within=0.05, **kwargs):
    result = gpu.attend(backend, q, k, v, attn_mask, precision=precision, return_lse=True, return_mask=True, **kwargs)
    if result is None:
        return
    out, lse, mask = result
    assert out.isfinite().all()
    with gpu.at_ease():
        tokens = gpu.token_mask(mask.to_dense(), q.shape[2], k.shape[2], kwargs)
        exact, exact_lse = oracle.attention(q, k, v, tokens, attn_mask, kwargs.get("scale"))
        assert (out[exact_lse.isneginf()] == 0).all()
        if not exact.any():
            assert not out.any()
            return
        whole, worst = gpu.distances(out, exact)
        assert whole <= most, f"error {whole:.3g}, allowed {most}"
        if lse_within:
            assert worst <= 4 * most, f"error of the worst row {worst:.3g}"
            gpu.assert_lse(lse, exact_lse, lse_within)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(
    ("dim", "name", "kind"),
    [(64, "video", "bool"), (64, "video", "float"), (96, "none", None),
     *((128, name, kind) for name in ("none", "video") for kind in (None, "bool", "float", "nothing left"))],
)  # fmt: skip
def test_quantised_errors_are_small(backend, precision, dim, name, kind):
    kwargs = dict(RF_V2, **LAYOUTS[name][1], most=MOST[precision])
    kwargs["lse_within"] = 0.2 if kind == "float" else 0.05  # with a bias a few keys decide, and so does their rounding
    check_quantised(backend, precision, *gpu.qkv(dim=dim), gpu.key_mask(kind, 2, LENGTH), **kwargs)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("q_len", "k_len"), [(1000, 4200), (4200, 1000), (129, 257), (200, 1000), (4200, 4097)])
def test_quantised_lengths(backend, precision, q_len, k_len):
    check_quantised(backend, precision, *gpu.qkv(q_len, k_len, batch=1), **RF_V2, most=MOST[precision])


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("k_heads", "dtype"), [(8, BF16), (2, FP16)], ids=str)
def test_quantised_heads_and_dtypes(backend, precision, k_heads, dtype):
    check_quantised(backend, precision, *gpu.qkv(heads=8, k_heads=k_heads, dtype=dtype), **CALL, most=MOST[precision])


@pytest.mark.parametrize("precision", QUANTISED)
def test_quantised_errors_on_a_video(backend, precision):
    """Sharp attention: the rounding of one logit is its row's, so only the whole is bounded."""
    latent = synthetic.video_latent(gpu.GRID)
    q, k, v = synthetic.video_qkv(latent, 4, 128, txt_len=gpu.TXT, dtype=BF16, device=gpu.DEVICE)
    check_quantised(backend, precision, q, k, v, **CALL, most=0.03, lse_within=None)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("kind", [None, "bool", "blocks"])
@pytest.mark.parametrize("shift", ["10 everywhere", "10 by channel", "another in each element and head"])
def test_a_common_mean_of_the_keys_does_not_spoil_them(backend, precision, kind, shift):
    q, k, v = gpu.qkv()
    if shift == "10 everywhere":
        k = k + 10
    else:
        heads = (2, 2) if shift.startswith("another") else (1, 1)
        k = k + 10 * gpu.randn(*heads, 1, 128, seed=9)
    attn_mask = gpu.key_mask(kind, 2, LENGTH)
    check_quantised(backend, precision, q, k, v, attn_mask, **CALL, most=MOST[precision], lse_within=0.1)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("gain", [1e-3, 30.0])
def test_quantised_values_of_any_size(backend, precision, gain):
    """Scales follow the data: v a thousand times smaller or larger is no less exact."""
    q, k, v = gpu.qkv()
    check_quantised(backend, precision, q, k, v * gain, **CALL, most=MOST[precision])
    check_quantised(backend, precision, q * gain, k / gain, v, **CALL, most=MOST[precision])


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_quantised_call_predicts_as_the_native_one_does(backend, precision):
    q, k, v = gpu.qkv()
    kwargs = dict(CALL, return_lse=True, return_mask=True)
    result = gpu.attend(backend, q, k, v, **kwargs, precision=precision)
    if result is not None:
        assert same(result[-1], gpu.attend(backend, q, k, v, **kwargs)[-1])


# --- programs around them --------------------------------------------------------------------------------------------

# what a program may call again and again, by name
CALLS = {
    "video": CALL,
    "fp8": dict(CALL, precision="fp8", return_lse=True),
    "int8": dict(CALL, precision="int8", return_lse=True),
    "all results": dict(CALL, return_lse=True, return_mask=True),
    "compensated": dict(COMPENSATED, return_lse=True),
    "compensated, fp8": dict(COMPENSATED, precision="fp8"),
    "by head": dict(CALL, sparsity=[0.9, 0.3, 0.6, 0.5]),
    "by error": dict(VIDEO, sparse_type="rf_v2", target_error=0.3),
    "ada_bsa": dict(sparse_type="ada_bsa", **ADA_BSA[1], return_lse=True),
    "causal": dict(sparse_type="ada_bsa", **ADA_BSA[2], return_lse=True),
    "dense": dict(return_lse=True),
}
FEW_CALLS = ["video", "fp8", "int8"]


def repeatable(backend, name, seed=0, attn_mask=None, **tensors):
    """-> inputs, a function of them, and what it gave the first time; None where the backend refuses."""
    inputs = gpu.qkv(seed=seed, **tensors)
    first = gpu.attend(backend, *inputs, attn_mask, **CALLS[name])
    if first is None:
        return None

    def call(q, k, v, attn_mask=attn_mask):
        return sparse_attention(q, k, v, attn_mask, backend=backend, **CALLS[name])

    return inputs, call, first


@pytest.mark.parametrize("name", CALLS)
def test_a_hundred_runs_are_equal(backend, name):
    ready = repeatable(backend, name)
    if ready is None:
        return
    inputs, call, first = ready
    assert all(same(call(*inputs), first) for _ in range(100))


@pytest.mark.parametrize("name", FEW_CALLS)
def test_other_work_on_the_device_changes_nothing(backend, name):
    ready = repeatable(backend, name, heads=8)
    if ready is None:
        return
    inputs, call, first = ready
    side = torch.cuda.Stream()
    a = gpu.randn(4096, 4096)
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        with gpu.at_ease(), torch.cuda.stream(side):
            for _ in range(3):
                a = (a @ a).clamp(-1, 1)
        results.append(call(*inputs))
    torch.cuda.synchronize()
    assert all(same(result, first) for result in results)


@pytest.mark.parametrize("name", FEW_CALLS)
def test_two_streams_at_once(backend, name):
    ready = [repeatable(backend, name, seed, heads=8) for seed in (1, 2)]
    if ready[0] is None:
        return
    streams = [torch.cuda.Stream() for _ in ready]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(30):
        for stream, (inputs, call, _), mine in zip(streams, ready, results, strict=True):
            with torch.cuda.stream(stream):
                mine.append(call(*inputs))
    torch.cuda.synchronize()
    for (_, _, first), mine in zip(ready, results, strict=True):
        assert all(same(result, first) for result in mine)


def test_a_layout_is_ready_on_every_stream(backend):
    """The first call with a layout builds it; the next one may come on another stream at once."""
    grid = (5, 13, 17)
    q, k, v = gpu.qkv(math.prod(grid))
    kwargs = dict(RF_V2, latent_shape_q=grid)
    if gpu.attend(backend, q, k, v, **kwargs) is None:
        return
    from rainfusion.layout import cached_layout

    results = []
    for _ in range(5):
        cached_layout.cache_clear()
        torch.cuda.synchronize()
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                results.append(sparse_attention(q, k, v, **kwargs, backend=backend))
    torch.cuda.synchronize()
    assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("name", FEW_CALLS)
def test_two_threads(backend, name):
    ready = [repeatable(backend, name, seed) for seed in range(4)]
    if ready[0] is None:
        return

    def work(number):
        inputs, call, first = ready[number]
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [call(*inputs) for _ in range(25)]
            torch.cuda.current_stream().synchronize()
            return all(same(result, first) for result in results)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [None, "float"])
def test_a_cuda_graph_replays_it_on_new_inputs(backend, name, kind):
    ready = repeatable(backend, name, attn_mask=gpu.key_mask(kind, 2, LENGTH))
    if ready is None:
        return
    inputs, call, _ = ready
    held = [x.clone() for x in inputs]
    held_mask = gpu.key_mask(kind, 2, LENGTH)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*held, held_mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*held, held_mask)
    for seed in (5, 6):
        fresh, fresh_mask = gpu.qkv(seed=seed), gpu.key_mask(kind, 2, LENGTH, seed)
        for old, new in zip(held, fresh, strict=True):
            old.copy_(new)
        if kind:
            held_mask.copy_(fresh_mask)
        graph.replay()
        assert same(result, call(*fresh, fresh_mask))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_the_host_never_waits(backend, name, kind):
    ready = repeatable(backend, name, attn_mask=gpu.key_mask(kind, 2, LENGTH))
    if ready is None:
        return
    inputs, call, first = ready
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = call(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(result, first)


def test_the_host_never_waits_for_a_given_mask(backend):
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    first = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if first is None:
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [
            sparse_attention(q, k, v, mask=mask, return_lse=True, backend=backend),
            block_sparse_attention(q, k, v, mask, return_lse=True, backend=backend),
            predict_mask(q, k, **CALL, backend=backend),
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(results[0], first)
    assert same(results[1], first)


def test_the_sync_detector_works():
    x = torch.ones(1, device=gpu.DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["all results", "fp8", "int8", "ada_bsa"])
def test_compiled_in_one_graph(backend, compiler, name):
    ready = repeatable(backend, name)
    if ready is None:
        return
    inputs, call, first = ready
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: call(q, k, v), fullgraph=True, backend=compiler)
    for _ in range(2):
        assert same(compiled(*inputs), first)


@pytest.mark.parametrize("name", ["video", "ada_bsa"])
def test_autocast_changes_nothing(backend, name):
    ready = repeatable(backend, name, dtype=FP32)
    if ready is None:
        return
    inputs, call, first = ready
    with torch.autocast("cuda", BF16):
        assert same(call(*inputs), first)


def test_every_gpu_is_served_whichever_is_current(backend):
    ready = repeatable(backend, "all results")
    if ready is None:
        return
    inputs, call, first = ready
    current = torch.cuda.current_device()
    for number in range(torch.cuda.device_count()):
        result = call(*(x.to(f"cuda:{number}") for x in inputs))
        assert result[0].device.index == number
        assert torch.cuda.current_device() == current
        if torch.cuda.get_device_name(number) == torch.cuda.get_device_name(current):
            moved = tuple(x.to(first[0].device) for x in result)
            assert same(moved, first)


# --- large calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_720p_video_takes_no_more_than_keys_and_values_in_order(backend, precision):
    """Beyond inputs and output: k and v once more, and a tenth for means, the mask and the layout."""
    length = math.prod(WAN_720P)
    q, k, v = gpu.qkv(length, batch=1, heads=WAN_HEADS, k_heads=WAN_HEADS)
    kwargs = dict(sparse_type="rf_v2", sparsity=0.8, latent_shape_q=WAN_720P, precision=precision)
    result = gpu.attend(backend, q, k, v, **kwargs, return_mask=True)
    if result is None:
        return
    if precision == "native":
        last = -(-length // 128) - 1
        picks = [(0, 0, 0), (0, WAN_HEADS // 2, last // 2), (0, WAN_HEADS - 1, last), (0, 3, last)]
        gpu.check_rows(q, k, v, *result, kwargs, picks)
    del result
    out, peak = peak_memory(lambda: sparse_attention(q, k, v, **kwargs, backend=backend), q.device)
    extra = peak - out.nbytes
    assert extra <= 1.1 * (k.nbytes + v.nbytes), f"{extra / 1e6:.0f} MB beside k and v of {k.nbytes / 1e6:.0f} MB each"


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_more_elements_than_an_int32_counts(backend, layout):
    batch, heads, length, dim = HUGE
    shape = HUGE if layout == "BNSD" else (batch, length, heads, dim)
    q, k, v = (gpu.randn(*shape, seed=i) for i in range(3))
    kwargs = dict(sparse_type="rf_v2", sparsity=0.97, latent_shape_q=HUGE_GRID)
    result = gpu.attend(backend, q, k, v, **kwargs, input_layout=layout, return_mask=True)
    if result is None:
        return
    out, mask = result
    if layout == "BSND":
        q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, out))
    last = -(-length // 128) - 1
    picks = [(0, h, row) for h in (0, 1, heads // 2, heads - 2, heads - 1) for row in (0, last // 2, last)]
    gpu.check_rows(q, k, v, out, mask, kwargs, picks)
    torch.cuda.empty_cache()


# --- which backend runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "dim"), [(BF16, 128), (BF16, 64), (FP16, 128), (FP32, 128), (BF16, 256), (BF16, 32)], ids=str
)
def test_auto_takes_the_fastest_that_can(dtype, dim):
    q, k, v = gpu.qkv(dim=dim, dtype=dtype)
    chosen, result = gpu.chosen_backend(q, k, v, **CALL, return_lse=True)
    if gpu.must_run("hopper", dtype, dim):
        assert chosen == "hopper"
    elif dtype == FP32:
        assert chosen == "triton"
    assert chosen in BACKENDS  # never the slow one on a GPU
    assert same(result, sparse_attention(q, k, v, **CALL, return_lse=True, backend=chosen))


def test_auto_runs_dense_where_that_is_faster_and_says_so():
    q, k, v = gpu.qkv(1000)
    assert explain(q, k, v, **RF_V2).startswith("runs with torch's attention: dense attention is expected to be faster")
    assert same(sparse_attention(q, k, v, **RF_V2), sparse_attention(q, k, v))
    assert "torch's" not in explain(q, k, v, **RF_V2, return_mask=True)
    long = torch.randn(1, 8, 32768, 128, dtype=BF16, device=gpu.DEVICE)
    assert explain(long, long, long, **RF_V2).startswith("runs with 'hopper'")


@pytest.mark.parametrize(
    ("dtype", "dim", "kwargs", "reason"),
    [
        (torch.float64, 64, {}, "float64"),
        (BF16, 320, {}, "head dim.*320"),
        (FP32, 128, dict(precision="fp8"), "fp8|float32"),
        (BF16, 320, dict(precision="int8"), "int8|head dim.*320"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_an_error_that_says_why(backend, dtype, dim, kwargs, reason):
    q, k, v = gpu.qkv(dim=dim, dtype=dtype)
    with pytest.raises(ValueError, match=f"{backend}.*({reason}|compute capability)"):
        sparse_attention(q, k, v, **CALL, backend=backend, **kwargs)


def test_a_float64_call_still_runs():
    q, k, v = gpu.qkv(dim=16, dtype=torch.float64)
    with gpu.at_ease():
        out, mask = sparse_attention(q, k, v, **CALL, return_mask=True)
        exact, _ = oracle.attention(q, k, v, gpu.token_mask(mask.to_dense(), LENGTH, LENGTH, CALL))
        assert gpu.distances(out, exact)[0] < 1e-12
