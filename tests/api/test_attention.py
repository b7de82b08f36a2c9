"""Outputs and LSE against float64 attention, over dtypes, layouts, strides, masks and shapes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.accuracy import EPS, error
from helpers.fuzz import examples
from helpers.inputs import qkv
from rainfusion import BlockMask, TokenLayout, block_sparse_attention, predict_mask, sparse_attention
from rainfusion.backends import portable

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BACKENDS = ["reference", "portable"]

VIDEO = dict(sparse_type="rf_v2", sparsity=0.7, latent_shape_q=[4, 9, 16], latent_shape_k=[4, 9, 16], txt_len=31)
VIDEO_LEN = 4 * 9 * 16 + 31


def token_mask(mask, q_len, k_len, **layout):
    """The mask of a call, in the caller's token order."""
    size = mask.block_size
    latent_q, latent_k = layout.get("latent_shape_q"), layout.get("latent_shape_k")
    rest = layout.get("txt_len", 0), layout.get("video_spans"), layout.get("token_order", "window"), size
    order_q, _ = oracle.layout(q_len, latent_q, *rest)
    order_k, _ = oracle.layout(k_len, latent_k, *rest)
    return oracle.expand(mask.to_dense(), order_q, order_k, size)


def assert_as_good_as_sdpa(out, q, k, v, tokens, exact, attn_mask=None):
    """No worse than 1.5x what torch's own attention loses in this dtype on the same problem.

    The floor: the last bit of a half-precision output; in fp32, what a sum of hundreds of terms of both signs moves
    when it is taken in another order; in fp64 the exact result is no more exact itself.
    """
    floor = EPS[q.dtype] * {torch.float32: 8, torch.float64: 32}.get(q.dtype, 1)
    bias = torch.zeros(tokens.shape, dtype=q.dtype).masked_fill(~tokens, -math.inf)
    if attn_mask is not None:
        bias = bias + attn_mask.to(q.dtype)
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert error(out, exact) <= 1.5 * max(error(dense, exact), floor)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 24, 64, 128, 160])
def test_error_is_within_what_dense_attention_loses(backend, dtype, dim):
    q, k, v = qkv(2, 2, VIDEO_LEN, dim, dtype=dtype)
    out, lse, mask = sparse_attention(q, k, v, **VIDEO, backend=backend, return_lse=True, return_mask=True)
    tokens = token_mask(mask, VIDEO_LEN, VIDEO_LEN, **VIDEO)
    exact, exact_lse = oracle.attention(q, k, v, tokens)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_as_good_as_sdpa(out, q, k, v, tokens, exact)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_products_stay_close(dtype, monkeypatch):
    """inner_precise=1 off a CPU: products in half precision; p and the logits are rounded to the dtype once each."""
    monkeypatch.setattr(portable, "_compute_dtype", lambda q, inner_precise: q.dtype)
    q, k, v = qkv(1, 2, VIDEO_LEN, 64, dtype=dtype)
    out, mask = sparse_attention(q, k, v, **VIDEO, inner_precise=1, return_mask=True)
    exact, _ = oracle.attention(q, k, v, token_mask(mask, VIDEO_LEN, VIDEO_LEN, **VIDEO))
    assert error(out, exact) <= 4 * EPS[dtype]


