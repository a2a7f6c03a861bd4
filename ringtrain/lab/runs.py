"""ringtrain runs: the runs of a folder, the newest first; and what the folder of a run has, also of a killed one."""

from __future__ import annotations

import contextlib
import json
import re
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.derived import counted
from ringtrain.errors import RunDirectoryError
from ringtrain.lab import postmortem, tables
from ringtrain.lab.tables import number
from ringtrain.monitor import goodput, journal
from ringtrain.options import Argument
from ringtrain.protocol.json_text import INVALID, parse_json
from ringtrain.run.run_folder import NO_METRICS, is_locked, plain

RUNS = "runs"
MAX_METRICS = 3
"""number of metrics with a column, those of most runs"""
MISSING = {
    "config.toml": "its configuration is not known",
    "metrics.jsonl": "no epoch has been completed",
    "steps.jsonl": "no step was written down (tracking.every_steps)",
    "summary.json": "the run is not complete",
}
"""what a missing file means"""
Record = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    folder: Annotated[str, Argument("FOLDER", is_positional=True)] = RUNS
    """folder that holds runs"""
    json: bool = False
    """print a list of JSON objects, with all metrics"""


def main(options: Options) -> int:
    """Prints a line per run."""
    runs = [facts(one) for one in runs_in(Path(options.folder))]
    if options.json:
        print(json.dumps([plain(run) for run in runs], indent=1, ensure_ascii=False))
    elif not runs:
        raise RunDirectoryError(_none_in(Path(options.folder)))
    else:
        table(runs).show()
    return 0


def newest(parent: Path = Path(RUNS)) -> Path:
    """Folder of the run that was started last; raises RunDirectoryError if there is none."""
    folders = runs_in(parent)
    if not folders:
        raise RunDirectoryError(_none_in(parent))
    return folders[0]


def _none_in(parent: Path) -> str:
    path = parent.absolute()
    problem = "holds no runs" if path.exists() else "does not exist"
    return f"{path}: {problem}: change to the directory in which the job was started, or give the folder of its runs"


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
    def records(self) -> Sequence[Record]:
        """Records of its epochs; those of steps if no epoch is complete."""
        return self.epochs or self.steps

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
    for name in MISSING:
        with contextlib.suppress(OSError):
            texts[name] = (folder / name).read_text(encoding="utf-8", errors="replace")
    events: list[dict[str, Any]] = []
    if folder.is_dir():
        events = journal.read(folder)
    if not texts and not events:
        raise RunDirectoryError(f"{folder}: nothing of a run in it: expected the folder that a run names at its end")
    missing = [f"no {name}: {why}" for name, why in MISSING.items() if not texts.get(name)]
    if not events:
        missing.append("no journals: what happened to its ranks is not known")
    summary = _mapping(texts.get("summary.json", ""))
    options, numbers = _configuration(texts.get("config.toml", ""))
    if isinstance(summary.get("numbers"), dict):
        numbers |= summary["numbers"]
    epochs, steps = (_records(texts.get(name, "")) for name in ("metrics.jsonl", "steps.jsonl"))
    return Run(folder, folder.resolve().name, epochs, steps, summary, options, numbers, events, missing)


