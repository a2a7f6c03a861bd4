"""What happened to a run, and when: logs/journal-N.jsonl of each rank, a line per event, kept through all starts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# "training": the first step after a start is done; "fault": one that was ordered by --chaos.
EVENTS = (
    *("start", "training", "commit", "save", "resize", "end"),
    *("signal", "stall", "straggler", "fault", "failure"),
)

_own: list[Journal] = []
_failures: list[BaseException] = []


def begin(own: Journal, **facts: Any) -> None:
    """Makes a journal this process', for `note`, with a start as its first event.

    Args:
        own: to write to from now on.
        facts: of the start.
    """
    _own[:] = [own]
    note("start", **facts)


def note(event: str, **facts: Any) -> None:
    """Writes an event into this process' journal, if there is one.

    Args:
        event: one of EVENTS.
        facts: plain values.
    """
    for journal in _own:
        journal.write(event, **facts)


def note_failure(error: BaseException, exit_code: int, **facts: Any) -> None:
    """Writes why this process ends, once.

    Args:
        error: what ends it.
        exit_code: that it will end with.
        facts: plain values.
    """
    if error not in _failures:
        _failures.append(error)
        note("failure", kind=type(error).__name__, text=str(error), exit_code=exit_code, **facts)


class Journal:
    """Writes one rank's events. A line is there as soon as its event has happened, also if the process is killed then.

    Args:
        folder: of the run.
        rank: of this process; of two processes that had a rank one after the other, both write into its file.
        size: ranks in all.
        run_start: how often the run had been started again.
        start_s: when rank 0 began, the same on all ranks: which start an event belongs to.
    """

    def __init__(self, folder: Path, rank: int, size: int, run_start: int = 0, start_s: float = 0.0) -> None:
        self.path = path_of(folder, rank)
        self.about = {"rank": rank, "size": size, "host": socket.gethostname(), "process": os.getpid()}
        self.starts = {"run_start": run_start, "start_s": start_s}

    def write(self, event: str, **facts: Any) -> None:
        """Adds an event.

        Args:
            event: one of EVENTS.
            facts: plain values: global_step, epoch, ...; a full disk loses them, and ends nothing.
        """
        if event not in EVENTS:
            raise ValueError(f"got {event!r}, expected one of {', '.join(EVENTS)}")
        line = {"time_s": time.time(), "event": event, **self.about, **self.starts, **facts}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, f"{json.dumps(line)}\n".encode())
            finally:
                os.close(descriptor)


def path_of(folder: Path, rank: int) -> Path:
    """The journal of a rank.

    Args:
        folder: of the run.
        rank: whose.
    """
    return folder / "logs" / f"journal-{rank}.jsonl"


def read(folder: Path) -> list[dict[str, Any]]:
    """All ranks' events, in the order of time by each host's clock.

    Args:
        folder: of the run.

    Returns:
        What `Journal.write` wrote; lines that were torn are left out.
    """
    events = [event for path in sorted((folder / "logs").glob("journal-*.jsonl")) for event in _events_of(path)]
    return sorted(events, key=lambda event: event["time_s"])


def _events_of(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "time_s" in event and "event" in event:
                yield event
