"""Where the time of runs went, and what it has cost: a section of the report, and text for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringtrain.lab.report.html import Bars, Part
from ringtrain.lab.report.run_folder import Run
from ringtrain.lab.tables import Table
from ringtrain.monitor import goodput
from ringtrain.monitor.goodput import PARTS, Goodput
from ringtrain.monitor.journal import duration

MEANING = (
    "Goodput is the share of steps that count, which includes the exchange of gradients. The parts add up to the time"
    " from the first process of the run to the last entry of rank 0's journal. A process that is killed usually loses"
    " its last 10 s, or 1 % of its training."
)
HELP = {
    "ringtrain_run_seconds": "time of a run by part, over all of its starts",
    "ringtrain_run_goodput_ratio": "share of steps that count",
    "ringtrain_run_starts": "starts of a run",
    "ringtrain_run_global_step": "steps that a run has trained",
    "ringtrain_run_is_running": "1 while a run's folder is locked",
}
"""metrics of `prometheus`"""


def parts_of(named: Mapping[str, Run], price: float = 0.0) -> list[Part]:
    """Parts of the section about runs whose journals tell. price: of a host for an hour, in any currency."""
    known: dict[str, Goodput] = {}
    for name, run in named.items():
        kept = goodput.of(run.events)
        if kept and kept.total_s:
            known[name] = kept
    if not known:
        return []
    used = [part for part in PARTS if any(kept.seconds[part] >= 0.05 for kept in known.values())]
    rows = [[PARTS[part], *(_amount(kept, part) for kept in known.values())] for part in used]
    rows.append(["all", *(duration(kept.total_s) for kept in known.values())])
    rows.append(["goodput", *(f"{kept.share:.1%}" for kept in known.values())])
    rows.append(["starts", *(str(len(kept.attempts)) for kept in known.values())])
    rows.append(["hours of hosts", *(f"{kept.host_hours:,.2f}" for kept in known.values())])
    if price:
        rows.append(["cost", *(f"{price * kept.host_hours:,.2f}" for kept in known.values())])
        lost = [f"{price * kept.host_hours * (1 - kept.busy_share):,.2f}" for kept in known.values()]
        rows.append(["of it not in steps that count", *lost])
    if any(kept.best_interval_s for kept in known.values()):
        rows.append(["time between checkpoints that would have cost least", *map(_interval, known.values())])
    bars = [(name, [kept.seconds[part] for part in used]) for name, kept in known.items()]
    return [Bars("time by part, s", [PARTS[part] for part in used], bars), Table(["", *known], rows), MEANING]


def _amount(kept: Goodput, part: str) -> str:
    seconds = kept.seconds[part]
    return f"{duration(seconds)} ({seconds / kept.total_s:.1%})"


def _interval(kept: Goodput) -> str:
    return duration(kept.best_interval_s) if kept.best_interval_s else ""


def prometheus(found: Sequence[Mapping[str, Any]]) -> str:
    """Text of the runs that `ringtrain runs` lists, in Prometheus' exposition format."""
    samples: dict[str, list[str]] = {name: [] for name in HELP}
    for run in found:
        label = f'run="{_escaped(run["run"])}"'
        for part, seconds in run["seconds"].items():
            samples["ringtrain_run_seconds"].append(f'{{{label},part="{part}"}} {seconds:.3f}')
        if run["goodput"] is not None:
            samples["ringtrain_run_goodput_ratio"].append(f"{{{label}}} {run['goodput']:.4f}")
            samples["ringtrain_run_starts"].append(f"{{{label}}} {run['starts']}")
        samples["ringtrain_run_global_step"].append(f"{{{label}}} {run['global_step']}")
        samples["ringtrain_run_is_running"].append(f"{{{label}}} {int(run['state'] == 'running')}")
    lines = []
    for name, values in samples.items():
        if values:
            lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge", *(name + value for value in values)]
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
