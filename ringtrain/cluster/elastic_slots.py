"""Slots of an elastic job as hosts of their own, so that a rank that fails costs its slot alone.

Horovod's elastic driver excludes the host of a failed rank by its name, with all its ranks. It is therefore given each
slot as a host HOST~NUMBER with one rank. The ranks get the real host, and their local rank among its ranks: Gloo needs
these without gaps.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

MARK = "~"
SCOPES = ("rank_and_size", "worker_addresses")
"""scopes of the rendezvous whose keys name a slot"""


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
