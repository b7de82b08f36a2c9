"""Which blocks take part: masks that are given, and masks that are predicted, against the CPU and the definition."""

import pytest
import torch

from helpers import gpu
from helpers.gpu import (
    ADA_BSA,
    BF16,
    CALL,
    FP32,
    LAYOUTS,
    LENGTH,
    MOST,
    QUANTISED,
    RF_V2,
    SUBMEANS,
    check_quantised,
    same,
)
from rainfusion import BlockMask, block_sparse_attention, predict_mask, sparse_attention

pytestmark = gpu.ON_GPU


# --- masks that are given --------------------------------------------------------------------------------------------


def blocks(dense):
    return BlockMask.from_dense(torch.tensor(dense, dtype=torch.bool, device=gpu.DEVICE).expand(2, 4, -1, -1))


ODD_MASKS = [
    (300, 300, [[0, 0, 0], [0, 0, 1], [1, 0, 0]]),  # no block, the ragged one only, one whole
    (300, 300, [[0, 0, 0]] * 3),
    (300, 257, [[0, 0, 1]] * 3),  # a block of one key
    (300, 300, [[1, 1, 1], [1, 0, 1], [0, 1, 1]]),
]


@pytest.mark.parametrize(
    ("q_len", "k_len", "dense"),
    [
        *ODD_MASKS,
        (70, 700, [[0, 1, 0, 0, 1, 1]]),  # one row of blocks
        (700, 70, [[1], [0], [1], [1], [0], [1]]),  # one column
        (5, 5, [[1]]),
        (5, 5, [[0]]),
    ],
)
def test_odd_block_masks(backend, q_len, k_len, dense):
    gpu.check(backend, *gpu.qkv(q_len, k_len), mask=blocks(dense))


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("q_len", "k_len", "dense"), ODD_MASKS)
def test_odd_block_masks_quantised(backend, q_len, k_len, dense, precision):
    check_quantised(
        backend, precision, *gpu.qkv(q_len, k_len), mask=blocks(dense), most=MOST[precision], lse_within=0.5
    )


def test_block_sparse_attention_is_the_call_with_a_mask(backend):
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    result = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if result is not None:
        assert same(block_sparse_attention(q, k, v, mask, backend=backend, return_lse=True), result)


def test_a_predicted_mask_can_be_used_again(backend):
    q, k, v = gpu.qkv()
    result = gpu.attend(backend, q, k, v, **CALL, return_lse=True, return_mask=True)
    if result is None:
        return
    mask = result[-1]
    assert same(predict_mask(q, k, **CALL, backend=backend), mask)
    again = sparse_attention(q, k, v, **CALL, mask=mask, backend=backend, return_lse=True, return_mask=True)
    assert same(again, result)


# --- masks that are predicted ----------------------------------------------------------------------------------------

EXACT_LENGTH = 1288  # the last block has 8 tokens, so that its mean is exact
EXACT_LAYOUTS = {
    "none": {},
    "video": dict(latent_shape_q=(3, 16, 26), txt_len=40),
    "first frame's keys": dict(latent_shape_q=(3, 16, 26), txt_len=40, first_frame="keys"),
    "free first frame": dict(latent_shape_q=(3, 16, 26), txt_len=40, first_frame="free"),
    "exact budget": dict(latent_shape_q=(3, 16, 26), txt_len=40, exact_budget=True),
    "mindiesd": dict(latent_shape_q=(3, 16, 26), txt_len=40, token_order="mindiesd"),
}


