"""Preflight: asks every host about itself, measures the links between hosts, and says what is wrong before ranks do."""

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

NUM_CLOCK_READINGS = 5  # the fastest counts
NUM_ROUND_TRIPS = 200
SUBNETS = ("openmpi4", "openmpi5")  # dialects that choose interfaces by subnet
PROGRAM = Path(__file__).with_name("probe.py")
# Says that there is a shell; then the Python that ranks are started with, or else any, reads its program.
SHELL = 'echo "$1"; if [ -x "$2" ]; then exec "$2" -c "$3" "$1"; fi; exec python3 -c "$3" "$1"'
START = "import sys; i = sys.stdin.buffer; exec(compile(i.read(int(i.readline())), 'probe', 'exec'))"


@dataclass(frozen=True)
class Options:
    """What doctor looks at."""

    run_directory: str = "runs"
    """folder that holds all runs, as in --run.directory"""
    code: str = "."
    """folder whose .py and .toml files must be the same everywhere"""
    bandwidth: bool = True
    """measure the links between hosts"""
    timeout_s: float = 10.0
    """until a host has to answer"""
    num_connections: int = 32
    """at once, two or more"""
    ssh_port: int = 0
    """0: as ssh has it configured"""
    subnet: str = ""
    """CIDR of the network to measure, e.g. 10.1.0.0/16; empty: the one that all hosts share"""
    python: str = sys.executable
    """the Python that ranks are started with, by its full path"""


class NoAnswer(Exception):
    """A host that says nothing, or nothing more; the message says why."""


def main(hosts: Sequence[Host], options: Options, as_json: bool = False) -> int:
    """Examines hosts and shows what was found.

    Args:
        hosts: of the job; none: this machine alone.
        as_json: print one JSON object instead of a table.

    Returns:
        Exit code: 0 all is well, 1 there are warnings, 2 something hurts.
    """
    if sys.stderr.isatty() and len(hosts) > 1:
        print(f"asking {len(hosts)} hosts, each has {options.timeout_s:g} s to answer ...", file=sys.stderr)
    return show(examine(hosts, options), plain_or_terminal(), as_json)


