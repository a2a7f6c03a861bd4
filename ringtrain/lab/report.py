"""ringtrain report: what came of one run or several, side by side, as an HTML page or as Markdown. No TensorFlow."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain import post_mortem, trace
from ringtrain.errors import LaunchError, RunDirectoryError
from ringtrain.lab import measured, page, runs
from ringtrain.lab.charts import Bars, Chart, Line, number
from ringtrain.lab.page import Note, Section, Table
from ringtrain.lab.runs import Run

PARTS = {"input": "input_s", "compute": "compute_s", "callbacks": "callbacks_s", "waiting": "wait_s"}
MAX_RANKS = 16
"""in the picture; those that need longest"""
MAX_EVENTS = 100
MAX_EPOCHS = 12
"""rows of the table of epochs"""
WORDS = "Compute: forward and backward pass, and the update. Waiting: for the other ranks, and the allreduce itself."
AS_NUMBERS = ("save", "commit", "training")
"""events of the journal that are told as numbers"""


def main(options: argparse.Namespace) -> int:
    """Reads runs and files of ringtrain bench, and writes a page about them.

    Args:
        options: of the command line.
    """
    paths = [Path(word) for word in options.run]
    for wanted in ("post_mortem", "timeline"):
        if getattr(options, wanted) and len(paths) != 1:
            raise LaunchError(f"got {len(paths)} runs, --{wanted.replace('_', '-')} is about one")
    if options.post_mortem:
        post_mortem.show(paths[0])
        return 0
    if options.timeline:
        num_ranks = trace.merge(paths[0] / trace.PARTS, Path(options.timeline))
        print(f"{options.timeline}: {num_ranks} ranks; open it in https://ui.perfetto.dev")
        return 0
    read = [runs.read(path) for path in paths if path.is_dir() or path.suffix != ".json"]
    benches = [measured.read(path) for path in paths if not path.is_dir() and path.suffix == ".json"]
    title = " and ".join([*names_of(read), *(["measurements"] if benches else [])])
    told = [*(sections(read) if read else []), *benches]
    if options.markdown:
        print(page.markdown(title, told), end="")
    if options.out or not options.markdown:
        first = read[0].folder if read else paths[0].parent
        out = Path(options.out) if options.out else first / "report.html"
        try:
            out.write_text(page.html(title, told), encoding="utf-8")
        except OSError as error:
            raise RunDirectoryError(f"{out}: cannot be written: {error.strerror}: choose another --out") from error
        if not options.markdown:
            print(out)
    return 0


def names_of(read: Sequence[Run]) -> list[str]:
    """A name for each run; with its folder's where two have the same."""
    names = [run.name for run in read]
    return [run.name if names.count(run.name) == 1 else str(run.folder) for run in read]


def sections(read: Sequence[Run]) -> list[Section]:
    """What is to be said about runs.

    Args:
        read: at least one.
    """
    named = dict(zip(names_of(read), read, strict=True))
    return [
        Section("", [*_missing(named), _numbers(named)]),
        Section("Curves", _curves(named)),
        Section("What a step's time goes into", _phases(named)),
        Section("What happened", _events(named)),
        Section("Configuration", _configuration(named)),
        Section("Versions and hosts", [_versions(named)]),
    ]


def _missing(named: Mapping[str, Run]) -> list[page.Part]:
    return [Note(f"{name}: {sentence}") for name, run in named.items() for sentence in run.missing]


def _table(named: Mapping[str, Run], rows: Mapping[str, Callable[[Run], str]]) -> Table:
    """A column for each run; rows that are empty in all are left out."""
    cells = [[title, *(tell(run) for run in named.values())] for title, tell in rows.items()]
    return Table(["", *named], [row for row in cells if any(row[1:])])


