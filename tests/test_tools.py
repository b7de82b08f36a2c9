"""The command line and what it prints, draws and measures."""

import json
import pickle
import re

import pytest
import torch

import rainfusion
from rainfusion import BlockMask, TokenLayout, cli
from rainfusion.tools import bench, pictures, synthetic
from rainfusion.tools.shapes import SHAPES, Shape
from rainfusion.tools.verification import verify

PNG = b"\x89PNG"
TINY = Shape("tiny", 2, 16, (3, 8, 16), 20, 0.5, "for tests", small=True)


def run(capsys, *words):
    status = cli.main(list(words))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def refused(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "inspect", "demo"])
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"  rainfusion {command}" in capsys.readouterr().out


def test_bench_prints_a_table(capsys):
    words = ("bench", "qwen-image-512", "--repeats", "1", "--heads", "1", "--sparse-type", "rf_v2,ada_bsa")
    status, out, err = run(capsys, *words)
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith("qwen-image-512")]
    assert len(rows) == 2
    assert all(re.search(r"\d\.\d\dx ", row) for row in rows)
    assert "bench" in err  # progress


def test_bench_prints_json(capsys):
    _, out, _ = run(capsys, "bench", "qwen-image-512", "--repeats", "1", "--heads", "1", "--json", "--dtype", "bf16")
    (record,) = json.loads(out)
    assert record["shape"] == "qwen-image-512"
    assert record["right"] is True
    assert 0.4 <= record["density"] <= 1
    assert record["error_to_float64"] <= record["allowed_error"]
    assert record["peak_mb"] > 0


def test_no_speed_up_is_printed_for_a_wrong_result(capsys, monkeypatch):
    right = rainfusion.sparse_attention

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result

    monkeypatch.setattr(rainfusion, "sparse_attention", wrong)
    status, out, _ = run(capsys, "bench", "qwen-image-512", "--repeats", "1", "--heads", "1")
    assert status == 1
    assert "WRONG" in out
    assert "x " not in out.splitlines()[-2]


@pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_measure_is_right_for_grids_with_text(sparse_type, dtype):
    result = bench.measure(TINY, sparse_type=sparse_type, dtype=dtype, repeats=1)
    assert result.right
    assert result.tokens == 3 * 8 * 16 + 20


def test_verification_finds_one_wrong_row():
    q, k, v = torch.randn(3, 1, 1, 128, 16).unbind()
    out, mask = rainfusion.sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.5, return_mask=True)
    layout = TokenLayout.build(128)
    assert verify(q, k, v, out, mask, layout).right
    out[0, 0, 5] += 0.01
    assert not verify(q, k, v, out, mask, layout).right
    assert not verify(q, k, v, out * torch.nan, mask, layout).right


def test_the_named_shapes_are_the_real_ones():
    assert SHAPES["wan-720p"].seq_len == 75600
    assert SHAPES["wan-480p"].seq_len == 32760
    assert SHAPES["tokens-8k"].seq_len == 8192
    assert bench.default_shapes(torch.device("cpu")) == [s for s in SHAPES.values() if s.small]


def test_bench_takes_a_shape_of_ones_own(capsys):
    words = ("bench", "--latent-shape", "3", "8", "16", "--txt-len", "20", "--head-dim", "16", "--repeats", "1")
    _, out, _ = run(capsys, *words, "--json", "--device", "cpu")
    (record,) = json.loads(out)
    assert (record["shape"], record["tokens"], record["heads"], record["sparsity"]) == ("3x8x16", 404, 4, 0.8)


def test_bench_refuses_what_it_does_not_know(capsys):
    assert "wan-720p" in refused(capsys, "bench", "sora")
    assert "--repeats must be at least 1, got 0" in refused(capsys, "bench", "--repeats", "0")
    assert "sparsity must be in [0, 1], got 3.0" in refused(capsys, "bench", "qwen-image-512", "--sparsity", "3")
    assert "--device" in refused(capsys, "bench", "--device", "abacus")
    assert "--sparse-type" in refused(capsys, "bench", "--sparse-type", "rf_v2,rf_v9")
    assert "--head-dim" in refused(capsys, "bench", "--head-dim", "0")


