"""Supervises a job whose hosts join and leave.

The user's program lists the hosts. Horovod's driver ends the job if one host cannot start its rank, so it is shown only
hosts with a host agent: those that answer and have the program and the same ringtrain. Every host that the job has ever
used therefore has an agent that cleans up.

The driver also excludes the host of a failed rank by its name, with all its ranks. It is therefore given each slot as a
host HOST~NUMBER with one rank, so that a rank that fails costs its slot alone. The ranks get the real host, and their
local rank among its ranks: Gloo needs these without gaps.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtrain.cluster import host_agent
from ringtrain.cluster.agents import HostAgent, HostsLost, raise_limits
from ringtrain.cluster.host_agent import LEASE_S
from ringtrain.cluster.hosts import Host, parse_hosts
from ringtrain.cluster.job import Plan
from ringtrain.cluster.processes import call, say
from ringtrain.cluster.supervisor import Supervisor
from ringtrain.errors import LaunchError
from ringtrain.protocol.placement import PlannedPlacement, RankPlacement

ASK_S = 1.0
SCRIPT_S = 30.0  # timeout of the user's program
AGAIN_S = 15.0  # before a host that does not answer is tried again
PUBLISHED = "ringtrain-discovery-"
NEVER_S = float("inf")
MARK = "~"
SCOPES = ("rank_and_size", "worker_addresses")
"""scopes of the rendezvous whose keys name a slot"""


def discovery(script: str, fixed: Sequence[Host]) -> Callable[[], tuple[Host, ...]]:
    """Function that returns the current hosts: those a program prints as lines host:slots, or `fixed` if it is ""."""
    if not script:
        return lambda: tuple(fixed)
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise LaunchError(f"got --host-discovery {script}, expected a program and its arguments: {error}") from error

    def ask() -> tuple[Host, ...]:
        lines = [line.strip() for line in call(words, SCRIPT_S, only_good=True).splitlines()]
        listed = ",".join(line for line in lines if line and not line.startswith("#"))
        return parse_hosts(listed, script) if listed else ()

    return ask


@dataclass
class ElasticHost:
    """A host of an elastic job, from its first listing on."""

    host: Host
    agent: HostAgent | None = None
    is_published: bool = False
    """Horovod is shown it"""
    ask_again_s: float = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether its agent still starts."""
        return self.agent is not None and not self.agent.ready and not self.agent.is_second


