"""Reads a run folder, also of a run that is running or was killed. Does not import TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtrain.errors import RunDirectoryError
from ringtrain.lab.report import postmortem
from ringtrain.monitor import journal
from ringtrain.protocol.json_text import parse_json

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Contents of a run folder; missing files leave their fields empty and are listed in `missing`."""

    folder: Path
    name: str
    epochs: Sequence[Record]
    """records of metrics.jsonl"""
    steps: Sequence[Record]
    """records of steps.jsonl"""
    summary: Mapping[str, Any]
    options: Mapping[str, Any]
    """from config.toml, by dotted name"""
    numbers: Mapping[str, Any]
    """derived from the options"""
    events: Sequence[Mapping[str, Any]]
    """from the journals of all ranks"""
    missing: Sequence[str]
    """a sentence per missing file"""

    @property
    def verdict(self) -> list[str]:
        """Summary line and a line per attempt; empty without journals."""
        return postmortem.verdict(self.events) if self.events else []

    def epochs_at(self, record: Mapping[str, Any]) -> float:
        """Number of epochs, as a fraction, at a record of steps."""
        return record["global_step"] / (self.numbers.get("steps_per_epoch") or 1)


def read(folder: Path) -> Run:
    """Reads a run."""
    kept: dict[str, str] = {}
    for name in ("metrics.jsonl", "steps.jsonl", "summary.json", "config.toml"):
        with contextlib.suppress(OSError):
            kept[name] = (folder / name).read_text(encoding="utf-8", errors="replace")
    events = journal.read(folder) if folder.is_dir() else []
    if not kept and not events:
        near = _newest_near(folder)
        raise RunDirectoryError(
            f"{folder}: nothing of a run in it: {f'did you mean {near}? ' if near else ''}expected the folder that a"
            f" run names at its end, or a file that ringtrain bench --out wrote"
        )
    summary, options, numbers = {}, {}, {}
    with contextlib.suppress(ValueError):
        read = parse_json(kept.get("summary.json", "{}"))
        summary = read if isinstance(read, dict) else {}
    text = kept.get("config.toml", "")
    with contextlib.suppress(ValueError, RecursionError):
        options = _flat(tomllib.loads(text))
    for name, value in re.findall(r"^# (\w+) = (.*)$", text, re.MULTILINE):
        with contextlib.suppress(ValueError):
            numbers[name] = parse_json(value)
    starts = [event["time_s"] for event in events if event["event"] == "start"]
    written_s = sum(one for one in map(summary.get, ("started", "fit_s")) if isinstance(one, int | float))
    reasons = {
        "config.toml": "its configuration is not known",
        "metrics.jsonl": "no epoch has been completed",
        "steps.jsonl": "no step was written down (tracking.every_steps)",
        "summary.json": "the run still goes on, or was broken off",
    }
    missing = [f"no {name}: {why}" for name, why in reasons.items() if not kept.get(name)]
    missing += [] if events else ["no journals: what happened to its ranks is not known"]
    if summary and starts and max(starts) > written_s:
        missing.append("summary.json is of an earlier start: the last one still goes on, or was broken off")
    return Run(
        folder,
        folder.resolve().name,
        _records(kept.get("metrics.jsonl", "")),
        _records(kept.get("steps.jsonl", "")),
        summary,
        options,
        numbers | (more if isinstance(more := summary.get("numbers"), dict) else {}),
        events,
        missing,
    )


def _newest_near(folder: Path) -> Path | None:
    """Newest run inside this folder or with this folder's name as a prefix."""
    found = [*folder.parent.glob(f"{folder.name}*/config.toml"), *folder.glob("*/config.toml")]
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def _records(text: str) -> list[Record]:
    """Parses lines of JSON; the last line of a killed process may be incomplete."""
    records = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and "global_step" in record:
                records.append(record)
    return records


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tables.items():
        inner = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        found |= inner
    return found


def defaults() -> dict[str, Any]:
    """Default of every option as written to config.toml, by dotted name."""
    from ringtrain.config import Config

    return _flat(json.loads(json.dumps(dataclasses.asdict(Config()))))
