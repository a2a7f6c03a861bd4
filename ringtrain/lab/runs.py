"""ringtrain runs: the runs of a folder, the newest first; and what the folder of a run has, also of a killed one."""

from __future__ import annotations

import contextlib
import json
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.checkpoint.run_folder import NO_METRICS, is_locked, plain
from ringtrain.config.derived import counted
from ringtrain.config.options import Argument
from ringtrain.errors import RunDirectoryError
from ringtrain.lab import postmortem
from ringtrain.lab.tables import Table, number
from ringtrain.monitor import goodput, journal
from ringtrain.protocol.json_text import parse_json, parse_object

RUNS = "runs"
MAX_METRICS = 3
"""number of metrics with a column"""
FILES = ("config.toml", "metrics.jsonl", "steps.jsonl", "summary.json")
Record = dict[str, Any]


@dataclass(frozen=True)
class RunsOptions:
    """RunsOptions of the command."""

    folder: Annotated[str, Argument("FOLDER", is_positional=True)] = RUNS
    """folder that holds runs"""
    json: bool = False
    """print a list of JSON objects, with all metrics"""


def main(options: RunsOptions) -> int:
    """Prints a line per run."""
    parent = Path(options.folder)
    runs = [facts_of(read(folder)) for folder in runs_in(parent)]
    if options.json:
        print(json.dumps(plain(runs), indent=1, ensure_ascii=False))
        return 0
    if not runs:
        raise _none_in(parent)
    # The metrics on test data first, of these the ones besides the loss.
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run["metrics"])
    metrics = sorted(keys, key=lambda key: (not key.startswith(("test_", "val_")), "loss" in key))
    cells = [cells_of(run, metrics[:MAX_METRICS]) for run in runs]
    Table([*cells[0]], [[*row.values()] for row in cells]).show()
    return 0


def newest(parent: Path = Path(RUNS)) -> Path:
    """Folder of the run that was started last; raises RunDirectoryError if there is none."""
    folders = runs_in(parent)
    if not folders:
        raise _none_in(parent)
    return folders[0]


def _none_in(parent: Path) -> RunDirectoryError:
    return RunDirectoryError(
        f"{parent.absolute()}: holds no runs: change to the directory in which the job was started, or give the folder"
        " of its runs"
    )


def runs_in(parent: Path) -> list[Path]:
    """Folders of runs, the newest first. A start writes config.toml, and a restart opens the lock again."""
    folders = [path.parent for path in parent.glob("*/config.toml")]
    return sorted(folders, key=lambda folder: (_started_s(folder), folder.name), reverse=True)


def _started_s(folder: Path) -> float:
    files = [path for path in (folder / ".lock", folder / "config.toml") if path.exists()]
    return max((path.stat().st_mtime for path in files), default=0.0)


# ---- reading a run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Contents of a run folder; missing files leave their fields empty."""

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

    @property
    def samples(self) -> str:
        """Word for the samples that its speed counts: images, rows or batches."""
        accumulated = self.numbers.get("accumulation_steps") or 1
        return counted(self.options.get("data.name", ""), self.numbers.get("global_batch_size", 0) // accumulated)


def read(folder: Path) -> Run:
    """Reads a run."""
    texts: dict[str, str] = {}
    for name in FILES:
        with contextlib.suppress(OSError):
            texts[name] = (folder / name).read_text(encoding="utf-8", errors="replace")
    events: list[dict[str, Any]] = []
    if folder.is_dir():
        events = journal.read(folder)
    if not texts and not events:
        raise RunDirectoryError(f"{folder}: nothing of a run in it: expected the folder that a run names at its end")
    summary = parse_object(texts.get("summary.json", ""))
    options, numbers = _configuration(texts.get("config.toml", ""))
    if isinstance(summary.get("numbers"), dict):
        numbers |= summary["numbers"]
    epochs, steps = (_records(texts.get(name, "")) for name in ("metrics.jsonl", "steps.jsonl"))
    return Run(folder, folder.resolve().name, epochs, steps, summary, options, numbers, events)


def _configuration(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """RunsOptions of a config.toml by dotted name, and the numbers in its comments."""
    options: dict[str, Any] = {}
    with contextlib.suppress(ValueError, RecursionError):
        options = flat(tomllib.loads(text))
    numbers: dict[str, Any] = {}
    for name, value in re.findall(r"^# (\w+) = (.*)$", text, re.MULTILINE):
        with contextlib.suppress(ValueError):
            numbers[name] = parse_json(value)
    return options, numbers


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a configuration's tables by dotted name."""
    values: dict[str, Any] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            values[name] = table
            continue
        for key, value in table.items():
            values[f"{name}.{key}"] = value
    return values


def _records(text: str) -> list[Record]:
    """Parses lines of JSON; the last line of a killed process may be incomplete."""
    records = [parse_object(line) for line in text.splitlines()]
    return [record for record in records if "global_step" in record]


# ---- what is known of it --------------------------------------------------------------------------------------------


def facts_of(run: Run) -> dict[str, Any]:
    """State, progress, metrics, speed and date of a run; None where they are not known."""
    state = postmortem.state(run.events)
    summary = run.summary
    if is_locked(run.folder):
        state, summary = "running", {}  # the summary is that of an earlier start
    records = [*run.epochs, *run.steps]
    metrics = summary.get("metrics")
    if not metrics and run.epochs:
        metrics = {key: value for key, value in run.epochs[-1].items() if key not in NO_METRICS}
    speeds = [record["images_per_s"] for record in records if record.get("images_per_s")]
    spent = goodput.of(run.events)
    return {
        "run": run.name,
        "folder": str(run.folder),
        "state": state,
        "stopped_by": summary.get("stopped_by") or "",
        "global_step": max([summary.get("global_step") or 0, *(record["global_step"] for record in records)]),
        "num_steps": run.numbers.get("num_steps"),
        "metrics": metrics or {},
        "images_per_s": summary.get("images_per_s") or (speeds[-1] if speeds else None),
        "samples": run.samples,
        "num_ranks": summary.get("num_ranks") or run.numbers.get("num_ranks"),
        "started_s": min((event["time_s"] for event in run.events), default=None),
        "starts": spent.num_starts if spent else None,
        "goodput": spent.share if spent else None,
        "seconds": spent.seconds if spent else {},
    }


def cells_of(facts: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, str]:
    """Facts of a run, with some of its metrics, as text by title; empty where they are not known."""
    state = facts["state"]
    if state == "stopped" and facts["stopped_by"]:
        state += f" by {facts['stopped_by']}"
    steps = f"{facts['global_step']:,}"
    if facts["num_steps"] and facts["num_steps"] != facts["global_step"]:
        steps += f" of {facts['num_steps']:,}"
    cells = {"run": facts["run"], "state": state, "steps": steps}
    for key in metrics:
        cells[title_of(key)] = text_of(facts["metrics"].get(key))
    cells["speed"] = f"{number(facts['images_per_s'])} {facts['samples']}/s" if facts["images_per_s"] else ""
    cells["goodput"] = f"{facts['goodput']:.0%}" if facts["goodput"] is not None else ""
    cells["ranks"] = str(facts["num_ranks"] or "")
    cells["started"] = ""
    if facts["started_s"]:
        cells["started"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["started_s"]))
    return cells


def text_of(value: Any) -> str:
    """Formats a metric; None is empty."""
    if value is None:
        return ""
    return number(value) if isinstance(value, int | float) else str(value)


def title_of(key: str) -> str:
    """Display name of a metric."""
    return key.replace("_", " ")
