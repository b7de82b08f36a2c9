"""The masks of rf_v2 and ada_bsa, against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.fuzz import examples
from helpers.inputs import randn
from rainfusion import BlockMask, predict_mask, sparse_attention
from rainfusion.prediction import predictors
from rainfusion.prediction.predictors import antidiagonal_mass
from rainfusion.prediction.selection import keep_mass


def near_ties(scores, keep):
    """bool [..., NQ]: rows whose choice hangs on two scores that fp32 cannot tell apart."""
    ranked = scores.sort(-1, descending=True).values
    if keep >= ranked.shape[-1]:
        return torch.zeros(ranked.shape[:-1], dtype=torch.bool)
    gap = ranked[..., keep - 1] - ranked[..., keep]
    return gap <= 1e-5 * (1 + ranked[..., keep].abs())


@st.composite
def rf_v2_calls(draw):
    batch, k_heads, shared = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size = draw(st.sampled_from([64, 128]))
    txt = draw(st.sampled_from([0, 0, 1, 70, 130]))
    dim = draw(st.sampled_from([1, 8, 31]))
    grid = st.tuples(st.integers(1, 5), st.integers(1, 13), st.integers(1, 13))
    latent_q = draw(st.none() | grid)
    latent_k = draw(st.none() | grid) if draw(st.booleans()) else latent_q
    q_len = txt + (math.prod(latent_q) if latent_q else draw(st.integers(1, 500)))
    k_len = txt + (math.prod(latent_k) if latent_k else draw(st.integers(1, 500)))
    kwargs = dict(
        txt_len=txt,
        block_size=size,
        latent_shape_q=latent_q,
        latent_shape_k=latent_k,
        sparsity=draw(st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.8, 0.95, 1.0])),
        token_order=draw(st.sampled_from(["window", "mindiesd", "raster", (8, 4, 4)])),
        scale=draw(st.sampled_from([None, 1.0, -0.3])),
        predictor=draw(st.sampled_from(["mean", "submeans", "spread"])),
        first_frame=draw(st.sampled_from(["protected", "keys", "free"])),
        exact_budget=draw(st.booleans()),
        compensate=draw(st.booleans()),
    )
    if draw(st.booleans()):
        kwargs["sparsity"] = [draw(st.sampled_from([0.0, 0.3, 0.5, 0.9])) for _ in range(k_heads * shared)]
    mask = draw(st.sampled_from([None, "bool", "float"]))
    return batch, k_heads * shared, k_heads, q_len, k_len, dim, mask, kwargs, draw(st.integers(0, 2**20))


def key_mask(kind, batch, k_len, seed):
    if kind is None:
        return None
    keep = torch.rand(batch, k_len, generator=torch.Generator().manual_seed(seed)) < 0.6
    keep[:, : k_len // 2] &= torch.arange(k_len // 2) > k_len // 4  # whole blocks without a key
    if kind == "bool":
        return keep
    bias = randn(batch, k_len, seed=seed)
    return bias.masked_fill(~keep, -1e4)[:, None, None]


@settings(max_examples=examples(120))
@given(rf_v2_calls())
def test_rf_v2_masks_agree_with_the_definition(call):
    batch, heads, k_heads, q_len, k_len, dim, mask_kind, kwargs, seed = call
    q, k = randn(batch, heads, q_len, dim, seed=seed), randn(batch, k_heads, k_len, dim, seed=seed + 1)
    attn_mask = key_mask(mask_kind, batch, k_len, seed)
    mask = predict_mask(q, k, attn_mask, sparse_type="rf_v2", **kwargs)

    latent_q, latent_k = kwargs["latent_shape_q"], kwargs["latent_shape_k"]
    if q_len == k_len:
        latent_q, latent_k = latent_q or latent_k, latent_k or latent_q
    if not any(kwargs["sparsity"] if isinstance(kwargs["sparsity"], list) else [1]):
        assert mask.density() == 1.0
        return
    shared = kwargs["txt_len"], None, kwargs["token_order"], kwargs["block_size"]
    order_q, protected_q = oracle.layout(q_len, latent_q, *shared, kwargs["first_frame"] == "protected")
    order_k, protected_k = oracle.layout(k_len, latent_k, *shared, kwargs["first_frame"] != "free")
    keep, _ = oracle.kept_keys(attn_mask, batch, k_len)
    scale = dim**-0.5 if kwargs["scale"] is None else kwargs["scale"]
    more = dict(compensate=kwargs["compensate"]) if kwargs["predictor"] == "spread" else {}
    scores = oracle.SCORES[kwargs["predictor"]](q, k, scale, order_q, order_k, keep, kwargs["block_size"], **more)
    exact = kwargs["exact_budget"]
    expected = oracle.rf_v2_rows(scores, kwargs["sparsity"], protected_q, protected_k, exact)
    different = (mask.to_dense() != expected).any(-1)
    if kwargs["predictor"] == "spread":  # squares of small numbers
        scores = scores.clamp(min=1e-30).log()
    if exact:  # ranked apart from the protected ones
        scores = scores[..., [not p for p in protected_k]]
    for h, share in enumerate(
        kwargs["sparsity"] if isinstance(kwargs["sparsity"], list) else heads * [kwargs["sparsity"]]
    ):
        number = max(1, oracle.budget(len(protected_k), share))
        number = oracle.free_budget(protected_q, protected_k, share) if exact else number
        assert not (different[:, h] & ~near_ties(scores[:, h], number)).any()
    assert (mask.q_len, mask.k_len) == (q_len, k_len)


@settings(max_examples=examples(60))
@given(
    st.integers(1, 2),
    st.integers(1, 330),
    st.integers(1, 330),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([None, "bool", "float"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.95, 0.7, 0.3, 0.01]),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    st.integers(0, 2**20),
)
def test_ada_bsa_masks_agree_with_the_definition(
    k_heads, q_len, k_len, dim, mask_kind, causal, sink, recent, cdf, sparsity, seed
):
    k_len = q_len if causal else k_len
    q, k = randn(1, 2, q_len, dim, seed=seed) * 3, randn(1, k_heads, k_len, dim, seed=seed + 1)
    attn_mask = key_mask(mask_kind, 1, k_len, seed)
    kwargs = dict(keep_sink=sink, keep_recent=recent, cdf_threshold=cdf, sparsity=sparsity, is_causal=causal)
    mask = predict_mask(q, k, attn_mask, sparse_type="ada_bsa", **kwargs).to_dense()
    keep, _ = oracle.kept_keys(attn_mask, 1, k_len)
    mass = oracle.ada_bsa_mass(q, k, dim**-0.5, keep, causal)
    rule = (sparsity, cdf, sink, recent, causal, keep)
    # a sum that reaches the threshold within fp32's rounding may fall on either side
    candidates = [oracle.ada_bsa_rows(mass, *rule, slack=slack) for slack in (0.0, 1e-5, -1e-5)]
    agrees = torch.stack([(mask == c).all(-1) for c in candidates]).any(0)
    ranked = mass.sort(-1).values
    tied = (ranked.diff(dim=-1).abs() < 1e-6).any(-1)
    assert (agrees | tied).all()


def test_ada_bsa_worked_example():
    """All mass in one block: row 0 keeps it, the sink and the last block, nothing else."""
    q = torch.ones(1, 1, 128, 4)
    k = torch.zeros(1, 1, 640, 4)
    k[:, :, 256:384] = 100.0
    mask = predict_mask(q, k, sparse_type="ada_bsa", cdf_threshold=0.9)
    assert mask.to_dense().int().tolist() == [[[[1, 0, 1, 0, 1]]]]
    mask = predict_mask(q, k, sparse_type="ada_bsa", cdf_threshold=0.9, keep_sink=False, keep_recent=False)
    assert mask.to_dense().int().tolist() == [[[[0, 0, 1, 0, 0]]]]


def test_the_budget_is_exact_in_every_row():
    q, k = randn(2, 3, 100 * 128, 8), randn(2, 3, 100 * 128, 8, seed=1)
    for sparsity, kept in [(0.7, 30), (0.8, 20), (0.9, 10), (0.95, 5), (0.999, 1), (1.0, 1)]:
        mask = predict_mask(q, k, sparse_type="rf_v2", sparsity=sparsity)
        assert mask.counts.unique().tolist() == [kept]


def test_ties_go_to_the_lower_index():
    q, k = torch.ones(1, 1, 256, 4), torch.ones(1, 1, 1280, 4)
    mask = predict_mask(q, k, sparse_type="rf_v2", sparsity=0.7)
    assert mask.indices[0, 0, :, :3].tolist() == [[0, 1, 2]] * 2


def test_protected_blocks_come_on_top_of_the_budget():
    q = randn(1, 2, 5 * 512, 16)
    mask = predict_mask(q, q, sparse_type="rf_v2", sparsity=0.9, latent_shape_q=[5, 16, 32])
    dense = mask.to_dense()
    assert dense[:, :, 16:].all()  # first frame: rows
    assert dense[..., 16:].all()  # and columns
    assert (dense[:, :, :16].sum(-1) <= 2 + 4).all()
    assert (dense[:, :, :16].sum(-1) >= 4).all()


def test_every_batch_element_and_head_has_its_own_mask():
    q, k = randn(2, 2, 2048, 16), randn(2, 2, 2048, 16, seed=1)
    dense = predict_mask(q, k, sparse_type="rf_v2", sparsity=0.8).to_dense()
    assert not torch.equal(dense[0], dense[1])
    assert not torch.equal(dense[:, 0], dense[:, 1])


@pytest.mark.parametrize("kwargs", [dict(sparse_type="rf_v2", sparsity=0.8), dict(sparse_type="ada_bsa", sparsity=0.8)])
@pytest.mark.parametrize("where", ["q", "k"])
def test_nan_shows_as_in_dense_attention(kwargs, where):
    """A NaN in a key reaches every query's output; one in a query reaches its own row."""
    q, k, v = (randn(1, 1, 1500, 16, seed=i) for i in range(3))
    {"q": q, "k": k}[where][0, 0, 777, 3] = math.nan
    out = sparse_attention(q, k, v, **kwargs)
    dense = sparse_attention(q, k, v)
    assert torch.equal(out.isnan(), dense.isnan())


