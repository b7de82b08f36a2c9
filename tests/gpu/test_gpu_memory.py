"""What is read, what is allocated, and calls too large for 32-bit indices."""

import math

import pytest
import torch

from helpers import gpu
from helpers.gpu import BF16, FP16, FP32, LAYOUTS, LENGTH, PRECISIONS, RF_V2, USUAL, same
from rainfusion import predict_mask, sparse_attention
from rainfusion.bench.memory import peak_memory

pytestmark = gpu.ON_GPU

HUGE, HUGE_GRID = (1, 140, 131072, 128), (1, 256, 512)  # 2.3e9 elements
WAN_720P, WAN_HEADS = (21, 45, 80), 40


# --- what is read ----------------------------------------------------------------------------------------------------


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
    others = {"ada_bsa": dict(sparse_type="ada_bsa", sparsity=0.6), "compensated": USUAL}
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


@pytest.mark.parametrize("keys", [64, 32])
def test_finer_keys_at_720p_take_no_more_than_scores_of_fp32_would(keys):
    """Beyond the means: lists of two bytes, and scores of half of the heads."""
    q, k, _ = gpu.qkv(math.prod(WAN_720P), batch=1, heads=WAN_HEADS, k_heads=WAN_HEADS)
    call = dict(sparse_type="rf_v2", sparsity=0.8, latent_shape_q=WAN_720P, predictor="submeans")
    mask, peak = peak_memory(lambda: predict_mask(q, k, **call, block_size=(128, keys), backend="triton"), q.device)
    blocks = mask.num_q_blocks * mask.num_k_blocks * WAN_HEADS
    assert mask.indices.nbytes == 2 * blocks <= 120e6
    means = 2 * WAN_HEADS * 4 * mask.num_q_blocks * 128 * 4
    assert peak - means <= 1.02 * 4 * blocks + 2e6, f"{peak / 1e6:.0f} MB"


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
