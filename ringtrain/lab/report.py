"""ringtrain report: one run or several side by side, as an HTML page. Does not import TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.checkpoint.run_folder import NO_METRICS
from ringtrain.config.options import FILE, Argument
from ringtrain.errors import LaunchError, RunDirectoryError
from ringtrain.lab import page, postmortem, runs
from ringtrain.lab.page import Line
from ringtrain.lab.runs import Run, title_of
from ringtrain.lab.tables import Table, number
from ringtrain.monitor import goodput, journal
from ringtrain.monitor.journal import duration

PAGE = "report.html"
Runs = Mapping[str, Run]
"""runs by their names on the page"""
SOURCES = {"": "training", "test_": "test", "val_": "validation"}
"""data that metrics are of, by the prefixes of their names"""
STEP_PARTS = {"input": "input_s", "compute": "compute_s", "callbacks": "callbacks_s", "waiting": "wait_s"}
STEP = "Compute: forward and backward pass, and the update. Waiting: for the other ranks, and the allreduce itself."
GOODPUT = (
    "Goodput is the share of steps that count, which includes the exchange of gradients. The parts add up to the time"
    " from the launch of the run to the last entry of rank 0's journal. A process that is killed usually loses"
    " its last 10 s, or 1 % of its training."
)


@dataclass(frozen=True)
class ReportOptions:
    """ReportOptions of the command."""

    run: Annotated[tuple[str, ...], Argument("RUN", is_positional=True)] = ()
    """folder of a run (the newest in runs)"""
    out: Annotated[str, FILE] = ""
    """write it there (report.html in the first folder)"""
    post_mortem: bool = False
    """all ranks' journals in one table, with a verdict"""


