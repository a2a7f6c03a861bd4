"""Preflight of `ringtrain doctor`: probes every host, measures the links, and reports problems before a job starts."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ringtrain.cluster import host_agent, processes
from ringtrain.cluster.doctor import checks, links
from ringtrain.cluster.doctor.findings import LEVELS, Probe, Scene, gather
from ringtrain.cluster.doctor.report import Report, plain_or_terminal, show
from ringtrain.cluster.host_agent import is_here
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import Job
from ringtrain.cluster.plans import mpirun
from ringtrain.errors import LaunchError
from ringtrain.protocol.json_text import INVALID, parse_json

NUM_CLOCK_READINGS = 5  # of which the fastest is used
NUM_ROUND_TRIPS = 200
SUBNETS = ("openmpi4", "openmpi5")  # mpirun dialects that select interfaces by subnet
PROGRAM = Path(__file__).with_name("probe.py")
# Reports that the shell runs, then starts the ranks' Python, or else any python3, which reads the probe's source.
SHELL = 'echo "$1"; if [ -x "$2" ]; then exec "$2" -c "$3" "$1"; fi; exec python3 -c "$3" "$1"'
START = "import sys; i = sys.stdin.buffer; exec(compile(i.read(int(i.readline())), 'probe', 'exec'))"


@dataclass(frozen=True)
class Options:
    run_directory: str = "runs"
    """parent directory of all runs, as in --run.directory"""
    code: str = "."
    """directory whose .py and .toml files must be the same on all hosts"""
    bandwidth: bool = True
    """whether to measure the links between hosts"""
    timeout_s: float = 10.0
    """limit for each answer of a host"""
    num_connections: int = 32
    """hosts probed at the same time, at least 2"""
    ssh_port: int = 0
    """0: from ssh's configuration"""
    subnet: str = ""
    """CIDR of the network to measure, e.g. 10.1.0.0/16; "": the one that all hosts share"""
    python: str = sys.executable
    """full path of the Python that ranks are started with"""


class NoAnswer(Exception):
    """Raised if a host does not answer; the message is the reason."""


def main(hosts: Sequence[Host], options: Options, as_json: bool = False) -> int:
    """Examines hosts (empty: this machine), prints the report, and returns 0: ok, 1: warnings, or 2: errors."""
    if sys.stderr.isatty() and len(hosts) > 1:
        print(f"asking {len(hosts)} hosts, each has {options.timeout_s:g} s to answer ...", file=sys.stderr)
    return show(examine(hosts, options), plain_or_terminal(), as_json)


def examine(hosts: Sequence[Host], options: Options, environ: Mapping[str, str] = os.environ) -> Report:
    """Probes all hosts concurrently and measures the links between those that answer; host errors become findings.

    Without hosts, examines this machine with one slot per GPU or, without GPUs, per core. Ranks get PATH and PYTHONPATH
    from `environ`. Raises LaunchError if an option is invalid.
    """
    check(options)
    start_s = time.monotonic()
    wanted = hosts or (Host("localhost"),)
    question = {
        "do": "facts",
        "folder": os.getcwd(),
        "path": environ.get("PATH", ""),
        "python_path": environ.get("PYTHONPATH", ""),
        "run_directory": options.run_directory,
        "code": os.path.abspath(options.code),
        "names": [host.name for host in wanted] if len(wanted) > 1 else [],
    }
    own_names = host_agent.here(host.name for host in wanted)
    trace = Trace(len(wanted))
    with ThreadPoolExecutor(min(options.num_connections, len(wanted) + 1)) as pool:
        elsewhere = not own_names
        alone = pool.submit(visit, Host("localhost"), question, options, Trace(0)) if elsewhere else None
        probes = tuple(pool.map(lambda host: visit(host, question, options, trace), wanted))
    at_home = alone.result() if alone else next(probe for probe in probes if probe.host.name in own_names)
    # The reference for all hosts. If this machine does not answer in time, the first host that does.
    here = at_home.facts or next((probe.facts for probe in probes if probe.facts), {})
    if not hosts and at_home.facts:
        probes = (replace(at_home, host=Host("localhost", len(here["gpus"] or ()) or here["cores"] or 1)),)
    scene = Scene(probes, here, options.python, options.ssh_port, options.subnet)
    table = checks.judge(scene)
    findings = gather(table, probes)
    subnet = options.subnet or next(map(str, checks.shared_subnets(scene)), "")
    ring = None
    if options.bandwidth and len(scene.answers) > 1:
        answering = [probe.host.name for probe in probes if probe.facts is not None]
        ring = measure(answering, here.get("mpirun") or {"program": "mpirun", "said": ""}, subnet, options, environ)
        findings += links.judge(ring)
    findings.sort(key=lambda finding: -LEVELS.index(finding.level))
    return Report(scene, table, tuple(findings), subnet, ring, time.monotonic() - start_s)