@st.composite
def calls(draw):
    """Any call: lengths that are multiples of nothing, GQA, key masks, spans, every strategy."""
    txt, spans, latent_q, latent_k = 0, None, None, None
    q_len, k_len = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    strategy = draw(st.sampled_from(["rf_v2", "grid", "spans", "ada_bsa", None]))
    grid = st.tuples(st.integers(1, 4), st.integers(1, 11), st.integers(1, 11))
    kwargs = dict(sparsity=draw(st.sampled_from([0.2, 0.6, 0.9, 1.0])))
    if strategy == "grid":
        txt, latent_q, latent_k = draw(st.sampled_from([0, 3, 140])), draw(grid), draw(grid)
        q_len, k_len = txt + math.prod(latent_q), txt + math.prod(latent_k)
        kwargs.update(latent_shape_q=latent_q, latent_shape_k=latent_k, txt_len=txt)
    if strategy == "spans":
        first, second = draw(grid), draw(grid)
        gap = draw(st.integers(0, 150))
        spans = [
            {"start": gap, "latent_shape": first},
            {"start": gap + math.prod(first) + gap // 2, "latent_shape": second},
        ]
        q_len = k_len = spans[1]["start"] + math.prod(second) + draw(st.sampled_from([0, 50]))
        kwargs.update(video_spans=spans)
    if strategy in ("rf_v2", "grid", "spans"):
        kwargs.update(
            sparse_type="rf_v2",
            block_size=draw(st.sampled_from([64, 128])),
            token_order=draw(st.sampled_from(["window", "raster", "mindiesd"])),
        )
    else:
        causal = draw(st.booleans())
        k_len = q_len if causal else k_len
        kwargs.update(sparse_type=strategy, is_causal=causal, cdf_threshold=draw(st.sampled_from([0.5, 1.0])))
    return dict(
        shape=(draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4])), q_len, draw(st.sampled_from([1, 7, 32]))),
        k_len=k_len,
        k_heads=draw(st.sampled_from([1, None])),
        mask=draw(st.sampled_from([None, "bool", "float"])),
        layout=draw(st.sampled_from(["BNSD", "BSND"])),
        backend=draw(st.sampled_from(["auto", *BACKENDS])),
        kwargs=kwargs,
        seed=draw(st.integers(0, 2**20)),
    )


@settings(max_examples=examples(200))
@given(calls())
def test_any_call_agrees_with_float64_attention(call):
    q, k, v = qkv(*call["shape"], seed=call["seed"], k_heads=call["k_heads"], k_len=call["k_len"])
    attn_mask = None
    if call["mask"] is not None:
        attn_mask = torch.rand(q.shape[0], call["k_len"]) < 0.5
        if call["mask"] == "float":
            attn_mask = torch.randn(q.shape[0], 1, 1, call["k_len"]).masked_fill(~attn_mask[:, None, None], -1e9)
    kwargs = call["kwargs"]
    before = [x.clone() for x in (q, k, v)]
    inputs = [x.transpose(1, 2) if call["layout"] == "BSND" else x for x in (q, k, v)]
    out, lse, mask = sparse_attention(
        *inputs, attn_mask, input_layout=call["layout"], backend=call["backend"], return_lse=True, return_mask=True,
        **kwargs,
    )  # fmt: skip
    out = out.transpose(1, 2) if call["layout"] == "BSND" else out
    tokens = token_mask(mask, q.shape[2], k.shape[2], **kwargs)
    exact, exact_lse = oracle.attention(q, k, v, tokens, attn_mask, causal=kwargs.get("is_causal", False))
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True)), "an input was modified"


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_rows_are_attended_in_pieces(backend):
    """80 key blocks a row: several pieces of the portable backend, with a ragged end and mixed counts."""
    k_len = 79 * 128 + 5
    q, k, v = qkv(1, 2, 300, 16, k_len=k_len)
    dense = torch.rand(1, 2, 3, 80) < torch.tensor([0.05, 0.6, 1.1])[:, None]
    dense[..., -1] = True
    mask = BlockMask.from_dense(dense)
    k[0, 0, 8000] *= 50  # the running maximum moves in a late piece
    out, lse = block_sparse_attention(q, k, v, mask, backend=backend, return_lse=True)
    exact, exact_lse = oracle.attention(q, k, v, mask.to_dense_tokens(300, k_len))
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_block_are_zero(backend):
    q, k, v = qkv(1, 2, 300, 8)
    dense = torch.zeros(1, 2, 3, 3, dtype=torch.bool)
    dense[0, 0, 1, 2] = True
    out, lse = block_sparse_attention(q, k, v, BlockMask.from_dense(dense), backend=backend, return_lse=True)
    assert (out[0, 0, :128] == 0).all()
    assert (out[0, 1] == 0).all()
    assert torch.isneginf(lse[0, 1]).all()
    assert (out[0, 0, 128:256] != 0).any()


