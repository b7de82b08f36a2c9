"""benchmarks/frontier.py: times of whole calls, joined with samples that were compared, and their picture."""

import json
from dataclasses import replace

import pytest
import torch
from made_up import TINY

from helpers import benchmarks
from rainfusion.lab import comparison, methods
from rainfusion.lab.comparison import Comparison, Row

SETTINGS = dict(
    prompts=2, steps=24, frames=9, size=64, guidance=2.5, dense_steps=0, seed=0, backend="hopper", torch="2.11"
)
CALL = dict(
    device="NVIDIA H200", shape="wan-720p", batch=1, heads=40, tokens=75600, head_dim=128, dtype="bfloat16",
    rainfusion="0.2.0", torch="2.11.0", triton="3.6.0",
)  # fmt: skip
BEST, PUBLISHED = "rf_v2 2x8x8 free spread compensate, 32 keys", "rf_v2 2x8x8"


@pytest.fixture
def frontier():
    return benchmarks.load("frontier")


def made_up_times(frontier, names=(BEST, PUBLISHED), precisions=("native", "fp8")):
    """40 ms at a fifth of the blocks, as an H200 might give it, and a little more for each further method."""
    rows = [frontier.Time("cuDNN", "dense", "native", None, 1.0, 181.0, 180.0, 182.0, 50, True)]
    for number, name in enumerate(names):
        (method,) = methods.select([name], [method for method in methods.METHODS if method.name == name])
        for precision, factor in zip(precisions, (1.0, 0.7), strict=False):
            for target in (0.1, 0.2, 0.3):
                ms = factor * (200 * target + number)
                time = (name, method.signature, precision, target, target, ms, ms - 1, ms + 1, 50, True)
                rows.append(frontier.Time(*time))
    return frontier.Times(CALL, rows)


def made_up_row(name, target, psnr, **changes):
    (method,) = (method for method in methods.METHODS if method.name == name)
    metrics = dict(psnr=[psnr - 1, psnr + 1], ssim=[psnr / 50, psnr / 40], cosine=[0.9, 0.9], temporal=[0.1, 0.1])
    row = Row(name, method.family, method.signature, target=target, amount=target, density=target, **metrics)
    return replace(row, **changes)


def made_up_results(*rows):
    return Comparison(dict(SETTINGS, device="NVIDIA H200"), dict(rainfusion="0.2.0"), list(rows))


def drawn(lines):
    """Method, precision, and milliseconds and PSNR of each point."""
    return {
        (line.curve.name, line.precision): [(point.time.ms, sum(point.row.psnr) / 2) for point in line.points]
        for line in lines
    }


def test_every_curve_is_a_method_of_the_lab_that_a_call_runs_by_itself(frontier):
    for curve in frontier.CURVES:
        method = curve.method
        assert method.rule is None and method.every == 1 and not method.one_branch and method.knob != "profile"
        assert curve.timed.schedule.is_constant
    assert sorted(curve.mark for curve in frontier.CURVES if curve.mark) == ["ours", "published"]
    assert len({curve.label for curve in frontier.CURVES}) == len(frontier.CURVES)


def test_times_and_samples_meet_at_the_same_method_and_density(frontier):
    results = made_up_results(
        made_up_row(BEST, 0.3, 24.0), made_up_row(BEST, 0.2, 22.0), made_up_row(PUBLISHED, 0.3, 17.0)
    )
    lines, remarks = frontier.join(made_up_times(frontier), results)
    assert drawn(lines) == {
        (BEST, "native"): [(40.0, 22.0), (60.0, 24.0)],  # in the order of density
        (PUBLISHED, "native"): [(61.0, 17.0)],
        (BEST, "fp8"): [(pytest.approx(28.0), 22.0), (pytest.approx(42.0), 24.0)],
        (PUBLISHED, "fp8"): [(pytest.approx(42.7), 17.0)],
    }
    assert f"{BEST} in native at 10%: timed, but without samples" in remarks
    assert f"{PUBLISHED} in fp8 at 10%, 20%: timed, but without samples" in remarks
    assert [line.own_precision for line in lines] == [True, True, False, False]


def test_a_schedule_has_the_times_of_its_mean_density(frontier):
    name = f"{BEST}, falling"
    lines, _ = frontier.join(made_up_times(frontier, [BEST]), made_up_results(made_up_row(name, 0.2, 23.0)))
    assert drawn(lines)[name, "native"] == [(40.0, 23.0)]


