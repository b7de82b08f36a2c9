"""Which versions of a host were tested, and the sentence for one that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Host(NamedTuple):
    """A program or a library that others wrote, and that rainfusion plugs into by private names of it.

    >>> print(Host("Example", "none", ("1.2", "1.3")).misfit("has no hook"))
    rainfusion works with Example 1.2 and 1.3; Example is not installed here, or of an unknown version: has no hook
    """

    name: str  # as people write it
    package: str  # as it is installed
    tested: tuple[str, ...]  # versions, oldest first

    def version(self) -> str | None:
        """Of the package that is installed, if its metadata say so."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def misfit(self, what: str, found: str | None = None) -> str:
        """A sentence: which versions were tested, which one was found, and what is wrong with it.

        Args:
            what: the fault, such as "has no example.hook".
            found: the version, if the host says it in another way than by its package.
        """
        found = found or self.version()
        here = f"{self.name} {found}" if found else f"{self.name} is not installed here, or of an unknown version:"
        tested = " and ".join(part for part in (", ".join(self.tested[:-1]), self.tested[-1]) if part)
        return f"rainfusion works with {self.name} {tested}; {here} {what}"

    def untested(self) -> str | None:
        """A sentence, if the installed version is none of those that were tested, in whatever build (1.2+cu130)."""
        found = self.version()
        return (
            None
            if found and found.partition("+")[0] in self.tested
            else self.misfit("is not among those that were tested", found)
        )

    @contextmanager
    def names(self, found: str | None = None) -> Iterator[None]:
        """Around imports and look-ups of the host's names: one that is missing is an ImportError in a sentence."""
        try:
            yield
        except (ImportError, AttributeError) as error:
            raise ImportError(self.misfit(f"lacks what is used of it ({error})", found)) from error
