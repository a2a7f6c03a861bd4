"""What it takes to bring bytes to all ranks: links, hosts, what sends over them. Formulae only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from ringtrain.errors import ConfigError
from ringtrain.protocol.json_text import INVALID, parse_json

RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?([KMGT])(bps|bit/s|b/s|B/s)", re.IGNORECASE)
FACTORS = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}


@dataclass(frozen=True)
class Link:
    """From one host, or one process, to another; the same in both directions at once."""

    gb_per_s: float
    """10^9 bytes per second"""
    latency_s: float
    """one way"""
    measured: bool = False
    """the rate is what processes were seen to get, headers and the system's work with them included"""


@dataclass(frozen=True)
class Transport:
    """What ranks talk with, and what it costs them."""

    payload: float
    """share of a link's nominal rate that is left beside headers"""
    network_s_per_gb: float
    """work of the system for each GB sent to another host, when that is not done beside the sending itself"""
    host_s_per_gb: float
    """copying and adding for each GB that a rank sends, not done beside the sending"""
    slowdown: float
    """computing takes so much longer while an allreduce is under way, as a share; GPUs only"""
    blocking: bool
    """Horovod's thread waits for each allreduce before it collects the next gradients"""


TCP = 1448 / 1538  # bytes of a full Ethernet frame with IP, TCP and time stamps, preamble and gap
ROCE = 1024 / 1106
# Measured with Horovod's cnn on two ranks of one host: 13 MB took 6.3 ms over MPI, which yields, and 22 ms over Gloo,
# of which 1.3 ms are the copy. MPI between network namespaces, where no wire costs anything: 1.4 GB/s. NCCL over TCP:
# 1.7 GB/s on 25 Gb/s (NVIDIA/nccl-tests#83). While NCCL works, kernels take 18.9 % longer (arXiv 2507.03114).
TRANSPORTS = {
    "nccl-tcp": Transport(TCP, 0.25, 0.0, 0.189, blocking=False),
    "nccl-rdma": Transport(ROCE, 0.0, 0.0, 0.189, blocking=False),
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
    """cores that the ranks of a host compute on, one thread each; 0: every rank has a device of its own"""

    def num_hosts(self, num_ranks: int) -> int:
        """Hosts are filled one after the other."""
        return -(-num_ranks // self.ranks_per_host)

    def crowding(self, num_ranks: int) -> float:
        """How many times longer a rank computes since others use its cores."""
        here = min(num_ranks, self.ranks_per_host)
        return max(1.0, here / self.cores_per_host) if self.cores_per_host else 1.0

    def full(self, num_ranks: int) -> bool:
        """Whether communication takes its processor time from computing."""
        return bool(self.cores_per_host) and min(num_ranks, self.ranks_per_host) >= self.cores_per_host

    @property
    def wire_s_per_gb(self) -> float:
        """Time on the link between hosts."""
        return 1 / (self.link.gb_per_s * (1.0 if self.link.measured else self.transport.payload))

    @property
    def network_s_per_gb(self) -> float:
        """Work for what is sent to another host."""
        return 0.0 if self.link.measured else self.transport.network_s_per_gb


def sent_gb(num_bytes: float, num_ranks: int) -> float:
    """What each rank of a ring sends: 2 (N - 1) messages of 1/N (Patarasuk and Yuan 2009). None needs less."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / 1e9


def ring(cluster: Cluster, num_bytes: float, num_ranks: int) -> tuple[float, float]:
    """One ring through all ranks, host by host.

    A message's way leads over each link twice. Between hosts it takes the link's latency, within one the local one.

    Returns:
        Seconds that an allreduce takes; those of them in which it needs no processor, but waits for the wire.
    """
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
    """Reduced and scattered within each host, in rings between hosts by each rank for its part, gathered within each.

    As Horovod does it with HOROVOD_HIERARCHICAL_ALLREDUCE. The rings between hosts share a host's link, and their work
    is done by its ranks side by side.

    Returns:
        As ring does.
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
    """Recursive halving, then doubling (Rabenseifner 2004): Open MPI 4.1 takes it for large messages.

    Each rank exchanges half of what it has with a neighbour, a quarter with the next but one, and so on: first with
    those of its host, and between hosts what is left. Ranks above a power of two hand theirs to a neighbour before,
    and get the sum back.

    Returns:
        As ring does.
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
    """What ranks need in each cycle to agree on which gradients are ready everywhere.

    Once Horovod's response cache knows all names, one allreduce of a bit per name (response_cache.cc); a small
    allreduce takes as many rounds as the number of ranks has bits.
    """
    hosts = cluster.num_hosts(num_ranks)
    here = -(-num_ranks // hosts)
    within, between = math.ceil(math.log2(here)), math.ceil(math.log2(hosts))
    return within * cluster.local_link.latency_s + between * cluster.link.latency_s


def parse_rate(text: str) -> float:
    """Reads a link's rate.

    Args:
        text: such as 25Gbps, 100Mbit/s, or with a capital B in bytes: 1.4GB/s.

    Returns:
        GB/s.

    Raises:
        ConfigError: it is no rate above 0.
    """
    match = RATE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise ConfigError(f"got a link of {text}, expected a rate such as 25Gbps, 100Mbps or 1.4GB/s")
    return float(match[1]) * FACTORS[match[2].lower()] / (1 if match[3] == "B/s" else 8)


def read_link(text: str, latency_s: float, folder: Path = Path()) -> Link:
    """A link of a rate, or as `ringtrain doctor --json` or `ringtrain bench allreduce --out` has measured it.

    Args:
        text: a rate, or the path of such a JSON file. Of doctor's links it is the slowest; of allreduces between hosts,
            what the busiest host sent per second in the largest, receiving as much, and the smallest one's time.
        folder: that the path is relative to.

    Raises:
        ConfigError: it is none of these.
    """
    if not text.endswith(".json"):
        return Link(parse_rate(text), latency_s)
    try:
        found = parse_json((folder / text).read_text(encoding="utf-8"))
        if found.get("bench") == "allreduce":
            sums = [one for one in found["results"] if one["method"] == "MPI_Allreduce" and one["wire_bytes"]]
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