class ElasticSupervisor(Supervisor):
    """Supervisor of a job under elastic horovodrun, which starts once `first_ranks` slots are available."""

    defers_failures = False

    def __init__(self, *args: Any, discover: Callable[[], tuple[Host, ...]], first_ranks: int) -> None:
        super().__init__(*args)
        self.planned_placement = PlannedPlacement(self.job.num_ranks)  # which host has which rank changes
        self.discover = discover
        self.first_ranks = min(first_ranks, self.job.num_ranks)
        self.hosts: dict[str, ElasticHost] = {}
        self.complaint = ""
        self._listed: tuple[Host, ...] | None = None
        self._looked_up: set[str] = set()
        self._published: Path | None = None
        """file that Horovod's driver reads"""
        self._text = ""
        self._asking = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        while True:
            pause_s = ASK_S if self._listed is not None else 0
            if self._over.wait(pause_s):
                break
            try:
                listed = self.discover()
                new = {host.name for host in listed} - self._looked_up
                self.here |= host_agent.here(new)
                self._looked_up |= new
                self._listed, self.complaint = listed, ""
            except LaunchError as error:
                if not self.complaint:
                    say(f"{error}; the list of hosts is unchanged")
                self.complaint = str(error)

    # ---- hosts ----------------------------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> None:
        """Starts agents until enough hosts are ready and none is pending. Raises LaunchError if there are too few."""
        self._published = next((Path(path) for path in plan.files if Path(path).name.startswith(PUBLISHED)), None)
        raise_limits()
        self.agents.start("", is_checked=True)
        self._asking.start()
        deadline = time.monotonic() + self.options.start_timeout
        while True:
            self._poll_unless_stopped()
            self._check_agents()
            self._add_hosts()
            present = self._present()
            is_pending = self._listed is None or any(host.is_pending for host in present)
            is_enough = sum(host.host.slots for host in present if host.is_published) >= self.first_ranks
            if is_enough and not is_pending:
                return
            if time.monotonic() > deadline:
                if is_enough:
                    return
                listed = self.complaint or ", ".join(str(host.host) for host in present) or "no host"
                raise LaunchError(
                    f"{self.first_ranks} ranks are needed to start, but within {self.options.start_timeout:g} s too"
                    f" few hosts answered ({listed}): check the hosts, or lower -np and --min-np"
                )

    def _present(self) -> list[ElasticHost]:
        listed = {host.name for host in self._listed or ()}
        return [host for name, host in self.hosts.items() if name in listed]

    def _add_hosts(self) -> None:
        """Starts agents on new hosts, and shows Horovod those that are ready."""
        now = time.monotonic()
        for listed in self._listed or ():
            host = self.hosts.setdefault(listed.name, ElasticHost(listed))
            host.host = listed
            if host.agent is None and now >= host.ask_again_s:
                if listed.name in self.agents.not_cleaned_up:
                    host.agent = self._clean_up(listed.name)
                    continue
                here = self.agents.members[0] if listed.name in self.here else None
                host.agent = here or self.agents.start(listed.name, is_checked=True)
        for host in self._present():
            agent = host.agent
            if not agent or agent.is_second or not agent.ready or host.is_published:
                continue
            host.is_published = self._has_same_version(host, agent)
        self._publish()

    def _has_same_version(self, host: ElasticHost, agent: HostAgent) -> bool:
        """Checks that a host has the same ringtrain as this one; excludes one that differs, with one line."""
        here = self.agents.members[0].version
        if here == agent.version:
            return True
        if host.ask_again_s < NEVER_S:
            name = host.host.name
            say(f"{name} has ringtrain {agent.version}, this host {here}: excluded; install the same everywhere")
            host.ask_again_s = NEVER_S
        return False

    def _publish(self) -> None:
        """Writes the file that Horovod's driver reads each second."""
        shown = [host.host for host in self._present() if host.is_published]
        text = "".join(f"{host.name}:{host.slots}\n" for host in shown)
        if self._published and text != self._text:
            part = self._published.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            os.replace(part, self._published)
            self._text = text

    def _check_agents(self) -> None:
        """Drops hosts whose agents were lost; an agent cut off from the launcher cleans up when its lease expires."""
        for agent in list(self.agents.members):
            if not agent.has_exited:
                continue
            self._poll()
            why = self.agents.why_lost(agent)
            if not agent.host:
                raise HostsLost([""], f"lost the host agent of this host while the job ran: {why}")
            self.agents.drop(agent)
            host, now = self.hosts[agent.host], time.monotonic()
            if agent.is_second:
                self._take_clean_up(host, agent)
                continue
            if not agent.ready and not host.ask_again_s:
                say(f"{why}; excluded until it does")
            wait_s = LEASE_S + AGAIN_S if agent.ready else AGAIN_S  # the lost agent may still be cleaning up
            host.agent, host.is_published, host.ask_again_s = None, False, now + (0.0 if agent.was_killed else wait_s)
            if agent.ready and self._process:
                say(f"lost {agent.host}: {why}; continues without")
                self._publish()
                # Ranks run on where an agent was killed, or have started on a host that has booted again.
                host.agent = self._clean_up(agent.host)

    def _clean_up(self, name: str) -> HostAgent:
        """Starts an agent that cleans up on a host whose first one was lost."""
        second = self.agents.start_second(name)
        second.send("end")
        return second

    def _take_clean_up(self, host: ElasticHost, second: HostAgent) -> None:
        """Lets a host be used again once no rank is left there."""
        host.agent = None
        if not second.cleaned_up:
            host.ask_again_s = max(host.ask_again_s, time.monotonic() + AGAIN_S)
        else:
            self.agents.not_cleaned_up = [name for name in self.agents.not_cleaned_up if name != second.host]

    # ---- while it runs --------------------------------------------------------------------------------------------

    def _check_start(self, began_s: float) -> None:
        """Starts agents on new hosts; there is no planned placement to compare with."""
        self._add_hosts()
        timeout_s = self.options.start_timeout
        if not self.reports.ranks and time.monotonic() > began_s + timeout_s and not self.stopped_by:
            raise LaunchError(
                f"no rank started within {timeout_s:g} s: check horovodrun's output above; if the hosts' interfaces"
                f" differ in name it finds none: give --network-interface, or raise --start-timeout"
            )

    def _check_end(self, returncode: int) -> None:
        """Accepts any number of ranks at the end."""

    def _agent_host(self, rank: RankPlacement) -> str:
        return next((agent.host for agent in self.agents.members if agent.hostname == rank.host), "")


# ---- slots as hosts, in the process of horovodrun --------------------------------------------------------------------


def host_of(name: str) -> str:
    """Real host of a name that Horovod's driver knows."""
    return name.partition(MARK)[0]


def number_of(name: str) -> int:
    """Number of the slot on its host, from 0 on; 0 for a real host."""
    return int(name.partition(MARK)[2] or 0)


def readable(message: str) -> str:
    """Message of Horovod with HOST[NUMBER] in place of HOST~NUMBER[0]."""
    return re.sub(rf"{MARK}(\d+)\[0\]", r"[\1]", message)


def split(hosts: dict[str, int]) -> dict[str, int]:
    """Slots as hosts, from the number of slots of each host."""
    return {f"{host}{MARK}{number}": 1 for host, slots in hosts.items() for number in range(slots)}


def together(names: Sequence[str]) -> list[str]:
    """Slots in the order of their hosts, so that neighbors in the ring are on one host; the first stays first."""
    hosts = list(dict.fromkeys(map(host_of, names)))
    return sorted(names, key=lambda name: hosts.index(host_of(name)))


