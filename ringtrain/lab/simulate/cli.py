"""Output of ringtrain simulate: tables, a recommendation, JSON, a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ringtrain.cluster.launch import find_hosts
from ringtrain.cluster.launch_options import GROUPS, HostOptions, LaunchOptions, add_options
from ringtrain.errors import LaunchError
from ringtrain.lab import plots
from ringtrain.lab.options import seconds_of
from ringtrain.lab.simulate import cases
from ringtrain.lab.simulate.cases import MANY, NONE, Comparison, Plan, Result, Variant, plan_of
from ringtrain.lab.simulate.costs import CostOptions, costs_of
from ringtrain.lab.simulate.training import PARTS
from ringtrain.lab.tables import Table, counted
from ringtrain.monitor.journal import duration
from ringtrain.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    FILE,
    Argument,
    Given,
    N,
    Parser,
    Rule,
    before_program,
    options_of,
    read,
)

TIME = Argument("TIME")
HOURS = Rule("a number of hours above 0", lambda value: 0 < value < math.inf, {"exclusiveMinimum": 0})
NEVER = "never"
"""value of --repair"""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Job and failures."""

    hours: Annotated[float, Argument("H"), HOURS]
    """hours of steps that count, with all ranks"""
    mtbf: Annotated[str, TIME]
    """mean time between two failures of one host, e.g. 30d"""
    repair: Annotated[str, TIME] = "1h"
    """time until a failed host answers again; 0: at once; never"""
    save_every: Annotated[str, TIME] = ""
    """time between two checkpoints, to compare it with others (that of --from-run)"""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Simulation and output."""

    jobs: Annotated[int, N, AT_LEAST_1] = 200
    """number of simulated jobs"""
    seed: Annotated[int, N, AT_LEAST_0] = 0
    """of the failures; the same seed gives the same output"""
    price: Annotated[float, Argument("X"), AT_LEAST_0] = 0.0
    """of a host for an hour: adds what the job costs, in the same currency"""
    json: bool = False
    """print JSON instead of tables"""
    plot: Annotated[str, FILE] = ""
    """draw goodput over the time between two checkpoints as PNG"""


OWN = (JobOptions, CostOptions, OutputOptions)
"""groups of the help, besides those of hosts"""


def main(given: Given) -> int:
    """Simulates and prints; returns exit code 0."""
    job, output = read(JobOptions, given.values), read(OutputOptions, given.values)
    costs, interval_s = costs_of(read(CostOptions, given.values))
    if job.save_every:
        interval_s = seconds_of(job.save_every, "--save-every")
    options = launch_options(given)
    plan = plan_of(
        find_hosts(options)[0],
        options,
        costs=costs,
        work_s=3600 * job.hours,
        mtbf_s=seconds_of(job.mtbf, "--mtbf"),
        repair_s=repair_s(job.repair),
        num_jobs=output.jobs,
        seed=output.seed,
    )
    compared = cases.compare(plan, interval_s)
    if output.plot:
        draw(Path(output.plot), plan, compared)
    if output.json:
        print(json.dumps(to_json(plan, compared, output.price), indent=1))
        return 0
    for table in tables(plan, compared, output.price):
        table.show()
    print(recommendation(plan, compared))
    return 0


def repair_s(text: str) -> float:
    """Seconds of --repair; inf: never."""
    if text == NEVER:
        return math.inf
    if text in ("0", "0s"):
        return 0.0
    return seconds_of(text, "--repair")


def launch_options(given: Given) -> LaunchOptions:
    """Options of the launch after `--`, with the hosts that stand before it. A program may follow them."""
    known = options_of(*GROUPS)
    words, program = before_program(given.command, known)
    parser = Parser(prog="ringtrain launch")
    add_options(parser)
    values = vars(parser.parse_args(words))
    hosts = {name: value for name, value in given.values.items() if name in options_of(HostOptions)}
    values = {"max_restarts": MANY, **values, **hosts}
    options = LaunchOptions.of(replace(given, values=values, command=tuple(program) or ("python", "own.py"))).checked()
    if options.started_by.submits or options.launcher == "spark":
        raise LaunchError(
            f"got --launcher {options.launcher}, whose jobs ringtrain does not restart as simulated: leave it out"
        )
    if options.ps:
        raise LaunchError("got --ps, whose ranks are not all alike: leave it out")
    if options.host_discovery:
        raise LaunchError("got --host-discovery: name the hosts instead, which are fixed in a simulation")
    return options


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(plan: Plan, compared: Comparison, price: float) -> list[Table]:
    """Two tables: of spare hosts and options of launch, and of checkpoint intervals."""
    title = (
        f"{counted(len(plan.hosts), 'host')} with {counted(plan.num_ranks, 'rank')}, {plan.work_s / 3600:g} h of steps;"
        f" a host fails every {time_text(plan.mtbf_s)}, the job every {time_text(plan.job_mtbf_s)}\n"
        f"median of {counted(plan.num_jobs, 'simulated job')} (10 % to 90 %), {restarts_text(plan)}, save every"
        f" {time_text(compared.given.variant.interval_s)}"
    )
    head = ["spare hosts", "options", *head_of(compared.by_hosts, price)]
    rows = []
    for result in compared.by_hosts:
        variant = result.variant
        rows.append([str(variant.num_spares), variant.words, *cells(result, compared.by_hosts, price)])
    by_hosts = Table(head, rows, title)

    head = ["save every", *head_of(compared.by_interval, price)]
    rows = []
    for result in compared.by_interval:
        label = time_text(result.variant.interval_s)
        if result is compared.best:
            label += " (Young)"
        elif result.variant.interval_s == compared.interval_s:
            label += " (as given)"
        rows.append([label, *cells(result, compared.by_interval, price)])
    return [by_hosts, Table(head, rows, f"the same with {set_up_text(compared.best.variant)}")]


def head_of(results: Sequence[Result], price: float) -> list[str]:
    """Heads of the columns of `cells`."""
    head = ["goodput, %", "clock, h", "repeated, h", "restarts"]
    if price:
        head.append("cost")
    if any(len(result.complete) < len(result.outcomes) for result in results):
        head.append("complete")
    return head


def cells(result: Result, results: Sequence[Result], price: float) -> list[str]:
    """Numbers of one result; `results` are those of its table."""
    found = [
        result.goodput.times(100).text(".1f"),
        result.hours.text(".0f"),
        result.repeated_hours.text(".1f"),
        result.restarts.text(".0f"),
    ]
    if price:
        found.append(f"{price * result.host_hours:,.0f}")
    if "complete" in head_of(results, price):
        found.append(f"{len(result.complete)} of {len(result.outcomes)}")
    return found


def restarts_text(plan: Plan) -> str:
    """Options of launch about restarts that hold for all results."""
    if plan.options.max_restarts == MANY:
        text = "as many restarts as it takes"
    else:
        text = f"--max-restarts {plan.options.max_restarts}"
    if plan.options.min_np > 1:
        text += f" --min-np {plan.options.min_np}"
    return text


def set_up_text(variant: Variant) -> str:
    """Spare hosts and options of launch, e.g. "2 spare hosts and --keep-hosts"."""
    spares = counted(variant.num_spares, "spare host")
    if not variant.num_spares:
        spares = "no spare hosts"
    if variant.words == NONE:
        return spares
    return f"{spares} and {variant.words}"


def time_text(seconds: float) -> str:
    """Time for readers, e.g. "30 d", "12 min" or "7 h 12 min"."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:g} d"
    return duration(seconds).removesuffix(" 0 s").removesuffix(" 0 min")