def _numbers(named: Mapping[str, Run]) -> Table:
    """What came out."""

    def of(key: str, unit: str = "") -> Callable[[Run], str]:
        def tell(run: Run) -> str:
            value = run.summary.get(key)
            return "" if value is None else f"{number(value)} {unit}".strip()

        return tell

    def last(key: str, run: Run) -> float | None:
        found = [record[key] for record in run.epochs if record.get(key) is not None]
        return found[-1] if found else None

    def metric(key: str) -> Callable[[Run], str]:
        return lambda run: _metric(key, last(key, run))

    def best(run: Run) -> str:
        found = [(r["test_accuracy"], r["epoch"]) for r in run.epochs if r.get("test_accuracy") is not None]
        value, epoch = max(found, key=lambda one: (one[0], -one[1]), default=(None, 0))
        return "" if value is None else f"{_metric('test_accuracy', value)} (epoch {epoch})"

    def mean_speed(run: Run) -> str:
        if run.summary.get("images_per_s"):
            return f"{number(run.summary['images_per_s'])} images/s"
        found = [r["images_per_s"] for r in run.epochs or run.steps if r.get("images_per_s")]
        return f"{number(found[-1])} images/s at last" if found else ""

    def saves(run: Run) -> str:
        kept = run.summary.get("saves") or {}
        return f"{kept['count']}; training waited {number(kept['stall_s'])} s" if kept else ""

    def state(run: Run) -> str:
        by = run.summary.get("stopped_by")
        told = run.verdict[0] if run.verdict else "" if run.summary else "no summary"
        return f"{told}{f', stopped by {by}' if by else ''}"

    def steps(run: Run) -> str:
        done = max((r["global_step"] for r in [*run.epochs, *run.steps]), default=0)
        done = max(done, run.summary.get("global_step") or 0)
        planned = run.numbers.get("num_steps")
        return f"{done:,}{f' of {planned:,}' if planned and planned != done else ''}"

    def ranks(run: Run) -> str:
        known = run.summary.get("num_ranks") or run.numbers.get("num_ranks")
        hosts = {event.get("host") for event in run.events} - {None}
        return f"{known} on {len(hosts)} host{'s' * (len(hosts) != 1)}" if known and hosts else str(known or "")

    metrics = [key for run in named.values() for record in run.epochs[-1:] for key in record if key[:5] == "test_"]
    return _table(
        named,
        {
            "state": state,
            "best test accuracy": best,
            **{_words(key): metric(key) for key in dict.fromkeys([*metrics, "accuracy", "loss"])},
            "speed, all ranks": mean_speed,
            "ranks": ranks,
            "steps": steps,
            "global batch": lambda run: str(run.numbers.get("global_batch_size", "")),
            "training since the last start": of("fit_s", "s"),
            "of it evaluating": of("evaluate_s", "s"),
            "checkpoints": saves,
            "restarts": of("restarts"),
            "samples left out": lambda run: of("skipped_samples")(run) if run.summary.get("skipped_samples") else "",
            "ranks' weights": lambda run: f"equal, {run.summary['checksum']}" if run.summary.get("in_sync") else "",
        },
    )


def _curves(named: Mapping[str, Run]) -> list[page.Part]:
    """Metrics in training and on the test data, learning rate, speed; and epochs as a table."""
    several = len(named) > 1
    keys = dict.fromkeys(key for run in named.values() for record in run.epochs for key in record)
    pairs = [key for key in ("loss", "accuracy", *keys) if f"test_{key}" in keys]
    charts: list[page.Part] = []
    for key in dict.fromkeys(pairs or ["loss", "accuracy"]):
        lines: list[Line] = []
        for place, (name, run) in enumerate(named.items()):
            for of, what in ((key, "training"), (f"test_{key}", "test")):
                # A run that has completed no epoch has at least its steps.
                records = run.epochs or run.steps
                points = [(_epoch(run, r), _scaled(key, r[of])) for r in records if of in r]
                colour = place if several else int(what == "test")
                lines.append(Line(name if several else what, points, colour, what == "training"))
        title = f"{_words(key)}{', %' * _is_share(key)}"
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
    """Where runs went on after they had been broken off."""
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
    head = ["epoch", "step", *(_words(key) for key in keys)]
    rows = [
        [str(r["epoch"]), str(r["global_step"]), *(_metric(key, r[key]) if key in r else "" for key in keys)]
        for r in shown
    ]
    which = "epochs" if stride <= 1 else f"one epoch in {stride}, of {len(run.epochs)}"
    return Table(head, rows, which, folded=True)


def _phases(named: Mapping[str, Run]) -> list[page.Part]:
    """Mean milliseconds of a step on each rank, and who was slow."""
    bars: list[page.Part] = []
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


def _events(named: Mapping[str, Run]) -> list[page.Part]:
    """How each start of each run ended, and what its journals tell."""
    parts: list[page.Part] = []
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
                post_mortem.in_words(event),
            ]
            for event in told[-MAX_EVENTS:]
        ]
        which = f"the last {MAX_EVENTS} of {len(told)} events" if len(told) > MAX_EVENTS else "events"
        parts.append(Table(["time", "rank", "host", "event", "facts"], cells, f"{which} of {name}", folded=True))
    return parts


def _configuration(named: Mapping[str, Run]) -> list[page.Part]:
    """One run: what is not left at its default; several: what differs."""
    known = runs.defaults()
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
    """What the runs were made with."""
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


def _is_share(key: str) -> bool:
    return "accuracy" in key or key.startswith(("top_", "test_top_", "top-", "test_top-"))


def _scaled(key: str, value: Any) -> float | None:
    if not isinstance(value, int | float):
        return None
    return 100 * value if _is_share(key) else value


def _metric(key: str, value: Any) -> str:
    shown = _scaled(key, value)
    if shown is None:
        return "" if value is None else str(value)
    unit = " %" if _is_share(key) else " images/s" if key == "images_per_s" else " s" if key.endswith("_s") else ""
    return f"{shown:.2f}{unit}" if unit == " %" else f"{number(shown)}{unit}"


def _words(key: str) -> str:
    return {"images_per_s": "speed"}.get(key, key.removesuffix("_s").replace("_", " "))
