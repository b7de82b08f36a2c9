"""Keys and values as quantised attention reads them: turned back, they are what they were, as far as eight bits go."""

import pytest
import torch

from rainfusion import Method, TokenLayout
from rainfusion.backends import Request, hopper
from rainfusion.prediction.pooling import block_means

pytest.importorskip("triton", reason="Triton is made for Linux only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # under Triton's interpreter there
HEADS, DIM = 2, 64
LAYOUTS = {
    "the caller's order": TokenLayout.build(200),
    "a video with text": TokenLayout.build(3 * 8 * 9 + 20, [3, 8, 9], 20),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param].to(DEVICE)


def inputs(layout, dim=DIM):
    k = 3 + torch.randn(2, HEADS, layout.seq_len, dim)  # a mean that all keys share
    v = torch.randn(2, HEADS, layout.seq_len, dim) * torch.logspace(-3, 3, dim)  # channels of every size
    return k.half().to(DEVICE), v.to(torch.float16).to(DEVICE)


def prepared(k, v, layout, keep, precision="int8", stand_ins=False):
    """Keys and values in this layout, with means of their blocks, as rf_v2 wants them."""
    method = Method(sparse_type="rf_v2", sparsity=0.5, precision=precision, compensate=stand_ins)
    return hopper.prepare(Request(k, k, v, keep, None, None, layout, layout, method, 1.0, False, (1,), False))


def in_blocks(x, layout):
    """[B, H, S, D] -> fp32 [B, H, N, 128, D], zeros after the end."""
    padding = layout.num_blocks * 128 - layout.seq_len
    return torch.nn.functional.pad(layout.reorder(x).float(), (0, 0, 0, padding)).unflatten(2, (-1, 128))


def values_in_order(keys, dim):
    """Without the transposition, and the permutation of each 16 keys: 8 h + 2 c + e stands at 4 c + 2 h + e."""
    padded = 64 if dim <= 64 else 128
    v = keys.v.float().unflatten(2, (-1, padded))[..., :dim, :]  # [B, H, N, D, 128]
    v = v.unflatten(-1, (8, 4, 2, 2)).transpose(-2, -3).flatten(-4)
    return v.mT * keys.scales.v[:, :, None, None, :]


def assert_e4m3(rounded, exact, scale):
    """Three bits of mantissa, and steps of 2^-9 near zero, in units of `scale`."""
    exact = exact / scale
    allowed = exact.abs() / 16 + 2**-10 + 1e-6
    if DEVICE == "cpu":  # Triton's interpreter cuts off near zero, and forgets the carry when a mantissa rounds up to 2
        allowed = (allowed + 2**-10).masked_fill(torch.frexp(exact.abs())[0] >= 0.96875, torch.inf)
    assert ((rounded / scale - exact).abs() <= allowed).all()


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("dim", [DIM, 96])
def test_keys_and_values_come_back(layout, precision, dim):
    k, v = inputs(layout, dim)
    keys = prepared(k, v, layout, None, precision)
    blocks, scale = layout.num_blocks, keys.scales.k[..., None, None]
    real = (torch.arange(blocks * 128, device=DEVICE) < layout.seq_len).view(blocks, 128, 1)
    smoothed = in_blocks(k, layout) - keys.scales.k_mean[:, :, None, None, :] * real
    back = keys.k.float().unflatten(2, (blocks, 128)) * scale
    if precision == "int8":
        assert ((back - smoothed).abs() <= 0.501 * scale).all()
    else:
        assert_e4m3(back, smoothed, scale)
    assert_e4m3(values_in_order(keys, dim), in_blocks(v, layout), keys.scales.v[:, :, None, None, :])


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("masked", [False, True])
def test_means_that_stand_in_for_blocks_follow_the_last_one(layout, precision, masked):
    k, v = inputs(layout)
    keep = torch.rand(2, layout.seq_len, device=DEVICE) < 0.6 if masked else None
    if masked:
        keep[:, layout.order[:128]] = False  # a whole block
    keys = prepared(k, v, layout, keep, precision, stand_ins=True)
    blocks = layout.num_blocks
    number = torch.ones(2, layout.seq_len, device=DEVICE) if keep is None else keep.float()
    number = in_blocks(number[:, None, :, None], layout).sum((1, 3, 4))  # [B, N]
    live = (number > 0)[:, None, :, None]
    for x, ours in ((k, keys.k.float().unflatten(2, (-1, 128)) * keys.scales.k[..., None, None]),
                    (v, values_in_order(keys, DIM))):  # fmt: skip
        exact = block_means(x.cpu(), layout.to("cpu"), None if keep is None else keep.cpu()).to(DEVICE)
        smoothing = keys.scales.k_mean[:, :, None] if x is k else 0.0
        assert ours.shape[2] == blocks + 1
        back = ours[:, :, blocks, :blocks]
        scale = keys.scales.k[:, :, blocks, None, None] if x is k else keys.scales.v[:, :, None]
        if x is k and precision == "int8":
            assert ((back - (exact - smoothing) * live).abs() <= 0.51 * scale).all()
        else:
            assert_e4m3(back, (exact - smoothing) * live, scale)
        assert (ours[:, :, blocks, blocks:] == 0).all()  # what is behind them counts nothing, and is a number
    found = keys.weights[:, :blocks].float().exp2().expand(2, -1)
    torch.testing.assert_close(found, number, rtol=1.4e-3, atol=0)  # of fp16
    assert keys.weights[:, blocks:].isneginf().all()


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_block_without_keys_does_not_take_the_range_of_the_means(precision):
    """Its mean is nothing: smoothing must not make it the largest of all."""
    layout = TokenLayout.build(512).to(DEVICE)
    k, v = inputs(layout)
    k = (k.float() / 4 + 10).half()
    keep = torch.ones(2, 512, dtype=torch.bool, device=DEVICE)
    keep[:, 128:256] = False
    keys = prepared(k, v, layout, keep, precision, stand_ins=True)
    exact = block_means(k.cpu(), layout.to("cpu"), keep.cpu()).to(DEVICE) - keys.scales.k_mean[:, :, None]
    ours = keys.k.float().unflatten(2, (-1, 128))[:, :, 4, :4] * keys.scales.k[:, :, 4, None, None]
    live = [0, 2, 3]
    assert (ours - exact)[:, :, live].norm() < 0.1 * exact[:, :, live].norm()


def test_the_mean_is_taken_away_and_the_range_is_used(layout):
    k, v = inputs(layout)
    keys = prepared(k, v, layout, None)
    torch.testing.assert_close(keys.scales.k_mean, k.float().mean(2), atol=0.15, rtol=0)
    assert keys.k.unflatten(2, (-1, 128)).abs().amax((-1, -2)).eq(127).all()
    torch.testing.assert_close(keys.means.cpu(), block_means(k.cpu(), layout.to("cpu")), atol=1e-5, rtol=1e-5)


def test_removed_keys_leave_no_trace(layout):
    k, v = inputs(layout)
    keep = torch.rand(2, layout.seq_len, device=DEVICE) < 0.6
    keep[:, layout.order[:128]] = False  # a whole block
    clean = prepared(k, v, layout, keep)
    removed = ~keep[:, None, :, None]
    dirty = prepared(k.masked_fill(removed, torch.nan), v.masked_fill(removed, torch.inf), layout, keep)
    assert torch.equal(clean.k, dirty.k)
    assert torch.equal(clean.v.view(torch.uint8), dirty.v.view(torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(clean.scales, dirty.scales, strict=True))
    kept = [k[b][:, keep[b]].float().mean(1) for b in range(2)]
    torch.testing.assert_close(clean.scales.k_mean, torch.stack(kept), atol=0.3, rtol=0)
    assert clean.bias.isneginf().sum() == 2 * (layout.num_blocks * 128) - keep.sum()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_shows(layout, bad):
    k, v = inputs(layout)
    k[1, 0, layout.order[130], 3] = bad
    keys = prepared(k, v, layout, None)
    expected = torch.zeros(2, HEADS, layout.num_blocks, dtype=torch.bool, device=DEVICE)
    expected[1, 0, 1] = True
    assert torch.equal(keys.scales.k.isnan(), expected)
