"""What the trials of a sweep train: a script with `ringtrain.fit`, or the trainer."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.config import nearest
from ringtrain.errors import LaunchError
from ringtrain.lab import jobs, script
from ringtrain.lab.script import Script
from ringtrain.lab.sweep.study import Trial
from ringtrain.protocol.for_script import ForScript, Tuned
from ringtrain.protocol.json_text import INVALID, parse_json

BY = "ringtrain sweep"


class Trials:
    """Trials of a script, which reads their values from its command line, `ringtrain.trial` or its options.

    Args:
        templates: Words of the command line with names of values in braces.
        objective: Metric that trials are compared by.
        names: Of the values that are the script's own.
    """

    def __init__(self, job: Script, templates: Sequence[str], objective: str, names: Collection[str]) -> None:
        self.job, self.templates, self.objective, self.names = job, templates, objective, names
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
        """Settings that all starts of the sweep have in common."""
        return {"command": [*self.job.command], "--set": [*self.templates], "--objective": self.objective}

    def _divided(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divides values by name into options and the script's own."""
        options = {name: value for name, value in values.items() if name not in self.names}
        return options, {name: value for name, value in values.items() if name in self.names}

    def start(self, folder: Path, values: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """Command and variables of the ranks of a trial with these values, which goes on if it has begun."""
        options, own = self._divided(values)
        for_script = ForScript(by=BY, options=options, trial=own, folder=os.path.abspath(folder))
        return [*self.job.command, *self._arguments(own)], script.variables(for_script)

    def write_best(self, folder: Path, best: Trial, num_ranks: int) -> str:
        """Writes the values of the best trial, and returns the command that trains with them."""
        options, own = self._divided(best.values)
        path, by = folder / "best.json", f"{BY}, trial {best.number}"
        Tuned(by=by, options=options, trial=own).write(path, objective=self.objective, value=best.value)
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
