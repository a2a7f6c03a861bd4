"""The part of horovod.tensorflow's API that training needs, in mpi4py and NumPy, with the same names and meanings.

Floating-point sums use the ring of `ring_allreduce.py`, as in Baidu's mpi_collectives for TensorFlow; other reductions
are MPI's. Calls run one at a time, in program order, which must be the same on every rank. A tf.function keeps that
order, since NumPy calls are stateful ops. Gradients are those of Horovod's collectives. Other functions (alltoall,
join, timelines, ...) raise MissingDependency when called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain import ring_allreduce
from ringtrain.errors import LaunchError, MissingDependency
from ringtrain.hvd.process import PROCESS
from ringtrain.protocol import mpi_world
from ringtrain.protocol.env import ALONE, COLLECTIVES

Average, Sum, Min, Max, Product, Adasum = "Average", "Sum", "Min", "Max", "Product", "Adasum"
BFLOAT16 = tf.bfloat16.as_numpy_dtype


def _missing(name: str) -> MissingDependency:
    return MissingDependency(f"hvd.{name} needs Horovod: leave it out, or unset {COLLECTIVES}")


class NoneCompressor:
    """Sends gradients unchanged."""


class Compression:
    """Compression of gradients: none only."""

    none = NoneCompressor


class ProcessSet:
    """All ranks, the only set."""

    process_set_id = 0
    ranks = None

    def __init__(self, *ranks: Any) -> None:
        if ranks:
            raise _missing("ProcessSet")

    def size(self) -> int:
        return size()

    def rank(self) -> int:
        return rank()

    def included(self) -> bool:
        return True


global_process_set = ProcessSet()

ObjectState: Any = object  # base class in elastic.py; elastic runs need Horovod


def init(*args: Any, **kwargs: Any) -> None:
    """Starts MPI; raises MissingDependency without mpi4py, LaunchError if the launcher did not start MPI ranks."""
    if is_initialized():
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
    hosts = comm.Split(host.rank, comm.rank)  # ranks with the same local rank
    PROCESS.mpi_world = SimpleNamespace(mpi=MPI, comm=comm, host=host, hosts=hosts)


def shutdown() -> None:
    """Frees the communicators that `init` has made; MPI itself ends with the process."""
    if is_initialized():
        _world().host.Free()
        _world().hosts.Free()
        PROCESS.mpi_world = None


def is_initialized() -> bool:
    return PROCESS.mpi_world is not None


def _world() -> Any:
    if PROCESS.mpi_world is None:
        raise ValueError("MPI has not been initialized: call hvd.init() first")
    return PROCESS.mpi_world


def _number(communicator: str, name: str) -> Callable[[], int]:
    return lambda: int(getattr(getattr(_world(), communicator), name))


rank, size = _number("comm", "rank"), _number("comm", "size")
local_rank, local_size = _number("host", "rank"), _number("host", "size")
cross_rank, cross_size = _number("hosts", "rank"), _number("hosts", "size")


def mpi_built() -> bool:
    return True


def nccl_built() -> bool:
    """False: gradients on a GPU are copied to the host, summed there, and copied back."""
    return False


mpi_enabled = mpi_threads_supported = mpi_built
gloo_built = gloo_enabled = cuda_built = rocm_built = ccl_built = ddl_built = nccl_built


def allgather_object(obj: Any, session: Any = None, name: str | None = None, process_set: Any = None) -> list[Any]:
    return list(_world().comm.allgather(obj))


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    return _world().comm.bcast(obj, root_rank)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **options: Any,
) -> Any:
    """Returns the Average, Sum, Min, Max or Product over the ranks; Horovod's names and devices are ignored."""
    op = op or (Sum if average is False else Average)
    if op == Adasum:
        raise MissingDependency("Adasum needs Horovod: take another op")

    def reduce(values: NDArray[Any]) -> NDArray[Any]:
        world = _world()
        if prescale_factor != 1.0:
            values = np.asarray(values * prescale_factor, values.dtype)
        is_floating = values.dtype.kind == "f" or values.dtype == BFLOAT16
        if op in (Sum, Average) and is_floating:
            total = ring_allreduce.allreduce(values, world.comm)
        else:
            # MPI knows no 16-bit numbers.
            sent_as = np.float32 if is_floating and values.itemsize == 2 else values.dtype
            sent = np.array(values, sent_as, order="C")
            total = np.empty_like(sent)
            operation = {Min: "MIN", Max: "MAX", Product: "PROD"}.get(op, "SUM")
            world.comm.Allreduce(sent, total, getattr(world.mpi, operation))
        factor = postscale_factor / (world.comm.size if op == Average else 1)
        if factor != 1.0:
            total = total * factor
        return np.asarray(total, values.dtype)

    def gradient(upstream: Any) -> Any:
        return allreduce(upstream, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor)

    return _by_numpy(reduce, tensor, tensor.shape, gradient)


def allgather(tensor: Any, name: str | None = None, **options: Any) -> Any:
    shape = tf.TensorShape([None]).concatenate(tensor.shape[1:])

    def gradient(upstream: Any) -> Any:
        num_rows = tf.shape(tensor)[:1]
        return tf.split(allreduce(upstream, op=Average), allgather(num_rows), num=size())[rank()]

    return _by_numpy(lambda values: np.concatenate(_world().comm.allgather(values)), tensor, shape, gradient)


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """An array's bytes, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def broadcast(tensor: Any, root_rank: int, name: str | None = None, **options: Any) -> Any:

    def send(values: NDArray[Any]) -> NDArray[Any]:
        array = np.array(values, order="C")
        _world().comm.Bcast(_bytes_of(array), root_rank)
        return array

    def gradient(upstream: Any) -> Any:
        mean = allreduce(upstream, op=Average)
        return mean if rank() == root_rank else tf.zeros_like(mean)

    return _by_numpy(send, tensor, tensor.shape, gradient)


def _by_numpy(
    function: Callable[[NDArray[Any]], NDArray[Any]], tensor: Any, shape: Any, gradient: Callable[[Any], Any]
) -> Any:
    """Result of a collective, whose gradient is another one."""

    @tf.custom_gradient
    def run(tensor: Any) -> Any:
        if tf.executing_eagerly():
            result = tf.constant(function(tensor.numpy()), tensor.dtype)
        else:
            result = tf.numpy_function(function, [tensor], tensor.dtype)
            result.set_shape(shape)
        return result, gradient

    return run(tf.convert_to_tensor(tensor))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise _missing(name)

    return missing
