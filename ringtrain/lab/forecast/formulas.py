"""Images/s at any number of ranks, from one process' step and a network, and the inverse problem. Pure functions.

A step is simulated once, for the slowest rank: gradients become ready, Horovod's cycles collect and fuse them, and
allreduces run one after the other during the backward pass. All ranks are alike, so their number costs no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ringtrain.compressions import kind_of, reduced_bytes
from ringtrain.errors import ConfigError
from ringtrain.lab.forecast.network import ALGORITHMS, TCP, TRANSPORTS, Cluster, negotiation_s, sent_gb
from ringtrain.lab.forecast.profile import Profile

Algorithm = Literal["ring", "hierarchical", "halving"]
"""seconds of one core per GB of gradients, measured: docs/slow-links.md; GPUs are taken to need none"""
FASTEST_GB_PER_S = 1e5
LARGEST_FACTOR = 1024


@dataclass(frozen=True)
class Setting:
    """Settings of a job, apart from the cluster."""

    num_ranks: int
    algorithm: Algorithm = "ring"
    compression: str = "none"
    """as hvd.compression: none, fp16, bf16, powersgd:4, ..."""
    accumulation_steps: int = 1
    fusion_mb: float = 128.0
    """MiB of Horovod's fusion buffer; 0: no fusion"""
    cycle_time_ms: float = 1.0
    local_steps: int = 1
    """updates between two reductions"""

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise ConfigError(f"local_steps: got {self.local_steps}, expected 1 or more")
        if self.num_ranks < 1 or self.accumulation_steps < 1 or self.fusion_mb < 0 or not self.cycle_time_ms > 0:
            raise ConfigError(
                f"got {self.num_ranks} ranks, {self.accumulation_steps} accumulated steps, a fusion buffer of"
                f" {self.fusion_mb:g} MB and cycles of {self.cycle_time_ms:g} ms, expected 1 or more, 1 or more,"
                f" 0 or more and more than 0"
            )


@dataclass(frozen=True)
class Prediction:
    """Prediction for one set-up. A reduction and its updates take compute_s + waiting_s + exposed_s + update_s."""

    num_ranks: int
    num_hosts: int
    images_per_s: float
    """of all ranks together"""
    efficiency: float
    """images_per_s relative to the same number of processes without communication on the same processors"""
    compute_s: float
    """between two reductions, of one process alone on its share of the processors"""
    waiting_s: float
    """of the other ranks for the slowest one"""
    exposed_s: float
    """communication that the backward pass does not hide, and its slowdown by hidden communication"""
    update_s: float
    communication_s: float
    """total time of the allreduces"""
    sent_gb: float
    """per rank and reduction"""
    num_allreduces: int
    steps_per_s: float
    """of a rank"""

    @property
    def step_s(self) -> float:
        """Time between two reductions."""
        return self.compute_s + self.waiting_s + self.exposed_s + self.update_s


def predict(profile: Profile, cluster: Cluster, setting: Setting) -> Prediction:
    """Predicts a job that averages its gradients by allreduce."""
    ranks, crowding = setting.num_ranks, cluster.crowding(setting.num_ranks)
    step_s = crowding * profile.compute_s
    num_steps = setting.accumulation_steps * setting.local_steps
    compute_s = step_s * num_steps
    slowest_s = compute_s + crowding * profile.waiting_s(ranks, num_steps)
    update_s = crowding * profile.update_s * setting.local_steps
    sizes, played = sent_bytes(profile, setting.compression), _Played()
    kind, cores = setting.compression.partition(":")[0], cluster.cores_per_host > 0
    if ranks > 1 and (setting.local_steps > 1 or kind == "bf16"):
        # All as one, after the backward pass, and the last update.
        played = _play([(sum(sizes), slowest_s)], slowest_s, cluster, setting)
    else:
        # Only the last of the accumulated steps sends its gradients.
        stretch, before_s = slowest_s / compute_s, compute_s - step_s
        ready_s = [stretch * (before_s + crowding * g.ready_s) for g in profile.gradients]
        gradients = list(zip(sizes, ready_s, strict=True))
        if ranks == 1:
            gradients = []
        played = _play(gradients, slowest_s, cluster, setting)
    if kind == "bf16" and cluster.transport is TRANSPORTS["gloo"]:
        played.now_s += played.communication_s  # its alltoall and allgather take twice a ring's time for their bytes
    if ranks > 1:
        played.now_s += kind_of(setting.compression).compress_s_per_gb * profile.total_bytes / 1e9 * crowding * cores
    return _prediction(profile, cluster, setting, (compute_s, slowest_s, update_s), played)


