"""The error of `precision="fp8"` and `"int8"`."""

import pytest
import torch

from helpers import gpu
from helpers.gpu import BF16, CALL, FP16, LAYOUTS, LENGTH, MOST, QUANTISED, RF_V2, check_quantised, same
from rainfusion import BlockMask
from rainfusion.bench import synthetic

pytestmark = gpu.ON_GPU
ENABLE = dict(sparse_type="rf_v2", sparsity=0.85, block_size=(128, 32), predictor="spread", compensate=True)


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
@pytest.mark.parametrize(
    ("q_len", "k_len"), [(1000, 4200), (4200, 1000), (129, 257), (200, 1000), (4200, 4097), (200, 60000)]
)
def test_quantised_lengths(backend, precision, q_len, k_len):
    """Long rows, too: tensor cores keep few bits of a sum of eight-bit products."""
    check_quantised(backend, precision, *gpu.qkv(q_len, k_len, batch=1), **RF_V2, most=MOST[precision])


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("k_heads", "dtype"), [(8, BF16), (2, FP16)], ids=str)
def test_quantised_heads_and_dtypes(backend, precision, k_heads, dtype):
    check_quantised(backend, precision, *gpu.qkv(heads=8, k_heads=k_heads, dtype=dtype), **CALL, most=MOST[precision])


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("call", [RF_V2, ENABLE], ids=["published options", "options of enable"])
def test_a_head_alone_has_the_same_bits(backend, precision, call):
    """Whatever is beside it: its sums are made in the same parts."""
    q, k, v = gpu.qkv(16800, heads=8, k_heads=8)
    whole = gpu.attend(backend, q, k, v, **call, precision=precision)
    for b, h in ((0, 0), (1, 5)) if whole is not None else ():
        alone = (x[b : b + 1, h : h + 1] for x in (q, k, v))
        assert same(gpu.attend(backend, *alone, **call, precision=precision), whole[b : b + 1, h : h + 1])


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
@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("common", [-9000.0, 3000.0])
def test_a_bias_that_all_keys_share_is_that_of_the_lse(backend, precision, compensate, common):
    """However large, and however few digits logits have."""
    q, k, v = gpu.qkv()
    attn_mask = gpu.randn(2, LENGTH, seed=3).float()
    kwargs = dict(RF_V2, compensate=compensate, precision=precision, return_lse=True)
    plain = gpu.attend(backend, q, k, v, attn_mask, **kwargs)
    if plain is not None:
        moved = gpu.attend(backend, q, k, v, attn_mask + common, **kwargs)
        whole, worst = gpu.distances(moved[0].double(), plain[0].double())
        # in eight bits every weight may be rounded otherwise: each is as far from the exact ones as it may be
        assert whole <= MOST[precision] and worst <= 4 * MOST[precision]
        assert (moved[1] - common - plain[1]).abs().max() <= 0.06  # half a step of e4m3


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("lowest", [-6000.0, -20000.0])
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_logits_that_f16_does_not_hold_show(precision, lowest, kept):
    """In fp8 they are NaN, and not zeros as of a row without keys; elsewhere they are numbers."""
    q, k, v = gpu.qkv(1024, batch=1)
    q, k = torch.ones_like(q), torch.zeros_like(k)
    k[..., 0] = lowest * 128**0.5
    k[:, :, :512, 0] *= -1  # smoothing leaves both
    dense = torch.zeros(1, q.shape[1], 8, 8, dtype=torch.bool, device=gpu.DEVICE)
    dense[..., -kept:] = True
    result = gpu.attend("hopper", q, k, v, precision=precision, return_lse=True, mask=BlockMask.from_dense(dense))
    if result is not None:
        assert all(x.isnan().all() if precision == "fp8" else x.isfinite().all() for x in result)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("k_len", [LENGTH, 60000])
@pytest.mark.parametrize("shift", ["10 everywhere", "10 by channel"])
def test_a_common_mean_of_the_values_does_not_spoil_them(backend, precision, k_len, shift):
    """Sums of products of one sign would lose a tenth and more in long rows; hardly more than the output's own bits."""
    q, k, v = gpu.qkv(300, k_len, batch=1)
    v = v + (10 if shift == "10 everywhere" else 10 * gpu.randn(1, 1, 1, 128, seed=9))
    check_quantised(backend, precision, q, k, v, **RF_V2, most=0.004)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("dim", [64, 128])
def test_long_rows_of_a_video(backend, precision, dim):
    """Values near each other are alike: where there are registers for it, they add up what tiles have."""
    latent = synthetic.video_latent((21, 30, 52))
    q, k, v = synthetic.video_qkv(latent, 4, dim, dtype=BF16, device=gpu.DEVICE)
    by_tile = backend == "hopper" and (precision == "fp8" or dim == 64)
    most = 0.016 if by_tile else 0.05  # `benchmarks/accumulators.py`
    check_quantised(backend, precision, q[:, :, ::100], k, v, **dict(RF_V2, sparsity=0.3), most=most, lse_within=None)


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


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("kind", [None, "bool"])
@pytest.mark.parametrize(
    ("dim", "kwargs"),
    [(256, CALL), (72, CALL), (40, RF_V2), (128, dict(CALL, block_size=64)), (256, dict(RF_V2, block_size=64)),
     (128, dict(CALL, scale=-0.05))],
    ids=str,
)  # fmt: skip
def test_quantised_calls_of_other_sizes(backend, precision, kind, dim, kwargs):
    """Which `hopper` leaves to `triton`, but for the last."""
    attn_mask = gpu.key_mask(kind, 2, LENGTH)
    check_quantised(backend, precision, *gpu.qkv(dim=dim), attn_mask, **kwargs, most=MOST[precision], lse_within=0.1)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("kwargs", [dict(is_causal=True), dict(sparse_type="ada_bsa", **gpu.ADA_BSA[2])], ids=str)
def test_quantised_causal_attention(backend, precision, kwargs):
    """The first rows have few keys, whose rounding is theirs: only the whole is bounded."""
    check_quantised(backend, precision, *gpu.qkv(), **kwargs, most=MOST[precision], lse_within=None)
