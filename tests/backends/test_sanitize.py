"""The calls that NVIDIA's checkers watch on a card, made on a CPU: arguments are right, and parts are the whole."""

from helpers import sanitize


def ran(capsys, *words):
    """The labels of the calls that ran, without times."""
    sanitize.main(["portable", *words])
    return [line.rpartition(" (")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("ran ")]


def test_every_call_runs_in_native_precision(capsys, monkeypatch):
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    whole = ran(capsys, "--precision", "native")
    for name in sanitize.CALLS:
        times = sanitize.TIMES if name in sanitize.REPEATED else 1
        of_both_dtypes = [line for line in whole if line.split(": ")[-1].partition(", again")[0] == name]
        assert len(of_both_dtypes) == 2 * times, name
    parts = [line for part in ("1/3", "2/3", "3/3") for line in ran(capsys, "--precision", "native", "--part", part)]
    assert sorted(parts) == sorted(whole)
