"""Bad input: ValueError or TypeError, before any work, with the argument's name, what came and what is allowed."""

import math

import numpy as np
import pytest
import torch

import rainfusion.backends.portable
from rainfusion import BlockMask, TokenLayout, block_sparse_attention, predict_mask, sparse_attention

RF = {"sparse_type": "rf_v2", "sparsity": 0.5}
SPAN = {"start": 0, "latent_shape": [1, 4, 4]}


def tensors(length=48, heads=4, k_heads=4, k_len=None):
    q = torch.randn(2, heads, length, 8)
    k = torch.randn(2, k_heads, length if k_len is None else k_len, 8)
    return q, k, k.clone()


BAD_KEYWORDS = [
    # name that the message must hold, what else it must say, keywords
    ("sparse_type", "'rf_v4'", dict(sparse_type="rf_v4")),
    ("sparse_type", "3", dict(sparse_type=3)),
    ("input_layout", "'BSH'", dict(input_layout="BSH")),
    ("backend", "'cuda'", dict(backend="cuda")),
    ("backend", "None", dict(backend=None)),
    ("precision", "'fp4'", dict(precision="fp4")),
    ("precision", "'fp8'", dict(precision="fp8", **RF)),
    ("precision", "'int8'", dict(precision="int8")),
    ("inner_precise", "2", dict(inner_precise=2)),
    ("block_size", "96", dict(block_size=96)),
    ("block_size", "128.0", dict(block_size=128.0)),
    ("block_size", "64", dict(block_size=64, sparse_type="ada_bsa")),
    ("sparsity", "-0.1", dict(sparse_type="rf_v2", sparsity=-0.1)),
    ("sparsity", "1.5", dict(sparsity=1.5)),
    ("sparsity", "nan", dict(sparsity=math.nan)),
    ("sparsity", "'0.5'", dict(sparsity="0.5")),
    ("sparsity", "True", dict(sparsity=True)),
    ("scale", "inf", dict(scale=math.inf)),
    ("scale", "nan", dict(scale=math.nan)),
    ("scale", "'1'", dict(scale="1")),
    ("is_causal", "1", dict(is_causal=1)),
    ("is_causal", "rf_v2", dict(is_causal=True, **RF)),
    ("is_causal", "rf_v2", dict(is_causal=True, sparse_type="rf_v2")),
    ("head_num", "5", dict(head_num=5)),
    ("head_num", "4.0", dict(head_num=4.0)),
    ("keep_sink", "1", dict(keep_sink=1, sparse_type="ada_bsa")),
    ("keep_recent", "None", dict(keep_recent=None)),
    ("cdf_threshold", "0.0", dict(cdf_threshold=0.0, sparse_type="ada_bsa")),
    ("cdf_threshold", "1.1", dict(cdf_threshold=1.1)),
    ("cdf_threshold", "nan", dict(cdf_threshold=math.nan)),
    ("txt_len", "-1", dict(txt_len=-1)),
    ("txt_len", "49", dict(txt_len=49, **RF)),
    ("txt_len", "4.0", dict(txt_len=4.0)),
    ("txt_len", "True", dict(txt_len=True)),
    ("latent_shape_q", "0", dict(latent_shape_q=[3, 0, 4])),
    ("latent_shape_q", "4.0", dict(latent_shape_q=[3, 4.0, 4])),
    ("latent_shape_q", "[3, 16]", dict(latent_shape_q=[3, 16])),
    ("latent_shape_q", "48", dict(latent_shape_q=48)),
    ("latent_shape_q", "3*4*5 = 60", dict(latent_shape_q=[3, 4, 5], **RF)),
    ("latent_shape_k", "48 tokens", dict(latent_shape_k=[3, 4, 5], **RF)),
    ("latent_shape_q", "2 + 3*4*4 = 50", dict(latent_shape_q=[3, 4, 4], txt_len=2, **RF)),
    ("latent_shape_q", "'344'", dict(latent_shape_q="344")),
    ("token_order", "'hilbert'", dict(token_order="hilbert")),
    ("token_order", "(4, 4, 4)", dict(token_order=(4, 4, 4))),
    ("token_order", "3", dict(token_order=3)),
    ("token_order", "0", dict(token_order=(0, 8, 16))),
    ("video_spans", "empty", dict(video_spans=[], **RF)),
    ("video_spans", "list", dict(video_spans=SPAN, **RF)),
    ("video_spans[0]", "'x'", dict(video_spans=["x"], **RF)),
    ("video_spans[0]", "latent_shape", dict(video_spans=[{"start": 0}], **RF)),
    ("video_spans[0]", "end", dict(video_spans=[{**SPAN, "end": 3}], **RF)),
    ("video_spans[0]['start']", "-1", dict(video_spans=[{**SPAN, "start": -1}], **RF)),
    ("video_spans[0]['latent_shape']", "[1, 4]", dict(video_spans=[{"start": 0, "latent_shape": [1, 4]}], **RF)),
    ("video_spans", "disjoint", dict(video_spans=[SPAN, {**SPAN, "start": 15}], **RF)),
    ("video_spans", "order", dict(video_spans=[{**SPAN, "start": 20}, SPAN], sparse_type="ada_bsa")),
    ("video_spans", "= 56", dict(video_spans=[SPAN, {**SPAN, "start": 40}], **RF)),
    ("video_spans", "txt_len", dict(video_spans=[SPAN], txt_len=1, **RF)),
    ("video_spans", "latent_shape", dict(video_spans=[SPAN], latent_shape_k=[3, 4, 4], **RF)),
    ("return_lse", "1", dict(return_lse=1)),
    ("return_mask", "None", dict(return_mask=None)),
    ("mask", "Tensor", dict(mask=torch.ones(2, 4, 1, 1).bool())),
    ("mask", "blocks of 64", dict(mask=BlockMask.full(2, 4, 48, 48, block_size=64), **RF)),
    ("mask", "48", dict(mask=BlockMask.full(2, 4, 47, 48))),
    ("mask", "[2, 4, 1, 1]", dict(mask=BlockMask.full(2, 4, 300, 48))),
    ("mask", "[2, 2, 1, 1]", dict(mask=BlockMask.full(2, 2, 48, 48))),
    ("attn_mask", "[48, 48]", dict(attn_mask=torch.ones(48, 48).bool())),
    ("attn_mask", "[2, 47]", dict(attn_mask=torch.ones(2, 47).bool())),
    ("attn_mask", "[1, 48]", dict(attn_mask=torch.ones(1, 48).bool())),
    ("attn_mask", "[2, 1, 48, 48]", dict(attn_mask=torch.ones(2, 1, 48, 48).bool())),
    ("attn_mask", "int64", dict(attn_mask=torch.ones(2, 48).long())),
    ("attn_mask", "list", dict(attn_mask=[True] * 48)),
    ("attn_mask", "meta", dict(attn_mask=torch.ones(2, 48, device="meta").bool())),
]


