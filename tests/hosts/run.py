"""Runs the tests with real hosts: `python tests/hosts/run.py [NAME ...]`, or `make test-hosts`.

A host is a folder here with a `requirements.txt` and tests. Each gets a virtual environment of its own, `.hosts/NAME`,
made the first time and again when its list changes: the list as it stands, without what it would pull in, then this
checkout, so that its entry points are found as a user's would be. PIP_ARGS are given to pip, as in the Makefile.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".hosts"


def main(names: list[str]) -> int:
    known = sorted(path.parent.name for path in HERE.glob("*/requirements.txt"))
    wrong = sorted(set(names) - set(known))
    if wrong:
        print(f"no such host: {', '.join(wrong)}; there are {', '.join(known)}")
        return 2
    failed = [name for name in names or known if not passes(name)]
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return 1 if failed else 0


def passes(name: str) -> bool:
    """One host's tests, in its environment."""
    python = environment(name)
    started = time.monotonic()
    command = [python, "-m", "pytest", "-c", HERE / "pytest.ini", "--confcutdir", HERE / name, HERE / name]
    code = subprocess.run([*map(str, command)], cwd=ROOT, env=variables()).returncode
    say(name, f"tests took {time.monotonic() - started:.0f} s")
    return code == 0


def environment(name: str) -> Path:
    """The Python of the host's environment, which is made if it is not there as the list wants it."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    pip = (*pip, *shlex.split(os.environ.get("PIP_ARGS", "")))
    wanted = HERE / name / "requirements.txt"
    started = time.monotonic()
    if is_new(folder / "made-from-list", wanted.read_text(), sys.version):
        say(name, f"making {folder.relative_to(ROOT)}: a few hundred MB, minutes")
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(*pip, "-r", wanted)
        keep(folder / "made-from-list", wanted.read_text(), sys.version)
        size = sum(path.lstat().st_size for path in folder.rglob("*")) / 2**20
        say(name, f"made in {time.monotonic() - started:.0f} s, {size:,.0f} MB")
    project = (ROOT / "pyproject.toml").read_text(), str(ROOT)
    if is_new(folder / "made-from-project", *project):  # its entry points may have changed
        run(*pip, "-e", ROOT)
        keep(folder / "made-from-project", *project)
    return python


def is_new(stamp: Path, *parts: str) -> bool:
    """Whether a stamp is of something else than these parts."""
    return not stamp.exists() or stamp.read_text() != _digest(parts)


def keep(stamp: Path, *parts: str) -> None:
    stamp.write_text(_digest(parts))


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def variables() -> dict[str, str]:
    """Of the tests' process: nothing is fetched, and this checkout goes before an installed one."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}


def run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True)


def say(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
