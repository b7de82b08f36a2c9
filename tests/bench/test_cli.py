"""The command line as a whole: its help and the packages that it asks for."""

import pytest
from commands import refused

from rainfusion import cli


@pytest.mark.parametrize("command", ["bench", "inspect", "demo", "quality", "calibrate"])
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"  rainfusion {command}" in capsys.readouterr().out


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else object())
    assert "needs matplotlib: pip install matplotlib" in refused(capsys, "bench --plot speed.png")
