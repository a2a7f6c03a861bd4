"""Output of ringtrain forecast: tables, JSON, a plot."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ringtrain.errors import ConfigError
from ringtrain.lab import plots
from ringtrain.lab.forecast import points
from ringtrain.lab.forecast.formulas import Prediction, Way, parameter_servers, predict, reach
from ringtrain.lab.forecast.points import Case, Point
from ringtrain.lab.script import Script
from ringtrain.lab.tables import Table, counted
from ringtrain.options import FILE, LIST, Argument, Given, X, options_of, read


@dataclass(frozen=True)
class Wanted:
    """What."""

    ranks: Annotated[str, LIST] = "..128"
    """numbers of ranks: 1,2,4, or ..128 for the powers of two"""
    reach: Annotated[float, X] = 0.0
    """what reaches this efficiency on the most of these ranks? 0: speeds instead"""
    memory: bool = False
    """bytes on each device of a rank instead, for options of ringtrain.train behind --"""
    devices: Annotated[int, Argument("K")] = 2
    """devices of a rank over which --memory divides the model"""
    measured: Annotated[str, FILE] = ""
    """measured points, to see predictions beside them"""
    json: bool = False
    """print JSON instead of tables"""
    plot: Annotated[str, FILE] = ""
    """draw images/s over ranks as PNG"""


GROUPS = (points.StepOptions, points.PlaceOptions, points.ReductionOptions, Wanted)
"""of the help"""


def main(given: Given) -> int:
    """Predicts and prints.

    Returns:
        Exit code 0; with reach 1 if no change reaches it.
    """
    wanted = read(Wanted, given.values)
    values = {name: value for name, value in given.values.items() if name in options_of(Case)}
    if wanted.memory:
        from ringtrain.lab.forecast import memory

        if Script.of(given.command) is not None:
            raise ConfigError("--memory: got a script, which builds its model itself, expected options of the trainer")
        if values or wanted.reach or wanted.plot or wanted.measured:
            raise ConfigError("--memory: the model is that of the options behind --: leave others but --ranks out")
        return memory.main(given.command, points.parse_ranks(wanted.ranks)[-1], wanted.devices, wanted.json)
    script = Script.of(given.command)
    if given.command and script is None:
        raise ConfigError(f"{given.command[0]}: options of ringtrain.train are for --memory")
    if wanted.measured:
        if values or wanted.reach or wanted.plot:
            raise ConfigError("--measured: the file's points say everything: leave other options but --json out")
        measured = points.read_points(Path(wanted.measured))
        _show([_beside(measured)], [_as_values(point) for point in measured], wanted.json)
        return 0
    ranks = points.parse_ranks(wanted.ranks)
    with tempfile.TemporaryDirectory(prefix="ringtrain-forecast-") as folder:
        if script is not None:
            values.setdefault("profile", str(Path(folder, "profile.json")))
            write_profile(script, Path(values["profile"]))
        case = Case.of(values)
        step = case.read_profile(Path())
    cluster = case.cluster(step)
    if wanted.reach:
        ways = reach(step, cluster, case.setting(ranks[-1]), wanted.reach)
        title = f"{wanted.reach:.0%} at {ranks[-1]} ranks: what reaches it, all else being as it is"
        _show([_ways(ways, title)], [dataclasses.asdict(way) for way in ways], wanted.json)
        return 0 if any(way.needed for way in ways) else 1
    lines: dict[str, list[Prediction]] = {}
    for algorithm in _algorithms(case):
        settings = [replace(case.setting(num), algorithm=algorithm) for num in ranks]
        lines[algorithm] = [predict(step, cluster, setting) for setting in settings]
    if case.servers:
        name = counted(case.servers, "parameter server")
        lines[name] = [parameter_servers(step, cluster, case.setting(num), case.servers) for num in ranks]
    plain = []
    for kind, predictions in lines.items():
        plain += [{"kind": kind, **dataclasses.asdict(prediction)} for prediction in predictions]
    title = (
        f"{step.name}, batch {step.batch_size} per rank, {step.total_bytes / 1e6:.1f} MB of gradients;"
        f" {case.ranks_per_host} per host, {case.link}, {case.transport}"
    )
    _show([_speeds(lines, title), _parts(lines[case.algorithm], case.algorithm)], plain, wanted.json)
    if wanted.plot:
        draw(Path(wanted.plot), lines, title)
    return 0


def _algorithms(case: Case) -> list[Any]:
    """Algorithms that the table compares, the case's own among them."""
    names: list[Any] = ["ring", "hierarchical"]
    if case.transport == "mpi":
        names.append("halving")
    return list(dict.fromkeys([*names, case.algorithm]))


