"""One decision: what is explained is what runs, it is made once, and masks know the order they were made for."""

import itertools

import pytest
import torch

from helpers.inputs import qkv
from rainfusion import TokenLayout, block_sparse_attention, explain, pipeline, planning, predict_mask, sparse_attention
from rainfusion.calls import Attended

GRID, TXT = (3, 9, 13), 21
LENGTH = TXT + 3 * 9 * 13
VIDEO = dict(sparse_type="rf_v2", latent_shape_q=GRID, txt_len=TXT)


@pytest.mark.crossover
@pytest.mark.parametrize("tokens", [60, 300, 4096])
@pytest.mark.parametrize("sparse_type", [None, "rf_v2", "ada_bsa"])
def test_what_is_explained_is_what_runs(tokens, sparse_type, monkeypatch):
    q = torch.zeros(1, 2, tokens, 16)
    keep = torch.ones(1, tokens, dtype=torch.bool)
    ran = []
    monkeypatch.setattr(
        pipeline, "attend", lambda inputs, plan: (ran.append(str(plan)), Attended(inputs.q, inputs.q[..., 0], None))[1]
    )
    flags = itertools.product([0.0, 0.9], [None, keep], [False, True], [False, True], ["auto", "portable", "reference"])
    for sparsity, attn_mask, lse, mask, backend in flags:
        call = dict(sparse_type=sparse_type, sparsity=sparsity, return_lse=lse, return_mask=mask, backend=backend)
        words = explain(q, q, q, attn_mask, **call)
        sparse_attention(q, q, q, attn_mask, **call)
        assert ran.pop() == words


def test_a_plan_is_made_once_for_a_layers_shapes(monkeypatch):
    from rainfusion.prediction import budgets

    made = []
    numbers = budgets.numbers
    monkeypatch.setattr(budgets, "numbers", lambda *args: (made.append(args), numbers(*args))[1])
    planning.plan.cache_clear()
    for seed in range(3):
        q, k, v = qkv(1, 2, LENGTH, 16, seed=seed)
        sparse_attention(q, k, v, **VIDEO, sparsity=0.5)
        sparse_attention(q, k, v, torch.ones(1, LENGTH, dtype=torch.bool), **VIDEO, sparsity=0.5)
    assert len(made) == 2  # with a key mask and without


# --- masks and orders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        dict(first_frame="free"),
        dict(first_frame="keys"),
        dict(token_order="mindiesd"),
        dict(token_order="raster"),
        dict(token_order=(8, 4, 4)),
        dict(txt_len=TXT + 9 * 13, latent_shape_q=(2, 9, 13)),
        dict(latent_shape_q=None, txt_len=0),
        dict(latent_shape_q=None, txt_len=0, video_spans=[{"start": 0, "latent_shape": GRID}]),
    ],
    ids=str,
)
def test_a_mask_for_another_order_is_refused(made):
    q, k, v = qkv(1, 2, LENGTH, 16)
    mask = predict_mask(q, k, **{**VIDEO, **made}, sparsity=0.5)
    with pytest.raises(ValueError, match=r"mask was made for another order of [qk]'s tokens: .*; this call has "):
        sparse_attention(q, k, v, **VIDEO, mask=mask)
    assert sparse_attention(q, k, v, **{**VIDEO, **made}, mask=mask).isfinite().all()


@pytest.mark.parametrize(
    ("made", "used"),
    [
        (dict(token_order=(2, 8, 8)), dict()),
        (dict(predictor="submeans", compensate=True), dict()),
        (
            dict(latent_shape_q=(1, 27, 13), first_frame="free"),
            dict(latent_shape_q=(1, 27, 13), first_frame="protected"),
        ),
        (
            dict(latent_shape_q=None, txt_len=0, video_spans=[{"start": TXT, "latent_shape": GRID}]),
            dict(),
        ),
    ],
    ids=str,
)
def test_the_same_order_in_other_words_is_accepted(made, used):
    q, k, v = qkv(1, 2, LENGTH, 16)
    mask = predict_mask(q, k, **{**VIDEO, **made}, sparsity=0.5)
    out = sparse_attention(q, k, v, **{**VIDEO, **used}, mask=mask)
    assert torch.equal(out, sparse_attention(q, k, v, **{**VIDEO, **made, "compensate": False}, mask=mask))


@pytest.mark.parametrize("first_frame", ["protected", "free"])
def test_tokens_reordered_by_hand(first_frame):
    """`TokenLayout.build` knows every order that a call has, and `block_sparse_attention` takes what it is given."""
    q, k, v = qkv(1, 2, LENGTH, 16)
    out, mask = sparse_attention(q, k, v, **VIDEO, sparsity=0.5, first_frame=first_frame, return_mask=True)
    layout = TokenLayout.build(LENGTH, GRID, TXT, first_frame=first_frame)
    by_hand = layout.restore(block_sparse_attention(*(layout.reorder(x) for x in (q, k, v)), mask))
    torch.testing.assert_close(by_hand, out)


def test_masks_keep_their_order_on_the_way():
    q, k, v = qkv(1, 2, LENGTH, 16)
    _, mask = sparse_attention(q, k, v, **VIDEO, sparsity=0.5, first_frame="free", return_mask=True)
    with pytest.raises(ValueError, match="another order"):
        sparse_attention(q, k, v, **VIDEO, mask=mask.to("cpu"))
