"""Preflight of `ringtrain doctor`: probes every host, and prints what each check found, or JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ringtrain.cluster import host_agent
from ringtrain.cluster.doctor import machine, network, software
from ringtrain.cluster.doctor.findings import LEVELS, UNKNOWN, Cell, Check, Finding, Level, Probe, Scene, gather
from ringtrain.cluster.doctor.visit import VisitOptions, visit
from ringtrain.cluster.hosts import Host, count
from ringtrain.cluster.job import check_subnet
from ringtrain.errors import LaunchError

CHECKS = {**software.CHECKS, **machine.CHECKS, **network.CHECKS}
"""a new one is a row with its fact and rule in one of these modules"""
MARKS: dict[Level, str] = {"unknown": "", "ok": "", "warning": "! ", "error": "!! "}
EXIT_CODES: dict[Level, int] = {"unknown": 0, "ok": 0, "warning": 1, "error": 2}
MOST_HOSTS = 6  # listed in a line
MAX_CONNECTIONS = 32


@dataclass(frozen=True)
class Report:
    scene: Scene
    table: Mapping[str, Sequence[Cell]]  # by check name, one cell per host
    findings: tuple[Finding, ...]  # worst first
    subnet: str  # for --subnet; "": the hosts share none
    took_s: float

    @property
    def level(self) -> Level:
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")


def main(hosts: Sequence[Host], options: VisitOptions) -> int:
    """Examines hosts, prints the report, and returns 0: ok, 1: warnings, or 2: errors."""
    if sys.stderr.isatty() and len(hosts) > 1:
        print(f"probing {len(hosts)} hosts, each has {options.timeout_s:g} s to answer ...", file=sys.stderr)
    return show(examine(hosts, options), options.as_json)


def examine(hosts: Sequence[Host], options: VisitOptions) -> Report:
    """Probes all hosts concurrently; errors of hosts become findings. Raises LaunchError if an option is invalid."""
    check(options)
    start_s = time.monotonic()
    wanted = {
        "folder": os.getcwd(),
        "path": os.environ.get("PATH", ""),
        "python_path": os.environ.get("PYTHONPATH", ""),
        "run_directory": options.run_directory,
        "names": [host.name for host in hosts],
        **request(),
    }
    # This machine as well, the reference for all hosts, of which it may be none.
    local_names = host_agent.here(host.name for host in hosts)
    everywhere = list(hosts)
    if not local_names:
        everywhere.append(Host("localhost"))
    with contextlib.ExitStack() as stack:
        wanted["marker"] = ""
        with contextlib.suppress(OSError):
            folder = machine.disk(wanted)["folder"]
            marker = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".ringtrain-doctor-", dir=folder))
            wanted["marker"] = marker.name
        pool = stack.enter_context(ThreadPoolExecutor(min(MAX_CONNECTIONS, len(everywhere))))
        visited = tuple(pool.map(lambda host: visit(host, wanted, options), everywhere))
    probes = visited[: len(hosts)]
    local = next(probe for probe in visited if probe.host.name in (*local_names, "localhost"))
    here = local.facts or next((probe.facts for probe in probes if probe.facts), {})
    scene = Scene(probes, here, options.python, options.ssh_port, options.subnet)
    table = judge(scene)
    findings = tuple(gather(table, probes))
    subnet = options.subnet or next(map(str, network.shared_subnets(scene)), "")
    return Report(scene, table, findings, subnet, time.monotonic() - start_s)


def check(options: VisitOptions) -> None:
    if not 0 < options.timeout_s < threading.TIMEOUT_MAX:
        raise LaunchError(f"got --timeout {options.timeout_s:g}, expected a number of seconds above 0")
    check_subnet(options.subnet)


def judge(scene: Scene) -> dict[str, list[Cell]]:
    """Runs every check on every host; returns, by check name, one cell per host in the order of `scene.probes`."""
    table = {"ssh": [network.ssh(probe, scene) for probe in scene.probes]}
    for name, check in CHECKS.items():
        table[name] = [_cell(check, probe, scene) for probe in scene.probes]
    return table


def _cell(check: Check, probe: Probe, scene: Scene) -> Cell:
    facts = probe.facts
    if facts is None or (not check.may_lack and any(facts.get(fact.__name__) is None for fact in check.facts)):
        return UNKNOWN
    return check.rule(probe, facts, scene)


def request() -> dict[str, Any]:
    """Part of the request to probe.facts that names the facts and carries the source of the functions behind them."""
    functions = {}
    for check in CHECKS.values():
        for fact in check.facts:
            functions[fact.__name__] = fact
    return {"facts": [*functions], "source": "\n".join(map(inspect.getsource, functions.values()))}


# ---- the report ----------------------------------------------------------------------------------------------------


def show(report: Report, as_json: bool = False) -> int:
    """Prints a report and returns the exit code: 0 ok, 1 warnings, 2 errors."""
    if as_json:
        print(json.dumps(as_plain_values(report)))
    else:
        for line in [*_values(report), "", *_findings(report)]:
            # Output of a host must not move the cursor.
            print("".join(letter if letter.isprintable() else "?" for letter in line))
    return EXIT_CODES[report.level]


def _values(report: Report) -> Iterator[str]:
    """A line per check: each value, with its hosts unless all have it."""
    width = max(map(len, report.table))
    for name, cells in report.table.items():
        hosts_of: dict[str, list[str]] = {}
        for cell, probe in zip(cells, report.scene.probes, strict=True):
            hosts_of.setdefault(MARKS[cell.level] + (cell.value or "-"), []).append(probe.host.name)
        values = [*hosts_of]
        if len(values) > 1:
            values = [f"{value} ({_listed(hosts)})" for value, hosts in hosts_of.items()]
        yield f"{name:{width}}  {', '.join(values)}"


def as_plain_values(report: Report) -> dict[str, object]:
    """Converts a report to JSON types."""
    hosts = []
    for number, probe in enumerate(report.scene.probes):
        cells = {name: cells[number] for name, cells in report.table.items()}
        host = {name: getattr(probe, name) for name in ("error", "remote", "facts")}
        levels = {name: {"value": cell.value, "level": cell.level} for name, cell in cells.items()}
        hosts.append({"name": probe.host.name, "slots": probe.host.slots, **host, "checks": levels})
    return {
        "level": report.level,
        "hosts": hosts,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "subnet": report.subnet,
        "took_s": round(report.took_s, 3),
    }


def _findings(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield f"{MARKS[finding.level]}{_listed(finding.hosts)}: {finding.check}: {finding.text}"
        yield from (f"       {line}" for line in finding.fix.splitlines())
    if report.findings:
        yield ""
    if report.subnet and len(report.scene.answers) > 1:
        yield f"all hosts are in {report.subnet}: ringtrain launch --subnet {report.subnet}"
    levels = [finding.level for finding in report.findings]
    counts = [count(levels.count(level), level) for level in LEVELS[:1:-1]]
    summary = ", ".join(text for text in counts if not text.startswith("0 ")) or "all ok"
    yield f"{count(len(report.scene.probes), 'host')}: {summary} ({report.took_s:.1f} s)"


def _listed(hosts: Sequence[str]) -> str:
    listed = ", ".join(hosts[:MOST_HOSTS])
    if len(hosts) > MOST_HOSTS:
        listed += f" and {len(hosts) - MOST_HOSTS} more"
    return listed
