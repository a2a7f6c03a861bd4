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
from ringtrain.lab.report.metrics_server import MetricsServer
from ringtrain.lab.report.run_folder import Run
from ringtrain.monitor import goodput
from ringtrain.options import Argument, NotWith, Rule
from ringtrain.run.run_folder import NO_METRICS, has_writer, is_locked, plain

RUNS = "runs"
PORT = Rule("0 to 65535", lambda value: 0 <= value <= 65535, {"minimum": 0, "maximum": 65535})
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
    metrics_port: Annotated[int | None, Argument("PORT"), PORT, NotWith("json")] = None
    """answer Prometheus with them, at http://127.0.0.1:PORT/metrics, until it is stopped; 0: any free port"""


def main(options: Options) -> int:
    """Prints a line per run."""
    if options.metrics_port is not None:
        with MetricsServer(options.metrics_port, lambda: time_use.prometheus(listed(options.folder))) as server:
            print(server.url, flush=True)
            server.serve_forever()
        return 0
    runs = listed(options.folder)
    if options.json:
        print(json.dumps([plain(run) for run in runs], indent=1, ensure_ascii=False))
    elif options.prometheus:
        print(time_use.prometheus(runs), end="")
    elif not runs:
        raise RunDirectoryError(_why_none(options.folder))
    else:
        table(runs).show()
    return 0


def _why_none(folder: str) -> str:
    """Why a folder has no runs, and where they may be."""
    if remote.is_url(folder):
        return f"{folder}: holds no runs: give the URL of a mirror"
    path = Path(folder).absolute()
    if (path / "config.toml").exists():
        return f"{folder}: is a run: give the folder that it is in, {path.parent}"
    if folder == RUNS and runs_in(Path()):
        return f"{path}: does not exist, but {path.parent} holds runs: ringtrain runs ."
    problem = "holds no runs" if path.exists() else "does not exist"
    return f"{path}: {problem}: change to the directory in which the job was started, or give a path"


def listed(folder: str) -> list[dict[str, Any]]:
    """Facts of the runs of a folder or mirror, the newest first."""
    with remote.local([folder]) as (parent,):
        runs = [facts(one) for one in runs_in(parent)]
    if remote.is_url(folder):
        # Not that of the temporary copy.
        for run in runs:
            run["folder"] = f"{folder.rstrip('/')}/{run['run']}"
    return runs


def newest(parent: Path = Path(RUNS)) -> Path:
    """Folder of the run that was started last; raises RunDirectoryError if there is none."""
    folders = runs_in(parent)
    if not folders:
        raise RunDirectoryError(_why_none(str(parent)))
    return folders[0]


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


def state_of(run: Run) -> str:
    """State of a run in a word, in `ringtrain runs` and reports."""
    if is_locked(run.folder) or has_writer(run.folder):
        return "running"
    if run.events:
        return postmortem.state(run.events)
    if jobs.is_done(run.folder):
        return "complete"
    if run.summary:
        return "stopped"
    return "killed"


def table(runs: Sequence[Mapping[str, Any]]) -> tables.Table:
    """Table of runs."""
    # First the metrics that most runs have, of these the ones on test data, of these the ones besides the loss.
    count: Counter[str] = Counter()
    for run in runs:
        count.update(list(run["metrics"]))
    metrics = sorted(count, key=lambda key: (-count[key], not key.startswith(("test_", "val_")), "loss" in key))
    columns = metrics[:MAX_METRICS]
    rows = [_row(run, columns) for run in runs]
    head = ["run", "state", "steps", *map(curves.words, columns), "speed", "goodput", "ranks", "started"]
    return tables.Table(head, rows)


def _row(run: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Cells of a run. columns: its metrics that are shown."""
    state = run["state"]
    if state == "stopped" and run["stopped_by"]:
        state += f" by {run['stopped_by']}"
    steps = f"{run['global_step']:,}"
    if run["num_steps"] and run["num_steps"] != run["global_step"]:
        steps += f" of {run['num_steps']:,}"
    metrics = [curves.metric(key, run["metrics"].get(key)) for key in columns]
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
