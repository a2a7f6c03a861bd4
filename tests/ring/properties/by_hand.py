"""The ring that can be read adds up what Horovod's does; it is the oracle of both."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from only import only

import ringtrain.hvd as hvd
from ringtrain.lab import ring

SHAPES = ((), (1,), (2,), (7,), (3, 5), (1000,), (64, 1025))


@only(launcher="mpi")
def the_ring_in_numpy_is_the_sum_and_horovods_sum():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for number, shape in enumerate(SHAPES):
        everybody = [np.random.default_rng([rank, number]).normal(size=shape) for rank in range(hvd.size())]
        own = np.asarray(everybody[hvd.rank()])
        total = ring.allreduce(own, comm)
        assert total.shape == shape and total.dtype == own.dtype
        assert np.array_equal(own, everybody[hvd.rank()]), "what is added up is left as it is"
        np.testing.assert_allclose(total, sum(everybody), rtol=1e-12)
        by_horovod = hvd.allreduce(tf.constant(own), op=hvd.Sum, name=f"by_hand_{number}").numpy()
        np.testing.assert_allclose(total, by_horovod, rtol=1e-12)
        copies = comm.allgather(total.tobytes())
        assert len(set(copies)) == 1, "the same bits on every rank"


@only(launcher="mpi")
def a_ring_that_does_not_close_is_noticed():
    """The negative control: without the last message, some rank lacks somebody's part."""
    from mpi4py import MPI

    class Broken:
        """A communicator whose last message of the all-gather is lost."""

        def __init__(self) -> None:
            self.messages = 0

        def __getattr__(self, name):
            return getattr(MPI.COMM_WORLD, name)

        def Sendrecv(self, *args, **options):
            self.messages += 1
            if self.messages < 2 * (hvd.size() - 1):
                MPI.COMM_WORLD.Sendrecv(*args, **options)

    own = np.full(6, float(hvd.rank() + 1))
    total = ring.allreduce(own, Broken())
    wrong = not np.allclose(total, sum(range(1, hvd.size() + 1)))
    assert any(MPI.COMM_WORLD.allgather(wrong))
