"""Where results go, checked before anything is measured: work must not be lost at a file that cannot be written."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

_NEEDS_LATEX = "pgf"  # a format that matplotlib lists whether or not it can write it


def check_file(option: str, path: Path, *, example: str) -> None:
    """Raises ValueError unless `path` can be written as a file. Its folder is made where it is missing.

    Args:
        option: the option that names the file, for the message.
        path: the file, which may exist: it will be replaced.
        example: a name to suggest where a folder was given.
    """
    if path.is_dir():
        raise ValueError(f"{option} must name a file, got the folder {str(path)!r}; try {str(path / example)!r}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{option} must name a plain file, got {str(path)!r}; try {example!r}")
    _make_folder(option, path.parent)
    if path.exists():
        try:
            with open(path, "ab"):  # nothing is appended
                pass
        except OSError as error:
            raise ValueError(
                f"{option} must name a file that can be written, got {str(path)!r}: {error.strerror}; choose another "
                "name, or allow writing to it"
            ) from error


def check_folder(option: str, path: Path, files: Sequence[str]) -> None:
    """Raises ValueError unless these files can be written into the folder, which is made where it is missing."""
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"{option} must name a folder, got the file {str(path)!r}; choose another name, such as {f'{path}-files'!r}"
        )
    _make_folder(option, path)
    for name in files:
        if (path / name).is_dir():
            raise ValueError(
                f"{option} must name a folder where {name} can be written, got {str(path)!r}, in which {name} is a "
                "folder; remove it, or choose another name"
            )
        check_file(option, path / name, example=name)


def check_picture(option: str, path: Path) -> None:
    """Raises ValueError unless matplotlib can write `path`: its ending must be one of a format that it knows."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(set(FigureCanvasBase.get_supported_filetypes()) - {_NEEDS_LATEX})
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(
            f"{option} must end in one of .{', .'.join(known)}, got {str(path)!r}; try "
            f"{str(path.with_suffix('.png') if path.name else Path('plot.png'))!r}"
        )
    check_file(option, path, example="plot.png")


def _make_folder(option: str, folder: Path) -> None:
    """Makes the folder and writes a file into it, which goes away at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} must be in a folder that can be made and written, got {str(folder)!r}: {error.strerror}; choose "
            "another place, or make that folder first"
        ) from error
