"""Memory beyond inputs and output stays bounded."""

import pytest
import torch

from helpers.memory import extra_bytes
from helpers.planned import request
from rainfusion import BlockMask, predict_mask
from rainfusion.backends import portable
from rainfusion.prediction import stages
from rainfusion.slabs import even_slabs

pytestmark = pytest.mark.timeout(1800)  # processes of their own, with large inputs

MB = 2**20
QKV = "q, k, v = (torch.randn({shape}) for _ in range(3))"


def output_bytes(*shape):
    return 4 * torch.Size(shape).numel()


@pytest.mark.parametrize("grid", ["", ", latent_shape_q=[16, 32, 64]"])
def test_a_long_sequence_stays_under_its_bound(grid):
    """1x4x32768x128 fp32 at sparsity 0.8, whole call: 67 MB a tensor, 17 GB for a matrix of all logits."""
    shape = (1, 4, 32768, 128)
    call = f"rainfusion.sparse_attention(q, k, v, sparse_type='rf_v2', sparsity=0.8{grid})"
    extra = extra_bytes(QKV.format(shape=shape), call) - output_bytes(*shape)
    assert extra < 400 * MB  # the promise is 1.5 GB


def test_compensating_a_long_sequence_of_one_head_stays_under_its_bound():
    """75600 tokens: logits between all queries and all means of blocks would be 179 MB a copy, of which it had four."""
    shape = (1, 1, 75600, 32)
    call = "rainfusion.sparse_attention(q, k, v, sparse_type='rf_v2', sparsity=0.97, compensate=True, predictor='mean')"
    extra = extra_bytes(QKV.format(shape=shape), call) - output_bytes(*shape)
    assert extra < 250 * MB


def test_ada_bsa_predicts_a_long_sequence_in_chunks():
    """32768 tokens, 8 heads: all sampled logits at once would be 537 MB a copy."""
    call = "rainfusion.predict_mask(q, k, sparse_type='ada_bsa', sparsity=0.8, cdf_threshold=0.9)"
    assert extra_bytes(QKV.format(shape=(1, 8, 32768, 128)), call) < 500 * MB  # the promise is 2 GB


def test_the_workspace_is_a_parameter(monkeypatch):
    """With next to none, one head and one row at a time; the results do not depend on it."""
    q, k, v = torch.randn(3, 1, 4, 2000, 32).unbind()
    mask = BlockMask.from_dense(torch.rand(1, 4, 16, 16) < 0.4)
    asked = request(q, k, v, mask=mask, scale=0.2, return_lse=True)
    attend_slab, seen = portable._attend_slab, []

    def spy(slab, worker, workspace_bytes):
        seen.append((slab.q.shape[0], worker.rows(1)))
        return attend_slab(slab, worker, workspace_bytes)

    monkeypatch.setattr(portable, "_attend_slab", spy)
    wide, wide_lse = portable.attend_kept(asked, mask)
    assert seen == [(4, min(4 * 16, 2 * torch.get_num_threads()))]
    seen.clear()
    tight, tight_lse = portable.attend_kept(asked, mask, workspace_bytes=1)
    assert seen == [(1, 1)] * 4
    torch.testing.assert_close(tight, wide)
    torch.testing.assert_close(tight_lse, wide_lse)


@pytest.mark.parametrize("kwargs", [dict(sparse_type="rf_v2"), dict(sparse_type="ada_bsa", cdf_threshold=0.9)])
def test_masks_do_not_depend_on_how_many_heads_are_ranked_at_once(kwargs, monkeypatch):
    q, k = torch.randn(2, 2, 6, 1000, 16).unbind()
    keep = torch.rand(2, 1000) < 0.5
    at_once = predict_mask(q, k, keep, sparsity=0.6, **kwargs)
    monkeypatch.setattr(stages, "_SELECTION_BYTES", 1)
    one_by_one = predict_mask(q, k, keep, sparsity=0.6, **kwargs)
    assert torch.equal(at_once.counts, one_by_one.counts)
    assert torch.equal(at_once.indices, one_by_one.indices)


@pytest.mark.parametrize(
    ("heads", "each", "space", "together", "sizes"),
    [
        (40, 10, 400, 1, [40]),
        (40, 10, 399, 1, [20, 20]),
        (40, 10, 130, 1, [10, 10, 10, 10]),
        (7, 10, 30, 1, [3, 3, 1]),
        (12, 10, 70, 4, [4, 4, 4]),
        (3, 10, 1, 1, [1, 1, 1]),
        (3, 0, 0, 1, [1, 1, 1]),
        (0, 10, 10, 1, []),
    ],
)
def test_slabs_of_like_size(heads, each, space, together, sizes):
    slabs = list(even_slabs(heads, each, space, together))
    assert [slab.stop - slab.start for slab in slabs] == sizes
    assert [i for slab in slabs for i in range(slab.start, slab.stop)] == list(range(heads))


def test_the_measurement_sees_memory():
    assert 90 * MB < extra_bytes("", "(torch.ones(25 * 2**20), None)[1]") < 150 * MB
