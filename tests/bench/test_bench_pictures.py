"""Sweeps, plots of speed-ups, and pictures of orders and masks."""

import json
from dataclasses import replace

import pytest
import torch
from commands import refused, run
from made_up import A_ROW, made_up_rows

from rainfusion import BlockMask, TokenLayout, cli
from rainfusion.bench import pictures, results
from rainfusion.bench.results import Row
from rainfusion.bench.shapes import SWEEP_SPARSITIES, token_sweep

PNG = b"\x89PNG"


def test_a_sweep_leaves_rows_and_a_picture_that_can_be_drawn_again(capsys, tmp_path, monkeypatch):
    points = SWEEP_SPARSITIES[::3]  # the others would take long
    monkeypatch.setattr(cli.bench, "SWEEP_SPARSITIES", points)
    csv, plot, again = tmp_path / "r.csv", tmp_path / "pictures" / "a.png", tmp_path / "b.png"
    line = "bench --sweep sparsity --latent-shape 3 8 16 --head-dim 16 --heads 1 --repeats 1 --seconds 0.01"
    status, out, _ = run(capsys, f"{line} --device cpu", "--csv", str(csv), "--plot", str(plot))
    assert status == 0
    assert f"wrote {plot}" in out
    calls = [row for row in results.read(csv) if row.contender == "portable call"]
    assert [row.sparsity for row in calls] == list(points)
    assert plot.read_bytes().startswith(PNG)
    status, out, _ = run(capsys, "bench", "--from-csv", str(csv), "--plot", str(again), "--sweep", "sparsity")
    assert (status, out) == (0, f"wrote {again}\n")
    assert again.read_bytes().startswith(PNG)
    status, out, _ = run(capsys, "bench", "--from-csv", str(csv))
    assert out.count("portable call") == len(points)
    status, out, _ = run(capsys, "bench", "--from-csv", str(csv), "--json")
    assert [Row(**record) for record in json.loads(out)] == results.read(csv)
    assert "nothing to draw against tokens" in refused(
        capsys, "bench", "--from-csv", str(csv), "--plot", str(again), "--sweep", "tokens"
    )


def test_plots_show_speedups_and_the_ideal():
    figure = pictures.speedup_figure(made_up_rows())
    against_sparsity, against_tokens, by_shape = figure.axes
    assert "NVIDIA H200" in figure.get_suptitle()
    lines = {line.get_label(): line for line in against_sparsity.get_lines()}
    assert {"ideal: 1 / density", "hopper bfloat16", "hopper int8"} <= set(lines)
    assert list(lines["hopper bfloat16"].get_xdata()) == list(SWEEP_SPARSITIES)
    ideal = [1 / (1 - 0.95 * sparsity) for sparsity in SWEEP_SPARSITIES]
    assert list(lines["ideal: 1 / density"].get_ydata()) == pytest.approx(ideal)
    assert list(lines["hopper int8"].get_ydata()) == pytest.approx([1.15 * x for x in ideal])
    lines = {line.get_label(): line for line in against_tokens.get_lines()}
    assert {"hopper bfloat16", "hopper bfloat16, CUDA graph", "hopper int8"} <= set(lines)
    assert list(lines["hopper int8"].get_xdata()) == [shape.seq_len for shape in token_sweep()]
    assert len(by_shape.patches) == 2 * 4  # wan-480p too
    for axis in figure.axes:
        assert axis.get_xlabel() and axis.get_title()
    (only,) = pictures.speedup_figure(made_up_rows(), ["tokens"]).axes
    assert only.get_xlabel() == "tokens"


def test_plots_take_the_newest_version_and_one_gpu():
    rows = made_up_rows()
    old = [replace(row, rainfusion="0.0.9", speedup=0.1, measured="2025-01-01T00:00:00Z") for row in rows]
    other = [replace(row, gpu="NVIDIA A100", speedup=0.1, measured="2025-01-01T00:00:00Z") for row in rows]
    figure = pictures.speedup_figure([*rows, *old, *other], ["sparsity"])
    (line,) = (line for line in figure.axes[0].get_lines() if line.get_label() == "hopper int8")
    assert min(line.get_ydata()) > 1
    with pytest.raises(ValueError, match="nothing to draw"):
        pictures.speedup_figure([replace(A_ROW, speedup=None)])


def test_a_large_mask_is_shrunk_for_the_terminal():
    dense = torch.zeros(1, 1, 300, 200, dtype=torch.bool)
    dense[..., :100] = True
    lines = pictures.mask_text(BlockMask.from_dense(dense), size=40).splitlines()
    assert len(lines) == 42
    assert lines[1] == "|" + "█" * 20 + " " * 20 + "|"


def test_figures_show_every_head_and_some_frames():
    figure = pictures.mask_figure(BlockMask.full(1, 6, 300, 300), heads=range(6))
    assert [axis.get_title() for axis in figure.axes[:6]] == [f"head {head}: density 1.00" for head in range(6)]
    layout = TokenLayout.build(20 * 4 * 8, latent_shape=[20, 4, 8])
    figure = pictures.order_figure(layout, [20, 4, 8])
    assert [axis.get_title() for axis in figure.axes] == [f"frame {f}" for f in (0, 1, 2, 3, 4, 19)]
