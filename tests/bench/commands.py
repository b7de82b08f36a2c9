"""Commands of `rainfusion` as a user types them: what they print, and what they refuse."""

import pytest

from rainfusion import cli


def run(capsys, line, *words):
    """Runs the words of a line and more of them, which may have spaces: exit status, stdout and stderr."""
    status = cli.main([*line.split(), *words])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def refused(capsys, line, *words):
    """What a command that must not run says on stderr."""
    with pytest.raises(SystemExit) as caught:
        cli.main([*line.split(), *words])
    assert caught.value.code == 2
    return capsys.readouterr().err
