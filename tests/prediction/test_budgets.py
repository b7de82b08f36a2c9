"""How many blocks a row keeps: from a sparsity, an exact budget, an error to allow, a profile."""

import json
import math

import numpy
import pytest
import torch

from helpers import oracle
from helpers.inputs import qkv
from helpers.planned import planned
from rainfusion import BlockMask, Profile, pipeline, predict_mask, sparse_attention
from rainfusion.prediction import budgets, error_curves
from rainfusion.prediction.calibration import GRID, LayerCurves, Recorder, allocate, convex_pieces

VIDEO = dict(sparse_type="rf_v2", latent_shape_q=[5, 8, 16], txt_len=20)
LENGTH = 5 * 8 * 16 + 20


def structured(length=LENGTH, heads=3, dim=16, seed=0):
    """Keys that a query's neighbours share, so that some blocks matter much more than others."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.linspace(0, 6, length)[:, None] * torch.arange(1, dim // 2 + 1)
    wave = torch.cat([place.sin(), place.cos()], -1)
    gains = torch.linspace(1.0, 3.0, heads)[:, None, None]
    noise = 0.2 * torch.randn(3, 1, heads, length, dim, generator=generator)
    return wave * gains + noise[0], wave + noise[1], wave.flip(-1) + noise[2]


def relative_error(out, dense):
    return (out - dense).norm(dim=(2, 3)) / dense.norm(dim=(2, 3))  # [B, H]


# --- exact budgets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_frame", ["protected", "keys", "free"])
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.9])
def test_an_exact_budget_counts_protected_blocks(first_frame, sparsity):
    """As near to 1 - sparsity as whole blocks allow, unless the protected ones alone are more."""
    q, k, _ = qkv(1, 2, 9 * 16 * 16 + 16, 8)
    kwargs = dict(VIDEO, latent_shape_q=[9, 16, 16], txt_len=16, first_frame=first_frame)
    mask = predict_mask(q, k, **kwargs, sparsity=sparsity, exact_budget=True)
    least = predict_mask(q, k, **kwargs, sparsity=1.0, exact_budget=True)
    assert mask.density() >= 1 - sparsity - 1e-9 or mask.density() == least.density()
    assert mask.density() <= max(1 - sparsity + 1 / mask.num_k_blocks, least.density())
    assert mask.counts.unique().numel() <= 2  # protected rows, and all others


def test_without_it_protected_blocks_come_on_top():
    q, k, _ = qkv(1, 2, LENGTH, 8)
    assert predict_mask(q, k, **VIDEO, sparsity=0.5).density() > 0.5 + 0.1


def test_the_first_frame_by_its_options():
    q, k, _ = qkv(1, 2, LENGTH, 8)
    frame, text = 4, 5  # blocks: 4 of the later frames, one of the first, the last of text
    kept = {
        name: predict_mask(q, k, **VIDEO, sparsity=0.9, first_frame=name).to_dense()[0, 0]
        for name in ("protected", "keys", "free")
    }
    assert kept["protected"][frame].all() and kept["protected"][:, frame].all()
    assert not kept["keys"][frame].all() and kept["keys"][:, frame].all()
    assert not kept["free"][:, frame].all()
    assert all(mask[text].all() and mask[:, text].all() for mask in kept.values())


def test_density_is_known_before_a_call():
    q, k, _ = qkv(1, 2, LENGTH, 8)
    for kwargs in (dict(sparsity=[0.9, 0.3], exact_budget=True), dict(sparsity=0.6, exact_budget=True)):
        _, plan = planned(q, k, **VIDEO, **kwargs)
        known = budgets.density(plan.method, plan.q_spec, plan.k_spec)
        assert known == pytest.approx(predict_mask(q, k, **VIDEO, **kwargs).density())


# --- budgets by head -------------------------------------------------------------------------------------------------


def test_heads_have_their_own_budgets():
    q, k, v = qkv(2, 3, 640, 8)
    sparsity = [0.8, 0.4, 0.0]
    out, mask = sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=sparsity, return_mask=True)
    for head, share in enumerate(sparsity):
        alone = [x[:, head : head + 1] for x in (q, k, v)]
        expected = sparse_attention(*alone, sparse_type="rf_v2", sparsity=share, backend="portable")
        torch.testing.assert_close(out[:, head : head + 1], expected)
    assert mask.counts.float().mean((0, 2)).tolist() == [1.0, 3.0, 5.0]


def test_fp32_shares_mean_what_they_say():
    """0.7 in fp32 is a little less than 0.7: 30 of 100 blocks all the same."""
    q, k, _ = qkv(1, 2, 12800, 8)
    for share in (0.7, numpy.float32(0.7), torch.tensor([0.7, 0.7]), numpy.array([0.7, 0.7], dtype="float32")):
        assert predict_mask(q, k, sparse_type="rf_v2", sparsity=share).counts.unique().tolist() == [30]


def test_equal_budgets_are_one_budget():
    q, k, _ = qkv(1, 2, 640, 8)
    one, each = (predict_mask(q, k, sparse_type="rf_v2", sparsity=s) for s in (0.6, torch.tensor([0.6, 0.6]).double()))
    assert torch.equal(one.indices, each.indices) and torch.equal(one.counts, each.counts)


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        (dict(sparsity=[0.5]), ValueError, "one for each of q's 2 heads, got 1"),
        (dict(sparsity=[0.5, 1.5]), ValueError, r"sparsity\[1\] must be in \[0, 1\], got 1.5"),
        (dict(sparsity="0.5"), TypeError, "sparsity must be a number"),
        (dict(sparsity=0.5, target_error=0.1), ValueError, "target_error takes the place of sparsity"),
        (dict(target_error=0.0), ValueError, r"target_error must be in \(0, 1\]"),
        (dict(first_frame="none"), ValueError, "first_frame must be one of 'protected', 'keys', 'free'"),
        (dict(exact_budget=1), TypeError, "exact_budget must be True or False"),
        (dict(sparse_type="ada_bsa", sparsity=[0.5, 0.6]), ValueError, "one number with sparse_type='ada_bsa'"),
    ],
)
def test_wrong_budgets_are_errors_that_say_so(kwargs, error, says):
    q, k, v = qkv(1, 2, 300, 8)
    with pytest.raises(error, match=says):
        sparse_attention(q, k, v, **{"sparse_type": "rf_v2", **kwargs})


# --- errors ----------------------------------------------------------------------------------------------------------


def curves_of(q, k, v, attn_mask=None, **kwargs):
    request, scores = pipeline.block_scores(*planned(q, k, v, attn_mask, **kwargs))
    return error_curves.curves(request, scores), scores, (request.q_layout, request.k_layout)


@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_curves_are_the_errors_of_masks_with_so_many_blocks(compensate, masked):
    """Against attention with a mask of the n best blocks, over the sampled queries."""
    q, k, v = structured()
    attn_mask = None
    if masked:
        attn_mask = torch.randn(1, LENGTH, generator=torch.Generator().manual_seed(1))
        attn_mask[0, 100:160] = -1e4
    kwargs = dict(VIDEO, compensate=compensate)
    curves, scores, (q_layout, k_layout) = curves_of(q, k, v, attn_mask, target_error=0.1, **kwargs)
    tokens, _ = error_curves._sample(q_layout, q.device)
    dense = sparse_attention(q, k, v, attn_mask, sparse_type=None)[:, :, tokens]
    torch.testing.assert_close(curves.squared_norm, dense.square().sum((2, 3)), rtol=1e-4, atol=0.0)
    order = scores.masked_fill(k_layout.protected, math.inf).argsort(-1, descending=True)
    for n in range(curves.protected, k_layout.num_blocks + 1):
        kept = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, order[..., :n], True)
        mask = BlockMask.from_dense(kept | q_layout.protected[:, None])
        out = sparse_attention(q, k, v, attn_mask, **kwargs, mask=mask)[:, :, tokens]
        wrong = (out - dense).square().sum((2, 3))
        torch.testing.assert_close(curves.squared_error[:, :, n - 1], wrong, rtol=1e-3, atol=1e-7)


def test_the_sample_is_spread_over_rows_that_may_be_sparse():
    q, k, _ = qkv(1, 1, LENGTH, 8)
    layout = planned(q, k, sparsity=0.5, **VIDEO)[1].layouts[0]
    tokens, rows = error_curves._sample(layout, torch.device("cpu"))
    assert set(rows.tolist()) == set((~layout.protected).nonzero().flatten().tolist())
    assert rows.bincount().max() <= 17  # of 64, in four rows
    assert torch.equal(layout.inverse[tokens] // layout.block_size, rows)
    assert len(set(tokens.tolist())) == len(tokens) == error_curves.SAMPLES


@pytest.mark.parametrize("backend", ["portable", "reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_target_error_is_met_with_as_few_blocks_as_that_takes(backend):
    q, k, v = structured()
    dense = sparse_attention(q, k, v)
    densities = []
    for target in (0.3, 0.1, 0.02):
        out, mask = sparse_attention(q, k, v, **VIDEO, target_error=target, return_mask=True, backend=backend)
        assert relative_error(out, dense).max() <= 1.5 * target  # the sample is small
        densities.append(mask.density())
    assert densities == sorted(densities) and densities[0] < densities[-1]


def test_an_error_that_nothing_reaches_keeps_everything():
    q, k, v = qkv(1, 2, 640, 8)
    mask = sparse_attention(q, k, v, sparse_type="rf_v2", target_error=1e-6, return_mask=True)[1]
    assert mask.density() == 1.0
    v[:, :, 3] = math.nan  # an error that is not a number is too large
    assert sparse_attention(q, k, v, sparse_type="rf_v2", target_error=0.9, return_mask=True)[1].density() == 1.0


def test_a_target_error_compiles_in_one_graph():
    q, k, v = structured()

    @torch.compile(fullgraph=True, backend="eager")
    def attend(q, k, v):
        return sparse_attention(q, k, v, **VIDEO, target_error=0.1)

    torch.testing.assert_close(attend(q, k, v), sparse_attention(q, k, v, **VIDEO, target_error=0.1))


# --- profiles --------------------------------------------------------------------------------------------------------


def layer_of(*curves, whole=0.1, protected=20, columns=200):
    return LayerCurves(torch.tensor(curves, dtype=torch.float64), 1, whole, protected, columns)


def falling(rate):
    return [math.exp(-rate * (i + 1) / GRID) for i in range(GRID)]


def test_budgets_go_where_they_help_and_keep_to_the_density():
    layers = {"easy": layer_of(falling(40), falling(30)), "hard": layer_of(falling(3), falling(5))}
    found = allocate(layers, 0.7)
    shares = [share for heads in found.values() for share in heads]
    assert sum(shares) / len(shares) == pytest.approx(0.7, abs=1e-3)
    assert min(found["easy"]) > max(found["hard"])


def test_a_head_that_loses_nothing_gets_nothing():
    found = allocate({"0": layer_of([0.0] * GRID, falling(4))}, 0.6)
    least = 1 - layer_of(falling(4)).density(3)  # of 180 free blocks
    assert found["0"][0] == pytest.approx(least, abs=1e-3) and found["0"][1] < 0.5


def test_a_density_below_the_protected_blocks_is_an_error():
    with pytest.raises(ValueError, match=r"sparsity must be at most 0\.7"):
        allocate({"0": layer_of(falling(4))}, 0.95)


def test_pieces_of_a_curve_are_steepest_first():
    pieces = convex_pieces([1, 1, 2, 3, 4, 5, 6], [5.0, 5.0, 5.0, 1.0, 0.9, 0.9, 0.0])
    slopes = [gain / width for gain, width in pieces]
    assert slopes == sorted(slopes, reverse=True)
    assert sum(gain for gain, _ in pieces) == pytest.approx(5.0)
    assert sum(blocks for _, blocks in pieces) == 5


@pytest.mark.parametrize(("length", "sparsity"), [(8 * 128, 0.6), (27 * 128 - 5, 0.8), (5 * 128, 0.3)])
def test_a_profile_computes_no_more_than_was_asked_for(length, sparsity):
    q, k, v = structured(length)
    recorder = Recorder(sparsity)
    recorder.add("0", *planned(q, k, v, sparsity=0.5, sparse_type="rf_v2"))
    found = list(allocate(recorder.layers, sparsity)["0"])
    mask = predict_mask(q, k, sparse_type="rf_v2", sparsity=found, exact_budget=True)
    blocks = mask.num_k_blocks
    assert 1 - sparsity - 1 / blocks <= mask.density() <= 1 - sparsity + 1e-6


def test_a_head_that_attends_to_one_key_needs_its_block():
    """Blocks far below the largest logit weigh nothing at all: what is left of the output is then wrong, not exact."""
    q, k, v = qkv(1, 2, 640, 8)
    q[:, 1], k[:, 1] = 40 * q[:, 1], 40 * q[:, 1]
    curves, _, _ = curves_of(q, k, v, sparse_type="rf_v2", sparsity=0.5)
    assert curves.squared_error.isfinite().all() and curves.squared_error[0, 1, 0] > 0.1 * curves.squared_norm[0, 1]


def test_a_recorder_finds_the_head_that_needs_more():
    q, k, v = structured(heads=2)
    q = torch.cat([0.05 * q[:, :1], 3.0 * q[:, 1:]], 1)  # one head attends evenly, one to few
    recorder = Recorder()
    recorder.add("0", *planned(q, k, v, sparsity=0.5, **VIDEO))
    recorder.add("0", *planned(q, k, v, sparsity=0.5, **VIDEO))
    assert recorder.layers["0"].calls == 2
    even, sharp = recorder.layers["0"].error
    assert even[GRID // 2] > sharp[GRID // 2]
    found = allocate(recorder.layers, 0.2)["0"]
    assert found[0] < found[1]


def test_profiles_are_files(tmp_path):
    options = {"token_order": (2, 8, 8), "compensate": True, "block_size": (128, 32)}
    profile = Profile({"a": (0.5, 0.25)}, 0.375, options, {"calls": 3})
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile == Profile.load(profile)
    assert Profile.load(json.loads((tmp_path / "p.json").read_text())) == profile


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "must be a JSON file of `rainfusion calibrate`"),
        ("[]", "must be a profile"),
        ('{"format": "rainfusion profile 1"}', "must have sparsities, sparsity, options"),
        ('{"format": "rainfusion profile 1", "sparsities": {"a": 1}, "sparsity": 1, "options": {}}', "must have a, as"),
        (
            '{"format": "rainfusion profile 1", "sparsities": {"a": [1]}, "sparsity": 1, "options": {"predictor": 1}}',
            "predictor must be one of",
        ),
        ('{"format": "rainfusion profile 1", "sparsities": {}, "sparsity": 1, "options": {}}', "at least one layer"),
        (
            '{"format": "rainfusion profile 1", "sparsities": {"a": [2]}, "sparsity": 1, "options": {}}',
            r"sparsities\['a'\] must have numbers from 0 to 1",
        ),
    ],
)
def test_other_files_are_errors_that_say_so(tmp_path, text, says):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        Profile.load(tmp_path / "p.json")


def test_oracle_and_library_agree_on_free_budgets():
    for rows, columns, sparsity in (([0, 0, 1], [0, 1], 0.4), ([0] * 7, [0] * 9, 0.7), ([1, 1], [1], 0.5)):
        assert oracle.free_budget(rows, columns, sparsity) >= 1
