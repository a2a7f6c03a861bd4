"""ringtrain report: one run or several side by side, as an HTML page or Markdown. Does not import TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.errors import LaunchError, RunDirectoryError
from ringtrain.lab.report import curves, html, postmortem, run_folder, runs, time_use
from ringtrain.lab.report.html import Note, Section
from ringtrain.lab.report.run_folder import Run
from ringtrain.lab.tables import Table, counted, number
from ringtrain.monitor import journal, trace
from ringtrain.options import AT_LEAST_0, FILE, Argument

PAGE = "report.html"
MAX_EVENTS = 100
AS_NUMBERS = ("save", "commit", "training", "time")
"""journal events that are reported as numbers"""


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    run: Annotated[tuple[str, ...], Argument("RUN", is_positional=True)] = ()
    """folder of a run (the newest in runs)"""
    out: Annotated[str, FILE] = ""
    """write it there (report.html in the first folder)"""
    markdown: bool = False
    """print its tables as Markdown instead"""
    post_mortem: bool = False
    """all ranks' journals in one table, with a verdict"""
    timeline: Annotated[str, FILE] = ""
    """merge what the ranks of a run that was killed left"""
    price: Annotated[float, AT_LEAST_0] = 0.0
    """of a host for an hour: adds what the run has cost, in the same currency"""


def main(options: Options) -> int:
    """Reads runs, and writes a page about them."""
    words = options.run or (str(runs.newest()),)
    if options.post_mortem and len(words) != 1:
        raise LaunchError(f"got {len(words)} runs, --post-mortem is about one")
    if options.timeline and len(words) != 1:
        raise LaunchError(f"got {len(words)} runs, --timeline is about one")
    paths = [Path(word) for word in words]
    if options.post_mortem:
        postmortem.show(paths[0])
    elif options.timeline:
        num_ranks = trace.merge(paths[0] / trace.PARTS, Path(options.timeline))
        print(f"{options.timeline}: {num_ranks} ranks; open it in https://ui.perfetto.dev")
    else:
        _report(options, [run_folder.read(path) for path in paths])
    return 0


def _report(options: Options, found: Sequence[Run]) -> None:
    """Prints or writes a report."""
    title, page = ", ".join(names_of(found)), sections(found, options.price)
    if options.markdown:
        print(journal.printable(html.markdown(title, page)), end="")
        if not options.out:
            return
    out = Path(options.out) if options.out else found[0].folder / PAGE
    _write(out, title, page)
    if not options.markdown:
        print(journal.printable(str(out)))


