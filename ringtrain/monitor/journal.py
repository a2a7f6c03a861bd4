"""Journal of a run: logs/journal-N.jsonl of each rank, one line per event, kept over restarts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ringtrain.errors import exit_code_of
from ringtrain.protocol.json_text import INVALID, parse_json

KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("host", "event"), str),
    **dict.fromkeys(("time_s", "start_s", "stall_s"), int | float),
    **dict.fromkeys(("rank", "size", "run_start", "global_step"), int),
}
"""types of values that readers of journals rely on"""
MAX_TIME_S = 1e11


class Stages:
    """Timestamps of the stages of a start, for the first event of its journal: Unix time in seconds, in order."""

    def __init__(self) -> None:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        self.moments = {"process": time.time() - age_s, "python": time.time()}

    def done(self, name: str) -> None:
        self.moments[name] = time.time()


class Journal:
    """Writer of a rank's events, each at once, so that a kill loses none; it drops them until `open`."""

    def __init__(
        self, folder: Path | None = None, rank: int = 0, size: int = 1, run_start: int = 0, start_s: float = 0.0
    ) -> None:
        self.path: Path | None = None
        self.failure: BaseException | None = None
        self.spent: Callable[[], Mapping[str, Any]] = dict
        """facts of each event about where this rank's time went; of rank 0 alone: monitor/goodput.py"""
        if folder is not None:
            self.open(folder, rank, size, run_start, start_s)

    def open(self, folder: Path, rank: int, size: int, run_start: int = 0, start_s: float = 0.0) -> None:
        """Writes to a run folder from now on. `start_s`: Unix time of rank 0's start, which identifies the attempt."""
        self.path = path_of(folder, rank)
        self.about: dict[str, Any] = {"rank": rank, "size": size, "host": socket.gethostname(), "process": os.getpid()}
        self.about |= {"run_start": run_start, "start_s": start_s}

    def write(self, event: str, **facts: Any) -> None:
        """Appends an event with facts (plain values: global_step, epoch, ...). A full disk drops it silently."""
        # Events: start, training (its first step is done), commit, save, time (nothing but where time went), resize,
        # end, signal, stall, straggler, fault (injected by --chaos), failure.
        if self.path is None:
            return
        line = {"time_s": time.time(), "event": event, **self.about, **self.spent(), **facts}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, f"{json.dumps(line)}\n".encode())
            finally:
                os.close(descriptor)

    def write_failure(self, error: BaseException, **facts: Any) -> None:
        """Appends the error that ends this rank, once."""
        if error is not self.failure:
            self.failure = error
            exit_code = exit_code_of(error)
            self.write("failure", kind=type(error).__name__, text=str(error), exit_code=exit_code, **facts)


def printable(text: str) -> str:
    """Returns a text with control characters escaped (\\x1b), since a terminal would execute them."""
    letters = []
    for letter in text:
        if letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cf", "Cs"):
            letter = ascii(letter)[1:-1]
        letters.append(letter)
    return "".join(letters)


def duration(seconds: float) -> str:
    """Formats a time, e.g. "4.2 s", "3 min 12 s" or "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def path_of(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"journal-{rank}.jsonl"


def read(folder: Path) -> list[dict[str, Any]]:
    """Reads all ranks' events, ordered by time of each host's clock; incomplete lines are skipped."""
    events: list[dict[str, Any]] = []
    for path in sorted((folder / "logs").glob("journal-*.jsonl")):
        events += _events_of(path)
    return sorted(events, key=lambda event: event["time_s"])


def _events_of(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(*INVALID):
            event = parse_json(line)
            known = all(isinstance(event[name], kind) for name, kind in KINDS.items() if name in event)
            if known and 0 <= event["time_s"] < MAX_TIME_S and event["event"]:
                yield event
