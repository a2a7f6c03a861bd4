"""Curves of runs, one line per run, and the time split of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringtrain.lab.page import Chart, Line, Part
from ringtrain.lab.runs import Run, is_share, metric_name
from ringtrain.lab.tables import Table
from ringtrain.run.run_folder import NO_METRICS

PARTS = {"input": "input_s", "compute": "compute_s", "callbacks": "callbacks_s", "waiting": "wait_s"}
MAX_RANKS = 16
"""more are folded"""
PREFIXES = ("test_", "val_")
"""of metrics of other data than those of training"""
RESTARTED = "started again, or ranks came or went"
"""legend of the vertical lines"""
WORDS = "Compute: forward and backward pass, and the update. Waiting: for the other ranks, and the allreduce itself."


def curves(named: Mapping[str, Run]) -> list[Part]:
    """Charts of metrics in training, test and validation, learning rate, speed and gradient norm."""
    parts: list[Part] = [_metric_chart(named, key) for key in _charted_metrics(named)]
    parts.append(_chart(named, "learning_rate", "learning rate"))
    samples = {run.samples for run in named.values()}
    unit = samples.pop() if len(samples) == 1 else "rows"
    parts.append(_chart(named, "images_per_s", f"speed of all ranks, {unit}/s"))
    parts.append(_chart(named, "gradient_norm", "norm of the averaged gradient"))
    return parts


def metrics_of(run: Run) -> list[str]:
    """Names of the metrics in its records that are numbers."""
    names: dict[str, None] = {}
    for record in run.records:
        names |= dict.fromkeys(key for key, value in record.items() if isinstance(value, int | float))
    return [name for name in names if name not in NO_METRICS]


def _charted_metrics(named: Mapping[str, Run]) -> list[str]:
    """Metrics without the prefixes of test and validation data, which share a chart with training."""
    keys: dict[str, None] = {}
    for run in named.values():
        for key in metrics_of(run):
            prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), "")
            keys[key.removeprefix(prefix)] = None
    return list(keys)


def _metric_chart(named: Mapping[str, Run], key: str) -> Chart:
    """A color for each run; training is dashed."""
    sources = {"training": key, "test": f"test_{key}", "validation": f"val_{key}"}
    lines: list[Line] = []
    for index, (name, run) in enumerate(named.items()):
        for source, source_key in sources.items():
            label = source
            if len(named) > 1:
                label = f"{name}, {source}"
            lines.append(_line(label, run, source_key, index, dashed=source == "training"))
    title = metric_name(key)
    if is_share(key):
        title += ", %"
    return Chart(title, lines, _restarts(named), RESTARTED)


def _chart(named: Mapping[str, Run], key: str, title: str) -> Chart:
    """A line per run."""
    lines = [_line(name, run, key, index) for index, (name, run) in enumerate(named.items())]
    return Chart(title, lines, _restarts(named), RESTARTED, from_zero=True)


def _line(name: str, run: Run, key: str, color: int, dashed: bool = False) -> Line:
    points = []
    for record in run.records:
        if key in record:
            points.append((_epoch(run, record), _charted(key, record[key])))
    return Line(name, points, color, dashed)


def _charted(key: str, value: Any) -> float | None:
    """Value in the unit of its chart; None if it is no number."""
    if not isinstance(value, int | float):
        return None
    if is_share(key):
        return 100 * value
    return value


def _epoch(run: Run, record: Mapping[str, Any]) -> float:
    if "evaluate_s" in record:
        return record["epoch"]
    return run.epochs_at(record)


def _restarts(named: Mapping[str, Run]) -> list[tuple[float, int]]:
    """Epochs at which runs were restarted or resized, each with the color of its run."""
    marks = []
    for index, run in enumerate(named.values()):
        steps = set()
        for event in run.events:
            if event["event"] in ("start", "resize") and event.get("global_step"):
                steps.add(event["global_step"])
        marks += [(run.epochs_at({"global_step": step}), index) for step in sorted(steps)]
    return marks


def phases(named: Mapping[str, Run]) -> list[Part]:
    """Mean milliseconds per step on each rank, and stragglers."""
    parts: list[Part] = []
    means: list[list[str]] = []
    slow_ranks: list[list[str]] = []
    for name, run in named.items():
        means += [[name, *cells] for cells in _mean_steps(run)]
        slow_ranks += [[name, *cells] for cells in _slow_ranks(run)]
    if means:
        head = ["run", "rank", "host", *PARTS, "step", "steps"]
        parts.append(Table(head, means, "mean step of each rank", folded=len(means) > MAX_RANKS))
        parts.append(WORDS)
    if slow_ranks:
        head = ["run", "step", "rank", "host", "times the others' time", "most of it in"]
        parts.append(Table(head, slow_ranks, "slow ranks"))
    return parts


def _mean_steps(run: Run) -> list[list[str]]:
    """Cells of each rank that has trained a step."""
    rows = []
    for rank in run.summary.get("ranks") or []:
        totals = rank["totals"]
        num_steps = totals["num_steps"]
        if num_steps:
            means_ms = [1e3 * totals[key] / num_steps for key in PARTS.values()]
            texts = [f"{time_ms:.2f} ms" for time_ms in (*means_ms, sum(means_ms))]
            rows.append([str(rank["rank"]), rank["host"], *texts, f"{num_steps:,}"])
    return rows


def _slow_ranks(run: Run) -> list[list[str]]:
    """Cells of each event about a rank that the others had to wait for."""
    rows = []
    for event in run.events:
        if event["event"] == "straggler":
            rows.append([str(event.get(key, "")) for key in ("global_step", "of_rank", "of_host", "times", "part")])
    return rows
