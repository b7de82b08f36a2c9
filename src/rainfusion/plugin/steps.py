"""Which denoising step a pipeline is at, without asking the device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor


class Steps:
    """Reads the scheduler's step index; counts changes of the current timestep where a scheduler has none.

    Without a pipeline the value of the forward's timestep is compared, which waits for the device.
    """

    def __init__(self, pipeline: Any | None) -> None:
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)
        self._schedule: Any = None  # of the run that is counted
        self._first: Any = None
        self._last: Any = None
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

    def current(self, timestep: Any) -> int:
        """0 for the first. `timestep`: of the forward, for those who have no pipeline."""
        pipeline = self.pipeline
        scheduler = getattr(pipeline, "scheduler", None)
        if scheduler is not None and hasattr(scheduler, "step_index"):
            first = getattr(scheduler, "begin_index", None) or 0
            index = scheduler.step_index
            return 0 if index is None else max(0, int(index) - first)
        schedule = getattr(scheduler, "timesteps", None)
        now = getattr(pipeline, "_current_timestep", None)
        if now is not None:  # a new object for every step
            return self._counted(now, schedule, now is self._last)
        if isinstance(timestep, Tensor):
            value = float(timestep.flatten()[0])
            return self._counted(value, schedule, value == self._last, begins_again=value == self._first)
        return 0

    def _counted(self, now: Any, schedule: Any, same: bool, begins_again: bool = False) -> int:
        """Changes since the schedule was made, or since the first timestep came again."""
        if schedule is not self._schedule or self._last is None or (begins_again and not same):
            self._schedule, self._first, self._count = schedule, now, 0
        elif not same:
            self._count += 1
        self._last = now
        return self._count
