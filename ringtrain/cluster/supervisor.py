"""Runs a plan and stays with it: placement, output, first failure, clean-up.

Every host of the job gets a host agent (host_agent.py), this one as well. Agents look at their hosts before anything
starts, pass signals on, and end what is left, also when this process is killed. Between them runs the launcher's
command. What ranks report on standard error (ringtrain.protocol.failures) is taken out of the stream.
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
SETTLE_S = 0.5  # after a rank in the wrong place: so that the others are in the table as well
SWEEP_S = 7.0
LOST_S = 30.0
CONNECTING = 32  # ssh at a time
# Before a host is asked again whose sshd, or the bastion before it, has too many connections that begin; then twice as
# long each time, while fewer are begun at a time.
AGAIN_S, MAX_TRIES, MIN_CONNECTING = 1.0, 5, 8
TURNED_AWAY = re.compile(r"[a-z]+_exchange_identification: |banner exchange")
CLOSED = re.compile(r"Connection (closed|reset) by ")
COMPARE_S = 0.5  # from one look at where ranks are to the next
ENDING = (signal.SIGTERM, signal.SIGHUP)  # whoever sends one of these will not come back to send another
SIGNALS = (signal.SIGINT, signal.SIGUSR1, *ENDING)
# With its launcher's tag, to the end of the line; before it another rank may have written, and not ended its line.
REPORT = re.compile(rb"(?:\[[^][<>]*\d\](?:<stderr>:? ?| )|\d+: )?%b:.*" % MARK.encode(), re.DOTALL)
# What Open MPI, PRRTE and Hydra say at length when a rank has ended, of which the last line says more.
DIVIDER = re.compile(rb"[-=]{20,}\s*")
REDUNDANT = re.compile(
    rb"Primary job +terminated normally|detected that one or more processes exited|noticed that process"
    rb"|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
)
BLOCK_S = 1.0  # for the rest of a block that has begun


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    """How a job is watched."""

    launcher: str = "mpirun"
    """its name, for messages"""
    start_timeout_s: float = 60
    """for every host to answer, and again for every rank to begin"""
    answer_timeout_s: float = float("inf")
    """for every host to answer, where that is less"""
    grace_s: float = 8
    """after SIGTERM or a closed terminal: for ranks to save and end"""
    over_ssh: bool = True
    """the hosts of the job can be reached by ssh, and are watched; else the launcher's own means must do"""
    watcher: Callable[[str, Job, SupervisorOptions], Supervisor] | None = None
    """makes what stays with the job; None: Supervisor"""

    @property
    def patience_s(self) -> float:
        """Seconds that every host has to answer."""
        return min(self.start_timeout_s, self.answer_timeout_s)


class HostsLost(LaunchError):
    """Hosts do not answer, or not any more, or their ranks do not begin."""

    def __init__(self, hosts: Sequence[str], text: str) -> None:
        super().__init__(text)
        self.hosts = tuple(hosts)


def run(job: Job, planner: Callable[[Job], Plan], terms: SupervisorOptions = SupervisorOptions()) -> exit_cause.Ending:
    """Runs a job on its hosts and waits for its end.

    Args:
        job: what to run where.

    Returns:
        How it ended. The cause has been said last.

    Raises:
        HostsLost: before anything has started: hosts do not answer.
        LaunchError: a host lacks the program.
        PlacementError: ranks are not where the plan has them.
    """
    name = uuid.uuid4().hex
    expected = PlannedPlacement(job.num_ranks, tuple((host.name, host.slots) for host in job.hosts))
    told = {JOB: name, PLAN: expected.to_json()}
    # Ranks of this host would inherit what ranks of other hosts do not get.
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
        # From here on nothing of the job lives, and nobody else writes.
        return watch.conclude(code, terms.launcher, expected, lost)


