"""bench allreduce: latency and bandwidth of Horovod's allreduce, MPI's, a ring in NumPy, and what the machine gives.

One library per start, since Horovod communicates over MPI in a background thread all the time, and Open MPI 4.1 crashes
now and then if another thread of the process does so too, even after Horovod has been shut down.

The time is what a program waits for: calls one after the other, on memory that the caller has, by the slowest rank's
clock. mpi4py adds up into memory that exists; Horovod is called through a tf.function with one named allreduce, and
TensorFlow allocates memory for the sum at each call, as it does in training.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ringtrain import ring_allreduce
from ringtrain.config import DeviceConfig
from ringtrain.errors import LaunchError, OutOfSync
from ringtrain.lab import ranks, stats
from ringtrain.lab.tables import Table
from ringtrain.options import AT_LEAST_1, FILE, LIST, N

Array = np.ndarray[Any, np.dtype[np.float32]]
Call = Callable[[], Any]
Way = Callable[[Array], Call]
"""returns the call to time for an array to sum"""
Gather = Callable[[Any], list[Any]]
"""collects a value from every rank, in rank order"""

MPI_ALLREDUCE, RING, COPY, LINK = "MPI_Allreduce", "ring in NumPy", "memory copy", "link"
NO_SUM = (COPY, LINK)
MIN_S = 0.03  # of one measurement: faster calls are repeated
PERIOD = 251
NETWORK = Path("/sys/class/net")
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
EXAMPLES = "1KiB,64MiB or 1KiB..256MiB, multiples of 4 bytes"
STEP = 4
"""factor between two sizes of a range"""
GLOO = "horovodrun-gloo"
LIBRARIES = {"mpi": "", "horovod-mpi": "", "horovod-gloo": GLOO}
"""values of --libraries and their launcher; "": from the command line"""


@dataclass(frozen=True)
class Options:
    """Options of the bench."""

    sizes: Annotated[str, LIST] = "1KiB..256MiB"
    """1KiB,64MiB, or a range in steps of four"""
    libraries: Annotated[str, LIST] = ",".join(LIBRARIES)
    """that take turns"""
    turns: Annotated[int, N, AT_LEAST_1] = 3
    """measurements of each kind, in turns"""
    repeats: Annotated[int, N, AT_LEAST_1] = 5
    """measurements within a turn, which is a start of its own"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


def sizes(text: str) -> list[int]:
    """Parses sizes such as "1KiB,64MiB", or "1KiB..256MiB" in steps of four, to bytes."""
    found = []
    for word in text.split(","):
        first, dots, last = word.partition("..")
        size = _bytes(first, text)
        limit = _bytes(last, text) if dots else size
        if size > limit:
            raise LaunchError(f"got --sizes {text}, expected sizes such as {EXAMPLES}")
        while size <= limit:
            found.append(size)
            size *= STEP
    return found


def _bytes(word: str, text: str) -> int:
    number = word.rstrip("BKMGib").strip()
    unit = word[len(number) :].strip() or "B"
    if not number.isdigit() or unit not in UNITS or not int(number) or int(number) * UNITS[unit] % 4:
        raise LaunchError(f"got --sizes {text}, expected sizes such as {EXAMPLES}")
    return int(number) * UNITS[unit]


def size_text(num_bytes: int) -> str:
    """Formats a size, e.g. "64 MiB"."""
    unit = next(unit for unit in reversed(UNITS) if num_bytes % UNITS[unit] == 0)
    return f"{num_bytes // UNITS[unit]} {unit}"


def main(options: Options, start: ranks.Start, call: ranks.Call) -> int:
    """Measures, prints and writes."""
    if start.train_args:
        raise LaunchError(f"got {start.train_args[0]} after --, but bench allreduce trains nothing: leave it out")
    sizes(options.sizes)  # report a mistake before anything starts
    libraries = options.libraries.split(",")
    unknown = [name for name in libraries if name not in LIBRARIES]
    if unknown:
        raise LaunchError(f"got --libraries {unknown[0]}, expected some of {','.join(LIBRARIES)}")
    measured: list[dict[str, Any]] = []
    for turn in range(options.turns):
        for name in libraries:
            launcher = LIBRARIES[name] or ("mpirun" if start.launch.launcher == GLOO else "")
            results = call(on_ranks, dataclasses.replace(options, libraries=name), launcher=launcher)
            measured += [one | {"turn": turn} for one in results["measured"]]
            num_ranks = results["num_ranks"]
    found = summary(measured, num_ranks)
    show(found, num_ranks, f"{options.turns} turns of {options.repeats}")
    if options.out:
        about = {"turns": options.turns, "repeats": options.repeats, "num_ranks": num_ranks}
        stats.write(Path(options.out), "allreduce", about, found)
    return 0


