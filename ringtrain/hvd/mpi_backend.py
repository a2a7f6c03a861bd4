"""What training needs of Horovod, in mpi4py and NumPy: the names and meanings are those of horovod.tensorflow.

Sums of floating-point numbers go round the readable ring of `ring_allreduce.py`, as Baidu's mpi_collectives brought it
to TensorFlow; the rest are MPI's own. Calls are made one at a time, in the order of the program, the same on every
rank: a tf.function keeps to it, since a call of NumPy has effects. No thread runs beside training.

What is not here (process sets, Adasum, join, timelines, ...) raises MissingDependency when it is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain import ring_allreduce
from ringtrain.errors import LaunchError, MissingDependency
from ringtrain.protocol import mpi_world
from ringtrain.protocol.env import ALONE, COLLECTIVES

Average, Sum, Min, Max, Product, Adasum = "Average", "Sum", "Min", "Max", "Product", "Adasum"


class NoneCompressor:
    """Sends gradients as they are."""


class Compression:
    """How gradients are sent."""

    none = NoneCompressor


class ProcessSet:
    """All ranks; there are no other sets here."""

    process_set_id = 0
    ranks = None

    def size(self) -> int:
        """Number of ranks."""
        return size()

    def rank(self) -> int:
        """Of this process."""
        return rank()

    def included(self) -> bool:
        """Whether this process is one of them."""
        return True


global_process_set = ProcessSet()

# Of elastic runs, which only Horovod's driver makes.
ObjectState: Any = object
notification_manager = None
network = None


class HorovodInternalError(Exception):
    """Never raised."""


class HostsUpdatedInterrupt(Exception):
    """Never raised."""


@dataclass(frozen=True)
class World:
    """This process' place among the ranks."""

    mpi: Any
    comm: Any
    host: Any
    """communicator of this host's ranks"""
    hosts: Any
    """communicator of the ranks that have this one's number on their hosts"""


_worlds: list[World] = []


def init(*args: Any, **kwargs: Any) -> None:
    """Starts MPI.

    Raises:
        MissingDependency: mpi4py is not there.
        LaunchError: the launcher has started the ranks without MPI.
    """
    if _worlds:
        return
    if args or kwargs:
        raise MissingDependency("hvd.init: only Horovod starts a part of the ranks: leave out arguments")
    if "HOROVOD_RANK" in os.environ:
        raise LaunchError(
            "these ranks were started over Gloo, and other strategies than ring need MPI: start them with ringtrain"
            " launch, mpirun or horovodrun --mpi"
        )
    MPI = mpi_world.start()
    comm = MPI.COMM_SELF if os.environ.get(COLLECTIVES) == ALONE else MPI.COMM_WORLD
    host = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    _worlds.append(World(MPI, comm, host, comm.Split(host.rank, comm.rank)))


def shutdown() -> None:
    """Nothing: MPI ends with the process."""


def is_initialized() -> bool:
    """Whether `init` was called."""
    return bool(_worlds)


def _world() -> World:
    if not _worlds:
        raise ValueError("MPI has not been initialized: call hvd.init() first")
    return _worlds[0]


def rank() -> int:
    """This process' number."""
    return int(_world().comm.rank)


def size() -> int:
    """Number of ranks."""
    return int(_world().comm.size)


def local_rank() -> int:
    """This process' number on its host."""
    return int(_world().host.rank)


def local_size() -> int:
    """Ranks of this host."""
    return int(_world().host.size)


def cross_rank() -> int:
    """This host's number among those that have such a local rank."""
    return int(_world().hosts.rank)


def cross_size() -> int:
    """Hosts that have such a local rank."""
    return int(_world().hosts.size)


def is_homogeneous() -> bool:
    """Whether all hosts have as many ranks."""
    return len(set(allgather_object(local_size()))) == 1


def mpi_built() -> bool:
    """Yes."""
    return True


mpi_enabled = mpi_threads_supported = mpi_built


def nccl_built() -> bool:
    """No: a gradient on a GPU is copied to the host, added up there, and copied back."""
    return False


gloo_built = gloo_enabled = cuda_built = rocm_built = ccl_built = ddl_built = nccl_built


def allgather_object(obj: Any, session: Any = None, name: str | None = None, process_set: Any = None) -> list[Any]:
    """A value from every rank, in the order of ranks."""
    return list(_world().comm.allgather(obj))


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """The value of one rank."""
    return _world().comm.bcast(obj, root_rank)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **options: Any,
) -> Any:
    """Average, Sum, Min, Max or Product over the ranks; names and devices, which Horovod wants, mean nothing here."""
    op = op or (Sum if average is False else Average)
    if op == Adasum:
        raise MissingDependency("Adasum needs Horovod: take another op")

    def reduce(values: NDArray[Any]) -> NDArray[Any]:
        world = _world()
        if prescale_factor != 1.0:
            values = np.asarray(values * prescale_factor, values.dtype)
        if op in (Sum, Average) and values.dtype.kind == "f":
            total = ring_allreduce.allreduce(values, world.comm)
        else:
            total = np.empty_like(values, order="C")
            operation = {Min: "MIN", Max: "MAX", Product: "PROD"}.get(op, "SUM")
            world.comm.Allreduce(np.array(values, order="C"), total, getattr(world.mpi, operation))
        factor = postscale_factor / (world.comm.size if op == Average else 1)
        return total if factor == 1.0 else np.asarray(total * factor, total.dtype)

    return _by_numpy(reduce, tensor, tensor.shape)


def grouped_allreduce(tensors: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
    """`allreduce` of several tensors, one after the other."""
    return [allreduce(tensor, *args, **options) for tensor in tensors]


def allgather(tensor: Any, name: str | None = None, **options: Any) -> Any:
    """The ranks' values, one behind the other along the first dimension."""
    shape = tf.TensorShape([None]).concatenate(tensor.shape[1:])
    return _by_numpy(lambda values: np.concatenate(_world().comm.allgather(values)), tensor, shape)


def alltoall(tensor: Any, splits: Any, name: str | None = None, **options: Any) -> tuple[Any, Any]:
    """Parts of a vector for each rank, and the lengths of the parts received; eagerly only."""
    comm, sent = _world().comm, np.ascontiguousarray(splits, np.int32)
    lengths = np.empty_like(sent)
    comm.Alltoall(sent, lengths)
    received = np.empty(lengths.sum(), tensor.dtype.as_numpy_dtype)
    comm.Alltoallv([tensor.numpy(), sent], [received, lengths])
    return tf.constant(received), tf.constant(lengths)


def broadcast(tensor: Any, root_rank: int, name: str | None = None, **options: Any) -> Any:
    """The value of one rank."""

    def send(values: NDArray[Any]) -> NDArray[Any]:
        array = np.array(values, order="C")
        _world().comm.Bcast(array.reshape(-1).view(np.uint8), root_rank)
        return array

    return _by_numpy(send, tensor, tensor.shape)


def _by_numpy(function: Callable[[NDArray[Any]], NDArray[Any]], tensor: Any, shape: Any) -> Any:
    tensor = tf.convert_to_tensor(tensor)
    if tf.executing_eagerly():
        return tf.constant(function(tensor.numpy()), tensor.dtype)
    result = tf.numpy_function(function, [tensor], tensor.dtype)
    result.set_shape(shape)
    return result


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise MissingDependency(f"hvd.{name} needs Horovod: leave it out, or unset {COLLECTIVES}")

    return missing
