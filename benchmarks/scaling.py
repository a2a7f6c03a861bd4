"""Forecasts images/s on more ranks from one process' step and the network, beside what was measured.

    python benchmarks/scaling.py                     # docs/scaling.json and docs/measured/here.json
    python benchmarks/scaling.py own.json            # a file like these

A step is followed once, for the slowest rank: gradients become ready, Horovod's cycles collect and fuse them, and
allreduces run one after the other during the backward pass. All ranks are alike, so their number costs no time.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
TCP, ROCE = 1448 / 1538, 1024 / 1106  # payload of a full Ethernet frame
# Payload of the nominal rate; seconds per GB of the system on the network, and for copying and adding. Measured with
# Horovod's cnn on two ranks of one host, and between network namespaces, where no wire costs anything. NCCL over TCP:
# 1.7 GB/s on 25 Gb/s (NVIDIA/nccl-tests#83).
TRANSPORTS = {
    "nccl-tcp": (TCP, 0.25, 0.0),
    "nccl-rdma": (ROCE, 0.0, 0.0),
    "mpi": (TCP, 0.71, 0.38),
    "mpi-rdma": (ROCE, 0.0, 0.38),
}
NCCL_SLOWDOWN = 0.189  # while NCCL works, kernels take longer (arXiv 2507.03114)
# NCCL's own costs (tuning.cc) of low-latency messages and of others, of which the faster are taken: shares of the rate
# and of the latency within a host, and further latency between hosts.
PROTOCOLS = ((0.5, 0.2, 0.0), (1.0, 1.0, 9e-6))
JITTER = 0.02  # standard deviation of a known model's step; two GPUs on one node lost 0.6 and 3.4 %, 0.56 of it
DEFAULTS = {"transport": "nccl-tcp", "algorithm": "ring", "link": 25, "latency_us": 25, "ranks_per_host": 1}
DEFAULTS |= {"local_link": 80, "local_latency_us": 5, "cores_per_host": 0, "fusion_mb": 128, "cycle_ms": 1}  # Gb/s


@dataclass(frozen=True)
class Step:
    """Step of one process alone: seconds of forward and backward pass and of the update."""

    batch_size: int
    compute_s: float
    gradients: list[tuple[float, float]]  # seconds from the step's start until each is ready, and its bytes, in order
    update_s: float = 0.0
    step_s: tuple[float, ...] = ()  # of single steps, whose spread is used; empty: JITTER

    def waiting_s(self, ranks: int) -> float:
        """Expected delay of the slowest of many ranks; beyond the number of measured steps as if these were normal."""
        if not self.step_s:
            return JITTER * self.compute_s * expected_maximum(ranks)
        ordered, known = sorted(self.step_s), min(ranks, len(self.step_s))
        shares = [(place / len(ordered)) ** known for place in range(len(ordered) + 1)]
        highest = sum(value * (shares[place + 1] - shares[place]) for place, value in enumerate(ordered))
        beyond = expected_maximum(ranks) / expected_maximum(known) if ranks > known else 1.0
        return max(0.0, highest - fmean(ordered)) * beyond


def expected_maximum(num: int) -> float:
    """Expected maximum of `num` standard normal variables (Blom 1958)."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0


def read_step(point: Mapping[str, Any], folder: Path) -> Step:
    """Step of a measured profile, or of a known model on a device of known speed."""
    if "profile" in point:
        found = json.loads((folder / point["profile"]).read_text(encoding="utf-8"))
        gradients = sorted((one["ready_s"], float(one["bytes"])) for one in found["gradients"])
        return Step(found["batch_size"], found["compute_s"], gradients, found["update_s"], tuple(found["step_s"]))
    model = json.loads((DOCS / "scaling.json").read_text(encoding="utf-8"))["models"][point["model"]]
    layers = [layer for count, group in model["layers"] for layer in group * count]
    scale = model["millions"] * 1e6 / sum(weights for weights, _ in layers)
    work = sum(weights * outputs for weights, outputs in layers)
    compute_s, done, gradients = point["model_batch"] / point["model_images_per_s"], 0.0, []
    for weights, outputs in reversed(layers):
        done += weights * outputs / work
        ready_s = compute_s * min(1.0, 1 / 3 + 2 / 3 * done)  # the backward pass does the work twice
        gradients.append((ready_s, float(round(4 * weights * scale))))
    return Step(point["model_batch"], compute_s, gradients)