def sent_bytes(profile: Profile, compression: str) -> list[float]:
    """Bytes of each gradient as a compression sends them; raises ConfigError without the shapes it needs."""
    if not kind_of(compression).needs_shapes:
        return [gradient.bytes * reduced_bytes([(1,)], compression) / 4 for gradient in profile.gradients]
    without = next((gradient for gradient in profile.gradients if gradient.shape is None), None)
    if without:
        raise ConfigError(
            f"compression: {compression} needs the shapes of the gradients, which profile {profile.name} lacks for"
            f" {without.name or 'the first'}: measure it with ringtrain bench train"
        )
    return [float(reduced_bytes([gradient.shape or ()], compression)) for gradient in profile.gradients]


@dataclass
class _Played:
    """Simulation state: computing of the slowest rank, slower during an allreduce, and the data sent."""

    now_s: float = 0.0
    progress_s: float = 0.0
    """computing done, in seconds without communication"""
    busy_until_s: float = 0.0
    pace: float = 1.0
    """seconds of progress per second until then"""
    communication_s: float = 0.0
    sent_gb: float = 0.0
    num_allreduces: int = 0

    def when(self, progress_s: float) -> float:
        """Time at which the given computing progress will be reached."""
        left_s, busy_s = max(0.0, progress_s - self.progress_s), max(0.0, self.busy_until_s - self.now_s)
        if left_s <= self.pace * busy_s:
            return self.now_s + (left_s / self.pace if left_s else 0.0)
        return self.now_s + busy_s + left_s - self.pace * busy_s

    def go_to(self, time_s: float) -> None:
        """Advances the simulation to a time."""
        busy_s = max(0.0, min(time_s, self.busy_until_s) - self.now_s)
        self.progress_s += self.pace * busy_s + (time_s - self.now_s - busy_s)
        self.now_s = time_s


def _play(gradients: list[tuple[float, float]], slowest_s: float, cluster: Cluster, setting: Setting) -> _Played:
    """Simulates Horovod's thread (operations.cc, RunLoopOnce): it sleeps until the end of its cycle, negotiates which
    gradients are ready, and reduces them in fused buffers. NCCL's work is only queued; MPI's and Gloo's blocks it.

    Args:
        gradients: Bytes and ready time, in seconds of computing, in order of ready time.
    """
    state, allreduce = _Played(), ALGORITHMS[setting.algorithm]
    agreeing_s = negotiation_s(cluster, setting.num_ranks)
    cycle_s, threshold = max(agreeing_s, setting.cycle_time_ms / 1e3), setting.fusion_mb * 2**20
    place = 0
    while place < len(gradients):
        ready_s = state.when(gradients[place][1])
        state.go_to(state.now_s + cycle_s * max(1, math.ceil((ready_s - state.now_s) / cycle_s - 1e-9)))
        start = place
        while place < len(gradients) and gradients[place][1] <= state.progress_s + 1e-12:
            place += 1
        for num_bytes in _fused([num_bytes for num_bytes, _ in gradients[start:place]], threshold):
            took_s, idle_s = allreduce(cluster, num_bytes, setting.num_ranks)
            lost = 1 - 1 / (1 + cluster.transport.slowdown)
            if cluster.transport.blocking and cluster.full(setting.num_ranks):
                # Ranks that outnumber their cores poll on them while they wait.
                lost = 1.0
                if cluster.crowding(setting.num_ranks) == 1:
                    lost = 1 - idle_s / took_s
            begin_s = max(state.now_s + agreeing_s, state.busy_until_s)
            state.busy_until_s, state.pace = begin_s + took_s, 1 - lost
            state.communication_s += took_s
            state.sent_gb += sent_gb(num_bytes, setting.num_ranks)
            state.num_allreduces += 1
            if cluster.transport.blocking:
                state.go_to(state.busy_until_s)
    state.go_to(max(state.busy_until_s, state.when(slowest_s)))
    return state


