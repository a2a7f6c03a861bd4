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

from ringtrain.derived import counted
from ringtrain.errors import RunDirectoryError
from ringtrain.lab.report import postmortem
from ringtrain.monitor import journal
from ringtrain.protocol.json_text import INVALID, parse_json

Record = dict[str, Any]
MISSING = {
    "config.toml": "its configuration is not known",
    "metrics.jsonl": "no epoch has been completed",
    "steps.jsonl": "no step was written down (tracking.every_steps)",
    "summary.json": "the run is not complete",
}
"""what a missing file means"""


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

    @property
    def samples(self) -> str:
        """What the samples are that its speed counts: images, rows or batches."""
        accumulated = self.numbers.get("accumulation_steps") or 1
        return counted(self.options.get("data.name", ""), self.numbers.get("global_batch_size", 0) // accumulated)

    def epochs_at(self, record: Mapping[str, Any]) -> float:
        """Number of epochs, as a fraction, at a record of steps."""
        return record["global_step"] / (self.numbers.get("steps_per_epoch") or 1)


def read(folder: Path) -> Run:
    """Reads a run."""
    texts: dict[str, str] = {}
    for name in ("metrics.jsonl", "steps.jsonl", "summary.json", "config.toml"):
        with contextlib.suppress(OSError):
            texts[name] = (folder / name).read_text(encoding="utf-8", errors="replace")
    events: list[dict[str, Any]] = []
    if folder.is_dir():
        events = journal.read(folder)
    if not texts and not events:
        near = _newest_near(folder)
        advice = f"did you mean {near}? " if near else ""
        raise RunDirectoryError(
            f"{folder}: nothing of a run in it: {advice}expected the folder that a run names at its end"
        )
    summary = _mapping(texts.get("summary.json", ""))
    options, numbers = _configuration(texts.get("config.toml", ""))
    if isinstance(summary.get("numbers"), dict):
        numbers |= summary["numbers"]
    return Run(
        folder,
        folder.resolve().name,
        _records(texts.get("metrics.jsonl", "")),
        _records(texts.get("steps.jsonl", "")),
        summary,
        options,
        numbers,
        events,
        _missing(texts, events, summary),
    )


def _missing(texts: Mapping[str, str], events: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[str]:
    """Sentences about files that are missing or empty, and about a summary of an earlier start."""
    sentences = [f"no {name}: {why}" for name, why in MISSING.items() if not texts.get(name)]
    if not events:
        sentences.append("no journals: what happened to its ranks is not known")
    starts = [event["time_s"] for event in events if event["event"] == "start"]
    times = [summary.get("started"), summary.get("fit_s")]
    written_s = sum(time_s for time_s in times if isinstance(time_s, int | float))
    if summary and starts and max(starts) > written_s:
        sentences.append("summary.json is of an earlier start: the last one is not complete")
    return sentences


def _configuration(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a config.toml by dotted name, and the numbers in its comments."""
    options: dict[str, Any] = {}
    with contextlib.suppress(ValueError, RecursionError):
        options = _flat(tomllib.loads(text))
    numbers: dict[str, Any] = {}
    for name, value in re.findall(r"^# (\w+) = (.*)$", text, re.MULTILINE):
        with contextlib.suppress(ValueError):
            numbers[name] = parse_json(value)
    return options, numbers


def _mapping(text: str) -> dict[str, Any]:
    """Parses a JSON object; empty if the text is none."""
    with contextlib.suppress(ValueError):
        value = parse_json(text)
        if isinstance(value, dict):
            return value
    return {}


def _newest_near(folder: Path) -> Path | None:
    """Newest run inside this folder or with this folder's name as a prefix."""
    configs = [*folder.parent.glob(f"{folder.name}*/config.toml"), *folder.glob("*/config.toml")]
    if not configs:
        return None
    return max(configs, key=lambda path: path.stat().st_mtime).parent


def _records(text: str) -> list[Record]:
    """Parses lines of JSON; the last line of a killed process may be incomplete."""
    records = [_mapping(line) for line in text.splitlines()]
    return [record for record in records if "global_step" in record]


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            values[name] = table
            continue
        for key, value in table.items():
            values[f"{name}.{key}"] = value
    return values


def defaults() -> dict[str, Any]:
    """Default of every option as written to config.toml, by dotted name."""
    from ringtrain.config import Config

    return _flat(json.loads(json.dumps(dataclasses.asdict(Config()))))


def is_done(folder: Path) -> bool:
    """Whether a run has finished: trained all its steps or stopped early by itself."""
    try:
        summary = parse_json((folder / "summary.json").read_text(encoding="utf-8"))
        trained = summary["global_step"] >= summary["numbers"]["num_steps"]
        return bool(trained or summary["stopped_by"].startswith("train."))
    except (OSError, *INVALID):
        return False
