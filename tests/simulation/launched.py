"""A launcher on hosts that die, freeze and lose their network, with signals at any moment: what must hold.

The production code is that of the launcher: supervisor.py, agents.py, exit_cause.py, output.py, restart.py,
the loop of attempts in launch.py, and the reports of ranks with their reader. What it starts (ssh, agents, mpirun,
ranks) is modeled in cluster.py.

Not promised, and left out of what must hold: ranks that start by an order which was under way when mpirun ended and its
host was cut off, or while the launching host was frozen for longer than agents wait (Rank.is_late); hosts whose agent
was killed while no other one could be started there; the exit cause if mpirun hangs at a failure while others start.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import selectors
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from simulation.cluster import KEEP_ALIVE_S, SWEEP_S, Cluster, Machine, Mpirun, Os, Rank, Selector
from simulation.world import World, in_place

from ringtrain.cluster import agents, launch, output, processes, supervisor
from ringtrain.cluster.exit_cause import JobResult
from ringtrain.cluster.host_agent import BEAT_S, LEASE_S
from ringtrain.cluster.hosts import Host as Slots
from ringtrain.cluster.job import Job, Plan, words
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.supervisor import CLEAN_UP_S, ENDING, LOST_S
from ringtrain.errors import RingtrainError
from ringtrain.protocol import reader

REPORTED = ("exception", "config", "reports a stall")
CHAOS_S = 300.0
"""seconds after which the job gets a last SIGTERM"""
LEFT_S = 10.0
"""seconds after a job in which no process is left on reachable hosts, as docs/launching.md promises"""
SLACK_S = 2.0
BY_RANK = re.compile(r"rank (\d+) on (\S+) (?:failed first|was killed|exited first)")
LOST_HOSTS = re.compile(r"lost ((?:host\d+, )*host\d+) while the job ran")
NO_ANSWER = re.compile(r"(host\d+) does not answer")
FAULTS_OF_HOSTS = ("die", "reboot", "freeze", "cut", "cut to", "cut from", "ssh", "agent", "daemon")
FAULTS_OF_RANKS = ("killed", "memory", "hang", "exception", "config", "exit", "sigterm")
FAULTS_OF_LAUNCHER = ("mpirun", "launcher killed", "launcher frozen")
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGTERM twice", "SIGINT twice", "SIGINT and SIGTERM")
STARTING = ("starting hangs", "starting exit 3", "starting exit 0", "starting exit -9")
THEN = ("then SIGTERM", "then SIGINT", "then cut", "then freeze", "then agent", "then die", "then launcher killed")
"""at the next clean-up, or up to 8 s after its beginning"""
KINDS = (*FAULTS_OF_HOSTS, *FAULTS_OF_RANKS, *FAULTS_OF_LAUNCHER, *SIGNALS, *STARTING, *THEN)


class Run:
    """One launch: its options, the faults and signals that it got, and what must hold."""

    was_interrupted = False
    """It got SIGINT while it supervised nothing."""

    def __init__(self, world: World, num_hosts: int) -> None:
        draw = world.random
        self.world, self.cluster = world, Cluster(world)
        self.violation = ""
        self.launcher = world.host("launcher")
        self.handlers: dict[int, Any] = {}
        self.received: list[tuple[float, int]] = []
        """signals that the launcher got, by time"""
        self.faults: list[tuple[float, str]] = []
        self.code: int | None = None
        self.returned_s = float("inf")
        self.was_killed = False
        self.results: list[tuple[Mpirun | None, JobResult]] = []
        self.supervised: Any = None
        """the supervisor whose command runs"""
        self.end_s = float("inf")
        """when the last clean-up began"""
        self.attempt_s = 0.0
        self.then: list[str] = []
        """what happens at the next clean-up"""
        machines = [Machine(self.cluster, f"host{number}", draw.choice([1, 2])) for number in range(1, num_hosts + 1)]
        self.cluster.machines = {machine.name: machine for machine in machines}
        is_member = draw.random() < 0.5
        self.cluster.here = machines[0] if is_member else Machine(self.cluster, "login", 0)
        self.here = self.cluster.here
        num_slots = sum(machine.slots for machine in machines)
        num_ranks = max(1, num_slots - draw.choice([0, 0, 1, 2]))
        self.options = LaunchOptions(
            command=("train",),
            start_timeout=draw.choice([10.0, 30.0, 60.0]),
            grace=draw.choice([2.0, 8.0, 20.0]),
            max_restarts=draw.choice([0, 1, 3]),
        )
        self.work = launch.Launch(
            self.options,
            tuple(Slots(machine.name, machine.slots) for machine in machines),
            num_ranks,
            self._plan,
            here=frozenset({"host1"} if is_member else ()),
        )
        self.on_clean_up: Callable[[], None] = self._then
        self.cluster.on_launch = self.on_launch
        self.cluster.on_rank_start = lambda rank: None
        self.cluster.on_kill = self.on_kill
        self.cluster.on_work = self.on_work

    def start(self) -> None:
        self.main = self.world.start(self.launcher, "launcher", self._main)

    def _plan(self, job: Job) -> Plan:
        self.cluster.job = self.cluster.jobs[job.id] = job
        return Plan((words("mpirun", job.id, because="ranks"),), job.command)

    def run_attempts(self) -> int:
        return launch.run_attempts(self.work)

    def _main(self) -> None:
        try:
            code = self.run_attempts()
        except RingtrainError as error:
            processes.say(str(error))
            code = 2
        except KeyboardInterrupt:
            code = 130
            self.was_interrupted = True
        self.returns(code)
        for process in self.cluster.processes:  # its pipes are closed
            process.input_ends()

    def returns(self, code: int | None) -> None:
        self.code, self.returned_s = code, self.world.now_s
        self.world.note("launcher", f"returns {code}")
        self.check_left("at its end")
        self.world.at(self.returned_s + LEFT_S, lambda: self.check_left(f"{LEFT_S:.0f} s after its end"))
        lease_s, connect_s = LEASE_S + BEAT_S + SWEEP_S + SLACK_S, self.options.start_timeout + SWEEP_S + SLACK_S
        self.world.at(self.returned_s + lease_s, lambda: self.check_leases(self.cluster.had_trouble_to_connect))
        self.world.at(
            self.returned_s + max(lease_s, connect_s), lambda: self.check_leases(self.cluster.could_not_connect)
        )

    def _then(self) -> None:
        for kind in self.then:
            after_s = self.world.random.uniform(0, 8)
            self.world.at(self.world.now_s + after_s, lambda kind=kind: act(self, kind))  # type: ignore[misc]
        self.then.clear()

    # ---- signals -----------------------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """The launcher's process gets a signal."""
        if self.code is not None or self.launcher.is_dead:
            return
        if self.launcher.frozen_until_s > self.world.now_s:
            self.world.at(self.launcher.frozen_until_s, lambda: self.signal(number))
            return
        self.world.note("launcher", f"gets {signal.Signals(number).name}")
        handler = self.handlers.get(number, signal.SIG_DFL)
        self.received.append((self.world.now_s, number))
        if callable(handler):
            handler(number, None)
            self._expect_end(number)
        elif handler == signal.SIG_DFL and number == signal.SIGINT:
            self.world.interrupt(self.main, KeyboardInterrupt())
        elif handler == signal.SIG_DFL:
            self.launcher_dies(128 + number)

    def _expect_end(self, number: int) -> None:
        """The launcher returns in the time that its documentation promises after this signal."""
        before = [earlier for _, earlier in self.received[:-1]]
        is_final = number in ENDING
        if not is_final and not before:
            return  # ranks may take their time
        is_second = number in before or (before and number == signal.SIGINT)
        limit_s = CLEAN_UP_S + SLACK_S
        if not is_second:
            limit_s += self.options.grace
        now_s = self.world.now_s

        def check() -> None:
            mpirun = self.cluster.mpirun
            more_s = LOST_S if mpirun and mpirun.returncode == 0 else 0.0
            if self.code is None and not self._was_frozen_since(now_s):
                if more_s and self.world.now_s < now_s + limit_s + more_s:
                    self.world.at(now_s + limit_s + more_s, check)
                else:
                    self.violated(f"has not returned {limit_s + more_s:.0f} s after {signal.Signals(number).name}")

        self.world.at(now_s + limit_s, check)

    def _was_frozen_since(self, time_s: float) -> bool:
        return self.here.trouble_s > time_s or self.launcher.is_dead

    def launcher_dies(self, code: int | None) -> None:
        """Its process ends at once: pipes to what it has started are closed."""
        self.launcher.is_dead = True
        self.was_killed = True
        self.supervised = None
        self.end_s = min(self.end_s, self.world.now_s) if self.end_s != float("inf") else self.world.now_s
        for process in self.cluster.processes:
            process.input_ends()
        self.returns(code if code is not None else -1)

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def violated(self, what: str) -> None:
        self.world.note("", f"VIOLATED: {what}")
        if not self.violation:
            self.violation = what

    def on_launch(self, mpirun: Mpirun) -> None:
        """Ranks of an attempt start: those of earlier ones are gone, but where the clean-up was not confirmed."""
        for earlier, result in self.results:
            for rank in earlier.ranks.values() if earlier else ():
                machine = rank.machine
                if not rank.is_alive or rank.is_late or machine.host.is_dead or earlier is mpirun:
                    continue
                is_abandoned = machine.lost_agent_s < float("inf") and machine.name in result.not_cleaned_up
                if rank.number == 0 and machine.host.frozen_until_s <= self.world.now_s and not is_abandoned:
                    self.violated(f"rank 0 of an earlier attempt runs on {machine.name}, and the next one starts")
                if machine.name not in result.not_cleaned_up:
                    self.violated(f"rank {rank.number} of an earlier attempt runs on {machine.name}, which was cleaned")

    def on_work(self, rank: Rank) -> None:
        """A rank runs its script: none of another attempt does, where it could have been ended."""
        for other in [other for machine in self.all_machines() for other in machine.ranks]:
            if other.mpirun is not rank.mpirun and other.is_started and self._is_sure(other) and self._is_sure(rank):
                where = f"{other.machine.name} and {rank.machine.name}"
                self.violated(f"ranks of two attempts run their script: on {where}")

    def _is_sure(self, rank: Rank) -> bool:
        """Whether a rank would have been ended by an order to clean up."""
        machine = rank.machine
        has_had_time = machine.trouble_s + LEFT_S < self.world.now_s
        return has_had_time and machine.lost_agent_s == float("inf") and not rank.is_late

    def on_kill(self, rank: Rank) -> None:
        """A rank that catches a signal has the grace before it is killed."""
        now_s = self.world.now_s
        if self.faults or len(self.received) != 1 or not self.cluster.program.catches or rank.mpirun.is_broken:
            return
        (received_s, number), grace_s = self.received[0], self.options.grace
        if now_s > self.returned_s or not rank.is_started:
            return
        if number in ENDING and rank.told_s < float("inf") and now_s < received_s + grace_s - 0.01:
            self.violated(f"rank {rank.number} is killed {now_s - received_s:.1f} s after the signal")
        if rank.told_s == float("inf") and rank.began_s + self.cluster.slowest_s + 6.0 < received_s:
            self.violated(f"rank {rank.number} is killed and was never told of {signal.Signals(number).name}")

    def check_left(self, when: str) -> None:
        """No rank is alive on a host that was reachable since the clean-up began."""
        for machine in self.all_machines():
            is_sure = machine.trouble_s < self.end_s and self.here.trouble_s < self.end_s
            if any(machine.name in result.not_cleaned_up for _, result in self.results):
                is_sure = False  # until its lease has expired
            was_ended = self.was_killed or self.was_interrupted
            if when == "at its end" and (machine.lost_agent_s < float("inf") or was_ended):
                is_sure = False
            left = [rank.number for rank in machine.ranks if not rank.is_late]
            if left and is_sure:
                self.violated(f"ranks {left[:5]} are left on {machine.name} {when}")

    def check_leases(self, not_connected: set[str]) -> None:
        """No rank is alive on any host: the others have noticed by themselves.

        not_connected: Hosts that no second agent could reach yet.
        """
        for machine in self.all_machines():
            # Nothing is left there that could clean up, if no second agent could connect.
            is_abandoned = machine.lost_agent_s < float("inf")
            has_had_time = machine.host.frozen_until_s + LEFT_S < self.world.now_s
            left = [rank.number for rank in machine.ranks if not rank.is_late]
            had_trouble = machine.trouble_s >= self.attempt_s or machine.name in not_connected
            if left and has_had_time and not (is_abandoned and had_trouble):
                self.violated(f"ranks {left[:5]} are left on {machine.name} after its lease")

    def all_machines(self) -> list[Machine]:
        return [*self.cluster.machines.values()]

    def check_end(self) -> None:
        """The launcher has returned, and what it has said is true."""
        for task in self.world.tasks:
            if task.error:
                self.violated(f"{task.name}: {task.error!r}")
        if self.code is None and not self.here.host.is_dead:
            self.violated("has not returned")
        if self.code is None or self.was_killed:
            return
        last = self.cluster.attempts[-1] if self.cluster.attempts else None
        if self.code == 0:
            codes = [rank.exit_code for rank in last.ranks.values()] if last else []
            if last is None or codes != [0] * last.job.num_ranks:
                self.violated(f"exits with 0, but ranks with {sorted(map(str, codes))[-5:]}")
            elif not all(rank.is_started for rank in last.ranks.values()):
                self.violated("exits with 0, but a rank has exited before its start")
        self.check_code(last)

    def check_code(self, last: Mpirun | None) -> None:
        signals = [number for _, number in self.received]
        kinds = [kind for _, kind in self.faults]
        is_calm = not kinds and b"does not answer" not in self.cluster.output
        if signals and is_calm and self.code not in (0, *(128 + n for n in signals)):
            self.violated(f"exits with {self.code} after signals {signals}")
        codes = {"killed": 137, "memory": 137, "exception": 1, "config": 2, "exit": 7, "sigterm": 143, "hang": 75}
        if len(kinds) == 1 and not signals and kinds[0] in codes and not self.options.max_restarts:
            # If mpirun hangs while others start, these are reported.
            hung = self.code == 2 and b"ranks did not start" in self.cluster.output
            if self.code != codes[kinds[0]] and not hung and last and any(rank.failure for rank in last.ranks.values()):
                # A follow-up error may reach mpirun first, if the failed rank's host answers slowly.
                is_overtaken = self.code == 1 and self.cluster.slowest_s > 0.1
                if not is_overtaken:
                    self.violated(f"exits with {self.code} after {kinds[0]}")

    def on_result(self, mpirun: Mpirun | None, result: JobResult) -> None:
        """The exit cause is the first failure, and hosts that are said to be lost were."""
        by_rank = BY_RANK.match(result.text)
        if by_rank and mpirun and "this is a follow-up error" not in result.text:
            self._check_named(mpirun, int(by_rank[1]), by_rank[2])
        if "this is a follow-up error" in result.text and mpirun:
            failed = [rank for rank in mpirun.ranks.values() if rank.failure or not rank.is_alive]
            if not failed and not self._has_trouble():
                self.violated("a follow-up error is named, and nothing has failed before")
        for match in (*LOST_HOSTS.finditer(result.text), *NO_ANSWER.finditer(result.text)):
            for name in match[1].split(", "):
                self._check_lost(name, match[0])
        agent_s = max(self.here.trouble_s, self._lost_agent(self.here))
        if result.text.startswith("lost the host agent of this host") and agent_s < self.attempt_s - 1.0:
            self.violated(f"'{result.text}', but nothing has happened to it")
        for name in result.not_cleaned_up:
            self._check_lost(name, f"{name} has not cleaned up")

    def _has_trouble(self) -> bool:
        machines = [*self.all_machines(), self.here]
        return any(max(machine.trouble_s, self._lost_agent(machine)) >= self.attempt_s - 40 for machine in machines)

    def _lost_agent(self, machine: Machine) -> float:
        return machine.lost_agent_s if machine.lost_agent_s < float("inf") else -1e9

    def _check_named(self, mpirun: Mpirun, number: int, host: str) -> None:
        named = mpirun.ranks.get(number)
        failed = [rank for rank in mpirun.ranks.values() if rank.failure]
        if named is None or named.machine.name != host:
            self.violated(f"rank {number} on {host} is named, which does not exist")
        elif not named.failure and failed and not self._has_trouble():
            self.violated(f"rank {number} is named, but rank {failed[0].number} failed: {failed[0].failure}")
        elif not named.failure and not failed and not self._has_trouble() and named.exit_code == 0:
            self.violated(f"rank {number} is named, which exited with 0")
        elif named.failure:
            for rank in failed:
                if rank.failed_s + self.cluster.slowest_s + 3.0 < named.failed_s and not self._has_trouble():
                    # A rank's report counts more than mpirun's message, which may name one that it took along.
                    is_silent = rank.failure not in REPORTED and named.failure in REPORTED
                    if "hang" not in rank.failure and rank.failure != "exit 0" and not is_silent:
                        self.violated(f"rank {number} is named, but rank {rank.number} failed before")

    def _check_lost(self, name: str, said: str) -> None:
        machine = self.cluster.machines[name]
        last_s = max(machine.trouble_s, self._lost_agent(machine), self.here.trouble_s)
        has_had_trouble = last_s >= self.attempt_s - 1.0 or name in self.cluster.had_trouble_to_connect
        if not has_had_trouble:
            self.violated(f"'{said}', but it was reachable")

    def on_supervise(self, supervised: Any) -> None:
        """The job ends if ranks do not start in time."""
        self.supervised, began_s = supervised, self.world.now_s

        def check() -> None:
            is_late = len(supervised.reports.ranks) < supervised.job.num_ranks and not supervised.stopped_by
            if self.supervised is supervised and is_late and not self.received and not self._was_frozen_since(began_s):
                self.violated(f"ranks have not started in {self.options.start_timeout:.0f} s, and it waits")

        self.world.at(began_s + self.options.start_timeout + SLACK_S, check)

    def expect_notice(self, machine: Machine) -> None:
        """A host that stays lost ends the job."""
        supervised, since_s, boot = self.supervised, self.world.now_s, machine.boot
        if supervised is None or machine is self.here:
            return
        if machine.name not in [agent.host for agent in supervised.agents.members]:
            return

        def check() -> None:
            if self.supervised is not supervised or machine.is_reachable or machine.boot != boot:
                return
            if machine.trouble_began_s > since_s:
                return
            is_lost = machine.host.is_dead or machine.trouble_s > self.world.now_s
            if is_lost and not self._was_frozen_since(since_s):
                self.violated(f"{machine.name} is lost for {self.world.now_s - since_s:.0f} s, and the job goes on")

        if machine.is_reachable:
            return
        self.world.at(since_s + KEEP_ALIVE_S + 3.0 + SLACK_S, check)

    def on_ended(self, supervised: Any, began_s: float) -> None:
        """A clean-up takes no longer than it may."""
        mpirun = self.cluster.mpirun
        limit_s = CLEAN_UP_S + SLACK_S
        if mpirun and mpirun.job.id == supervised.job.id and mpirun.returncode == 0:
            limit_s = LOST_S + SLACK_S
        if self.world.now_s > began_s + limit_s and not self._was_frozen_since(began_s):
            self.violated(f"the clean-up takes {self.world.now_s - began_s:.0f} s")