def _fused(sizes: list[float], threshold: float) -> Iterator[float]:
    """Sizes of the fused buffers: gradients in order, up to the threshold in bytes."""
    buffer = 0.0
    for size in sizes:
        if buffer and buffer + size > threshold:
            yield buffer
            buffer = 0.0
        buffer += size
    if buffer:
        yield buffer


def _prediction(
    profile: Profile, cluster: Cluster, setting: Setting, parts: tuple[float, float, float], played: _Played
) -> Prediction:
    compute_s, slowest_s, update_s = parts
    num_steps = setting.accumulation_steps * setting.local_steps
    step_s = played.now_s + update_s
    return Prediction(
        num_ranks=setting.num_ranks,
        num_hosts=cluster.num_hosts(setting.num_ranks),
        images_per_s=setting.num_ranks * profile.batch_size * num_steps / step_s,
        efficiency=min(1.0, (compute_s + update_s) / step_s),
        compute_s=compute_s,
        waiting_s=slowest_s - compute_s,
        exposed_s=max(0.0, played.now_s - slowest_s),
        update_s=update_s,
        communication_s=played.communication_s,
        sent_gb=played.sent_gb,
        num_allreduces=played.num_allreduces,
        steps_per_s=num_steps / step_s,
    )


def parameter_servers(profile: Profile, cluster: Cluster, setting: Setting, num_servers: int) -> Prediction:
    """Predicts the same job with synchronous parameter servers: ranks push gradients and pull weights.

    Servers run on the ranks' hosts, one on each while hosts last. Gradients are distributed round-robin, so the server
    with the largest is the slowest. A server's traffic in each direction goes through its host's link, as does
    that of the host's ranks. The next step's forward pass hides pulling.

    Args:
        cluster: Its transport is ignored, since servers use gRPC over TCP.
        setting: Algorithm, fusion and cycle time are ignored.
    """
    if num_servers < 1:
        raise ConfigError(f"got {num_servers} parameter servers, expected 1 or more")
    ranks, crowding = setting.num_ranks, cluster.crowding(setting.num_ranks)
    if setting.local_steps > 1 or not kind_of(setting.compression).is_cast:
        raise ConfigError("servers: of compressions they know fp16 alone, and no local steps: leave the others out")
    hosts, share = cluster.num_hosts(ranks), reduced_bytes([(1,)], setting.compression) / 4
    step_s = crowding * profile.compute_s
    compute_s = step_s * setting.accumulation_steps
    slowest_s = compute_s + crowding * profile.waiting_s(ranks, setting.accumulation_steps)
    remote = 1 - 1 / hosts
    mpi = TRANSPORTS["mpi"]
    wire_s = 1 / cluster.link.gb_per_s / (1.0 if cluster.link.measured else TCP)
    network_s = 0.0 if cluster.link.measured else mpi.network_s_per_gb
    server_s = ranks * (remote * (wire_s + network_s) + (1 - remote) / cluster.local_link.gb_per_s) / 1e9
    host_s = min(ranks, cluster.ranks_per_host) * remote * (wire_s + network_s) / 1e9
    pushed = [0.0] * num_servers
    pulled = [0.0] * num_servers
    sent_s, stretch = 0.0, slowest_s / compute_s
    if ranks > 1:
        for place, gradient in enumerate(profile.gradients):
            server = place % num_servers
            ready_s = stretch * (compute_s - step_s + crowding * gradient.ready_s)
            num_bytes = share * gradient.bytes
            pushed[server] = max(pushed[server], ready_s) + num_bytes * server_s
            sent_s = max(sent_s, ready_s) + num_bytes * host_s
            pulled[server] += num_bytes * server_s
    forward_s = crowding * profile.gradients[0].ready_s
    done_s = max(slowest_s, sent_s, *pushed) if ranks > 1 else slowest_s
    all_gb = share * profile.total_bytes / 1e9
    done_s += max(0.0, max(*pulled, all_gb * 1e9 * host_s) - forward_s) if ranks > 1 else 0.0
    played = _Played(now_s=done_s, communication_s=max(pulled) * 2, sent_gb=remote * all_gb)
    return _prediction(profile, cluster, setting, (compute_s, slowest_s, crowding * profile.update_s), played)


