"""Rules of others against their definitions in loops, metrics against cases made by hand, and the command on a tiny
model: methods at equal density, files, resuming, and what happens when one fails."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_lab import random_model

from rainfusion import TokenLayout, cli
from rainfusion.lab import comparison, methods, metrics, model, quality, rules, weights
from rainfusion.lab.comparison import Comparison, Row
from rainfusion.lab.methods import METHODS, Attend, ours, rule
from rainfusion.lab.model import Config, Place

pytest.importorskip("safetensors")

TINY = Config(frames=17, size=32, patch=2, dim=64, depth=2, mlp=128)  # 5 x 16 x 16 tokens and text: 11 blocks
PLACE = Place(1, 0, (3, 8, 16), 20)  # 404 tokens: 4 blocks, of which 2 hold no text and no first frame
TOKENS = 404


def layout_of(order="window", place=PLACE):
    t, h, w = place.grid
    return TokenLayout.build(place.text + t * h * w, place.grid, place.text, token_order=order)


def call(seed=0, heads=2, place=PLACE, batch=2):
    """q and k with something in common, so that blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    t, h, w = place.grid
    shape = (batch, heads, place.text + t * h * w, 16)
    smooth = torch.randn(shape, generator=generator).cumsum(2)
    smooth = 6 * smooth / smooth.norm(dim=-1, keepdim=True)
    return [smooth + torch.randn(shape, generator=generator) for _ in range(2)]


def blocks_of(layout):
    """The caller's tokens of each block."""
    return [layout.order[i : i + layout.block_size].tolist() for i in range(0, layout.seq_len, layout.block_size)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("lab") / "tiny.safetensors"
    weights.save(path, TINY, dict(random_model(TINY).named_parameters()), {})
    return path


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_equal_clips_are_equal():
    clips = torch.rand(2, 3, 4, 16, 16)
    assert metrics.psnr(clips, clips).tolist() == [math.inf] * 2
    assert torch.allclose(metrics.ssim(clips, clips), torch.ones(2))
    assert torch.allclose(metrics.cosine(clips, clips), torch.ones(2))
    assert metrics.temporal_error(clips, clips).tolist() == [0.0] * 2


def test_a_known_error_gives_known_metrics():
    a, b = torch.full((2, 3, 4, 16, 16), 0.5), torch.full((2, 3, 4, 16, 16), 0.5)
    b[1] += 0.1
    assert metrics.psnr(a, b)[1].item() == pytest.approx(20.0, abs=1e-3)
    means = (2 * 0.5 * 0.6 + 0.01**2) / (0.5**2 + 0.6**2 + 0.01**2)  # no variance: only the means count
    assert metrics.ssim(a, b)[1].item() == pytest.approx(means, abs=1e-4)
    assert metrics.temporal_error(a, b).tolist() == [0.0, 0.0]  # a lasting error is not one of motion
    b[0, :, 2] += 0.3  # a flash: two of three differences are off by 0.3
    assert metrics.temporal_error(a, b)[0].item() == pytest.approx(0.3 * math.sqrt(2 / 3), abs=1e-5)


def test_metrics_take_images_and_small_frames():
    a, b = torch.rand(2, 1, 3, 1, 4, 6).unbind(0)
    assert metrics.temporal_error(a, b).item() == 0
    assert 0 < metrics.ssim(a, b).item() < 1
    assert metrics.cosine(a, 0.5 * a).item() == pytest.approx(1.0)


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["window", "raster"])
def test_the_true_mass_is_that_of_dense_attention(order, monkeypatch):
    monkeypatch.setattr(rules, "_CHUNK_BYTES", 4 * 128 * 128 * 4 * 2)  # two rows of blocks at a time
    (q, k), layout = call(), layout_of(order)
    mass = rules.attention_mass(q, k, layout)
    probs = (q @ k.mT / 4).softmax(-1)
    for i, rows in enumerate(blocks_of(layout)):
        for j, columns in enumerate(blocks_of(layout)):
            assert torch.allclose(mass[:, :, i, j], probs[:, :, rows][..., columns].sum((2, 3)), atol=1e-3)


