"""Peak memory of a piece of work, on a GPU or a CPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def peak_memory(work: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """Runs `work` and returns its result, and the most bytes it held at once beyond those held before.

    The result counts among them. They are None where the system does not tell: on a CPU the kernel's own count of
    resident memory is read, which only Linux has.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu" or not _reset_peak():
        return work(), None
    before = _status_bytes("VmRSS")
    result = work()
    return result, max(0, _status_bytes("VmHWM") - before)


def _reset_peak() -> bool:
    """Hands freed memory back and sets the peak to what is resident now; False where that cannot be done."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
