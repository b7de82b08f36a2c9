"""predictor="spread": shares of attention normalised from wide means, and scores of calls with peaks in them."""

import pytest
import torch

from helpers import oracle
from helpers.inputs import randn
from helpers.planned import request
from rainfusion import predict_mask
from rainfusion.backends import portable
from rainfusion.backends import triton as triton_backend
from rainfusion.prediction import spread
from rainfusion.prediction.pooling import block_means

pytestmark = pytest.mark.timeout(1800)  # Triton's interpreter

BACKENDS = ["portable", "reference", "triton"]
FINE = dict(sparse_type="rf_v2", predictor="spread", block_size=(128, 32), compensate=True)
AXIS = torch.eye(16)[0]


def by_definition(q, k, scale, block_size, keep=None, compensate=True):
    order_q, order_k = list(range(q.shape[2])), list(range(k.shape[2]))
    keep = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool) if keep is None else keep
    return oracle.mean_errors(q, k, scale, order_q, order_k, keep, block_size, compensate)


def scores_of(backend, q, k, keep=None, **options):
    call = request(q, k, k, keep, **{**FINE, "sparsity": 0.7, **options})
    return (triton_backend if backend == "triton" else portable).scores(call, None)


def few_keys(batch, length):
    """Parts, and four of them in a row, without a key, and some with one."""
    keep = torch.rand(batch, length, generator=torch.Generator().manual_seed(2)) < 0.7
    keep[:, 256:400], keep[0, 70:128], keep[-1, 64:95] = False, False, False
    return keep


