"""How far long work is, on stderr: a bar in a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_SECONDS = 10.0  # the least time between two lines of a log


class Progress:
    """Counts the parts of some work that are done, and shows the count.

    In a terminal it is a bar, where tqdm is installed. Anywhere else it is plain lines, at most one in ten seconds:
    a log stays short, and quick work leaves nothing in it.

        with Progress("bench", len(shapes), "shape") as progress:
            for shape in shapes:
                progress.note(f"{shape.name}: timing")
                ...
                progress.advance()
    """

    def __init__(self, name: str, total: int, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self._doing = ""
        self._begun = self._told = time.monotonic()
        self._bar = _bar(name, total, unit)

    def advance(self) -> None:
        """One more part is done."""
        self.done += 1
        if self._bar is not None:
            self._bar.update()
        else:
            self._tell_now_and_then()

    def note(self, text: str) -> None:
        """Says what is being done: after the bar, or in the next line of a log."""
        self._doing = text
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            self._tell_now_and_then()

    def say(self, line: str) -> None:
        """Writes a line that stays, above the bar where there is one: a result, say."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            self._tell(line)

    def close(self) -> None:
        """Leaves the bar as it is and ends its line."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tell_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._told >= _SECONDS:
            units = self.unit if self.total == 1 else f"{self.unit}s"
            doing = f", now {self._doing}" if self._doing else ""
            self._tell(f"{self.name}: {self.done} of {self.total} {units} after {now - self._begun:.0f} s{doing}")

    def _tell(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self._told = time.monotonic()


def _bar(name: str, total: int, unit: str) -> Any | None:
    """A bar of tqdm; None where stderr is no terminal, or tqdm is not installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=name, unit=unit, file=sys.stderr)
