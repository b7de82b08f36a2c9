"""One decision: what is explained is what runs, it is made once, and masks know the order they were made for."""

import gc
import itertools

import pytest
import torch

from helpers.inputs import qkv
from rainfusion import (
    TokenLayout,
    block_sparse_attention,
    explain,
    layout,
    pipeline,
    planning,
    predict_mask,
    sparse_attention,
)
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


@pytest.mark.parametrize("has_key_mask", [False, True])
@pytest.mark.parametrize("sparsity", [0.0001, 0.5, (0.9, 0.3, 0.5, 0.99), 1.0])
@pytest.mark.parametrize("exact_budget", [False, True])
@pytest.mark.parametrize("first_frame", ["protected", "keys", "free"])
@pytest.mark.parametrize("text", [0, TXT])
@pytest.mark.parametrize("block_size", [128, 64, (128, 32)])
def test_how_many_blocks_are_kept_is_known_beforehand_or_up_to_the_data(
    block_size, text, first_frame, exact_budget, sparsity, has_key_mask
):
    length = text + 3 * 9 * 13
    q, k, v = qkv(2, 4, length, 8)
    keep = torch.arange(length).expand(2, -1) % 200 > 70 if has_key_mask else None
    options = dict(sparse_type="rf_v2", latent_shape_q=GRID, txt_len=text, first_frame=first_frame)
    options.update(exact_budget=exact_budget, sparsity=sparsity, block_size=block_size)
    mask = predict_mask(q, k, keep, **options)
    _, plan = planning.planned(q, k, v, keep, **options)
    assert plan.blocks == mask.indices.numel()
    if plan.kept_blocks is not None:
        assert plan.kept_blocks == int(mask.counts.sum())
    else:
        assert not exact_budget and (text or first_frame != "free")


def test_how_many_blocks_are_kept_where_values_decide():
    q, k, v = qkv(1, 2, LENGTH, 16)
    for options in (dict(sparse_type="rf_v2", target_error=0.1), dict(sparse_type="ada_bsa", sparsity=0.5)):
        assert planning.planned(q, k, v, **options)[1].kept_blocks is None


def test_plans_of_one_kind_differ_in_the_number_of_blocks_alone():
    q, k, v = qkv(1, 2, LENGTH, 16)

    def kind(**options):
        call = {**VIDEO, "sparsity": 0.5, "backend": "portable", **options}
        return planning.planned(q, k, v, **call)[1].kind

    assert kind() is kind(sparsity=0.7) is kind(sparsity=(0.3, 0.3))
    others = [dict(txt_len=0, latent_shape_q=None), dict(predictor="submeans"), dict(scale=0.2), dict(compensate=True)]
    others += [dict(backend="reference"), dict(sparsity=0.0), dict(sparsity=(0.5, 0.4)), dict(exact_budget=True)]
    kinds = [kind(), *(kind(**other) for other in others)]
    assert len({id(one) for one in kinds}) == len(kinds)


def test_with_a_given_mask_the_sparsity_makes_no_other_kind():
    q, k, v = qkv(1, 2, LENGTH, 16)

    def kind(sparsity, mask, **options):
        inputs = planning.check(q, k, v, mask=mask, input_layout="BNSD")
        return planning.plan(planning.ask_flat(inputs, **VIDEO, sparsity=sparsity, **options), inputs.shapes).kind

    mask = predict_mask(q, k, **VIDEO, sparsity=0.5)
    assert kind(0.5, mask) is kind(0.7, mask) is kind((0.5, 0.4), mask) is kind(0.0, mask)
    kinds = [kind(0.5, mask), kind(0.5, None, backend="portable"), kind(0.5, mask, scale=0.2)]
    assert len({id(one) for one in kinds}) == len(kinds)


@pytest.mark.crossover
def test_a_plan_that_is_dense_is_of_no_sparse_kind():
    """A sparser call of the same shapes may have been recorded: it is not what runs."""
    q, k, v = qkv(1, 1, 256, 16)
    _, plan = planning.planned(q, k, v, sparse_type="rf_v2", sparsity=0.3)
    assert plan.dense_because is not None
    assert plan.kind is plan


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


def test_a_causal_mask_does_not_fit_reordered_tokens():
    q, k, v = qkv(1, 2, LENGTH, 16)
    _, mask = sparse_attention(q, k, v, is_causal=True, return_mask=True)
    for made in (predict_mask(q, k, is_causal=True), mask):
        with pytest.raises(ValueError, match="another order"):
            sparse_attention(q, k, v, **VIDEO, mask=made)
        assert sparse_attention(q, k, v, mask=made).isfinite().all()
    full = predict_mask(q, k)
    assert sparse_attention(q, k, v, **VIDEO, mask=full).isfinite().all()


def test_the_windows_of_an_image_have_one_frame():
    q, k, v = qkv(1, 2, 512, 16)
    image = dict(sparse_type="rf_v2", latent_shape_q=(1, 8, 64))
    mask = predict_mask(q, k, **image, token_order=(2, 8, 8), sparsity=0.5)
    assert sparse_attention(q, k, v, **image, mask=mask).isfinite().all()


def test_a_mask_under_another_default_device():
    q, k, v = qkv(1, 2, LENGTH, 16)
    mask = predict_mask(q, k, **VIDEO, sparsity=0.5)
    with torch.device("meta"):
        out = sparse_attention(q, k, v, **VIDEO, mask=mask)
    assert torch.equal(out, sparse_attention(q, k, v, **VIDEO, mask=mask))


def test_no_mask_where_one_is_needed():
    q, k, v = qkv(1, 2, LENGTH, 16)
    with pytest.raises(TypeError, match=r"mask must be a rainfusion.BlockMask, got NoneType"):
        block_sparse_attention(q, k, v, None)


# --- the caller's modes ----------------------------------------------------------------------------------------------


class NoAttention(torch.overrides.TorchFunctionMode):
    """Somebody else's: answers torch's attention, as libraries do that spread it over devices."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            return torch.zeros_like(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_modes_do_not_see_inside(backend):
    """A protected row is attended by torch's function, which is not the model's call of it."""
    q, k, v = qkv(1, 2, LENGTH, 16)
    call = dict(VIDEO, sparsity=0.5, backend=backend)
    with NoAttention():
        out = sparse_attention(q, k, v, **call)
        mask = predict_mask(q, k, **call)
    assert torch.equal(out, sparse_attention(q, k, v, **call))
    assert torch.equal(mask.indices, predict_mask(q, k, **call).indices)


def test_tangents_are_refused():
    q, k, v = qkv(1, 2, LENGTH, 16)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="q has a tangent"):
        sparse_attention(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v, **VIDEO, sparsity=0.5)


def test_plans_hold_no_layouts_beyond_their_cache():
    """A server sees many lengths of text: plans are small, layouts are not."""

    def alive():
        layout.cached_layout.cache_clear()
        gc.collect()
        return sum(type(thing) is TokenLayout for thing in gc.get_objects())

    before = alive()  # those that other tests left in other caches
    q = torch.zeros(1, 1, 300, 8)
    for text in range(40):
        sparse_attention(q, q, q, sparse_type="rf_v2", sparsity=0.5, txt_len=text, backend="portable")
    assert planning.plan.cache_info().currsize >= 40
    assert alive() - before < 10
