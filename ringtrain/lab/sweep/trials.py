"""What the trials of a sweep train: a configuration, or a script with `ringtrain.fit`."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ringtrain import config_io
from ringtrain.config import Config, nearest, option_types, value_of, with_values
from ringtrain.errors import LaunchError
from ringtrain.lab import jobs, script
from ringtrain.lab.script import Script
from ringtrain.lab.sweep.study import Trial
from ringtrain.protocol.for_script import ForScript, Tuned
from ringtrain.protocol.json_text import INVALID, parse_json

BY = "ringtrain sweep"


@dataclass(frozen=True)
class Start:
    """Command and variables of the ranks of a trial."""

    command: Sequence[str]
    environ: Mapping[str, str]


class Trials(Protocol):
    """Trials of one job.

    Attributes:
        monitor: Metric that they are compared by.
        seed: Of the sampler.
        fix: How the user gives the sweep another folder.
    """

    monitor: str
    seed: int
    fix: str

    def settings(self) -> dict[str, Any]:
        """Settings that all starts of the sweep have in common."""

    def start(self, folder: Path, starts: Path, values: Mapping[str, Any]) -> Start:
        """How a trial with these values is started, or goes on. Raises ConfigError for invalid combinations."""

    def is_done(self, folder: Path) -> bool:
        """Whether a trial need not be started again."""

    def num_epochs(self, values: Mapping[str, Any]) -> float:
        """Epochs of a trial; infinite if they are not known."""

    def runs(self, folder: Path) -> list[Path]:
        """Runs of a trial, the last one last."""

    def write_best(self, folder: Path, best: Trial, num_trials: int, num_ranks: int) -> str:
        """Writes the values of the best trial, and returns the command that trains with them."""


class ConfiguredTrials:
    """Trials of ringtrain.train with a configuration."""

    fix = "--run.name after --"

    def __init__(self, base: Config) -> None:
        self.base, self.monitor, self.seed = base, base.train.monitor, base.seed

    def settings(self) -> dict[str, Any]:
        return {option: value_of(self.base, option) for option in option_types() if not option.startswith("run.")}

    def start(self, folder: Path, starts: Path, values: Mapping[str, Any]) -> Start:
        own = {
            "run.name": folder.name,
            "run.directory": str(folder.parent),
            "run.resume": "auto",
            "run.mirror": "",
        }
        config = with_values(self.base, {**values, **own})
        if folder.exists() and not (folder / "config.toml").exists():
            shutil.rmtree(folder)  # an earlier attempt ended after creating it
        toml = starts / f"{folder.name}.toml"
        toml.write_text(config_io.to_toml(config), encoding="utf-8")
        return Start(["python", "-m", "ringtrain.train", "--config", str(toml)], {})

    def is_done(self, folder: Path) -> bool:
        return jobs.is_done(folder)

    def num_epochs(self, values: Mapping[str, Any]) -> float:
        return float(values.get("train.epochs", self.base.train.epochs))

    def runs(self, folder: Path) -> list[Path]:
        return [folder]

    def write_best(self, folder: Path, best: Trial, num_trials: int, num_ranks: int) -> str:
        launch = f"ringtrain launch -np {num_ranks} -- python -m ringtrain.train --config {folder / 'best.toml'}"
        made = f"# Made by ringtrain sweep: trial {best.number} of {num_trials}, {self.monitor} {best.value}."
        unnamed = {"run.name": "", "run.directory": self.base.run.directory}
        text = config_io.to_toml(with_values(self.base, {**best.values, **unnamed}))
        (folder / "best.toml").write_text(f"{made}\n#   {launch}\n{text}", encoding="utf-8")
        return launch


class ScriptTrials:
    """Trials of a script, which reads their values from its command line or from `ringtrain.trial`.

    Args:
        templates: Words of the command line with names of values in braces.
        names: Of all values.
    """

    fix, seed = "--folder", 0

    def __init__(self, job: Script, templates: Sequence[str], monitor: str, names: Collection[str]) -> None:
        self.job, self.templates, self.monitor = job, templates, monitor or "val_loss"
        self._arguments(dict.fromkeys(names, 1))  # report a mistake before anything starts

    def _arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Words of the command line for these values."""
        words = []
        for template in self.templates:
            try:
                words += [word.format_map(values) for word in shlex.split(template)]
            except KeyError as error:
                name = str(error.args[0])
                raise LaunchError(f"got --set {template!r}: unknown value {name}: {nearest(name, [*values])}") from None
            except (ValueError, LookupError, AttributeError) as error:
                raise LaunchError(f"got --set {template!r}, expected e.g. '--lr={{learning_rate}}': {error}") from None
        return words

    def settings(self) -> dict[str, Any]:
        return {"command": [*self.job.command], "--set": [*self.templates], "--monitor": self.monitor}

    def start(self, folder: Path, starts: Path, values: Mapping[str, Any]) -> Start:
        options, own = script.divided(values)
        for_script = ForScript(by=BY, options=options, trial=own, folder=os.path.abspath(folder))
        return Start([*self.job.command, *self._arguments(own)], script.variables(for_script))

    def is_done(self, folder: Path) -> bool:
        return False  # only the script knows: its complete runs are not trained again

    def num_epochs(self, values: Mapping[str, Any]) -> float:
        return math.inf

    def runs(self, folder: Path) -> list[Path]:
        return script.runs_in(folder)

    def write_best(self, folder: Path, best: Trial, num_trials: int, num_ranks: int) -> str:
        options, own = script.divided(best.values)
        path, by = folder / "best.json", f"{BY}, trial {best.number}"
        Tuned(by=by, options=options, trial=own).write(path, monitor=self.monitor, value=best.value)
        command = shlex.join([*self.job.command, *self._arguments(own)])
        return f"ringtrain launch -np {num_ranks} --tuned {path} -- {command}"


def epochs_of(runs: Sequence[Path], monitor: str) -> list[tuple[int, float | None]]:
    """Epochs of a trial with their monitored value, counted through all its runs."""
    epochs: list[tuple[int, float | None]] = []
    for run in runs:
        before = epochs[-1][0] if epochs else 0
        with contextlib.suppress(FileNotFoundError):
            own = jobs.epochs_of(run / "metrics.jsonl", monitor)
            epochs += [(before + epoch, value) for epoch, value in own]
    return epochs


def rate_of(runs: Sequence[Path]) -> float | None:
    """Learning rate of the last run after scaling by the global batch; None if rank 0 did not record one."""
    for run in runs[-1:]:
        with contextlib.suppress(OSError, *INVALID):
            return float(parse_json((run / "summary.json").read_text(encoding="utf-8"))["numbers"]["learning_rate"])
    return None
