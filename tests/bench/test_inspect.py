"""`rainfusion inspect`: orders and masks of a synthetic call and of one's own."""

import pickle

import pytest
import torch
from commands import refused, run

import rainfusion
from rainfusion.bench import pictures

PNG = b"\x89PNG"


def test_inspect_shows_order_and_masks(capsys, tmp_path):
    line = "inspect --latent-shape 5 8 16 --txt-len 10 --heads 3 --out"
    status, out, _ = run(capsys, line, str(tmp_path / "new"))
    assert status == 0
    assert "frame 0\n" + "................\n" * 8 in out
    assert "frames 1 to 2\nAAAAAAAABBBBBBBB\n" in out
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
    assert "--latent-shape[0] must be at least 1, got 0" in refused(capsys, "inspect --latent-shape 0 4 4")
    assert "--sparsity must be in [0, 1], got nan" in refused(capsys, "inspect --sparsity nan")
    assert "--cdf-threshold must be in" in refused(capsys, "inspect --sparse-type ada_bsa --cdf-threshold inf")
    assert "--txt-len must be at least 0, got -1" in refused(capsys, "inspect --txt-len -1")
    assert "--heads is for the synthetic call" in refused(capsys, "inspect --heads 3 --tensors call.pt")


def test_a_file_that_would_run_code_is_refused(capsys, tmp_path):
    class Bad:
        def __reduce__(self):
            return (print, ("ran",))

    (tmp_path / "bad.pt").write_bytes(pickle.dumps(Bad(), protocol=2))
    printed = refused(capsys, "inspect", "--tensors", str(tmp_path / "bad.pt"))
    assert "--tensors" in printed
    assert "ran" not in printed.split()
