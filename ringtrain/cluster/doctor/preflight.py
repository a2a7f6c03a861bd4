"""Preflight of `ringtrain doctor`: probes every host, and reports problems before a job starts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ringtrain.cluster import host_agent
from ringtrain.cluster.doctor import checks, network
from ringtrain.cluster.doctor.findings import Scene, gather
from ringtrain.cluster.doctor.report import Report, plain_or_terminal, show
from ringtrain.cluster.doctor.session import Marker, Options, visit
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import check_subnet
from ringtrain.errors import LaunchError


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
    request = {
        "do": "facts",
        "folder": os.getcwd(),
        "path": os.environ.get("PATH", ""),
        "python_path": os.environ.get("PYTHONPATH", ""),
        "run_directory": options.run_directory,
        "code": os.path.abspath(options.code),
        "script": options.script,
        "names": names,
        **checks.request(),
    }
    local_names = host_agent.here(host.name for host in hosts)
    marker = Marker(len(hosts))
    with ThreadPoolExecutor(min(options.num_connections, len(hosts) + 1)) as pool:
        apart = []
        if not local_names:  # this machine is none of the hosts
            apart = [pool.submit(visit, Host("localhost"), request, options, Marker(0))]
        probes = tuple(pool.map(lambda host: visit(host, request, options, marker), hosts))
    local_probes = [probe for probe in probes if probe.host.name in local_names]
    local_probes += [visited.result() for visited in apart]
    local = local_probes[0]
    # The reference for all hosts. If this machine does not answer in time, the first host that does.
    here = local.facts or next((probe.facts for probe in probes if probe.facts), {})
    scene = Scene(probes, here, options.python, options.ssh_port, options.subnet)
    table = checks.judge(scene)
    findings = tuple(gather(table, probes))
    subnet = options.subnet or next(map(str, network.shared_subnets(scene)), "")
    return Report(scene, table, findings, subnet, time.monotonic() - start_s)


def check(options: Options) -> None:
    if not 0 < options.timeout_s < threading.TIMEOUT_MAX:
        raise LaunchError(f"got --timeout {options.timeout_s:g}, expected a number of seconds above 0")
    if not os.path.isdir(options.code):
        raise LaunchError(f"got --code {options.code!r}, expected the directory of your code")
    check_subnet(options.subnet)
