"""Which denoising step a pipeline is at, without asking the device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor


class Steps:
    """Counts how often what a pipeline says of its progress has changed since its schedule was made.

    That is the current timestep, where the pipeline tells it (a new object for every step), or else the scheduler's
    step index. Without a pipeline the value of the forward's timestep is compared, which waits for the device.
    """

    def __init__(self, pipeline: Any | None) -> None:
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)
        self._schedule: Any = None  # of the run that is counted
        self._first: Any = None
        self._last: Any = None
        self._rises: bool | None = None  # whether the timesteps of the run do, once two of them are known
        self._count = 0

    @property
    def pipeline(self) -> Any | None:
        return None if self._pipeline is None else self._pipeline()

    def total(self) -> int | None:
        """Steps of the run, if the pipeline says so."""
        pipeline = self.pipeline
        number = getattr(pipeline, "_num_timesteps", None)
        if isinstance(number, int):
            return number
        timesteps = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        return None if timesteps is None else len(timesteps)

    def current(self, timestep: Any, *, may_wait: bool = True) -> int | None:
        """0 for the first. `timestep`: of the forward, for those who have no pipeline.

        None: it is not known without waiting for the device, and that may not be.
        """
        pipeline = self.pipeline
        scheduler = getattr(pipeline, "scheduler", None)
        schedule = getattr(scheduler, "timesteps", None)
        told = getattr(pipeline, "_current_timestep", None)
        if told is not None:
            return self._counted(told, schedule, told is self._last)
        if scheduler is not None and hasattr(scheduler, "step_index"):
            index = scheduler.step_index  # None before the first step
            return self._counted((index,), schedule, (index,) == self._last, begins_again=index is None)
        if not may_wait:
            return None
        if isinstance(timestep, Tensor):  # of each token, perhaps, where given frames have 0
            value = float(timestep.max())
            return self._counted(value, schedule, value == self._last, begins_again=self._turns_back(value))
        return 0

    def _turns_back(self, value: float) -> bool:
        """The first timestep again, or one that lies against the run's direction: a new run begins."""
        if not isinstance(self._last, float) or value == self._last:
            return False
        rises = value > self._last
        if value == self._first or (self._rises is not None and rises is not self._rises):
            self._rises = None
            return True
        self._rises = rises
        return False

    def _counted(self, now: Any, schedule: Any, same: bool, begins_again: bool = False) -> int:
        if schedule is not self._schedule or self._last is None or (begins_again and not same):
            self._schedule, self._first, self._count = schedule, now, 0
        elif not same:
            self._count += 1
        self._last = now
        return self._count
