"""bench allreduce: latency and bus bandwidth of every allreduce there is here, in turns, beside what the machine gives.

    ringtrain bench allreduce -np 2 --out allreduce.json

Bus bandwidth is that of NCCL's tests: bytes / time x 2 (N - 1) / N, what a ring has to move through each rank's link.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringtrain.lab import figures, ring

KIB = 1024
SIZES = tuple(KIB * 4**power for power in range(10))  # 1 KiB to 256 MiB
TURNS = 7
MIN_S = 0.02  # of one measurement: what is faster is repeated


def methods(comm: Any) -> dict[str, Callable[[np.ndarray], Callable[[], Any]]]:
    """Every way to add up over the ranks here: each takes an array and gives what is to be timed."""
    import horovod.tensorflow as horovod
    import tensorflow as tf
    from mpi4py import MPI

    from ringtrain import hvd

    built = "NCCL" if hvd.nccl_built() else os.environ.get("HOROVOD_CPU_OPERATIONS", "mpi").upper()

    def by_horovod(array: np.ndarray) -> Callable[[], Any]:
        tensor = tf.constant(array)
        name = f"bench_{array.nbytes}"
        return lambda: horovod.allreduce(tensor, op=hvd.Sum, name=name)

    def by_mpi(array: np.ndarray) -> Callable[[], Any]:
        total = np.empty_like(array)
        return lambda: comm.Allreduce(array, total, op=MPI.SUM)

    return {
        f"Horovod over {built}": by_horovod,
        "MPI_Allreduce": by_mpi,
        "ring in NumPy": lambda array: lambda: ring.allreduce(array, comm),
    }


def measure(comm: Any, sizes: Sequence[int], turns: int) -> list[dict[str, Any]]:
    """Times all methods for all sizes, one after the other, turn by turn.

    Args:
        comm: of all ranks.
        sizes: bytes, multiples of 4.
        turns: measurements of each.

    Returns:
        Per size and method: bytes, seconds (Spread over the turns, each the slowest rank's), bus bandwidth in GB/s.
    """
    found = []
    ways = methods(comm)
    size = comm.Get_size()
    for num_bytes in sizes:
        array = np.random.default_rng(comm.Get_rank()).normal(size=num_bytes // 4).astype(np.float32)
        calls = {name: way(array) for name, way in ways.items()}
        calls["memory copy"] = _copy(array)
        repeats = {name: _repeats(comm, call) for name, call in calls.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(turns):
            for name, call in calls.items():
                comm.Barrier()
                begin_s = time.perf_counter()
                for _ in range(repeats[name]):
                    call()
                took_s = (time.perf_counter() - begin_s) / repeats[name]
                seconds[name].append(max(comm.allgather(took_s)))
        factor = 2 * (size - 1) / size
        for name, values in seconds.items():
            spread = figures.Spread.of(values)
            bus = num_bytes * (1 if name == "memory copy" else factor) / spread.median / 1e9
            against = figures.ratios(seconds["MPI_Allreduce"], values)
            found.append({"bytes": num_bytes, "method": name, "seconds": spread, "gb_per_s": bus, "speed": against})
    return found


def _copy(array: np.ndarray) -> Callable[[], Any]:
    other = np.empty_like(array)
    return lambda: np.copyto(other, array)


def _repeats(comm: Any, call: Callable[[], Any]) -> int:
    """How many calls make one measurement, the same on every rank; warms up."""
    call()
    begin_s = time.perf_counter()
    call()
    took_s = comm.bcast(time.perf_counter() - begin_s, root=0)
    return max(1, int(MIN_S / max(took_s, 1e-7)))


def main(argv: Sequence[str]) -> int:
    """Measures on all ranks; rank 0 shows and writes."""
    parser = argparse.ArgumentParser(prog="bench allreduce", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", default="")
    options = parser.parse_args(argv)
    from ringtrain import hvd

    hvd.init()  # before mpi4py, which would end MPI under Horovod's thread when the process ends
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    sizes = [int(text) // 4 * 4 for text in options.sizes.split(",")]
    found = measure(comm, sizes, options.turns)
    if comm.Get_rank() == 0:
        rows = [
            [
                _binary(one["bytes"]),
                one["method"],
                one["seconds"].text(".3g"),
                f"{one['gb_per_s']:.2f}",
                one["speed"].text(),
            ]
            for one in found
        ]
        head = ("size", "method", "seconds (p10 to p90)", "bus GB/s", "speed / MPI_Allreduce")
        figures.show(f"allreduce, {comm.Get_size()} ranks, {options.turns} turns", head, rows)
        if options.out:
            figures.write(Path(options.out), "allreduce", vars(options) | {"num_ranks": comm.Get_size()}, found)
    return 0


def _binary(num_bytes: int) -> str:
    return f"{num_bytes // KIB**2} MiB" if num_bytes >= KIB**2 else f"{num_bytes // KIB} KiB"
