"""What happens to an elastic job: ranks, hosts, the program that lists them, requests to stop."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulation.cluster import Machine
from simulation.launched import fail_host

if TYPE_CHECKING:
    from simulation.elastic import Run
    from simulation.members import Member

OF_RANKS = ("killed", "killed twice", "all killed", "start fails", "start is killed", "stop", "SIGTERM of a rank")
OF_HOSTS = ("die", "reboot", "freeze", "cut", "agent", "ssh")
OF_LISTS = ("script fails", "script is slow", "unlisted", "flaps", "fewer slots", "late")
OF_LAUNCHER = ("SIGTERM", "SIGINT")
MOMENTS = (
    "ringtrain_progress",
    "variable 0",
    "variable 1",
    "object",
    "ringtrain_generation",
    "ringtrain_hosts",
    "ringtrain_hosts_updated",
    "ringtrain_stop",
    "ringtrain_own_state",
    "gradients",
    "sums of metrics",
    "evaluation",
    "ringtrain_results",
)
AT = (*(f"at {moment}" for moment in MOMENTS), *(f"in {moment}" for moment in MOMENTS))
"""when one rank has come to this collective, or all"""
KINDS = (*OF_RANKS, *OF_HOSTS, *OF_LISTS, *OF_LAUNCHER, *AT)


def members_of(run: Run, is_started: bool = True) -> list[Member]:
    """Ranks that live."""
    members = [member for member in run.cluster.members.values() if member.is_alive]
    return [member for member in members if member.is_started or not is_started]


def act(run: Run, kind: str) -> None:
    """Makes something happen."""
    if run.code is not None:
        return
    if kind in OF_HOSTS:
        _fail_host(run, kind)
    elif kind in OF_LISTS:
        _list(run, kind)
    elif kind.startswith("at "):
        run.kills[kind.removeprefix("at ")] = run.world.random.choice([1, 1, 2, 5, 20])
    elif kind.startswith("in "):
        run.kills_at_end[kind.removeprefix("in ")] = run.world.random.choice([1, 1, 2, 5, 20])
    elif kind in ("SIGTERM", "SIGINT"):
        run.signal(getattr(signal, kind))
    else:
        _fail_rank(run, kind)


def _fail_rank(run: Run, kind: str) -> None:
    draw, world = run.world.random, run.world
    if kind.startswith("start"):
        code = 3 if kind == "start fails" else -signal.SIGKILL
        run.faults.append((world.now_s, kind))
        run.cluster.failing_starts.append(code)
        return
    members = members_of(run, is_started=draw.random() < 0.8)
    if not members:
        return
    if kind != "stop":
        run.faults.append((world.now_s, kind))
    if kind == "all killed":
        for member in members:
            member.end(-signal.SIGKILL)
        return
    member = draw.choice(members)
    if kind == "stop":
        member.note("asks for the end")
        member.wants_stop = True
    elif kind == "SIGTERM of a rank":
        member.signal(signal.SIGTERM)
    else:
        member.end(-signal.SIGKILL)
    if kind == "killed twice":
        world.at(world.now_s + draw.choice([0.0, 0.5, 5.0]), lambda: _fail_rank(run, "killed"))


def _fail_host(run: Run, kind: str) -> None:
    draw = run.world.random
    others = [machine for machine in run.cluster.machines.values() if machine is not run.here]
    machine = draw.choice(others)
    if machine.host.is_dead:
        return
    seconds = draw.choice([3, 12, 30, 90]) * draw.uniform(0.3, 1.0)
    run.faults.append((run.world.now_s, kind))
    fail_host(run, machine, kind, seconds)


def _list(run: Run, kind: str) -> None:
    cluster, world, draw = run.cluster, run.world, run.world.random
    if not run.options.host_discovery:
        return
    run.faults.append((world.now_s, kind))
    seconds = draw.choice([2, 10, 40]) * draw.uniform(0.3, 1.0)
    if kind == "script fails":
        world.note("list-hosts", f"fails for {seconds:.0f} s")
        cluster.script_fails_until_s = world.now_s + seconds
        return
    if kind == "script is slow":
        world.note("list-hosts", "is slow")
        cluster.script_slow_s = draw.choice([1.0, 5.0, 40.0])
        world.at(world.now_s + 2 * seconds, lambda: setattr(cluster, "script_slow_s", 0.0))
        return
    machine = draw.choice([*cluster.machines.values()])
    _list_for_a_while(run, machine, kind, seconds)
    if kind == "flaps":
        for number in range(1, 4):
            world.at(world.now_s + 2 * number * seconds, lambda: _list_for_a_while(run, machine, kind, seconds))


def _list_for_a_while(run: Run, machine: Machine, kind: str, seconds: float) -> None:
    cluster, world = run.cluster, run.world
    if kind == "fewer slots" and machine.slots > 1:
        cluster.listing[machine.name] = 1
    else:
        cluster.listing.pop(machine.name, None)
    world.note("list-hosts", f"{cluster.listing}")

    def again() -> None:
        cluster.listing[machine.name] = machine.slots
        world.note("list-hosts", f"{cluster.listing}")

    world.at(world.now_s + seconds, again)


def disturb(run: Run, kinds: Sequence[str] | None = None) -> None:
    """Draws how well hosts answer, and what happens when. kinds: Of these only; None: some are drawn."""
    world, cluster, draw = run.world, run.cluster, run.world.random
    cluster.late_rate = draw.choice([0.0, 0.0, 0.0, 0.2])
    cluster.refused_rate = draw.choice([0.0, 0.0, 0.0, 0.05])
    groups: tuple[tuple[str, ...], ...] = (KINDS, OF_RANKS, OF_HOSTS, OF_LISTS, AT, (*AT, *OF_RANKS), (*OF_LISTS, *AT))
    if kinds is None:
        kinds = draw.sample(draw.choice(groups), draw.randint(1, 4))
    for _ in range(draw.choice([0, 1, 1, 2, 3, 4, 6]) if kinds else 0):
        kind, time_s = draw.choice(kinds), draw.choice([10.0, 30.0, 60.0, 120.0]) * draw.random()
        world.at(time_s, lambda kind=kind: act(run, kind))  # type: ignore[misc]
    if "late" in kinds and run.options.host_discovery:
        late = draw.choice([*cluster.machines.values()])
        if len(cluster.listing) > 1:
            run.faults.append((0.0, "late"))
            _list_for_a_while(run, late, "late", draw.uniform(5, 60))