def test_inspect_shows_order_and_masks(capsys, tmp_path):
    status, out, _ = run(capsys, "inspect", "--latent-shape", "5", "8", "16", "--txt-len", "10", "--heads", "3",
                         "--out", str(tmp_path / "new"))  # fmt: skip
    assert status == 0
    assert "frame 0\n" + "................\n" * 8 in out
    assert "frames 1 to 4\nAAAAAAAABBBBBBBB\n" in out
    assert "|█" in out
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mask.png", "order.png"]
    assert all(path.read_bytes().startswith(PNG) for path in (tmp_path / "new").iterdir())


def test_inspect_takes_a_call_of_ones_own(capsys, tmp_path):
    q, k = torch.randn(2, 1, 2, 3 * 8 * 16, 16).unbind()
    torch.save({"q": q, "k": k}, tmp_path / "call.pt")
    words = ("inspect", "--latent-shape", "3", "8", "16", "--tensors", str(tmp_path / "call.pt"), "--sparsity", "0.5")
    _, out, _ = run(capsys, *words)
    mask = rainfusion.predict_mask(q, k, sparse_type="rf_v2", sparsity=0.5, latent_shape_q=[3, 8, 16])
    assert pictures.mask_text(mask) in out
    torch.save({"q": q.transpose(1, 2), "k": k.transpose(1, 2)}, tmp_path / "call.pt")
    assert pictures.mask_text(mask) in run(capsys, *words, "--input-layout", "BSND")[1]
    torch.save([q, k], tmp_path / "call.pt")
    assert "--tensors" in refused(capsys, *words)
    assert "no.pt" in refused(capsys, "inspect", "--tensors", "no.pt")


@pytest.mark.parametrize("order", [["mindiesd"], ["raster"], ["2", "8", "8"]])
def test_inspect_knows_every_order(order, capsys):
    status, out, _ = run(capsys, "inspect", "--latent-shape", "2", "9", "16", "--token-order", *order, "--heads", "1")
    assert status == 0
    assert "frame 1" in out


def test_inspect_says_what_is_wrong(capsys):
    assert "token_order" in refused(capsys, "inspect", "--token-order", "hilbert")
    assert "--token-order" in refused(capsys, "inspect", "--token-order", "4", "x", "8")
    assert "latent_shape" in refused(capsys, "inspect", "--latent-shape", "0", "4", "4")


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "tqdm" else object())
    assert "needs tqdm: pip install tqdm" in refused(capsys, "bench")


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


def test_synthetic_attention_has_structure():
    """On it a prediction beats chance by far: the kept fifth of the blocks holds most of the attention."""
    latent = synthetic.video_latent((5, 16, 32))
    q, k, v = synthetic.video_qkv(latent, 2, 32)
    kwargs = dict(sparse_type="rf_v2", sparsity=0.8, latent_shape_q=[5, 16, 32])
    dense = rainfusion.sparse_attention(q, k, v)
    mask = rainfusion.predict_mask(q, k, **kwargs)
    generator = torch.Generator().manual_seed(0)
    shuffled = mask.to_dense()[..., torch.randperm(mask.num_k_blocks, generator=generator)]
    chance = rainfusion.sparse_attention(q, k, v, mask=BlockMask.from_dense(shuffled), **kwargs)
    ours = rainfusion.sparse_attention(q, k, v, **kwargs)
    assert (ours - dense).norm() < 0.2 * (chance - dense).norm()


def test_a_file_that_would_run_code_is_refused(capsys, tmp_path):
    class Bad:
        def __reduce__(self):
            return (print, ("ran",))

    (tmp_path / "bad.pt").write_bytes(pickle.dumps(Bad(), protocol=2))
    printed = refused(capsys, "inspect", "--tensors", str(tmp_path / "bad.pt"))
    assert "--tensors" in printed
    assert "ran" not in printed.split()


@pytest.mark.slow
def test_demo_writes_its_pictures(capsys, tmp_path):
    status, out, _ = run(capsys, "demo", "--out", str(tmp_path))
    assert status == 0
    assert len([line for line in out.splitlines() if line.startswith(("rf_v2", "ada_bsa"))]) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mask_ada_bsa.png", "mask_rf_v2.png", "order.png", "output.png"
    ]  # fmt: skip