class Stopped(Exception):
    """A signal ends the job at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class HostAgent:
    """A keeper's process, and what it has said."""

    host: str
    process: subprocess.Popen[bytes]
    ready: bool = False
    swept: bool = False
    closed: bool = False
    """it has ended, and all that it said is read"""
    tries: int = 1
    """with this one"""
    refusal: str = ""
    """the last line of the try before"""
    lines: deque[str] | Any = None
    unfinished: bytes = b""
    """of a line whose end is not read yet"""
    networks: str = ""
    """of its host, see keeper.local_networks"""
    reached: str = ""
    """IPv4 address by which ssh reaches its host; empty: not known"""

    def tell(self, order: str) -> None:
        """Sends a line; a keeper that is gone has swept already, or its host is lost."""
        with contextlib.suppress(OSError):
            os.write(self.process.stdin.fileno(), f"{order}\n".encode())  # type: ignore[union-attr]


def _may_be_let_in_later(lost: HostAgent) -> bool:
    """Whether sshd closed a host's connection before it asked who is there, as beyond its MaxStartups.

    Where it says something first, it has closed the connection for that reason, and will again.
    """
    said = [line for line in lost.lines if line]
    turned_away = any(map(TURNED_AWAY.search, said)) or bool(said and CLOSED.match(said[0]))
    return bool(lost.host) and lost.tries < MAX_TRIES and turned_away


