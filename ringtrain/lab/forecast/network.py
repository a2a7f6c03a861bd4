"""Time of an allreduce over links, hosts and transports. Pure formulas."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ringtrain.errors import ConfigError
from ringtrain.protocol.json_text import INVALID, parse_json

RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?([KMGT])(bps|bit/s|b/s|B/s)", re.IGNORECASE)
FACTORS = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}


@dataclass(frozen=True)
class Link:
    """Full-duplex link between two hosts or processes."""

    gb_per_s: float
    """10^9 bytes per second"""
    latency_s: float
    """one way"""
    measured: bool = False
    """whether the rate was measured between processes, so that it includes headers and system overhead"""


@dataclass(frozen=True)
class Protocol:
    """Way of sending a message to the next rank of a ring."""

    rate: float = 1.0
    """fraction of a link's rate"""
    local_latency: float = 1.0
    """fraction of the latency within a host"""
    network_latency_s: float = 0.0
    """in addition to the link's"""


# NCCL's own table of costs (tuning.cc): low-latency messages carry a flag with each word, the others synchronize.
NCCL = (Protocol(rate=0.5, local_latency=0.2), Protocol(network_latency_s=9e-6))


@dataclass(frozen=True)
class Transport:
    """Transport between ranks and its costs."""

    payload: float
    """fraction of a link's nominal rate left after headers"""
    network_s_per_gb: float
    """system overhead per GB sent to another host that does not overlap with sending"""
    host_s_per_gb: float
    """copying and adding per GB that a rank sends that does not overlap with sending"""
    slowdown: float
    """extra compute time during an allreduce, as a fraction; GPUs only"""
    blocking: bool
    """whether Horovod's thread waits for each allreduce before it collects the next gradients"""
    protocols: tuple[Protocol, ...] = (Protocol(),)
    """the fastest is taken for each message"""


TCP = 1448 / 1538  # bytes of a full Ethernet frame with IP, TCP and time stamps, preamble and gap
ROCE = 1024 / 1106
# Measured with Horovod's cnn on two ranks of one host: 13 MB took 6.3 ms over MPI, which yields, and 22 ms over Gloo,
# of which 1.3 ms are the copy. MPI between network namespaces, where no wire costs anything: 1.4 GB/s. NCCL over TCP:
# 1.7 GB/s on 25 Gb/s (NVIDIA/nccl-tests#83). While NCCL works, kernels take 18.9 % longer (arXiv 2507.03114).
TRANSPORTS = {
    "nccl-tcp": Transport(TCP, 0.25, 0.0, 0.189, blocking=False, protocols=NCCL),
    "nccl-rdma": Transport(ROCE, 0.0, 0.0, 0.189, blocking=False, protocols=NCCL),
    "mpi": Transport(TCP, 0.71, 0.38, 0.0, blocking=True),
    "mpi-rdma": Transport(ROCE, 0.0, 0.38, 0.0, blocking=True),
    "gloo": Transport(TCP, 0.71, 1.58, 0.0, blocking=True),
}


