"""Keys and values as quantised attention reads them: turned back, they are what they were, as far as eight bits go."""

import pytest
import torch

from rainfusion import Method, TokenLayout
from rainfusion.backends import Request, hopper
from rainfusion.prediction import spread
from rainfusion.prediction.pooling import block_means

pytest.importorskip("triton", reason="Triton is made for Linux only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # under Triton's interpreter there
HEADS, DIM = 2, 64
LAYOUTS = {
    "the caller's order": TokenLayout.build(200),
    "a video with text": TokenLayout.build(3 * 8 * 9 + 20, [3, 8, 9], 20),
    "the caller's order, 32 keys": TokenLayout.build(200, block_size=32),  # the last tile of 128 has three blocks
    "a video with text, 64 keys": TokenLayout.build(3 * 8 * 9 + 90, [3, 8, 9], 90, block_size=64),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param].to(DEVICE)


@pytest.fixture(params=[name for name in LAYOUTS if name.endswith("keys")])
def finer(request):
    return LAYOUTS[request.param].to(DEVICE)


def inputs(layout, dim=DIM):
    k = 3 + torch.randn(2, HEADS, layout.seq_len, dim)  # a mean that all keys share
    v = (2 + torch.randn(2, HEADS, layout.seq_len, dim)) * torch.logspace(-3, 3, dim)  # channels of every size
    return k.half().to(DEVICE), v.to(torch.float16).to(DEVICE)


def prepared(k, v, layout, keep, precision="int8", stand_ins=False, bias=None, **options):
    """Keys and values in this layout, with means of their blocks, as rf_v2 wants them."""
    size = layout.block_size
    pair = size if size == 128 else (128, size)
    options = dict(options, precision=precision, compensate=stand_ins, block_size=pair)
    method = Method(sparse_type="rf_v2", sparsity=0.5, **options)
    return hopper.prepare(Request(k, k, v, keep, bias, None, layout, layout, method, 1.0, False, (1,), False))


def in_blocks(x, layout):
    """[B, H, S, D] -> fp32 [B, H, N, block, D], zeros after the end."""
    size = layout.block_size
    padding = layout.num_blocks * size - layout.seq_len
    return torch.nn.functional.pad(layout.reorder(x).float(), (0, 0, 0, padding)).unflatten(2, (-1, size))


def swizzled(address, width):
    """Where a byte of a tile with rows of `width` lies in shared memory: for the copy engine, and for tensor cores."""
    return address ^ (address >> 7 & width // 16 - 1) << 4


def values_in_order(keys, dim):
    """[B, H, blocks, block, D], as the tensor cores see them: blocks are copied as rows of 128 bytes, and read as rows
    of their own width, transposed; each 16 keys are permuted, 8 h + 2 c + e stands at 4 c + 2 h + e."""
    padded, size = 64 if dim <= 64 else 128, keys.v.shape[-1]
    given = keys.v.float().unflatten(2, (-1, padded)).flatten(3)
    byte, shared = torch.arange(padded * size, device=DEVICE), torch.empty_like(given)
    shared[..., swizzled(byte, 128)] = given
    v = shared[..., swizzled(byte, size)].unflatten(-1, (padded, size))[..., :dim, :]
    v = v.unflatten(-1, (size // 16, 4, 2, 2)).transpose(-2, -3).flatten(-4)
    return v.mT * value_scale(keys)[:, :, None]


def value_scale(keys):
    """[B, H, 1, D]; and what was taken from values."""
    return keys.scales.v[:, :, :1]


def value_mean(keys):
    return keys.scales.v[:, :, 1:]


def assert_e4m3(rounded, exact, scale):
    """Three bits of mantissa, and steps of 2^-9 near zero, in units of `scale`."""
    exact = exact / scale
    allowed = exact.abs() / 16 + 2**-10 + 1e-6
    if DEVICE == "cpu":  # Triton's interpreter cuts off near zero, and forgets the carry when a mantissa rounds up to 2
        carried = torch.frexp(exact.abs() * (1 - 1e-6))[0] >= 0.96875  # scaled by an inverse: 2 may come as 2 - 2^-22
        allowed = (allowed + 2**-10).masked_fill(carried, torch.inf)
    assert ((rounded / scale - exact).abs() <= allowed).all()


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("dim", [DIM, 96])
def test_keys_and_values_come_back(layout, precision, dim):
    k, v = inputs(layout, dim)
    keys = prepared(k, v, layout, None, precision)
    blocks, size, scale = layout.num_blocks, layout.block_size, keys.scales.k[..., None, None]
    real = (torch.arange(blocks * size, device=DEVICE) < layout.seq_len).view(blocks, size, 1)
    smoothed = in_blocks(k, layout) - keys.scales.k_mean[:, :, None, None, :] * real
    back = keys.k.float().unflatten(2, (blocks, size)) * scale
    if precision == "int8":
        assert ((back - smoothed).abs() <= 0.501 * scale).all()
    else:
        assert_e4m3(back, smoothed, scale)
    smoothed = in_blocks(v, layout) - value_mean(keys)[:, :, None] * real
    assert_e4m3(values_in_order(keys, dim), smoothed, value_scale(keys)[:, :, None])


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("masked", [False, True])
def test_means_that_stand_in_for_blocks_follow_the_last_one(layout, precision, masked):
    k, v = inputs(layout)
    keep = torch.rand(2, layout.seq_len, device=DEVICE) < 0.6 if masked else None
    if masked:
        keep[:, layout.order[: layout.block_size]] = False  # a whole block
    keys = prepared(k, v, layout, keep, precision, stand_ins=True)
    blocks, size = layout.num_blocks, layout.block_size
    number = torch.ones(2, layout.seq_len, device=DEVICE) if keep is None else keep.float()
    number = in_blocks(number[:, None, :, None], layout).sum((1, 3, 4))  # [B, N]
    live = (number > 0)[:, None, :, None]
    for x, ours in ((k, keys.k.float().unflatten(2, (-1, size)) * keys.scales.k[..., None, None]),
                    (v, values_in_order(keys, DIM))):  # fmt: skip
        exact = block_means(x.cpu(), layout.to("cpu"), None if keep is None else keep.cpu()).to(DEVICE)
        smoothing = keys.scales.k_mean[:, :, None] if x is k else value_mean(keys)
        assert ours.shape[2] == blocks + 128 // size
        ours = ours[:, :, blocks:].flatten(2, 3)
        back = ours[:, :, :blocks]
        scale = keys.scales.k[:, :, -1, None, None] if x is k else value_scale(keys)
        if x is k and precision == "int8":
            assert ((back - (exact - smoothing) * live).abs() <= 0.51 * scale).all()
        else:
            assert_e4m3(back, (exact - smoothing) * live, scale)
        assert (ours[:, :, blocks:] == 0).all()  # what is behind them counts nothing, and is a number
    found = keys.weights[:, :blocks].float().exp2().expand(2, -1)
    torch.testing.assert_close(found, number, rtol=1.4e-3, atol=0)  # of fp16
    assert keys.weights[:, blocks:].isneginf().all()


@pytest.mark.parametrize("masked", [False, True])
def test_how_far_keys_are_from_their_means(layout, masked):
    """And those means, once more for parts of wide blocks, in the type of the keys."""
    k, v = inputs(layout)
    keep = torch.rand(2, layout.seq_len, device=DEVICE) < 0.6 if masked else None
    if masked:
        keep[:, layout.order[: layout.block_size]] = False
    keys = prepared(k, v, layout, keep, stand_ins=True, predictor="spread")
    on_cpu = k.cpu(), layout.to("cpu"), None if keep is None else keep.cpu()
    torch.testing.assert_close(keys.spreads.cpu(), spread.of_keys(*on_cpu), rtol=1e-5, atol=1e-5)
    means = block_means(*on_cpu, parts=max(1, layout.block_size // 32))
    torch.testing.assert_close(keys.means.cpu(), means.half(), rtol=2e-3, atol=1e-5)


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


def test_means_are_taken_away_and_the_range_is_used(layout):
    k, v = inputs(layout)
    keys = prepared(k, v, layout, None)
    torch.testing.assert_close(keys.scales.k_mean, k.float().mean(2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value_mean(keys), v.float().mean(2, keepdim=True), atol=1e-5, rtol=1e-5)
    most = v.float().abs().amax(2, keepdim=True) + value_mean(keys).abs()  # a little more than what is left
    torch.testing.assert_close(value_scale(keys), most / 448, atol=0, rtol=1e-5)
    scaled = layout.block_size if layout.block_size == 128 else keys.k.shape[2]  # together
    assert keys.k.unflatten(2, (-1, scaled)).abs().amax((-1, -2)).eq(127).all()
    torch.testing.assert_close(keys.means.cpu(), block_means(k.cpu(), layout.to("cpu")), atol=1e-5, rtol=1e-5)


def test_removed_keys_leave_no_trace(layout):
    k, v = inputs(layout)
    keep = torch.rand(2, layout.seq_len, device=DEVICE) < 0.6
    keep[:, layout.order[: layout.block_size]] = False  # a whole block
    clean = prepared(k, v, layout, keep)
    removed = ~keep[:, None, :, None]
    dirty = prepared(k.masked_fill(removed, torch.nan), v.masked_fill(removed, torch.inf), layout, keep)
    assert torch.equal(clean.k, dirty.k)
    assert torch.equal(clean.v.view(torch.uint8), dirty.v.view(torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(clean.scales, dirty.scales, strict=True))
    kept = [k[b][:, keep[b]].float().mean(1) for b in range(2)]
    torch.testing.assert_close(clean.scales.k_mean, torch.stack(kept), atol=1e-5, rtol=1e-5)
    kept = [v[b][:, keep[b]].float().mean(1) for b in range(2)]
    torch.testing.assert_close(value_mean(clean)[:, :, 0], torch.stack(kept), atol=1e-5, rtol=1e-5)
    assert clean.bias.isneginf().sum() == 2 * (layout.num_blocks * layout.block_size) - keep.sum()


@pytest.mark.parametrize("common", [(-9000.0, 500.0), (0.0, -3.0)])
def test_logits_of_fp8_go_without_a_bias_that_all_keys_have(layout, common):
    """They are f16, which ends at 65504 and has steps of 32 there. What keys have beside it stays, as -inf does."""
    k, v = inputs(layout)
    keep = torch.rand(2, layout.seq_len, device=DEVICE) < 0.6
    bias = torch.randn(2, layout.seq_len, device=DEVICE) + torch.tensor(common, device=DEVICE)[:, None]
    bias[0, 5], bias[1, layout.order[-1]] = torch.inf, torch.nan  # show in the output, and are not the largest
    bias = bias.masked_fill(~keep, 0.0)
    ours = prepared(k, v, layout, keep, "fp8", bias=bias).bias
    exact = prepared(k, v, layout, keep, "int8", bias=bias).bias
    for b in range(2):
        live = exact[b].isfinite()
        least, most = exact[b][live].aminmax()
        torch.testing.assert_close(ours[b][live], exact[b][live] - min(max(0.0, least), most), rtol=0, atol=2e-3)
        assert torch.equal(ours[b][~live].nan_to_num(), exact[b][~live].nan_to_num())
    nothing = prepared(k, v, layout, torch.zeros_like(keep), "fp8", bias=torch.zeros_like(bias)).bias
    assert nothing.isneginf().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_shows(bad):
    layout = LAYOUTS["a video with text"].to(DEVICE)
    k, v = inputs(layout)
    k[1, 0, layout.order[130], 3] = bad
    keys = prepared(k, v, layout, None)
    expected = torch.zeros(2, HEADS, layout.num_blocks, dtype=torch.bool, device=DEVICE)
    expected[1, 0, 1] = True
    assert torch.equal(keys.scales.k.isnan(), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_a_number_does_not_spoil_the_mean(layout, bad):
    """Which is that of its channel alone."""
    k, v = inputs(layout)
    clean = prepared(k, v, layout, None)
    v[1, 0, layout.order[70], 3] = bad
    keys = prepared(k, v, layout, None)
    expected = value_mean(clean).clone()
    expected[1, 0, 0, 3] = 0.0
    assert torch.equal(value_mean(keys), expected)


def made_of_nan(x):
    """e4m3: Triton's interpreter writes 384 for NaN."""
    return (x.view(torch.uint8) & 127) == (124 if DEVICE == "cpu" else 127)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_shows_in_finer_blocks_and_takes_no_range(finer, precision, bad):
    """In the key itself; integers have no NaN, so there in the values of its block."""
    k, v = inputs(finer)
    k[:, :, finer.order[5], 7] = 100.0  # all others are far from the end of the range
    clean = prepared(k, v, finer, None, precision)
    k[1, 0, finer.order[70], 3] = bad
    keys = prepared(k, v, finer, None, precision)
    torch.testing.assert_close(keys.scales.k, clean.scales.k)
    expected = torch.zeros(keys.k.shape, dtype=torch.bool, device=DEVICE)
    if precision == "fp8":
        expected[1, 0, 70, 3] = True
        assert torch.equal(made_of_nan(keys.k), expected)
        assert torch.equal(keys.v.view(torch.uint8), clean.v.view(torch.uint8))
    else:
        block = keys.v.unflatten(2, (finer.num_blocks, -1))[1, 0, 70 // finer.block_size]
        assert made_of_nan(block).all()
        block.copy_(clean.v.unflatten(2, (finer.num_blocks, -1))[1, 0, 70 // finer.block_size])
        assert torch.equal(keys.v.view(torch.uint8), clean.v.view(torch.uint8))


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_one_scale_for_a_head_is_that_of_its_largest_key(finer, precision):
    k, v = inputs(finer)
    k[1, 1, finer.order[-1], 5] = -20.0
    keys = prepared(k, v, finer, None, precision)
    most = (k.float() - keys.scales.k_mean[:, :, None]).abs().amax((2, 3))
    largest = {"int8": 127, "fp8": 16}[precision]
    torch.testing.assert_close(keys.scales.k, most[..., None] / largest, rtol=1e-6, atol=0)
