"""Clock and steps of a simulated job. Each second of the clock is in one part, as in `monitor.goodput`."""

from __future__ import annotations

import math
from dataclasses import dataclass

PARTS = {
    "steps": "steps that count, as fast as with all ranks",
    "fewer": "the time that these steps take longer with fewer ranks",
    "save": "checkpoints, while training waits",
    "repeated": "steps made again after a failure",
    "start": "starts, up to the first step",
    "restore": "reading a checkpoint back",
    "resize": "changes of an elastic job's ranks",
    "restart": "from a failure to the next start",
    "wait": "an elastic job's wait for hosts",
}
"""parts of the clock, with their names for readers"""


@dataclass(frozen=True)
class Schedule:
    """Steps of a job, and its checkpoints.

    Attributes:
        num_steps: Number of steps that count.
        steps_per_save: Number of steps between two checkpoints; the last step is always saved.
        step_s: Seconds of a step with all ranks.
        save_s: Seconds for which a checkpoint holds up training.
    """

    num_steps: int
    steps_per_save: int
    step_s: float
    save_s: float


class Training:
    """Training of one job. `speed` is the number of ranks as a fraction of all ranks; step times are in proportion."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.now_s = 0.0
        self.saved = 0
        """number of steps that the newest checkpoint has"""
        self.unsaved = 0.0
        """number of steps since that checkpoint, with the one under way"""
        self.unsaved_s = 0.0
        """seconds that these took; in no part yet"""

    @property
    def global_step(self) -> int:
        """Number of complete steps."""
        return self.saved + math.floor(self.unsaved)

    def spend(self, part: str, seconds: float) -> None:
        """Lets time pass without training."""
        self.seconds[part] += seconds
        self.now_s += seconds

    def time_to_end_s(self, speed: float) -> float:
        """Seconds until the last checkpoint, without failures."""
        schedule = self.schedule
        num_steps = schedule.num_steps - self.saved - self.unsaved
        num_saves = math.ceil((schedule.num_steps - self.saved) / schedule.steps_per_save)
        return num_steps * schedule.step_s / speed + num_saves * schedule.save_s

    def finish(self, speed: float) -> None:
        """Trains to the last checkpoint."""
        self._train_to_save(speed)
        self._train_full(self._num_full(), speed)
        if self.saved < self.schedule.num_steps:
            self._train_to_save(speed)

    def train(self, seconds: float, speed: float) -> None:
        """Trains for a time that ends before the job does. It may end inside a checkpoint, which is then not saved."""
        schedule = self.schedule
        to_save_s = self._steps_to_save() * schedule.step_s / speed + schedule.save_s
        if seconds >= to_save_s:
            self._train_to_save(speed)
            seconds -= to_save_s
            full_s = schedule.steps_per_save * schedule.step_s / speed + schedule.save_s
            num_full = min(int(seconds / full_s), self._num_full())
            self._train_full(num_full, speed)
            seconds = max(0.0, seconds - num_full * full_s)
        steps_s = min(seconds, self._steps_to_save() * schedule.step_s / speed)
        self._train_steps(steps_s * speed / schedule.step_s, steps_s)
        self.spend("save", seconds - steps_s)

    def lose_unsaved(self) -> None:
        """Goes back to the newest checkpoint."""
        self.seconds["repeated"] += self.unsaved_s
        self.unsaved, self.unsaved_s = 0.0, 0.0

    def lose_step(self, speed: float) -> None:
        """Goes back to the last complete step."""
        begun = self.unsaved - math.floor(self.unsaved)
        seconds = min(self.unsaved_s, begun * self.schedule.step_s / speed)
        self.seconds["repeated"] += seconds
        self.unsaved_s -= seconds
        self.unsaved = float(math.floor(self.unsaved))

    def _steps_to_save(self) -> float:
        """Number of steps before the next checkpoint."""
        schedule = self.schedule
        return max(0.0, min(schedule.steps_per_save, schedule.num_steps - self.saved) - self.unsaved)

    def _num_full(self) -> int:
        """Number of checkpoints with a full interval before them, from a checkpoint on, without the last one."""
        schedule = self.schedule
        return max(0, math.ceil((schedule.num_steps - self.saved) / schedule.steps_per_save) - 1)

    def _train_steps(self, steps: float, seconds: float) -> None:
        self.unsaved += steps
        self.unsaved_s += seconds
        self.now_s += seconds

    def _train_to_save(self, speed: float) -> None:
        steps = self._steps_to_save()
        self._train_steps(steps, steps * self.schedule.step_s / speed)
        num_steps = round(self.unsaved)
        steps_s = num_steps * self.schedule.step_s
        self.saved += num_steps
        self.seconds["steps"] += steps_s
        self.seconds["fewer"] += self.unsaved_s - steps_s
        self.unsaved, self.unsaved_s = 0.0, 0.0
        self.spend("save", self.schedule.save_s)

    def _train_full(self, num_saves: int, speed: float) -> None:
        """Trains several full intervals with their checkpoints, from a checkpoint on."""
        num_steps = num_saves * self.schedule.steps_per_save
        steps_s = num_steps * self.schedule.step_s
        self.saved += num_steps
        self.spend("steps", steps_s)
        self.spend("fewer", steps_s / speed - steps_s)
        self.spend("save", num_saves * self.schedule.save_s)
