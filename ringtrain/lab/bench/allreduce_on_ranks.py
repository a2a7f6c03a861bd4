"""bench allreduce on its ranks: how long each way to add up takes, with one library per start.

One library per start, since Horovod talks over MPI in a thread of its own all the time, and Open MPI 4.1 crashes now
and then where another thread of the process does so too, even after Horovod has been shut down.

What is timed is what a program waits for: calls one after the other, on memory that the caller has, the slowest rank's
clock. mpi4py adds up into memory that is there; Horovod is called through a tf.function with one named allreduce, and
TensorFlow takes new memory for the sum at each call, as it does in training. What calling TensorFlow costs in that is
measured beside it, by a function that does nothing: NOTHING.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringtrain import ring_allreduce
from ringtrain.config import DeviceConfig
from ringtrain.errors import OutOfSync
from ringtrain.lab import stats

Array = np.ndarray[Any, np.dtype[np.float32]]
Call = Callable[[], Any]
Way = Callable[[Array], Call]
"""returns the call to time for an array to sum"""
Gather = Callable[[Any], list[Any]]
"""collects a value from every rank, in rank order"""

MPI_ALLREDUCE, RING, COPY, LINK, NOTHING = "MPI_Allreduce", "ring in NumPy", "memory copy", "link", "calling TensorFlow"
NO_SUM = (COPY, LINK, NOTHING)
MIN_S = 0.03  # of one measurement: faster calls are repeated
PERIOD = 251
NETWORK = Path("/sys/class/net")


def measure(
    ways: Mapping[str, Way], sizes: Sequence[int], repeats: int, rank: int, gather: Gather
) -> list[dict[str, Any]]:
    """Times all ways for all sizes, alternately. A collective.

    Args:
        ways: By name; those not in NO_SUM must return the sum over all ranks.
        sizes: bytes, multiples of 4.

    Returns:
        On every rank, per size and way: {"method", "bytes", "seconds": of a call, one per measurement, the slowest
        rank's; "wire_bytes": that the busiest host sends for it over its network}.

    Raises:
        OutOfSync: On every rank, if any rank received a wrong sum.
    """
    found = []
    num_ranks = len(gather(rank))
    for num_bytes in sizes:
        # Small integers: sums are exact in any order.
        pattern = (np.arange(num_bytes // 4) % PERIOD).astype(np.float32)
        array, total = pattern * (rank + 1), pattern * (num_ranks * (num_ranks + 1) / 2)
        calls = {name: way(array) for name, way in ways.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        wire = dict.fromkeys(calls, 0.0)
        num_calls = {}
        for name, call in calls.items():
            right = name in NO_SUM or np.array_equal(np.asarray(call()), total)
            if wrong := [number for number, ok in enumerate(gather(right)) if not ok]:
                raise OutOfSync(f"{name}: the sum of {num_bytes} bytes is wrong on ranks {wrong}")
            num_calls[name] = max(1, int(MIN_S / max(max(gather(_timed(call, 2))), 1e-7)))
        for _ in range(repeats):
            for name, call in calls.items():
                gather(None)
                call()  # ranks begin together
                sent = _sent_bytes()
                took_s = _timed(call, num_calls[name])
                every = gather((took_s, (_sent_bytes() - sent) / num_calls[name]))
                seconds[name].append(max(took_s for took_s, _ in every))
                wire[name] = max(sent for _, sent in every)
        found += [
            {"method": name, "bytes": num_bytes, "seconds": seconds[name], "wire_bytes": wire[name]} for name in calls
        ]
    return found


def _timed(call: Call, number: int) -> float:
    begin_s = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - begin_s) / number


def _sent_bytes() -> int:
    """Bytes that this host has sent over its network so far."""
    counters = [path / "statistics" / "tx_bytes" for path in NETWORK.glob("*") if path.name != "lo"]
    return sum(int(path.read_text()) for path in counters if path.exists())


def by_mpi(comm: Any) -> dict[str, Way]:
    """Ways that need only MPI: its allreduce, the readable ring, a memory copy and the link."""
    from mpi4py import MPI

    rank, hosts = comm.Get_rank(), comm.allgather(MPI.Get_processor_name())
    leaders = [hosts.index(name) for name in dict.fromkeys(hosts)]
    group = comm.Split(rank in leaders, rank)

    def library(array: Array) -> Call:
        total = np.empty_like(array)

        def call() -> Array:
            comm.Allreduce(array, total, op=MPI.SUM)
            return total

        return call

    def copy(array: Array) -> Call:
        other = np.empty_like(array)
        return lambda: np.copyto(other, array)

    def link(array: Array) -> Call:
        # One way at a time: Open MPI 4.1 over TCP gets half the rate where large messages cross; the limit is whole.
        received, sending = np.empty_like(array), [True, False]
        own, num_hosts = group.Get_rank(), len(leaders)

        def call() -> None:
            if rank not in leaders:
                return
            sending.reverse()
            sends = sending[own % 2]
            peer = (own + (1 if sends else -1)) % num_hosts
            if peer % 2 != own % 2:  # of an odd number of hosts, the last does not send to the first
                group.Send(array, peer) if sends else group.Recv(received, peer)
            group.Barrier()

        return call

    def readable(array: Array) -> Call:
        return lambda: ring_allreduce.allreduce(array, comm)

    ways: dict[str, Way] = {MPI_ALLREDUCE: library, RING: readable, COPY: copy}
    if len(leaders) > 1:
        ways[LINK] = link
    return ways


def by_horovod() -> dict[str, Way]:
    """Horovod's allreduce over the transport it was started with, and over NCCL if built and GPUs are present."""
    import tensorflow as tf

    from ringtrain import hvd

    def way(device: str) -> Way:
        def make(array: Array) -> Call:
            with tf.device(device):
                tensor = tf.constant(array)

            @tf.function(autograph=False)
            def add() -> Any:
                return hvd.allreduce(tensor, op=hvd.Sum, name=f"bench_{array.nbytes}_{device[1:4]}")

            def add_on_gpu() -> Any:
                total = add()
                tf.test.experimental.sync_devices()
                return total

            return add_on_gpu if device == "/GPU:0" else add

        return make

    def nothing(array: Array) -> Call:
        tensor = tf.constant(array[:1])
        return tf.function(lambda: tf.identity(tensor), autograph=False)

    over = os.environ.get("HOROVOD_CPU_OPERATIONS") or ("MPI" if hvd.mpi_enabled() else "Gloo")
    ways = {f"Horovod over {'MPI' if over.upper() == 'MPI' else over.capitalize()}": way("/CPU:0"), NOTHING: nothing}
    on_gpu = hvd.nccl_built() and tf.config.list_logical_devices("GPU")
    return ways | ({"Horovod over NCCL": way("/GPU:0")} if on_gpu else {})


def main(argv: Sequence[str]) -> int:
    """Measures on all ranks and writes on rank 0."""
    parser = argparse.ArgumentParser(prog="bench allreduce", description=__doc__.partition("\n")[0])
    parser.add_argument("library", choices=("mpi", "horovod"))
    parser.add_argument("--sizes", required=True, help="bytes")
    parser.add_argument("--repeats", type=int, required=True, help="measurements of each")
    parser.add_argument("--out", required=True, help="JSON file of the results")
    options = parser.parse_args(stats.split(argv)[0])
    sizes = [int(text) for text in options.sizes.split(",")]
    comm: Any = None
    if options.library == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        rank, size, ways = comm.Get_rank(), comm.Get_size(), by_mpi(comm)
    else:
        from ringtrain import hvd
        from ringtrain.run import devices

        hvd.init()
        devices.pin(hvd.local_rank(), hvd.local_size(), DeviceConfig())
        rank, size, ways = hvd.rank(), hvd.size(), by_horovod()

    def gather(value: Any) -> list[Any]:
        return comm.allgather(value) if comm else hvd.allgather_object(value, name="ringtrain_bench")

    measured = measure(ways, sizes, options.repeats, rank, gather)
    if rank == 0:
        stats.write(Path(options.out), "allreduce", vars(options), {"num_ranks": size, "measured": measured})
    return 0
