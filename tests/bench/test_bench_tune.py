"""benchmarks/tune.py: its help, its report, and candidates that fail or hang."""

import pytest
import torch

from helpers import benchmarks


@pytest.fixture
def tune():
    return benchmarks.load("tune")


def test_tune_has_help_with_an_example_and_says_what_it_needs(tune, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="0"):
        tune.main(["--help"])
    assert "  python benchmarks/tune.py --head-dim 128" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "needs a CUDA or ROCm device" in capsys.readouterr().err


def test_tune_prints_the_best_tile_as_a_line_of_the_table(tune):
    trials = [
        tune.Trial(128, "bf16", tune.Tile(128, 64, 8, 2), 1.25),
        tune.Trial(128, "bf16", tune.Tile(128, 64, 4, 3), 1.0),
        tune.Trial(128, "bf16", tune.Tile(128, 128, 4, 4), None, "out of shared memory"),
        tune.Trial(64, "fp32", tune.Tile(64, 32, 8, 2), None, "took more than 90 s"),
    ]
    text = tune.report(trials, (9, 0))
    assert text.endswith("rainfusion/backends/triton/kernels/tuning.py:\n    ((9, 0), 128, 2, Tile(128, 64, 4, 3)),")
    assert "2 of 3 ran" in text and "out of shared memory" in text and "took more than 90 s" in text
    assert tune.report(trials, "hip").endswith("    (128, 2, Tile(128, 64, 4, 3)),")


def test_tune_with_descriptors_has_a_table_of_its_own(tune):
    tiles = [tune.Tile(128, keys, 4, 2, described=True) for keys in (64, 128)]
    text = tune.report([tune.Trial(128, "bf16", tile, tile.keys / 64) for tile in tiles], (9, 0))
    assert "for _DESCRIBED in" in text
    assert text.endswith("    (128, 2, Tile(128, 64, 4, 2, described=True)),")


@pytest.mark.parametrize(
    ("script", "ms", "problem"),
    [
        ('print(\'{"ms": 2.5, "right": true}\')', 2.5, ""),
        ('print(\'{"ms": 2.5, "right": false}\')', None, "WRONG"),
        ("raise MemoryError('out of shared memory')", None, "MemoryError: out of shared memory"),
        ("import time; time.sleep(60)", None, "took more than 3 s"),
    ],
)
def test_tune_survives_a_candidate_that_fails_or_hangs(tune, tmp_path, script, ms, problem):
    (tmp_path / "candidate.py").write_text(script)
    tune.__file__ = str(tmp_path / "candidate.py")
    args = tune._parser().parse_args(["--limit", "3"])
    trial = tune.try_one(128, "bf16", tune.Tile(128, 64, 4, 2), args, tmp_path / "lock")
    assert (trial.ms, trial.problem) == (ms, problem)
