"""A model over several processes, with diffusers' context parallelism, is as if it ran in one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import needs_diffusers

needs_diffusers()

pytestmark = pytest.mark.timeout(1800)

PROGRAM = Path(__file__).parents[1] / "helpers" / "context_parallel.py"


@pytest.mark.parametrize(("processes", "cases"), [(2, 20), pytest.param(4, 11, marks=pytest.mark.slow)])
def test_as_if_there_were_one(processes, cases, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(processes), str(tmp_path / "store")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    results = [process.communicate(timeout=1500) for process in running]
    for process, (out, error) in zip(running, results, strict=True):
        lines = out.splitlines()
        assert process.returncode == 0, error[-2000:]
        assert [line for line in lines if not line.endswith(": ok")] == []
        assert len(lines) == cases
