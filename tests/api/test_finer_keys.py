"""Rows of 128 queries that choose among blocks of 64 or 32 keys."""

import math
from types import SimpleNamespace

import pytest
import torch

from helpers import oracle
from helpers.accuracy import EPS, error
from helpers.inputs import qkv
from helpers.planned import request
from rainfusion import BlockMask, TokenLayout, block_sparse_attention, ops, planning, predict_mask, sparse_attention
from rainfusion.backends import portable
from rainfusion.backends import triton as triton_backend

PAIRS = [(128, 64), (128, 32)]
BACKENDS = ["reference", "portable", "triton"]
GRID, TXT = (3, 9, 13), 21
LENGTH = TXT + math.prod(GRID)
VIDEO = dict(sparse_type="rf_v2", sparsity=0.7, latent_shape_q=GRID, txt_len=TXT)

pytestmark = pytest.mark.parametrize("pair", PAIRS, ids=str)


def sides_of(pair, **kwargs):
    """Order and protected blocks of q and of k, from the oracle."""
    return [oracle.layout(LENGTH, GRID, TXT, block_size=size, **kwargs) for size in pair]


def key_mask(kind):
    generator = torch.Generator().manual_seed(3)
    keep = torch.rand(2, LENGTH, generator=generator) < 0.7
    keep[1, 100:300] = False
    if kind == "bool":
        return keep
    return torch.randn(2, LENGTH, generator=generator).masked_fill(~keep, -1e4) if kind == "float" else None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("predictor", ["mean", "submeans", "spread"])