@pytest.mark.parametrize("name", EXACT_LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("removed", [None, slice(256, 640)], ids=str)
@pytest.mark.parametrize("sparsity", [0.3, 0.7, 1.0])
def test_masks_are_those_of_the_cpu_where_sums_are_exact(backend, name, dtype, removed, sparsity):
    """On small integers every order of adding gives the same sum, so masks are equal bit for bit, ties too."""
    q = gpu.integers(2, 4, EXACT_LENGTH, 64, dtype=dtype)
    k = gpu.integers(2, 2, EXACT_LENGTH, 64, dtype=dtype, seed=1)
    kwargs = dict(sparse_type="rf_v2", sparsity=sparsity, **EXACT_LAYOUTS[name])
    keep = None
    if removed is not None:
        keep = torch.ones(2, EXACT_LENGTH, dtype=torch.bool, device=gpu.DEVICE)
        keep[1, removed] = False
        if name != "none":  # other numbers of tokens would be left in blocks
            keep[1] = False
    result = gpu.attend(backend, q, k, k, keep, **kwargs, return_lse=True, return_mask=True)
    if result is None:
        return
    there = predict_mask(q.cpu(), k.cpu(), None if keep is None else keep.cpu(), **kwargs, backend="portable")
    assert same(result[-1].to("cpu"), there)
    assert same(predict_mask(q, k, keep, **kwargs, backend=backend).to("cpu"), there)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_budgets_by_head_are_those_of_the_cpu(backend, dtype):
    q = gpu.integers(2, 4, EXACT_LENGTH, 64, dtype=dtype)
    kwargs = dict(EXACT_LAYOUTS["video"], sparse_type="rf_v2", sparsity=[0.9, 0.5, 0.7, 0.0])
    for exact_budget in (False, True):
        there = predict_mask(q.cpu(), q.cpu(), **kwargs, exact_budget=exact_budget)
        result = gpu.attend(backend, q, q, q, **kwargs, exact_budget=exact_budget, return_mask=True)
        assert result is None or same(result[-1].to("cpu"), there)


@pytest.mark.parametrize("name", SUBMEANS)
@pytest.mark.parametrize("predictor", ["submeans", "spread"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("kind", [None, "bool", "blocks"])
def test_parts_choose_what_the_cpu_does_but_for_near_ties(backend, name, predictor, dtype, kind):
    """Products of tf32 there, of fp32 here: a row may swap two blocks, and one of them may be protected anyway."""
    q, k, v = gpu.qkv(dtype=dtype)
    attn_mask = gpu.key_mask(kind, 2, q.shape[2])
    kwargs = dict(SUBMEANS[name], predictor=predictor)
    result = gpu.attend(backend, q, k, v, attn_mask, **kwargs, return_mask=True)
    if result is None:
        return
    there = predict_mask(q.cpu(), k.cpu(), None if attn_mask is None else attn_mask.cpu(), **kwargs)
    differ = (result[-1].to_dense().cpu() != there.to_dense()).sum(-1)
    assert (differ > 0).float().mean() < 0.02
    assert differ.max() <= 2


@pytest.mark.parametrize("gap", [10.0, 300.0, 1e4])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_by_spread_the_higher_one_of_two_peaks_is_kept(backend, dtype, gap):
    """In one row of many; squares of shares beyond 2^64 would be infinite, and the lower peak comes first."""
    q, k, v = (0.1 * gpu.randn(1, 2, 4096, 64, dtype=dtype, seed=i) for i in range(3))
    q[:, 1, 1280:1408, 0] = 10.0
    k[:, 1, 96:128, 0], k[:, 1, 544:576, 0] = 2 * gap, 3 * gap
    kwargs = dict(
        sparse_type="rf_v2", predictor="spread", compensate=True, block_size=(128, 32), scale=0.1, sparsity=127 / 128
    )
    result = gpu.attend(backend, q, k, v, **kwargs, return_mask=True)
    if result is None:
        return
    kept = result[-1].to_dense()
    assert kept[0, 1, 10].nonzero().flatten().tolist() == [17]
    there = predict_mask(q.cpu(), k.cpu(), **kwargs).to_dense()
    assert (kept.cpu() != there).any(-1).float().mean() < 0.05


def test_a_target_error_is_kept_on_the_device_as_on_the_cpu(backend):
    q, k, v = gpu.qkv(dtype=BF16)
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), enable_gqa=True)
    for target in (0.5, 0.2):
        result = gpu.attend(backend, q, k, v, sparse_type="rf_v2", target_error=target, return_mask=True)
        if result is None:
            return
        there = sparse_attention(q.cpu(), k.cpu(), v.cpu(), sparse_type="rf_v2", target_error=target, return_mask=True)[
            1
        ]
        assert abs(result[-1].density() - there.density()) < 0.05
        error = (result[0].double() - dense).norm() / dense.norm()
        assert error <= 1.3 * target


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("kind", [None, "bool", "blocks"])
def test_rf_v2_masks_follow_the_definition(backend, name, dtype, kind):
    """Rows differ, from float64 or from the CPU, only where fp32 cannot tell the two decisive scores apart."""
    length, layout = LAYOUTS[name]
    q, k, v = gpu.qkv(length, dtype=dtype)
    attn_mask = gpu.key_mask(kind, 2, length)
    result = gpu.attend(backend, q, k, v, attn_mask, **RF_V2, **layout, return_lse=True, return_mask=True)
    if result is None:
        return
    here = result[-1].to_dense()
    expected, tied = gpu.rf_v2(q, k, attn_mask, dict(RF_V2, **layout))
    assert tied.float().mean() < 0.05  # else the test would say little
    assert not ((here != expected).any(-1) & ~tied).any()
    there = predict_mask(q.cpu(), k.cpu(), None if attn_mask is None else attn_mask.cpu(), **RF_V2, **layout)
    assert not ((here.cpu() != there.to_dense()).any(-1) & ~tied.cpu()).any()


@pytest.mark.parametrize("kwargs", [*ADA_BSA, dict(sparsity=1.0), dict(sparsity=0.1)], ids=str)
@pytest.mark.parametrize("kind", [None, "bool"])
def test_ada_bsa_masks_follow_the_definition(backend, kwargs, kind):
    q, k, v = gpu.qkv()
    q = q * 3
    attn_mask = gpu.key_mask(kind, 2, LENGTH)
    kwargs = dict(kwargs, sparse_type="ada_bsa")
    result = gpu.attend(backend, q, k, v, attn_mask, **kwargs, return_lse=True, return_mask=True)
    if result is None:
        return
    here = result[-1].to_dense()
    del kwargs["sparse_type"]
    gpu.assert_ada_bsa(here, gpu.ada_bsa_mass(q, k, attn_mask, kwargs.get("is_causal", False)), **kwargs)
    keep = None if attn_mask is None else attn_mask.cpu()
    there = predict_mask(q.cpu(), k.cpu(), keep, sparse_type="ada_bsa", **kwargs)
    assert (here.cpu() != there.to_dense()).any(-1).float().mean() <= 0.02


def test_masks_ascend_and_are_permutations(backend):
    q, k, v = gpu.qkv()
    for kwargs in (CALL, dict(sparse_type="ada_bsa", **ADA_BSA[1])):
        result = gpu.attend(backend, q, k, v, **kwargs, return_lse=True, return_mask=True)
        if result is not None:
            assert same(result[-1], BlockMask.from_dense(result[-1].to_dense()))