# ---- faults ----------------------------------------------------------------------------------------------------------


def act(run: Run, kind: str) -> None:
    """Makes something happen."""
    cluster, world, draw = run.cluster, run.world, run.world.random
    if run.code is not None:
        return
    if kind.startswith("then"):
        run.then.append(kind.removeprefix("then "))
        return
    if kind.startswith("SIG"):
        _signal(run, kind)
        return
    if kind.startswith("starting"):
        cluster.starting_faults.append(kind.removeprefix("starting "))
        run.faults.append((world.now_s, kind))
        return
    if kind in FAULTS_OF_RANKS:
        ranks = [rank for machine in cluster.machines.values() for rank in machine.ranks if rank.is_started]
        if ranks:
            run.faults.append((world.now_s, kind))
            _fail(run, draw.choice(ranks), kind)
        return
    seconds = draw.choice([3, 12, 30, 90]) * draw.uniform(0.3, 1.0)
    if kind == "mpirun":
        if cluster.mpirun and cluster.mpirun.returncode is None:
            run.faults.append((world.now_s, kind))
            cluster.mpirun.kill()
    elif kind == "launcher killed":
        run.faults.append((world.now_s, kind))
        world.note("launcher", "is killed")
        run.launcher_dies(None)
    elif kind == "launcher frozen":
        run.faults.append((world.now_s, kind))
        run.here.freeze(seconds)
        run.launcher.frozen_until_s = run.here.host.frozen_until_s
    else:
        others = [machine for machine in cluster.machines.values() if machine is not run.here]
        machine = others[0] if draw.random() < 0.3 else draw.choice(others)
        if not machine.host.is_dead:
            run.faults.append((world.now_s, kind))
            fail_host(run, machine, kind, seconds)