@dataclass(frozen=True)
class Cluster:
    """Equal hosts on one switch that is never the bottleneck."""

    link: Link
    """of each host"""
    local_link: Link
    """between two ranks of a host"""
    ranks_per_host: int
    transport: Transport
    cores_per_host: float = 0.0
    """cores that the ranks of a host compute on, one thread each; 0: every rank has its own device"""

    def num_hosts(self, num_ranks: int) -> int:
        """Number of hosts, filled one after the other."""
        return -(-num_ranks // self.ranks_per_host)

    def crowding(self, num_ranks: int) -> float:
        """Factor by which a rank computes more slowly because others use its cores."""
        here = min(num_ranks, self.ranks_per_host)
        if self.cores_per_host:
            return max(1.0, here / self.cores_per_host)
        return 1.0

    def full(self, num_ranks: int) -> bool:
        """Whether communication takes processor time from computing."""
        return bool(self.cores_per_host) and min(num_ranks, self.ranks_per_host) >= self.cores_per_host

    def sending_by(self, protocol: Protocol) -> Cluster:
        """The cluster with the rates and latencies of a protocol."""
        if protocol == Protocol():
            return self
        link_s = self.link.latency_s + protocol.network_latency_s
        local_s = self.local_link.latency_s * protocol.local_latency
        return replace(
            self,
            link=replace(self.link, gb_per_s=self.link.gb_per_s * protocol.rate, latency_s=link_s),
            local_link=replace(self.local_link, gb_per_s=self.local_link.gb_per_s * protocol.rate, latency_s=local_s),
        )

    @property
    def wire_s_per_gb(self) -> float:
        """Time on the link between hosts."""
        return 1 / (self.link.gb_per_s * (1.0 if self.link.measured else self.transport.payload))

    @property
    def network_s_per_gb(self) -> float:
        """System overhead of sending to another host."""
        return 0.0 if self.link.measured else self.transport.network_s_per_gb


def sent_gb(num_bytes: float, num_ranks: int) -> float:
    """GB that each rank of a ring sends, 2 (N - 1) messages of 1/N: the minimum (Patarasuk and Yuan 2009)."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / 1e9


def ring(cluster: Cluster, num_bytes: float, num_ranks: int) -> tuple[float, float]:
    """Computes the time of one ring through all ranks, host by host, by the fastest protocol.

    A message passes each link twice. Between hosts it takes the link's latency, within a host the local one.

    Returns:
        Seconds of an allreduce, and those of them in which it waits for the wire without using a processor.
    """
    return min(_ring(cluster.sending_by(one), num_bytes, num_ranks) for one in cluster.transport.protocols)


def _ring(cluster: Cluster, num_bytes: float, num_ranks: int) -> tuple[float, float]:
    sent, hosts = sent_gb(num_bytes, num_ranks), cluster.num_hosts(num_ranks)
    work_s = cluster.transport.host_s_per_gb * cluster.crowding(num_ranks)
    copy_s = 1 / cluster.local_link.gb_per_s
    if hosts == 1:
        latency_s = 2 * (num_ranks - 1) * cluster.local_link.latency_s
        return latency_s + sent * (copy_s + work_s), latency_s
    hops = hosts * cluster.link.latency_s + (num_ranks - hosts) * cluster.local_link.latency_s
    latency_s = 2 * (num_ranks - 1) / num_ranks * hops
    system_s = cluster.network_s_per_gb * cluster.crowding(num_ranks)
    slowest_s = cluster.wire_s_per_gb + system_s
    if num_ranks > hosts:
        slowest_s = max(slowest_s, copy_s)
    return latency_s + sent * (slowest_s + work_s), latency_s + sent * min(cluster.wire_s_per_gb, slowest_s)


def hierarchical(cluster: Cluster, num_bytes: float, num_ranks: int) -> tuple[float, float]:
    """Computes the time of an allreduce that reduces within hosts, then between them, then gathers within hosts.

    As Horovod does with HOROVOD_HIERARCHICAL_ALLREDUCE. The rings between hosts share a host's link; its ranks do their
    work in parallel. Returns the same as ring.
    """
    hosts = cluster.num_hosts(num_ranks)
    if hosts == 1:
        return ring(cluster, num_bytes, num_ranks)
    here = -(-num_ranks // hosts)
    crowding = cluster.crowding(num_ranks)
    between = sent_gb(num_bytes, hosts)
    waiting_s = 2 * (hosts - 1) * cluster.link.latency_s + between * cluster.wire_s_per_gb
    work_s = (cluster.network_s_per_gb + cluster.transport.host_s_per_gb) / here * crowding * between
    if here == 1:
        return waiting_s + work_s, waiting_s
    within, idle_s = ring(cluster, num_bytes, here)
    return waiting_s + work_s + within, waiting_s + idle_s


def halving(cluster: Cluster, num_bytes: float, num_ranks: int) -> tuple[float, float]:
    """Computes the time of recursive halving and doubling (Rabenseifner 2004), as Open MPI 4.1 uses for large messages.

    Each rank exchanges half of its data with a neighbor, a quarter with the next but one, and so on: first within its
    host, then the rest between hosts. Ranks above a power of two first send theirs to a neighbor, and receive the sum
    at the end. Returns the same as ring.
    """
    hosts = cluster.num_hosts(num_ranks)
    here, crowding = num_ranks / hosts, cluster.crowding(num_ranks)
    rounds = math.log2(num_ranks)
    between = math.log2(hosts)
    latency_s = 2 * (between * cluster.link.latency_s + (rounds - between) * cluster.local_link.latency_s)
    all_gb = num_bytes / 1e9
    handed_gb = 0.0 if rounds.is_integer() else 2 * all_gb
    within_gb = 2 * all_gb * (1 - 1 / here) + handed_gb
    network_gb = sent_gb(num_bytes, hosts)  # by all ranks of a host together
    waiting_s = latency_s + network_gb * cluster.wire_s_per_gb
    work_s = cluster.transport.host_s_per_gb * (sent_gb(num_bytes, num_ranks) + handed_gb)
    work_s += cluster.network_s_per_gb * network_gb / here
    return waiting_s + within_gb / cluster.local_link.gb_per_s + work_s * crowding, waiting_s


ALGORITHMS = {"ring": ring, "hierarchical": hierarchical, "halving": halving}


def negotiation_s(cluster: Cluster, num_ranks: int) -> float:
    """Time per cycle in which ranks agree on the gradients that are ready everywhere.

    Once Horovod's response cache knows all names, this is one allreduce of a bit per name (response_cache.cc). A small
    allreduce takes as many rounds as the number of ranks has bits.
    """
    hosts = cluster.num_hosts(num_ranks)
    here = -(-num_ranks // hosts)
    within, between = math.ceil(math.log2(here)), math.ceil(math.log2(hosts))
    return within * cluster.local_link.latency_s + between * cluster.link.latency_s


def parse_rate(text: str) -> float:
    """Converts a link rate such as 25Gbps, 100Mbit/s or, in bytes, 1.4GB/s to GB/s."""
    match = RATE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise ConfigError(f"got a link of {text}, expected a rate such as 25Gbps, 100Mbps or 1.4GB/s")
    return float(match[1]) * FACTORS[match[2].lower()] / (1 if match[3] == "B/s" else 8)


def read_link(text: str, latency_s: float, folder: Path = Path()) -> Link:
    """Link of a given rate, or as `ringtrain doctor --json` or `ringtrain bench allreduce --out` measured it.

    Args:
        text: Rate, or path of such a JSON file. Of doctor's links the slowest counts. Of allreduces between hosts, the
            rate is that of the busiest host in the largest, and the latency comes from the time of the smallest.
        folder: Base of a relative path.
    """
    if not text.endswith(".json"):
        return Link(parse_rate(text), latency_s)
    try:
        found = parse_json((folder / text).read_text(encoding="utf-8"))
        if found.get("bench") == "allreduce":
            sums = []
            for one in found["results"]:
                if one["method"] == "MPI_Allreduce" and one["wire_bytes"]:
                    sums.append(one)
            smallest, *_, largest = sorted(sums, key=lambda one: float(one["bytes"]))
            rate = largest["wire_bytes"] / 1e9 / largest["seconds"]["median"]
            return Link(rate, smallest["seconds"]["median"] / math.log2(found["options"]["num_ranks"]), measured=True)
        slowest = min(found["ring"]["links"], key=lambda link: float(link["mb_per_s"]))
        return Link(slowest["mb_per_s"] / 1e3, slowest["latency_us"] / 1e6, measured=True)
    except (OSError, *INVALID) as error:
        raise ConfigError(
            f"{text}: {type(error).__name__}: {error}: expected what ringtrain doctor --json says of two hosts, or"
            f" bench allreduce --out of two sizes between hosts, MPI_Allreduce among its methods"
        ) from None
