"""Preflight of `ringtrain doctor`: probes every host, and reports problems before a job starts."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringtrain.cluster import host_agent
from ringtrain.cluster.doctor import machine, network, software
from ringtrain.cluster.doctor.findings import UNKNOWN, Cell, Check, Probe, Scene, gather
from ringtrain.cluster.doctor.report import Report, plain_or_terminal, show
from ringtrain.cluster.doctor.session import Marker, Options, visit
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import check_subnet
from ringtrain.errors import LaunchError

CHECKS = {**software.CHECKS, **machine.CHECKS, **network.CHECKS}
"""a new one is a row with its fact and rule in one of these modules"""


def main(hosts: Sequence[Host], options: Options) -> int:
    """Examines hosts, prints the report, and returns 0: ok, 1: warnings, or 2: errors."""
    if sys.stderr.isatty() and len(hosts) > 1:
        print(f"probing {len(hosts)} hosts, each has {options.timeout_s:g} s to answer ...", file=sys.stderr)
    return show(examine(hosts, options), plain_or_terminal(), options.as_json)


def examine(hosts: Sequence[Host], options: Options) -> Report:
    """Probes all hosts concurrently; errors of hosts become findings.

    Raises LaunchError if an option is invalid.
    """
    check(options)
    start_s = time.monotonic()
    names: list[str] = []
    if len(hosts) > 1:
        names = [host.name for host in hosts]
    wanted = {
        "do": "facts",
        "folder": os.getcwd(),
        "path": os.environ.get("PATH", ""),
        "python_path": os.environ.get("PYTHONPATH", ""),
        "run_directory": options.run_directory,
        "code": os.path.abspath(options.code),
        "script": options.script,
        "names": names,
        **request(),
    }
    local_names = host_agent.here(host.name for host in hosts)
    marker = Marker(len(hosts))
    with ThreadPoolExecutor(min(options.num_connections, len(hosts) + 1)) as pool:
        apart = []
        if not local_names:  # this machine is none of the hosts
            apart = [pool.submit(visit, Host("localhost"), wanted, options, Marker(0))]
        probes = tuple(pool.map(lambda host: visit(host, wanted, options, marker), hosts))
    local_probes = [probe for probe in probes if probe.host.name in local_names]
    local_probes += [visited.result() for visited in apart]
    local = local_probes[0]
    # The reference for all hosts. If this machine does not answer in time, the first host that does.
    here = local.facts or next((probe.facts for probe in probes if probe.facts), {})
    scene = Scene(probes, here, options.python, options.ssh_port, options.subnet)
    table = judge(scene)
    findings = tuple(gather(table, probes))
    subnet = options.subnet or next(map(str, network.shared_subnets(scene)), "")
    return Report(scene, table, findings, subnet, time.monotonic() - start_s)


def check(options: Options) -> None:
    if not 0 < options.timeout_s < threading.TIMEOUT_MAX:
        raise LaunchError(f"got --timeout {options.timeout_s:g}, expected a number of seconds above 0")
    if not os.path.isdir(options.code):
        raise LaunchError(f"got --code {options.code!r}, expected the directory of your code")
    check_subnet(options.subnet)


def judge(scene: Scene) -> dict[str, list[Cell]]:
    """Runs every check on every host; returns, by check name, one cell per host in the order of `scene.probes`."""
    table = {"ssh": [network.ssh(probe, scene) for probe in scene.probes]}
    for name, check in CHECKS.items():
        if name != "job" or any(answer.get("job") for answer in scene.answers):
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
