"""Curves of runs, one line per run, and the time split of their steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringtrain.lab.report.charts import Bars, Chart, Line
from ringtrain.lab.report.html import Part
from ringtrain.lab.report.run_folder import Run
from ringtrain.lab.tables import Table, number
from ringtrain.run.run_folder import NO_METRICS

PARTS = {"input": "input_s", "compute": "compute_s", "callbacks": "callbacks_s", "waiting": "wait_s"}
MAX_RANKS = 16
"""in the chart; the slowest ones"""
MAX_EPOCHS = 12
"""rows of the table of epochs"""
PREFIXES = ("test_", "val_")
"""of metrics of other data than those of training"""
RESTARTED = "started again, or ranks came or went"
"""legend of the vertical lines"""
WORDS = "Compute: forward and backward pass, and the update. Waiting: for the other ranks, and the allreduce itself."


def curves(named: Mapping[str, Run]) -> list[Part]:
    """Charts of metrics in training, test and validation, learning rate and speed, and a table of epochs."""
    parts: list[Part] = [_metric_chart(named, key) for key in _charted_metrics(named)]
    parts.append(_chart(named, "learning_rate", "learning rate", from_zero=True))
    parts.append(_speed_chart(named))
    parts.append(_chart(named, "gradient_norm", "norm of the averaged gradient"))
    parts.append(_chart(named, "loss_scale", "loss scale"))
    for name, run in named.items():
        table = _epochs(run)
        if len(named) > 1:
            table = replace(table, title=f"epochs of {name}")
        if table.rows:
            parts.append(table)
    return parts


def metrics_of(run: Run) -> list[str]:
    """Names of the metrics in its records that are numbers, also of a run that has no epoch yet."""
    names: dict[str, None] = {}
    for record in run.epochs or run.steps:
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
    """One run: a color for training and one for the other data; several runs: a color each, training dashed."""
    several = len(named) > 1
    sources = {"training": key, "test": f"test_{key}", "validation": f"val_{key}"}
    lines: list[Line] = []
    for index, (name, run) in enumerate(named.items()):
        # A run without a completed epoch has at least its steps.
        records = run.epochs or run.steps
        for source, source_key in sources.items():
            points = []
            for record in records:
                if source_key in record:
                    points.append((_epoch(run, record), _scaled(key, record[source_key])))
            is_training = source == "training"
            if several:
                lines.append(Line(name, points, index, is_training))
            else:
                lines.append(Line(source, points, int(not is_training), is_training))
    title = words(key)
    if _is_share(key):
        title += ", %"
    dashes = "training" if several else ""
    return Chart(title, "epoch", lines, _restarts(named), RESTARTED, dashes)


def _chart(named: Mapping[str, Run], key: str, title: str, from_zero: bool = False) -> Chart:
    """A line per run with the values at epochs and at steps."""
    lines: list[Line] = []
    for index, (name, run) in enumerate(named.items()):
        records = sorted((*run.epochs, *run.steps), key=lambda record: record["global_step"])
        lines.append(_line(name, run, records, key, index))
    return Chart(title, "epoch", lines, _restarts(named), RESTARTED, from_zero=from_zero)


def _speed_chart(named: Mapping[str, Run]) -> Chart:
    """A line per run with the speed of whole epochs; that of single steps varies too much."""
    lines: list[Line] = []
    for index, (name, run) in enumerate(named.items()):
        lines.append(_line(name, run, run.epochs or run.steps, "images_per_s", index))
    samples = {run.samples for run in named.values()}
    unit = samples.pop() if len(samples) == 1 else "rows"
    return Chart(f"speed of all ranks, {unit}/s", "epoch", lines, _restarts(named), RESTARTED, from_zero=True)


def _line(name: str, run: Run, records: Sequence[Mapping[str, Any]], key: str, color: int) -> Line:
    points = [(_epoch(run, record), record[key]) for record in records if key in record]
    return Line(name, points, color)


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


def _epoch(run: Run, record: Mapping[str, Any]) -> float:
    if "evaluate_s" in record:
        return record["epoch"]
    return run.epochs_at(record)


def _epochs(run: Run) -> Table:
    """Table of the epochs, thinned from the last one."""
    stride = max(1, math.ceil(len(run.epochs) / MAX_EPOCHS))
    shown = run.epochs[::-1][::stride][::-1]
    keys: list[str] = []
    if shown:
        keys = [key for key in shown[-1] if key not in ("epoch", "global_step", "time_s")]
    rows = []
    for record in shown:
        metrics = [metric(key, record.get(key), run.samples) for key in keys]
        rows.append([str(record["epoch"]), str(record["global_step"]), *metrics])
    title = "epochs"
    if stride > 1:
        title = f"one epoch in {stride}, of {len(run.epochs)}"
    return Table(["epoch", "step", *map(words, keys)], rows, title, folded=True)


def phases(named: Mapping[str, Run]) -> list[Part]:
    """Mean milliseconds per step on each rank, and stragglers."""
    several = len(named) > 1
    parts: list[Part] = []
    means: list[list[str]] = []
    slow_ranks: list[list[str]] = []
    for name, run in named.items():
        first_cells = [name] if several else []
        bars = _bars(run)
        if several:
            bars = replace(bars, title=f"{name}: {bars.title}")
        if bars.rows:
            parts.append(bars)
        means += [[*first_cells, *cells] for cells in _mean_steps(run)]
        slow_ranks += [[*first_cells, *cells] for cells in _slow_ranks(run)]

    first_head = ["run"] if several else []
    if means:
        head = [*first_head, "rank", "host", *PARTS, "step", "median of the last ones", "steps"]
        parts.append(Table(head, means, "mean step of each rank", folded=len(means) > MAX_RANKS))
        parts.append(WORDS)
    if slow_ranks:
        head = [*first_head, "step", "rank", "host", "times the others' time", "most of it in"]
        parts.append(Table(head, slow_ranks, "slow ranks"))
    elif any(run.events for run in named.values()):
        parts.append("No rank was named for being slow.")
    return parts


def _timed_ranks(run: Run) -> list[Mapping[str, Any]]:
    """Entries of the summary about ranks that have trained a step."""
    ranks = run.summary.get("ranks") or []
    return [rank for rank in ranks if rank["totals"]["num_steps"]]


def _mean_ms(rank: Mapping[str, Any]) -> list[float]:
    """Milliseconds of a step in each of PARTS."""
    totals = rank["totals"]
    return [1e3 * totals[key] / totals["num_steps"] for key in PARTS.values()]


def _bars(run: Run) -> Bars:
    """A bar per rank; of many ranks, of those that need longest without the waiting."""
    means = {rank["rank"]: _mean_ms(rank) for rank in _timed_ranks(run)}
    slowest = sorted(means, key=lambda rank: -sum(means[rank][:3]))[:MAX_RANKS]
    title = "mean step, ms"
    if len(means) > MAX_RANKS:
        title += f", {MAX_RANKS} of {len(means)} ranks, those that need longest"
    return Bars(title, list(PARTS), [(f"rank {rank}", means[rank]) for rank in sorted(slowest)])


def _mean_steps(run: Run) -> list[list[str]]:
    """Cells of each rank in the table of mean steps."""
    rows = []
    for rank in _timed_ranks(run):
        means = _mean_ms(rank)
        times = [*means, sum(means), 1e3 * rank["step_s"]]
        texts = [f"{time_ms:.2f} ms" for time_ms in times]
        rows.append([str(rank["rank"]), rank["host"], *texts, f"{rank['totals']['num_steps']:,}"])
    return rows


def _slow_ranks(run: Run) -> list[list[str]]:
    """Cells of each event about a rank that the others had to wait for."""
    rows = []
    for event in run.events:
        if event["event"] == "straggler":
            rows.append([str(event.get(key, "")) for key in ("global_step", "of_rank", "of_host", "times", "part")])
    return rows


def _is_share(key: str) -> bool:
    return "accuracy" in key or key.startswith(("top_", "test_top_", "top-", "test_top-"))


def _scaled(key: str, value: Any) -> float | None:
    """Value in the unit of its chart; None if it is no number."""
    if not isinstance(value, int | float):
        return None
    if _is_share(key):
        return 100 * value
    return value


def metric(key: str, value: Any, samples: str = "rows") -> str:
    """Formats a metric with its unit; None is empty."""
    if value is None:
        return ""
    shown = _scaled(key, value)
    if shown is None:
        return str(value)
    if _is_share(key):
        return f"{shown:.2f} %"
    text = number(shown)
    if key == "images_per_s":
        text += f" {samples}/s"
    elif key.endswith("_s"):
        text += " s"
    return text


def words(key: str) -> str:
    """Display name of a metric."""
    if key == "images_per_s":
        return "speed"
    return key.removesuffix("_s").replace("_", " ")
