"""An elastic job on hosts that come, go and fail, whose ranks are killed at any moment: what must hold.

Production code runs on both sides. Of the launcher: supervisor.py, agents.py, elastic.py,
horovod_driver.py, restart.py and the loop of attempts, with Horovod's elastic driver, unmodified (horovodrun.py). Of
the ranks: see training.py; Horovod's C++ core is modeled in members.py, hosts and their agents in cluster.py.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence
from typing import Any

import sample_ledger
from simulation import launched, training
from simulation.cluster import Machine
from simulation.elastic_cluster import ElasticCluster
from simulation.elastic_faults import disturb
from simulation.members import GLOO_TIMEOUT_S, Group, Member
from simulation.replaced import replaced
from simulation.world import World

from ringtrain.cluster import launch
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config

CHAOS_S = 150.0
END_S = 1000.0
"""seconds after which a job has ended, or waits for hosts"""
IDLE_S = 120.0
LOST_S = 25.0


class Run(launched.Run):
    """One elastic job: its options, its faults, and what must hold."""

    def __init__(self, world: World, num_hosts: int) -> None:
        draw = world.random
        self.world, self.violation = world, ""
        self.cluster: ElasticCluster = ElasticCluster(world, self)
        self.launcher = world.host("launcher")
        self.handlers: dict[int, Any] = {}
        self.received: list[tuple[float, int]] = []
        self.faults: list[tuple[float, str]] = []
        self.code: int | None = None
        self.returned_s = self.end_s = float("inf")
        self.was_killed = False
        self.results: list[Any] = []
        self.supervised: Any = None
        self.attempt_s = 0.0
        self.then: list[str] = []
        self.ended: list[Member] = []
        self.kills: dict[str, int] = {}
        """numbers of calls until a rank is killed, by a collective's name"""
        self.kills_at_end: dict[str, int] = {}
        """the same, once all have called it"""
        self.highest = 0
        self.last_step_s, self.begun_s = 0.0, float("inf")
        self.idle_since_s: dict[str, float] = {}
        self.had_ranks: set[str] = set()
        self.agreed: dict[Any, Any] = {}
        self.furthest: dict[str, int] = {}
        """completed steps of any rank, by job"""
        self.stopped_at: dict[str, int] = {}
        machines = [
            Machine(self.cluster, f"host{number}", draw.choice([1, 1, 2])) for number in range(1, num_hosts + 1)
        ]
        self.cluster.machines = {machine.name: machine for machine in machines}
        is_member = draw.random() < 0.5
        self.cluster.here = machines[0] if is_member else Machine(self.cluster, "login", 0)
        self.here = self.cluster.here
        self.on_clean_up = lambda: None
        slots = sum(machine.slots for machine in machines)
        has_script = draw.random() < 0.7
        min_np = draw.choice([1, 1, 2, max(1, slots - 1)])
        self.options = LaunchOptions(
            command=("train",),
            elastic=True,
            hosts=None if has_script else ",".join(f"{machine.name}:{machine.slots}" for machine in machines),
            host_discovery="list-hosts" if has_script else "",
            network_interface="eth0",
            min_np=min(min_np, slots),
            max_np=draw.choice([None, None, slots, max(min_np, slots - 1)]) if has_script else None,
            blacklist_cooldown=draw.choice([(15, 600), (5, 20), (0, 0)]),
            start_timeout=draw.choice([30.0, 60.0]),
            grace=draw.choice([2.0, 8.0, 20.0]),
            max_restarts=draw.choice([0, 0, 1]),
        )
        self.cluster.listing = {machine.name: machine.slots for machine in machines}
        self._set_run()

    def _set_run(self) -> None:
        draw = self.world.random
        rows, steps, epochs = draw.choice([7, 12]), draw.choice([4, 7, 7, 12, 12, 40]), draw.choice([1, 2, 4])
        num_train = rows * steps - draw.choice([0, 3])
        config = Config()
        self.cluster.config = dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, epochs=epochs),
            elastic=dataclasses.replace(config.elastic, commit_every_steps=draw.choice([1, 2, 10])),
            health=dataclasses.replace(config.health, agree_every_steps=draw.choice([1, 3, 10])),
            run=dataclasses.replace(config.run, name="run"),
        )
        self.cluster.numbers_of_run = Numbers(1, num_train, 0, rows, 1, rows, steps, steps * epochs, 0.1, 0.1, 0, (), 0)

    def run_attempts(self) -> int:
        work = launch.elastic_launch(self.options)
        planner: Any = work.planner
        self.highest = planner.keywords["max_ranks"]

        def plan(job: Any) -> Any:
            self.cluster.job = job
            return planner(job)

        return launch.run_attempts(dataclasses.replace(work, planner=plan))

    # ---- what must hold while it runs --------------------------------------------------------------------------------

    def on_member(self, member: Member) -> None:
        """A rank starts, not in the slot of one that still runs."""
        self.had_ranks.add(member.machine.name)
        for other in self.cluster.members.values():
            is_of_slot = other.machine is member.machine and other.slot == member.slot and other is not member
            if is_of_slot and other.is_alive and other.job.id == member.job.id:
                self.violated(f"a rank starts in slot {member.slot} of {member.machine.name}, where another one runs")

    def on_init(self, member: Member) -> None:
        if not self.options.min_np <= member.size <= self.highest:
            self.violated(f"{member.size} ranks meet, of {self.options.min_np} to {self.highest}")

    def on_exchange(self, member: Member, name: str) -> None:
        if name == "ringtrain_progress":
            member.before = member.trainer.source.state.model.weights[0].value  # type: ignore[attr-defined]
            member.had_stop = had_stop(member)  # type: ignore[attr-defined]
        self._count(self.kills, name, lambda: member)

    def on_complete(self, group: Group, name: str) -> None:
        self._count(self.kills_at_end, name, lambda: self.world.random.choice(group.members))

    def _count(self, kills: dict[str, int], name: str, choose: Callable[[], Member]) -> None:
        """Kills a rank in a collective that is meant."""
        for wanted in [one for one in kills if one in name]:
            kills[wanted] -= 1
            if kills[wanted] <= 0:
                del kills[wanted]
                member, after_s = choose(), self.world.random.choice([0.0, 0.0005, 0.0015, 0.005])
                self.world.at(self.world.now_s + after_s, lambda member=member: self._kill(member, name))  # type: ignore[misc]

    def on_shell(self, machine: Machine) -> None:
        """A rank is started, not on a host that is lost for longer than anybody needs to notice."""
        lost_s = self.world.now_s - machine.trouble_began_s
        if not machine.is_reachable and lost_s > LOST_S and machine is not self.here:
            self.violated(f"a rank is started on {machine.name}, which is lost for {lost_s:.0f} s")

    @property
    def commit_s(self) -> float:
        """Longest time between two commits."""
        return 1.4 * self.cluster.step_s * self.cluster.config.elastic.commit_every_steps

    def watch_idle(self) -> None:
        """A host that is there, and not used although there is room, is used after a while."""
        now_s, cluster = self.world.now_s, self.cluster
        alive = [member for member in cluster.members.values() if member.is_alive]
        has_room = self.options.host_discovery and self.last_step_s > now_s - 10.0 and len(alive) < self.highest
        for machine in cluster.machines.values():
            is_there = machine.name in cluster.listing and machine.is_reachable
            is_fresh = machine.name not in self.had_ranks and machine.lost_agent_s == float("inf")
            is_used = any(member.machine is machine for member in alive)
            is_asked = now_s > cluster.script_fails_until_s and not cluster.script_slow_s
            is_idle = has_room and is_there and is_fresh and is_asked and not is_used
            since_s = self.idle_since_s.setdefault(machine.name, now_s)
            if not is_idle:
                self.idle_since_s[machine.name] = now_s
            elif now_s > since_s + IDLE_S + self.commit_s:
                self.violated(f"{machine.name} is there for {now_s - since_s:.0f} s, and not used")

    def _kill(self, member: Member, name: str) -> None:
        if member.is_alive:
            who = "killed" if member.size > 1 else "the only one is killed"
            self.faults.append((self.world.now_s, f"{who} in {name}"))
            member.note(f"is killed in {name}")
            member.end(-signal.SIGKILL)

    def on_step(self, member: Member, of_ranks: Sequence[Any], state: training.State) -> None:
        """All rows of a step are trained, by ranks in the same state, which goes on where it was."""
        if any(one[3] != of_ranks[0][3] for one in of_ranks):
            self.violated("ranks in different states make a step")
        epoch, position = 0, 0
        for its_epoch, first, last in state[-2:]:
            if len(state) > 1 and (its_epoch, first) == (state[-2][0], state[-2][1]):
                epoch, position = its_epoch, last
                continue
            is_next = (its_epoch, first) == (epoch, position) or (its_epoch, first) == (epoch + 1, 0)
            if not is_next:
                self.violated(f"after row {position} of epoch {epoch}, {first} of {its_epoch} is trained")
        ends = [begin for _, begin, _, _ in of_ranks[1:]]
        if ends != [end for _, _, end, _ in of_ranks[:-1]]:
            self.violated("the ranks' parts of a step are no whole")
        job_id, length, self.last_step_s = member.job.id, len(state), self.world.now_s
        self.furthest[job_id] = max(length, self.furthest.get(job_id, 0))
        if length > self.stopped_at.get(job_id, length):
            self.violated(
                f"step {length} is trained, but the ranks have agreed to stop after {self.stopped_at[job_id]}"
            )

    def on_agreed(self, member: Member, run: Any) -> None:
        """Ranks begin together in one state, that of the one that was furthest, at most a step back."""
        assert member.group
        state, others = [variable.value for variable in run.job.model.variables], member.group.members
        step, job_id = run.start.global_step, member.job.id
        self.begun_s = min(self.begun_s, self.world.now_s)
        source = f" of {run.start.source}" if run.start.source else ""
        member.note(f"of {member.size} begins after step {step}{source}")
        first = self.agreed.setdefault(member.group, state)
        if first != state or state[0] != state[1]:
            self.violated("ranks begin in different states")
        if step != len(state[0]):
            self.violated(f"ranks begin after step {step} in the state after {len(state[0])}")
        furthest = max(len(other.before) for other in others)  # type: ignore[attr-defined]
        if not run.start.source and furthest > step:
            self.violated(f"ranks begin after step {step}, and one has made {furthest}")
        has_state = run.start.source == "" and furthest > 0  # else all that had it are lost
        if has_state and self.furthest.get(job_id, 0) > step + 1:
            self.violated(f"ranks begin after step {step}, and {self.furthest[job_id]} were made")
        self.furthest[job_id] = step
        if any(other.had_stop for other in others):  # type: ignore[attr-defined]
            if not run.start.ending.stopped_by:
                self.violated("a stop on which ranks had agreed is forgotten")
            self.stopped_at[job_id] = step

    def on_supervise(self, supervised: Any) -> None:
        """The job ends if no rank starts in time."""
        self.supervised, began_s = supervised, self.world.now_s

        def check() -> None:
            is_late = not supervised.reports.ranks and not supervised.stopped_by
            if self.supervised is supervised and is_late and not self._was_frozen_since(began_s):
                self.violated(f"no rank has started in {self.options.start_timeout:.0f} s, and it waits")

        self.world.at(began_s + self.options.start_timeout + launched.SLACK_S, check)

    def expect_notice(self, machine: Machine) -> None: ...

    def on_result(self, mpirun: Any, result: Any) -> None: ...

    def on_ended(self, supervised: Any, began_s: float) -> None: ...

    # ---- what must hold at the end -----------------------------------------------------------------------------------

    def check_end(self) -> None:
        for task in self.world.tasks:
            if task.error and not (hasattr(task, "is_alone") and isinstance(task.error, RuntimeError)):
                self.violated(f"{task.name}: {task.error!r}")
        if self.code is None:
            self.violated("has not returned")
        if self.code is None or self.was_killed:
            return
        summary = self.cluster.storage.summary
        if self.code == 0 and not summary:
            self.violated("exits with 0 without a result")
        has_answered = not self.cluster.had_trouble_to_connect
        if self.code and not self.faults and not self.received and has_answered:
            self.violated(f"exits with {self.code}, and nothing has happened")
        if summary and self.code == 0:
            self._check_rows(summary)
        kinds = [kind for _, kind in self.faults]
        is_one = len(kinds) == 1 and kinds[0].startswith("killed in")
        is_at_end = bool(summary) or any("results" in kind for kind in kinds)
        are_enough = sum(machine.slots for machine in self.all_machines()) > max(1, self.options.min_np)
        if (
            is_one
            and not is_at_end
            and are_enough
            and self.begun_s < self.faults[0][0]
            and self.code
            and not self.received
        ):
            self.violated(f"exits with {self.code}, since one rank was {kinds[0]}")

    def _check_rows(self, summary: dict[str, Any]) -> None:
        numbers, epochs = self.cluster.numbers_of_run, self.cluster.config.train.epochs
        weights, slots = summary["values"]
        if weights != slots:
            self.violated("weights and slots of the result differ")
        epoch, position = 0, 0
        for its_epoch, first, last in weights:
            if (its_epoch, first) != (epoch, position):
                self.violated(f"the result has row {first} of epoch {its_epoch} after {position} of {epoch}")
            position = last
            if position == numbers.num_train:
                epoch, position = epoch + 1, 0
        if summary["stopped_by"]:
            return
        if (epoch, position) != (epochs, 0):
            self.violated(f"the result ends in epoch {epoch} at {position}, not after {epochs} epochs")
        breaches = sample_ledger.ledger(self.cluster.events, numbers.num_steps).breaches
        if breaches:
            self.violated(f"journals: {breaches[0]}")