def check(options: Options) -> None:
    """Raises LaunchError if an option is invalid."""
    if not 0 < options.timeout_s < threading.TIMEOUT_MAX:
        raise LaunchError(f"got --timeout {options.timeout_s:g}, expected a number of seconds above 0")
    if not os.path.isdir(options.code):
        raise LaunchError(f"got --code {options.code!r}, expected the folder of your code")
    try:
        ipaddress.ip_network(options.subnet or "::/0", strict=False)
    except ValueError as error:
        raise LaunchError(f"got --subnet {options.subnet!r}, expected a network such as 10.1.0.0/16") from error


# ---- one host ----------------------------------------------------------------------------------------------------


def visit(host: Host, question: Mapping[str, Any], options: Options, trace: Trace) -> Probe:
    """Probes one host; a host that does not answer gives a Probe with an error."""
    try:
        with trace.of_visitor(), Session(host.name, options) as session:
            facts = session.ask(**question)
            clock_s = min((session.clock() for _ in range(NUM_CLOCK_READINGS)), key=lambda reading: reading[1])
            finds = trace.leave_or_find(session, facts["disk"])
            return Probe(host, facts, "", session.connect_s, clock_s, finds)
    except NoAnswer as error:
        return Probe(host, error=str(error))


class Session:
    """Probe process on a host, as a context manager: over ssh, or local if the host is this machine."""

    def __init__(self, name: str, options: Options) -> None:
        self.timeout_s = options.timeout_s
        self.mark = f"ringtrain-{secrets.token_hex(8)} "
        # Not a pipe: a shared connection that ssh keeps open for later sessions would hold it open.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the session
        words = ["sh", "-c", SHELL, "sh", self.mark, options.python, START]
        remote = not is_here(name)
        if remote:
            words = [*host_agent.ssh(options.timeout_s, options.ssh_port), "--", name, shlex.join(words)]
        start_s = time.monotonic()
        try:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                start_new_session=True,  # without a terminal, ssh cannot ask for a password
            )
        except OSError as error:
            self.errors.close()
            raise NoAnswer(f"{words[0]}: {error.strerror}") from error
        self.connect_s: float | None = None
        try:
            self._receive()  # the shell's mark
            self.connect_s = time.monotonic() - start_s if remote else None
            program = PROGRAM.read_bytes()
            self._send(b"%d\n%s" % (len(program), program))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]  # the probe then cleans up and exits
        try:
            self.process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]
        self.errors.close()

    def ask(self, **question: Any) -> Any:
        """Sends a request of probe.serve and returns the answer; raises NoAnswer on a timeout or a lost connection."""
        self._send(json.dumps(question).encode() + b"\n")
        try:
            return parse_json(self._receive())
        except ValueError as error:
            raise NoAnswer(f"its answer is not JSON: {error}") from None

    def clock(self) -> tuple[float, float]:
        """Offset of the host's clock in s (positive: ahead of this machine) and uncertainty: half the round trip."""
        start_s = time.time()
        there_s = self.ask(do="clock")
        end_s = time.time()
        return there_s - (start_s + end_s) / 2, (end_s - start_s) / 2

    def _send(self, content: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # _receive reports that the process has exited
            self.process.stdin.write(content)  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def _receive(self) -> bytes:
        alarm = threading.Timer(self.timeout_s, self._kill)
        alarm.start()
        try:
            for line in self.process.stdout:  # type: ignore[union-attr]
                if line.startswith(self.mark.encode()):  # other lines are output of a login shell
                    return line[len(self.mark) :]
        finally:
            alarm.cancel()
        status = self.process.wait()
        late = f"timed out: no answer in {self.timeout_s:g} s"
        usual = late if status == -signal.SIGKILL else f"it ended without an answer, status {status}"
        raise NoAnswer(self._reason() or usual)

    def _reason(self) -> str:
        """Standard error of ssh or the host, on one line."""
        self.errors.seek(0)
        lines = [line.strip(" @\t\r") for line in self.errors.read().decode(errors="replace").splitlines()]
        lines = [line.removeprefix("ssh: ") for line in lines if line]
        if len(lines) > 2:
            lines = [line for line in lines if line.startswith(("WARNING: REMOTE", "Offending"))] + lines[-1:]
        return "; ".join(lines)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Trace:
    """Marker file that the first session writes to a run directory and the other sessions look for on their hosts."""

    def __init__(self, num_visitors: int) -> None:
        self._changed = threading.Condition()
        self._visiting = num_visitors
        self._claimed = False
        self._text = secrets.token_hex(8)
        self._path: str | None = None
        """None: not written yet; "": it could not be written"""

    @contextlib.contextmanager
    def of_visitor(self) -> Iterator[None]:
        """Context of one session; counts it as finished, also after an error."""
        try:
            yield
        finally:
            with self._changed:
                self._visiting -= 1
                self._changed.notify_all()

    def leave_or_find(self, session: Session, disk: Mapping[str, Any] | None) -> bool | None:
        """Writes the file and waits until all others have looked, or looks for it; returns whether this host sees it.

        None: it could not be written, or there is no other host.
        """
        with self._changed:
            first, self._claimed = not self._claimed, True
        if not first:
            with self._changed:
                self._changed.wait_for(lambda: self._path is not None)
            return session.ask(do="find", path=self._path, text=self._text) if self._path else None
        path = os.path.join(disk["folder"], f".ringtrain-doctor-{self._text}") if disk else ""
        left = False
        try:
            left = bool(path and self._visiting > 1 and session.ask(do="leave", path=path, text=self._text))
        finally:
            with self._changed:
                self._path = path if left else ""
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._visiting <= 1)
        return True if left else None


