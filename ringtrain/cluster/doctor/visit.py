"""Probe of one host: probe.py, over ssh or local."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.cluster import host_agent
from ringtrain.cluster.doctor.findings import Probe
from ringtrain.cluster.host_agent import is_here
from ringtrain.cluster.hosts import Host
from ringtrain.config.options import Argument
from ringtrain.protocol.json_text import parse_json

PROGRAM = Path(__file__).with_name("probe.py")
# Starts the ranks' Python, or else any python3, which reads the probe's source.
SHELL = 'if [ -x "$2" ]; then exec "$2" -c "$3" "$1"; fi; exec python3 -c "$3" "$1"'
START = "import sys; i = sys.stdin.buffer; exec(compile(i.read(int(i.readline())), 'probe', 'exec'))"


@dataclass(frozen=True)
class DoctorOptions:
    """VisitOptions of `ringtrain doctor`, besides its hosts."""

    run_directory: Annotated[str, Argument("DIR")] = "runs"
    """parent directory of all runs"""
    timeout_s: Annotated[float, Argument("S", ("--timeout",))] = 10
    """seconds for a host to answer"""
    as_json: Annotated[bool, Argument("", ("--json",))] = False
    """print one JSON object instead of a table"""


@dataclass(frozen=True)
class VisitOptions(DoctorOptions):
    """How hosts are examined."""

    ssh_port: int = 0  # 0: from ssh's configuration
    subnet: str = ""  # CIDR of the network of the job, e.g. 10.1.0.0/16; "": the one that all hosts share
    python: str = sys.executable  # full path of the Python that ranks are started with


def visit(host: Host, request: Mapping[str, Any], options: VisitOptions) -> Probe:
    """Probes one host, over ssh unless it is this machine; one that does not answer gives a Probe with an error."""
    mark = f"ringtrain-{secrets.token_hex(8)} "
    argv = ["sh", "-c", SHELL, "sh", mark, options.python, START]
    is_remote = not is_here(host.name)
    if is_remote:
        argv = [*host_agent.ssh(options.timeout_s, options.ssh_port), "--", host.name, shlex.join(argv)]
    program = PROGRAM.read_bytes()
    given = b"%d\n%s%s\n" % (len(program), program, json.dumps(request).encode())
    try:  # without a terminal, ssh cannot ask for a password
        ended = subprocess.run(
            argv, input=given, capture_output=True, timeout=options.timeout_s, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        why = _reason(error.stderr or b"") or f"timed out: no answer in {options.timeout_s:g} s"
        return Probe(host, error=why)
    except OSError as error:
        return Probe(host, error=f"{argv[0]}: {error.strerror}")
    _, found, answer = ended.stdout.partition(mark.encode())  # before it is output of a login shell
    if not found:
        why = _reason(ended.stderr) or f"it exited without an answer, code {ended.returncode}"
        return Probe(host, error=why)
    try:
        facts = parse_json(answer)
    except ValueError as error:
        return Probe(host, error=f"its answer is not JSON: {error}")
    return Probe(host, facts, "", is_remote)


def _reason(errors: bytes) -> str:
    """Standard error of ssh or the host, on one line."""
    lines = [line.strip(" @\t\r") for line in errors.decode(errors="replace").splitlines()]
    lines = [line.removeprefix("ssh: ") for line in lines if line]
    if len(lines) > 2:
        lines = [line for line in lines if line.startswith(("WARNING: REMOTE", "Offending"))] + lines[-1:]
    return "; ".join(lines)
