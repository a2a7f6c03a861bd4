"""Results of the runs of ringtrain compare, read from their folders: tables, a plot and a page."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.config import HvdConfig
from ringtrain.derived import num_reductions
from ringtrain.lab import plots
from ringtrain.lab.report import cli, html, run_folder
from ringtrain.lab.report.charts import Chart, Line
from ringtrain.lab.stats import Spread
from ringtrain.lab.tables import Table

FLOAT_BYTES = 4
"""per weight and gradient, independent of the compute precision"""
MEASURED = (
    "test_accuracy",
    "best_test_accuracy",
    "to_target_s",
    "to_target_samples",
    "to_target_bytes",
    "train_s",
    "images_per_s",
    "waiting_share",
    "bytes_per_update",
    "staleness",
    "dropped",
)
# Per table: column headings, and for each the key of its value, the factor to the column's unit and the format.
TABLES: dict[str, dict[str, tuple[str, float, str]]] = {
    "what came out": {
        "test accuracy, %": ("test_accuracy", 100, ".2f"),
        "s to {target:.4g} %": ("to_target_s", 1, ".2f"),
        "samples to it": ("to_target_samples", 1, ",.0f"),
        "MB to it": ("to_target_bytes", 1e-6, ",.1f"),
        "training, s": ("train_s", 1, ".2f"),
    },
    "what it took": {
        "images/s": ("images_per_s", 1, ",.0f"),
        "waiting, %": ("waiting_share", 100, ".1f"),
        "MB per update": ("bytes_per_update", 1e-6, ".3f"),
        "staleness": ("staleness", 1, ".2f"),
        "dropped": ("dropped", 1, ",.0f"),
    },
}
WORDS = (
    "Training: without start-up and evaluation, with the first step, in which TensorFlow makes its graph; images/s are"
    " without that one. Waiting: share of the steps' time, mean over ranks. MB: what a worker sends on a ring of N,"
    " 2 (N - 1) / N times the gradients, compressed, or once per round of local steps; what it reads and sends where"
    " there are servers, weights and gradients."
    " Staleness: updates between reading weights and applying their gradients, mean. Medians (p10 to p90) over seeds."
)


@dataclass(frozen=True)
class Result:
    """Run of a comparison."""

    label: str
    """of its entry"""
    seed: int
    folder: Path
    error: str = ""
    """reason of the failure; "" if it succeeded"""

    @functools.cached_property
    def run(self) -> run_folder.Run:
        """Contents of its folder."""
        return run_folder.read(self.folder)

    @functools.cached_property
    def points(self) -> list[dict[str, Any]]:
        """Test accuracy after each epoch, with samples seen and seconds of training so far; empty if the run failed."""
        if self.error:
            return []
        numbers = self.run.numbers
        samples = numbers["num_train"] - numbers["dropped_per_epoch"]
        points = []
        train_s = 0.0
        for epoch in self.run.epochs:
            train_s += epoch["train_s"]
            if "test_accuracy" not in epoch:  # a model with a train_step of its own may have none
                continue
            point = {
                "epoch": epoch["epoch"],
                "samples": epoch["epoch"] * samples,
                "updates": epoch["global_step"] // numbers["accumulation_steps"],
                "train_s": train_s,
                "test_accuracy": epoch["test_accuracy"],
            }
            points.append(point)
        return points

    @functools.cached_property
    def measured(self) -> dict[str, float | None]:
        """Values of MEASURED."""
        summary, points = self.run.summary, self.points
        strategy = summary["strategy"]
        target = self.run.options["train.target_accuracy"]
        reached: dict[str, Any] = next((point for point in points if 0 < target <= point["test_accuracy"]), {})
        last: dict[str, Any] = points[-1] if points else {}
        num_updates = last.get("updates", 1)
        bytes_in_all = bytes_sent(self.run, num_updates)
        bytes_per_update = to_target_bytes = dropped = None
        if bytes_in_all is not None:
            bytes_per_update = bytes_in_all / max(1, num_updates)
        if reached:
            to_target_bytes = bytes_sent(self.run, reached["updates"])
        if "dropped" in strategy:
            dropped = sum(strategy["dropped"])
        return {
            "test_accuracy": last.get("test_accuracy"),
            "best_test_accuracy": max((point["test_accuracy"] for point in points), default=None),
            "to_target_s": reached.get("train_s"),
            "to_target_samples": reached.get("samples"),
            "train_s": last.get("train_s"),
            "images_per_s": summary["images_per_s"],
            "waiting_share": waiting_share(summary),
            "bytes_per_update": bytes_per_update,
            "to_target_bytes": to_target_bytes,
            "staleness": (strategy.get("staleness") or {}).get("mean"),
            "dropped": dropped,
        }

    def told(self) -> dict[str, Any]:
        """All values as plain data."""
        about = {"name": self.folder.name, "strategy": self.label, "seed": self.seed, "folder": str(self.folder)}
        if self.error:
            return about | {"error": self.error}
        summary = self.run.summary
        kept = {key: summary[key] for key in ("stopped_by", "global_step", "checksum", "versions", "git_revision")}
        return about | self.measured | kept | {"of_the_strategy": summary["strategy"], "points": self.points}


def waiting_share(summary: Mapping[str, Any]) -> float | None:
    """Mean fraction of the step time in which ranks or workers wait for others or for communication.

    Args:
        summary: Of a run; the waiting times that its strategy reports for workers take precedence.
    """
    workers = summary["strategy"].get("waiting")
    if workers:
        known = [share for share in workers if share is not None]
        if not known:
            return None
        return float(statistics.mean(known))
    totals = [rank["totals"] for rank in summary["ranks"] if rank["totals"]["step_s"]]
    if not totals:
        return None
    wait_s = sum(times["wait_s"] for times in totals)
    step_s = sum(times["step_s"] for times in totals)
    return float(wait_s / step_s)


def bytes_sent(run: run_folder.Run, num_updates: int) -> float | None:
    """Bytes that a worker transfers in a run's first updates of the weights; 0 between copies in one process.

    Returns:
        On a ring of N: 2 (N - 1) / N times what is reduced, which each rank sends (Patarasuk & Yuan 2009): gradients
        as they are compressed, or what a round of local steps has changed. With servers: the weights that a worker
        reads plus the gradients that it sends. None in other cases.
    """
    name, copies = run.options["strategy.name"], run.numbers["num_ranks"]
    weight_bytes = FLOAT_BYTES * run.summary["num_parameters"]
    if name == "towers":
        return 0.0
    if name.startswith("ps-"):
        return float(2 * weight_bytes) * num_updates
    if run.options["hvd.op"] != "average":
        return None
    options = {}
    for option, value in run.options.items():
        if option.startswith("hvd."):
            options[option.removeprefix("hvd.")] = value
    per_epoch = max(1, run.numbers["steps_per_epoch"] // run.numbers["accumulation_steps"])
    whole, compressed = num_reductions(HvdConfig(**options), num_updates, per_epoch)
    reduced = whole * weight_bytes + compressed * run.summary.get("reduced_bytes", weight_bytes)
    return float(reduced) * 2 * (copies - 1) / copies


def summaries(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Spread over the seeds, number of runs and errors of each strategy."""
    by_label: dict[str, list[Result]] = {}
    for result in results:
        by_label.setdefault(result.label, []).append(result)
    summaries: dict[str, dict[str, Any]] = {}
    for label, runs in by_label.items():
        good = [result.measured for result in runs if not result.error]
        errors = [result.error for result in runs if result.error]
        summary: dict[str, Any] = {}
        for key in MEASURED:
            values = []
            for measured in good:
                value = measured[key]
                if value is not None:
                    values.append(value)
            if values:
                summary[key] = Spread.of(values)
        summaries[label] = {**summary, "runs": len(good), "errors": errors}
    return summaries