# ---- recommendation --------------------------------------------------------------------------------------------------


def recommendation(plan: Plan, compared: Comparison) -> str:
    """One sentence: how often to save, with which hosts and options of launch."""
    interval, best, given = compared.best_interval, compared.best, compared.given
    num_early = plan.num_jobs - len(best.complete)
    reason = next((outcome.reason for outcome in best.outcomes if outcome.reason), "")
    if num_early > plan.num_jobs / 2:
        return (
            f"{num_early} of {plan.num_jobs} jobs end before their last step even with {set_up_text(best.variant)},"
            f" e.g. as {reason}: raise --max-restarts, name more spare hosts, or lower --min-np."
        )
    others = [result for result in compared.by_interval if result is not interval]
    worst = min(others, key=lambda result: result.goodput.median)
    text = (
        f"Save every {time_text(interval.variant.interval_s)}, with {set_up_text(best.variant)}:"
        f" goodput {percent(interval)}, in {interval.hours.median:.0f} h (every"
        f" {time_text(worst.variant.interval_s)}: {percent(worst)}"
    )
    if best is not given:
        text += f"; with {set_up_text(given.variant)}: {percent(given)}"
    for other in (compared.fastest, compared.best_otherwise):
        if other is not best and other is not given and other.is_faster(best):
            text += f"; with {set_up_text(other.variant)}: {percent(other)}, {other.hours.median:.0f} h"
    text += ")."
    if plan.options.max_restarts == MANY and best.most_restarts:
        text += f" --max-restarts {best.most_restarts} was enough for each of {plan.num_jobs} jobs."
    if num_early:
        text += f" {num_early} of {plan.num_jobs} jobs ended before their last step, e.g. as {reason}."
    return text


