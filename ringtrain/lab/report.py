"""ringtrain report: one run or several side by side, as an HTML page. Does not import TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.errors import LaunchError, RunDirectoryError
from ringtrain.lab import page, postmortem, report_curves, runs
from ringtrain.lab.page import Note, Part, Section
from ringtrain.lab.runs import Run, metric, metric_name
from ringtrain.lab.tables import Table, counted, number
from ringtrain.monitor import goodput, journal, trace
from ringtrain.monitor.goodput import Goodput
from ringtrain.monitor.journal import duration
from ringtrain.options import FILE, Argument

PAGE = "report.html"
MAX_EVENTS = 100
AS_NUMBERS = ("save", "commit", "training", "time")
"""journal events that are reported as numbers"""
GOODPUT = (
    "Goodput is the share of steps that count, which includes the exchange of gradients. The parts add up to the time"
    " from the launch of the run to the last entry of rank 0's journal. A process that is killed usually loses"
    " its last 10 s, or 1 % of its training."
)


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    run: Annotated[tuple[str, ...], Argument("RUN", is_positional=True)] = ()
    """folder of a run (the newest in runs)"""
    out: Annotated[str, FILE] = ""
    """write it there (report.html in the first folder)"""
    post_mortem: bool = False
    """all ranks' journals in one table, with a verdict"""
    timeline: Annotated[str, FILE] = ""
    """merge what the ranks of a run that was killed left"""


def main(options: Options) -> int:
    """Reads runs, and writes a page about them."""
    folders = [Path(word) for word in options.run] or [runs.newest()]
    if (options.post_mortem or options.timeline) and len(folders) != 1:
        raise LaunchError(f"got {len(folders)} runs, --post-mortem and --timeline are about one")
    if options.post_mortem:
        postmortem.show(folders[0])
    elif options.timeline:
        num_ranks = trace.merge(folders[0] / trace.PARTS, Path(options.timeline))
        print(f"{options.timeline}: {num_ranks} ranks; open it in https://ui.perfetto.dev")
    else:
        found = [runs.read(folder) for folder in folders]
        out = Path(options.out) if options.out else folders[0] / PAGE
        title = ", ".join(names_of(found))
        try:
            out.write_text(page.html(title, sections(found)), encoding="utf-8")
        except OSError as error:
            raise RunDirectoryError(f"{out}: cannot be written: {error.strerror}: choose another --out") from error
        print(journal.printable(str(out)))
    return 0


def names_of(read: Sequence[Run]) -> list[str]:
    """Name of each run, replaced by its directory if two runs share a name."""
    names = [run.name for run in read]
    return [run.name if names.count(run.name) == 1 else str(run.folder) for run in read]


def sections(read: Sequence[Run]) -> list[Section]:
    """Sections of the page about runs."""
    named = dict(zip(names_of(read), read, strict=True))
    notes: list[Part] = []
    for name, run in named.items():
        notes += [Note(f"{name}: {sentence}") for sentence in run.missing]
    return [
        Section("", [*notes, _table(named, _results)]),
        Section("Curves", report_curves.curves(named)),
        Section("What a step's time goes into", report_curves.phases(named)),
        Section("Where the time went", time_use(named)),
        Section("What happened", _events(named)),
        Section("Configuration", _configuration(named)),
        Section("Versions and hosts", [_table(named, _versions)]),
    ]


def _table(named: Mapping[str, Run], facts_of: Any) -> Table:
    """Table with a column per run of the facts about it, by title; rows that are empty for all runs are dropped."""
    columns = [facts_of(run) for run in named.values()]
    titles: dict[str, None] = {}
    for column in columns:
        titles |= dict.fromkeys(column)
    rows = [[title, *(column.get(title, "") for column in columns)] for title in titles]
    return Table(["", *named], [row for row in rows if any(row[1:])])


def _results(run: Run) -> dict[str, str]:
    """Results of a run by the titles of their rows; empty text where it has none."""
    results = {"state": _state(run)}
    # First the metrics of test and validation data.
    for key in sorted(report_curves.metrics_of(run), key=lambda key: not key.startswith(report_curves.PREFIXES)):
        results[metric_name(key)] = _last(run, key)
    results["speed, all ranks"] = _speed(run)
    results["ranks"] = _ranks(run)
    results["steps"] = _steps(run)
    results["global batch"] = str(run.numbers.get("global_batch_size", ""))
    if run.samples == "batches":
        results["global batch"] = "a batch of the data"
    for title, key in (("training since the last start", "fit_s"), ("of it evaluating", "evaluate_s")):
        if key in run.summary:
            results[title] = f"{number(run.summary[key])} s"
    saves = run.summary.get("saves")
    if saves:
        results["checkpoints"] = f"{saves['count']}; training waited {number(saves['stall_s'])} s"
    results["restarts"] = str(run.summary.get("restarts", ""))
    results["samples left out"] = str(run.summary.get("skipped_samples") or "")
    if run.summary.get("in_sync"):
        results["ranks' weights"] = f"equal, {run.summary['checksum']}"
    return results


