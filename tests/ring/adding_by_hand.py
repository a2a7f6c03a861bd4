"""On every rank: the ring in NumPy is the sum, to the same bits everywhere; and a broken ring is noticed."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ringtrain import ring_allreduce
from ringtrain.errors import OutOfSync
from ringtrain.lab import bench_allreduce as allreduce

SHAPES = ((), (1,), (2,), (7,), (3, 5), (1000,), (64, 1025))
COMM = MPI.COMM_WORLD


class LosesTheLastMessage:
    """A communicator of which the last message of the all-gather is lost."""

    def __init__(self) -> None:
        self.messages = 0

    def __getattr__(self, name):
        return getattr(COMM, name)

    def Sendrecv(self, *args, **options):
        self.messages += 1
        if self.messages < 2 * (COMM.Get_size() - 1):
            COMM.Sendrecv(*args, **options)


def is_the_sum(comm) -> bool:
    """Whether it is so on all ranks, for all shapes."""
    right = True
    for number, shape in enumerate(SHAPES):
        everybody = [np.random.default_rng([rank, number]).normal(size=shape) for rank in range(COMM.Get_size())]
        own = np.asarray(everybody[COMM.Get_rank()])
        total = ring_allreduce.allreduce(own, comm)
        right &= total.shape == shape and np.array_equal(own, everybody[COMM.Get_rank()])
        right &= np.allclose(total, sum(everybody), rtol=1e-12)
        right &= np.allclose(total, COMM.allreduce(own), rtol=1e-12)
        right &= len(set(COMM.allgather(total.tobytes()))) == 1
    return all(COMM.allgather(right))


def is_refused() -> bool:
    """Whether bench allreduce does not time a broken ring, on any rank."""
    lossy = {"lossy": lambda array: lambda: ring_allreduce.allreduce(array, LosesTheLastMessage())}
    try:
        allreduce.measure(lossy, [4096], COMM.Get_rank(), COMM.allgather)
    except OutOfSync:
        return all(COMM.allgather(True))
    return False


if __name__ == "__main__":
    good, broken, refused = is_the_sum(COMM), is_the_sum(LosesTheLastMessage()), is_refused()
    if COMM.Get_rank() == 0:
        print(f"ring {good}, broken {broken}, refused by bench {refused}")