def examine(hosts: Sequence[Host], options: Options, environ: Mapping[str, str] = os.environ) -> Report:
    """Asks all hosts about themselves, at the same time, and measures the links between those that answer.

    Args:
        hosts: of the job; none: this machine alone, with a slot for each GPU, or else for each core.
        environ: of the launching process: ranks will have its PATH and PYTHONPATH.

    Returns:
        What was found; whatever is wrong with a host is in it.

    Raises:
        LaunchError: an option that cannot be meant.
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
    # What the others are compared with; where this machine does not answer in time, the first that does.
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
    """Refuses what cannot be meant.

    Raises:
        LaunchError: says what was received, and what was expected.
    """
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
    """Learns all that there is to learn of one host."""
    try:
        with trace.of_visitor(), Session(host.name, options) as session:
            facts = session.ask(**question)
            clock_s = min((session.clock() for _ in range(NUM_CLOCK_READINGS)), key=lambda reading: reading[1])
            finds = trace.leave_or_find(session, facts["disk"])
            return Probe(host, facts, "", session.connect_s, clock_s, finds)
    except NoAnswer as error:
        return Probe(host, error=str(error))


class Session:
    """The probe, running on a host: over ssh, or without it where the host is this machine. A context manager."""

    def __init__(self, name: str, options: Options) -> None:
        self.timeout_s = options.timeout_s
        self.mark = f"ringtrain-{secrets.token_hex(8)} "
        # No pipe: a connection that ssh leaves open for later ones would hold it.
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
                start_new_session=True,  # no terminal to ask for a password on
            )
        except OSError as error:
            self.errors.close()
            raise NoAnswer(f"{words[0]}: {error.strerror}") from error
        self.connect_s: float | None = None
        try:
            self._receive()  # the shell's
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
            self.process.stdin.close()  # type: ignore[union-attr]  # the probe then tidies up and ends
        try:
            self.process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]
        self.errors.close()

    def ask(self, **question: Any) -> Any:
        """Asks a question that probe.serve knows.

        Raises:
            NoAnswer: it takes too long, or the connection has ended.
        """
        self._send(json.dumps(question).encode() + b"\n")
        try:
            return parse_json(self._receive())
        except ValueError as error:
            raise NoAnswer(f"its answer is not JSON: {error}") from None

    def clock(self) -> tuple[float, float]:
        """How many seconds the host's clock is before this machine's, and how many of them may be due to the way."""
        start_s = time.time()
        there_s = self.ask(do="clock")
        end_s = time.time()
        return there_s - (start_s + end_s) / 2, (end_s - start_s) / 2

    def _send(self, content: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # that it has ended is seen on receiving
            self.process.stdin.write(content)  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def _receive(self) -> bytes:
        alarm = threading.Timer(self.timeout_s, self._kill)
        alarm.start()
        try:
            for line in self.process.stdout:  # type: ignore[union-attr]
                if line.startswith(self.mark.encode()):  # what else there is, a login shell has said
                    return line[len(self.mark) :]
        finally:
            alarm.cancel()
        status = self.process.wait()
        late = f"timed out: no answer in {self.timeout_s:g} s"
        usual = late if status == -signal.SIGKILL else f"it ended without an answer, status {status}"
        raise NoAnswer(self._reason() or usual)

    def _reason(self) -> str:
        """What ssh, or the host, said on standard error, on one line."""
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
    """A file that the first visitor leaves in a host's run directory, for the visitors of other hosts to find."""

    def __init__(self, num_visitors: int) -> None:
        self._changed = threading.Condition()
        self._visiting = num_visitors
        self._claimed = False
        self._text = secrets.token_hex(8)
        self._path: str | None = None
        """None: not there yet; empty: it could not be left"""

    @contextlib.contextmanager
    def of_visitor(self) -> Iterator[None]:
        """For the time of a visit, however it ends."""
        try:
            yield
        finally:
            with self._changed:
                self._visiting -= 1
                self._changed.notify_all()

    def leave_or_find(self, session: Session, disk: Mapping[str, Any] | None) -> bool | None:
        """Leaves the file and waits until all others have looked; or looks for it.

        Returns:
            Whether this host sees it; None: nobody could leave one, or there is no other host.
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
    """Measures each link of a ring of hosts, one rank on each, started as training is.

    Args:
        names: of the hosts, two or more.
        subnet: that ranks talk over; empty: any.
        options: with the time that a host has to start in.
    """
    own_names = host_agent.here(names)
    names = sorted(names, key=lambda name: name not in own_names)  # as Open MPI 4 places ranks, whatever it is told
    seconds = min(0.5, 20 / len(names))  # for each link
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
            yield_when_idle=True,  # a rank that waits for its turn takes no core from those that are measured
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
    """Ends a launcher with all its ranks: it is asked, then made to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def ring(seconds: float) -> None:
    """Each rank measures its link to the next, one at a time; rank 0 prints a line of JSON for each, and one more."""
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
    for line in lines if rank == 0 else ():  # short ones: launchers divide long lines
        print(json.dumps({"ring": line}), flush=True)


ECHO, DATA, ACKNOWLEDGE, END = range(4)  # tags


def latency_us(comm: Any, target: int) -> float:
    """Half the time that a byte takes to another rank and back, as it mostly is."""
    byte, round_trips_s = bytearray(1), []
    for _ in range(NUM_ROUND_TRIPS):
        start_s = time.perf_counter()
        comm.Send(byte, target, ECHO)
        comm.Recv(byte, target, ECHO)
        round_trips_s.append(time.perf_counter() - start_s)
    return median(round_trips_s) / 2 * 1e6


def mb_per_s(comm: Any, target: int, seconds: float) -> float:
    """Bandwidth to another rank; sends twice as much until it has taken long enough."""
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
    """The other end of latency_us and mb_per_s."""
    from mpi4py import MPI

    buffer, status = bytearray(2**22), MPI.Status()
    while status.Get_tag() != END:
        comm.Recv(buffer, source, MPI.ANY_TAG, status)
        if status.Get_tag() in (ECHO, ACKNOWLEDGE):
            comm.Send(memoryview(buffer)[:1], source, status.Get_tag())


def allreduce(comm: Any, seconds: float) -> list[float]:
    """Sums ever more floats over all ranks until it takes long enough: MB, and the seconds of the slowest rank."""
    from mpi4py import MPI

    num_bytes = 2**20
    while True:
        own, total = array("f", bytes(num_bytes)), array("f", bytes(num_bytes))
        comm.Allreduce([own, MPI.FLOAT], [total, MPI.FLOAT])  # opens connections
        comm.Barrier()
        start_s = time.perf_counter()
        comm.Allreduce([own, MPI.FLOAT], [total, MPI.FLOAT])
        took_s = comm.allreduce(time.perf_counter() - start_s, MPI.MAX)
        if took_s > seconds / 2 or num_bytes >= 2**26:
            return [num_bytes / 1e6, took_s]
        num_bytes *= 2


if __name__ == "__main__" and sys.argv[1:2] == ["ring"]:
    ring(float(sys.argv[2]))