def _state(run: Run) -> str:
    words = [runs.state_of(run)]
    if run.events:
        words += postmortem.verdict(run.events)[:1]
    by = run.summary.get("stopped_by")
    if by:
        words.append(f"stopped by {by}")
    return ", ".join(words)


def _last(run: Run, key: str) -> str:
    """Last value of a metric; empty if there is none."""
    for record in reversed(run.epochs):
        if record.get(key) is not None:
            return metric(key, record[key])
    return ""


def _speed(run: Run) -> str:
    if run.summary.get("images_per_s"):
        return f"{number(run.summary['images_per_s'])} {run.samples}/s"
    speeds = [record["images_per_s"] for record in run.records if record.get("images_per_s")]
    if not speeds:
        return ""
    return f"{number(speeds[-1])} {run.samples}/s at last"


def _steps(run: Run) -> str:
    done = max((record["global_step"] for record in [*run.epochs, *run.steps]), default=0)
    done = max(done, run.summary.get("global_step") or 0)
    planned = run.numbers.get("num_steps")
    if planned and planned != done:
        return f"{done:,} of {planned:,}"
    return f"{done:,}"


def _ranks(run: Run) -> str:
    num_ranks = run.summary.get("num_ranks") or run.numbers.get("num_ranks")
    hosts = {event.get("host") for event in run.events} - {None}
    if not num_ranks or not hosts:
        return str(num_ranks or "")
    return f"{num_ranks} on {counted(len(hosts), 'host')}"


def time_use(named: Mapping[str, Run]) -> list[Part]:
    """Parts of the time of runs whose journals tell."""
    known: dict[str, Goodput] = {}
    for name, run in named.items():
        spent = goodput.of(run.events)
        if spent and spent.total_s:
            known[name] = spent
    if not known:
        return []
    rows = []
    for part, title in goodput.PARTS.items():
        if any(spent.seconds[part] >= 0.05 for spent in known.values()):
            rows.append([title, *(_amount(spent, part) for spent in known.values())])
    rows.append(["all", *(duration(spent.total_s) for spent in known.values())])
    rows.append(["goodput", *(f"{spent.share:.1%}" for spent in known.values())])
    rows.append(["starts", *(str(len(spent.attempts)) for spent in known.values())])
    rows.append(["hours of hosts", *(f"{spent.host_hours:,.2f}" for spent in known.values())])
    intervals = [duration(spent.best_interval_s) if spent.best_interval_s else "" for spent in known.values()]
    if any(intervals):
        rows.append(["time between checkpoints that would have cost least", *intervals])
    return [Table(["", *known], rows), GOODPUT]


def _amount(spent: Goodput, part: str) -> str:
    seconds = spent.seconds[part]
    return f"{duration(seconds)} ({seconds / spent.total_s:.1%})"


def _events(named: Mapping[str, Run]) -> list[Part]:
    """Exit cause of each attempt of each run, and the last events of its journals."""
    parts: list[Part] = []
    for name, run in named.items():
        if not run.events:
            continue
        summary, *attempts = postmortem.verdict(run.events)
        parts += [f"{name}: {summary}", *attempts]
        for cause in run.summary.get("restart_causes") or []:
            parts.append(f"restarted because of: {cause}")
        events = [event for event in run.events if event["event"] not in AS_NUMBERS]
        rows = [postmortem.cells_of(event) for event in events[-MAX_EVENTS:]]
        parts.append(Table(postmortem.HEAD, rows, f"events of {name}, the last {MAX_EVENTS} at most", folded=True))
    return parts


def _configuration(named: Mapping[str, Run]) -> list[Part]:
    """Options that differ from their defaults, or, for several runs, between the runs."""
    columns = {name: run.options for name, run in named.items()}
    if not any(columns.values()):
        return []
    if len(named) == 1:
        from ringtrain.config import Config

        columns["default"] = runs.flat(json.loads(json.dumps(dataclasses.asdict(Config()))))
    options: dict[str, None] = {}
    for run in named.values():
        options |= dict.fromkeys(run.options)
    different = []
    for option in options:
        values = [_value(own[option]) if option in own else "" for own in columns.values()]
        if len(set(values)) > 1 and option != "run.name":
            different.append([option, *values])
    if not different:
        return ["No option differs."]
    return [Table(["option", *columns], different)]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, float):
        return f"{value:g}"
    if value == "":
        return '""'
    return str(value)


def _versions(run: Run) -> dict[str, str]:
    """Package versions, git revision, hosts and start time of a run."""
    found: dict[str, str] = {}
    for record in (run.summary, *run.events):
        if record.get("versions"):
            found = {package: str(version) for package, version in record["versions"].items()}
            break
    found["git revision"] = str(run.summary.get("git_revision") or "")
    found["hosts"] = ", ".join(sorted({str(event.get("host")) for event in run.events}))
    if run.events:
        time_s = min(event["time_s"] for event in run.events)
        found["begun"] = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time_s))
    return found