def test_samples_of_a_precision_go_before_others(frontier):
    (method,) = (method for method in methods.METHODS if method.name == BEST)
    own = method.in_precision("fp8")
    assert (own.name, own.options["precision"]) == (f"{BEST}, fp8", "fp8")
    row = made_up_row(BEST, 0.2, 21.5, method=own.name, signature=own.signature)
    lines, _ = frontier.join(made_up_times(frontier, [BEST]), made_up_results(made_up_row(BEST, 0.2, 22.0), row))
    assert [points for _, points in sorted(drawn(lines).items())] == [[(28.0, 21.5)], [(40.0, 22.0)]]
    assert all(line.own_precision for line in lines)


def test_what_has_no_partner_is_said(frontier):
    changed = made_up_row(BEST, 0.2, 22.0, signature="other options")
    failed = made_up_row(BEST, 0.1, 18.0, error="out of memory")
    equal = replace(made_up_row(BEST, 0.3, 24.0), psnr=[None, None])
    nominal = replace(made_up_row(PUBLISHED, 0.2, 16.0), target=None, nominal=0.8)
    others = made_up_row("SpargeAttn top-k", 0.2, 18.0), made_up_row("SpargeAttn top-k", 0.4, 22.0)
    results = made_up_results(changed, failed, equal, nominal, *others)
    lines, remarks = frontier.join(made_up_times(frontier, precisions=["native"]), results)
    assert lines == []
    assert remarks == [
        f"{BEST}, falling in native at 10%, 20%, 30%: timed, but without samples",
        f"{BEST} in native at 10%, 20%, 30%: timed, but without samples",
        f"{PUBLISHED} in native at 10%, 20%, 30%: timed, but without samples",
        f"samples without a time: {BEST}; SpargeAttn top-k",
    ]
    with pytest.raises(ValueError, match="there is nothing to draw"):
        frontier.figure(made_up_times(frontier), results, lines)


def test_a_wrong_result_is_not_drawn(frontier):
    times = made_up_times(frontier, [BEST], ["native"])
    times.rows[2] = replace(times.rows[2], right=False)  # at a fifth of the blocks
    rows = [made_up_row(BEST, target, 20.0) for target in (0.1, 0.2, 0.3)]
    lines, remarks = frontier.join(times, made_up_results(*rows))
    assert [point.time.target for point in lines[0].points] == [0.1, 0.3]
    assert f"{BEST} in native at 20%: its result was wrong" in remarks
    assert "WRONG" in frontier.report(times)


def test_the_picture_is_written_with_a_label_at_every_curve(frontier, tmp_path, capsys):
    results = made_up_results(
        *(made_up_row(BEST, target, 20.0 + 20 * target) for target in (0.1, 0.2, 0.3)),
        made_up_row(f"{BEST}, falling", 0.2, 25.0),
        made_up_row(PUBLISHED, 0.3, 17.0),
    )
    comparison.write(results, tmp_path)
    times = made_up_times(frontier)
    frontier.write(times, tmp_path / "times.json")
    assert frontier.read(tmp_path / "times.json") == times
    words = ["--plot", "--out", str(tmp_path / "times.json"), "--results", str(tmp_path / "quality.json")]
    assert frontier.main([*words, "--picture", str(tmp_path / "new" / "frontier.png")]) == 0
    assert (tmp_path / "new" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert f"left out: {PUBLISHED} in native at 10%, 20%" in capsys.readouterr().out
    picture = frontier.figure(times, results, frontier.join(times, results)[0])
    assert [axis.get_title(loc="left") for axis in picture.axes] == 2 * [
        "bfloat16", "fp8 (times; samples in bfloat16)"
    ]  # fmt: skip
    for axis in picture.axes:
        texts = [text.get_text() for text in axis.texts]
        assert {"the defaults of enable", "constant density", "rf_v2 as published", "20%"} <= set(texts)
        assert "dense, cuDNN: 181 ms" in texts
        low, high = axis.get_xlim()
        assert all(low < ms < high for line in axis.lines for ms in line.get_xdata())


def test_the_results_of_the_repository_can_be_drawn(frontier, tmp_path):
    times = made_up_times(frontier, [curve.name for curve in frontier.CURVES])
    frontier.write(times, tmp_path / "times.json")
    args = frontier._parser().parse_args(["--plot"])
    lines, _ = frontier.join(times, frontier.read_results(args.results))
    assert {line.curve.mark for line in lines} == {"", "ours", "published"}
    assert frontier.figure(times, frontier.read_results(args.results), lines) is not None


def test_results_of_other_settings_do_not_stand_side_by_side(frontier, tmp_path):
    one, two = made_up_results(made_up_row(BEST, 0.2, 22.0)), made_up_results(made_up_row(BEST, 0.2, 25.0))
    comparison.write(one, tmp_path / "one")
    comparison.write(two, tmp_path / "two")
    both = [tmp_path / "one" / "quality.json", tmp_path / "two" / "quality.json"]
    assert [row.psnr for row in frontier.read_results(both).rows] == [[21.0, 23.0]]  # the first file goes before
    two.settings["steps"] = 4
    comparison.write(two, tmp_path / "two")
    with pytest.raises(ValueError, match=r"steps is 24 in .*one.* and 4 in .*two"):
        frontier.read_results(both)


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([0.2, 0.5, 0.9], [0.2, 0.5, 0.9]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.5, 0.5, 0.62], [0.44, 0.54, 0.64]),
        ([0.98, 0.99], [0.9, 1.0]),
        ([0.0, 0.01], [0.0, 0.1]),
    ],
)
def test_labels_keep_their_distance(frontier, heights, expected):
    assert frontier.spread_apart(heights, 0.1) == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------------------