def _signal(run: Run, kind: str) -> None:
    name, _, more = kind.partition(" ")
    run.signal(getattr(signal, name))
    if more:
        second = name if more == "twice" else more.removeprefix("and ")
        run.world.at(
            run.world.now_s + run.world.random.choice([0.05, 1.0, 5.0]), lambda: run.signal(getattr(signal, second))
        )


def _fail(run: Run, rank: Rank, kind: str) -> None:
    if kind == "killed":
        rank.fail("killed", -signal.SIGKILL)
    elif kind == "memory":
        rank.machine.was_out_of_memory = True
        rank.fail("out of memory", -signal.SIGKILL)
    elif kind == "exit":
        rank.say("last words")
        rank.fail("exit", 7)
    elif kind == "sigterm":
        if not run.cluster.program.ignores:
            rank.failure, rank.failed_s = "SIGTERM to one rank", run.world.now_s
        rank.signal(signal.SIGTERM)
    elif kind == "hang":
        _hang(run, rank)
    else:
        name, code = ("ValueError", 1) if kind == "exception" else ("ConfigError", 2)
        rank.failure, rank.failed_s = kind, run.world.now_s
        rank.report(name, "batch 3", code)
        rank.machine.later(0.05, lambda: rank.end(code))


def _hang(run: Run, rank: Rank) -> None:
    """A rank hangs: the first of the others that notices reports it, and ends the job."""
    rank.is_hanging, rank.failure, rank.failed_s = True, "hangs", run.world.now_s
    rank.mpirun.is_broken = True
    rank.machine.note(f"rank {rank.number} hangs")
    others = [other for other in rank.mpirun.ranks.values() if other is not rank and other.is_started]
    if not others:
        return
    first = others[0]

    def notice() -> None:
        if first.is_alive and rank.is_alive:
            first.failure, first.failed_s = "reports a stall", run.world.now_s
            first.report("Stalled", f"rank {rank.number} blocks the others", 75)
            first.machine.later(0.5, lambda: first.end(75))

    first.machine.later(30.0, notice)


