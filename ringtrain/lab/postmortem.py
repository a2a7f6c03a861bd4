"""Journals of all ranks of a run as one table, with the exit cause. Does not import TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.errors import RunDirectoryError
from ringtrain.lab import tables
from ringtrain.monitor import journal
from ringtrain.protocol.failures import CONSEQUENCE

Event = Mapping[str, Any]
ABOUT = (
    "time_s",
    "event",
    "rank",
    "size",
    "host",
    "process",
    "run_start",
    "start_s",
    "global_step",
    "begun_s",
    "launched_s",
    "restore_s",
    "spent_s",
    "of_steps_s",
)
"""facts that every event has, and those of its time"""
HEAD = ["time", "rank", "host", "event", "facts"]
"""of a table of events"""
MAX_RANKS = 1 << 16
PLANNED = ("train.max_time_s", "SIGTERM", "SIGINT", "SIGUSR1")
"""causes that stop a run before it is complete"""
STATES = {"stall": "stalled", "failure": "failed", "end": "stopped"}
"""state of a run that is not complete, by the events of its last start"""


def show(folder: Path) -> None:
    """Prints the exit cause of a run and all its events."""
    events = journal.read(folder) if folder.is_dir() else []
    if not events:
        raise RunDirectoryError(f"{folder}: no journals in {folder}/logs: give the folder of a run, e.g. runs/digits")
    for line in verdict(events):
        tables.console().print(journal.printable(line), highlight=False, markup=False, style="bold")
    rows = []
    for event in events:
        of_all_ranks = event["event"] == "save" and event.get("rank")
        if event["event"] != "time" and not of_all_ranks:
            rows.append(cells_of(event))
    tables.Table(HEAD, rows).show()


def verdict(events: Sequence[Event]) -> list[str]:
    """Number of attempts of a run and their results: a summary line, then a line per attempt."""
    starts = _starts(events)
    last = starts[-1]
    summary = "started once, "
    if len(starts) > 1:
        summary = f"started {len(starts)} times, "
    if not _is_complete(last):
        summary += "not "
    summary += "complete"

    size = max(event.get("size", 1) for event in last)
    silent = set(range(min(size, MAX_RANKS))) - {event.get("rank") for event in last}
    if silent:
        noun = "rank" if len(silent) == 1 else "ranks"
        summary += f"; no journal of {noun} {', '.join(map(str, sorted(silent)))}"
    return [summary, *(f"start {number}: {_outcome(start)}" for number, start in enumerate(starts, 1))]


def state(events: Sequence[Event]) -> str:
    """Result of the last start of a run in a word: complete, stopped, stalled, failed or killed."""
    last = _starts(events)[-1]
    if _is_complete(last):
        return "complete"
    kinds = {event["event"] for event in last}
    return next((word for kind, word in STATES.items() if kind in kinds), "killed")


def _starts(events: Sequence[Event]) -> list[list[Event]]:
    """Events of each start of a run, in order."""
    starts: dict[Any, list[Event]] = {}
    for event in events:
        starts.setdefault((event.get("start_s", 0), event.get("run_start", 0)), []).append(event)
    return [starts[key] for key in sorted(starts)]


def cells_of(event: Event) -> list[str]:
    """Cells of an event in a table with HEAD."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time_s"]))
    return [when, str(event.get("rank", "?")), str(event.get("host", "?")), event["event"], in_words(event)]


def in_words(event: Event) -> str:
    """Formats the facts of an event."""
    known = WORDS.get(event["event"])
    words = known(event) if known else ""
    if not words:
        facts = {name: value for name, value in event.items() if name not in ABOUT and value not in ("", None)}
        words = ", ".join(f"{name} {value}" for name, value in facts.items())
    parts = []
    if event.get("global_step") is not None:
        parts.append(f"step {event['global_step']}")
    if words:
        parts.append(words)
    return ": ".join(parts)


def _start(event: Event) -> str:
    text = "from the beginning"
    if event.get("resumed_from"):
        text = f"from {event['resumed_from']}"
    versions = event.get("versions")
    if isinstance(versions, dict) and versions:
        text += f" ({', '.join(f'{name} {version}' for name, version in versions.items())})"
    return text


def _end(event: Event) -> str:
    text = f"exit code {event.get('exit_code')}"
    if event.get("stopped_by"):
        text += f", stopped by {event['stopped_by']}"
    return text


def _straggler(event: Event) -> str:
    who = f"rank {event.get('of_rank')} on {event.get('of_host')}"
    return f"{who} needs {event.get('times')} times as long as the others, most of it in {event.get('part')}"


WORDS: dict[str, Callable[[Event], str]] = {
    "start": _start,
    "end": _end,
    "straggler": _straggler,
    "save": lambda event: f"checkpoint; training waited {event.get('stall_s') or 0:.3f} s",
    "signal": lambda event: str(event.get("signal")),
    "stall": lambda event: f"in {event.get('phase')}: {_first_line(event)}",
    "failure": lambda event: f"{event.get('kind')}: {_first_line(event)}",
}


def _first_line(event: Event) -> str:
    return str(event.get("text", "")).partition("\n")[0]


def _is_complete(start: Sequence[Event]) -> bool:
    ends = [event for event in start if event["event"] == "end"]
    return any(event.get("exit_code") == 0 and event.get("stopped_by") not in PLANNED for event in ends)


def _outcome(start: Sequence[Event]) -> str:
    first_step = min(event.get("global_step", 0) for event in start)
    last_step = max(event.get("global_step", 0) for event in start)
    since = f"from step {first_step}: " if first_step else ""
    failures = [event for event in start if event["event"] in ("failure", "stall")]
    if failures:
        # If another rank failed first, Horovod's error reports only that.
        cause = min(failures, key=lambda event: (_is_consequence(event), event["time_s"]))
        return since + _failure(cause)
    ends = [event for event in start if event["event"] == "end"]
    if not ends:
        return f"{since}broken off without a word after step {last_step} or later: killed, or its host was"
    return f"{since}ended after step {last_step}, {_end(ends[0])}"


def _failure(event: Event) -> str:
    if event["event"] == "stall":
        return f"stalled at step {event.get('global_step')}: {_first_line(event)}"
    step = f" after step {event['global_step']}" if "global_step" in event else ""
    who = f"rank {event.get('rank')} on {event.get('host')}"
    return f"failed{step}: {who}: {event.get('kind')}: {_first_line(event)}"


def _is_consequence(event: Event) -> bool:
    return bool(CONSEQUENCE.search(f"{event.get('kind')}: {event.get('text')}"))
