"""What a caller may have switched on around a call: autocast, and masks and tensors of awkward kinds."""

import math

import pytest
import torch
import torch.nn.functional as F

from helpers import oracle
from helpers.accuracy import error
from rainfusion import BlockMask, TokenLayout, block_sparse_attention, predict_mask, sparse_attention

CALLS = [
    {},
    dict(backend="portable"),
    dict(backend="reference"),
    dict(sparse_type="rf_v2", sparsity=0.6, latent_shape_q=[4, 10, 12]),
    dict(sparse_type="rf_v2", sparsity=0.6, backend="reference"),
    dict(sparse_type="ada_bsa", sparsity=0.6, cdf_threshold=0.8),
]


@pytest.mark.parametrize("kwargs", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(kwargs, dtype):
    """Scores and softmax stay fp32, and the output has q's dtype, dense or sparse."""
    q, k, v = torch.randn(3, 1, 2, 480, 32).to(dtype).unbind()
    expected = sparse_attention(q, k, v, **kwargs)
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse_attention(q, k, v, **kwargs)
        mask = predict_mask(q, k, **{name: value for name, value in kwargs.items() if name != "backend"})
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    plain = predict_mask(q, k, **{name: value for name, value in kwargs.items() if name != "backend"})
    assert torch.equal(mask.indices, plain.indices)


@pytest.mark.parametrize("kwargs", [{}, dict(backend="portable"), dict(sparse_type="rf_v2", sparsity=0.1)])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_float_mask_keeps_its_precision(kwargs, bias_dtype):
    """A bias around 100 has steps of 0.5 in bf16: it must not be rounded to q's dtype."""
    q, k, v = torch.randn(3, 1, 2, 300, 32).bfloat16().unbind()
    bias = (100 + torch.randn(1, 300)).to(bias_dtype)
    out, mask = sparse_attention(q, k, v, bias, **kwargs, return_mask=True)
    tokens = oracle.expand(mask.to_dense(), range(300), range(300), 128)
    exact, _ = oracle.attention(q, k, v, tokens, bias)
    assert error(out, exact) < 0.01


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_attention_with_a_scale_of_zero_or_less(scale):
    q, k, v = torch.randn(3, 1, 2, 300, 16).unbind()
    out = sparse_attention(q, k, v, is_causal=True, scale=scale)
    exact, _ = oracle.attention(q, k, v, torch.ones(1, 2, 300, 300).bool(), scale=scale, causal=True)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kwargs", CALLS)
def test_key_masks_of_any_strides(kwargs):
    q, k, v = torch.randn(3, 2, 2, 480, 32).unbind()
    keep = torch.rand(2, 480) < 0.7
    expected = sparse_attention(q, k, v, keep, **kwargs)
    strided = torch.stack([keep, ~keep], -1)[..., 0]
    assert torch.equal(sparse_attention(q, k, v, strided, **kwargs), expected)
    shared = keep[:1].expand(2, -1)
    assert torch.equal(sparse_attention(q, k, v, shared, **kwargs), sparse_attention(q, k, v, shared.clone(), **kwargs))


def test_bsnd_outputs_can_be_flattened():
    """`out.view(B, S, N * D)` is what models do next."""
    q = torch.randn(2, 480, 4, 32)
    for kwargs in CALLS:
        for attn_mask in (None, torch.rand(2, 480) < 0.7):
            sparse_attention(q, q, q, attn_mask, input_layout="BSND", **kwargs).view(2, 480, 128)


@pytest.mark.parametrize("counts", [[2, 2], [3, 3]])
def test_unsorted_or_repeated_blocks_are_refused(counts):
    """They would count keys twice, or break what backends rely on, without a sign."""
    q = torch.randn(1, 1, 256, 8)
    k = torch.randn(1, 1, 384, 8)
    indices = torch.tensor([[1, 0, 2], [0, 0, 1]], dtype=torch.int32)[None, None]
    mask = BlockMask(torch.tensor(counts, dtype=torch.int32)[None, None], indices)
    with pytest.raises(ValueError, match="ascend"):
        block_sparse_attention(q, k, k, mask)


def test_a_layout_refuses_another_length():
    layout = TokenLayout.build(200)
    for length in (199, 201):
        with pytest.raises(ValueError, match=f"200.*{length}"):
            layout.reorder(torch.randn(1, length, 4))
        with pytest.raises(ValueError, match=f"200.*{length}"):
            layout.restore(torch.randn(1, length, 4))


@pytest.mark.parametrize("name", ["sparsity", "scale", "cdf_threshold"])
@pytest.mark.parametrize("value", [10**400, [0.5, 0.5], torch.tensor(0.5), 1j, int], ids=str)
def test_odd_numbers_are_refused_by_name(name, value):
    q = torch.randn(1, 1, 10, 4)
    with pytest.raises((ValueError, TypeError), match=name):
        sparse_attention(q, q, q, **{name: value})


@pytest.mark.parametrize("make", [lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor([x[0], x[1]])])
def test_tensors_that_are_not_dense_are_refused_by_name(make):
    q, keep = torch.randn(2, 1, 10, 4), torch.ones(2, 10)
    with pytest.raises(TypeError, match=r"^q must be a dense"):
        sparse_attention(make(q), q, q)
    with pytest.raises(TypeError, match=r"^attn_mask must be a dense"):
        sparse_attention(q, q, q, make(keep))


def test_a_scale_may_change_under_compile():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, s: sparse_attention(q, q, q, scale=s, sparse_type="rf_v2", sparsity=0.5),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    q = torch.randn(1, 1, 300, 8)
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(
            compiled(q, scale), sparse_attention(q, q, q, scale=scale, sparse_type="rf_v2", sparsity=0.5)
        )


def test_dense_attention_equals_torchs_on_awkward_strides():
    q = torch.randn(1, 2, 300, 64)[..., ::2]
    torch.testing.assert_close(sparse_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))
    assert not math.isnan(sparse_attention(q, q, q).sum().item())
