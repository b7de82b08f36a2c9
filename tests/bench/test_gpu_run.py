"""`tests/gpu/run.py`: that it deals out tests and says what it found; without a GPU."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers import ROOT

SCRIPT = ROOT / "tests/gpu/run.py"
TESTS = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(5))
def test_numbers(number):
    assert number < {fails_from}

def test_more_than_an_int32_counts():
    import pathlib
    pathlib.Path(__file__).with_name("alone.txt").write_text("ran")
"""


@pytest.fixture
def tests():
    """A file in the checkout, as those that are dealt out have to be."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        yield Path(folder) / "test_made_up.py"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize(("fails_from", "code", "said"), [(5, 0, "6 passed, of 6 tests"), (4, 1, "5 passed, 1 failed")])
def test_tests_are_dealt_out(tests, tmp_path, fails_from, code, said):
    tests.write_text(TESTS.format(fails_from=fails_from))
    done = run("--only", "tests", "--tests", tests, "--processes", 2, "--out", tmp_path / "found")
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    assert ("FAILED" in done.stdout and "test_numbers[4]" in done.stdout) == (code == 1)
    assert tests.with_name("alone.txt").exists()
    assert "test session" not in done.stdout and "passed" in (tmp_path / "found/tests.txt").read_text()


def test_a_process_that_is_killed_does_not_pass(tests, tmp_path):
    tests.write_text(TESTS.format(fails_from=5) + "\ndef test_crash():\n    import os\n    os._exit(0)\n")
    done = run("--only", "tests", "--tests", tests, "--processes", 2, "--out", tmp_path / "found")
    assert done.returncode == 1 and "did not run in time" in done.stdout, done.stdout


def test_what_does_not_fit_in_is_left_out(tmp_path):
    done = run("--only", "memcheck", "models", "--minutes", 1, "--out", tmp_path)
    assert done.returncode == 0
    assert "memcheck   left out" in done.stdout and "models     left out" in done.stdout


def test_a_program_that_is_not_there_is_a_failure(tmp_path):
    if subprocess.run(["which", "compute-sanitizer"], capture_output=True).returncode == 0:
        pytest.skip("it is there")
    done = run("--only", "memcheck", "--out", tmp_path)
    assert done.returncode == 1 and "FAILED" in done.stdout and "compute-sanitizer" in done.stdout


def test_its_steps_are_commands_that_there_are():
    """Their options, as the programs know them."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import run as script
    finally:
        sys.path.remove(str(SCRIPT.parent))
    commands = [command for step in script.STEPS for command in step.commands]
    assert len(commands) >= 8
    for command in commands:
        words = list(command)
        program = words[: 3 if words[1] == "-m" else 2] if words[0] == sys.executable else words[-3:-1]
        if words[0] == "compute-sanitizer":
            assert (ROOT / program[1]).exists()
            continue
        if words[1] == "-m":
            program += [words[3]]
        shown = subprocess.run([*program, "--help"], cwd=ROOT, capture_output=True, text=True).stdout
        assert all(word in shown for word in words if word.startswith("--")), command