def test_dense_masks():
    q, k = torch.randn(1, 2, 300, 8), torch.randn(1, 2, 500, 8)
    assert predict_mask(q, k).to_dense().all()
    assert predict_mask(q, k, sparse_type="rf_v2", sparsity=0.0).to_dense().all()
    assert torch.equal(predict_mask(q, q, is_causal=True).to_dense()[0, 0], torch.ones(3, 3).tril().bool())


def test_rf_v3_is_another_name_for_rf_v2():
    q = randn(1, 2, 1024, 8)
    a, b = (predict_mask(q, q, sparse_type=name, sparsity=0.5) for name in ("rf_v2", "rf_v3"))
    assert torch.equal(a.indices, b.indices)


@pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
def test_removed_keys_do_not_count_whatever_they_hold(sparse_type):
    q, k = randn(1, 2, 900, 16), randn(1, 2, 900, 16, seed=1)
    keep = torch.rand(1, 900) < 0.7
    junk = k.masked_fill(~keep[:, None, :, None], math.nan)
    kwargs = dict(sparse_type=sparse_type, sparsity=0.6)
    assert torch.equal(predict_mask(q, k, keep, **kwargs).indices, predict_mask(q, junk, keep, **kwargs).indices)


def test_a_bias_that_removes_nothing_does_not_change_the_choice():
    q, k = randn(1, 2, 900, 16), randn(1, 2, 900, 16, seed=1)
    bias = 100 * randn(1, 900, seed=2)
    kwargs = dict(sparse_type="rf_v2", sparsity=0.6)
    assert torch.equal(predict_mask(q, k, **kwargs).indices, predict_mask(q, k, bias, **kwargs).indices)


