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
    python, stamp = folder / "bin" / "python", folder / "made-from"
    wanted = list_of(name)
    if stamp.exists() and stamp.read_text() == wanted:
        say(name, f"{folder.relative_to(ROOT)} is as requirements.txt wants it")
        return python
    started = time.monotonic()
    say(name, f"making {folder.relative_to(ROOT)}: a few hundred MB, minutes")
    run(sys.executable, "-m", "venv", "--clear", folder)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    pip = (*pip, *shlex.split(os.environ.get("PIP_ARGS", "")))
    run(*pip, "-r", HERE / name / "requirements.txt")
    run(*pip, "-e", ROOT)
    stamp.write_text(wanted)
    size = sum(path.lstat().st_size for path in folder.rglob("*")) / 2**20
    say(name, f"made in {time.monotonic() - started:.0f} s, {size:,.0f} MB")
    return python


def list_of(name: str) -> str:
    """What an environment depends on: the list, the entry points of this checkout, where it is, and the Python."""
    parts = [(HERE / name / "requirements.txt").read_text(), (ROOT / "pyproject.toml").read_text()]
    return hashlib.sha256("\0".join([*parts, str(ROOT), sys.version]).encode()).hexdigest()


def variables() -> dict[str, str]:
    """Of the tests' process: nothing is fetched, and this checkout goes before an installed one."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}


def run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True)


def say(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
