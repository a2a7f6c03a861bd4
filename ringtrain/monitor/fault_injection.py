"""Fault injector, to test how a job handles failures: --chaos "rank=1 step=20 mode=sigkill".

A fault happens once per run: it is recorded in the run folder, so that a restarted job continues past it.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringtrain.errors import ConfigError

if TYPE_CHECKING:
    import keras

    from ringtrain.monitor.journal import Journal

AT_A_SAVE = ("disk-full", "corrupt-checkpoint")
MODES = ("exception", "exit", "sigterm", "sigkill", "sigstop", "slow", "nan", *AT_A_SAVE)
FORM = (
    'expected such as "rank=1 step=20 mode=sigkill", with step= or epoch=, seed= and seconds= as numbers; during=save'
    f" and the modes {' and '.join(AT_A_SAVE)} are of rank 0; mode is one of {', '.join(MODES)}"
)


class ChaosError(Exception):
    """Exception of mode=exception. Not a RingtrainError, since it simulates a bug."""


@dataclass(frozen=True)
class Fault:
    """Fault of one rank and its time."""

    mode: str
    rank: int = 0
    step: int = 0
    """global step after which the fault happens; 0: random step, drawn with the seed"""
    epoch: int = 0
    """epoch, counted from 1, after whose last step the fault happens; 0: use `step`"""
    during: str = ""
    """"save": happens while rank 0 writes the next checkpoint after that step, always so with disk-full"""
    seed: int = 0
    seconds: float = 0.2
    """mode slow: pause in every later step"""


def parse(text: str) -> tuple[Fault, ...]:
    """Parses faults, such as "rank=1 step=20 mode=sigkill", separated by commas; "": none. Raises ConfigError."""
    return tuple(_fault(part) for part in text.split(",") if part.strip())


def _fault(text: str) -> Fault:
    types = {"mode": str, "during": str, "seconds": float}
    try:
        values = dict(word.split("=") for word in text.split())
        return _checked(Fault(**{key: types.get(key, int)(value) for key, value in values.items()}))
    except (ValueError, TypeError):
        raise ConfigError(f"chaos: got {text.strip()!r}, {FORM}") from None


def _checked(fault: Fault) -> Fault:
    """Raises ValueError for a fault that cannot happen."""
    if fault.mode == "disk-full":
        fault = dataclasses.replace(fault, during="save")
    at_a_save = fault.during or fault.mode in AT_A_SAVE
    is_right = fault.mode in MODES and fault.during in ("", "save") and not (fault.step and fault.epoch)
    is_right = is_right and not (fault.during and fault.mode in ("slow", "nan", "corrupt-checkpoint"))
    if not is_right or (fault.rank and at_a_save) or min(fault.rank, fault.step, fault.epoch, fault.seconds) < 0:
        raise ValueError(fault)
    return fault


class FaultInjector:
    """Injects faults on one rank, each once per run: `folder` is the run folder, where they are recorded."""

    def __init__(
        self,
        faults: tuple[Fault, ...],
        rank: int,
        num_steps: int,
        steps_per_epoch: int,
        folder: Path,
        journal: Journal,
        kill: Callable[[int], None] = lambda number: os.kill(os.getpid(), number),
    ) -> None:
        self.journal = journal
        self.kill = kill
        self.checkpoints = folder / "checkpoints"
        self.notes = folder / "logs" / f"chaos-{rank}.log"
        happened: list[str] = []
        if self.notes.exists():
            happened = self.notes.read_text().splitlines()
        self.waiting: dict[str, tuple[int, Fault]] = {}
        for number, fault in enumerate(faults):
            name = f"{number} {fault}"
            if name in happened and fault.mode != "slow":
                continue
            if fault.rank == rank:
                self.waiting[name] = _step_of(fault, num_steps, steps_per_epoch), fault
        self.pause_s = 0.0

    def after_step(self, global_step: int, model: keras.Model) -> None:
        """Injects the faults that are due after a step."""
        for name, (step, fault) in list(self.waiting.items()):
            due = global_step >= step and not fault.during
            if due and (fault.mode != "corrupt-checkpoint" or any(self.checkpoints.glob("step-*"))):
                self._happen(name, fault, global_step, model)
        time.sleep(self.pause_s)

    def while_saving(self, global_step: int) -> None:
        """Injects the faults that are due while the checkpoint of a step is written."""
        for name, (step, fault) in list(self.waiting.items()):
            if global_step >= step and fault.during:
                self._happen(name, fault, global_step, None)

    def _happen(self, name: str, fault: Fault, global_step: int, model: keras.Model | None) -> None:
        del self.waiting[name]
        self.journal.write("fault", global_step=global_step, mode=fault.mode, during=fault.during)
        with open(self.notes, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
            file.flush()
            os.fsync(file.fileno())
        if fault.mode == "exception":
            raise ChaosError(f"injected by --chaos: {fault}")
        if fault.mode == "exit":
            os._exit(1)
        if fault.mode == "disk-full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault.mode == "corrupt-checkpoint":
            newest = max(self.checkpoints.glob("step-*"))
            return corrupt(max(newest.iterdir(), key=lambda file: file.stat().st_size))
        if fault.mode == "slow":
            self.pause_s = fault.seconds
        elif fault.mode == "nan" and model is not None:
            weight = model.trainable_weights[0]
            weight.assign(weight * float("nan"))
        else:
            self.kill(getattr(signal, fault.mode.upper()))


def corrupt(path: Path) -> None:
    """Flips a bit in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _step_of(fault: Fault, num_steps: int, steps_per_epoch: int) -> int:
    return fault.step or fault.epoch * steps_per_epoch or random.Random(fault.seed).randint(1, num_steps)
