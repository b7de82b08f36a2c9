"""Commands look at where their results go before they measure: no work is lost at a file that cannot be written."""

import sys

import pytest
from commands import refused
from made_up import A_ROW

from rainfusion.bench import attention, inspection, models, results
from rainfusion.cli import calibrate
from rainfusion.lab import demo, quality


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    """Whatever measures, samples or draws fails the test."""
    for module, name in [(attention, "run"), (models, "run"), (inspection, "run"), (demo, "run"), (quality, "run")]:
        monkeypatch.setattr(module, name, lambda *args, **kwargs: pytest.fail("it began to work"))
    monkeypatch.setattr(calibrate, "calibrate", lambda *args: pytest.fail("it began to work"))


@pytest.fixture
def file(tmp_path):
    """A file, where a folder is wanted."""
    path = tmp_path / "file"
    path.write_text("something")
    return path


FILES = {
    "bench --device cpu --csv": "attention.csv",
    "bench --device cpu --plot": "plot.png",
    "bench --device cpu --model flux --csv": "attention.csv",
    "calibrate lab --device cpu --out": "profile.json",
}
FOLDERS = ["inspect --out", "demo --device cpu --out", "quality --device cpu --out"]


@pytest.mark.parametrize("line", FILES)
def test_a_folder_is_no_file(line, capsys, tmp_path):
    folder = tmp_path / "folder.png"
    folder.mkdir()
    said = refused(capsys, line, str(folder))
    option = line.split()[-1]
    assert f"{option} must name a file, got the folder {str(folder)!r}; try {str(folder / FILES[line])!r}" in said


def test_the_folder_one_is_in_is_no_file(capsys):
    assert "--out must name a file, got the folder '.'; try 'profile.json'" in refused(capsys, "calibrate lab --out .")
    assert "--csv must name a file, got the folder '.'" in refused(capsys, "bench --csv", "")


@pytest.mark.parametrize("line", FILES)
def test_a_file_cannot_be_a_folder(line, capsys, file):
    said = refused(capsys, line, str(file / "deeper" / "x.png"))
    assert f"{line.split()[-1]} must be in a folder that can be made and written, got" in said
    assert "choose another place" in said


@pytest.mark.parametrize("line", FOLDERS)
def test_a_file_is_no_folder(line, capsys, file):
    assert f"--out must name a folder, got the file {str(file)!r}; choose" in refused(capsys, line, str(file))
    assert "--out must be in a folder that can be made" in refused(capsys, line, str(file / "deeper"))


@pytest.mark.parametrize(
    ("line", "name"), [*zip(FOLDERS, ("order.png", "frames.png", "quality.png"), strict=True)], ids=lambda word: word
)
def test_a_folder_in_the_place_of_a_result_is_found(line, name, capsys, tmp_path):
    (tmp_path / name).mkdir()
    said = refused(capsys, line, str(tmp_path))
    assert f"in which {name} is a folder; remove it, or choose another name" in said


def test_the_picture_beside_a_profile_is_checked_too(capsys, tmp_path):
    (tmp_path / "lab.png").mkdir()
    said = refused(capsys, "calibrate lab --device cpu --out", str(tmp_path / "lab.json"))
    assert "the picture beside --out must name a file, got the folder" in said
    said = refused(capsys, "calibrate lab --device cpu --out", str(tmp_path / "profile.png"))
    assert "--out must not end in .png, which is for the picture beside it" in said


@pytest.mark.parametrize("name", ["x.notapic", "x", "x.pgf"])
def test_a_plot_has_the_ending_of_a_picture(name, capsys, tmp_path):
    said = refused(capsys, "bench --device cpu --plot", str(tmp_path / name))
    assert "--plot must end in one of ." in said and ", .png, " in said
    assert f"try {str(tmp_path / 'x.png')!r}" in said
    results.update(tmp_path / "r.csv", [A_ROW])
    again = ("--from-csv", str(tmp_path / "r.csv"), "--plot", str(tmp_path / name))
    assert "--plot must end in one of ." in refused(capsys, "bench", *again)


def test_two_results_do_not_go_into_one_file(capsys, tmp_path):
    same = str(tmp_path / "both.png")
    said = refused(capsys, "bench --device cpu --csv", same, "--plot", same)
    assert "--plot must be another file than the one with the rows" in said
    assert "leave one of them out" in refused(capsys, "bench --csv a.csv --from-csv b.csv")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is of Linux")
def test_a_place_that_nobody_can_write_is_refused(capsys):
    assert "--out must be in a folder that can be made" in refused(capsys, "quality --device cpu --out /proc/nowhere/x")
    said = refused(capsys, "calibrate lab --device cpu --out /proc/nowhere/x.json")
    assert "--out must be in a folder that can be made and written, got '/proc/nowhere'" in said
    assert "--csv must name a plain file, got '/dev/null'" in refused(capsys, "bench --device cpu --csv /dev/null")


def test_a_check_leaves_no_file(capsys, tmp_path):
    refused(capsys, "bench --device cpu --csv", str(tmp_path / "r.csv"), "--plot", str(tmp_path / "x.notapic"))
    assert list(tmp_path.iterdir()) == []
