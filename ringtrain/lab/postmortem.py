"""Exit cause of each attempt of a run, by the journals of all ranks. Does not import TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.errors import RunDirectoryError
from ringtrain.lab import tables
from ringtrain.monitor import journal
from ringtrain.protocol.failures import CONSEQUENCE

Event = Mapping[str, Any]
OF_ALL_EVENTS = ("time_s", "event", "rank", "size", "host", "process", "run_start", "start_s", "spent_s", "of_steps_s")
"""facts that are not printed with each event"""
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
        print(journal.printable(line))
    rows = []
    for event in events:
        if event["event"] == "time":
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time_s"]))
        rows.append([when, str(event.get("rank", "?")), str(event.get("host", "?")), event["event"], facts_of(event)])
    tables.Table(["time", "rank", "host", "event", "facts"], rows).show()


def facts_of(event: Event) -> str:
    """Formats the facts of an event; of texts their first line."""
    facts = {name: value for name, value in event.items() if name not in OF_ALL_EVENTS and value not in ("", None)}
    return ", ".join(f"{name} {_first_line(value)}" for name, value in facts.items())


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
        summary += f"; no journal of ranks {', '.join(map(str, sorted(silent)))}"
    return [summary, *(f"start {number}: {_outcome(start)}" for number, start in enumerate(starts, 1))]


def state(events: Sequence[Event]) -> str:
    """Result of the last start of a run in a word: complete, stopped, stalled, failed or killed."""
    if not events:
        return "killed"
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
        step, text = cause.get("global_step", last_step), _first_line(cause.get("text", ""))
        if cause["event"] == "stall":
            return f"{since}stalled at step {step}: {text}"
        who = f"rank {cause.get('rank')} on {cause.get('host')}"
        return f"{since}failed after step {step}: {who}: {cause.get('kind')}: {text}"
    for event in start:
        if event["event"] == "end":
            stopped = f", stopped by {event['stopped_by']}" if event.get("stopped_by") else ""
            return f"{since}ended after step {last_step}, exit code {event.get('exit_code')}{stopped}"
    return f"{since}broken off without a word after step {last_step} or later: killed, or its host was"


def _first_line(text: Any) -> str:
    return str(text).partition("\n")[0]


def _is_consequence(event: Event) -> bool:
    return bool(CONSEQUENCE.search(f"{event.get('kind')}: {event.get('text')}"))
