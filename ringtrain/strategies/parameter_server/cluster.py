"""Roles, addresses and messages of the ranks of a job with parameter servers. Does not import TensorFlow.

Rank 0 is the coordinator: it runs the training loop and contains the first server. Each other rank runs a process, see
worker.py. No address is configured: each rank takes free ports, and the ranks find out which of a host's addresses are
reachable.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ringtrain
from ringtrain.config.sections import Config
from ringtrain.errors import ConfigError, LaunchError
from ringtrain.monitor import fault_injection
from ringtrain.protocol import mpi_world, transport
from ringtrain.protocol.launchers import launched_rank
from ringtrain.protocol.placement import RankPlacement, expectation, refuse_others
from ringtrain.training import agreement

CONNECT_S = 3.0
POLL_S = 0.02
LOOK_S = 1.0
"""interval at which the waiting coordinator reads messages"""
OPEN_TO_ALL = (
    "ringtrain: TensorFlow's servers of this job, one on each rank, obey anyone who reaches their ports: train on a"
    " network that only the job's hosts share, or behind a firewall"
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""handled by the coordinator alone"""


@dataclass(frozen=True)
class Roles:
    """Roles of all ranks."""

    hosts: tuple[str, ...]  # by rank
    servers: tuple[int, ...]  # ranks, of which the first is 0
    workers: tuple[int, ...]
    cluster: Mapping[str, Sequence[str]]  # host:port of each task, by TensorFlow's role name

    def of(self, rank: int) -> tuple[str, int]:
        """Role of a rank, "ps" or "worker", and its index in that role."""
        role, ranks = ("ps", self.servers) if rank in self.servers else ("worker", self.workers)
        return role, ranks.index(rank)

    def on_host_of(self, rank: int) -> list[int]:
        """Ranks of the workers on the host of a rank."""
        return [worker for worker in self.workers if self.hosts[worker] == self.hosts[rank]]


class RankGroup:
    """Messages between ranks with parameter servers. Only the coordinator calls receive_all and end."""

    def __init__(self, comm: Any, roles: Roles) -> None:
        self.comm, self.roles = comm, roles
        self.rank, self.size = int(comm.rank), int(comm.size)
        self.lost: list[dict[str, Any]] = []
        """workers that died, with the times of loss and return in Unix time"""
        self._ended = 0
        self._sent: list[Any] = []

    def send(self, rank: int, *words: Any) -> None:
        """Sends a message without waiting for the receiver."""
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self.comm.isend(words, rank))

    def receive(self, rank: int | None = None) -> tuple[int, Any] | None:
        """Returns the sender and content of a received message, or None if there is none."""
        source = mpi_world.start().ANY_SOURCE if rank is None else rank
        if not self.comm.iprobe(source):
            return None
        status = mpi_world.start().Status()
        words = self.comm.recv(source=source, status=status)
        return int(status.Get_source()), words

    def wait_until_ready(self) -> dict[int, Any]:
        """Waits for the "ready" report of every other rank; raises RingtrainError if a process could not start."""
        ready: dict[int, Any] = {}
        while len(ready) < self.size - 1:
            received = self.receive()
            if received is None:
                time.sleep(POLL_S)
                continue
            rank, (word, *rest) = received
            if word == "ready":
                ready[rank] = rest[0]
            elif word == "lost":
                ready.pop(rank, None)
                if not rest[1]:
                    raise LaunchError(f"rank {rank} on {self.roles.hosts[rank]} {rest[0]}")
            self._handle(rank, word, rest)
        return ready

    def receive_all(self) -> None:
        """Reads all pending messages; raises RingtrainError if no worker is left or a process reported an error."""
        while (received := self.receive()) is not None:
            rank, (word, *rest) = received
            self._handle(rank, word, rest)

    def _handle(self, rank: int, word: str, rest: Sequence[Any]) -> None:
        if word == "failed":
            kind, message = rest
            raise kind(f"rank {rank} on {self.roles.hosts[rank]}: {message}")
        if word == "lost":
            why, comes_back = rest
            self.lost.append({"rank": rank, "why": why, "comes_back": comes_back, "lost_s": time.time()})
            if {one["rank"] for one in self.lost if not one["comes_back"]} == set(self.roles.workers):
                raise LaunchError(f"no worker is left: the last one, rank {rank} on {self.roles.hosts[rank]}, {why}")
        elif word == "ended":
            self._ended += 1
        else:
            for one in self.lost:
                if one["rank"] == rank:
                    one.setdefault("back_s", time.time())

    def end(self, exit_code: int) -> None:
        """Stops all other ranks and waits for their acknowledgment."""
        for rank in range(1, self.size):
            self.send(rank, "end", exit_code)
        while self._ended < self.size - 1:
            self.receive_all()
            time.sleep(POLL_S)
        self.finish()

    def finish(self) -> None:
        """Waits until all sent messages are received."""
        for request in self._sent:
            request.wait()


