"""Runs a plan and supervises it: placement, output, first failure, clean-up.

Every host of the job gets a host agent (host_agent.py), this one as well. Agents check their hosts before the start,
forward signals and clean up, also if this process is killed. The launcher's command runs in the meantime. The ranks'
reports on standard error (ringtrain.protocol.failures) are removed from its output.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringtrain.cluster import exit_cause, host_agent
from ringtrain.cluster.environment import withheld
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.processes import find, say, starter, write, written_files
from ringtrain.errors import LaunchError, PlacementError
from ringtrain.protocol.env import JOB, MARK, PLAN
from ringtrain.protocol.placement import PlannedPlacement, RankPlacement, difference
from ringtrain.protocol.reader import Lines, Reader

TICK_S = 0.1
SETTLE_S = 0.5  # after a misplaced rank, so that the table has the others as well
SWEEP_S = 7.0
LOST_S = 30.0
CONNECTING = 32  # concurrent ssh connections that are not ready yet
# Pause before the next try of a host whose sshd, or the bastion before it, has too many unauthenticated connections.
# It doubles with each try, and fewer connections are opened concurrently.
AGAIN_S, MAX_TRIES, MIN_CONNECTING = 1.0, 5, 8
TURNED_AWAY = re.compile(r"[a-z]+_exchange_identification: |banner exchange")
CLOSED = re.compile(r"Connection (closed|reset) by ")
COMPARE_S = 0.5  # between comparisons of placements
ENDING = (signal.SIGTERM, signal.SIGHUP)  # their sender will not send a second one
SIGNALS = (signal.SIGINT, signal.SIGUSR1, *ENDING)
# With the launcher's tag, to the end of the line. Before it may be another rank's text without a line end.
REPORT = re.compile(rb"(?:\[[^][<>]*\d\](?:<stderr>:? ?| )|\d+: )?%b:.*" % MARK.encode(), re.DOTALL)
# Long messages of Open MPI, PRRTE and Hydra about the end of a rank. The job's last line has more information.
DIVIDER = re.compile(rb"[-=]{20,}\s*")
REDUNDANT = re.compile(
    rb"Primary job +terminated normally|detected that one or more processes exited|noticed that process"
    rb"|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
)
BLOCK_S = 1.0  # for the rest of such a block


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    launcher: str = "mpirun"
    """name for messages"""
    start_timeout_s: float = 60
    """for every host to answer, and again for every rank to start"""
    answer_timeout_s: float = float("inf")
    """for every host to answer, if shorter"""
    grace_s: float = 8
    """for ranks to save and exit after SIGTERM or a closed terminal"""
    over_ssh: bool = True
    """supervise the hosts by agents over ssh; otherwise the launcher's own means must suffice"""
    watcher: Callable[[str, Job, SupervisorOptions], Supervisor] | None = None
    """class or function that makes the supervisor; None: Supervisor"""

    @property
    def patience_s(self) -> float:
        """Seconds that every host has to answer."""
        return min(self.start_timeout_s, self.answer_timeout_s)


class HostsLost(LaunchError):
    """Hosts do not answer, or no longer, or their ranks do not start."""

    def __init__(self, hosts: Sequence[str], text: str) -> None:
        super().__init__(text)
        self.hosts = tuple(hosts)


def run(job: Job, planner: Callable[[Job], Plan], terms: SupervisorOptions = SupervisorOptions()) -> exit_cause.Ending:
    """Runs a job on its hosts, waits for its end, prints the exit cause last and returns the result.

    Raises:
        HostsLost: Hosts do not answer, before anything has started.
        LaunchError: A host lacks the program.
        PlacementError: The ranks' placement is not the planned one.
    """
    name = uuid.uuid4().hex
    expected = PlannedPlacement(job.num_ranks, tuple((host.name, host.slots) for host in job.hosts))
    told = {JOB: name, PLAN: expected.to_json()}
    # Otherwise ranks of this host would inherit variables that ranks of other hosts do not get.
    hidden = withheld(job) if terms.over_ssh else ()
    environ = {key: value for key, value in job.environment.items() if key not in hidden} | told
    started = replace(job, command=("sh", "-c", starter(job.hosts), "rank", *job.command), environment=environ)
    plan = planner(started)
    program = find(plan.argv[0], environ)
    with (terms.watcher or Supervisor)(name, job, terms) as watch, written_files(plan, job.files_folder):
        watch.planned(plan)
        code, lost = 0, None
        try:
            watch.prepare()
            plan = planner(replace(started, local_networks=watch.local_networks()))
            watch.check_networks(plan)
            try:
                code = watch.supervise([program, *plan.argv[1:]], {**environ, **plan.env}, expected)
            except HostsLost as error:
                lost = error
        except Stopped as stopped:
            code = -stopped.number
        finally:
            watch.end()
        # No process of the job is left to print anything.
        return watch.conclude(code, terms.launcher, expected, lost)