def _configuration(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a config.toml by dotted name, and the numbers in its comments."""
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


def _mapping(text: str) -> dict[str, Any]:
    """Parses a JSON object; empty if the text is none."""
    with contextlib.suppress(ValueError):
        value = parse_json(text)
        if isinstance(value, dict):
            return value
    return {}


def _records(text: str) -> list[Record]:
    """Parses lines of JSON; the last line of a killed process may be incomplete."""
    records = [_mapping(line) for line in text.splitlines()]
    return [record for record in records if "global_step" in record]


def state_of(run: Run) -> str:
    """State of a run in a word."""
    if is_locked(run.folder):
        return "running"
    if run.events:
        return postmortem.state(run.events)
    if _is_done(run.summary):
        return "complete"
    if run.summary:
        return "stopped"
    return "killed"


def _is_done(summary: Mapping[str, Any]) -> bool:
    """Whether a run has trained all its steps or stopped early by itself."""
    try:
        trained = summary["global_step"] >= summary["numbers"]["num_steps"]
        return bool(trained or summary["stopped_by"].startswith("train."))
    except INVALID:
        return False


# ---- the list -------------------------------------------------------------------------------------------------------


def facts(folder: Path) -> dict[str, Any]:
    """State, progress, metrics, speed and date of a run; None where they are not known."""
    run = read(folder)
    state = state_of(run)
    # While it runs, the summary is that of an earlier start.
    summary: Mapping[str, Any] = {}
    if state != "running":
        summary = run.summary
    records = [*run.epochs, *run.steps]
    times: dict[str, Any] = {"starts": None, "goodput": None, "seconds": {}}
    spent = goodput.of(run.events)
    if spent:
        times = {"starts": len(spent.attempts), "goodput": spent.share, "seconds": spent.seconds}
    return {
        "run": run.name,
        "folder": str(folder),
        "state": state,
        "stopped_by": summary.get("stopped_by") or "",
        "global_step": max(record.get("global_step") or 0 for record in [summary, *records]),
        "num_steps": run.numbers.get("num_steps"),
        "metrics": summary.get("metrics") or _last_metrics(run),
        "images_per_s": summary.get("images_per_s") or _last_speed(records),
        "samples": run.samples,
        "num_ranks": summary.get("num_ranks") or run.numbers.get("num_ranks"),
        "started_s": min((event["time_s"] for event in run.events), default=summary.get("started")),
        **times,
    }


def _last_metrics(run: Run) -> dict[str, Any]:
    if not run.epochs:
        return {}
    return {key: value for key, value in run.epochs[-1].items() if key not in NO_METRICS}


def _last_speed(records: Sequence[Mapping[str, Any]]) -> float | None:
    for record in reversed(records):
        if record.get("images_per_s"):
            return record["images_per_s"]
    return None


def table(runs: Sequence[Mapping[str, Any]]) -> tables.Table:
    """Table of runs."""
    # First the metrics that most runs have, of these the ones on test data, of these the ones besides the loss.
    count: Counter[str] = Counter()
    for run in runs:
        count.update(list(run["metrics"]))
    metrics = sorted(count, key=lambda key: (-count[key], not key.startswith(("test_", "val_")), "loss" in key))
    columns = metrics[:MAX_METRICS]
    rows = [_row(run, columns) for run in runs]
    head = ["run", "state", "steps", *map(metric_name, columns), "speed", "goodput", "ranks", "started"]
    return tables.Table(head, rows)


def _row(run: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Cells of a run. columns: its metrics that are shown."""
    state = run["state"]
    if state == "stopped" and run["stopped_by"]:
        state += f" by {run['stopped_by']}"
    steps = f"{run['global_step']:,}"
    if run["num_steps"] and run["num_steps"] != run["global_step"]:
        steps += f" of {run['num_steps']:,}"
    metrics = [metric(key, run["metrics"].get(key)) for key in columns]
    speed = ""
    if run["images_per_s"]:
        speed = f"{number(run['images_per_s'])} {run['samples']}/s"
    share = ""
    if run["goodput"] is not None:
        share = f"{run['goodput']:.0%}"
    started = ""
    if run["started_s"]:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started_s"]))
    return [run["run"], state, steps, *metrics, speed, share, str(run["num_ranks"] or ""), started]


def is_share(key: str) -> bool:
    """Whether a metric is shown in percent."""
    return "accuracy" in key or key.startswith(("top_", "test_top_", "top-", "test_top-"))


def metric(key: str, value: Any) -> str:
    """Formats a metric; None is empty."""
    if value is None:
        return ""
    if not isinstance(value, int | float):
        return str(value)
    if is_share(key):
        return f"{100 * value:.2f} %"
    return number(value)


def metric_name(key: str) -> str:
    """Display name of a metric."""
    return key.replace("_", " ")