def write_profile(script: Script, path: Path) -> None:
    """Measures the step of a script on one process of this machine, and writes its profile."""
    from ringtrain.cluster.launch_options import LaunchOptions
    from ringtrain.lab import measured, ranks

    start = ranks.Start("forecast", LaunchOptions(command=script.command), ("-H", "localhost:1"))
    results = measured.measure(start, script, num_ranks=1, profile=True)
    path.write_text(json.dumps(results["profile"]) + "\n", encoding="utf-8")


def draw(path: Path, lines: Mapping[str, Sequence[Prediction]], title: str) -> None:
    """Draws images/s over the number of ranks, with an ideal line without communication."""
    axes, write_png = plots.canvas(title, "ranks", "images/s")
    first = next(iter(lines.values()))
    free = [p.images_per_s / p.efficiency for p in first]
    axes.plot([p.num_ranks for p in first], free, color="0.6", linestyle="--", label="without communication")
    for kind, predictions in lines.items():
        num_ranks = [p.num_ranks for p in predictions]
        axes.plot(num_ranks, [p.images_per_s for p in predictions], marker=".", label=kind)
    ticks = [p.num_ranks for p in first]
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.minorticks_off()
    write_png(path)


def _show(tables: Sequence[Table], values: object, as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, indent=1))
        return
    for table in tables:
        table.show()


def _speeds(lines: Mapping[str, Sequence[Prediction]], title: str) -> Table:
    head = ["ranks", "hosts", *(f"{kind}: images/s" for kind in lines)]
    rows = []
    for predictions in zip(*lines.values(), strict=True):
        first = predictions[0]
        speeds = [f"{p.images_per_s:,.0f} ({p.efficiency:.1%})" for p in predictions]
        rows.append([str(first.num_ranks), str(first.num_hosts), *speeds])
    return Table(head, rows, title)


def _parts(predictions: Sequence[Prediction], kind: str) -> Table:
    """Breaks down the time between two reductions."""
    head = [
        "ranks",
        "steps/s",
        "computing",
        "slowest rank",
        "communication not hidden",
        "update",
        "communication in all",
    ]
    rows = []
    for p in predictions:
        times = (p.compute_s, p.waiting_s, p.exposed_s, p.update_s, p.communication_s)
        cells = (f"{1e3 * value:,.1f}" for value in times)
        rows.append(
            [str(p.num_ranks), f"{p.steps_per_s:,.2f}", *cells, str(p.num_allreduces), f"{1e3 * p.sent_gb:,.2f}"]
        )
    return Table([*head, "allreduces", "MB sent"], rows, f"time between two reductions, {kind}, ms")


def _ways(ways: Sequence[Way], title: str) -> Table:
    rows = [[way.change, way.needed or "does not reach it", f"{way.efficiency:.1%}"] for way in ways]
    return Table(["change", "needed", "efficiency"], rows, title)


def _beside(points: Sequence[Point]) -> Table:
    rows = []
    for point in points:
        speeds = (_speed_text(point.measured), _speed_text(point.prediction.images_per_s))
        error = "fitted" if point.fitted else f"{point.error:+.1%}"
        rows.append([point.setup, str(point.num_ranks), *speeds, f"{point.prediction.efficiency:.1%}", error])
    head = ["set-up", "ranks", "measured", "predicted", "efficiency", "error"]
    return Table(head, rows, "predicted beside measured")


def _speed_text(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}"


def _as_values(point: Point) -> dict[str, object]:
    found = {"error": point.error, "fitted": point.fitted, "prediction": dataclasses.asdict(point.prediction)}
    return {"setup": point.setup, "ranks": point.num_ranks, "measured": point.measured, **found}
