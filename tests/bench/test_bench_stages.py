"""benchmarks/stages.py: what it makes of a profile; the rest of it needs a GPU."""

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from helpers import benchmarks


def test_times_of_kernels_are_those_of_one_call():
    stages = benchmarks.load("stages")
    event = lambda name, us, on=DeviceType.CUDA: SimpleNamespace(name=name, device_time=us, device_type=on)  # noqa: E731
    calls = [event("gather_kernel", 80.0), event("fill<int, 4>", 8.0), event("fill<float>", 8.0)] * 8
    found = stages.kernel_times([*calls, event("cudaLaunchKernel", 500.0, DeviceType.CPU)])
    assert found == {"gather_kernel": pytest.approx(0.08), "fill": pytest.approx(0.016)}


def test_help_has_examples(capsys):
    stages = benchmarks.load("stages")
    with pytest.raises(SystemExit, match="0"):
        stages._parser().parse_args(["--help"])
    assert "stages.py wan-720p --recommended --sparsity 0.85 --by-kernel" in capsys.readouterr().out