def placement(slots: Sequence[Any]) -> dict[tuple[str, int], Any]:
    """Real placement of each rank, by host and local rank as the driver knows them. slots: Horovod's SlotInfo."""
    by_host: dict[str, list[Any]] = {}
    for slot in slots:
        by_host.setdefault(host_of(slot.hostname), []).append(slot)
    placed = {}
    for host, own in by_host.items():
        own.sort(key=lambda slot: (number_of(slot.hostname), slot.local_rank))
        for local_rank, slot in enumerate(own):
            hosts = [other for other, ranks in by_host.items() if len(ranks) > local_rank]
            placed[slot.hostname, slot.local_rank] = dataclasses.replace(
                slot,
                hostname=host,
                local_rank=local_rank,
                local_size=len(own),
                cross_rank=hosts.index(host),
                cross_size=len(hosts),
            )
    return placed


def make_driver() -> Any:
    """Class of Horovod's elastic driver that keeps the slots of a host together, and knows whose process has exited.

    Horovod's starts processes in new slots only. If fewer slots than --min-np are left, it waits, and a slot whose
    process has exited may be back before ranks are assigned without it: it would stay empty, and the others would wait.
    It announces a change once, to rank 0, which may still be starting: this one repeats it when rank 0 listens.
    """
    from horovod.runner.elastic import discovery, driver
    from horovod.runner.elastic.worker import HostUpdateResult

    class Driver(driver.ElasticDriver):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._newest: dict[tuple[str, int], Any] = {}
            """slot for which the newest process was started, by host and local rank"""
            self._empty: set[tuple[str, int]] = set()
            """where that process has exited"""
            super().__init__(*args, **options)

        def register_worker_server(self, host: str, slot: int, addresses: Any, secret_key: Any) -> None:
            super().register_worker_server(host, slot, addresses, secret_key)
            first = self.get_coordinator_info()
            if first and (first.hostname, first.local_rank) == (host, slot):
                self._notify_workers_host_changes(self._host_manager.current_hosts, HostUpdateResult.mixed)

        def _start_worker_process(self, slot_info: Any) -> None:
            key = slot_info.hostname, slot_info.local_rank
            self._newest[key] = slot_info
            self._empty.discard(key)
            super()._start_worker_process(slot_info)

        def _handle_worker_exit(self, slot_info: Any, exit_code: int, timestamp: float) -> None:
            key = slot_info.hostname, slot_info.local_rank
            if self._newest[key] is not slot_info:
                return  # it is not the new process that has failed
            self._empty.add(key)
            # Ranks may be assigned just now: the slot gets a new process, or Horovod gives up. Noted after that, this
            # exit would count as the new process's, or wait for ranks that no longer come.
            self._worker_registry._action_event.wait()
            if self._newest[key] is slot_info:
                super()._handle_worker_exit(slot_info, exit_code, timestamp)

        def _update_host_assignments(self, current_hosts: Any) -> Any:
            pending = super()._update_host_assignments(current_hosts)
            starting = {(slot.hostname, slot.local_rank) for slot in pending}
            for slots in self._host_assignments.values():
                for slot in slots:
                    key = slot.hostname, slot.local_rank
                    if key in self._empty and key not in starting:
                        pending.append(slot)
            return pending

        def _get_host_assignments(self, current_hosts: Any) -> Any:
            """Takes the slots that were there first, and keeps those of a host together."""
            names = together(current_hosts.host_assignment_order[: self._max_num_proc])
            return super()._get_host_assignments(discovery.DiscoveredHosts(current_hosts.host_slots, names))

        def get_slot_info(self, host: str, slot: int) -> Any:
            """Real placement of a slot, for its rank."""
            info = super().get_slot_info(host, slot)
            return self._rendezvous.placement.get((info.hostname, info.local_rank), info)

    return Driver


def install() -> None:
    """Makes Horovod's elastic driver see slots as hosts."""
    from horovod.runner import gloo_run
    from horovod.runner.elastic import discovery

    def command_for(settings: Any) -> Callable[..., tuple[int, float]]:
        execute = command_of(settings)

        def on_host(command: str, slot: Any, events: Any) -> tuple[int, float]:
            result: tuple[int, float] = execute(
                command, dataclasses.replace(slot, hostname=host_of(slot.hostname)), events
            )
            return result

        return on_host

    def ordered(available: set[str], before: Sequence[str]) -> list[str]:
        names = sorted(available, key=lambda name: (host_of(name), number_of(name)))
        result: list[str] = order(names, before)
        return result

    find, order = (
        discovery.HostDiscoveryScript.find_available_hosts_and_slots,
        discovery.HostManager.order_available_hosts,
    )
    command_of = gloo_run._exec_command_fn
    discovery.HostDiscoveryScript.find_available_hosts_and_slots = lambda self: split(find(self))
    discovery.HostManager.order_available_hosts = staticmethod(ordered)
    # Where it waits for a second host, two slots of one do not count.
    discovery.DiscoveredHosts.available_hosts = property(lambda self: set(map(host_of, self.host_assignment_order)))
    gloo_run.ElasticDriver = make_driver()
    gloo_run._exec_command_fn = command_for