def summary(measured: Sequence[Mapping[str, Any]], num_ranks: int) -> list[dict[str, Any]]:
    """Combines the measurements of all starts.

    Args:
        measured: From on_ranks, in the order of rounds.

    Returns:
        Per size and method: seconds; bus bandwidth as NCCL's tests have it, bytes / seconds x 2 (N - 1) / N, which is
        what a ring moves through the link of a rank (a copy and a message: bytes / seconds); how many times as fast as
        MPI_Allreduce; and the bytes that the busiest host sends over its network for one call.
    """
    seconds: dict[tuple[int, str], list[float]] = {}
    wire: dict[tuple[int, str], float] = {}
    for one in measured:
        key = one["bytes"], one["method"]
        seconds.setdefault(key, []).extend(one["seconds"])
        wire[key] = one["wire_bytes"]
    ring = 2 * (num_ranks - 1) / num_ranks
    found = []
    for (num_bytes, method), values in sorted(seconds.items(), key=lambda item: item[0][0]):
        moved, speed = float(num_bytes), None
        library = seconds.get((num_bytes, MPI_ALLREDUCE))
        if method not in NO_SUM:
            moved *= ring
            if library:
                speed = stats.ratios(library, values)
        found.append(
            {
                "bytes": num_bytes,
                "method": method,
                "seconds": stats.Spread.of(values),
                "bus_gb_per_s": stats.Spread.of([moved / value / 1e9 for value in values]),
                "speed": speed,
                "wire_bytes": wire[num_bytes, method],
            }
        )
    return found


def show(found: Sequence[Mapping[str, Any]], num_ranks: int, repeats: str) -> None:
    """Prints the measurements."""
    rows = []
    for one in found:
        rate = _rate_text(one["bus_gb_per_s"].times(1e3))
        speed = wire = ""
        if one["speed"]:
            speed = one["speed"].text()
        if one["method"] != COPY:
            wire = f"{one['wire_bytes'] / one['bytes']:.2f}"
        rows.append([size_text(one["bytes"]), one["method"], _time_text(one["seconds"]), rate, speed, wire])
    head = ["size", "method", "time (p10 to p90)", "bus MB/s", "speed / MPI", "wire / size"]
    if LINK not in {one["method"] for one in found}:
        head, rows = head[:-1], [row[:-1] for row in rows]
    Table(head, rows, f"allreduce, {num_ranks} ranks, {repeats}").show()


def _time_text(seconds: stats.Spread) -> str:
    unit, factor = "us", 1e6
    if seconds.median >= 1:
        unit, factor = "s", 1.0
    elif seconds.median >= 1e-3:
        unit, factor = "ms", 1e3
    return f"{seconds.times(factor).text('.1f')} {unit}"


def _rate_text(rate: stats.Spread) -> str:
    if rate.median >= 10:
        return rate.text(",.0f")
    return rate.text(".2f")


def on_ranks(options: Options, train_args: Sequence[str]) -> dict[str, Any]:
    """Measures the one library of options on all ranks."""
    comm: Any = None
    if options.libraries == "mpi":
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
        if comm:
            return comm.allgather(value)
        return hvd.allgather_object(value, name="ringtrain_bench")

    return {"num_ranks": size, "measured": measure(ways, sizes(options.sizes), options.repeats, rank, gather)}


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
            wrong = [number for number, ok in enumerate(gather(right)) if not ok]
            if wrong:
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
        for name in calls:
            found.append({"method": name, "bytes": num_bytes, "seconds": seconds[name], "wire_bytes": wire[name]})
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

            if device == "/GPU:0":
                return add_on_gpu
            return add

        return make

    over = os.environ.get("HOROVOD_CPU_OPERATIONS", "")
    if not over:
        over = "MPI" if hvd.mpi_enabled() else "Gloo"
    over = "MPI" if over.upper() == "MPI" else over.capitalize()
    ways = {f"Horovod over {over}": way("/CPU:0")}
    if hvd.nccl_built() and tf.config.list_logical_devices("GPU"):
        ways["Horovod over NCCL"] = way("/GPU:0")
    return ways
