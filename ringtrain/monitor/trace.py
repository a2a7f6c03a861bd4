"""Merges the timelines of all ranks into one file of trace events, for Perfetto and Chrome. Standard library only.

The part of a rank has its rank, host and clock offset, and begin and end of the phases of each step. Horovod's own
timeline, which exists on rank 0 only, is added. Parts of killed ranks may be incomplete.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringtrain.errors import RunDirectoryError
from ringtrain.protocol.json_text import INVALID, parse_json

PARTS = "timeline"
"""directory of the parts in the run folder"""
HOROVOD = "horovod.json"
PHASES = ("input", "forward-backward", "waiting", "update")
STEPS, GRADIENTS, HOROVODS = 1, 100, 10000
"""first track number of each kind, within a rank"""

Event = dict[str, Any]


def merge(folder: Path, out: Path) -> int:
    """Writes the timelines of all ranks to one file, in rank 0's time; returns their number."""
    events: list[Event] = []
    num_ranks = 0
    for path in folder.glob("rank-*.jsonl"):
        try:
            lines = list(_lines(path))
            if lines and isinstance(lines[0], dict):
                events += _of_rank(lines[0], lines[1:])
                num_ranks += 1
        except INVALID as error:
            raise _damaged(path, error) from error
    if not num_ranks:
        raise RunDirectoryError(f"{folder}: no timelines: train with --tracking.timeline-steps 100, or see its help")
    try:
        events += _of_horovod(folder / HOROVOD)
        first_s = min((event["ts"] for event in events if "ts" in event), default=0.0)
        # Begin and end in whole microseconds: viewers drop an event that begins before the previous one ends.
        for event in events:
            if "ts" not in event:
                continue
            begin_s = event["ts"]
            event["ts"] = round((begin_s - first_s) * 1e6)
            if "dur" in event:
                event["dur"] = round((begin_s + event["dur"] - first_s) * 1e6) - event["ts"]
    except INVALID as error:
        raise _damaged(folder, error) from error
    events.sort(key=lambda event: event.get("ts", -1.0))
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for event in events))
            file.write("\n]}\n")
        os.replace(unfinished, out)
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be written: {error.strerror}") from error
    return num_ranks


def _damaged(path: Path, error: BaseException) -> RunDirectoryError:
    return RunDirectoryError(f"{path}: not a timeline: {type(error).__name__}: {error}: delete it and train again")


def _lines(path: Path) -> Iterator[Any]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            yield parse_json(line)


def _of_rank(about: Mapping[str, Any], steps: list[Any]) -> Iterator[Event]:
    """Yields a rank's events: phases of its steps, and for each gradient the time from local to reduced."""
    rank, late_s = about["rank"], about["offset_s"]
    error = ""
    if about["error_s"]:
        error = f", clock within {about['error_s'] * 1e3:.2f} ms"
    yield _meta("process_name", rank, 0, name=f"rank {rank} on {about['host']}{error}")
    yield _meta("process_sort_index", rank, 0, sort_index=rank)
    yield from _track(rank, STEPS, "steps")
    yield from _track(rank, STEPS + 1, "phases")
    for index, name in enumerate(about["gradients"]):
        yield from _track(rank, GRADIENTS + index, f"allreduce of {name}")
    for step, edges, computed, reduced in steps:
        there_s, computed_s, reduced_s = edges[1:4]
        yield _span(rank, STEPS, f"step {step}", edges[0] + late_s, edges[4] + late_s, step=step)
        # Without timestamps of this step, as with a user's train_step, it has no phases.
        if edges[0] <= there_s <= computed_s <= reduced_s <= edges[4]:
            for name, (begin_s, end_s) in zip(PHASES, itertools.pairwise(edges), strict=True):
                yield _span(rank, STEPS + 1, name, begin_s + late_s, end_s + late_s, step=step)
        for index, (begin_s, end_s) in enumerate(zip(computed, reduced, strict=True)):
            if edges[0] <= begin_s <= end_s <= edges[4]:
                yield _span(rank, GRADIENTS + index, "allreduce", begin_s + late_s, end_s + late_s, step=step)


def _of_horovod(path: Path) -> Iterator[Event]:
    """Yields Horovod's timeline, in which each tensor is a process, as tracks of rank 0."""
    start_s = 0.0
    opened: Counter[int] = Counter()
    for event in _objects(path):
        process, args = event.get("pid", -1), event.get("args", {})
        if event.get("ph") == "M":
            start_s = args.get("start_time_since_epoch_in_micros", 0) / 1e6 or start_s
            if event["name"] == "process_name" and args.get("name"):
                yield from _track(0, HOROVODS + process, f"Horovod: {args['name']}")
        elif "ts" in event and (event["ph"] != "E" or opened[process]):  # an earlier begin is not in the file
            opened[process] += {"B": 1, "E": -1}.get(event["ph"], 0)
            yield {**event, "pid": 0, "tid": HOROVODS + process, "ts": start_s + event["ts"] / 1e6, "cat": "horovod"}


def _objects(path: Path) -> Iterator[Event]:
    """Yields the complete objects of a JSON list, which may be truncated."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    decoder, begin = json.JSONDecoder(), text.find("{")
    while begin >= 0:
        try:
            event, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return
        yield event
        begin = text.find("{", end)


def _span(rank: int, track: int, name: str, begin_s: float, end_s: float, **args: Any) -> Event:
    times = {"ts": begin_s, "dur": end_s - begin_s}
    return {"name": name, "ph": "X", "cat": "ringtrain", "pid": rank, "tid": track, **times, "args": args}


def _track(rank: int, track: int, name: str) -> list[Event]:
    return [_meta("thread_name", rank, track, name=name), _meta("thread_sort_index", rank, track, sort_index=track)]


def _meta(kind: str, rank: int, track: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": args}
