"""Curves of runs, one line per run, and the time split of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringtrain.lab.report.charts import Bars, Chart, Line, number
from ringtrain.lab.report.html import Part
from ringtrain.lab.report.run_folder import Run
from ringtrain.lab.tables import Table

PARTS = {"input": "input_s", "compute": "compute_s", "callbacks": "callbacks_s", "waiting": "wait_s"}
MAX_RANKS = 16
"""in the chart; the slowest ones"""
MAX_EPOCHS = 12
"""rows of the table of epochs"""
WORDS = "Compute: forward and backward pass, and the update. Waiting: for the other ranks, and the allreduce itself."


def curves(named: Mapping[str, Run]) -> list[Part]:
    """Charts of metrics in training, test and validation, learning rate and speed, and a table of epochs."""
    several = len(named) > 1
    keys = dict.fromkeys(key for run in named.values() for record in run.epochs for key in record)
    pairs = [key for key in ("loss", "accuracy", *keys) if keys.keys() & {f"test_{key}", f"val_{key}"}]
    charts: list[Part] = []
    for key in dict.fromkeys(pairs or ["loss", "accuracy"]):
        lines: list[Line] = []
        for place, (name, run) in enumerate(named.items()):
            for of, what in ((key, "training"), (f"test_{key}", "test"), (f"val_{key}", "validation")):
                # A run without a completed epoch has at least its steps.
                records = run.epochs or run.steps
                points = [(_epoch(run, r), _scaled(key, r[of])) for r in records if of in r]
                colour = place if several else int(what != "training")
                lines.append(Line(name if several else what, points, colour, what == "training"))
        title = f"{words(key)}{', %' if _is_share(key) else ''}"
        charts.append(Chart(title, "epoch", lines, *_marks(named), dashes="training" if several else ""))
    for key, title, finest in (
        ("learning_rate", "learning rate", True),
        ("images_per_s", "speed of all ranks, images/s", False),
        ("gradient_norm", "norm of the averaged gradient", True),
        ("loss_scale", "loss scale", True),
    ):
        lines = []
        for place, (name, run) in enumerate(named.items()):
            records = sorted((*run.epochs, *run.steps), key=lambda r: r["global_step"]) if finest else run.epochs
            points = [(_epoch(run, r), r[key]) for r in records or run.steps if key in r]
            lines.append(Line(name, points, place))
        charts.append(Chart(title, "epoch", lines, *_marks(named), from_zero=finest is False or key == "learning_rate"))
    for name, run in named.items():
        table = _epochs(run)
        charts += [table] if table.rows else []
        if several and table.rows:
            charts[-1] = Table(table.head, table.rows, f"epochs of {name}", folded=True)
    return charts


def _marks(named: Mapping[str, Run]) -> tuple[list[tuple[float, int]], str]:
    """Steps at which runs were restarted or resized."""
    marks = []
    for place, run in enumerate(named.values()):
        again = {e["global_step"] for e in run.events if e["event"] in ("start", "resize") and e.get("global_step")}
        marks += [(_epoch(run, {"global_step": step}), place) for step in sorted(again)]
    return marks, "started again, or ranks came or went"


def _epoch(run: Run, record: Mapping[str, Any]) -> float:
    return record["epoch"] if "evaluate_s" in record else run.epochs_at(record)


def _epochs(run: Run) -> Table:
    stride = -(-len(run.epochs) // MAX_EPOCHS)
    shown = [record for place, record in enumerate(reversed(run.epochs)) if place % max(1, stride) == 0][::-1]
    keys = [key for key in (shown[-1] if shown else {}) if key not in ("epoch", "global_step", "time_s")]
    head = ["epoch", "step", *(words(key) for key in keys)]
    rows = [
        [str(r["epoch"]), str(r["global_step"]), *(metric(key, r[key]) if key in r else "" for key in keys)]
        for r in shown
    ]
    which = "epochs" if stride <= 1 else f"one epoch in {stride}, of {len(run.epochs)}"
    return Table(head, rows, which, folded=True)


def phases(named: Mapping[str, Run]) -> list[Part]:
    """Mean milliseconds per step on each rank, and stragglers."""
    bars: list[Part] = []
    rows, slow = [], []
    for name, run in named.items():
        own_name = [name] if len(named) > 1 else []
        times = [(one, one["totals"]) for one in run.summary.get("ranks") or [] if one["totals"]["num_steps"]]
        ms = {one["rank"]: [1e3 * total[key] / total["num_steps"] for key in PARTS.values()] for one, total in times}
        shown = sorted(sorted(ms, key=lambda rank: -sum(ms[rank][:3]))[:MAX_RANKS])
        if shown:
            left_out = f", {MAX_RANKS} of {len(ms)} ranks, those that need longest" if len(ms) > MAX_RANKS else ""
            title = ": ".join([*own_name, f"mean step, ms{left_out}"])
            bars.append(Bars(title, list(PARTS), [(f"rank {rank}", ms[rank]) for rank in shown]))
        for one, total in times:
            means = [*ms[one["rank"]], sum(ms[one["rank"]]), 1e3 * one["step_s"]]
            about = [*own_name, str(one["rank"]), one["host"]]
            rows.append([*about, *(f"{mean:.2f} ms" for mean in means), f"{total['num_steps']:,}"])
        slow += [[*own_name, *_slow(event)] for event in run.events if _slow(event)]
    first = ["run"] * (len(named) > 1)
    head = [*first, "rank", "host", *PARTS, "step", "median of the last ones", "steps"]
    parts = [*bars, Table(head, rows, "mean step of each rank", folded=len(rows) > MAX_RANKS), WORDS] if rows else []
    if slow:
        head = [*first, "step", "rank", "host", "times the others' time", "most of it in"]
        parts.append(Table(head, slow, "slow ranks"))
    elif any(run.events for run in named.values()):
        parts.append("No rank was named for being slow.")
    return parts


def _slow(event: Mapping[str, Any]) -> list[str]:
    if event["event"] != "straggler":
        return []
    return [str(event.get(key, "")) for key in ("global_step", "of_rank", "of_host", "times", "part")]


def _is_share(key: str) -> bool:
    return "accuracy" in key or key.startswith(("top_", "test_top_", "top-", "test_top-"))


def _scaled(key: str, value: Any) -> float | None:
    if not isinstance(value, int | float):
        return None
    return 100 * value if _is_share(key) else value


def metric(key: str, value: Any) -> str:
    """Formats a metric with its unit."""
    shown = _scaled(key, value)
    if shown is None:
        return "" if value is None else str(value)
    unit = " %" if _is_share(key) else " images/s" if key == "images_per_s" else " s" if key.endswith("_s") else ""
    return f"{shown:.2f}{unit}" if unit == " %" else f"{number(shown)}{unit}"


def words(key: str) -> str:
    """Display name of a metric."""
    return {"images_per_s": "speed"}.get(key, key.removesuffix("_s").replace("_", " "))