def main(options: ReportOptions) -> int:
    """Reads runs, and writes a page about them."""
    folders = [Path(word) for word in options.run] or [runs.newest()]
    if options.post_mortem and len(folders) != 1:
        raise LaunchError(f"got {len(folders)} runs, --post-mortem is about one")
    if options.post_mortem:
        postmortem.show(folders[0])
        return 0
    found = [runs.read(folder) for folder in folders]
    names = [run.name for run in found]
    named = {}
    for run in found:
        named[run.name if names.count(run.name) == 1 else str(run.folder)] = run
    out = Path(options.out) if options.out else folders[0] / PAGE
    try:
        out.write_text(page.html(", ".join(named), sections(named)), encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be written: {error.strerror}: choose another --out") from error
    print(journal.printable(str(out)))
    return 0


def sections(named: Runs) -> dict[str, list[str]]:
    """Elements of the page about runs, by heading."""
    return {
        "": [_table(named, _results)],
        "Curves": [page.charts(curves(named))],
        "What a step's time goes into": step_time(named),
        "Where the time went": time_use(named),
        "What happened": _events(named),
        "Configuration": _configuration(named),
        "Versions and hosts": [_table(named, _versions)],
    }


def _table(named: Runs, cells_of: Callable[[Run], dict[str, str]]) -> str:
    """Table with a column per run of the facts about it, by title; rows that are empty for all runs are dropped."""
    columns = [cells_of(run) for run in named.values()]
    titles: dict[str, None] = {}
    for column in columns:
        titles |= dict.fromkeys(column)
    rows = [[title, *(column.get(title, "") for column in columns)] for title in titles]
    return page.table(Table(["", *named], [row for row in rows if any(row[1:])]))


def _results(run: Run) -> dict[str, str]:
    """Facts of `ringtrain runs`, and how the ranks trained."""
    facts = runs.facts_of(run)
    cells = runs.cells_of(facts, list(facts["metrics"]))
    cells["global batch"] = str(run.numbers.get("global_batch_size", ""))
    if run.samples == "batches":
        cells["global batch"] = "a batch of the data"
    saves = run.summary.get("saves")
    if saves:
        cells["checkpoints"] = f"{saves['count']}; training waited {number(saves['stall_s'])} s"
    if run.summary.get("in_sync"):
        cells["ranks' weights"] = f"equal, {run.summary['checksum']}"
    return cells


# ---- curves ---------------------------------------------------------------------------------------------------------


def curves(named: Runs) -> list[str]:
    """Charts of metrics in training, test and validation, learning rate and speed."""
    keys: dict[str, None] = {}
    for run in named.values():
        for record in run.epochs:
            keys |= dict.fromkeys(key.removeprefix("test_").removeprefix("val_") for key in record)
    drawn: dict[str, dict[str, str]] = {}
    for key in keys:
        if key not in NO_METRICS:
            drawn[title_of(key)] = {f"{prefix}{key}": source for prefix, source in SOURCES.items()}
    samples = " or ".join({run.samples: None for run in named.values()})
    drawn["learning rate"] = {"learning_rate": ""}
    drawn[f"speed of all ranks, {samples}/s"] = {"images_per_s": ""}
    return [_chart(named, title, sources) for title, sources in drawn.items()]


def _chart(named: Runs, title: str, sources: Mapping[str, str]) -> str:
    """A color for each run; training is dashed. sources: names of the data by the keys of their records."""
    lines = []
    for color, (name, run) in enumerate(named.items()):
        for key, source in sources.items():
            label = ", ".join(filter(None, [name if len(named) > 1 else "", source]))
            points = [(record["epoch"], record[key]) for record in run.epochs if _is_number(record.get(key))]
            style = "--" if source == "training" else "-"
            lines.append(Line(label, color, style, [x for x, _ in points], [y for _, y in points]))
    return page.chart(title, lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# ---- time -----------------------------------------------------------------------------------------------------------


def step_time(named: Runs) -> list[str]:
    """Mean milliseconds per step on each rank, and stragglers."""
    means, stragglers = [], []
    for name, run in named.items():
        for rank in run.summary.get("ranks") or []:
            totals = rank["totals"]
            if totals["num_steps"]:
                parts_ms = [1e3 * totals[key] / totals["num_steps"] for key in STEP_PARTS.values()]
                cells = [f"{time_ms:.2f} ms" for time_ms in (*parts_ms, sum(parts_ms))]
                means.append([name, str(rank["rank"]), rank["host"], *cells, f"{totals['num_steps']:,}"])
        for event in run.events:
            if event["event"] == "straggler":
                facts = [event.get(key, "") for key in ("global_step", "of_rank", "of_host", "times", "part")]
                stragglers.append([name, *map(str, facts)])
    if not means and not stragglers:
        return []
    head = ["run", "rank", "host", *STEP_PARTS, "step", "steps"]
    slow = ["run", "step", "rank", "host", "times the others' time", "most of it in"]
    return [page.table(Table(head, means)), page.sentence(STEP), page.table(Table(slow, stragglers, "slow ranks"))]


def time_use(named: Runs) -> list[str]:
    """Parts of the time of runs whose journals tell."""
    table = _table(named, time_cells)
    return [table, page.sentence(GOODPUT)] if table else []


def time_cells(run: Run) -> dict[str, str]:
    """Parts of a run's time by their titles; empty if its journals do not tell."""
    spent = goodput.of(run.events)
    if not spent or not spent.total_s:
        return {}
    cells = {}
    for part, title in goodput.PARTS.items():
        seconds = spent.seconds[part]
        cells[title] = f"{duration(seconds)} ({seconds / spent.total_s:.1%})" if seconds >= 0.05 else ""
    cells |= {"all": duration(spent.total_s), "goodput": f"{spent.share:.1%}", "starts": str(spent.num_starts)}
    cells["hours of hosts"] = f"{spent.host_hours:,.2f}"
    if spent.best_interval_s:
        cells["time between checkpoints that would have cost least"] = duration(spent.best_interval_s)
    return cells


# ---- the rest -------------------------------------------------------------------------------------------------------


def _events(named: Runs) -> list[str]:
    """Exit cause of each attempt of each run."""
    sentences = []
    for name, run in named.items():
        if run.events:
            summary, *attempts = postmortem.verdict(run.events)
            sentences += [f"{name}: {summary}", *attempts]
        sentences += [f"restarted because of: {cause}" for cause in run.summary.get("restart_causes") or []]
    return [page.sentence(text) for text in sentences]


def _configuration(named: Runs) -> list[str]:
    """ReportOptions that differ from their defaults, or, for several runs, between the runs."""
    columns = {name: run.options for name, run in named.items()}
    if len(named) == 1:
        from ringtrain.config.sections import Config

        columns["default"] = runs.flat(json.loads(json.dumps(dataclasses.asdict(Config()))))
    options: dict[str, None] = {}
    for run in named.values():
        options |= dict.fromkeys(run.options)
    rows = []
    for option in options:
        values = [json.dumps(column[option]) if option in column else "" for column in columns.values()]
        if len(set(values)) > 1 and option != "run.name":
            rows.append([option, *values])
    return [page.table(Table(["option", *columns], rows))]


def _versions(run: Run) -> dict[str, str]:
    """Package versions and hosts of a run."""
    cells: dict[str, str] = {}
    for record in (run.summary, *run.events):
        cells |= {package: str(version) for package, version in (record.get("versions") or {}).items()}
    cells["hosts"] = ", ".join(sorted({str(event.get("host")) for event in run.events}))
    return cells