def tables(summaries: Mapping[str, Mapping[str, Any]], target: float) -> list[Table]:
    """Tables without empty columns and tables; target is an accuracy, 0: none."""
    known: set[str] = set()
    for summary in summaries.values():
        known |= summary.keys()
    shown = []
    for title, columns in TABLES.items():
        # Columns of which at least one strategy has a value.
        chosen = {head: column for head, column in columns.items() if column[0] in known}
        if not chosen:
            continue
        rows = []
        for label, summary in summaries.items():
            cells = [_cell(summary, key, factor, form) for key, factor, form in chosen.values()]
            if not summary["runs"]:
                cells[0] = "failed"
            rows.append([label, *cells])
        heads = [head.format(target=100 * target) for head in chosen]
        shown.append(Table(["", *heads], rows, title))
    return shown


def _cell(summary: Mapping[str, Any], key: str, factor: float, form: str) -> str:
    spread: Spread | None = summary.get(key)
    if spread is None:
        return ""
    scaled = spread.times(factor)
    text = f"{scaled.median:{form}}"
    if spread.repeats > 1 and spread.p10 < spread.p90:
        text = scaled.text(form)
    if spread.repeats != summary["runs"]:
        text += f" [{spread.repeats} of {summary['runs']}]"
    return text


def in_words(result: Result) -> str:
    """Formats a result, e.g. "ring, seed 0: 97.22 % after 5 epochs, 1.3 s of training"."""
    who = f"{result.label}, seed {result.seed}"
    if result.error:
        return f"{who}: failed: {result.error}"
    if not result.points:
        return f"{who}: no complete epoch with a test accuracy"
    last = result.points[-1]
    return f"{who}: {last['test_accuracy']:.2%} after {last['epoch']} epochs, {last['train_s']:.1f} s of training"


