"""bench allreduce: latency and bandwidth of Horovod's allreduce, MPI's, and a ring in NumPy.

One library per start, since Horovod communicates over MPI in a background thread all the time, and Open MPI 4.1 crashes
now and then if another thread of the process does so too, even after Horovod has been shut down.

The time is what a program waits for: calls one after the other, on memory that the caller has, by the slowest rank's
clock. mpi4py adds up into memory that exists; Horovod is called through a tf.function with one named allreduce, and
TensorFlow allocates memory for the sum at each call, as it does in training.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ringtrain import ring_allreduce
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.config.options import AT_LEAST_1, FILE, LIST, N
from ringtrain.config.sections import DeviceConfig
from ringtrain.errors import LaunchError, OutOfSync
from ringtrain.lab import ranks, stats
from ringtrain.lab.tables import Table

Array = np.ndarray[Any, np.dtype[np.float32]]
Call = Callable[[], Any]
Method = Callable[[Array], Call]
"""returns the call that sums an array over all ranks"""
Gather = Callable[[Any], list[Any]]
"""collects a value from every rank, in rank order"""

MPI_ALLREDUCE = "MPI_Allreduce"
NUM_BLOCKS = 5  # of calls that are timed, of each method and size
MIN_S = 0.03  # of a block: faster calls are repeated
PERIOD = 251
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
GLOO = "horovodrun-gloo"


@dataclass(frozen=True)
class BenchAllreduceOptions:
    """BenchAllreduceOptions of the bench."""

    sizes: Annotated[str, LIST] = "1KiB,64KiB,1MiB,16MiB,64MiB"
    """sizes of the arrays"""
    turns: Annotated[int, N, AT_LEAST_1] = 3
    """starts of each library, in turns"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


def num_bytes_of(word: str) -> int:
    """Parses a size such as 64MiB."""
    number = word.rstrip("BKMGi")
    unit = word[len(number) :]
    if not number.isdigit() or unit not in UNITS or not int(number) or int(number) * UNITS[unit] % 4:
        raise LaunchError(f"got --sizes {word}, expected sizes such as 1KiB,64MiB, multiples of 4 bytes")
    return int(number) * UNITS[unit]


def main(options: BenchAllreduceOptions, launch: LaunchOptions) -> int:
    """Measures, prints and writes."""
    if launch.command:
        raise LaunchError(f"got {launch.command[0]} after --, but bench allreduce trains nothing: leave it out")
    sizes = {num_bytes_of(word): word for word in options.sizes.split(",")}
    over_mpi = launch
    if launch.launcher == GLOO:
        over_mpi = dataclasses.replace(launch, launcher="mpirun")
    over_gloo = dataclasses.replace(launch, launcher=GLOO)
    measured = []
    for _ in range(options.turns):
        measured += ranks.call(over_mpi, f"{__name__}:mpi", [*sizes])
        measured += ranks.call(over_mpi, f"{__name__}:horovod", [*sizes], "MPI")
        measured += ranks.call(over_gloo, f"{__name__}:horovod", [*sizes], "Gloo")
    found = summary(measured)
    rows = []
    for one in found:
        speed = one["speed"].text() if one["speed"] else ""
        time_ms, rate = one["seconds"].times(1e3).text("#.3g"), one["bus_gb_per_s"].times(1e3).text("#.3g")
        rows.append([sizes[one["bytes"]], one["method"], time_ms, rate, speed])
    head = ["size", "method", "time, ms (p10 to p90)", "bus MB/s", "speed / MPI"]
    Table(head, rows, f"allreduce, {measured[0]['num_ranks']} ranks").show()
    if options.out:
        stats.write(Path(options.out), vars(options), found)
    return 0