def fail_host(run: Run, machine: Machine, kind: str, seconds: float) -> None:
    cluster, world = run.cluster, run.world
    if kind in ("die", "reboot"):
        machine.die()
        if kind == "reboot":
            world.at(world.now_s + seconds, machine.come_back)
    elif kind == "freeze":
        machine.freeze(seconds)
    elif kind.startswith("cut"):
        directions = [kind.removeprefix("cut ")] if " " in kind else ["to", "from"]
        machine.cut(directions, seconds)
    elif kind == "ssh":
        for ssh in [process for process in cluster.processes if getattr(process, "machine", None) is machine]:
            if ssh.returncode is None and ssh.agent:  # type: ignore[attr-defined]
                machine.lost_agent_s = world.now_s
                machine.note("its ssh connection drops")
                ssh.reset()  # type: ignore[attr-defined]
    elif kind == "agent":
        for agent in [*machine.agents]:
            machine.lost_agent_s = world.now_s
            machine.note("its agent is killed")
            agent.die(255)
    elif kind == "daemon" and cluster.mpirun:
        for daemon in cluster.mpirun.daemons:
            if daemon.machine is machine and daemon.is_alive:
                machine.lost_agent_s = world.now_s
                machine.note("mpirun's daemon is killed")
                daemon.is_alive = False
                cluster.mpirun.lose(machine)
    run.expect_notice(machine)


