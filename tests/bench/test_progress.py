"""Progress: a bar in a terminal, a line now and then in a log, with and without tqdm."""

import sys

import pytest
from commands import run

from rainfusion import progress
from rainfusion.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test adds to them."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def work(clock, seconds, parts=100):
    with Progress("bench", parts, "shape") as told:
        for number in range(parts):
            told.note(f"shape {number}")
            clock[0] += seconds / parts
            told.advance()


def test_quick_work_leaves_nothing_in_a_log(clock, capsys):
    work(clock, seconds=9)
    assert capsys.readouterr().err == ""


def test_a_log_gets_a_line_in_ten_seconds(clock, capsys):
    work(clock, seconds=60)
    lines = capsys.readouterr().err.splitlines()
    assert 4 <= len(lines) <= 6
    assert lines[0] == "bench: 17 of 100 shapes after 10 s, now shape 16"


def test_one_part_is_one(clock, capsys):
    with Progress("bench", 1, "shape") as told:
        clock[0] += 11
        told.note("dense")
    assert capsys.readouterr().err == "bench: 0 of 1 shape after 11 s, now dense\n"


def test_results_are_said_in_full_in_a_log(clock, capsys):
    with Progress("bench", 2, "shape") as told:
        told.say("wan-480p: 3.00x")
        told.say("wan-720p: 4.00x")
    assert capsys.readouterr().err == "wan-480p: 3.00x\nwan-720p: 4.00x\n"


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("bench", 2, "shape") as told:
        told.note("dense")
        told.say("a result")
        told.advance()
        told.advance()
    err = capsys.readouterr().err
    assert "bench: 100%" in err and "a result\n" in err and "dense" in err


def test_a_terminal_without_tqdm_gets_lines(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    work(clock, seconds=25)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_bench_runs_without_tqdm(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert run(capsys, "bench qwen-image-512 --repeats 1 --heads 1 --device cpu")[0] == 0
