"""Measurements as rows of a CSV file: merged, read again, refused and shown as a table."""

from dataclasses import replace

from commands import refused
from made_up import A_ROW

from rainfusion.bench import results


def test_measuring_again_replaces_the_row_and_leaves_the_others(tmp_path):
    path = tmp_path / "new" / "attention.csv"
    changes = dict(
        gpu="NVIDIA A100",
        shape="wan-720p",
        batch=2,
        heads=40,
        tokens=75600,
        head_dim=64,
        dtype="float16",
        precision="fp8",
        sparse_type="ada_bsa",
        sparsity=0.9,
        contender="hopper kernel",
        rainfusion="0.3.0",
        torch="2.13.0",
        triton="3.7.0",
    )
    others = [replace(A_ROW, **{name: value}) for name, value in changes.items()]
    results.update(path, [A_ROW, *others])
    assert results.read(path) == [A_ROW, *others]
    again = replace(A_ROW, ms=3.0, speedup=None, error_to_float64=float("nan"), right=False)
    results.update(path, [again])
    first, *rest = results.read(path)
    assert (first.ms, first.speedup, first.right) == (3.0, None, False)
    assert rest == others
    assert [p.name for p in path.parent.iterdir()] == ["attention.csv"]


def test_a_row_is_found_again_whatever_its_digits_are(tmp_path):
    row = replace(A_ROW, sparsity=1 / 3, ms=1 / 7)
    for _ in range(2):
        results.update(tmp_path / "r.csv", [row])
    assert len(results.read(tmp_path / "r.csv")) == 1


def test_a_file_of_another_kind_is_refused_before_the_work(capsys, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert "missing: gpu, shape" in refused(capsys, "bench", "qwen-image-512", "--csv", str(path))
    results.update(tmp_path / "r.csv", [A_ROW])
    text = (tmp_path / "r.csv").read_text().replace(",12,32760,", ",twelve,32760,")
    (tmp_path / "r.csv").write_text(text)
    assert "line 2" in refused(capsys, "bench", "--from-csv", str(tmp_path / "r.csv"))
    (tmp_path / "r.csv").write_text(text + "1,2,3\n")
    assert "bench" in refused(capsys, "bench", "--from-csv", str(tmp_path / "r.csv"))
    assert "no.csv" in refused(capsys, "bench", "--from-csv", str(tmp_path / "no.csv"))


def test_the_table_says_what_was_wrong():
    wrong = replace(A_ROW, speedup=None, speedup_cudnn=None, right=False, contender="hopper kernel")
    dense = replace(A_ROW, contender="cuDNN", sparse_type="dense", speedup=1.0, speedup_cudnn=1.0, around_percent=None)
    header, _, *lines = results.format_rows([dense, A_ROW, wrong, replace(A_ROW, precision="int8")]).splitlines()
    assert header.split()[:3] == ["shape", "contender", "precision"]
    assert "WRONG" in lines[2] and "x" not in lines[2].split("bfloat16")[1]
    assert "2.50x" in lines[1] and "2.60x" in lines[1] and "+5.0%" in lines[1] and "61%" in lines[1]
    assert " int8 " in lines[3] and "bfloat16" not in lines[3]