class _Curve(NamedTuple):
    """Accuracy of a run."""

    result: Result
    colour: int
    """of its strategy"""
    is_first: bool
    """of the runs of its strategy"""
    points: list[tuple[float, float]]
    """value of x, accuracy in percent"""


def _curves(results: Sequence[Result], x: str) -> list[_Curve]:
    """Curves of the runs that have one; x: key of the points."""
    labels = [*dict.fromkeys(result.label for result in results)]
    seen: set[str] = set()
    curves = []
    for result in results:
        if result.points:
            points = [(point[x], 100 * point["test_accuracy"]) for point in result.points]
            curves.append(_Curve(result, labels.index(result.label), result.label not in seen, points))
            seen.add(result.label)
    return curves


def draw(path: Path, results: Sequence[Result], title: str) -> None:
    """Draws test accuracy over seconds of training and over samples seen, as PNG."""
    left, write_png = plots.canvas("", "seconds of training", "test accuracy, %", log=False)
    left.figure.set_size_inches(11, 4.5)
    left.figure.suptitle(title, fontsize=9, wrap=True)
    halves = left.figure.add_gridspec(1, 2)
    left.set_subplotspec(halves[0])
    right = left.figure.add_subplot(halves[1], sharey=left, xlabel="samples seen")
    for axes, x in ((left, "train_s"), (right, "samples")):
        for curve in _curves(results, x):
            label, alpha = None, 0.4
            if curve.is_first:
                label, alpha = curve.result.label, 1.0
            xs, accuracies = zip(*curve.points, strict=True)
            axes.plot(xs, accuracies, marker=".", color=f"C{curve.colour}", alpha=alpha, label=label)
        axes.grid(alpha=0.3)
    write_png(path)


def write_page(path: Path, results: Sequence[Result], shown: Sequence[Table], title: str) -> None:
    """Writes an HTML page: tables, curves, and the report of the first run of each strategy."""
    notes = [html.Note(in_words(result)) for result in results if result.error]
    sections = [html.Section("", [title, *notes])]
    for table in shown:
        sections.append(html.Section(table.title, [replace(table, title="")]))
    charts = [_chart(results, "train_s", "seconds of training"), _chart(results, "samples", "samples seen")]
    sections.append(html.Section("Accuracy", [*charts, WORDS]))
    first = [curve.result.run for curve in _curves(results, "samples") if curve.is_first]
    if first:
        sections += cli.sections(first)
    path.write_text(html.html("ringtrain compare", sections), encoding="utf-8")


def _chart(results: Sequence[Result], x: str, title: str) -> Chart:
    lines = []
    dashes = ""
    for curve in _curves(results, x):
        lines.append(Line(curve.result.label, curve.points, curve.colour, dashed=not curve.is_first))
        if not curve.is_first:
            dashes = "other seeds"
    return Chart("test accuracy, %", title, lines, dashes=dashes)
