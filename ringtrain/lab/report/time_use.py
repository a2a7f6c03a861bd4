"""Where the time of runs went, and what it has cost: a section of the report."""

from __future__ import annotations

from collections.abc import Mapping

from ringtrain.lab.report.charts import Bars
from ringtrain.lab.report.html import Part
from ringtrain.lab.report.run_folder import Run
from ringtrain.lab.tables import Table
from ringtrain.monitor import goodput
from ringtrain.monitor.goodput import PARTS, Goodput
from ringtrain.monitor.journal import duration

MEANING = (
    "Goodput is the share of steps that count, which includes the exchange of gradients. The parts add up to the time"
    " from the launch of the run to the last entry of rank 0's journal. A process that is killed usually loses"
    " its last 10 s, or 1 % of its training."
)


def parts_of(named: Mapping[str, Run], price: float = 0.0) -> list[Part]:
    """Parts of the section about runs whose journals tell. price: of a host for an hour, in any currency."""
    known: dict[str, Goodput] = {}
    for name, run in named.items():
        spent = goodput.of(run.events)
        if spent and spent.total_s:
            known[name] = spent
    if not known:
        return []
    runs = list(known.values())
    used = [part for part in PARTS if any(spent.seconds[part] >= 0.05 for spent in runs)]

    rows = [[PARTS[part], *(_amount(spent, part) for spent in runs)] for part in used]
    rows.append(["all", *(duration(spent.total_s) for spent in runs)])
    rows.append(["goodput", *(f"{spent.share:.1%}" for spent in runs)])
    rows.append(["starts", *(str(len(spent.attempts)) for spent in runs)])
    rows.append(["hours of hosts", *(f"{spent.host_hours:,.2f}" for spent in runs)])
    if price:
        costs = [price * spent.host_hours for spent in runs]
        rows.append(["cost", *(f"{cost:,.2f}" for cost in costs)])
        lost = [cost * (1 - spent.busy_share) for cost, spent in zip(costs, runs, strict=True)]
        rows.append(["of it not in steps that count", *(f"{cost:,.2f}" for cost in lost)])
    if any(spent.best_interval_s for spent in runs):
        rows.append(["time between checkpoints that would have cost least", *map(_interval, runs)])

    bars = []
    for name, spent in known.items():
        bars.append((name, [spent.seconds[part] for part in used]))
    return [Bars("time by part, s", [PARTS[part] for part in used], bars), Table(["", *known], rows), MEANING]


def _amount(spent: Goodput, part: str) -> str:
    seconds = spent.seconds[part]
    return f"{duration(seconds)} ({seconds / spent.total_s:.1%})"


def _interval(spent: Goodput) -> str:
    if spent.best_interval_s:
        return duration(spent.best_interval_s)
    return ""