def simulate(seed: int, num_hosts: int = 0, is_traced: bool = False, directed: Callable[[Run], None] = disturb) -> Run:
    """One schedule; what was violated first is in the run's `violation`. num_hosts 0: 2 to 5, drawn."""
    world = World(seed, is_traced)
    run = Run(world, num_hosts or world.random.randint(2, 5))
    with launched.of_production(run), replaced(world, run.cluster):
        directed(run)
        run.start()
        world.at(0.0, lambda: watch(run))
        limit_s = END_S * (1 + run.options.max_restarts)
        world.run(limit_s)
        if run.code is None:
            run.violated("has not ended")
        run.signal(signal.SIGTERM)
        world.run(limit_s + 100.0)
        run.check_end()
        world.end()
    return run


def had_stop(member: Member) -> str:
    """Why the ranks had agreed to stop, as this one knows it; not at an end of an epoch that is undone."""
    run = member.training
    if run is None:
        return ""
    before = run.clock._before_end
    found: str = before[1].stopped_by if before else run.callbacks.stop.stopped_by
    return found


def watch(run: Run) -> None:
    """Lets ranks notice hosts that are silent for longer than Gloo's time-out, and those that wait look again."""
    world = run.world
    run.watch_idle()
    for group in run.cluster.groups.values():
        group.watch(GLOO_TIMEOUT_S)
    if run.code is None:
        world.at(world.now_s + 1.0, lambda: watch(run))
    world.wake_waiting()