# ---- the ring ----------------------------------------------------------------------------------------------------


def measure(
    names: Sequence[str], local_mpirun: Mapping[str, Any], subnet: str, options: Options, environ: Mapping[str, str]
) -> links.Ring:
    """Measures each link of a ring of two or more hosts, with one rank per host, launched as in training."""
    own_names = host_agent.here(names)
    # Open MPI 4 places local ranks first, whatever the host order.
    names = sorted(names, key=lambda name: name not in own_names)
    seconds = min(0.5, 20 / len(names))  # per link
    limit_s = 3 * options.timeout_s + 2 * len(names)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        job = Job(
            command=(options.python, "-m", "ringtrain.cluster.doctor.preflight", "ring", f"{seconds:.3f}"),
            num_ranks=len(names),
            hosts=tuple(Host(name) for name in names),
            environment=environ,
            working_directory=os.getcwd(),
            subnet=subnet,
            ssh_port=options.ssh_port,
            yield_when_idle=True,  # a waiting rank must not take a core from the ranks being measured
            allow_root=os.geteuid() == 0,
            files_folder=folder,
        )
        try:
            dialect = mpirun.identify(local_mpirun["said"])
            named = job if dialect in SUBNETS else replace(job, subnet="")
            plan = mpirun.plan(named, dialect, local_mpirun["program"])
            processes.write_files(plan, folder)
            process = subprocess.Popen(
                plan.argv,
                env={**environ, **plan.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
        except (LaunchError, OSError) as error:
            return links.read(names, [], str(error))
        try:
            output = process.communicate(timeout=limit_s)[0].decode(errors="replace")
            why = f"mpirun ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            output, why = "", f"no result in {limit_s:.0f} s"
        finally:
            end(process)
        said.seek(0)
        why += f": {links.essence(said.read().decode(errors='replace'))}"
    try:
        measured = [parse_json(found) for found in re.findall(r'\{"ring": (\[.*?\])\}', output)]
        return links.read(names, measured, why)
    except INVALID:
        return links.read(names, [], why)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops a launcher and its ranks: SIGTERM, and SIGKILL after 5 s."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def ring(seconds: float) -> None:
    """Runs on each rank: measures the links one at a time, then an allreduce; rank 0 prints one JSON line for each."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    own: list[Any] = []
    for source in range(size):
        comm.Barrier()
        if rank == source:
            own = [socket.gethostname(), latency_us(comm, following), mb_per_s(comm, following, seconds)]
        elif previous == source:
            answer(comm, previous)
    lines = [*(comm.gather(own) or ()), allreduce(comm, seconds)]
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
        own, total = array("f", bytes(num_bytes)), array("f", bytes(num_bytes))
        comm.Allreduce([own, MPI.FLOAT], [total, MPI.FLOAT])  # warm-up, opens the connections
        comm.Barrier()
        start_s = time.perf_counter()
        comm.Allreduce([own, MPI.FLOAT], [total, MPI.FLOAT])
        took_s = comm.allreduce(time.perf_counter() - start_s, MPI.MAX)
        if took_s > seconds / 2 or num_bytes >= 2**26:
            return [num_bytes / 1e6, took_s]
        num_bytes *= 2


if __name__ == "__main__" and sys.argv[1:2] == ["ring"]:
    ring(float(sys.argv[2]))