def meet(config: Config, servers: int) -> RankGroup:
    """Assigns the roles; the first collective of all ranks. Servers are spread over hosts, in local-rank order."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # otherwise servers print their settings
    if launched_rank() is None:
        raise LaunchError(
            f"strategy.name: {config.strategy.name} has ranks for servers and workers, this is one process alone:"
            f" ringtrain launch --ps {servers} -np {servers + 2} -- python -m ringtrain.train ..."
        )
    if launched_rank() == 0:
        # On exit Open MPI calls its copy of hwloc, or TensorFlow's if that was loaded later.
        import tensorflow  # noqa: F401
    MPI = mpi_world.start()
    comm, host = MPI.COMM_WORLD, socket.gethostname()
    agreement.refuse_options(comm.allgather((config, None)))
    if comm.size <= servers:
        raise LaunchError(
            f"strategy.servers: got {servers}, and {comm.size} ranks, of which none is left to work: ringtrain launch"
            f" --ps {servers} -np {servers + 2} -- ..."
        )
    backup = config.strategy.backup_workers
    if backup >= comm.size - servers:
        raise ConfigError(
            f"strategy.backup_workers: got {backup}, and {comm.size - servers} workers: expected fewer than workers"
        )
    local_rank = int(comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank).rank)
    placement = RankPlacement(comm.rank, comm.size, host, local_rank)
    of_ranks = comm.allgather((placement, expectation(os.environ), ringtrain.__version__))
    placements, plans, versions = zip(*of_ranks, strict=True)
    refuse_others(placements, plans, versions)
    by_local_rank = sorted(range(comm.size), key=lambda rank: (placements[rank].local_rank, rank))
    server_ranks = sorted(by_local_rank[:servers])
    workers = tuple(rank for rank in range(comm.size) if rank not in server_ranks)
    _check_faults(fault_injection.parse(config.chaos), workers)
    endpoints = addresses(comm.rank, comm.allgather, num_ports=2 if comm.rank == 0 else 1)
    cluster = {
        "chief": [endpoints[0][1]],
        "ps": [endpoints[rank][0] for rank in server_ranks],
        "worker": [endpoints[rank][0] for rank in workers],
    }
    return RankGroup(comm, Roles(tuple(one.host for one in placements), tuple(server_ranks), workers, cluster))


def _check_faults(faults: Sequence[fault_injection.Fault], workers: Sequence[int]) -> None:
    """Raises ConfigError for a fault that the role of its rank does not support."""
    for fault in faults:
        can: tuple[str, ...] = ("sigkill", "sigstop")
        if fault.rank in workers:
            can += ("exception", "exit", "slow")
        if fault.mode not in can and fault.rank:
            role = "worker" if fault.rank in workers else "server"
            raise ConfigError(
                f"chaos: got mode={fault.mode} for rank {fault.rank}, a {role}: expected {', '.join(can)}"
            )


def addresses(rank: int, allgather: Callable[[Any], Sequence[Any]], num_ports: int = 1) -> list[list[str]]:
    """Finds host:port of free ports of each rank that other hosts reach; else LaunchError on all ranks. Collective."""
    if rank == 0:
        print(OPEN_TO_ALL, file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        # Bound, so that the ports stay free; they listen only if there are other hosts to call them.
        listeners = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for listener in listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for TensorFlow, soon after
            listener.bind(("", 0))
        own = (socket.gethostname(), transport.own_addresses(), [one.getsockname()[1] for one in listeners])
        of_ranks = allgather(own)
        hosts = [host for host, _, _ in of_ranks]
        if len(set(hosts)) == 1:
            return [_with_ports("127.0.0.1", ports) for _, _, ports in of_ranks]
        listeners[0].listen(4096)
        allgather(None)  # all listen
        # Each rank is tested from another host: by rank 0, or, on its host, by the first rank of another host.
        first_elsewhere = next(other for other, host in enumerate(hosts) if host != hosts[0])
        called_by = [first_elsewhere if host == hosts[0] else 0 for host in hosts]
        reached, failure = {}, ""
        try:
            for other, caller in enumerate(called_by):
                if caller == rank:
                    reached[other] = _answering(other, *of_ranks[other])
        except LaunchError as error:
            failure = str(error)
        results = allgather((reached, failure))
        failures = [text for _, text in results if text]
        if failures:
            raise LaunchError(failures[0])
        answering: dict[int, str] = {}
        for of_caller, _ in results:
            answering |= of_caller
        return [_with_ports(answering[other], ports) for other, (_, _, ports) in enumerate(of_ranks)]


def _with_ports(address: str, ports: Sequence[int]) -> list[str]:
    return [f"{address}:{port}" for port in ports]


def _answering(rank: int, host: str, candidates: Sequence[str], ports: Sequence[int]) -> str:
    for address in candidates:
        with contextlib.suppress(OSError), socket.create_connection((address, ports[0]), CONNECT_S):
            return address
    raise LaunchError(
        f"rank {rank} on {host} cannot be reached from {socket.gethostname()} at {', '.join(candidates)}, port"
        f" {ports[0]}: TensorFlow's own strategies need free ports between all hosts"
    )
