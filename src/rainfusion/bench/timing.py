"""Milliseconds of calls that take turns: by CUDA events on a GPU, by the wall clock elsewhere."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

Call = Callable[[], object]

_BURST_MS = 2.0  # calls shorter than this are timed several at once
_MOST_CALLS = 64  # calls in a burst, at most
_LEAST_ROUNDS = 3  # rounds that are made whatever the time limit is
_HEAD_START_CYCLES = 2_000_000  # about 1 ms of a GPU's clock, in which the host queues the first calls


@dataclass(frozen=True)
class Timing:
    """The median and the quartiles of one call's times, in milliseconds."""

    ms: float
    low_ms: float
    high_ms: float
    rounds: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """From the times of all rounds."""
        if len(times) == 1:
            return cls(times[0], times[0], times[0], 1)
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(middle, low, high, len(times))


class Clock(Protocol):
    """Measures how long calls take."""

    def milliseconds(self, calls: Sequence[Call]) -> float:
        """Makes the calls, one after the other, and returns the time of all of them together."""


class WallClock:
    """The clock for a CPU, and for devices without events: it waits for the device before and after the calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def milliseconds(self, calls: Sequence[Call]) -> float:
        self._synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        self._synchronize()
        return 1000 * (time.perf_counter() - start)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class EventClock:
    """The clock for CUDA: it tells the time on the device, as it is in a model where the host has queued work ahead.

    A short pause on the device comes first, so that the launch of the first call does not count. A call that takes
    longer on the host than on the device still shows it, since a burst is many of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def milliseconds(self, calls: Sequence[Call]) -> float:
        with torch.cuda.device(self.device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(_HEAD_START_CYCLES)
            start.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))


def clock_for(device: torch.device) -> Clock:
    """CUDA events on an NVIDIA or AMD GPU, the wall clock elsewhere."""
    return EventClock(device) if device.type == "cuda" else WallClock(device)


class _Runner:
    """One contender, which makes its calls over several sets of inputs in turn, in bursts, within its time."""

    def __init__(self, calls: Sequence[Call], clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.times: list[float] = []
        self.spent = 0.0  # in milliseconds
        self._next = cycle(calls)
        once = self._burst(1)  # the first call warms up
        if once < 1000 * seconds / 8:
            once = self._burst(min(_MOST_CALLS, max(len(calls), math.ceil(_BURST_MS / max(once, 1e-3)))))
        self.number = min(_MOST_CALLS, max(1, math.ceil(_BURST_MS / max(once, 1e-3))))

    def _burst(self, number: int) -> float:
        """Makes so many calls and returns the milliseconds of one."""
        return self.clock.milliseconds([next(self._next) for _ in range(number)]) / number

    def round(self) -> None:
        ms = self._burst(self.number)
        self.times.append(ms)
        self.spent += ms * self.number

    def done(self, repeats: int) -> bool:
        rounds = len(self.times)
        return rounds >= repeats or (rounds >= min(_LEAST_ROUNDS, repeats) and self.spent >= 1000 * self.seconds)


def take_turns(
    contenders: Sequence[Sequence[Call]],
    clock: Clock,
    *,
    repeats: int,
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Timing]:
    """Times all contenders, each a list of calls that do the same on different memory.

    Rounds go through all contenders, so that a slow moment of the machine hits all of them, until each has had
    `repeats` rounds or its `seconds`. Every round has an order of its own: a GPU at its power limit runs faster after
    a call that let it cool.
    """
    runners = [_Runner(calls, clock, seconds) for calls in contenders]
    shuffled = random.Random(0)
    number = 0
    while any(not runner.done(repeats) for runner in runners):
        number += 1
        tell(f"round {number}")
        for runner in shuffled.sample(runners, len(runners)):
            if not runner.done(repeats):
                runner.round()
    return [Timing.of(runner.times) for runner in runners]


def host_milliseconds(call: Call, device: torch.device, rounds: int = 20) -> float | None:
    """Of the host, until it has launched a call; None on a CPU, which does the work itself."""
    if device.type != "cuda":
        return None
    times = []
    for _ in range(rounds + 3):  # the first ones warm up
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def copies_needed(inputs: Sequence[Tensor], cache_bytes: int, most: int = 16) -> int:
    """How many sets of these inputs to rotate among, so that a call does not find its own in the cache.

    One, if a set is twice the cache; else as many as make three times the cache.
    """
    size = sum(x.numel() * x.element_size() for x in inputs)
    if size == 0 or size >= 2 * cache_bytes:
        return 1
    return min(most, math.ceil(3 * cache_bytes / size))


def cache_bytes(device: torch.device) -> int:
    """The size of a GPU's L2 cache; 0 elsewhere, where no inputs are rotated."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def matmul_tflops(device: torch.device, size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """TFLOP/s of a large matrix product on random data; zeros would draw less power and run faster."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    (timing,) = take_turns([[lambda: a @ b]], clock_for(device), repeats=50, seconds=0.5)
    return 2 * size**3 / timing.ms / 1e9
