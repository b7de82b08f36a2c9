"""benchmarks/calls.py: errors of calls at equal work."""

import pytest

from helpers import benchmarks


@pytest.fixture(scope="module")
def calls():
    return benchmarks.load("calls")


def test_help_has_an_example(calls, capsys):
    with pytest.raises(SystemExit):
        calls.main(["--help"])
    assert "  python benchmarks/calls.py --densities" in capsys.readouterr().out


def test_better_predictors_and_finer_keys_have_smaller_errors(calls, capsys):
    """And all of the tiles nearly none."""
    quick = ["--calls", "2", "--steps", "2", "--frames", "81", "--size", "36", "--keys", "128", "32"]
    calls.main([*quick, "--densities", "0.3", "1"])
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.count("|") == 6]
    found = {(keys, name): (float(part), float(whole.strip(" |"))) for _, keys, name, part, whole in lines[2:]}
    assert len(found) == 8
    for keys in ("128", "32"):
        assert found[keys, "true mass"][0] < found[keys, "spread"][0] < found[keys, "mean"][0]
        assert max(found[keys, name][1] for name in calls.PREDICTORS) < 0.1
    assert found["32", "spread"][0] < found["128", "spread"][0]
