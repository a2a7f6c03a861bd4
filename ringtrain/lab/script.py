"""A script with `ringtrain.fit`, or the trainer, as the job of a command: the words after `--`, and its runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringtrain.cluster import processes
from ringtrain.config import files
from ringtrain.errors import LaunchError
from ringtrain.lab import runs
from ringtrain.lab.runs import Run

if TYPE_CHECKING:
    import subprocess

TRAINER = "ringtrain.train"


@dataclass(frozen=True)
class Script:
    """Program whose ranks call `ringtrain.fit`, or `ringtrain.train`, which reads the same from its environment."""

    command: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> Script:
        """Program of the words after `--`. Raises an error for a mistake in options of the trainer."""
        if not words or words[0].startswith("-"):
            raise LaunchError(
                f"got {words[0] if words else 'nothing'} after --, expected a command: python own.py, or python -m"
                " ringtrain.train with its options"
            )
        script = cls(("python", *words) if words[0].endswith(".py") else tuple(words))
        if script.is_trainer:
            files.read(script.train_args)
        return script

    @property
    def is_trainer(self) -> bool:
        return TRAINER in self.command

    @property
    def train_args(self) -> tuple[str, ...]:
        """Options of the trainer."""
        return self.command[self.command.index(TRAINER) + 1 :]


def runs_in(folder: Path) -> list[Run]:
    """Runs of a script's start, the first one first; those without a complete epoch are not among them."""
    found = [runs.read(path.parent) for path in folder.glob("*/metrics.jsonl")]
    return sorted((run for run in found if run.epochs), key=lambda run: run.epochs[0]["time_s"])


def start_launch(
    words: Sequence[str], command: Sequence[str], environ: Mapping[str, str], log: Path, held: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a command on ranks by `ringtrain launch` with these options; see processes.start_beside."""
    argv = [sys.executable, "-m", "ringtrain", "launch", *words, "--", *command]
    return processes.start_beside(argv, environ, log, held)


def reason_of(log: Path, code: int) -> str:
    """Reason for a launch's exit in one line: its last message, without a traceback."""
    if code < 0:
        return f"ringtrain launch was killed by signal {-code}"
    said = log.read_text(encoding="utf-8", errors="replace").rpartition("ringtrain: ")
    lines = [line.strip() for line in said[2].split("\n") if line.strip()] or [f"exit code {code}"]
    first = lines[0] if said[1] else lines[-1]
    if first.endswith(":") and len(lines) > 1:
        return f"{first} {lines[-1]}"
    return first
