"""A call that is launched again launches what it would anew: of every kind, by both backends, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "helpers" / "repeats.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only")
CALLS = 2 * 3 * 2 * 8 - 3 * 2  # backends, precisions, with and without an LSE, kinds; `hopper` has none that is causal

# prints which faults are found: what is wrong, and in which calls, with an argument that runs the record wrongly
FAULTS = """
import sys; sys.path.insert(0, sys.argv[1])
from types import SimpleNamespace
from helpers import repeats
from rainfusion import replaying
from rainfusion.backends import hopper, triton
run, place = replaying.Recording.run, replaying._Place
swapped = lambda mask: SimpleNamespace(counts=mask.indices, indices=mask.counts)
def at_the_start(self):
    self._places = [place(base, 0) for base, _ in self._places]
FAULTS = {
    "nothing": ("enable", lambda self, x, device, budget: run(self, x, device, budget)),
    "lists of a mask": ("a mask", lambda self, x, *more: run(self, x._replace(mask=swapped(x.mask)), *more)),
    "q and k": ("a mask", lambda self, x, *more: run(self, x._replace(q=x.k, k=x.q), *more)),
    "a budget": ("enable", lambda self, x, device, budget: run(self, x, device, budget + 1)),
    "memory between": ("enable", lambda self, *more: (at_the_start(self), run(self, *more))[1]),
    "a launch": ("published", lambda self, *more: (self._launches.pop(), run(self, *more))[1]),
    "a result": ("enable", lambda self, *more: run(self, *more)[::-1]),
}
for name, (kind, faulty) in FAULTS.items():
    replaying.Recording.run = faulty
    for backend in (hopper, triton):
        try:
            repeats.check(repeats.KINDS[kind], backend, "fp8", True)
        except repeats.Differs:
            print(name)
"""


def run(*arguments):
    """Another process, because this one may have Triton's interpreter on."""
    environment = dict(os.environ, TRITON_INTERPRET="0")
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)


def test_what_is_launched_again_is_what_is_launched_anew():
    done = run(SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("launches, the same") == CALLS, done.stdout


def test_what_is_launched_wrongly_is_found():
    done = run("-c", FAULTS, TESTS)
    found = ["lists of a mask", "q and k", "a budget", "memory between", "a launch", "a result"]
    assert done.stdout.splitlines() == [name for name in found for _ in range(2)], done.stdout + done.stderr