class Cluster:
    """Equal hosts of a point on one switch that is never the bottleneck; costs in seconds per GB.

    The link may be a measurement in docs/measured, whose rate has the system's costs in it.
    """

    def __init__(self, point: Mapping[str, Any], folder: Path) -> None:
        self.algorithm, self.is_nccl = point["algorithm"], point["transport"].startswith("nccl")
        self.ranks_per_host, self.cores_per_host = point["ranks_per_host"], point["cores_per_host"]
        self.fusion_bytes, self.cycle_s = point["fusion_mb"] * 2**20, point["cycle_ms"] / 1e3
        self.copy, self.local_latency_s = 8 / point["local_link"], point["local_latency_us"] / 1e6
        payload, self.network, work = TRANSPORTS[point["transport"]]
        self.work = point.get("work", work)
        if isinstance(point["link"], str):
            found = json.loads((folder / point["link"]).read_text(encoding="utf-8"))
            sums = [one for one in found["results"] if one["method"] == "MPI_Allreduce" and one["wire_bytes"]]
            smallest, *_, largest = sorted(sums, key=lambda one: float(one["bytes"]))
            self.wire, self.network = largest["seconds"]["median"] * 1e9 / largest["wire_bytes"], 0.0
            self.latency_s = smallest["seconds"]["median"] / math.log2(found["options"]["num_ranks"])
        else:
            self.wire, self.latency_s = 8 / point["link"] / payload, point["latency_us"] / 1e6

    def hosts(self, ranks: int) -> int:
        return -(-ranks // self.ranks_per_host)

    def crowding(self, ranks: int) -> float:
        """Factor by which a rank computes more slowly because others use its cores."""
        return max(1.0, min(ranks, self.ranks_per_host) / (self.cores_per_host or math.inf))

    def allreduce(self, num_bytes: float, ranks: int) -> tuple[float, float]:
        """Seconds of an allreduce, and those in which it waits for the wire without using a processor."""
        hosts = self.hosts(ranks)
        if self.algorithm == "halving":
            return self.halving(num_bytes, ranks)
        if self.algorithm == "ring" or hosts == 1:
            return self.ring(num_bytes, ranks)
        # Horovod reduces within hosts, then between them: the rings between hosts share a host's link.
        here, between = -(-ranks // hosts), sent_gb(num_bytes, hosts)
        waiting_s = 2 * (hosts - 1) * self.latency_s + between * self.wire
        within_s, idle_s = self.ring(num_bytes, here)
        work_s = (self.network + self.work) / here * self.crowding(ranks) * between
        return waiting_s + work_s + within_s, waiting_s + idle_s

    def ring(self, num_bytes: float, ranks: int) -> tuple[float, float]:
        """One ring through all ranks, host by host (Patarasuk and Yuan 2009): a message passes each link twice."""
        hosts, gb, crowding, times = self.hosts(ranks), sent_gb(num_bytes, ranks), self.crowding(ranks), []
        for rate, of_local, more_s in PROTOCOLS if self.is_nccl else ((1.0, 1.0, 0.0),):
            copy, wire, local_s = self.copy / rate, self.wire / rate, self.local_latency_s * of_local
            if hosts == 1:
                latency_s = 2 * (ranks - 1) * local_s
                times.append((latency_s + gb * (copy + self.work * crowding), latency_s))
                continue
            latency_s = 2 * (ranks - 1) / ranks * (hosts * (self.latency_s + more_s) + (ranks - hosts) * local_s)
            slowest = max(wire + self.network * crowding, copy if ranks > hosts else 0.0)
            times.append((latency_s + gb * (slowest + self.work * crowding), latency_s + gb * min(wire, slowest)))
        return min(times)

    def halving(self, num_bytes: float, ranks: int) -> tuple[float, float]:
        """Recursive halving and doubling (Rabenseifner 2004), as Open MPI 4.1 uses for large messages."""
        hosts, rounds, gb = self.hosts(ranks), math.log2(ranks), num_bytes / 1e9
        between, here = math.log2(hosts), ranks / hosts
        handed = 0.0 if rounds.is_integer() else 2 * gb  # ranks above a power of two send theirs to a neighbor
        network = sent_gb(num_bytes, hosts)  # by all ranks of a host together
        waiting_s = 2 * (between * self.latency_s + (rounds - between) * self.local_latency_s) + network * self.wire
        work_s = self.work * (sent_gb(num_bytes, ranks) + handed) + self.network * network / here
        within = 2 * gb * (1 - 1 / here) + handed
        return waiting_s + within * self.copy + work_s * self.crowding(ranks), waiting_s


def sent_gb(num_bytes: float, ranks: int) -> float:
    """GB that each rank of a ring sends: 2 (N - 1) messages of 1/N."""
    return 2 * (ranks - 1) / ranks * num_bytes / 1e9


def reduced_s(gradients: list[tuple[float, float]], slowest_s: float, cluster: Cluster, ranks: int) -> float:
    """When the slowest rank has computed and reduced all gradients. Horovod's thread (operations.cc, RunLoopOnce)
    sleeps until the end of its cycle, agrees on what is ready everywhere, and reduces it in fused buffers."""
    hosts = cluster.hosts(ranks)
    within = math.ceil(math.log2(-(-ranks // hosts))) * cluster.local_latency_s
    agreeing_s = within + math.ceil(math.log2(hosts)) * cluster.latency_s  # one allreduce of a bit per gradient
    cycle_s = max(agreeing_s, cluster.cycle_s)
    is_full = 0 < cluster.cores_per_host <= min(ranks, cluster.ranks_per_host)
    now_s = computed_s = busy_until_s = 0.0  # time, seconds of computing without communication, end of an allreduce
    pace, place = 1.0, 0  # seconds of computing per second until then

    def when(goal_s: float) -> float:
        left_s, busy_s = max(0.0, goal_s - computed_s), max(0.0, busy_until_s - now_s)
        if left_s <= pace * busy_s:
            return now_s + (left_s / pace if left_s else 0.0)
        return now_s + busy_s + left_s - pace * busy_s

    def computed_at(time_s: float) -> float:
        busy_s = max(0.0, min(time_s, busy_until_s) - now_s)
        return computed_s + pace * busy_s + (time_s - now_s - busy_s)

    while place < len(gradients):
        cycles = max(1, math.ceil((when(gradients[place][0]) - now_s) / cycle_s - 1e-9))
        computed_s, now_s = computed_at(now_s + cycles * cycle_s), now_s + cycles * cycle_s
        ready = [size for ready_s, size in gradients[place:] if ready_s <= computed_s + 1e-12]
        place += len(ready)
        while ready:
            num_bytes = ready.pop(0)
            while ready and num_bytes + ready[0] <= cluster.fusion_bytes:
                num_bytes += ready.pop(0)
            took_s, idle_s = cluster.allreduce(num_bytes, ranks)
            lost = 1 - 1 / (1 + NCCL_SLOWDOWN) if cluster.is_nccl else 0.0
            if is_full and not cluster.is_nccl:  # ranks that outnumber their cores poll on them while they wait
                lost = 1.0 if cluster.crowding(ranks) > 1 else 1 - idle_s / took_s
            busy_until_s, pace = max(now_s + agreeing_s, busy_until_s) + took_s, 1 - lost
            if not cluster.is_nccl:  # MPI's work blocks the thread, NCCL's is only queued
                computed_s, now_s = computed_at(busy_until_s), busy_until_s
    return max(busy_until_s, when(slowest_s))


def of_servers(step: Step, cluster: Cluster, ranks: int, num_servers: int) -> float:
    """Seconds of a step with synchronous parameter servers on the ranks' hosts. Gradients are distributed round-robin;
    a link carries a server's traffic and that of its host's ranks; the next step's forward pass hides pulling."""
    slowest_s, remote = step.compute_s + step.waiting_s(ranks), 1 - 1 / cluster.hosts(ranks)
    sent = remote * (cluster.wire + TRANSPORTS["mpi"][1]) / 1e9
    server_s, host_s = ranks * (sent + (1 - remote) * cluster.copy / 1e9), min(ranks, cluster.ranks_per_host) * sent
    pushed, pulled, sent_s = [0.0] * num_servers, [0.0] * num_servers, 0.0
    for place, (compute_s, num_bytes) in enumerate(step.gradients):
        server, ready_s = place % num_servers, slowest_s / step.compute_s * compute_s
        pushed[server] = max(pushed[server], ready_s) + num_bytes * server_s
        sent_s = max(sent_s, ready_s) + num_bytes * host_s
        pulled[server] += num_bytes * server_s
    all_s = sum(num_bytes for _, num_bytes in step.gradients) * host_s
    return max(slowest_s, sent_s, *pushed) + max(0.0, max(*pulled, all_s) - step.gradients[0][0])


def forecast(point: Mapping[str, Any], ranks: int, folder: Path) -> float:
    """Images/s of all ranks of a point."""
    step, cluster = read_step(point, folder), Cluster(point, folder)
    crowding = cluster.crowding(ranks)
    slowest_s = crowding * (step.compute_s + step.waiting_s(ranks))
    gradients = [(slowest_s / step.compute_s * ready_s, num_bytes) for ready_s, num_bytes in step.gradients]
    step_s = reduced_s(gradients if ranks > 1 else [], slowest_s, cluster, ranks)
    if "servers" in point and ranks > 1:
        step_s = of_servers(step, cluster, ranks, point["servers"])
    return ranks * step.batch_size / (step_s + crowding * step.update_s)


def show(path: Path) -> None:
    """Prints the forecasts of a file's points beside their measurements, and how far they are off."""
    content = json.loads(path.read_text(encoding="utf-8"))
    print(f"{path.name}\n\n| set-up | ranks | measured | forecast | error |\n|---|---|---|---|---|")
    errors: dict[str, list[float]] = {"rings": [], "parameter servers": []}
    for own in content["points"]:
        point = {**DEFAULTS, **content["defaults"], **own}
        for ranks, measured in point["measured"].items():
            found = forecast(point, int(ranks), path.parent)
            error, shown = found / measured - 1, "fitted"
            if int(ranks) not in (1, point.get("fitted_ranks")):
                errors["parameter servers" if "servers" in point else "rings"].append(abs(error))
                shown = f"{error:+.1%}"
            print(f"| {point['setup']} | {ranks} | {measured:,.4g} | {found:,.4g} | {shown} |")
    for kind, of_kind in errors.items():
        if of_kind:
            within = ", ".join(f"{sum(one <= most for one in of_kind)} within {most:.0%}" for most in (0.1, 0.15))
            print(f"\n{len(of_kind)} of {kind}: {fmean(of_kind):.1%} on average, {max(of_kind):.1%} at most, {within}")


if __name__ == "__main__":
    for file in sys.argv[1:] or (DOCS / "scaling.json", DOCS / "measured" / "here.json"):
        show(Path(file))