def percent(result: Result) -> str:
    """Goodput, and how many jobs come to their end, unless all do."""
    text = f"{result.goodput.median:.1%}"
    if len(result.complete) < len(result.outcomes):
        text += f" ({len(result.complete)} of {len(result.outcomes)} jobs complete)"
    return text


# ---- JSON and plot ---------------------------------------------------------------------------------------------------


def to_json(plan: Plan, compared: Comparison, price: float) -> dict[str, Any]:
    """All results as JSON: times in seconds unless the key says otherwise, goodput from 0 to 1."""
    values: dict[str, Any] = {
        "hosts": len(plan.hosts),
        "ranks": plan.num_ranks,
        "hours": plan.work_s / 3600,
        "mtbf_s": plan.mtbf_s,
        "repair_s": plan.repair_s if math.isfinite(plan.repair_s) else None,
        "seed": plan.seed,
        "jobs": plan.num_jobs,
        "costs": asdict(plan.costs),
        "by_interval": [result_to_json(result, price) for result in compared.by_interval],
        "by_hosts": [result_to_json(result, price) for result in compared.by_hosts],
        "recommendation": recommendation(plan, compared),
    }
    return values


def result_to_json(result: Result, price: float) -> dict[str, Any]:
    num_jobs = len(result.outcomes)
    parts_s = {}
    for part in PARTS:
        parts_s[part] = sum(outcome.seconds[part] for outcome in result.outcomes) / num_jobs
    values = {
        **asdict(result.variant),
        "complete": len(result.complete),
        "goodput": asdict(result.goodput),
        "hours": asdict(result.hours),
        "restarts": asdict(result.restarts),
        "most_restarts": result.most_restarts,
        "repeated_hours": asdict(result.repeated_hours),
        "host_hours": result.host_hours,
        "mean_s": parts_s,
    }
    if price:
        values["cost"] = price * result.host_hours
    return values


def draw(path: Path, plan: Plan, compared: Comparison) -> None:
    """Draws goodput over the time between two checkpoints, of the given and of the recommended set-up."""
    title = f"{counted(len(plan.hosts), 'host')}, {plan.work_s / 3600:g} h, a failure every {duration(plan.job_mtbf_s)}"
    axes, write_png = plots.canvas(title, "minutes between checkpoints", "goodput, %", log=False)
    axes.set_xscale("log")
    set_ups = {compared.given.variant, compared.best.variant}
    for variant in sorted(set_ups, key=lambda variant: variant != compared.given.variant):
        minutes, medians, lows, highs = [], [], [], []
        for power in range(-3, 4):
            interval_s = plan.best_interval_s * 2.0**power
            spread = cases.run(plan, replace(variant, interval_s=interval_s)).goodput.times(100)
            minutes.append(interval_s / 60)
            medians.append(spread.median)
            lows.append(spread.p10)
            highs.append(spread.p90)
        axes.plot(minutes, medians, marker=".", label=set_up_text(variant))
        axes.fill_between(minutes, lows, highs, alpha=0.2)
    axes.axvline(plan.best_interval_s / 60, color="0.6", linestyle="--", label="Young's interval")
    axes.minorticks_off()
    write_png(path)
