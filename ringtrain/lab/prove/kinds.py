"""Jobs that `ringtrain prove` starts: that of a configuration, or a script with `ringtrain.fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ringtrain import config_io, sources
from ringtrain.config import Config, value_of
from ringtrain.errors import LaunchError
from ringtrain.lab.prove.outcomes import Start
from ringtrain.lab.script import Script, variables
from ringtrain.protocol import as_main
from ringtrain.protocol.for_script import ForScript
from ringtrain.run import setup

EPOCHS = 2
RECORDER = "ringtrain.lab.prove.rows:Rows"
OBSERVER = "ringtrain.lab.prove.rows:observe"
SEED = 1
"""set before a script, which may set another one"""
STRATEGIES = ("ring", "mpi-ring")
NOT_TOLD = {
    "train.patience": 0,
    "train.target_accuracy": 0,
    "train.max_time_s": 0,
    "tracking.mlflow": "",
    "tracking.wandb": "off",
    "tracking.timeline_steps": 0,
    "hvd.groups": 0,
    "hvd.fusion_mb": -1,
    "chaos": "",
}
"""options of all runs: none ends early or is told to a tracker, and the order of additions is fixed"""
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


class Kind(Protocol):
    """A job, and the commands of its starts.

    Attributes:
        of_script: Whether a start may have several runs.
    """

    of_script: bool

    def command(self, variant: Variant, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Command of the ranks of a start whose runs are in `folder`, and variables for them."""

    def changed(self, start: Start) -> list[str]:
        """Options of `PLAIN` that the job sets otherwise."""

    def another(self, num_ranks: int) -> Variant | None:
        """Start with another seed; None: no option of the job sets it."""

    def refused(self, options: Mapping[str, Any]) -> str:
        """Reason why the job refuses these options; "": it takes them."""


@dataclass(frozen=True)
class ConfiguredJob:
    """The job of options of `ringtrain.train`."""

    base: Config
    words: Sequence[str]
    steps: int
    num_ranks: int
    least_virtual: int
    of_script = False

    @classmethod
    def of(cls, words: Sequence[str], steps: int, num_ranks: int, least_virtual: int) -> ConfiguredJob:
        """Reads the options; raises ConfigError before anything starts."""
        base = config_io.read(words)
        setup.find(base)
        if base.strategy.name not in STRATEGIES:
            raise LaunchError(f"strategy.name: got {base.strategy.name}, expected {' or '.join(STRATEGIES)}")
        return cls(base, words, steps, num_ranks, least_virtual)

    def command(self, variant: Variant, folder: Path) -> tuple[list[str], dict[str, str]]:
        base = self.base
        num_parts = max(self.least_virtual, base.train.virtual_ranks)
        num_samples = self.steps * num_parts * base.train.batch_size * base.optimizer.accumulation_steps
        options = {
            **NOT_TOLD,
            "train.epochs": EPOCHS,
            "data.max_samples": num_samples,
            "schedule.warmup_epochs": min(base.schedule.warmup_epochs, 1),
            "run.directory": folder.parent,
            "run.name": folder.name,
            "run.resume": "auto",
            "run.mirror": "",
        }
        is_virtual = bool(variant.options.get("train.virtual_ranks"))
        if variant.num_ranks == 1 and not variant.is_part and not is_virtual:
            options["train.batch_size"] = base.train.batch_size * self.num_ranks
        options |= variant.options
        if variant.precision:
            options["train.precision"] = variant.precision
        words = ["python", "-m", "ringtrain.train", *self.words]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
        return [*words, "--train.callbacks", *base.train.callbacks, RECORDER], {}

    def changed(self, start: Start) -> list[str]:
        return [name for name, value in PLAIN.items() if value_of(self.base, name) != value]

    def another(self, num_ranks: int) -> Variant | None:
        return Variant(name="seed", num_ranks=num_ranks, options={"seed": self.base.seed + 1})

    def refused(self, options: Mapping[str, Any]) -> str:
        return ""


@dataclass(frozen=True)
class ScriptJob:
    """The command of a script that calls `ringtrain.fit`."""

    words: Sequence[str]
    steps: int
    num_ranks: int
    of_script = True

    @classmethod
    def of(cls, script: Script, steps: int, num_ranks: int) -> ScriptJob:
        """Checks the command. Raises LaunchError."""
        try:
            as_main.place_of_script(script.command)
        except ValueError as error:
            raise LaunchError(f"{error} after --: -- python own.py") from None
        return cls(script.command, steps, num_ranks)

    def command(self, variant: Variant, folder: Path) -> tuple[list[str], dict[str, str]]:
        options = {**NOT_TOLD, **variant.options}
        for_script = ForScript(
            by="ringtrain prove",
            options={name: value for name, value in options.items() if name.startswith(sources.OPTIONS)},
            folder=str(folder.absolute()),
            epochs=EPOCHS,
            steps=self.steps,
            ranks=self.num_ranks,
            parts=self.num_ranks if variant.is_part else 1,
            observer=OBSERVER,
        )
        words = list(self.words)
        if variant.is_seeded:
            place = as_main.place_of_script(words)
            seeded = ["-m", "ringtrain.lab.prove.seeded", str(SEED), variant.precision or "float32"]
            words[place:place] = seeded
        return words, variables(for_script)

    def changed(self, start: Start) -> list[str]:
        found: dict[str, None] = {}
        for fit in start.fits:
            options = start.outcome(fit).first("options") or {}
            for name, value in options.items():
                if name in PLAIN and value != PLAIN[name]:
                    found[name] = None
        return list(found)

    def another(self, num_ranks: int) -> Variant | None:
        return None

    def refused(self, options: Mapping[str, Any]) -> str:
        names = ", ".join(name for name in options if not name.startswith(sources.OPTIONS))
        return f"ringtrain.fit does not take {names} yet" if names else ""
