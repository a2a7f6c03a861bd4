"""Data classes of `ringtrain doctor`: probe results, checks, table cells, and findings with fix commands."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ringtrain.cluster.hosts import Host

Level = Literal["unknown", "ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("unknown", "ok", "warning", "error")
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Probe:
    host: Host
    facts: Facts | None = None  # from probe.facts; None: the host did not answer
    error: str = ""  # why the host did not answer, as ssh reports it
    remote: bool = True  # reached over ssh; False: this machine


@dataclass(frozen=True)
class Scene:
    probes: tuple[Probe, ...]
    here: Facts  # facts of the machine that doctor runs on, which need not be one of the hosts
    python: str  # path of the Python that ranks are started with
    ssh_port: int = 0  # 0: from ssh's configuration
    subnet: str = ""  # CIDR that every host must be in; "": a shared one is searched

    @property
    def answers(self) -> list[Facts]:
        return [probe.facts for probe in self.probes if probe.facts is not None]


@dataclass(frozen=True)
class Cell:
    value: str
    level: Level = "ok"
    text: str = ""  # the finding, with the received and the expected value; "": no finding
    fix: str = ""  # fix command; {host} stands for the host name
    where: Literal["there", "here", "file"] = "there"
    """where the fix applies: a command on the host, a command on the machine doctor runs on, or a hostfile line"""


UNKNOWN = Cell("", "unknown")


@dataclass(frozen=True)
class Check:
    """Column of the table: the facts that each host collects, and the rule that turns them into a cell with its fix."""

    rule: Callable[[Probe, Facts, Scene], Cell]
    facts: tuple[Callable[[Mapping[str, Any]], Any], ...]
    """functions that run on the host, named as their fact. Their source is sent: they use the imports and functions of
    probe.py and the standard library of Python 3.8. They get the request; None: the fact cannot be read"""
    may_lack: bool = False  # whether the rule judges a host that cannot read a fact; otherwise its cell is unknown


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    hosts: tuple[str, ...]
    text: str
    fix: str  # fix commands, to paste on the machine doctor ran on


def gather(table: Mapping[str, Sequence[Cell]], probes: Sequence[Probe]) -> list[Finding]:
    """Collects the findings of a table, worst first; hosts with the same finding share one entry."""
    groups: dict[tuple[str, Cell], list[Probe]] = {}
    for check, cells in table.items():
        for cell, probe in zip(cells, probes, strict=True):
            if cell.text:
                common = Cell("", cell.level, cell.text, cell.fix, cell.where)
                groups.setdefault((check, common), []).append(probe)
    findings = []
    for (check, cell), group in groups.items():
        hosts = tuple(probe.host.name for probe in group)
        findings.append(Finding(check, cell.level, hosts, cell.text, _lines(cell, group)))
    return sorted(findings, key=lambda finding: -LEVELS.index(finding.level))


def _lines(cell: Cell, group: Sequence[Probe]) -> str:
    """Fix commands to paste on the machine doctor ran on; remote hosts are reached over ssh."""
    lines = []
    for probe in group:
        name = shlex.quote(probe.host.name)
        if cell.fix and cell.where == "there" and probe.remote:
            lines.append(f"ssh -t {name} {shlex.quote(cell.fix)}")
        else:
            lines.append(cell.fix.replace("{host}", name))
    return "\n".join(dict.fromkeys(lines))


def most(values: Iterable[Any]) -> Any:
    """Most frequent value other than None, on a tie the first; None if there is none."""
    counted = Counter(value for value in values if value is not None).most_common(1)
    return counted[0][0] if counted else None