@pytest.mark.parametrize("size", [1.0, 5.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("block_size", [(128, 32), (128, 64), 128, 64])
@pytest.mark.parametrize("backend", ["portable", "triton"])
def test_scores_are_those_of_the_definition(backend, block_size, compensate, masked, size):
    q, k = size * randn(2, 4, 300, 16), randn(2, 2, 700, 16, seed=1)  # 22 parts of keys: the last wide mean is of two
    keep = few_keys(2, 700) if masked else None
    found = scores_of(backend, q, k, keep, block_size=block_size, compensate=compensate)
    expected = by_definition(q, k, 0.25, block_size, keep, compensate)
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-12)


def test_wide_means_are_of_parts_that_have_a_key():
    means = randn(2, 3, 10, 8)
    live = torch.ones(2, 10, dtype=torch.bool)
    live[0, 4:8], live[1, 1] = False, False
    wide = spread.widened(means, live)
    assert wide.numbers.tolist() == [[4, 0, 2], [3, 4, 2]]
    torch.testing.assert_close(wide.means[0, :, 0], means[0, :, :4].mean(1))
    torch.testing.assert_close(wide.means[1, :, 0], means[1, :, [0, 2, 3]].mean(1))
    torch.testing.assert_close(wide.means[:, :, 2], means[:, :, 8:].mean(2))
    assert not wide.means[0, :, 1].any()


@pytest.mark.parametrize("length", [1, 3, 4, 37, 300])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_widens_alike(dtype, masked, length):
    means = randn(2, 3, length, 40).to(dtype)
    live = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) < 0.6 if masked else None
    found, farthest, numbers = triton_backend._widened(means, live, length)
    everything = torch.ones(2, length, dtype=torch.bool) if live is None else live
    expected = spread.widened(means, everything)
    torch.testing.assert_close(found, expected.means)
    if live is not None:
        assert torch.equal(numbers.long(), expected.numbers)
    apart = (means.float() - found.float().repeat_interleave(4, 2)[:, :, :length]).norm(dim=-1)
    apart = apart.masked_fill(~everything[:, None], 0.0)
    assert farthest.shape[2] == -(-length // 256)  # a program has 64 wide means of 40 channels
    torch.testing.assert_close(farthest.amax(2), apart.amax(2), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [float("nan"), float("inf")])
def test_a_head_with_a_mean_that_is_not_finite_is_looked_at_closely(kind):
    means = randn(1, 2, 20, 16)
    means[0, 1, 7, 3] = kind
    assert triton_backend._widened(means, None, 20)[1].amax(2).isfinite().tolist() == [[True, False]]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("gap", [10.0, 300.0, 1e4, 1e8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_two_peaks_the_higher_one_is_kept(backend, gap, sign):
    """Both are far above wide means, so that the square of a share would be infinite: and the lower one comes first.

    They are in one head of one of two clips.
    """
    q, k = randn(2, 2, 128, 16) + 10.0 * AXIS, 0.1 * randn(2, 2, 1024, 16, seed=1)
    k[1, 1, 96:128] += 2 * gap * AXIS + 0.5 * randn(32, 16, seed=2)  # with more spread, too
    k[1, 1, 544:576] += 3 * gap * AXIS
    kept = predict_mask(q, sign * k, scale=0.1 * sign, sparsity=31 / 32, **FINE, backend=backend).to_dense()
    assert kept[1, 1, 0].nonzero().flatten().tolist() == [17]


@pytest.mark.parametrize("peak", [0.0, 300.0])
@pytest.mark.parametrize("masked", [False, True])
def test_some_heads_of_a_clip_have_the_scores_that_they_have_among_all(masked, peak):
    """Where not all of them are scored at once, as on long videos."""
    q, k = randn(2, 4, 200, 16), randn(2, 2, 1024, 16, seed=1)
    k[1, 1, 544:576] += peak * AXIS + randn(32, 16, seed=2)
    keep = None
    if masked:
        keep = torch.ones(2, 1024, dtype=torch.bool)
        keep[1, 100:500], keep[0, 700:710] = False, False
    asked = request(q, k, k, keep, **FINE, sparsity=0.5)
    means = triton_backend._means(asked, None)
    whole = triton_backend._rf_v2_scores(asked, means)
    for b, heads in ((0, slice(0, 2)), (1, slice(0, 2)), (1, slice(2, 4))):
        assert torch.equal(triton_backend._rf_v2_scores(asked, means.of(b, heads, 2))[0], whole[b, heads])


def test_a_spread_whose_square_is_infinite_leaves_others_as_they_are():
    """Times a share of 0 that would be NaN, which is ranked first."""
    q, k = randn(1, 1, 128, 16), randn(1, 1, 512, 16, seed=1)
    q[..., 0] = 0.0
    k[..., 64:96, 1:] *= 0.0
    k[..., 64:80, 0], k[..., 80:96, 0] = 1e10, -1e10
    q[..., 1], k[..., 96:128, 1] = 10.0, 60.0  # its share, beside which that one is 0
    for backend in ("triton", "portable"):
        found = scores_of(backend, q, k)[0, 0, 0]
        assert found.isfinite().all() and found[2] == 0


def test_scores_do_not_depend_on_the_default_dtype():
    q, k = randn(2, 4, 300, 16), randn(2, 2, 700, 16, seed=1)
    expected = [scores_of(backend, q, k) for backend in ("triton", "portable")]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [scores_of(backend, q, k) for backend in ("triton", "portable")]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("gap", [1e4, 1e7, 1e9])
def test_peaks_that_a_wide_mean_has_nothing_of_are_looked_at_closely(gap):
    """Two parts far from all others, and opposite to each other, among the same four; their row has one part."""
    axis = torch.nn.functional.normalize(AXIS + 0.1 * randn(16, seed=4), dim=0)
    for seed in range(6):
        q, k = 0.1 * randn(1, 1, 8, 16, seed=seed) + 10.0 * AXIS, 0.1 * randn(1, 1, 4096, 16, seed=seed + 1)
        k[:, :, 512:544] -= gap * axis + randn(32, 16, seed=5)
        k[:, :, 544:576] += gap * axis + randn(32, 16, seed=6)
        found, expected = (scores_of(backend, q, k, scale=0.1) for backend in ("triton", "portable"))
        assert found.isfinite().all()
        assert found[0, 0, 0].argmax() == expected[0, 0, 0].argmax() == 17


def test_peaks_at_the_end_of_many_keys_are_looked_at_closely():
    """Distances from wide means come in pieces of 16 of them here, and peaks lie in the 33rd."""
    axis = torch.nn.functional.normalize(torch.eye(256)[0] + 0.1 * randn(256, seed=4), dim=0)
    q, k = 0.1 * randn(1, 1, 8, 256), 0.1 * randn(1, 1, (32 * 16 + 1) * 128, 256, seed=1)
    q[..., 0] += 10.0
    k[:, :, -64:-32] -= 1e7 * axis + randn(32, 256, seed=5)
    k[:, :, -32:] += 1e7 * axis + randn(32, 256, seed=6)
    found, expected = (scores_of(backend, q, k, scale=0.1) for backend in ("triton", "portable"))
    assert found.isfinite().all()
    assert found[0, 0, 0].argmax() == expected[0, 0, 0].argmax() == found.shape[3] - 1


@pytest.mark.parametrize("backend", ["portable", "triton"])
def test_others_have_their_shares_beside_a_peak(backend):
    """A peak is kept anyway: the parts of a row that see it say of the other blocks what they would without it."""
    q, k = randn(1, 1, 128, 16), randn(1, 1, 1024, 16, seed=1)
    q[..., 0] = 4.0
    alone = scores_of(backend, q, k)
    k[:, :, 96:128, 0] += 30.0
    beside = scores_of(backend, q, k)
    others = [j for j in range(32) if j // 4 != 0]
    assert (beside[..., 3] > 10 * beside[..., others].amax()).all()
    assert (beside[..., others] > alone[..., others] / 500).all()  # a normaliser of parts would leave exp(-30) of them
    assert torch.equal(beside[..., others].argsort(-1), alone[..., others].argsort(-1))


@pytest.mark.parametrize("backend", ["portable", "triton"])
def test_a_row_does_not_depend_on_rows_beside_it(backend):
    """Some see shares beyond 2^60, and are normalised in another way."""
    q, k = randn(1, 1, 8 * 128, 16), randn(1, 1, 1024, 16, seed=1)
    k[:, :, 96:128, 0] += 100.0
    alone = scores_of(backend, q, k)
    q[:, :, 3 * 128 : 3 * 128 + 8, 0] = 100.0
    beside = scores_of(backend, q, k)
    same = [i for i in range(8) if i != 3]
    assert torch.equal(beside[:, :, same], alone[:, :, same])
    assert not torch.equal(beside[:, :, 3], alone[:, :, 3])


@pytest.mark.parametrize("head_dim", [8, 72, 256])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_means_of_parts_that_one_program_has_are_those_of_parts_alone(dtype, block_size, head_dim):
    """The last parts have fewer tokens, one, or none."""
    for length in (block_size * 3, block_size * 2 + 1, block_size + 20, 5):
        x = randn(2, 3, length, head_dim).to(dtype)
        layout = request(x, x, sparse_type="rf_v2", sparsity=0.5, block_size=block_size).q_layout
        for parts in (1, 4, block_size // 8):
            found = triton_backend.block_means(x, layout, None, parts)
            torch.testing.assert_close(found, block_means(x, layout, None, parts), rtol=1e-5, atol=1e-6)