@pytest.mark.parametrize(("name", "words", "kwargs"), BAD_KEYWORDS, ids=lambda x: str(x)[:50])
def test_a_wrong_keyword_says_which_what_and_what_is_allowed(name, words, kwargs, monkeypatch):
    monkeypatch.setattr(rainfusion.backends.portable, "attend", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises((ValueError, TypeError)) as caught:
        sparse_attention(*tensors(), **kwargs)
    message = str(caught.value)
    assert name in message
    assert words in message


OF_ATTENTION_ONLY = {"mask", "return_lse", "return_mask"}


@pytest.mark.parametrize(
    ("name", "kwargs"), [(name, kwargs) for name, _, kwargs in BAD_KEYWORDS if not OF_ATTENTION_ONLY & set(kwargs)]
)
def test_predict_mask_refuses_the_same(name, kwargs):
    with pytest.raises((ValueError, TypeError)) as caught:
        predict_mask(*tensors()[:2], **kwargs)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words", "change"),
    [
        ("q", "3: shape", lambda q, k, v: (q[0], k, v)),
        ("v", "5: shape", lambda q, k, v: (q, k, v[None])),
        ("q", "list", lambda q, k, v: (q.tolist(), k, v)),
        ("k", "ndarray", lambda q, k, v: (q, k.numpy(), v)),
        ("q", "int64", lambda q, k, v: (q.long(), k.long(), v.long())),
        ("q", "complex64", lambda q, k, v: (q.cfloat(), k.cfloat(), v.cfloat())),
        ("k", "float64", lambda q, k, v: (q, k.double(), v)),
        ("v", "bfloat16", lambda q, k, v: (q, k, v.bfloat16())),
        ("v", "meta", lambda q, k, v: (q, k, v.to("meta"))),
        ("v", "k's shape", lambda q, k, v: (q, k, v[:, :, :-1])),
        ("v", "k's shape", lambda q, k, v: (q, k, v[..., :-1])),
        ("k", "batch size 2, got 1", lambda q, k, v: (q, k[:1], v[:1])),
        ("k", "head dim 8, got 7", lambda q, k, v: (q, k[..., :7], v[..., :7])),
        ("heads", "4 and 3", lambda q, k, v: (q, k[:, :3], v[:, :3])),
        ("heads", "4 and 0", lambda q, k, v: (q, k[:, :0], v[:, :0])),
        ("heads", "2 and 4", lambda q, k, v: (q[:, :2], k, v)),
        ("q", "head dim", lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0])),
        ("q", "layout", lambda q, k, v: (q.to_sparse(), k, v)),
        ("q", "no_grad", lambda q, k, v: (q.requires_grad_(), k, v)),
        ("v", "detach", lambda q, k, v: (q, k, v.requires_grad_())),
    ],
)
@pytest.mark.parametrize("kwargs", [{}, RF])
def test_tensors_that_do_not_fit(name, words, change, kwargs):
    with pytest.raises((ValueError, TypeError)) as caught:
        sparse_attention(*change(*tensors()), **kwargs)
    message = str(caught.value)
    assert name in message
    assert words in message


