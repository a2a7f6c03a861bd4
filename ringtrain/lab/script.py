"""A script with `ringtrain.fit`, or the trainer, as the job of a command: the words after `--`, and its runs."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringtrain import config_io, sources
from ringtrain.cluster import processes
from ringtrain.config import nearest, option_types
from ringtrain.errors import ConfigError, LaunchError
from ringtrain.protocol.env import FOR_SCRIPT
from ringtrain.protocol.for_script import ForScript
from ringtrain.protocol.json_text import INVALID, parse_json

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
            config_io.read(script.train_args)
        return script

    @property
    def is_trainer(self) -> bool:
        return TRAINER in self.command

    @property
    def train_args(self) -> tuple[str, ...]:
        """Options of the trainer."""
        return self.command[self.command.index(TRAINER) + 1 :]


def variables(for_script: ForScript) -> dict[str, str]:
    """Environment variables with which ranks read it."""
    return {FOR_SCRIPT: for_script.to_json()}


def runs_in(folder: Path) -> list[Path]:
    """Runs of a script's start, the first one first; those without a complete epoch are not among them."""
    begins = {path.parent: _begin_s(path) for path in folder.glob("*/metrics.jsonl")}
    return sorted(begins, key=lambda run: (begins[run], run.name))


def _begin_s(metrics: Path) -> float:
    """Unix time of the first record."""
    with contextlib.suppress(OSError, *INVALID), open(metrics, encoding="utf-8") as file:
        return float(parse_json(file.readline())["time_s"])
    return math.inf


def metrics_of(run: Path) -> list[str]:
    """Names of the numbers that a run has recorded after its last epoch."""
    with contextlib.suppress(OSError, *INVALID):
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [name for name, value in parse_json(lines[-1]).items() if isinstance(value, float)]
    return []


def check_option(option: str, source: str) -> None:
    """Raises ConfigError for an option that is an argument of `fit`, or the script's own."""
    if option in option_types() and option.startswith(sources.OPTIONS):
        return
    key = option.rpartition(".")[2]
    if option not in option_types():
        known = [name for name in option_types() if name.startswith(sources.OPTIONS)]
        raise ConfigError(f"{source}: unknown option {option}: {nearest(option, known)}")
    raise ConfigError(
        f"{source}: {option}: is the script's own: name it {key}, and read ringtrain.trial()[{key!r}] or give"
        f" --set '--{key.replace('_', '-')}={{{key}}}'"
    )


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