@pytest.mark.parametrize("kwargs", [{}, dict(backend="portable"), dict(backend="reference"), dict(return_lse=True),
                                    dict(sparse_type="rf_v2", sparsity=0.5), dict(sparse_type="ada_bsa"),
                                    dict(is_causal=True), dict(sparse_type="ada_bsa", is_causal=True)])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_fully_masked_elements_give_zeros_and_removed_keys_may_hold_nan(kwargs, dtype):
    q, k, v = qkv(3, 2, 200, 16, dtype=dtype)
    keep = torch.ones(3, 200, dtype=torch.bool)
    keep[0] = False
    keep[1, 100:] = False
    k, v = (x.masked_fill(~keep[:, None, :, None], math.nan) for x in (k, v))
    for attn_mask in (keep, torch.zeros(3, 1, 1, 200, dtype=dtype).masked_fill(~keep[:, None, None], -math.inf)):
        out = sparse_attention(q, k, v, attn_mask, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        assert (out[0] == 0).all()
        assert out.isfinite().all()
        assert (out[1] != 0).any()


@pytest.mark.parametrize("order", ["window", "raster", "mindiesd", (2, 8, 8)])
@pytest.mark.parametrize("sparsity", [0.5, 0.9, 1.0])
def test_first_frame_and_text_stay_exact_at_any_sparsity(order, sparsity):
    grid, txt = [5, 16, 24], 128
    q, k, v = qkv(1, 2, math.prod(grid) + txt, 32, dtype=torch.float64)
    out = sparse_attention(
        q, k, v, sparse_type="rf_v2", sparsity=sparsity, txt_len=txt, latent_shape_q=grid, token_order=order
    )
    dense = F.scaled_dot_product_attention(q, k, v)
    exact = slice(0, txt + 16 * 24)
    torch.testing.assert_close(out[:, :, exact], dense[:, :, exact])
    assert not torch.allclose(out[:, :, txt + 16 * 24 :], dense[:, :, txt + 16 * 24 :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kwargs", [{}, dict(latent_shape_q=[3, 8, 10], txt_len=16), dict(return_lse=True),
                                    dict(backend="portable", latent_shape_q=[3, 8, 10], txt_len=16)])  # fmt: skip
def test_sparsity_0_is_dense_attention_to_the_last_bit(dtype, kwargs):
    q, k, v = qkv(2, 4, 256, 32, dtype=dtype, k_heads=2)
    keep = torch.rand(2, 256) < 0.8
    plain = {name: value for name, value in kwargs.items() if name in ("return_lse", "backend")}
    for attn_mask in (None, keep):
        sparse = sparse_attention(q, k, v, attn_mask, sparse_type="rf_v2", sparsity=0.0, **kwargs)
        dense = sparse_attention(q, k, v, attn_mask, **plain)
        if "return_lse" in kwargs:
            assert torch.equal(sparse[1], dense[1])
            sparse, dense = sparse[0], dense[0]
        assert torch.equal(sparse, dense)
    if not kwargs:
        assert torch.equal(sparse_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("kwargs", [VIDEO, dict(sparse_type="ada_bsa", sparsity=0.5, cdf_threshold=0.9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_elements_are_independent_to_the_last_bit(kwargs, dtype):
    q, k, v = qkv(3, 2, VIDEO_LEN, 32, dtype=dtype)
    keep = torch.rand(3, VIDEO_LEN) < 0.8
    together = sparse_attention(q, k, v, keep, **kwargs, return_lse=True)
    for b in range(3):
        alone = sparse_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], keep[b : b + 1], **kwargs, return_lse=True)
        assert torch.equal(together[0][b], alone[0][0])
        assert torch.equal(together[1][b], alone[1][0])


@pytest.mark.parametrize("kwargs", [VIDEO, dict(sparse_type="rf_v2", sparsity=0.5), dict(sparse_type="ada_bsa")])
def test_both_layouts_agree_to_the_last_bit(kwargs):
    q, k, v = qkv(2, 4, VIDEO_LEN, 32, k_heads=2)
    bnsd, lse, mask = sparse_attention(q, k, v, **kwargs, return_lse=True, return_mask=True)
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    bsnd, lse2, mask2 = sparse_attention(*swapped, input_layout="BSND", **kwargs, return_lse=True, return_mask=True)
    assert bsnd.shape == swapped[0].shape
    assert bsnd.is_contiguous()
    assert torch.equal(bsnd.transpose(1, 2), bnsd)
    assert torch.equal(lse, lse2)
    assert torch.equal(mask.indices, mask2.indices)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend):
    q, k, v = qkv(2, 4, VIDEO_LEN, 16)
    expected = sparse_attention(q, k, v, **VIDEO, backend=backend)
    fused = torch.cat([q, k, v], -1)  # q, k and v as slices of one tensor
    sliced = fused.split(16, -1)
    reversed_in_memory = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]
    padded = [F.pad(x, (3, 5, 2, 7))[:, :, 2:-7, 3:-5] for x in (q, k, v)]
    for inputs in (sliced, reversed_in_memory, padded):
        assert torch.equal(sparse_attention(*inputs, **VIDEO, backend=backend), expected)
    expanded = [x[:1, :1].expand(2, 4, -1, -1) for x in (q, k, v)]  # stride 0
    copied = [x.contiguous() for x in expanded]
    kwargs = dict(VIDEO, backend=backend)
    assert torch.equal(sparse_attention(*expanded, **kwargs), sparse_attention(*copied, **kwargs))


def test_two_runs_are_equal_to_the_last_bit():
    q, k, v = qkv(2, 4, VIDEO_LEN, 32, dtype=torch.bfloat16)
    assert torch.equal(sparse_attention(q, k, v, **VIDEO), sparse_attention(q, k, v, **VIDEO))


@pytest.mark.parametrize("shape", [(0, 2, 300, 8), (2, 2, 0, 8), (2, 0, 300, 8)])
@pytest.mark.parametrize("sparse_type", [None, "rf_v2", "ada_bsa"])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_empty_inputs_give_empty_outputs(shape, sparse_type, backend):
    q = torch.randn(shape)
    out, lse, mask = sparse_attention(
        q, q, q, sparse_type=sparse_type, sparsity=0.5, backend=backend, return_lse=True, return_mask=True
    )
    assert out.shape == shape
    assert lse.shape == shape[:3]
    blocks = -(-shape[2] // 128)
    assert mask.indices.shape == (shape[0], shape[1], blocks, blocks)


@pytest.mark.parametrize("sparse_type", [None, "rf_v2", "ada_bsa"])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_no_keys_at_all_give_zeros(sparse_type, backend):
    q, k = torch.randn(2, 2, 300, 8), torch.randn(2, 2, 0, 8)
    out = sparse_attention(q, k, k, sparse_type=sparse_type, sparsity=0.5, backend=backend)
    assert torch.equal(out, torch.zeros_like(q))
    _, lse = sparse_attention(q, k, k, sparse_type=sparse_type, sparsity=0.5, backend=backend, return_lse=True)
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("kwargs", [VIDEO, dict(sparse_type="rf_v2", sparsity=0.7, block_size=64),
                                    dict(sparse_type="ada_bsa", sparsity=0.5, is_causal=True)])  # fmt: skip
def test_a_predicted_mask_can_be_used_again(kwargs):
    q, k, v = qkv(1, 2, VIDEO_LEN, 16)
    mask = predict_mask(q, k, **kwargs)
    expected, returned = sparse_attention(q, k, v, **kwargs, return_mask=True)
    assert torch.equal(mask.indices, returned.indices)
    assert torch.equal(mask.counts, returned.counts)
    again, same = sparse_attention(q, k, v, **{**kwargs, "sparsity": 0.0}, mask=mask, return_mask=True)
    assert torch.equal(again, expected)
    assert same is mask


def test_a_mask_works_without_a_strategy_and_equals_block_sparse_attention():
    q, k, v = qkv(1, 2, 500, 16)
    mask = predict_mask(q, k, sparse_type="rf_v2", sparsity=0.6)
    expected = block_sparse_attention(q, k, v, mask)
    assert torch.equal(sparse_attention(q, k, v, mask=mask), expected)


def test_block_sparse_attention_is_sparse_attention_without_the_reordering():
    """What a rank of a parallel run does by hand: reorder, predict, attend, restore."""
    q, k, v = qkv(1, 2, VIDEO_LEN, 16)
    layout = TokenLayout.build(VIDEO_LEN, latent_shape=[4, 9, 16], txt_len=31)
    mask = predict_mask(q, k, **VIDEO)
    out, lse = block_sparse_attention(*(layout.reorder(x) for x in (q, k, v)), mask, return_lse=True)
    expected, expected_lse = sparse_attention(q, k, v, **VIDEO, return_lse=True)
    assert torch.equal(layout.restore(out), expected)
    assert torch.equal(lse[..., layout.inverse], expected_lse)


def test_parts_of_the_keys_merge_by_lse():
    """Two halves of the key blocks, merged with their LSE, are the whole: what ring attention relies on."""
    q, k, v = qkv(1, 2, 700, 16, dtype=torch.float64)
    dense = predict_mask(q, k, sparse_type="rf_v2", sparsity=0.3).to_dense()
    whole, whole_lse = block_sparse_attention(q, k, v, BlockMask.from_dense(dense), return_lse=True)
    left = torch.zeros_like(dense)
    left[..., :3] = True
    parts = [block_sparse_attention(q, k, v, BlockMask.from_dense(dense & side), return_lse=True)
             for side in (left, ~left)]  # fmt: skip
    lse = torch.stack([part[1] for part in parts])
    weights = lse.softmax(0).unsqueeze(-1)
    torch.testing.assert_close(
        sum(w * part[0] for w, part in zip(weights, parts, strict=True)), whole, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(lse.logsumexp(0), whole_lse)


def test_causal_with_a_key_mask_is_both():
    q, k, v = qkv(2, 2, 300, 16)
    keep = torch.rand(2, 300) < 0.7
    out = sparse_attention(q, k, v, keep, is_causal=True)
    exact, _ = oracle.attention(q, k, v, torch.ones(2, 2, 300, 300).bool(), keep, causal=True)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)


def test_cross_attention_with_one_grid():
    """Only q has a grid and the lengths differ: k keeps its order, its text in front."""
    q, k, v = qkv(1, 2, 600 + 20, 16, k_len=333)
    out, mask = sparse_attention(
        q, k, v, sparse_type="rf_v2", sparsity=0.5, latent_shape_q=[3, 10, 20], txt_len=20, return_mask=True
    )
    tokens = token_mask(mask, 620, 333, latent_shape_q=[3, 10, 20], txt_len=20)
    torch.testing.assert_close(out.double(), oracle.attention(q, k, v, tokens)[0], atol=1e-5, rtol=1e-4)
    assert mask.to_dense()[..., 0].all()


def test_huge_logits_do_not_overflow():
    q, k, v = qkv(1, 1, 300, 16, dtype=torch.float16)
    out = sparse_attention(q * 200, k * 200, v, sparse_type="rf_v2", sparsity=0.5)
    assert out.isfinite().all()


@pytest.mark.parametrize("rows", [1, 3])
def test_the_way_of_other_devices_agrees(rows, monkeypatch):
    """Off a CPU each row is one call of torch's attention over gathered keys; run that way here too."""
    by_hand = portable._worker

    def worker(slab, workspace_bytes):
        if slab.fused:
            return portable._Worker(portable._attend_gathered, lambda count: rows)
        return by_hand(slab, workspace_bytes)

    q, k, v = qkv(2, 4, VIDEO_LEN, 16, k_heads=2)
    keep = torch.rand(2, VIDEO_LEN) < 0.5
    keep[0, :400] = False  # blocks without a key
    masks = (None, keep, torch.randn(2, VIDEO_LEN).masked_fill(~keep, -1e4))
    empty_rows = BlockMask.from_dense(torch.rand(2, 4, 5, 5) < 0.3)
    for attn_mask in masks:
        for kwargs in (VIDEO, dict(mask=empty_rows), dict(sparse_type="ada_bsa", sparsity=0.5, is_causal=True)):
            expected = sparse_attention(q, k, v, attn_mask, **kwargs)
            with monkeypatch.context() as patch:
                patch.setattr(portable, "_worker", worker)
                torch.testing.assert_close(sparse_attention(q, k, v, attn_mask, **kwargs), expected)