def test_half_precision_predicts_like_the_same_numbers_in_fp32():
    q, k = (randn(1, 2, 1100, 32, seed=i, dtype=torch.bfloat16) for i in range(2))
    for kwargs in (
        dict(sparse_type="rf_v2", sparsity=0.7, latent_shape_q=[4, 11, 25]),
        dict(sparse_type="rf_v2", sparsity=0.7, predictor="submeans"),
        dict(sparse_type="ada_bsa", sparsity=0.7),
    ):
        masks = [predict_mask(q.to(t), k.to(t), **kwargs) for t in (torch.bfloat16, torch.float32, torch.float64)]
        assert torch.equal(masks[0].indices, masks[1].indices)
        assert torch.equal(masks[0].indices, masks[2].indices)


def test_from_dense_masks_know_no_lengths_and_predicted_ones_do():
    q = randn(1, 1, 300, 8)
    mask = predict_mask(q, q, sparse_type="rf_v2", sparsity=0.5)
    assert (mask.q_len, mask.k_len) == (300, 300)
    assert BlockMask.from_dense(mask.to_dense()).q_len is None


@settings(max_examples=examples(200))
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.75, 0.5, 0.25]),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0]),
    st.integers(0, 2**20),
)
def test_ada_bsa_chooses_exactly(rows, columns, causal, sink, recent, cdf, sparsity, seed):
    """On masses in sixteenths sums, ties and thresholds are exact, so the choice must be too."""
    rows = columns if causal else rows
    generator = torch.Generator().manual_seed(seed)
    mass = torch.randint(0, 8, (1, 2, rows, columns), generator=generator).float() / 16
    live = torch.rand(columns, generator=generator) < 0.8
    mass = mass.masked_fill(~live, 0.0)
    mass = mass.tril() if causal else mass
    kwargs = dict(keep_sink=sink, keep_recent=recent, is_causal=causal, live=live)
    chosen = keep_mass(mass, sparsity, cdf, **kwargs)
    keep = live.repeat_interleave(128)[None]
    assert torch.equal(chosen, oracle.ada_bsa_rows(mass.double(), sparsity, cdf, sink, recent, causal, keep))


@pytest.mark.parametrize("causal", [False, True])
def test_ada_bsa_does_not_depend_on_its_chunks(causal, monkeypatch):
    q, k = randn(1, 4, 700, 16) * 2, randn(1, 2, 700, 16, seed=1)
    keep = torch.rand(1, 700) < 0.8
    whole = antidiagonal_mass(q, k, 0.25, keep, causal)
    monkeypatch.setattr(predictors, "_CHUNK_BYTES", 1)  # a row of blocks at a time
    torch.testing.assert_close(antidiagonal_mass(q, k, 0.25, keep, causal), whole)
    torch.testing.assert_close(whole.double(), oracle.ada_bsa_mass(q, k, 0.25, keep, causal), atol=1e-4, rtol=1e-4)