class Supervisor:
    """Stays with one job from before its start until nothing of it is left. A context manager, of the main thread."""

    says_last = True
    """a rank's failure ends the job, whose last line repeats it"""

    def __init__(self, name: str, job: Job, terms: SupervisorOptions) -> None:
        self.name = name
        self.job = job
        self.terms = terms
        # Before signals are taken over: looking up names may take a while, and Ctrl-C shall end it.
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
        # What nohup has set stays: the job outlives its terminal then.
        heard = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in heard}
        # A stopped launcher would not be heard by the keepers, and the job would end.
        self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _keep_alive(self) -> None:
        """Lets the keepers hear us, also while nobody reads what this process writes (Ctrl-S, a pager)."""
        while not self._over.wait(host_agent.BEAT_S):
            self._tell("beat")

    def _receive(self, number: int, frame: object) -> None:
        self._received.append(number)

    # ---- before the start -----------------------------------------------------------------------------------------

    def planned(self, plan: Plan) -> None:
        """Hears what is about to run."""

    def prepare(self) -> None:
        """Reaches every host.

        Raises:
            LaunchError: names the hosts that do not answer, or lack the program, with what ssh said.
        """
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
        """Networks of the job's hosts that lead to no other host."""
        agents = self._agents_of_hosts()
        reached = {each.reached for each in agents if each.reached}
        if not all(each.host for each in agents):
            for address in [*reached]:  # the others reach this host by the addresses that it sends from
                with contextlib.suppress(OSError):
                    reached.add(host_agent.source_address(address))
        return host_agent.local_networks([each.networks for each in agents], reached)

    def check_networks(self, plan: Plan) -> None:
        """Prints which hosts cannot report their networks, where the plan excludes local ones."""
        unknown = [each.host or "this host" for each in self._agents_of_hosts() if not each.networks]
        if unknown and "btl_tcp_if_exclude" in plan.argv:
            say(
                f"networks of {', '.join(unknown[:10])} were not compared (no `ip` there): if ranks do not connect,"
                f" install iproute2 or give --subnet"
            )

    def _agents_of_hosts(self) -> list[HostAgent]:
        """Agents of the job's hosts: this host need not be one of them."""
        elsewhere = {each.host for each in self._keepers}
        own = any(host.name not in elsewhere for host in self.job.hosts)
        return [each for each in self._keepers if each.host or own]

    def _raise_limits(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))  # a keeper takes two

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
            # Out of the terminal's reach: Ctrl-C and a closed terminal are for this process to hand on.
            process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"{host or 'this host'}: {argv[0]} cannot be started here: {error.strerror}") from error
        added = HostAgent(host, process, lines=deque(maxlen=20))
        self._keepers.append(added)
        self._selector.register(process.stdout, selectors.EVENT_READ, added)  # type: ignore[arg-type]
        return added

    def _why(self, lost: HostAgent) -> str:
        """What is wrong with a host that has not become ready, in a line."""
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
        """Starts the launcher's command and stays with it.

        Returns:
            Its exit code, as subprocess has it.
        """
        # In a process group of its own: the terminal's Ctrl-C is for this process, which lets ranks save first.
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
        """Compares where ranks are with where they shall be, while they begin."""
        seats, now = self.reports.seats, time.monotonic()
        # Not for every rank: each comparison looks at all.
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
        """The same, when the launcher has ended."""
        if wrong := difference(expected, self.reports.seats):
            raise PlacementError(wrong)
        if not returncode and len(self.reports.seats) < expected.size:
            _, why = self._who_did_not_begin(expected, f"although {self.terms.launcher} has ended well")
            raise PlacementError(why)

    def _hand_on(self, number: int) -> float:
        """Gives ranks a signal.

        Returns:
            When to end them; no time, unless the sender will not come back.
        """
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
        # A terminal that closes is no reason for ranks to end differently than at SIGTERM.
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
            self._process.send_signal(signal.SIGUSR1)  # which srun hands on; at others it ends the ranks itself
        return time.monotonic() + self.terms.grace_s if limited else float("inf")

    def _keeper_of(self, seat: RankPlacement) -> str:
        """The host of the keeper that can reach a rank's process; empty: the one of this machine."""
        return "" if self._host_of_rank[seat.rank] in self.here else self._host_of_rank[seat.rank]

    def _look_for_lost_hosts(self) -> None:
        for each in self._keepers:
            if each.process.poll() is not None:
                self._poll()
                what = each.host or "the keeper of this host"
                raise HostsLost([each.host], f"lost {what} while it ran: {self._why(each)}")

    def _who_did_not_begin(self, expected: PlannedPlacement, when: str) -> tuple[list[str], str]:
        """The hosts of late ranks, and a sentence."""
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
        """Reads what there is to read; waits for it for a moment."""
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
        """Passes on what is no report."""
        for raw in lines:
            if self.reports.take(raw.decode(errors="replace")):
                before, found = REPORT.subn(b"", raw)
                if not (raw := before if found else b""):
                    continue
            line = raw.decode(errors="replace").removesuffix("\n")
            tagged = exit_cause.rank_of(line)
            if raw.endswith(b"\r"):
                self._show(raw)  # of a progress bar: the next text overwrites it
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
        """Passes on a line of the launcher's, unless it is of a block between dashes that says why the job ended."""
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
        """Reads what the launcher has written before its end; others may hold the pipe open."""
        stream: Any = self._process and self._process.stderr
        with contextlib.suppress(OSError):
            while data := os.read(stream.fileno(), 65536):
                self._take(self._lines.add(data))
        self._take(self._lines.rest())
        self._show_block()
        self._end_line()

    def _end_line(self) -> None:
        """Lets the launcher's own next line begin at the left, also after a progress bar."""
        if self._line_is_open:
            write(b"\n")
        self._line_is_open = False

    # ---- the end --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Leaves nothing of the job on any host that answers; may be called again."""
        if self._process and self._process.poll() is None and not self.terms.over_ssh:
            self._process.terminate()  # a scheduler's launcher ends its ranks when it is told to
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SWEEP_S)
        self._over.set()
        if self._beats.is_alive():
            self._beats.join()
        self._tell("end")
        # A job that has ended well is called lost only when ssh has given its host up, or all patience is over.
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
        """Says why the job ended, last.

        Args:
            returncode: of the launcher, as subprocess has it.
            expected: where ranks were.
            lost: the hosts that the job was ended for.
        """
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
                self._show(raw)  # another rank's, or something else ended the job
        if ending.text:
            say(ending.text)
        return ending

    def _tell(self, order: str) -> None:
        for each in list(self._keepers):
            each.tell(order)
