"""Everything that a GPU has to show, in one command; the tests alone are `make test-gpu`.

    python tests/gpu/run.py --minutes 25          tests, checkers, times, models: as much as time allows
    python tests/gpu/run.py --only tests -k fp8   some of the tests

Steps run one after the other, what tells most first; each has a time limit, and one that would not end in time is left
out, and said. The tests are dealt out to several processes, which share the GPU; those that need it to themselves come
after. What each printed is kept in a folder, and the last lines are a table: of what was found so far, if it is
terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
SHAPES = ("wan-720p", "wan-480p", "image-4096")
ALONE = "int32"  # in the names of tests that take more memory than others leave
terminated = threading.Event()


@dataclass(frozen=True)
class Step:
    """minutes: what it takes on an H200. lines: of its output, those for the table."""

    name: str
    minutes: float
    commands: tuple[tuple[str, ...], ...] = ()
    lines: str = ""


def program(*words: str) -> tuple[str, ...]:
    return (PYTHON, *words)


def checker(tool: str) -> Step:
    call = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", PYTHON, "tests/helpers/sanitize.py")
    return Step(tool, 2.0, ((*call, "hopper"), (*call, "triton")), r".*ERROR SUMMARY.*")


BENCH = program("-m", "rainfusion", "bench")
EIGHT_BITS = ("--precision", "native", "int8", "fp8")
STEPS = (
    Step("tests", 6.0),  # see `run_tests`
    Step(
        "stages",
        2.0,
        tuple(program("benchmarks/stages.py", shape, "--seconds", "0.5", "--backend", "hopper") for shape in SHAPES),
        r".*kernel,.*|whole call.*",
    ),
    Step(
        "calls",
        4.0,
        ((*BENCH, *SHAPES, "--sparse-type", "rf_v2,enable", *EIGHT_BITS, "--seconds", "0.5", "--flex"),),
        r".*(?:hopper|Flash|Flex|cuDNN).* \d+\.\d{3} .*",
    ),
    *map(checker, ("memcheck", "synccheck", "initcheck")),
    Step(
        "models",
        6.0,
        ((*BENCH, "--model", "wan2.2-a14b", "--compile", "--sparsity", "0.85,0.9", "--precision", "native", "fp8"),),
        r"wan2.2.* \d+\.\d{3} .*",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    args, for_pytest = parser().parse_known_args(arguments)
    steps = [step for step in STEPS if step.name in args.only]
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    rows: list[tuple[str, str, str]] = []
    for i, step in enumerate(steps):
        left = (end - time.monotonic()) / 60
        if terminated.is_set():
            rows.append((step.name, "left out", "terminated before"))
            continue
        if step.minutes > left and step.name != "tests":
            rows.append((step.name, "left out", f"takes {step.minutes:g} minutes, and {max(0.0, left):.1f} are left"))
            continue
        print(f"--- {step.name}, {step.minutes:g} minutes on an H200", flush=True)
        begun = time.monotonic()
        # what the others do not need
        limit = 60 * max(min(step.minutes, left), left - sum(later.minutes for later in steps[i + 1 :]))
        log = args.out / f"{step.name}.txt"
        if step.name == "tests":
            passed, said = run_tests(args.tests, for_pytest, args.processes, limit, log)
        else:
            passed, said = run_commands(step, limit, log)
        seconds = time.monotonic() - begun
        rows += [(step.name, f"{'passed' if passed else 'FAILED'} in {seconds:.0f} s", line) for line in said or [""]]
    print("\n" + "\n".join(f"{name:10} {state:18} {line}" for name, state, line in rows), flush=True)
    states = [state.split()[0] for _, state, _ in rows]
    return 0 if "passed" in states and "FAILED" not in states else 1


def run_commands(step: Step, limit: float, log: Path) -> tuple[bool, list[str]]:
    """-> whether all of them ended well and in time; what is worth a line."""
    end, passed = time.monotonic() + limit, True
    with log.open("w") as file:
        for command in step.commands:
            print("$ " + " ".join(command), file=file, flush=True)
            try:
                code = ended(started(command, file), end - time.monotonic())
                print("it took too long" if code is None else f"exit status {code}", file=file, flush=True)
                passed = passed and code == 0
            except FileNotFoundError as error:
                print(error, file=file)
                passed = False
    text = log.read_text()
    found = re.findall(f"^(?:{step.lines})$", text, re.MULTILINE)
    return passed, found if passed else [*found, *text.splitlines()[-1:]]


def run_tests(
    tests: Sequence[str], for_pytest: Sequence[str], processes: int, limit: float, log: Path
) -> tuple[bool, list[str]]:
    """Dealt out in turn to so many processes, and those that want the GPU to themselves after that."""
    settings = ("-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider")
    pytest = program("-m", "pytest", *settings, "-m", "gpu", *for_pytest)
    listed = subprocess.run(
        [*pytest, "-q", "--collect-only", *tests], cwd=ROOT, capture_output=True, text=True, env=variables()
    )
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    if listed.returncode != 0 or not names:
        log.write_text(listed.stdout + listed.stderr)
        return False, [f"tests could not be collected, or there are none: see {log}"]
    alone = [name for name in names if ALONE in name]
    others = [name for name in names if ALONE not in name]
    shards = [shard for shard in (others[i::processes] for i in range(processes)) if shard]
    end, texts, codes = time.monotonic() + limit, [], []
    with tempfile.TemporaryDirectory() as folder:
        for group in filter(None, (shards, [alone] if alone else [])):
            found = run_side_by_side((*pytest, "-v"), group, Path(folder), lambda: end - time.monotonic())
            texts += [text for text, _ in found]
            codes += [code for _, code in found]
    log.write_text("\n".join(texts))
    ended_as = [match.groups() for match in map(RESULT.match, "\n".join(texts).splitlines()) if match]
    counts = {kind: sum(how == kind.upper() for _, how in ended_as) for kind in KINDS}
    ran = len({name for name, _ in ended_as})
    said = [", ".join(f"{number} {kind}" for kind, number in counts.items() if number) + f", of {len(names)} tests"]
    said += [f"{how} {name}" for name, how in ended_as if how in ("FAILED", "ERROR")]
    if ran < len(names):
        said.append(f"{len(names) - ran} did not run in time, or with what stopped their process: see {log}")
    return ran == len(names) and all(code == 0 for code in codes), said


KINDS = ("passed", "failed", "skipped", "error", "xfail", "xpass")
RESULT = re.compile(rf"(\S+::.*?) ({'|'.join(KINDS).upper()})\b")  # of a test, a line each


def run_side_by_side(
    pytest: tuple[str, ...], shards: Sequence[Sequence[str]], folder: Path, left: Callable[[], float]
) -> list[tuple[str, int]]:
    """What pytest printed for each part of the tests, and its exit status."""
    running = []
    for i, shard in enumerate(shards):
        names, printed = folder / f"tests{i}.txt", folder / f"printed{i}.txt"
        names.write_text("\n".join(shard))
        with printed.open("w") as file:
            running.append((started([*pytest, f"@{names}"], file), printed))
    codes = [ended(process, left()) for process, _ in running]
    return [
        (printed.read_text(), 1 if code is None else code) for code, (_, printed) in zip(codes, running, strict=True)
    ]


def started(command: Sequence[str], file: TextIO) -> subprocess.Popen[bytes]:
    """In a session of its own, so that what it starts can be ended with it."""
    return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=variables(), start_new_session=True)


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit status; None if it took longer than that, or this is terminated: then all that it started is killed."""
    end = time.monotonic() + max(1.0, seconds)
    while not terminated.is_set() and (left := end - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=min(1.0, left))
    os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in a driver
        process.wait(timeout=10)
    return None


def variables() -> dict[str, str]:
    """Of every process: one thread of the CPU each, and this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="Other options are pytest's."
    )
    names = [step.name for step in STEPS]
    made.add_argument(
        "--only", nargs="+", default=names, choices=names, metavar="STEP",
        help=f"of these, in their order: {', '.join(names)} (default: all)",
    )  # fmt: skip
    made.add_argument("--minutes", type=float, default=60.0, help="for all of it (default: 60)")
    made.add_argument(
        "--processes",
        type=int,
        default=max(1, min(15, (os.cpu_count() or 2) - 1)),
        help="for the tests (at most 15 by default)",
    )
    made.add_argument(
        "--tests", nargs="+", default=["tests/gpu"], help="files or folders of this checkout (default: tests/gpu)"
    )
    made.add_argument("--out", type=Path, default=ROOT / "gpu-report", help="a folder (default: gpu-report)")
    return made


if __name__ == "__main__":
    sys.exit(main())