def disturb(run: Run, kinds: Sequence[str] | None = None) -> None:
    """Draws the program, how well hosts answer, and what happens when. kinds: Of these only; None: some are drawn."""
    world, cluster, draw = run.world, run.cluster, run.world.random
    cluster.is_open_mpi_5, cluster.daemons_stay = draw.random() < 0.3, draw.random() < 0.5
    cluster.late_rate = draw.choice([0.0, 0.0, 0.0, 0.02, 0.2])
    cluster.refused_rate = draw.choice([0.0, 0.0, 0.0, 0.0, 0.05])
    cluster.hang_rate = draw.choice([0.0, 0.0, 0.1])
    cluster.program.catches = draw.random() < 0.7
    cluster.program.ignores = not cluster.program.catches and draw.random() < 0.5
    cluster.program.save_s = draw.choice([0.1, 1.0, 1.0, 5.0, 30.0])
    if draw.random() < 0.2:
        for machine in cluster.machines.values():
            machine.latency_s = draw.choice([machine.latency_s, 0.3, 0.8])
    cluster.slowest_s = max(machine.latency_s for machine in cluster.machines.values())
    groups = (
        KINDS,
        FAULTS_OF_HOSTS,
        FAULTS_OF_RANKS,
        SIGNALS,
        (*STARTING, *FAULTS_OF_LAUNCHER),
        (*THEN, "cut", "killed"),
    )
    if kinds is None:
        kinds = draw.sample(draw.choice(groups), draw.randint(1, 4))
    num_faults = draw.choice([0, 1, 1, 1, 2, 2, 3, 5])
    for _ in range(num_faults if kinds else 0):
        kind, time_s = draw.choice(kinds), draw.choice([2.0, 4.0, 15.0, 60.0, 120.0]) * draw.random()
        world.at(time_s, lambda kind=kind: act(run, kind))  # type: ignore[misc]


