"""Probe of one host: a conversation with probe.py, over ssh or local."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from ringtrain.cluster import host_agent
from ringtrain.cluster.doctor.findings import Probe
from ringtrain.cluster.host_agent import is_here
from ringtrain.cluster.hosts import Host
from ringtrain.options import Argument
from ringtrain.protocol.json_text import parse_json

NUM_CLOCK_READINGS = 5  # of which the fastest is used
PROGRAM = Path(__file__).with_name("probe.py")
# Reports that the shell runs, then starts the ranks' Python, or else any python3, which reads the probe's source.
SHELL = 'echo "$1"; if [ -x "$2" ]; then exec "$2" -c "$3" "$1"; fi; exec python3 -c "$3" "$1"'
START = "import sys; i = sys.stdin.buffer; exec(compile(i.read(int(i.readline())), 'probe', 'exec'))"


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `ringtrain doctor`, besides its hosts."""

    run_directory: Annotated[str, Argument("DIR")] = "runs"
    """parent directory of all runs"""
    code: Annotated[str, Argument("DIR")] = "."
    """your code, the same on every host"""
    timeout_s: Annotated[float, Argument("S", ("--timeout",))] = 10
    """seconds for a host to answer"""
    as_json: Annotated[bool, Argument("", ("--json",))] = False
    """print one JSON object instead of a table"""


@dataclass(frozen=True)
class Options(DoctorOptions):
    """How hosts are examined."""

    num_connections: int = 32  # hosts probed at the same time
    ssh_port: int = 0  # 0: from ssh's configuration
    subnet: str = ""  # CIDR of the network of the job, e.g. 10.1.0.0/16; "": the one that all hosts share
    script: str = ""  # path of the script whose job is checked
    python: str = sys.executable  # full path of the Python that ranks are started with


class NoAnswer(Exception):
    """Raised if a host does not answer; the message is the reason."""


def visit(host: Host, request: Mapping[str, Any], options: Options) -> Probe:
    """Probes one host; a host that does not answer gives a Probe with an error."""
    try:
        with Session.to(host.name, options) as session:
            facts = session.ask(**request)
            clock_s = min((session.clock() for _ in range(NUM_CLOCK_READINGS)), key=lambda reading: reading[1])
            return Probe(host, facts, "", session.connect_s, clock_s)
    except NoAnswer as error:
        return Probe(host, error=str(error))


class Session:
    """Probe process on a host: over ssh, or local if the host is this machine."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes], mark: str, timeout_s: float) -> None:
        self.process, self.errors, self.mark, self.timeout_s = process, errors, mark, timeout_s
        self.connect_s: float | None = None

    @classmethod
    @contextlib.contextmanager
    def to(cls, name: str, options: Options) -> Iterator[Session]:
        """Starts the probe on a host, and ends it with the context; raises NoAnswer."""
        mark = f"ringtrain-{secrets.token_hex(8)} "
        argv = ["sh", "-c", SHELL, "sh", mark, options.python, START]
        remote = not is_here(name)
        if remote:
            argv = [*host_agent.ssh(options.timeout_s, options.ssh_port), "--", name, shlex.join(argv)]
        start_s = time.monotonic()
        # Not a pipe: a shared connection that ssh keeps open for later sessions would hold it open.
        with tempfile.TemporaryFile() as errors, contextlib.ExitStack() as cleanup:
            pipe = subprocess.PIPE
            try:  # without a terminal, ssh cannot ask for a password
                process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)
            except OSError as error:
                raise NoAnswer(f"{argv[0]}: {error.strerror}") from error
            session = cls(process, errors, mark, options.timeout_s)
            cleanup.callback(session._end)
            session._receive()  # from the shell
            session.connect_s = time.monotonic() - start_s if remote else None
            program = PROGRAM.read_bytes()
            session._send(b"%d\n%s" % (len(program), program))
            yield session

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]  # the probe then cleans up and exits
        try:
            self.process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]

    def ask(self, **request: Any) -> Any:
        """Sends a request of probe.serve and returns the answer; raises NoAnswer on a timeout or a lost connection."""
        self._send(json.dumps(request).encode() + b"\n")
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
                _, mark, answer = line.partition(self.mark.encode())
                if mark:  # other text, also before it, is output of a login shell
                    return answer
        finally:
            alarm.cancel()
        status = self.process.wait()
        what = f"it exited without an answer, code {status}"
        if status == -signal.SIGKILL:
            what = f"timed out: no answer in {self.timeout_s:g} s"
        raise NoAnswer(self._reason() or what)

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
