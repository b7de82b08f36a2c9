"""BlockMask: the index structure."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rainfusion import BlockMask


@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 9), st.integers(1, 9), st.integers(0, 2**32))
def test_dense_and_back(batch, heads, rows, columns, seed):
    dense = torch.rand(batch, heads, rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask = BlockMask.from_dense(dense)
    assert torch.equal(mask.to_dense(), dense)
    assert torch.equal(mask.counts, dense.sum(-1).int())
    # FlexAttention's convention: kept blocks ascending, then the others ascending
    assert torch.equal(mask.indices, dense.int().argsort(dim=-1, descending=True, stable=True).int())


@pytest.mark.parametrize(
    ("block_size", "columns", "dtype"),
    [
        (128, 7, torch.int32),
        (64, 7, torch.int32),
        ((128, 64), 7, torch.int16),
        ((128, 32), 32767, torch.int16),
        ((128, 32), 32768, torch.int32),
    ],
)
def test_lists_of_finer_keys_take_half_the_memory(block_size, columns, dtype):
    """Where an int16 counts them; all others stay as they were."""
    dense = torch.rand(1, 2, 3, columns) < 0.4
    mask = BlockMask.from_dense(dense, block_size)
    assert (mask.counts.dtype, mask.indices.dtype) == (torch.int32, dtype)
    assert torch.equal(mask.to_dense(), dense)
    assert torch.equal(mask.indices.int(), BlockMask.from_dense(dense).indices)
    mask.check_values()


def test_either_kind_of_list_is_taken():
    dense = torch.rand(1, 2, 3, 5) < 0.4
    for block_size in (128, (128, 32)):
        mask = BlockMask.from_dense(dense, block_size)
        for indices in (mask.indices.int(), mask.indices.short()):
            given = BlockMask(mask.counts, indices, block_size)
            assert given.indices is indices
            assert torch.equal(given.to_dense(), dense)
            assert given.to("cpu").indices.dtype == indices.dtype


def test_density_counts_blocks():
    assert BlockMask.from_dense(torch.eye(4, dtype=torch.bool)[None, None]).density() == 0.25
    assert BlockMask.from_dense(torch.ones(0, 2, 3, 4, dtype=torch.bool)).density() == 0.0


def test_full_and_causal_masks():
    assert BlockMask.full(1, 2, 300, 500).to_dense().all()
    causal = BlockMask.full(1, 2, 300, 300, is_causal=True)
    assert torch.equal(causal.to_dense()[0, 0], torch.ones(3, 3, dtype=torch.bool).tril())
    assert (causal.q_len, causal.k_len) == (300, 300)


def test_tokens_of_a_ragged_mask():
    mask = BlockMask.from_dense(torch.tensor([[[[True, False], [False, True]]]]))
    tokens = mask.to_dense_tokens(130, 131)
    assert tokens.shape == (1, 1, 130, 131)
    assert tokens[0, 0, 127, 127] and not tokens[0, 0, 127, 128] and tokens[0, 0, 128, 128]


def test_from_dense_accepts_strided_views_and_does_not_write_into_them():
    dense = (torch.rand(6, 5, 3, 2) < 0.5).transpose(0, 3)
    before = dense.clone()
    assert torch.equal(BlockMask.from_dense(dense).to_dense(), before)
    assert torch.equal(dense, before)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: BlockMask.from_dense([[True]]), TypeError, "dense must be a dense torch.Tensor, got list"),
        (lambda: BlockMask.from_dense(torch.ones(1, 1, 2, 2)), TypeError, "dense must be bool"),
        (lambda: BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool)), ValueError, r"\[B, H, NQ, NK\]"),
        (lambda: BlockMask.from_dense(torch.ones(1, 1, 2, 2).bool(), block_size=96), ValueError, "block_size"),
        (lambda: BlockMask(torch.ones(1, 1, 2), torch.ones(1, 1, 2, 2).int()), TypeError, "counts must be int32"),
        (
            lambda: BlockMask(torch.ones(1, 1, 2).short(), torch.ones(1, 1, 2, 2).int()),
            TypeError,
            "counts must be int32,",
        ),
        (
            lambda: BlockMask(torch.ones(1, 1, 2).int(), torch.ones(1, 1, 2, 2)),
            TypeError,
            "indices must be int32 or int16",
        ),
        (
            lambda: BlockMask(torch.ones(1, 1, 1).int(), torch.ones(1, 1, 1, 32768).short(), (128, 32)),
            ValueError,
            "indices must be int32 for 32768 key blocks",
        ),
        (lambda: BlockMask(torch.ones(1, 1, 3).int(), torch.ones(1, 1, 2, 2).int()), ValueError, "must match"),
        (
            lambda: BlockMask(torch.ones(1, 1, 2).int(), torch.ones(1, 1, 2, 2).int(), q_len=1000),
            ValueError,
            "q_len=1000",
        ),
    ],
)
def test_a_wrong_mask_says_what_is_wrong(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_repr_is_short():
    assert repr(BlockMask.full(1, 2, 300, 500)) == (
        "BlockMask(batch=1, heads=2, blocks=3x4, block_size=128, q_len=300, k_len=500, device=cpu)"
    )
