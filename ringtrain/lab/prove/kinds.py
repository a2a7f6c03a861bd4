"""The job that `ringtrain prove` starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtrain import config_io, sources
from ringtrain.config import Config, value_of
from ringtrain.errors import LaunchError
from ringtrain.lab.prove.outcomes import Start
from ringtrain.lab.script import Script, variables
from ringtrain.protocol import as_main
from ringtrain.protocol.for_script import ForScript
from ringtrain.run import setup

EPOCHS = 2
RECORDER = "ringtrain.lab.prove.rows:of_trainer"
OBSERVER = "ringtrain.lab.prove.rows:observe"
SEED = 1
"""set before a script, which may set another one"""
STRATEGIES = ("ring", "mpi-ring")
NOT_TOLD = {
    "train.patience": 0,
    "train.target_accuracy": 0,
    "train.max_time_s": 0,
    "tracking.timeline_steps": 0,
    "hvd.groups": 0,
    "hvd.fusion_mb": -1,
    "chaos": "",
}
"""options of all runs: none ends early, and the order of additions is fixed"""
PLAIN = {
    "train.precision": "float32",
    "train.virtual_ranks": 0,
    "hvd.compression": "none",
    "hvd.local_steps": 1,
    "hvd.op": "average",
}
"""options of runs that are compared with one process, which does not round, leave out or add up as these do"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a start of a job differs from the job itself."""

    name: str
    num_ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    is_part: bool = False
    """whether a part of each batch is trained alone"""
    precision: str = ""
    is_seeded: bool = True
    """whether a script is started with a seed"""


@dataclass(frozen=True)
class Job:
    """The command of a script that calls `ringtrain.fit`, or of the trainer."""

    script: Script
    steps: int
    num_ranks: int

    def check(self) -> None:
        """Raises LaunchError for a command that cannot be proved."""
        try:
            as_main.place_of_script(self.script.command)
        except ValueError as error:
            raise LaunchError(f"{error} after --: -- python own.py") from None
        if self.script.is_trainer:
            setup.find(self._base)
            if self._base.strategy.name not in STRATEGIES:
                raise LaunchError(f"strategy.name: got {self._base.strategy.name}, expected {' or '.join(STRATEGIES)}")

    @property
    def _base(self) -> Config:
        """Configuration of the trainer."""
        return config_io.read(self.script.train_args)

    def command(self, variant: Variant, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Command of the ranks of a start whose runs are in `folder`, and variables for them."""
        given: dict[str, Any] = {"by": "ringtrain prove", "folder": str(folder.absolute())}
        options = {**NOT_TOLD, **variant.options}
        words = list(self.script.command)
        if self.script.is_trainer:
            of_trainer = {**options, **self._of_trainer(variant)}
            return words, variables(ForScript(**given, options=of_trainer))
        if variant.is_seeded:
            place = as_main.place_of_script(words)
            words[place:place] = ["-m", "ringtrain.lab.prove.seeded", str(SEED), variant.precision or "float32"]
        of_fit = {name: value for name, value in options.items() if name.startswith(sources.OPTIONS)}
        parts = self.num_ranks if variant.is_part else 1
        given |= {"epochs": EPOCHS, "steps": self.steps, "ranks": self.num_ranks, "parts": parts, "observer": OBSERVER}
        return words, variables(ForScript(**given, options=of_fit))

    def _of_trainer(self, variant: Variant) -> dict[str, Any]:
        """Options of a start of the trainer, whose batch is that of one rank."""
        base = self._base
        is_virtual = bool(variant.options.get("train.virtual_ranks"))
        batch_size = base.train.batch_size
        if variant.num_ranks == 1 and not variant.is_part and not is_virtual:
            batch_size *= self.num_ranks
        num_parts = max(least_virtual(self.num_ranks + 1), base.train.virtual_ranks)
        return {
            "train.epochs": EPOCHS,
            "train.batch_size": batch_size,
            "train.callbacks": (*base.train.callbacks, RECORDER),
            "data.max_samples": self.steps * num_parts * base.train.batch_size * base.optimizer.accumulation_steps,
            "schedule.warmup_epochs": min(base.schedule.warmup_epochs, 1),
            **({"train.precision": variant.precision} if variant.precision else {}),
        }

    def changed(self, start: Start) -> list[str]:
        """Options of `PLAIN` that the job sets otherwise."""
        if self.script.is_trainer:
            return [name for name, value in PLAIN.items() if value_of(self._base, name) != value]
        found: dict[str, None] = {}
        for fit in start.fits:
            options = start.outcome(fit).first("options") or {}
            for name, value in options.items():
                if name in PLAIN and value != PLAIN[name]:
                    found[name] = None
        return list(found)


def least_virtual(num_ranks: int) -> int:
    """Least number of virtual ranks for a number of ranks."""
    return 1 << (num_ranks - 1).bit_length()
