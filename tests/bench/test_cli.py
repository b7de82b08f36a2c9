"""The command line as a whole: its help, the packages that it asks for, and what it says when it is interrupted."""

import signal
import subprocess
import sys

import pytest
from commands import refused, run

from rainfusion import cli
from rainfusion.bench import attention, inspection, models
from rainfusion.lab import demo, quality


@pytest.mark.parametrize("command", ["bench", "inspect", "demo", "quality", "calibrate", "warmup"])
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"  rainfusion {command}" in capsys.readouterr().out


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else object())
    assert "needs matplotlib: pip install matplotlib" in refused(capsys, "bench --plot speed.png")


def test_too_little_memory_is_a_sentence(capsys):
    side = "100000"  # petabytes, which no address space has
    with pytest.raises(SystemExit) as caught:
        cli.main(["inspect", "--latent-shape", side, side, side])
    assert caught.value.code == 1
    assert "inspect: out of memory; choose a smaller size or fewer heads: " in capsys.readouterr().err


def test_other_errors_of_torch_are_not_hidden(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("an illegal instruction")

    monkeypatch.setattr(inspection, "run", fail)
    with pytest.raises(RuntimeError, match="an illegal instruction"):
        cli.main(["inspect"])


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("line", "where", "said"),
    [
        ("bench --device cpu", attention, "nothing was kept: with --csv FILE rows are kept"),
        ("bench --device cpu --csv {}/new.csv", attention, "nothing was measured yet, and {}/new.csv was not written"),
        (
            "bench --device cpu --csv {}/old.csv",
            attention,
            "old.csv has what was measured so far: run",
        ),
        ("bench --model flux --device cpu --csv {}/old.csv", models, "with the models that are missing"),
        ("inspect", inspection, "nothing more was written"),
        ("demo --device cpu --out {}", demo, "no picture was written, and the same command starts anew"),
        ("quality --device cpu", quality, "nothing was kept: with --out DIR rows are kept"),
        ("quality --device cpu --out {}/new", quality, "nothing was measured yet, and {}/new/quality.json was not"),
        (
            "quality --device cpu --out {} --resume",
            quality,
            "{} has the rows measured so far: the same command with --",
        ),
    ],
)
def test_an_interrupt_says_what_is_left_and_how_to_go_on(line, where, said, capsys, tmp_path, monkeypatch):
    (tmp_path / "old.csv").write_text("")
    (tmp_path / "quality.json").write_text("{}")
    monkeypatch.setattr(where, "run", interrupt)
    status, _, err = run(capsys, line.format(tmp_path))
    assert status == 130
    assert f"rainfusion {line.split()[0]}: interrupted; " in err and said.replace("{}", str(tmp_path)) in err


def test_an_interrupted_calibration_says_that_it_starts_anew(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.calibrate, "calibrate", interrupt)
    status, _, err = run(capsys, "calibrate lab --device cpu --out", str(tmp_path / "lab.json"))
    assert status == 130 and "interrupted; no profile was written, and the same command starts anew" in err


def test_control_c_ends_a_real_run_with_a_sentence(tmp_path):
    command = [sys.executable, "-m", "rainfusion", "demo", "--device", "cpu", "--steps", "1000", "--out", str(tmp_path)]

    def listen():  # whoever runs the tests in the background may have told their children not to
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes, preexec_fn=listen) as running:
        for line in running.stdout:
            if line.startswith("Prompt: "):
                break
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said == "\nrainfusion demo: interrupted; " + said.partition("interrupted; ")[2] and "starts anew" in said