def simulate(seed: int, num_hosts: int = 0, is_traced: bool = False, directed: Callable[[Run], None] = disturb) -> Run:
    """One schedule; what was violated first is in the run's `violation`. num_hosts 0: 2 to 6, drawn."""
    world = World(seed, is_traced)
    run = Run(world, num_hosts or world.random.randint(2, 6))
    with of_production(run):
        directed(run)
        run.start()
        world.run(CHAOS_S)
        run.signal(signal.SIGTERM)
        world.run(CHAOS_S + 100.0)
        run.check_end()
        world.end()
    return run


class _Signal:
    """`signal` of a module."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def signal(self, number: int, handler: Any) -> Any:
        before = self.getsignal(number)
        self._run.handlers[number] = handler
        return before

    def getsignal(self, number: int) -> Any:
        return self._run.handlers.get(number, signal.SIG_DFL)

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)


@contextlib.contextmanager
def of_production(run: Run) -> Iterator[None]:
    """Gives the tested modules the simulated time, processes and signals."""
    world, cluster = run.world, run.cluster
    numbers = itertools.count(1)
    of_processes = SimpleNamespace(
        Popen=cluster.popen,
        PIPE=subprocess.PIPE,
        STDOUT=subprocess.STDOUT,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    of_uuids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"job{next(numbers)}"))
    of_selectors = SimpleNamespace(DefaultSelector=lambda: Selector(cluster), EVENT_READ=selectors.EVENT_READ)
    supervise, end, run_one = supervisor.Supervisor.supervise, supervisor.Supervisor.end, supervisor.run

    def and_watch(self: Any, plan: Plan) -> int:
        run.on_supervise(self)
        try:
            return supervise(self, plan)
        finally:
            run.supervised = None

    def and_measure(self: Any) -> None:
        began_s = world.now_s
        if not self._over.is_set():
            run.end_s = began_s
            run.on_clean_up()
        end(self)
        run.on_ended(self, began_s)

    def and_record(supervised: Any, planner: Any) -> JobResult:
        num_attempts, run.attempt_s = len(cluster.attempts), world.now_s
        result = run_one(supervised, planner)
        mpirun = cluster.attempts[-1] if len(cluster.attempts) > num_attempts else None
        run.results.append((mpirun, result))
        run.on_result(mpirun, result)
        return result

    with contextlib.ExitStack() as stack:
        stack.enter_context(in_place(world, supervisor, agents, output, launch, reader))
        for module, name, value in [
            *((module, "os", Os(cluster)) for module in (supervisor, agents, output, processes)),
            *((module, "subprocess", of_processes) for module in (supervisor, agents)),
            (supervisor, "selectors", of_selectors),
            (supervisor, "signal", _Signal(run)),
            (supervisor, "find", lambda *_: ""),
            (agents, "raise_limits", lambda: None),
            (launch, "uuid", of_uuids),
            (supervisor.Supervisor, "supervise", and_watch),
            (supervisor.Supervisor, "end", and_measure),
            (supervisor, "run", and_record),
        ]:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