@pytest.mark.parametrize("keys", [64, 32])
def test_mass_of_finer_blocks_of_keys_adds_up_to_that_of_the_others(keys):
    q, k = (torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    whole = rules.attention_mass(q, k, TokenLayout.build(300))
    fine = rules.attention_mass(q, k, TokenLayout.build(300, block_size=keys), q_block=128)
    parts = torch.nn.functional.pad(fine, (0, -fine.shape[3] % (128 // keys)))
    torch.testing.assert_close(parts.unflatten(3, (-1, 128 // keys)).sum(4), whole)


def sparge_by_definition(q, k, layout, amount, form, threshold):
    """One batch element and head: q, k [S, D]."""
    blocks = blocks_of(layout)

    def alike(x):
        unit = x / x.norm(dim=-1, keepdim=True)
        return [(unit[tokens] @ unit[tokens].T).mean().item() >= threshold for tokens in blocks]

    q_alike, k_alike = alike(q), alike(k)
    kept = torch.zeros(len(blocks), len(blocks), dtype=torch.bool)
    for i, rows in enumerate(blocks):
        scores = {j: (q[rows].mean(0) @ k[columns].mean(0) / 4).item() for j, columns in enumerate(blocks)}
        among = [j for j in scores if k_alike[j]]
        total = sum(math.exp(scores[j]) for j in among)
        reached, ranked = 0.0, sorted(among, key=lambda j: -scores[j])
        for rank, j in enumerate(ranked):
            enough = reached >= amount if form == "cdf" else rank >= max(1, math.ceil(amount * len(blocks)))
            if enough:
                break
            kept[i, j] = True
            reached += math.exp(scores[j]) / total
        for j in scores:
            kept[i, j] |= not (q_alike[i] and k_alike[j])
    return kept


@pytest.mark.parametrize("form", ["cdf", "top-k"])
@pytest.mark.parametrize("threshold", [-0.1, 0.55])
@pytest.mark.parametrize("order", ["window", "raster"])
def test_sparge_keeps_what_its_definition_keeps(form, threshold, order):
    (q, k), layout = call(), layout_of(order)
    similar = torch.cat([rules.self_similarity(x, layout).flatten() for x in (q, k)])
    assert similar.min() < 0.55 < similar.max()  # the threshold decides something
    choose = rules.sparge(q, k, layout, PLACE, form=form, threshold=threshold)
    for amount in (0.3, 0.6, 0.95):
        chosen = choose(amount)
        for b in range(2):
            for h in range(2):
                wanted = sparge_by_definition(q[b, h], k[b, h], layout, amount, form, threshold)
                assert torch.equal(chosen[b, h], wanted)


@pytest.mark.parametrize("function", [m.rule for m in METHODS if m.rule is not None])
def test_every_rule_gives_a_mask_that_grows_with_the_amount(function):
    place = Place(0, 0, (4, 12, 20), 30)
    (q, k), layout = call(place=place), layout_of(place=place)
    choose = function(q, k, layout, place)
    masks = [choose(amount) for amount in (1e-6, 0.25, 0.5, 0.9, 1.0)]
    assert all(mask.shape == (2, 2, layout.num_blocks, layout.num_blocks) for mask in masks)
    assert all(mask.dtype == torch.bool and mask.any(-1).all() for mask in masks)
    assert all((less <= more).all() for less, more in pairwise(masks))
    assert masks[-1].all() and not masks[1].all()


@pytest.mark.parametrize("order", ["window", "raster"])
def test_a_sliding_window_is_a_symmetric_band_and_text_is_kept(order):
    place = Place(0, 0, (4, 12, 20), 30)
    (q, k), layout = call(place=place), layout_of(order, place)
    chosen = rules.sliding_window(q, k, layout, place)(0.3)[0, 0]
    assert torch.equal(chosen, chosen.T) and chosen.diagonal().all()
    text = 0 if order == "raster" else layout.num_blocks - 1
    assert chosen[text].all() and chosen[:, text].all()
    others = [i for i in range(layout.num_blocks) if i != text]
    assert all(chosen[i, j] == (abs(i - j) <= 2) for i in others for j in others)


def test_nearest_blocks_are_near_in_space_and_time():
    place = Place(0, 0, (9, 16, 16), 16)
    layout = layout_of(place=place)
    _, h, w = place.grid
    for n, tokens in enumerate(blocks_of(layout)):
        grid = [((s - 16) // (h * w), (s - 16) // w % h, (s - 16) % w) for s in tokens if s >= 16]
        if grid:
            wanted = torch.tensor(grid).float().mean(0)
            assert torch.allclose(rules.block_centres(layout, place)[n], wanted, atol=1e-4)
    q, k = call(place=place, heads=1, batch=1)
    chosen = rules.nearest(q, k, layout, place)(0.2)[0, 0]
    centres = rules.block_centres(layout, place)
    for i in range(layout.num_blocks - 1):
        far = (centres - centres[i]).norm(dim=-1)[:-1]
        assert far[chosen[i, :-1]].max() <= far[~chosen[i, :-1]].min() + 1e-4


def test_random_blocks_are_the_same_in_every_run_and_batch_and_others_in_other_calls():
    (q, k), layout = call(), layout_of()
    first = rules.random_blocks(q, k, layout, PLACE, protect="nothing")(0.3)
    assert torch.equal(first, rules.random_blocks(q, k, layout, PLACE, protect="nothing")(0.3))
    assert torch.equal(first[:1], rules.random_blocks(q[1:], k[1:], layout, PLACE, protect="nothing")(0.3))
    other = PLACE._replace(step=1)
    assert not torch.equal(first, rules.random_blocks(q, k, layout, other, protect="nothing")(0.3))


def test_protection_is_of_text_alone_or_of_the_first_frame_too():
    layout = layout_of()
    assert rules.protected(layout, PLACE, "nothing").tolist() == [False, False, False, False]
    assert rules.protected(layout, PLACE, "text").tolist() == [False, False, False, True]
    assert rules.protected(layout, PLACE, "first frame").tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match="protect must be one of 'nothing', 'text', 'first frame', got 'all'"):
        rules.protected(layout, PLACE, "all")


def test_no_rule_with_rows_of_one_length_keeps_more_mass_than_the_oracle():
    place = Place(0, 0, (5, 16, 16), 16)
    (q, k), layout = call(place=place), layout_of(place=place)
    mass = rules.attention_mass(q, k, layout)
    others = (rules.mean_ranking, rules.nearest, rules.random_blocks, partial(rules.sparge, form="top-k", threshold=-1))
    for amount in (0.2, 0.5):
        bound = rules.oracle(q, k, layout, place, protect="nothing")(amount)
        shared = rules.shared_oracle(q, k, layout, place, protect="nothing")(bound.float().mean().item())
        kept = quality.recall(mass, bound)
        assert quality.recall(mass, shared) >= kept - 1e-6
        for other in others:
            chosen = other(q, k, layout, place, protect="nothing")(amount)
            assert torch.equal(chosen.sum(-1), bound.sum(-1))
            assert quality.recall(mass, chosen) <= kept + 1e-6


# --- methods ---------------------------------------------------------------------------------------------------------


def test_methods_have_names_of_their_own_and_are_found_by_parts_of_them():
    assert len({method.name for method in METHODS}) == len(METHODS)
    assert [m.name for m in methods.select(["sparge", "RANDOM"])][-1] == "random"
    assert methods.select([]) == list(METHODS)
    assert [m.name for m in methods.select(["rf_v2 4x4x8"])] == ["rf_v2 4x4x8"]  # a whole name is that one alone
    with pytest.raises(ValueError, match=r"names rf_v2 4x4x8, .*oracle.*; got 'magic'"):
        methods.select(["magic"])
    with pytest.raises(ValueError, match=r"knob must be one of sparsity, .*, profile, got 'luck'"):
        ours("unlucky", knob="luck")


def attended(method, place, q, k, v, amount=0.4, **how):
    attention = Attend(method, amount, "portable", **how)
    return attention, attention(q, k, v, place)


def test_a_rule_attends_to_the_blocks_that_it_chose():
    place = Place(0, 0, (5, 16, 16), 16)
    q, k = call(place=place)
    for method in (rule("x", rules.nearest, token_order=(2, 8, 8)), ours("y", token_order=(2, 8, 8))):
        attention, out = attended(method, place, q, k, q)
        chosen = method.choice(q, k, q, place, "portable")(0.4)
        assert attention.density() == pytest.approx(chosen.float().mean().item())
        layout = layout_of((2, 8, 8), place)
        tokens = chosen.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., : layout.seq_len, : layout.seq_len]
        x, y, z = (layout.reorder(part) for part in (q, k, q))
        wanted = (x @ y.mT / 4).masked_fill(~tokens, -torch.inf).softmax(-1) @ z
        assert torch.allclose(out, layout.restore(wanted), atol=1e-4)


def test_a_mask_is_reused_for_steps_and_for_the_other_branch():
    place = Place(0, 0, (5, 16, 16), 16)
    first, later = (call(seed, place=place) for seed in (0, 1))
    attention = Attend(ours("x", every=2), 0.3, "portable")
    attention(*first, first[0], place)
    kept = attention._masks[0]
    attention(*later, later[0], place._replace(step=1))
    assert attention._masks[0] is kept
    attention(*later, later[0], place._replace(step=2))
    assert not torch.equal(attention._masks[0].indices, kept.indices)
    one = ours("y", one_branch=True)
    chosen = one.choice(*first, first[0], place, "portable")(0.3)
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], ours("z").choice(*first, first[0], place, "portable")(0.3)[0])
    alone = one.choice(*first, first[0], place, "portable", guided=False)(0.3)  # two prompts, not two branches
    assert not torch.equal(alone[0], alone[1])


def test_the_first_steps_may_be_dense():
    place = Place(0, 0, (5, 16, 16), 16)
    q, k = call(place=place)
    attention, out = attended(ours("x"), place, q, k, q, dense_steps=1)
    assert torch.equal(out, model.dense(q, k, q, place)) and attention.density() == 1.0
    attention(q, k, q, place._replace(step=1))
    assert attention.density() < 0.9


# --- equal density ---------------------------------------------------------------------------------------------------


def test_bisection_finds_a_density_smooth_or_in_steps():
    assert quality.find_amount(lambda amount: amount**3, 0.2, 0.01) == pytest.approx(0.2 ** (1 / 3), abs=1e-3)
    steps = 40

    def stairs(amount):
        return max(1, math.ceil(amount * steps)) / steps

    for target in (0.1, 0.26, 0.5, 0.99):
        assert abs(stairs(quality.find_amount(stairs, target, 1 / steps)) - target) <= 0.5 / steps + 1e-9


def test_a_density_out_of_reach_has_no_amount():
    assert quality.find_amount(lambda amount: 0.3 + 0.7 * amount, 0.2, 0.02) is None
    assert quality.find_amount(lambda amount: 0.5 * amount, 0.7, 0.02) is None
    assert quality.find_amount(lambda amount: 0.21 + 0.79 * amount, 0.2, 0.02) is not None


@pytest.fixture(scope="module")
def study(tiny):
    plan = quality.Plan([0.5], torch.device("cpu"), prompts=2, steps=2, weights=tiny)
    with torch.no_grad():
        return quality.Study(weights.load(tiny), plan)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_comes_within_a_block_of_its_density(study, method):
    with torch.no_grad():
        method = study._calibrated(method)
        amount = study._amount(quality.Job(method, 0.65, None))
        assert amount is not None
        masks = [choice(amount) for choice in study._choices(method)]
        share = study._recall(method, amount)
    assert abs(torch.cat(masks).float().mean().item() - 0.65) <= 1 / 11
    assert share is None if method.every > 1 else 0.3 < share < 1


def test_a_density_is_found_by_another_knob_too(study):
    method = ours("by error", knob="target_error", token_order=(2, 8, 8))
    with torch.no_grad():
        amount = study._amount(quality.Job(method, 0.8, None))
        assert abs(torch.cat([choice(amount) for choice in study._choices(method)]).float().mean() - 0.8) <= 1 / 11


def test_the_calls_are_of_steps_that_are_sparse(study):
    assert [(c.place.layer, c.place.step) for c in study.calls] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert quality.spread(range(24), 3) == [4, 12, 20] and quality.spread(range(2, 4), 3) == [2, 3]


# --- results ---------------------------------------------------------------------------------------------------------

SETTINGS = dict(
    prompts=3,
    steps=4,
    guidance=2.5,
    frames=9,
    size=64,
    dense_steps=0,
    seed=0,
    backend="portable",
    device="cpu",
    torch="2.11",
    weights="0",
)


def made_up(*rows):
    return Comparison(SETTINGS, dict(rainfusion="0.1", command="", prompts=[]), list(rows))


def a_row(name, psnr, family="ours", **other):
    same = dict(target=0.3, amount=0.2, density=0.3, recall=0.9, seconds=1.0)
    return Row(name, family, "", psnr=psnr, ssim=[0.9] * 3, cosine=[0.9] * 3, temporal=[0.1] * 3, **{**same, **other})


def test_differences_are_taken_prompt_by_prompt():
    found = made_up(
        a_row("base", [20.0, 25.0, 30.0]), a_row("other", [21.0, 26.1, 30.9]), a_row("none", [], density=None)
    )
    mean, error = found.difference(found.rows[1])
    assert mean == pytest.approx(1.0) and error == pytest.approx(0.1 / math.sqrt(3), rel=1e-6)
    assert found.difference(found.rows[0]) is None and found.difference(found.rows[2]) is None
    lines = comparison.format_rows(found).splitlines()
    assert "25.00 ± 2.89" in lines[2] and "+1.00 ± 0.06" in lines[3]
    assert lines[4].split()[1:] == ["0.3"] + ["-"] * 3 + lines[4].split()[5:]


def test_rows_come_back_from_a_file(tmp_path):
    found = made_up(a_row("base", [20.0, None, 30.0]), Row("broken", "rule", "", target=0.3, error="ValueError: no"))
    comparison.write(found, tmp_path)
    again = comparison.read(tmp_path)
    assert again.rows == found.rows and again.settings == SETTINGS
    assert again.find(found.rows[0].key) is not None and again.find(found.rows[1].key) is None  # to be tried again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quality.json", "quality.md"]
    assert "failed: broken at 0.3: ValueError: no" in (tmp_path / "quality.md").read_text()
    (tmp_path / "quality.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a file of rainfusion quality --out"):
        comparison.read(tmp_path)
    (tmp_path / "quality.json").write_text("{")
    with pytest.raises(ValueError, match=r"quality\.json must be a file of rainfusion quality .* got no JSON"):
        comparison.read(tmp_path)
    (tmp_path / "quality.json").write_text('{"settings": {}, "about": {}, "rows": [{"name": "base"}]}')
    with pytest.raises(ValueError, match=r"got rows with other fields: .*'name'"):
        comparison.read(tmp_path)


def test_a_method_of_the_same_name_that_does_something_else_is_measured_again():
    old = replace(a_row("base", [20.0]), signature="predictor='mean'")
    found = made_up(old)
    assert found.find(replace(old, signature="predictor='submeans'").key) is None
    found.put(replace(old, signature="predictor='submeans'"))
    assert len(found.rows) == 1


# --- the command -----------------------------------------------------------------------------------------------------


def run(capsys, tiny, *words):
    small = ("--quick", "--steps", "2", "--device", "cpu", "--weights", str(tiny))
    status = cli.main(["quality", *small, *words])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def refused(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        cli.main(["quality", *words])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_the_command_writes_its_files_and_resumes(capsys, tiny, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("PIL")
    out = tmp_path / "found"
    words = ("--densities", "0.1", "0.6", "--methods", "rf_v2 2x8x8", "nearest", "--out", str(out))
    status, printed, _ = run(capsys, tiny, *words, "--nominal", "0.5", "--sheet")
    assert status == 0
    found = json.loads((out / "quality.json").read_text())
    rows = {(row["method"], row["target"], row["nominal"]): row for row in found["rows"]}
    assert list(rows) == [
        ("dense", None, None),
        ("dense, other kernel", None, None),
        ("rf_v2 2x8x8", 0.1, None),
        ("nearest in 3-D", 0.1, None),
        ("rf_v2 2x8x8", 0.6, None),
        ("nearest in 3-D", 0.6, None),
        ("rf_v2 2x8x8", None, 0.5),
    ]
    assert rows["rf_v2 2x8x8", 0.1, None]["psnr"] == []  # the first frame and the text are more than that
    row = rows["rf_v2 2x8x8", 0.6, None]
    assert len(row["psnr"]) == len(row["temporal"]) == 2 and abs(row["density"] - 0.6) < 1 / 11
    assert 0 < row["recall"] < 1 and row["seconds"] > 0 and not row["emulated"]
    assert rows["nearest in 3-D", 0.6, None]["emulated"]
    assert len(found["about"]["prompts"]) == 2 and found["settings"]["backend"] == "portable"
    assert str(tmp_path) not in json.dumps(found)
    assert (out / "quality.png").read_bytes().startswith(b"\x89PNG") and (out / "sheet_0.6.png").exists()
    assert "| nearest in 3-D* | 0.6 |" in (out / "quality.md").read_text()
    assert "vs baseline: PSNR beyond that of rf_v2 2x8x8" in printed

    measured = []
    real = quality.Study.measure
    monkeypatch.setattr(quality.Study, "measure", lambda self, job: measured.append(job) or real(self, job))
    assert (
        run(capsys, tiny, "--densities", "0.6", "--methods", "nearest", "random", "--out", str(out), "--resume")[0] == 0
    )
    assert [job.method.name for job in measured] == ["random"]
    assert len(json.loads((out / "quality.json").read_text())["rows"]) == len(rows) + 1
    small = ("--quick", "--device", "cpu", "--weights", str(tiny), "--out", str(out))
    assert "--resume needs the settings" in refused(capsys, *small, "--steps", "1", "--methods", "random", "--resume")
    assert "pass --resume to go on with it" in refused(capsys, *small)
    monkeypatch.setattr(quality, "Study", None)  # not needed to show
    assert cli.main(["quality", "--show", str(out)]) == 0
    assert "random*" in capsys.readouterr().out


def test_a_method_that_fails_is_reported_and_the_others_go_on(capsys, tiny, tmp_path, monkeypatch):
    broken = ours("broken", no_such_option=1)
    monkeypatch.setattr(methods, "METHODS", (broken, ours("fine", token_order=(2, 8, 8))))
    status, printed, err = run(capsys, tiny, "--densities", "0.6", "--out", str(tmp_path))
    assert status == 1
    assert "failed: broken at 0.6: TypeError:" in printed and "no_such_option" in err
    fine = next(row for row in comparison.read(tmp_path).rows if row.method == "fine")
    assert fine.error is None and len(fine.psnr) == 2


def test_the_command_refuses_what_it_does_not_know(capsys, tiny):
    err = refused(capsys, "--methods", "magic")
    assert "got 'magic'" in err and all(method.name in err for method in METHODS)
    assert "--densities must be in (0, 1], got 0.0" in refused(capsys, "--densities", "0")
    assert "--nominal must be in [0, 1], got 2.0" in refused(capsys, "--nominal", "2")
    assert "--dense-steps must be in 0..5 for 6 steps, got 6" in refused(capsys, "--quick", "--dense-steps", "6")
    assert "--sheet needs --out DIR" in refused(capsys, "--sheet")
    assert "--prompts must be at least 1, got 0" in refused(capsys, "--prompts", "0")
    for number in ("nan", "inf"):
        assert f"--guidance must be a finite number, got {number}" in refused(capsys, "--guidance", number)
    assert "--size must be at least 1, got 0" in refused(capsys, "--size", "0")
    assert "--seed must be in [0, 4294967295], got -1" in refused(capsys, "--seed", "-1")
    said = refused(capsys, "--size", "33", "--weights", str(tiny), "--device", "cpu")
    assert "--size must be a multiple of 2, the side of this model's patches, got 33; try 32 or 34" in said
    assert "no weights at" in refused(capsys, "--weights", str(Path(tiny).with_name("other")))


def test_the_command_lists_its_methods_and_has_an_example(capsys):
    assert cli.main(["quality", "--list", "--methods", "oracl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("bound" in line for line in lines)
    with pytest.raises(SystemExit):
        cli.main(["quality", "--help"])
    assert "  rainfusion quality --quick" in capsys.readouterr().out
