"""A model over several processes, with diffusers' context parallelism, is as if it ran in one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "helpers" / "context_parallel.py"


@pytest.mark.parametrize(
    ("processes", "cases"), [(2, 20), pytest.param(4, 11, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_as_if_there_were_one(processes, cases, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(processes), str(tmp_path / "store")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    results = [process.communicate(timeout=600) for process in running]
    for process, (out, error) in zip(running, results, strict=True):
        lines = out.splitlines()
        assert process.returncode == 0, error[-2000:]
        assert [line for line in lines if not line.endswith(": ok")] == []
        assert len(lines) == cases
