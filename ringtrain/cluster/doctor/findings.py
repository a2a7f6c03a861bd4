"""What doctor says: cells of a table, and findings with the lines that mend them. Plain values, pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ringtrain.cluster.hosts import Host

Level = Literal["unknown", "well", "warns", "hurts"]
LEVELS: tuple[Level, ...] = ("unknown", "well", "warns", "hurts")


@dataclass(frozen=True)
class Probe:
    """What was learned of one host."""

    host: Host
    facts: Mapping[str, Any] | None = None
    """as probe.facts says them; None: it did not answer"""
    error: str = ""
    """why it did not answer, in ssh's words"""
    connect_s: float | None = None
    """until ssh had a shell; None: this machine, no ssh"""
    clock_s: tuple[float, float] | None = None
    """how far its clock is before this machine's, and how uncertain that is"""
    finds: bool | None = None
    """whether it sees the file that another host left in the run directory; None: not tried"""

    @property
    def remote(self) -> bool:
        """Whether ssh is needed."""
        return self.connect_s is not None or self.facts is None


@dataclass(frozen=True)
class Scene:
    """All that a check may look at."""

    probes: tuple[Probe, ...]
    here: Mapping[str, Any]
    """facts of the machine that doctor runs on, which may be none of the hosts"""
    python: str
    """the program that was looked for on every host"""
    ssh_port: int = 0
    """0: as ssh has it configured"""
    subnet: str = ""
    """CIDR that every host must be in; empty: one is looked for"""

    @property
    def answers(self) -> list[Mapping[str, Any]]:
        """The facts of all hosts that have some."""
        return [probe.facts for probe in self.probes if probe.facts is not None]


@dataclass(frozen=True)
class Cell:
    """One host under one check."""

    value: str
    """short, for the table"""
    level: Level = "well"
    text: str = ""
    """the finding: what was received, what was expected; empty: none"""
    mend: str = ""
    """a line that mends it; {host} stands for the host's name"""
    where: Literal["there", "here", "file"] = "there"
    """a command for the host itself, a command for the machine doctor runs on, or a line for a file"""


@dataclass(frozen=True)
class Finding:
    """What is wrong, with one or more hosts."""

    check: str
    level: Level
    hosts: tuple[str, ...]
    text: str
    mend: str
    """lines that can be pasted where doctor ran"""


def gather(table: Mapping[str, Sequence[Cell]], probes: Sequence[Probe]) -> list[Finding]:
    """Collects what there is to say.

    Args:
        table: by the check's name a cell per host.

    Returns:
        The worst first; what several hosts have in common is said once.
    """
    groups: dict[tuple[str, Cell], list[Probe]] = {}
    for check, cells in table.items():
        for cell, probe in zip(cells, probes, strict=True):
            if cell.text:
                common = Cell("", cell.level, cell.text, cell.mend, cell.where)
                groups.setdefault((check, common), []).append(probe)
    found = [
        Finding(check, cell.level, tuple(probe.host.name for probe in group), cell.text, _lines(cell, group))
        for (check, cell), group in groups.items()
    ]
    return sorted(found, key=lambda finding: -LEVELS.index(finding.level))


def _lines(cell: Cell, group: Sequence[Probe]) -> str:
    """A mend as it can be pasted where doctor ran: over ssh for a host that is elsewhere."""
    if cell.where == "file":
        return "\n".join(dict.fromkeys(cell.mend.replace("{host}", probe.host.name) for probe in group))
    if not cell.mend or (cell.where == "here" and "{host}" not in cell.mend):
        return cell.mend
    elsewhere = [shlex.quote(probe.host.name) for probe in group if probe.remote or cell.where == "here"]
    lines = [cell.mend] if len(elsewhere) < len(group) else []
    if elsewhere:
        host = elsewhere[0] if len(elsewhere) == 1 else '"$host"'
        line = f"ssh -t {host} {shlex.quote(cell.mend)}" if cell.where == "there" else cell.mend.replace("{host}", host)
        lines.append(line if len(elsewhere) == 1 else f"for host in {' '.join(elsewhere)}; do {line}; done")
    return "\n".join(lines)
