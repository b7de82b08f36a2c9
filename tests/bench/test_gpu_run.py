"""`tests/gpu/run.py`: that it deals out tests and says what it found; without a GPU."""

import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from made_up import A_ROW

from helpers import ROOT
from rainfusion.bench import models, results

SCRIPT = ROOT / "tests/gpu/run.py"
MEASURED = ROOT / "benchmarks/results/end_to_end.csv"
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


def test_what_was_found_is_said_when_it_is_terminated(tests, tmp_path):
    """By a time limit that is not its own: 300 seconds of tests must not be lost."""
    waiting = tests.with_name("waiting")
    hangs = f"\ndef test_zz_hangs():\n    import pathlib, time\n    pathlib.Path({str(waiting)!r}).touch()\n"
    tests.write_text(TESTS.format(fails_from=4) + hangs + "    time.sleep(99)\n")
    arguments = ("--only", "tests", "memcheck", "--tests", tests, "--processes", "1", "--out", tmp_path / "found")
    running = subprocess.Popen([sys.executable, SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    while not waiting.exists():
        time.sleep(0.1)
        assert running.poll() is None
    running.terminate()
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "4 passed, 1 failed, of 7 tests" in said and "test_numbers[4]" in said
    assert "2 did not run in time" in said and "memcheck   left out           terminated before" in said
    assert "test_zz_hangs" in (tmp_path / "found/tests.txt").read_text()


def test_a_file_that_cannot_be_imported_does_not_pass(tests, tmp_path):
    tests.write_text(TESTS.format(fails_from=5))
    broken = tests.with_name("test_broken.py")
    broken.write_text("import not_there_at_all\n")
    done = run("--only", "tests", "--tests", tests, broken, "--processes", 2, "--out", tmp_path / "found")
    assert done.returncode == 1 and "could not be collected" in done.stdout
    assert "not_there_at_all" in (tmp_path / "found/tests.txt").read_text()


def test_what_takes_too_long_is_ended_with_what_it_started(tmp_path):
    script = load_script()
    child = tmp_path / "child"
    step = script.Step("slow", 1.0, (("sh", "-c", f"sh -c 'sleep 3; touch {child}' & wait"),))
    passed, _ = script.run_commands(step, 1.0, tmp_path / "log.txt")
    assert not passed and "it took too long" in (tmp_path / "log.txt").read_text()
    time.sleep(3.5)
    assert not child.exists()


def load_script():
    spec = importlib.util.spec_from_file_location("run_on_a_gpu", SCRIPT)
    sys.modules[spec.name] = script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_lines_for_the_table_are_those_with_figures():
    lines = {step.name: step.lines for step in load_script().STEPS}
    wan = [row for row in results.read(MEASURED, models.ModelRow) if row.model == "wan2.2-a14b"]
    assert wan
    said = {
        "memcheck": ["========= ERROR SUMMARY: 0 errors"],
        "stages": ["hopper kernel, fp8, 20% of the blocks, 128 keys each: 18.600 ms, 1257 TFLOP/s (best 1300)"],
        "calls": results.format_rows([A_ROW]).splitlines()[-1:],
        "models": models.format_rows(wan).splitlines()[-len(wan) :],
    }
    for name, rows in said.items():
        assert all(re.fullmatch(lines[name], row) for row in rows), (name, rows)
    assert not re.fullmatch(lines["calls"], "measuring hopper call in fp8")


def test_what_does_not_fit_in_is_left_out(tmp_path):
    done = run("--only", "memcheck", "models", "--minutes", 1, "--out", tmp_path)
    assert done.returncode == 1  # nothing was shown
    assert "memcheck   left out" in done.stdout and "models     left out" in done.stdout


def test_a_program_that_is_not_there_is_a_failure(tmp_path):
    if subprocess.run(["which", "compute-sanitizer"], capture_output=True).returncode == 0:
        pytest.skip("it is there")
    done = run("--only", "memcheck", "--out", tmp_path)
    assert done.returncode == 1 and "FAILED" in done.stdout and "compute-sanitizer" in done.stdout


def test_its_steps_are_commands_that_there_are():
    """Their options, as the programs know them."""
    commands = [command for step in load_script().STEPS for command in step.commands]
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