def _write(out: Path, title: str, page: Sequence[Section]) -> None:
    try:
        out.write_text(html.html(title, page), encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be written: {error.strerror}: choose another --out") from error


def names_of(read: Sequence[Run]) -> list[str]:
    """Name of each run, replaced by its directory if two runs share a name."""
    names = [run.name for run in read]
    return [run.name if names.count(run.name) == 1 else str(run.folder) for run in read]


def sections(read: Sequence[Run], price: float = 0.0) -> list[Section]:
    """Sections of the page about runs."""
    named = dict(zip(names_of(read), read, strict=True))
    return [
        Section("", [*_missing(named), _numbers(named)]),
        Section("Curves", curves.curves(named)),
        Section("What a step's time goes into", curves.phases(named)),
        Section("Where the time went", time_use.parts_of(named, price)),
        Section("What happened", _events(named)),
        Section("Configuration", _configuration(named)),
        Section("Versions and hosts", [_versions(named)]),
    ]


def _missing(named: Mapping[str, Run]) -> list[html.Part]:
    notes: list[html.Part] = []
    for name, run in named.items():
        notes += [Note(f"{name}: {sentence}") for sentence in run.missing]
    return notes


def _numbers(named: Mapping[str, Run]) -> Table:
    """Table of the results, a column per run; rows that are empty for all runs are dropped."""
    metrics: dict[str, None] = {}
    for run in named.values():
        metrics |= dict.fromkeys(curves.metrics_of(run))
    # First those of test and validation data.
    keys = sorted(metrics, key=lambda key: not key.startswith(curves.PREFIXES))
    columns = [_results(run, keys) for run in named.values()]
    rows = [[title, *(column[title] for column in columns)] for title in columns[0]]
    return Table(["", *named], [row for row in rows if any(row[1:])])


def _results(run: Run, metrics: Iterable[str]) -> dict[str, str]:
    """Results of a run by the titles of their rows; empty text where it has none."""
    results = {"state": _state(run), "best test accuracy": _best(run)}
    for key in metrics:
        results[curves.words(key)] = _last(run, key)
    results["speed, all ranks"] = _mean_speed(run)
    results["ranks"] = _ranks(run)
    results["steps"] = _steps(run)
    results["global batch"] = str(run.numbers.get("global_batch_size", ""))
    if run.samples == "batches":
        results["global batch"] = "a batch of the data"
    results["training since the last start"] = _fact(run, "fit_s", "s")
    results["of it evaluating"] = _fact(run, "evaluate_s", "s")
    results["checkpoints"] = _saves(run)
    results["restarts"] = _fact(run, "restarts")
    results["samples left out"] = _samples_left_out(run)
    results["ranks' weights"] = _equal_weights(run)
    return results


def _fact(run: Run, key: str, unit: str = "") -> str:
    """Number in a run's summary; empty if it has none."""
    value = run.summary.get(key)
    if value is None:
        return ""
    return f"{number(value)} {unit}".strip()


def _last(run: Run, key: str) -> str:
    """Last value of a metric; empty if there is none."""
    for record in reversed(run.epochs):
        if record.get(key) is not None:
            return curves.metric(key, record[key])
    return ""


def _best(run: Run) -> str:
    evaluated = [record for record in run.epochs if record.get("test_accuracy") is not None]
    if not evaluated:
        return ""
    # Of equal ones, the first.
    best = max(evaluated, key=lambda record: (record["test_accuracy"], -record["epoch"]))
    return f"{curves.metric('test_accuracy', best['test_accuracy'])} (epoch {best['epoch']})"


def _mean_speed(run: Run) -> str:
    if run.summary.get("images_per_s"):
        return f"{number(run.summary['images_per_s'])} {run.samples}/s"
    speeds = [record["images_per_s"] for record in run.epochs or run.steps if record.get("images_per_s")]
    if not speeds:
        return ""
    return f"{number(speeds[-1])} {run.samples}/s at last"


def _saves(run: Run) -> str:
    saves = run.summary.get("saves")
    if not saves:
        return ""
    return f"{saves['count']}; training waited {number(saves['stall_s'])} s"


def _state(run: Run) -> str:
    words = [runs.state_of(run), *run.verdict[:1]]
    by = run.summary.get("stopped_by")
    if by:
        words.append(f"stopped by {by}")
    return ", ".join(words)


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


def _samples_left_out(run: Run) -> str:
    if not run.summary.get("skipped_samples"):
        return ""
    return _fact(run, "skipped_samples")


def _equal_weights(run: Run) -> str:
    if not run.summary.get("in_sync"):
        return ""
    return f"equal, {run.summary['checksum']}"


def _events(named: Mapping[str, Run]) -> list[html.Part]:
    """Exit cause of each attempt of each run, and the events of its journals."""
    parts: list[html.Part] = []
    for name, run in named.items():
        if run.events:
            parts += [f"{name}: {run.verdict[0]}", _attempts(run), _journal(name, run)]
    return parts


def _attempts(run: Run) -> Table:
    """How each start ended, also in the words of the launcher if it has any."""
    causes = [str(cause) for cause in run.summary.get("restart_causes") or []]
    rows = []
    for index, line in enumerate(run.verdict[1:]):
        start, _, how = line.partition(": ")
        cause = causes[index] if index < len(causes) else ""
        rows.append([start, how, cause])
    head = ["start", "how it ended", "what the launcher says of it"]
    if not any(cause for _, _, cause in rows):
        return Table(head[:2], [row[:2] for row in rows])
    return Table(head, rows)


def _journal(name: str, run: Run) -> Table:
    events = [event for event in run.events if event["event"] not in AS_NUMBERS]
    title = f"events of {name}"
    if len(events) > MAX_EVENTS:
        title = f"the last {MAX_EVENTS} of {len(events)} events of {name}"
    rows = []
    for event in events[-MAX_EVENTS:]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time_s"]))
        rank, host = str(event.get("rank", "?")), str(event.get("host", "?"))
        rows.append([when, rank, host, event["event"], postmortem.in_words(event)])
    return Table(["time", "rank", "host", "event", "facts"], rows, title, folded=True)


def _configuration(named: Mapping[str, Run]) -> list[html.Part]:
    """Options that differ from their defaults, or, for several runs, between the runs."""
    options: dict[str, None] = {}
    for run in named.values():
        options |= dict.fromkeys(run.options)
    if not options:
        return []
    if len(named) == 1:
        return _chosen_options(*named.values())
    different = []
    equal = []
    for option in options:
        values = [_value(run.options[option]) if option in run.options else "" for run in named.values()]
        if len(set(values)) > 1 and option != "run.name":
            different.append([option, *values])
        else:
            equal.append([option, values[0]])
    table = Table(["option", *named], different) if different else "The runs were given the same options."
    return [table, Table(["option", "value"], equal, "all options that are the same", folded=True)]


def _chosen_options(run: Run) -> list[html.Part]:
    defaults = run_folder.defaults()
    chosen = []
    for option, value in run.options.items():
        default = _value(defaults.get(option, "?"))
        if _value(value) != default:
            chosen.append([option, _value(value), default])
    table = Table(["option", "value", "default"], chosen) if chosen else "Every option is at its default."
    rows = [[option, _value(value)] for option, value in run.options.items()]
    return [table, Table(["option", "value"], rows, "all options", folded=True)]


def _versions(named: Mapping[str, Run]) -> Table:
    """Package versions, git revision, hosts and start time of the runs."""
    of_runs = named.values()
    versions = [_packages(run) for run in of_runs]
    packages: dict[str, None] = {}
    for installed in versions:
        packages |= dict.fromkeys(installed)
    rows = [[package, *(str(installed.get(package, "")) for installed in versions)] for package in packages]
    others = [
        ["git revision", *(str(run.summary.get("git_revision") or "") for run in of_runs)],
        ["hosts", *map(_hosts, of_runs)],
        ["begun", *map(_begun, of_runs)],
    ]
    rows += [row for row in others if any(row[1:])]
    return Table(["", *named], rows)


def _packages(run: Run) -> Mapping[str, Any]:
    """Versions by package, from the summary or from a journal."""
    for record in (run.summary, *run.events):
        if record.get("versions"):
            return record["versions"]
    return {}


def _hosts(run: Run) -> str:
    return ", ".join(sorted({str(event.get("host")) for event in run.events}))


def _begun(run: Run) -> str:
    time_s = min((event["time_s"] for event in run.events), default=0.0)
    if not time_s:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time_s))


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, float):
        return f"{value:g}"
    if value == "":
        return '""'
    return str(value)