def summary(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Combines the measurements of all starts, per size and method, in the order of turns."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for one in measured:
        seconds.setdefault((one["bytes"], one["method"]), []).extend(one["seconds"])
    num_ranks = measured[0]["num_ranks"]
    found = []
    for (num_bytes, method), values in sorted(seconds.items(), key=lambda item: item[0][0]):
        # As NCCL's tests have it: the bytes that a ring moves through the link of a rank.
        moved = num_bytes * 2 * (num_ranks - 1) / num_ranks
        library = seconds.get((num_bytes, MPI_ALLREDUCE))
        found.append(
            {
                "bytes": num_bytes,
                "method": method,
                "seconds": stats.Spread.of(values),
                "bus_gb_per_s": stats.Spread.of([moved / value / 1e9 for value in values]),
                "speed": stats.ratios(library, values) if library else None,  # times as fast as MPI_Allreduce
            }
        )
    return found


# ---- on ranks -------------------------------------------------------------------------------------------------------


def mpi(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Measures MPI's allreduce, and the readable ring."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def library(array: Array) -> Call:
        total = np.empty_like(array)

        def call() -> Array:
            comm.Allreduce(array, total, op=MPI.SUM)
            return total

        return call

    def readable(array: Array) -> Call:
        return lambda: ring_allreduce.allreduce(array, comm)

    return measure({MPI_ALLREDUCE: library, "ring in NumPy": readable}, sizes, comm.Get_rank(), comm.allgather)


def horovod(sizes: Sequence[int], over: str) -> list[dict[str, Any]]:
    """Measures Horovod over MPI or Gloo, as it was started, and over NCCL if built and GPUs are present."""
    import tensorflow as tf

    from ringtrain import hvd
    from ringtrain.training import devices

    hvd.init()
    devices.pin(hvd.local_rank(), hvd.local_size(), DeviceConfig())

    def on(device: str) -> Method:
        def method(array: Array) -> Call:
            with tf.device(device):
                tensor = tf.constant(array)

            @tf.function(autograph=False)
            def add() -> Any:
                return hvd.allreduce(tensor, op=hvd.Sum, name=f"bench_{array.nbytes}_{device[1:4]}")

            def call() -> Any:
                total = add()
                if device == "/GPU:0":
                    tf.test.experimental.sync_devices()
                return total

            return call

        return method

    methods = {f"Horovod over {over}": on("/CPU:0")}
    if hvd.nccl_built() and tf.config.list_logical_devices("GPU"):
        methods["Horovod over NCCL"] = on("/GPU:0")
    return measure(methods, sizes, hvd.rank(), lambda value: hvd.allgather_object(value, name="ringtrain_bench"))


def measure(methods: Mapping[str, Method], sizes: Sequence[int], rank: int, gather: Gather) -> list[dict[str, Any]]:
    """Times methods alternately, for sizes in bytes (multiples of 4): seconds of a call, slowest rank. Collective."""
    found = []
    num_ranks = len(gather(rank))
    for num_bytes in sizes:
        # Small integers: sums are exact in any order.
        pattern = (np.arange(num_bytes // 4) % PERIOD).astype(np.float32)
        array, total = pattern * (rank + 1), pattern * (num_ranks * (num_ranks + 1) / 2)
        calls = {name: method(array) for name, method in methods.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        num_calls = {}
        for name, call in calls.items():
            is_right = gather(np.array_equal(np.asarray(call()), total))
            wrong = [number for number, right in enumerate(is_right) if not right]
            if wrong:
                raise OutOfSync(f"{name}: the sum of {num_bytes} bytes is wrong on ranks {wrong}")
            num_calls[name] = max(1, int(MIN_S / max(gather(_timed(call, 2)))))
        for _ in range(NUM_BLOCKS):
            for name, call in calls.items():
                gather(None)
                call()  # ranks begin together
                seconds[name].append(max(gather(_timed(call, num_calls[name]))))
        for name in calls:
            found.append({"method": name, "bytes": num_bytes, "num_ranks": num_ranks, "seconds": seconds[name]})
    return found


def _timed(call: Call, number: int) -> float:
    begin_s = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - begin_s) / number
