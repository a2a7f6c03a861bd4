"""Ring allreduce in NumPy and mpi4py, to be read: what Baidu's mpi_collectives brought to TensorFlow in 2017.

Each of N ranks sends to its right neighbour and receives from its left one, 2 (N - 1) messages of 1/N of the bytes, all
ranks at once: the time grows with the bytes, and hardly with N (Patarasuk & Yuan 2009, doi 10.1016/j.jpdc.2008.09.002).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def allreduce(values: NDArray[Any], comm: Any) -> NDArray[Any]:
    """The sum over all ranks.

    Args:
        values: of this rank, any shape; the same shape and dtype on every rank.
        comm: mpi4py's communicator.

    Returns:
        The sum, the same bits on every rank: each part is added up on its way round the ring, in one order.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    total = values.copy()
    chunks = np.array_split(total.reshape(-1), size)  # views
    received = np.empty_like(chunks[0])  # none is longer
    # Reduce-scatter: after N - 1 messages, the chunk right of one's own has everybody's values in it.
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        message = received[: len(incoming)]
        comm.Sendrecv(outgoing, right, recvbuf=message, source=left)
        incoming += message
    # All-gather: the sums go round once more.
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step + 1) % size], chunks[(rank - step) % size]
        comm.Sendrecv(outgoing, right, recvbuf=incoming, source=left)
    return total