def test_an_unknown_keyword_is_an_error():
    with pytest.raises(TypeError, match="sparcity"):
        sparse_attention(*tensors(), sparcity=0.8)


def test_inputs_that_require_grad_work_where_no_gradient_is_wanted():
    q, k, v = tensors()
    q.requires_grad_()
    for scope in (torch.no_grad(), torch.inference_mode()):
        with scope:
            assert not sparse_attention(q, k, v, **RF).requires_grad


@pytest.mark.parametrize("sparse_type", [None, "ada_bsa"])
def test_arguments_of_another_strategy_have_no_effect(sparse_type):
    """A caller may leave rf_v2's arguments in place and switch the strategy."""
    q, k, v = tensors(300)
    kwargs = dict(sparse_type=sparse_type, sparsity=0.5)
    plain = sparse_attention(q, k, v, **kwargs)
    for extra in (
        dict(latent_shape_q=[2, 3, 4], txt_len=7, token_order="mindiesd"),
        dict(video_spans=[{"start": 5, "latent_shape": [9, 9, 9]}]),
    ):
        assert torch.equal(sparse_attention(q, k, v, **kwargs, **extra), plain)
    plain = sparse_attention(q, k, v, **RF)
    assert torch.equal(sparse_attention(q, k, v, **RF, keep_sink=False, keep_recent=False, cdf_threshold=0.1), plain)


def test_numpy_numbers_are_numbers():
    q, k, v = tensors(48)
    shape = [np.int64(3), np.int32(4), np.int64(4)]
    out = sparse_attention(q, k, v, scale=np.float32(0.5), **{**RF, "sparsity": np.float64(0.5)}, latent_shape_q=shape)
    assert torch.equal(out, sparse_attention(q, k, v, scale=0.5, **RF, latent_shape_q=[3, 4, 4]))


def test_is_causal_needs_one_length():
    q, k, v = tensors(48, k_len=40)
    for call in (
        lambda: sparse_attention(q, k, v, is_causal=True),
        lambda: sparse_attention(q, k, v, is_causal=True, sparse_type="ada_bsa"),
        lambda: block_sparse_attention(q, k, v, BlockMask.full(2, 4, 48, 40), is_causal=True),
    ):
        with pytest.raises(ValueError, match=r"is_causal.*48 and 40"):
            call()


def test_video_spans_need_one_length():
    q, k, v = tensors(48, k_len=40)
    with pytest.raises(ValueError, match=r"video_spans.*48 and 40"):
        sparse_attention(q, k, v, video_spans=[SPAN], **RF)


def test_head_num_hints_at_the_other_layout():
    q, k, v = tensors(48)
    with pytest.raises(ValueError, match="input_layout"):
        sparse_attention(q, k, v, head_num=4, input_layout="BSND")


@pytest.mark.parametrize("broken", ["counts", "indices"])
def test_a_mask_made_by_hand_is_checked_for_its_values(broken):
    q, k, v = tensors(300)
    mask = BlockMask.full(2, 4, 300, 300)
    getattr(mask, broken)[0, 0, 0] = 7
    with pytest.raises(ValueError, match=rf"mask.{broken} must be in 0..*7"):
        block_sparse_attention(q, k, v, mask)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("seq_len", dict(seq_len=-1)),
        ("seq_len", dict(seq_len=4.0)),
        ("latent_shape", dict(seq_len=10, latent_shape=[1, 2, 3])),
        ("txt_len", dict(seq_len=10, txt_len=11)),
        ("token_order", dict(seq_len=10, token_order="x")),
        ("block_size", dict(seq_len=10, block_size=48)),
        ("video_spans", dict(seq_len=10, video_spans=[SPAN])),
        ("video_spans", dict(seq_len=20, video_spans=[SPAN], latent_shape=[1, 4, 5])),
    ],
)
def test_token_layout_refuses_what_does_not_fit(name, kwargs):
    with pytest.raises((ValueError, TypeError), match=name):
        TokenLayout.build(**kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
def test_a_bias_of_minus_ten_thousand_removes_in_every_dtype(dtype, q_dtype):
    """-1e4 is -9984 in bf16, and models write it so."""
    q, k, v = (x.to(q_dtype) for x in tensors(300))
    keep = torch.rand(2, 300) < 0.5
    bias = ((~keep).to(dtype) * -10000.0)[:, None, None]
    for kwargs in ({}, RF, dict(sparse_type="ada_bsa", sparsity=0.5)):
        torch.testing.assert_close(sparse_attention(q, k, v, bias, **kwargs), sparse_attention(q, k, v, keep, **kwargs))