def calibrated(profile: Profile, cluster: Cluster, setting: Setting, images_per_s: float) -> Cluster:
    """Returns the cluster with the host_s_per_gb that predicts one point measured on one host.

    The cost is 0 if the point is faster than any prediction.
    """
    if cluster.num_hosts(setting.num_ranks) > 1 or setting.num_ranks < 2:
        raise ConfigError(
            f"got a point of {setting.num_ranks} ranks to calibrate a host of {cluster.ranks_per_host}, expected"
            f" 2 to {cluster.ranks_per_host}"
        )

    def with_cost(host_s_per_gb: float) -> Cluster:
        return replace(cluster, transport=replace(cluster.transport, host_s_per_gb=host_s_per_gb))

    cost = least(lambda cost: predict(profile, with_cost(cost), setting).images_per_s <= images_per_s, 1e-3, 1e3)
    return with_cost(cost or 0.0)


def least(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """Least number, to 0.1 %, from which a condition holds: low if it holds there, None if not even at high."""
    if holds(low):
        return low
    if not holds(high):
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Way:
    """Change that may reach the requested efficiency."""

    change: str
    needed: str
    """required value; "" if it does not reach the efficiency"""
    efficiency: float
    """at the required value, or the best that was reached"""


def reach(profile: Profile, cluster: Cluster, setting: Setting, efficiency: float) -> list[Way]:
    """Inverse problem: the link, batch, accumulation, algorithm or compression that reaches an efficiency."""
    if not 0 < efficiency < 1:
        raise ConfigError(f"--reach: got {efficiency:g}, expected an efficiency between 0 and 1, such as 0.9")

    def over(rate: float, setting: Setting = setting) -> float:
        return predict(profile, replace(cluster, link=replace(cluster.link, gb_per_s=rate)), setting).efficiency

    def batched(factor: float) -> float:
        return predict(profile.with_batch(round(profile.batch_size * factor)), cluster, setting).efficiency

    def accumulated(factor: float) -> float:
        steps = round(setting.accumulation_steps * factor)
        return predict(profile, cluster, replace(setting, accumulation_steps=steps)).efficiency

    def numeric(change: str, of: Callable[[float], float], low: float, high: float, say: Callable[[float], str]) -> Way:
        found = least(lambda value: of(value) >= efficiency, low, high)
        if found is None:
            return Way(change, "", of(high))
        return Way(change, say(found), of(found))

    other: Setting = replace(setting, algorithm="hierarchical")
    if setting.algorithm == "hierarchical":
        other = replace(setting, algorithm="ring")
    fp16 = replace(setting, compression="fp16")
    named = {
        "as it is": setting,
        f"algorithm: {other.algorithm}": other,
        "compression: fp16": fp16,
        "16 local steps": replace(setting, local_steps=16),
    }
    if all(gradient.shape is not None for gradient in profile.gradients):
        named |= {"compression: powersgd:4": replace(setting, compression="powersgd:4")}
    ways = []
    for change, changed in named.items():
        found = predict(profile, cluster, changed).efficiency
        needed = "reaches it" if found >= efficiency else ""
        ways.append(Way(change, needed, found))

    def rate(value: float) -> str:
        return f"{value * 8:.3g} Gbps"

    ways.append(numeric("link", over, 1e-3, FASTEST_GB_PER_S, rate))
    ways.append(numeric("link, with fp16", lambda value: over(value, fp16), 1e-3, FASTEST_GB_PER_S, rate))
    size, steps = profile.batch_size, setting.accumulation_steps
    ways.append(numeric("batch per rank", batched, 1, LARGEST_FACTOR, lambda factor: f"{math.ceil(size * factor)}"))
    ways.append(numeric("accumulated steps", accumulated, 1, LARGEST_FACTOR, lambda f: f"{math.ceil(steps * f)}"))
    return ways
