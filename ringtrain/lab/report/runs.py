"""ringtrain runs: the runs of a folder, the newest first. Does not import TensorFlow."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.errors import RunDirectoryError
from ringtrain.lab import jobs, tables
from ringtrain.lab.report import curves, postmortem, remote, run_folder, time_use
from ringtrain.lab.report.charts import number
from ringtrain.lab.report.run_folder import Run
from ringtrain.monitor import goodput
from ringtrain.options import Argument
from ringtrain.run.run_folder import NO_METRICS, is_leased, is_locked, plain

RUNS = "runs"
MAX_METRICS = 3
"""number of metrics with a column, those of most runs"""


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    folder: Annotated[str, Argument("FOLDER", is_positional=True)] = RUNS
    """folder that holds runs, or the URL of their mirror"""
    json: bool = False
    """print a list of JSON objects, with all metrics"""
    prometheus: bool = False
    """print progress and goodput for Prometheus, e.g. for the textfile collector of its node exporter"""


def main(options: Options) -> int:
    """Prints a line per run."""
    with remote.local([options.folder]) as (parent,):
        found = [facts(folder) for folder in runs_in(parent)]
    if remote.is_url(options.folder):
        for run in found:
            run["folder"] = f"{options.folder.rstrip('/')}/{run['run']}"
    if options.json:
        print(json.dumps([plain(run) for run in found], indent=1, ensure_ascii=False))
    elif options.prometheus:
        print(time_use.prometheus(found), end="")
    elif not found:
        raise RunDirectoryError(f"{options.folder}: holds no runs: give the folder of --run.directory")
    else:
        table(found).show()
    return 0


def newest(parent: Path = Path(RUNS)) -> Path:
    """Folder of the run that was started last; raises RunDirectoryError if there is none."""
    found = runs_in(parent)
    if not found:
        raise RunDirectoryError(f"{parent}: holds no runs: give the folder of a run")
    return found[0]


def runs_in(parent: Path) -> list[Path]:
    """Folders of runs, the newest first. A start writes config.toml, and a restart opens the lock again."""
    folders = [path.parent for path in parent.glob("*/config.toml")]
    return sorted(folders, key=lambda folder: (_started_s(folder), folder.name), reverse=True)


def _started_s(folder: Path) -> float:
    files = [path for path in (folder / ".lock", folder / "config.toml") if path.exists()]
    return max((path.stat().st_mtime for path in files), default=0.0)


def facts(folder: Path) -> dict[str, Any]:
    """State, progress, metrics, speed and date of a run; None where they are not known."""
    run = run_folder.read(folder)
    last = run.epochs[-1] if run.epochs else {}
    is_running = is_locked(folder) or is_leased(folder)
    # While it runs, the summary is that of an earlier start.
    summary: Mapping[str, Any] = {} if is_running else run.summary
    metrics = summary.get("metrics") or {key: last[key] for key in last if key not in NO_METRICS}
    speeds = [one["images_per_s"] for one in [*run.epochs, *run.steps] if one.get("images_per_s")]
    started_s = min((event["time_s"] for event in run.events), default=summary.get("started"))
    spent = goodput.of(run.events)
    return {
        "run": run.name,
        "folder": str(folder),
        "state": "running" if is_running else _state(run),
        "stopped_by": summary.get("stopped_by") or "",
        "global_step": max(one.get("global_step") or 0 for one in [summary, *run.epochs, *run.steps]),
        "num_steps": run.numbers.get("num_steps"),
        "metrics": metrics,
        "images_per_s": summary.get("images_per_s") or (speeds[-1] if speeds else None),
        "num_ranks": summary.get("num_ranks") or run.numbers.get("num_ranks"),
        "started_s": started_s,
        "starts": len(spent.attempts) if spent else None,
        "goodput": spent.share if spent else None,
        "seconds": spent.seconds if spent else {},
    }


def _state(run: Run) -> str:
    if run.events:
        return postmortem.state(run.events)
    return "complete" if jobs.is_done(run.folder) else "stopped" if run.summary else "killed"


def table(found: Sequence[Mapping[str, Any]]) -> tables.Table:
    """Table of runs."""
    # First the metrics that most runs have, of these the ones on test data, of these the ones besides the loss.
    count = Counter(key for run in found for key in run["metrics"])
    columns = sorted(count, key=lambda key: (-count[key], not key.startswith(("test_", "val_")), "loss" in key))
    columns = columns[:MAX_METRICS]
    rows = [_row(run, columns) for run in found]
    head = ["run", "state", "steps", *map(curves.words, columns), "speed", "goodput", "ranks", "started"]
    return tables.Table(head, rows)


def _row(run: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Cells of a run. columns: its metrics that are shown."""
    state, steps, speed, goodput_share = run["state"], f"{run['global_step']:,}", "", ""
    if state == "stopped" and run["stopped_by"]:
        state += f" by {run['stopped_by']}"
    if run["num_steps"] and run["num_steps"] != run["global_step"]:
        steps += f" of {run['num_steps']:,}"
    metrics = []
    for key in columns:
        value = run["metrics"].get(key)
        metrics.append("" if value is None else curves.metric(key, value))
    if run["images_per_s"]:
        speed = f"{number(run['images_per_s'])} images/s"
    if run["goodput"] is not None:
        goodput_share = f"{run['goodput']:.0%}"
    started = ""
    if run["started_s"]:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started_s"]))
    return [run["run"], state, steps, *metrics, speed, goodput_share, str(run["num_ranks"] or ""), started]
