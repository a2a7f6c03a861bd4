"""Runs a plan and supervises it: placement, output, first failure, clean-up.

Every host of the job gets a host agent (host_agent.py), this one as well. Agents check their hosts before the start,
forward signals and clean up, also if this process is killed. The launcher's command runs in the meantime. The ranks'
reports on standard error (ringtrain.protocol.failures) are removed from its output.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ringtrain.cluster import exit_cause, host_agent
from ringtrain.cluster.agents import HostAgent, HostAgents, HostsLost
from ringtrain.cluster.exit_cause import JobResult
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.output import Output
from ringtrain.cluster.processes import find, say, written_files
from ringtrain.errors import LaunchError, PlacementError
from ringtrain.protocol.placement import RankPlacement, difference
from ringtrain.protocol.reader import Reader

TICK_S = 0.1
SETTLE_S = 0.5  # after a misplaced rank, so that the table has the others as well
CLEAN_UP_S = 7.0
LOST_S = 30.0
COMPARE_S = 0.5  # between comparisons of placements
CHECK_S = 1.0  # between looks at the processes of all agents
ENDING = (signal.SIGTERM, signal.SIGHUP)  # their sender will not send a second one
SIGNALS = (signal.SIGINT, signal.SIGUSR1, *ENDING)
MAX_SHOWN = 10
"""names of hosts in a message"""


def run(supervisor: Supervisor, planner: Callable[[Job], Plan]) -> JobResult:
    """Runs a job and prints the exit cause last. Raises HostsLost, LaunchError (before a start) or PlacementError."""
    with supervisor:
        code, lost = 0, None
        try:
            plan = supervisor.ready(planner)
            try:
                code = supervisor.supervise(plan)
            except HostsLost as error:
                lost = error
        except Stopped as stopped:
            code = -stopped.number
        finally:
            supervisor.end()
        # No process of the job is left to print anything.
        result = supervisor.conclude(code, lost)
    return replace(result, stopped=result.stopped or supervisor.was_signaled)


class Stopped(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Supervisor:
    """Supervisor of one job, from before its start to its clean-up. A context manager for the main thread."""

    defers_failures = True
    """a rank's failure ends the job, and the job's last line repeats it"""

    def __init__(self, job: Job, options: LaunchOptions, answer_timeout_s: float = float("inf")) -> None:
        """answer_timeout_s: For every host to answer, if shorter than the options' start_timeout."""
        self.job = job
        self.options = options
        self.over_ssh = options.started_by.over_ssh
        """agents over ssh supervise the hosts; otherwise the launcher's own means must suffice"""
        self.planned_placement = job.planned
        self.here = job.here
        self.reports = Reader(job.id)
        self.output = Output(self.reports, self.defers_failures)
        self.stopped_by = 0
        self.lost_hosts: list[str] = []
        """that did not confirm the clean-up"""
        self._host_of_rank = [host.name for host in job.hosts for _ in range(host.slots)]
        self._received: list[int] = []
        self._received_s = 0.0
        """arrival of the last signal; time.monotonic()"""
        self._told: list[HostAgent] = []
        """agents that hand the signal on"""
        self._selector = selectors.DefaultSelector()
        self.agents = HostAgents(job, self._selector, min(options.start_timeout, answer_timeout_s))
        self._process: subprocess.Popen[bytes] | None = None
        self._files = contextlib.ExitStack()
        """of the plan, while it runs"""
        self._num_compared, self._compared_s, self._wrong_since_s = 0, 0.0, 0.0
        self._agents_checked_s = 0.0
        self._handlers: dict[int, Any] = {}
        self._over = threading.Event()
        self._heartbeats = threading.Thread(target=self._keep_alive, daemon=True)

    def __enter__(self) -> Supervisor:
        # SIGHUP stays ignored under nohup: the job then outlives its terminal.
        caught = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._receive) for number in caught}
        # A stopped launcher would send no heartbeats, and the agents would end the job.
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _keep_alive(self) -> None:
        """Sends heartbeats to the agents, also while the terminal blocks this process's output (Ctrl-S, a pager)."""
        while not self._over.wait(host_agent.BEAT_S):
            self.agents.send("beat")

    def _receive(self, number: int, frame: object) -> None:
        self._received.append(number)
        self._received_s = time.monotonic()

    @property
    def was_signaled(self) -> bool:
        """Whether a signal came while the job was ending. It prevents a restart."""
        return bool(self._received)

    # ---- before the start -----------------------------------------------------------------------------------------

    def ready(self, planner: Callable[[Job], Plan]) -> Plan:
        """Readies the hosts, and writes the files of the plan that it returns."""
        plan = planner(self.job)
        find(plan.argv[0], self.job.environment)
        self._files.enter_context(written_files(plan, self.job.files_folder))
        self._heartbeats.start()
        self.prepare(plan)
        return planner(replace(self.job, local_networks=self.agents.local_networks()))

    def prepare(self, plan: Plan) -> None:
        """Starts an agent on every host. Raises LaunchError if one does not answer or lacks the program."""
        names = [host.name for host in self.job.hosts] if self.over_ssh else []
        others = [name for name in names if name not in self.here]
        has_ranks_here = len(others) < len(names) or not names
        self.agents.connect(others, has_ranks_here, self._poll_unless_stopped)

    # ---- while it runs --------------------------------------------------------------------------------------------

    def supervise(self, plan: Plan) -> int:
        """Runs the launcher's command to its end, and returns its code as in subprocess."""
        process = self._start(plan)
        began_s, end_at_s = time.monotonic(), float("inf")
        while process.poll() is None:
            self._poll()
            now = time.monotonic()
            if self._received:
                end_at_s = min(end_at_s, self._forward(self._received.pop(0)))
            if now > end_at_s or self._nothing_catches():
                raise Stopped(self.stopped_by)
            if now > self._agents_checked_s + CHECK_S:
                self._agents_checked_s = now
                self._check_agents()
            self._check_start(began_s)
        stream: Any = process.stderr
        self.output.drain(stream.fileno())
        self._check_end(process.returncode)
        return process.returncode

    def _start(self, plan: Plan) -> subprocess.Popen[bytes]:
        """Starts the launcher's command."""
        # In its own process group: the terminal's Ctrl-C reaches this process only, which lets ranks save first.
        process = self._process = subprocess.Popen(
            plan.argv,
            env={**self.job.environment, **plan.env},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        stream: Any = process.stderr
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, selectors.EVENT_READ, None)
        return process

    def _check_start(self, began_s: float) -> None:
        """Compares planned and actual placement while ranks start."""
        planned, ranks, now = self.planned_placement, self.reports.ranks, time.monotonic()
        # Not after every rank, since each comparison covers all.
        is_due = now > self._compared_s + COMPARE_S or len(ranks) >= planned.size
        if len(ranks) > self._num_compared and not self._wrong_since_s and is_due:
            self._num_compared, self._compared_s = len(ranks), now
            self._wrong_since_s = now if difference(planned, ranks) else 0.0
        if self._wrong_since_s and (now > self._wrong_since_s + SETTLE_S or len(ranks) >= planned.size):
            raise PlacementError(difference(planned, ranks))
        if len(ranks) < planned.size and now > began_s + self.options.start_timeout and not self.stopped_by:
            hosts, why = self._missing_ranks(f"within {self.options.start_timeout:g} s")
            raise HostsLost(hosts, f"{why}, or raise --start-timeout")

    def _check_end(self, returncode: int) -> None:
        """Compares planned and actual placement again, after the launcher has exited."""
        wrong = difference(self.planned_placement, self.reports.ranks)
        if wrong:
            raise PlacementError(wrong)
        if not returncode and len(self.reports.ranks) < self.planned_placement.size:
            _, why = self._missing_ranks(f"although {self.options.launcher} exited with code 0")
            raise PlacementError(why)

    def _missing_ranks(self, when: str) -> tuple[list[str], str]:
        size, placements = self.planned_placement.size, self.planned_placement.ranks()
        started = {rank.rank for rank in self.reports.ranks}
        missing = [rank for rank in range(size) if rank not in started]
        hosts = list(dict.fromkeys(placements[rank][0] for rank in missing)) if placements else []
        where = f", on {', '.join(hosts[:MAX_SHOWN])}" if hosts else ""
        return hosts, (
            f"{len(missing)} of {size} ranks did not start {when}{where}: check {self.options.launcher}'s output above"
        )

    def _forward(self, number: int) -> float:
        """Forwards a signal to the ranks; returns when to kill them (time.monotonic()), inf if it may be repeated."""
        known = [rank for rank in self.reports.ranks if rank.process]
        is_final = number in ENDING
        # Jupyter interrupts a kernel right before it kills it: ranks that save because of the first keep the grace.
        is_first = not self.stopped_by
        may_save = is_first or (is_final and self.stopped_by not in ENDING)
        if not known or not may_save:
            if is_first:
                self.stopped_by = number
            raise Stopped(self.stopped_by)
        self.stopped_by = number
        then = f"killed in {self.options.grace:g} s (--grace)" if is_final else "a second one ends them at once"
        self.output.end_line()
        say(f"{signal.Signals(number).name}: ranks may save and exit; {then}")
        if not is_first:  # ranks know already, and another signal might end one that saves
            return self._received_s + self.options.grace
        # Ranks treat a closed terminal like SIGTERM.
        forwarded = int(signal.SIGTERM if is_final else number)
        if self.over_ssh:
            self._signal(known, forwarded)
        elif self._process:
            self._process.send_signal(signal.SIGUSR1)  # srun forwards it; at other signals it ends the ranks itself
        return self._received_s + self.options.grace if is_final else float("inf")

    def _signal(self, ranks: Sequence[RankPlacement], number: int) -> None:
        """Sends a signal to ranks that catch it: others would exit, and launchers then end the ranks that save."""
        by_host: dict[str, list[str]] = {}
        for rank in ranks:
            process = self.reports.processes.get((rank.host, rank.process), rank.process)
            by_host.setdefault(self._agent_host(rank), []).append(f"{process}:{rank.process}")
        self._told = [agent for agent in self.agents.members if agent.host in by_host]
        for agent in self._told:
            agent.send(f"signal {number} {' '.join(by_host[agent.host])}")

    def _nothing_catches(self) -> bool:
        """Returns whether all hosts have answered that no rank catches the signal that was sent: none can save."""
        answers = [agent.num_signaled for agent in self._told if not agent.has_exited]
        return bool(answers) and not any(answers)

    def _agent_host(self, rank: RankPlacement) -> str:
        """Host of the agent that can reach a rank's process; "": this machine."""
        host = self._host_of_rank[rank.rank] if rank.rank < len(self._host_of_rank) else ""
        return "" if host in self.here else host

    def _check_agents(self) -> None:
        for agent in self.agents.members:
            if agent.has_exited:
                self._poll()
                name = agent.host or "the host agent of this host"
                raise HostsLost([agent.host], f"lost {name} while the job ran: {self.agents.why_lost(agent)}")

    def _poll(self) -> None:
        """Reads available output, waiting up to TICK_S."""
        for key, _ in self._selector.select(TICK_S):
            data = os.read(key.fd, 65536)
            if not data:
                self._selector.unregister(key.fileobj)
                self._agents_checked_s = 0.0  # it has exited, or is about to
            if key.data is not None:
                self.agents.read(key.data, data)
            elif data:
                self.output.add(data)
        self.output.add(b"")

    def _poll_unless_stopped(self) -> None:
        self._poll()
        if self._received:
            self.stopped_by = self._received[0]
            raise Stopped(self.stopped_by)

    # ---- the end --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Cleans up on every host that answers; may be called again."""
        if self._process and self._process.poll() is None and not self.over_ssh:
            self._process.terminate()  # a scheduler's launcher then ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLEAN_UP_S)
        self._over.set()
        if self._heartbeats.is_alive():
            self._heartbeats.join()
        agents = self.agents.members
        is_starting = False
        if self._process and self._process.poll() is None:
            is_starting = len(self.reports.ranks) < self.planned_placement.size
            if is_starting and self.options.launcher == "mpirun":
                self._process.kill()  # it would start ranks where agents have cleaned up
                self._process.wait()
                is_starting = any(host.name not in self.here for host in self.job.hosts)
        with contextlib.suppress(LaunchError):
            self.agents.end(is_starting)
        # After success a host counts as lost only if ssh has given it up, or after LOST_S.
        succeeded = self._process is not None and self._process.poll() == 0
        deadline = time.monotonic() + (LOST_S if succeeded else CLEAN_UP_S)
        with contextlib.suppress(LaunchError):
            self._wait_for_clean_up(agents, min(deadline, time.monotonic() + CLEAN_UP_S), self.agents.replace_killed)
        # A host whose agent was killed had left before a job succeeded: that it does not answer now is no loss.
        counted = [agent for agent in agents if not (succeeded and agent.is_second)]
        self._wait_for_clean_up(counted, deadline)
        self.lost_hosts += [agent.host for agent in counted if agent.host and agent.ready and not agent.cleaned_up]
        for agent in list(agents):
            self.agents.drop(agent)
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process:
            stream: Any = self._process.stderr
            self.output.drain(stream.fileno())
        self._files.close()

    def _wait_for_clean_up(
        self, agents: Sequence[HostAgent], deadline: float, then: Callable[[], None] = lambda: None
    ) -> None:
        while time.monotonic() < deadline and not all(agent.cleaned_up or agent.closed for agent in agents):
            self._poll()
            then()

    def conclude(self, returncode: int, lost: HostsLost | None = None) -> JobResult:
        """Prints the exit cause last and returns the result. lost: Hosts for which the job was stopped."""
        text, launcher = "\n".join(self.output.launcher_lines), self.options.launcher
        result = exit_cause.decide(returncode, self.reports, text, self.output.tails, launcher, self.lost_hosts)
        if not result.exit_code:
            result = JobResult(0, exit_cause.without_init(self.job.num_ranks, self.reports))
        if lost is not None:
            result = JobResult(2, str(lost))
        elif self.stopped_by and result.exit_code:
            result = JobResult(128 + self.stopped_by, f"stopped by {signal.Signals(self.stopped_by).name}")
        result = self._with_facts(result, lost)
        self.output.show_others(result.rank)
        if result.text:
            say(result.last or result.text)
        return result

    def _with_facts(self, result: JobResult, lost: HostsLost | None) -> JobResult:
        """The result with what is known besides its cause: hosts, the furthest step, lack of memory."""
        # Hosts that were lost, else that of the rank which failed.
        kind, placements = result.kind, self.planned_placement.ranks()
        hosts: tuple[str, ...] = ()
        if lost is not None:
            hosts = tuple(lost.hosts)
        elif result.rank < 0:
            hosts = tuple(self.lost_hosts)
        if hosts:
            kind = exit_cause.HOST_LOST
        elif 0 <= result.rank < len(placements):
            hosts = (placements[result.rank][0],)

        status = self.reports.status | self.agents.status
        furthest = max(status.values(), default=(-1, ""))
        step, phase = status.get(result.rank, (furthest[0], ""))

        text = result.text
        agents = {"" if host in self.here else host for host in hosts}
        out_of_memory = result.exit_code == 128 + signal.SIGKILL and bool(agents & self.agents.out_of_memory)
        if out_of_memory:
            text += "; the kernel of its host killed processes for lack of memory"
        return replace(
            result,
            text=text,
            kind=kind,
            hosts=hosts,
            global_step=step,
            phase=phase,
            run_name=self.reports.run_name,
            stopped=bool(self.stopped_by),
            not_cleaned_up=tuple(self.lost_hosts),
            out_of_memory=out_of_memory,
        )