@pytest.mark.parametrize("kind", [None, "bool"])
def test_masks_follow_the_definition(pair, backend, predictor, kind):
    q, k, _ = qkv(2, 4, LENGTH, 16, k_heads=2)
    attn_mask = key_mask(kind)
    (order, rows), (_, columns) = sides_of(pair)
    keep, _ = oracle.kept_keys(attn_mask, 2, LENGTH)
    scores = oracle.SCORES[predictor](q, k, 0.25, order, order, keep, pair)
    expected = oracle.rf_v2_rows(scores, 0.7, rows, columns)
    mask = predict_mask(q, k, attn_mask, **VIDEO, predictor=predictor, block_size=pair, backend=backend)
    assert mask.block_size == pair and mask.indices.dtype == torch.int16
    assert torch.equal(mask.to_dense(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("predictor", "compensate"), [("mean", False), ("mean", True), ("spread", True)])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_attention_is_that_of_the_definition(pair, backend, predictor, compensate, kind):
    q, k, v = qkv(2, 4, LENGTH, 16, k_heads=2)
    attn_mask = key_mask(kind)
    call = dict(VIDEO, predictor=predictor, block_size=pair, compensate=compensate, backend=backend)
    out, lse, mask = sparse_attention(q, k, v, attn_mask, **call, return_lse=True, return_mask=True)
    (order, _), _ = sides_of(pair)
    dense = mask.to_dense()
    if compensate:
        spreads = predictor == "spread"
        exact, exact_lse = oracle.compensated(q, k, v, dense, order, order, pair, attn_mask, spreads=spreads)
    else:
        exact, exact_lse = oracle.attention(q, k, v, oracle.expand(dense, order, order, pair), attn_mask)
    assert error(out, exact) < 16 * EPS[torch.float32]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_given_masks(pair, backend, is_causal, return_lse):
    """Rows without a block, and causal rows that see none of the keys of some of theirs."""
    q, k, v = qkv(2, 2, 700, 16)
    generator = torch.Generator().manual_seed(5)
    dense = torch.rand(2, 2, 6, -(-700 // pair[1]), generator=generator) < 0.3
    dense[0, 0, 2] = False
    mask = BlockMask.from_dense(dense, pair)
    found = block_sparse_attention(q, k, v, mask, is_causal=is_causal, backend=backend, return_lse=return_lse)
    tokens = oracle.expand(dense, range(700), range(700), pair)
    exact, exact_lse = oracle.attention(q, k, v, tokens, causal=is_causal)
    exact = exact.nan_to_num(0.0)
    assert error(found[0] if return_lse else found, exact) < 16 * EPS[torch.float32]
    if return_lse:
        torch.testing.assert_close(found[1].double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compensate", [False, True])
def test_lists_of_int32_and_int16_are_one(pair, backend, compensate):
    """Also where the place of a key is more than an int16 counts."""
    k_len = 32768 + 5 * 32 - 7
    q, k, v = qkv(1, 1, 130, 16, k_len=k_len)
    dense = torch.zeros(1, 1, 2, -(-k_len // pair[1]), dtype=torch.bool)
    dense[..., 3], dense[..., 1:, -3:] = True, True
    short = BlockMask.from_dense(dense, pair)
    assert short.indices.dtype == torch.int16
    call = dict(sparse_type="rf_v2", block_size=pair, compensate=compensate, backend=backend, return_lse=True)
    wide = BlockMask(short.counts, short.indices.int(), pair)
    found, expected = (sparse_attention(q, k, v, **call, mask=mask) for mask in (short, wide))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    tokens = dense.repeat_interleave(128, 2)[:, :, :130].repeat_interleave(pair[1], 3)[..., :k_len]
    if not compensate:
        plain = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), tokens)
        assert error(found[0], plain) < 16 * EPS[torch.float32]


def test_means_count_where_a_block_is_skipped(pair):
    """Then the last tile of the list, whose keys end in its last block: past what an int16 counts."""
    k_len = 32768 + 5 * 32 - 7
    q, k, v = qkv(1, 1, 100, 16, k_len=k_len)
    dense = torch.zeros(1, 1, 1, -(-k_len // pair[1]), dtype=torch.bool)
    dense[..., 3], dense[..., -1] = True, True
    mask = BlockMask.from_dense(dense, pair)
    call = dict(sparse_type="rf_v2", block_size=pair, compensate=True)
    asked = request(q, k, v, mask=mask, **call)
    keys = triton_backend.prepare(asked)
    bias = triton_backend.stand_in_bias(asked, mask, keys)[0, 0, 0]
    counts = torch.tensor([pair[1]] * (dense.shape[-1] - 1) + [k_len - (dense.shape[-1] - 1) * pair[1]])
    expected = counts.log2().masked_fill(dense[0, 0, 0], -math.inf)
    torch.testing.assert_close(bias[: len(expected)], expected)
    assert bias[len(expected) : -128].isneginf().all()
    there = pair[1] + int(counts[-1])
    assert bias[-128:].tolist() == [0.0] * there + [-math.inf] * (128 - there)
    wide = BlockMask(mask.counts, mask.indices.int(), pair)
    assert torch.equal(triton_backend.stand_in_bias(asked, wide, keys)[0, 0, 0], bias)


def test_the_future_is_left_out_wherever_it_is(pair):
    """Also where the place of a key is more than an int16 counts."""
    rows, share = 260, 128 // pair[1]
    mask = BlockMask.full(1, 1, rows * 128, rows * 128, block_size=pair)
    sizes = dict(q=torch.empty(1, rows, 128, 1), k=torch.empty(1, rows * share, pair[1], 1))
    slab = SimpleNamespace(counts=mask.counts[0], indices=mask.indices[0], **sizes)
    assert portable._causal_counts(slab).tolist() == [[(row + 1) * share for row in range(rows)]]


@pytest.mark.parametrize("predictor", ["mean", "submeans", "spread"])
@pytest.mark.parametrize("kind", [None, "bool"])
@pytest.mark.parametrize("sparsity", [0.7, [0.9, 0.2, 0.5, 0.7]])
def test_masks_do_not_depend_on_how_many_heads_are_scored_at_once(pair, predictor, kind, sparsity, monkeypatch):
    q, k, _ = qkv(2, 4, LENGTH, 16, k_heads=2)
    call = dict(VIDEO, sparsity=sparsity, predictor=predictor, block_size=pair, backend="triton")
    at_once = predict_mask(q, k, key_mask(kind), **call)
    part_mass, mean_scores, heads = triton_backend._part_scores, triton_backend._mean_scores, []
    monkeypatch.setattr(triton_backend, "_part_scores", lambda *a: (heads.append(a[1].q.shape[:2]), part_mass(*a))[1])
    monkeypatch.setattr(triton_backend, "_mean_scores", lambda *a: (heads.append(a[1].q.shape[:2]), mean_scores(*a))[1])
    monkeypatch.setattr(triton_backend, "_MANY_SCORES", 1)
    in_parts = predict_mask(q, k, key_mask(kind), **call)
    assert heads == [(1, 2)] * 4  # those that share keys together, of one batch element
    assert torch.equal(at_once.counts, in_parts.counts) and torch.equal(at_once.indices, in_parts.indices)


@pytest.mark.parametrize("kwargs", [dict(exact_budget=True), dict(sparsity=[0.9, 0.2, 0.5, 0.7])], ids=str)
def test_budgets_are_shares_of_the_key_blocks(pair, kwargs):
    q, k, _ = qkv(1, 4, LENGTH, 16)
    call = {**VIDEO, **kwargs}
    mask = predict_mask(q, k, **call, block_size=pair)
    (order, rows), (_, columns) = sides_of(pair)
    scores = oracle.mean_scores(q, k, 0.25, order, order, torch.ones(1, LENGTH).bool(), pair)
    exact = call.get("exact_budget", False)
    assert torch.equal(mask.to_dense(), oracle.rf_v2_rows(scores, call["sparsity"], rows, columns, exact))


def test_an_error_can_set_the_budgets(pair):
    q, k, v = qkv(1, 2, LENGTH, 16)
    call = dict(VIDEO, block_size=pair, return_mask=True)
    del call["sparsity"]
    _, few = sparse_attention(q, k, v, **call, target_error=0.5)
    _, many = sparse_attention(q, k, v, **call, target_error=0.05)
    assert few.density() < many.density()


def test_finer_blocks_are_the_halves_or_quarters_of_the_others(pair):
    whole = TokenLayout.build(LENGTH, GRID, TXT)
    fine = TokenLayout.build(LENGTH, GRID, TXT, block_size=pair[1])
    assert torch.equal(whole.order, fine.order)
    parts = torch.nn.functional.pad(fine.protected, (0, -fine.num_blocks % (128 // pair[1])))
    assert torch.equal(parts.view(-1, 128 // pair[1]).any(1), whole.protected)


def test_a_mask_of_other_blocks_is_refused(pair):
    q, k, v = qkv(1, 2, LENGTH, 16)
    mask = predict_mask(q, k, **VIDEO, block_size=pair)
    with pytest.raises(ValueError, match="pass block_size="):
        sparse_attention(q, k, v, **VIDEO, mask=mask)
    assert sparse_attention(q, k, v, **VIDEO, block_size=pair, mask=mask).isfinite().all()


def test_meta_tensors_give_the_same_kinds(pair):
    q, k, v = qkv(1, 2, LENGTH, 16)
    call = dict(VIDEO, block_size=pair, return_mask=True)
    _, expected = sparse_attention(q, k, v, **call)
    _, mask = sparse_attention(*(x.to("meta") for x in (q, k, v)), **call)
    assert (mask.indices.dtype, mask.indices.shape) == (expected.indices.dtype, expected.indices.shape)


def test_the_ops_keep_torchs_rules(pair):
    q, k, v = qkv(1, 2, LENGTH, 16)
    inputs = planning.check(q, k, v, None, input_layout="BNSD")
    call = planning.ask_flat(inputs, **VIDEO, block_size=pair, backend="portable", return_mask=True)
    torch.library.opcheck(torch.ops.rainfusion.predict_mask.default, (q, k, None, *ops._encoded(call)))
    tensors = (q, k, v, None, None, None, None)
    torch.library.opcheck(torch.ops.rainfusion.sparse_attention.default, (*tensors, *ops._encoded(call)))


def test_it_compiles(pair):
    torch._dynamo.reset()
    q, k, v = qkv(1, 2, LENGTH, 16)

    def call(q, k, v):
        return sparse_attention(q, k, v, **VIDEO, block_size=pair, return_mask=True)

    out, mask = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    expected, expected_mask = call(q, k, v)
    assert torch.equal(out, expected) and torch.equal(mask.indices, expected_mask.indices)
    assert mask.indices.dtype == expected_mask.indices.dtype
    assert mask.block_size == pair and mask.orders == expected_mask.orders