class Stopped(Exception):
    """A signal stops the job at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class HostAgent:
    """Process of a host agent, and its output."""

    host: str
    process: subprocess.Popen[bytes]
    ready: bool = False
    swept: bool = False
    closed: bool = False
    """has exited, and its output is read"""
    tries: int = 1
    """to connect to the host, this one included"""
    refusal: str = ""
    """last line of the previous try"""
    lines: deque[str] | Any = None
    unfinished: bytes = b""
    networks: str = ""
    """of its host, see host_agent.local_networks"""
    reached: str = ""
    """IPv4 address by which ssh reaches its host; "": not known"""

    def tell(self, order: str) -> None:
        """Sends a line. An agent that is gone has cleaned up already, or its host is lost."""
        with contextlib.suppress(OSError):
            os.write(self.process.stdin.fileno(), f"{order}\n".encode())  # type: ignore[union-attr]


def _may_be_let_in_later(lost: HostAgent) -> bool:
    """Whether sshd closed a connection before authentication, as beyond its MaxStartups, so that another try may help.

    If it sent a message first, it will refuse the next connection for the same reason.
    """
    said = [line for line in lost.lines if line]
    turned_away = any(map(TURNED_AWAY.search, said)) or bool(said and CLOSED.match(said[0]))
    return bool(lost.host) and lost.tries < MAX_TRIES and turned_away


class Supervisor:
    """Supervisor of one job, from before its start to its clean-up. A context manager for the main thread."""

    says_last = True
    """a rank's failure ends the job, and the job's last line repeats it"""

    def __init__(self, name: str, job: Job, terms: SupervisorOptions) -> None:
        self.name = name
        self.job = job
        self.terms = terms
        # Before the signal handlers are installed: looking up names may take a while, and Ctrl-C must end it.
        hosts = [host.name for host in job.hosts] if terms.over_ssh else []
        self.here = host_agent.here(hosts) if job.here is None else job.here
        self._host_of_rank = [host.name for host in job.hosts for _ in range(host.slots)]
        self.reports = Reader(name)
        self.tails: dict[int, deque[str]] = {}
        self.said_by_launcher: deque[str] = deque(maxlen=200)
        self.stopped_by = 0
        self.silent: list[str] = []
        self.boxes: dict[int, tuple[int, str]] = {}
        self.out_of_memory: set[str] = set()
        self._received: list[int] = []
        self._keepers: list[HostAgent] = []
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = Lines(MARK.encode())
        self._line_is_open = False
        self._block: list[bytes] = []
        self._block_since = 0.0
        self._repeated: list[tuple[str, bytes]] = []
        self._num_seats, self._compared_s, self._wrong_since = 0, 0.0, 0.0
        self._before: dict[int, Any] = {}
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._keep_alive, daemon=True)

    def __enter__(self) -> Supervisor:
        # SIGHUP stays ignored under nohup: the job then outlives its terminal.
        heard = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in heard}
        # A stopped launcher would send no heartbeats, and the agents would end the job.
        self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _keep_alive(self) -> None:
        """Sends heartbeats to the agents, also while the terminal blocks this process's output (Ctrl-S, a pager)."""
        while not self._over.wait(host_agent.BEAT_S):
            self._tell("beat")

    def _receive(self, number: int, frame: object) -> None:
        self._received.append(number)

    # ---- before the start -----------------------------------------------------------------------------------------

    def planned(self, plan: Plan) -> None:
        """Called with the plan before the start."""

    def prepare(self) -> None:
        """Starts an agent on every host. Raises LaunchError if one does not answer or lacks the program."""
        self._raise_limits()
        names = [host.name for host in self.job.hosts] if self.terms.over_ssh else []
        waiting = deque(["", *(host for host in names if host not in self.here)])
        looks_here = len(waiting) <= len(names) or not names
        deadline = time.monotonic() + self.terms.patience_s
        refused: dict[str, HostAgent] = {}
        max_connecting, pause_until = CONNECTING, 0.0
        while waiting or not all(each.ready for each in self._keepers):
            num_connecting = sum(not each.ready for each in self._keepers)
            while waiting and num_connecting < max_connecting and time.monotonic() > pause_until:
                host = waiting.popleft()
                started = self._start_keeper(host, look=bool(host) or looks_here)
                if before := refused.pop(host, None):
                    started.tries, started.refusal = before.tries + 1, before.lines[-1]
                num_connecting += 1
            self._poll()
            if self._received:
                self.stopped_by = self._received[0]
                raise Stopped(self.stopped_by)
            failed = [each for each in self._keepers if not each.ready and each.process.poll() is not None]
            silent = [each for each in self._keepers if not each.ready] if time.monotonic() > deadline else []
            if failed or silent:
                self._poll()
                for each in [each for each in failed if _may_be_let_in_later(each)]:
                    now, pause_s = time.monotonic(), AGAIN_S * 2 ** (each.tries - 1)
                    if now + pause_s < deadline:
                        if now > pause_until:
                            max_connecting = max(MIN_CONNECTING, max_connecting // 2)
                        refused[each.host], pause_until = each, max(pause_until, now + pause_s)
                        failed.remove(each)
                        self._keepers.remove(each)
                        self._let_go(each)
                        waiting.append(each.host)
            if failed or silent:
                why = "; ".join(self._why(each) for each in failed or silent)
                if any(f"{host_agent.SAYS}lacks" in line for each in failed for line in each.lines):
                    raise LaunchError(why)
                raise HostsLost([each.host for each in failed or silent], why)
        self._refuse_other_versions()

    def local_networks(self) -> tuple[str, ...]:
        """Networks of the job's hosts that connect no hosts."""
        agents = self._agents_of_hosts()
        reached = {each.reached for each in agents if each.reached}
        if not all(each.host for each in agents):
            for address in [*reached]:  # the others reach this host by the addresses that it sends from
                with contextlib.suppress(OSError):
                    reached.add(host_agent.source_address(address))
        return host_agent.local_networks([each.networks for each in agents], reached)

    def check_networks(self, plan: Plan) -> None:
        """Prints which hosts cannot report their networks, if the plan excludes local ones."""
        unknown = [each.host or "this host" for each in self._agents_of_hosts() if not each.networks]
        if unknown and "btl_tcp_if_exclude" in plan.argv:
            say(
                f"networks of {', '.join(unknown[:10])} were not compared (no `ip` there): if ranks do not connect,"
                f" install iproute2 or give --subnet"
            )

    def _agents_of_hosts(self) -> list[HostAgent]:
        """Agents of the job's hosts, which need not include this one."""
        elsewhere = {each.host for each in self._keepers}
        own = any(host.name not in elsewhere for host in self.job.hosts)
        return [each for each in self._keepers if each.host or own]

    def _raise_limits(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))  # an agent takes two

    def _start_keeper(self, host: str, look: bool) -> HostAgent:
        environ, job = self.job.environment, self.job
        argv = host_agent.argv(
            host,
            self.name,
            job.command if look else (),
            Path(job.working_directory or Path.cwd()),
            environ.get("PATH", os.defpath),
            environ.get("PYTHONPATH", ""),
            timeout_s=self.terms.patience_s,
            port=job.ssh_port,
        )
        pipe = subprocess.PIPE
        try:
            # In its own session: signals of the terminal reach this process only, which forwards them.
            process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"{host or 'this host'}: {argv[0]} cannot be started here: {error.strerror}") from error
        added = HostAgent(host, process, lines=deque(maxlen=20))
        self._keepers.append(added)
        self._selector.register(process.stdout, selectors.EVENT_READ, added)  # type: ignore[arg-type]
        return added

    def _why(self, lost: HostAgent) -> str:
        """Message about a host that has not become ready."""
        host = lost.host or "this host"
        if any(line.startswith(f"{host_agent.SAYS}lacks") for line in lost.lines):
            if any("lacks-folder" in line for line in lost.lines):
                return f"{host} has no folder {self.job.working_directory}, where ranks start: make it the same there"
            return f"{host} has no {self.job.command[0]!r} on PATH={self.job.environment.get('PATH', '')}: install it"
        said = [line for line in lost.lines if line and not line.startswith(("@", host_agent.SAYS))]
        silent = lost.refusal or f"no word in {self.terms.patience_s:g} s"
        why = next((line for line in reversed(said) if not CLOSED.match(line)), said[-1] if said else silent)
        return f"{host} does not answer: {why}"

    def _refuse_other_versions(self) -> None:
        versions = {
            each.host or "this host": line.split()[2]
            for each in self._keepers
            for line in each.lines
            if line.startswith(f"{host_agent.SAYS}ready") and len(line.split()) > 2
        }
        for host, version in versions.items():
            if version == "none":
                raise LaunchError(
                    f"{host}: its {self.job.command[0]} has no ringtrain: set it up there, or start from a folder and"
                    f" with a PATH that all hosts share"
                )
            first, other = next(iter(versions.items()))
            if version != other:
                raise LaunchError(f"{host} has ringtrain {version}, {first} has {other}: install the same everywhere")

    # ---- while it runs --------------------------------------------------------------------------------------------

    def supervise(self, argv: Sequence[str], environ: Mapping[str, str], expected: PlannedPlacement) -> int:
        """Runs the launcher's command to its end, and returns its code as in subprocess."""
        # In its own process group: the terminal's Ctrl-C reaches this process only, which lets ranks save first.
        process = self._process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0
        )
        stream: Any = process.stderr
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, selectors.EVENT_READ, None)
        began, end_at = time.monotonic(), float("inf")
        while process.poll() is None:
            self._poll()
            now = time.monotonic()
            if self._received:
                end_at = min(end_at, self._hand_on(self._received.pop(0)))
            if now > end_at:
                raise Stopped(self.stopped_by)
            self._look_for_lost_hosts()
            self._look_at(expected, began)
        self._drain()
        self._look_back_at(expected, process.returncode)
        return process.returncode

    def _look_at(self, expected: PlannedPlacement, began_s: float) -> None:
        """Compares planned and actual placement while ranks start."""
        seats, now = self.reports.seats, time.monotonic()
        # Not after every rank, since each comparison covers all.
        is_due = now > self._compared_s + COMPARE_S or len(seats) >= expected.size
        if len(seats) > self._num_seats and not self._wrong_since and is_due:
            self._num_seats, self._compared_s = len(seats), now
            self._wrong_since = now if difference(expected, seats) else 0.0
        if self._wrong_since and (now > self._wrong_since + SETTLE_S or len(seats) >= expected.size):
            raise PlacementError(difference(expected, seats))
        if len(seats) < expected.size and now > began_s + self.terms.start_timeout_s and not self.stopped_by:
            hosts, why = self._who_did_not_begin(expected, f"after {self.terms.start_timeout_s:g} s")
            raise HostsLost(hosts, f"{why}, or give more time: --start-timeout")

    def _look_back_at(self, expected: PlannedPlacement, returncode: int) -> None:
        """Compares them again after the launcher has exited."""
        if wrong := difference(expected, self.reports.seats):
            raise PlacementError(wrong)
        if not returncode and len(self.reports.seats) < expected.size:
            _, why = self._who_did_not_begin(expected, f"although {self.terms.launcher} has ended well")
            raise PlacementError(why)

    def _hand_on(self, number: int) -> float:
        """Forwards a signal to the ranks; returns when to kill them (time.monotonic()), inf if it may be repeated."""
        known = [seat for seat in self.reports.seats if seat.process]
        if self.stopped_by or not known:
            self.stopped_by = self.stopped_by or number
            raise Stopped(self.stopped_by)
        self.stopped_by = number
        name = signal.Signals(number).name
        limited = number in ENDING
        then = f"killed in {self.terms.grace_s:g} s (--grace)" if limited else "once more ends them at once"
        self._end_line()
        say(f"{name}: ranks may save and end; {then}")
        # Ranks treat a closed terminal like SIGTERM.
        passed = int(signal.SIGTERM if limited else number)
        if self.terms.over_ssh:
            by_host: dict[str, list[str]] = {}
            for seat in known:
                process = self.reports.processes.get((seat.host, seat.process), seat.process)
                by_host.setdefault(self._keeper_of(seat), []).append(f"{process}:{seat.process}")
            for each in self._keepers:
                processes = by_host.get(each.host, [])
                if processes:
                    each.tell(f"signal {passed} {' '.join(processes)}")
        elif self._process:
            self._process.send_signal(signal.SIGUSR1)  # srun forwards it; at other signals it ends the ranks itself
        return time.monotonic() + self.terms.grace_s if limited else float("inf")

    def _keeper_of(self, seat: RankPlacement) -> str:
        """Host of the agent that can reach a rank's process; "": this machine."""
        return "" if self._host_of_rank[seat.rank] in self.here else self._host_of_rank[seat.rank]

    def _look_for_lost_hosts(self) -> None:
        for each in self._keepers:
            if each.process.poll() is not None:
                self._poll()
                what = each.host or "the keeper of this host"
                raise HostsLost([each.host], f"lost {what} while it ran: {self._why(each)}")

    def _who_did_not_begin(self, expected: PlannedPlacement, when: str) -> tuple[list[str], str]:
        """Hosts of ranks that have not started, and a message."""
        begun = {seat.rank for seat in self.reports.seats}
        seats = expected.seats()
        late = [rank for rank in range(expected.size) if rank not in begun]
        hosts = list(dict.fromkeys(seats[rank][0] for rank in late)) if seats else []
        where = f", on {', '.join(hosts[:10])}" if hosts else ""
        return hosts, (
            f"{len(late)} of {expected.size} ranks have not begun {when}{where}: look at what"
            f" {self.terms.launcher} says above"
        )

    def _poll(self) -> None:
        """Reads available output, waiting up to TICK_S."""
        for key, _ in self._selector.select(TICK_S):
            data = os.read(key.fd, 65536)
            if not data:
                self._selector.unregister(key.fileobj)
                if key.data is not None:
                    self._hear(key.data, b"\n")
                    key.data.closed = True
            elif key.data is None:
                self._take(self._lines.add(data))
            else:
                self._hear(key.data, data)
        self._take(self._lines.late())

    def _hear(self, speaker: HostAgent, data: bytes) -> None:
        whole, _, speaker.unfinished = (speaker.unfinished + data).rpartition(b"\n")
        for line in whole.decode(errors="replace").splitlines():
            speaker.lines.append(line.strip())
            speaker.ready = speaker.ready or line.startswith(f"{host_agent.SAYS}ready")
            speaker.swept = speaker.swept or line.startswith(f"{host_agent.SAYS}swept")
            if line.startswith(f"{host_agent.SAYS}box "):
                _, rank, step, phase = [*line.split(maxsplit=3), "", "", ""][:4]
                with contextlib.suppress(ValueError):
                    self.boxes[int(rank)] = int(step), phase.strip()
            if line.startswith(f"{host_agent.SAYS}networks"):
                speaker.networks = " ".join(line.split()[1:])
            if speaker.host and line.startswith(f"{host_agent.SAYS}reached"):
                speaker.reached = "".join(line.split()[1:])
            if line.startswith(f"{host_agent.SAYS}memory"):
                self.out_of_memory.add(speaker.host)

    def _take(self, lines: Sequence[bytes]) -> None:
        """Parses reports, and prints the other lines."""
        for raw in lines:
            if self.reports.take(raw.decode(errors="replace")):
                before, found = REPORT.subn(b"", raw)
                if not (raw := before if found else b""):
                    continue
            line = raw.decode(errors="replace").removesuffix("\n")
            tagged = exit_cause.rank_of(line)
            if raw.endswith(b"\r"):
                self._show(raw)  # progress bar: the next text overwrites it
            elif tagged is None:
                self.said_by_launcher.append(line)
                self._show_unless_redundant(raw)
            else:
                self.tails.setdefault(tagged[0], deque(maxlen=exit_cause.TAIL_LINES)).append(tagged[1])
                failure = self.reports.failures.get(tagged[0])
                if self.says_last and failure and tagged[1].strip() in failure.lines_for_a_person():
                    self._repeated.append((failure.text, raw))
                else:
                    self._show(raw)
        if self._block and time.monotonic() > self._block_since + BLOCK_S:
            self._show_block()

    def _show(self, raw: bytes) -> None:
        write(raw)
        self._line_is_open = not raw.endswith(b"\n")

    def _show_unless_redundant(self, raw: bytes) -> None:
        """Prints a line of the launcher, unless it is in a block between dashes about the job's end."""
        is_divider = DIVIDER.fullmatch(raw) is not None
        if not self._block and not is_divider:
            return self._show(raw)
        self._block_since = time.monotonic()
        self._block.append(raw)
        if is_divider and len(self._block) > 1 and REDUNDANT.search(b"".join(self._block)):
            self._block.clear()
        elif is_divider and len(self._block) > 1:
            self._show_block()

    def _show_block(self) -> None:
        for raw in self._block:
            self._show(raw)
        self._block.clear()

    def _drain(self) -> None:
        """Reads the rest of the launcher's output without waiting: other processes may hold the pipe open."""
        stream: Any = self._process and self._process.stderr
        with contextlib.suppress(OSError):
            while data := os.read(stream.fileno(), 65536):
                self._take(self._lines.add(data))
        self._take(self._lines.rest())
        self._show_block()
        self._end_line()

    def _end_line(self) -> None:
        """Makes the launcher's next line begin at the left, also after a progress bar."""
        if self._line_is_open:
            write(b"\n")
        self._line_is_open = False

    # ---- the end --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Cleans up on every host that answers; may be called again."""
        if self._process and self._process.poll() is None and not self.terms.over_ssh:
            self._process.terminate()  # a scheduler's launcher then ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SWEEP_S)
        self._over.set()
        if self._beats.is_alive():
            self._beats.join()
        self._tell("end")
        # After success a host counts as lost only if ssh has given it up, or after LOST_S.
        ended_well = self._process is not None and self._process.poll() == 0
        deadline = time.monotonic() + (LOST_S if ended_well else SWEEP_S)
        while time.monotonic() < deadline and not all(each.swept or each.closed for each in self._keepers):
            self._poll()
        self.silent += [each.host for each in self._keepers if each.host and each.ready and not each.swept]
        for each in self._keepers:
            self._let_go(each)
        self._keepers = []
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process:
            self._drain()

    def _let_go(self, each: HostAgent) -> None:
        each.process.kill()
        each.process.wait()
        with contextlib.suppress(OSError, ValueError, KeyError):
            self._selector.unregister(each.process.stdout)  # type: ignore[arg-type]
        for pipe in filter(None, (each.process.stdin, each.process.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()

    def conclude(
        self, returncode: int, launcher: str, expected: PlannedPlacement, lost: HostsLost | None = None
    ) -> exit_cause.Ending:
        """Prints the exit cause last and returns the result. lost: Hosts for which the job was stopped."""
        words = "\n".join(self.said_by_launcher)
        decided = exit_cause.decide(returncode, self.reports, words, self.tails, launcher, self.silent)
        if lost is not None:
            decided = exit_cause.ExitCause(2, str(lost))
        elif self.stopped_by and decided.exit_code:
            decided = exit_cause.ExitCause(128 + self.stopped_by, f"stopped by {signal.Signals(self.stopped_by).name}")
        lost_hosts = lost.hosts if lost else tuple(self.silent) if decided.rank < 0 else ()
        seats = expected.seats()
        hosts = lost_hosts or ((seats[decided.rank][0],) if 0 <= decided.rank < len(seats) else ())
        boxes = self.reports.boxes | self.boxes
        furthest = max(boxes.values(), default=(-1, ""))
        step, phase = boxes.get(decided.rank, (furthest[0], ""))
        here = {
            host for host in hosts if host in self.out_of_memory or ("" in self.out_of_memory and host in self.here)
        }
        out_of_memory = bool(here) and decided.exit_code == 128 + signal.SIGKILL
        memory = "; its host's kernel kills processes for want of memory" * out_of_memory
        ending = exit_cause.Ending(
            decided.exit_code,
            decided.text + memory,
            exit_cause.HOST_LOST if lost_hosts else decided.kind,
            rank=decided.rank,
            hosts=hosts,
            global_step=step,
            phase=phase,
            run_name=self.reports.run_name,
            stopped=bool(self.stopped_by),
            unswept=tuple(self.silent),
            out_of_memory=out_of_memory,
        )
        for text, raw in self._repeated:
            if text not in ending.text:
                self._show(raw)  # another rank's failure, or another exit cause
        if ending.text:
            say(ending.text)
        return ending

    def _tell(self, order: str) -> None:
        for each in list(self._keepers):
            each.tell(order)