# timing


def test_timing_on_a_cpu(frontier, capsys):
    shape = replace(TINY, latent_shape=(4, 16, 24), txt_len=0, head_dim=16)
    curves = [curve for curve in frontier.CURVES if curve.name in (BEST, f"{BEST}, falling", PUBLISHED)]
    said = []
    found = frontier.measure(
        curves, shape, device=torch.device("cpu"), dtype=torch.float32, densities=(0.25, 0.5), repeats=2,
        seconds=0.1, say=said.append,
    )  # fmt: skip
    assert (found.settings["tokens"], found.settings["heads"], found.settings["dtype"]) == (1536, 2, "float32")
    dense, *rows = found.rows
    assert dense.target is None and dense.ms > 0
    assert [(row.method, row.target) for row in rows] == [(BEST, 0.25), (BEST, 0.5), (PUBLISHED, 0.5)]  # falling: once
    for row in rows:
        assert row.right and row.precision == "native" and row.rounds == 2 and row.low_ms <= row.ms <= row.high_ms
        assert row.density == pytest.approx(row.target, abs=1 / 12)
    err = capsys.readouterr().err
    assert f"left out: {PUBLISHED} in native: a density of 0.25 is out of its reach" in err
    assert err.count("left out: fp8:") == 1 and "cannot run this call" in err


def test_a_small_run_from_times_to_picture(frontier, tmp_path, capsys):
    words = "--time --device cpu --latent-shape 3 16 16 --heads 1 --head-dim 16 --densities 0.5 --precision native"
    times = tmp_path / "times.json"
    assert frontier.main([*words.split(), "--repeats", "1", "--methods", BEST, "--out", str(times)]) == 0
    out = capsys.readouterr().out
    assert f"wrote {times}" in out and BEST in out
    content = json.loads(times.read_text())
    assert content["settings"]["shape"] == "a grid of 3x16x16" and len(content["rows"]) == 2
    comparison.write(made_up_results(made_up_row(BEST, 0.5, 27.0)), tmp_path)
    more = ["--out", str(times), "--results", str(tmp_path), "--picture", str(tmp_path / "small.png")]
    assert frontier.main(["--plot", *more]) == 0
    assert (tmp_path / "small.png").exists()


def test_help_has_an_example(frontier, capsys):
    with pytest.raises(SystemExit, match="0"):
        frontier.main(["--help"])
    assert "  python benchmarks/frontier.py --plot" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--time or --plot must be given"),
        ("--plot --out none.json", "there is no none.json: measure them first, with --time"),
        ("--plot --out quality.json", "must be a file of frontier.py --time"),
        ("--time --device cpu --densities 0", "--densities must be in (0, 1], got 0"),
        ("--time --device cpu --heads 0", "--heads must be at least 1, got 0"),
        ("--time --device cpu --seconds 0", "--seconds must be above 0, got 0"),
        ("--time --device cpu --methods nobody", "got 'nobody'"),
    ],
)
def test_what_is_wrong_is_said_first(frontier, line, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison.write(made_up_results(made_up_row(BEST, 0.2, 22.0)), tmp_path)
    out = [] if "--out" in line else ["--out", "times.json"]
    with pytest.raises(SystemExit, match="2"):
        frontier.main([*line.split(), *out])
    assert message in capsys.readouterr().err
