"""Ring of hosts in `ringtrain doctor`: each link and an allreduce, measured with one MPI rank per host; slow links."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import IO, Any

from ringtrain.cluster import host_agent, processes
from ringtrain.cluster.doctor.findings import Finding
from ringtrain.cluster.doctor.session import Options
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.plans import mpirun, openmpi
from ringtrain.errors import LaunchError
from ringtrain.protocol.json_text import INVALID, parse_json

NUM_ROUND_TRIPS = 200
SUBNETS = ("openmpi4", "openmpi5")  # mpirun dialects that select interfaces by subnet
SLOW = 0.5  # fraction of the fastest link's bandwidth
RESNET50_MB = 102.4  # gradients of 25.6 million parameters


@dataclass(frozen=True)
class Link:
    source: str
    target: str
    latency_us: float  # one way: half the round trip of one byte
    mb_per_s: float


@dataclass(frozen=True)
class Ring:
    """Measured links and allreduce, or the error."""

    links: tuple[Link, ...] = ()
    allreduce_mb: float = 0.0
    allreduce_s: float = 0.0
    error: str = ""
    hosts: tuple[str, ...] = ()  # hosts of a failed measurement

    @property
    def slowest(self) -> Link:
        return min(self.links, key=lambda link: link.mb_per_s)

    @property
    def bus_mb_per_s(self) -> float:
        """Bus bandwidth of the allreduce, as nccl-tests defines it: that of each link of an ideal ring."""
        num = len(self.links)
        return self.allreduce_mb / self.allreduce_s * 2 * (num - 1) / num


def read(names: Sequence[str], measured: Sequence[Sequence[Any]], error: str) -> Ring:
    """Converts a measurement to a Ring; one with an error if results are missing or ranks shared a host.

    `measured` has [host name, latency_us, mb_per_s] of each rank, then [MB, s] of the allreduce.
    """
    if len(measured) != len(names) + 1:
        return Ring(error=error, hosts=tuple(names))
    *ranks, (mb, seconds) = measured
    where = [host for host, _, _ in ranks]
    if len(set(where)) < len(names):
        listed = ", ".join(where[:4])
        if len(where) > 4:
            listed += ", ..."
        text = f"the launcher started {len(where)} ranks on {len(set(where))} of {len(names)} hosts: {listed}"
        return Ring(error=text, hosts=tuple(names))
    ends = zip(names, [*names[1:], names[0]], ranks, strict=True)
    return Ring(tuple(Link(source, target, *figures) for source, target, (_, *figures) in ends), mb, seconds)


def judge(ring: Ring) -> list[Finding]:
    """Findings of a ring: a failed measurement, or links below half the fastest link's bandwidth."""
    if ring.error:
        names = [f"[{name}]" if ":" in name else name for name in ring.hosts]
        fix = f"ringtrain launch -H {','.join(names)} -- hostname  # prints the complete error"
        return [Finding("ring", "error", (), ring.error, fix)]
    best = max(link.mb_per_s for link in ring.links)
    slow = [link for link in ring.links if link.mb_per_s < SLOW * best]
    if not slow:
        return []
    suspect = ""
    common = set.intersection(*({link.source, link.target} for link in slow))
    if len(slow) > 1 and len(common) == 1:
        suspect = f": {common.pop()} is at an end of all of them"
    link = ring.slowest
    text = (
        f"{link.source} -> {link.target} is the slowest link: {speed(link.mb_per_s)}, the fastest has {speed(best)};"
        f" {len(slow)} of {len(ring.links)} links have less than half of that{suspect}"
    )
    ends = tuple(dict.fromkeys([link.source, link.target]))
    return [Finding("ring", "warning", ends, text, "ethtool eth0 | grep Speed  # on both: cable, port, other traffic?")]


def describe(ring: Ring) -> list[str]:
    if not ring.links:
        return []
    width = max(len(link.source) + len(link.target) for link in ring.links) + 4
    lines = []
    for link in ring.links:
        ends = f"{link.source} -> {link.target}"
        line = f"{ends:<{width}}  {link.latency_us:8.1f} µs  {speed(link.mb_per_s):>10}"
        if link is ring.slowest and len(ring.links) > 1:
            line += "  slowest"
        lines.append(line)
    resnet50_s = RESNET50_MB / ring.allreduce_mb * ring.allreduce_s
    return [
        *lines,
        f"allreduce of {ring.allreduce_mb:.0f} MB in {ring.allreduce_s * 1e3:.1f} ms,"
        f" {speed(ring.bus_mb_per_s)} on each link; ResNet-50's gradients would take {resnet50_s * 1e3:.0f} ms a step",
    ]


def speed(mb_per_s: float) -> str:
    if mb_per_s >= 1e3:
        return f"{mb_per_s / 1e3:.1f} GB/s"
    return f"{mb_per_s:.0f} MB/s"


