"""ringtrain report: one run or several side by side, as an HTML page or Markdown. Does not import TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.errors import LaunchError, RunDirectoryError
from ringtrain.lab.report import benches, curves, html, postmortem, remote, run_folder, runs, time_use
from ringtrain.lab.report.charts import number
from ringtrain.lab.report.html import Note, Section
from ringtrain.lab.report.run_folder import Run
from ringtrain.lab.tables import Table
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
    """folder of a run (the newest in runs), its URL in a mirror, or a file that bench --out wrote"""
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
    """Reads runs and files of ringtrain bench, and writes a page about them."""
    words = options.run or (str(runs.newest()),)
    for wanted in ("post_mortem", "timeline"):
        if getattr(options, wanted) and len(words) != 1:
            raise LaunchError(f"got {len(words)} runs, --{wanted.replace('_', '-')} is about one")
    with remote.local(words) as paths:
        if options.post_mortem:
            postmortem.show(paths[0])
        elif options.timeline:
            num_ranks = trace.merge(paths[0] / trace.PARTS, Path(options.timeline))
            print(f"{options.timeline}: {num_ranks} ranks; open it in https://ui.perfetto.dev")
        else:
            _report(options, paths, of_url=remote.is_url(words[0]))
    return 0


def _report(options: Options, paths: Sequence[Path], of_url: bool) -> None:
    """Prints or writes a report; of a URL's runs in the current folder, unless --out names another file."""
    read = [run_folder.read(path) for path in paths if path.is_dir() or path.suffix != ".json"]
    measurements = [benches.read(path) for path in paths if not path.is_dir() and path.suffix == ".json"]
    title = ", ".join([*names_of(read), *(["measurements"] if measurements else [])])
    told = [*(sections(read, options.price) if read else []), *measurements]
    if options.markdown:
        print(journal.printable(html.markdown(title, told)), end="")
    if options.out or not options.markdown:
        first = read[0].folder if read else paths[0].parent
        default = Path(PAGE) if of_url else first / PAGE
        out = Path(options.out) if options.out else default
        _write(out, title, told)
        if not options.markdown:
            print(journal.printable(str(out)))


def write_page(folder: Path) -> None:
    """Writes the page about one run into its folder."""
    run = run_folder.read(folder)
    _write(folder / PAGE, run.name, sections([run]))


def _write(out: Path, title: str, told: Sequence[Section]) -> None:
    try:
        out.write_text(html.html(title, told), encoding="utf-8")
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
    return [Note(f"{name}: {sentence}") for name, run in named.items() for sentence in run.missing]


def _table(named: Mapping[str, Run], rows: Mapping[str, Callable[[Run], str]]) -> Table:
    """Table with a column per run; rows that are empty for all runs are dropped."""
    cells = [[title, *(tell(run) for run in named.values())] for title, tell in rows.items()]
    return Table(["", *named], [row for row in cells if any(row[1:])])


def _numbers(named: Mapping[str, Run]) -> Table:
    """Table of the results."""
    metrics = [key for run in named.values() for one in run.epochs[-1:] for key in one if key[:4] in ("test", "val_")]
    return _table(
        named,
        {
            "state": _state,
            "best test accuracy": _best,
            **{curves.words(key): _metric(key) for key in dict.fromkeys([*metrics, "accuracy", "loss"])},
            "speed, all ranks": _mean_speed,
            "ranks": _ranks,
            "steps": _steps,
            "global batch": lambda run: str(run.numbers.get("global_batch_size", "")),
            "training since the last start": _fact("fit_s", "s"),
            "of it evaluating": _fact("evaluate_s", "s"),
            "checkpoints": _saves,
            "restarts": _fact("restarts"),
            "samples left out": _samples_left_out,
            "ranks' weights": _equal_weights,
        },
    )


def _fact(key: str, unit: str = "") -> Callable[[Run], str]:
    """Function for the text of an entry of a run's summary; "" if it has none."""

    def tell(run: Run) -> str:
        value = run.summary.get(key)
        return "" if value is None else f"{number(value)} {unit}".strip()

    return tell


def _metric(key: str) -> Callable[[Run], str]:
    """Function for the text of the last value of a metric."""

    def tell(run: Run) -> str:
        values = [record[key] for record in run.epochs if record.get(key) is not None]
        return curves.metric(key, values[-1] if values else None)

    return tell


def _best(run: Run) -> str:
    found = [(r["test_accuracy"], r["epoch"]) for r in run.epochs if r.get("test_accuracy") is not None]
    if not found:
        return ""
    value, epoch = max(found, key=lambda one: (one[0], -one[1]))
    return f"{curves.metric('test_accuracy', value)} (epoch {epoch})"