def essence(output: str) -> str:
    """Most informative lines of a launcher's error output: the first Python error, else the first two lines."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip(" -*=\t")]
    errors = [line for line in lines if re.search(r"\b[A-Z]\w*Error: ", line)]
    return "; ".join(errors[:1] or lines[:2])


# ---- measurement -------------------------------------------------------------------------------------------------


def measure(names: Sequence[str], local_mpirun: Mapping[str, Any], subnet: str, options: Options) -> Ring:
    """Measures each link of a ring of two or more hosts, with one rank per host, launched as in training."""
    local_names = host_agent.here(names)
    # Open MPI 4 places local ranks first, whatever the host order.
    names = sorted(names, key=lambda name: name not in local_names)
    seconds = min(0.5, 20 / len(names))  # per link
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as stderr:
        job = Job(
            command=(options.python, "-m", __name__, f"{seconds:.3f}"),
            num_ranks=len(names),
            hosts=tuple(Host(name) for name in names),
            environment=os.environ,
            working_directory=os.getcwd(),
            subnet=subnet,
            own_interfaces=openmpi.own_interfaces(os.environ),
            ssh_port=options.ssh_port,
            yield_when_idle=True,  # a waiting rank must not take a core from the ranks being measured
            allow_root=os.geteuid() == 0,
            files_folder=folder,
        )
        try:
            dialect = mpirun.identify(local_mpirun["said"])
            supported = job if dialect in SUBNETS else replace(job, subnet="")
            plan = mpirun.plan(supported, dialect, local_mpirun["program"])
            with processes.written_files(plan, folder):
                output, reason = _run(plan, stderr, 3 * options.timeout_s + 2 * len(names))
            measured = [parse_json(line) for line in re.findall(r'\{"ring": (\[.*?\])\}', output)]
        except (LaunchError, OSError) as error:
            measured, reason = [], str(error)
        except INVALID:
            measured = []
    return read(names, measured, reason)


def _run(plan: Plan, stderr: IO[bytes], limit_s: float) -> tuple[str, str]:
    """Runs the launcher; returns its output and the reason that applies if that lacks results."""
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": stderr}
    process = subprocess.Popen(plan.argv, env={**os.environ, **plan.env}, start_new_session=True, **streams)
    try:
        output = process.communicate(timeout=limit_s)[0].decode(errors="replace")
        reason = f"mpirun exited with code {process.returncode}"
    except subprocess.TimeoutExpired:
        output, reason = "", f"no result in {limit_s:.0f} s"
    finally:
        end(process)
    stderr.seek(0)
    return output, f"{reason}: {essence(stderr.read().decode(errors='replace'))}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops a launcher and its ranks: SIGTERM, and SIGKILL after 5 s."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


# ---- on the ranks ------------------------------------------------------------------------------------------------


def on_rank(seconds: float) -> None:
    """Measures the links one at a time, then an allreduce; rank 0 prints one JSON line for each."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    line: list[Any] = []
    for source in range(size):
        comm.Barrier()
        if rank == source:
            line = [socket.gethostname(), latency_us(comm, following), mb_per_s(comm, following, seconds)]
        elif previous == source:
            answer(comm, previous)
    lines = [*(comm.gather(line) or ()), allreduce(comm, seconds)]
    for line in lines if rank == 0 else ():  # one short line each: launchers split long lines
        print(json.dumps({"ring": line}), flush=True)


ECHO, DATA, ACKNOWLEDGE, END = range(4)  # tags


def latency_us(comm: Any, target: int) -> float:
    """One-way latency to another rank in µs: half the median round trip of one byte."""
    byte, round_trips_s = bytearray(1), []
    for _ in range(NUM_ROUND_TRIPS):
        start_s = time.perf_counter()
        comm.Send(byte, target, ECHO)
        comm.Recv(byte, target, ECHO)
        round_trips_s.append(time.perf_counter() - start_s)
    return median(round_trips_s) / 2 * 1e6


def mb_per_s(comm: Any, target: int, seconds: float) -> float:
    """Bandwidth to another rank in MB/s; doubles the data until a transfer takes longer than `seconds` / 2."""
    num_bytes = 2**16
    while True:
        start_s = time.perf_counter()
        chunk = bytearray(min(num_bytes, 2**22))
        for _ in range(num_bytes // len(chunk)):
            comm.Send(chunk, target, DATA)
        comm.Send(bytearray(1), target, ACKNOWLEDGE)
        comm.Recv(bytearray(1), target, ACKNOWLEDGE)
        took_s = time.perf_counter() - start_s
        if took_s > seconds / 2:
            comm.Send(bytearray(1), target, END)
            return num_bytes / took_s / 1e6
        num_bytes *= 2


def answer(comm: Any, source: int) -> None:
    """Receiving side of latency_us and mb_per_s."""
    from mpi4py import MPI

    buffer, status = bytearray(2**22), MPI.Status()
    while status.Get_tag() != END:
        comm.Recv(buffer, source, MPI.ANY_TAG, status)
        if status.Get_tag() in (ECHO, ACKNOWLEDGE):
            comm.Send(memoryview(buffer)[:1], source, status.Get_tag())


def allreduce(comm: Any, seconds: float) -> list[float]:
    """[MB, s of the slowest rank] of an allreduce; doubles the data until it takes over `seconds` / 2 or has 64 MiB."""
    from mpi4py import MPI

    num_bytes = 2**20
    while True:
        values, total = array("f", bytes(num_bytes)), array("f", bytes(num_bytes))
        comm.Allreduce([values, MPI.FLOAT], [total, MPI.FLOAT])  # warm-up, opens the connections
        comm.Barrier()
        start_s = time.perf_counter()
        comm.Allreduce([values, MPI.FLOAT], [total, MPI.FLOAT])
        took_s = comm.allreduce(time.perf_counter() - start_s, MPI.MAX)
        if took_s > seconds / 2 or num_bytes >= 2**26:
            return [num_bytes / 1e6, took_s]
        num_bytes *= 2


if __name__ == "__main__":
    on_rank(float(sys.argv[1]))