def _mean_speed(run: Run) -> str:
    if run.summary.get("images_per_s"):
        return f"{number(run.summary['images_per_s'])} images/s"
    found = [r["images_per_s"] for r in run.epochs or run.steps if r.get("images_per_s")]
    return f"{number(found[-1])} images/s at last" if found else ""


def _saves(run: Run) -> str:
    kept = run.summary.get("saves")
    if not kept:
        return ""
    return f"{kept['count']}; training waited {number(kept['stall_s'])} s"


def _state(run: Run) -> str:
    state = ""
    if run.verdict:
        state = run.verdict[0]
    elif not run.summary:
        state = "no summary"
    by = run.summary.get("stopped_by")
    if by:
        state += f", stopped by {by}"
    return state


def _steps(run: Run) -> str:
    done = max((r["global_step"] for r in [*run.epochs, *run.steps]), default=0)
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
    return f"{num_ranks} on {len(hosts)} host{'s' if len(hosts) != 1 else ''}"


def _samples_left_out(run: Run) -> str:
    if not run.summary.get("skipped_samples"):
        return ""
    return _fact("skipped_samples")(run)


def _equal_weights(run: Run) -> str:
    if not run.summary.get("in_sync"):
        return ""
    return f"equal, {run.summary['checksum']}"


def _events(named: Mapping[str, Run]) -> list[html.Part]:
    """Exit cause of each attempt of each run, and the events of its journals."""
    parts: list[html.Part] = []
    for name, run in named.items():
        if not run.events:
            continue
        lines = [line.partition(": ")[::2] for line in run.verdict[1:]]
        causes = [str(cause) for cause in run.summary.get("restart_causes") or []]
        rows = [[start, how, causes[place] if place < len(causes) else ""] for place, (start, how) in enumerate(lines)]
        width = 3 if any(row[2] for row in rows) else 2
        head = ["start", "how it ended", "what the launcher says of it"][:width]
        parts += [f"{name}: {run.verdict[0]}", Table(head, [row[:width] for row in rows])]
        told = [event for event in run.events if event["event"] not in AS_NUMBERS]
        cells = [
            [
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time_s"])),
                str(event.get("rank", "?")),
                str(event.get("host", "?")),
                event["event"],
                postmortem.in_words(event),
            ]
            for event in told[-MAX_EVENTS:]
        ]
        which = f"the last {MAX_EVENTS} of {len(told)} events" if len(told) > MAX_EVENTS else "events"
        parts.append(Table(["time", "rank", "host", "event", "facts"], cells, f"{which} of {name}", folded=True))
    return parts


def _configuration(named: Mapping[str, Run]) -> list[html.Part]:
    """Options that differ from their defaults, or, for several runs, between the runs."""
    known = run_folder.defaults()
    all_options = dict.fromkeys(option for run in named.values() for option in run.options)
    values = {
        option: [_value(run.options[option]) if option in run.options else "" for run in named.values()]
        for option in all_options
    }
    if len(named) == 1:
        chosen = [option for option in values if [_value(known.get(option, "?"))] != values[option]]
        head, title = ["option", "value", "default"], "all options"
        rows = [[option, *values[option], _value(known.get(option, "?"))] for option in chosen]
        nothing = "Every option is at its default."
    else:
        chosen = [option for option, row in values.items() if len({*row}) > 1 and option != "run.name"]
        head, title = ["option", *named], "all options that are the same"
        rows = [[option, *values[option]] for option in chosen]
        nothing = "The runs were given the same options."
    others = [[option, row[0]] for option, row in values.items() if option not in chosen or len(named) == 1]
    if not values:
        return []
    return [Table(head, rows) if rows else nothing, Table(["option", "value"], others, title, folded=True)]


def _versions(named: Mapping[str, Run]) -> Table:
    """Package versions, git revision, hosts and start time of the runs."""
    kept: dict[str, Mapping[str, Any]] = {
        name: run.summary.get("versions")
        or next((event["versions"] for event in run.events if event.get("versions")), {})
        for name, run in named.items()
    }
    packages = dict.fromkeys(package for versions in kept.values() for package in versions)
    rows = [[package, *(str(kept[name].get(package, "")) for name in named)] for package in packages]
    revisions = [str(run.summary.get("git_revision") or "") for run in named.values()]
    hosts = [", ".join(sorted({str(event.get("host")) for event in run.events})) for run in named.values()]
    begun = [_when(min((event["time_s"] for event in run.events), default=0.0)) for run in named.values()]
    more = [["git revision", *revisions], ["hosts", *hosts], ["begun", *begun]]
    return Table(["", *named], [*rows, *(row for row in more if any(row[1:]))])


def _when(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time_s)) if time_s else ""


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else '""' if value == "" else str(value)
