"""Process of a parameter server or a worker: TensorFlow's server, and for a worker its rows.

The coordinator builds the graphs of the steps. A worker's rows come from a Python function of this process, which the
coordinator's graph calls by its name (token) in TensorFlow's table of such functions.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain import data
from ringtrain.config.derived import derive
from ringtrain.config.sections import Config
from ringtrain.errors import RingtrainError
from ringtrain.monitor import fault_injection, journal
from ringtrain.protocol.attempt import Attempt
from ringtrain.strategies.parameter_server.cluster import SIGNALS, Roles
from ringtrain.training import agreement, devices, log_capture


@dataclass(frozen=True)
class Task:
    """Identity of a process in the job."""

    config: Config
    roles: Roles
    rank: int
    number: int
    """number of restarts"""


@dataclass(frozen=True)
class Ready:
    """Start report of a process to the coordinator."""

    host: str
    token: str = ""
    """name of a worker's batch function in TensorFlow's table"""
    prints: Any = None
    """fingerprints of code and data, which must equal the coordinator's"""
    pinning: str = ""


def main(task: Task, sender: Connection, lifeline: Connection) -> None:
    """Sends ("ready", Ready) or ("failed", class, message); serves until the rank closes its `lifeline`, or dies."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_the_rank, args=(lifeline,), daemon=True).start()
    log_capture.watch()
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            sender.send(message)

    try:
        send(("ready", _serve(task, send)))
    except (RingtrainError, OSError) as error:
        kind = type(error) if isinstance(error, RingtrainError) else RingtrainError
        send(("failed", kind, str(error)))
    threading.Event().wait()


def _exit_with_the_rank(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(0)


def _serve(task: Task, send: Callable[[Any], None]) -> Ready:
    from ringtrain.training import configured, rows, tracking

    role, index = task.roles.of(task.rank)
    host = socket.gethostname()
    if role == "ps":
        return Ready(host, pinning=start(task.roles, role, index, devices.Pinning(num_threads=1)))
    config = task.config
    on_this_host = task.roles.on_host_of(task.rank)
    pinning = devices.decide(on_this_host.index(task.rank), len(on_this_host), config.device)
    # Function before server, which accepts steps immediately; server before data, while its port is still free.
    batches = WorkerBatches(task, index, send)
    token, devices_text = batches.register(), start(task.roles, role, index, pinning)
    configured.set_dtypes(config)
    num_workers = len(task.roles.workers)
    data_set = configured.data_of(config, configured.find(config).read(), config.train.batch_size * num_workers)
    rows.check_parts(config.train.batch_size * num_workers, len(data_set.train), num_workers, "workers")
    batches.begin(data_set)
    return Ready(
        host, token, agreement.of_code(config, tracking.versions()) | agreement.of_data(data_set), devices_text
    )


def start(roles: Roles, role: str, index: int, pinning: devices.Pinning) -> str:
    """Starts TensorFlow's server ("ps" or "worker"), which runs until the process exits; describes its devices."""
    import tensorflow as tf

    # One thread more than for computing, in which a step waits for servers.
    threads = pinning.num_threads or len(os.sched_getaffinity(0))
    settings = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads + 1)
    restrict(settings, pinning)
    tf.distribute.Server(tf.train.ClusterSpec(roles.cluster), role, index, "grpc", settings)
    return str(pinning)


def restrict(settings: Any, pinning: devices.Pinning) -> None:
    """Sets the GPU and its memory limits in the settings of a server."""
    if pinning.gpu is None:
        settings.device_count["GPU"] = 0
        return
    own = settings.gpu_options
    own.visible_device_list = str(pinning.gpu)
    own.allow_growth = pinning.memory_growth
    if pinning.memory_mb:
        own.experimental.virtual_devices.add(memory_limit_mb=[pinning.memory_mb])


def row_batches(config: Config, train: Any, index: int, num_workers: int) -> data.RowBatches:
    """Rows of a worker: its part of each global batch of all workers."""
    parts = data.Parts.of_rank(index, num_workers)
    return data.RowBatches(train, config.train.batch_size * num_workers, parts, config.seed)


class WorkerBatches:
    """Batches of a worker, one per call."""

    def __init__(self, task: Task, index: int, send: Callable[[Any], None]) -> None:
        self.task, self.index, self.send = task, index, send
        self.lock, self.has_data = threading.Lock(), threading.Event()
        self.batches: Iterator[Any] | None = None
        self.fault_injector: fault_injection.FaultInjector | None = None

    def begin(self, data_set: data.DataSet) -> None:
        """Sets the data; calls before that wait."""
        self.data_set = data_set
        self.has_data.set()

    def __call__(self, where: bytes) -> list[NDArray[Any]]:
        """Tensors of the next batch, and float64 [2] of the worker's index and the Unix time of the call."""
        import tensorflow as tf

        from ringtrain.training.rows import errors_named

        facts = np.array([self.index, time.time()])
        self.has_data.wait()
        # Index of the worker's first batch (used in the first call only), completed steps of the run, run folder.
        position, step, folder = where.split(b" ", 2)
        with self.lock:
            config = self.task.config
            if self.batches is None or self.fault_injector is None:
                self.batches = self._batches_from(int(position))
                self.fault_injector = self._make_fault_injector(Path(os.fsdecode(folder)))
            self.fault_injector.after_step(int(step), None)
            try:
                with errors_named(config.data.name):
                    batch = next(self.batches)
            except RingtrainError as error:
                self.send(("failed", type(error), str(error)))
                threading.Event().wait()  # until the process exits: there is no batch to return
            return [*(leaf.numpy() for leaf in tf.nest.flatten(batch)), facts]

    def _batches_from(self, position: int) -> Iterator[Any]:
        """Batches from one of the run on, without an end: fast workers compute more than others."""
        batches = row_batches(self.task.config, self.data_set.train, self.index, len(self.task.roles.workers))
        first_epoch, step = divmod(position, batches.steps)
        yield from batches(first_epoch, step)
        for epoch in itertools.count(first_epoch + 1):
            yield from batches(epoch)

    def register(self) -> str:
        """Adds the function to TensorFlow's table; returns its name, equal in all processes that add it first."""
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        with tf.Graph().as_default() as self.graph:  # the graph keeps the function alive
            outputs = tf.numpy_function(self, [tf.constant("")], [tf.float64])
        return str(outputs[0].op.get_attr("token").decode())

    def _make_fault_injector(self, folder: Path) -> fault_injection.FaultInjector:
        config, roles = self.task.config, self.task.roles
        rank, faults = self.task.rank, fault_injection.parse(config.chaos)
        events = journal.Journal(folder, rank, len(roles.hosts), Attempt.from_environment().number)
        if config.strategy.name == "ps-async":
            copies = 1
        else:
            copies = len(roles.workers) - config.strategy.backup_workers
        numbers = derive(config, copies, len(self.data_set.train), len(self.data_set.test))
        return fault_injection.FaultInjector(faults, rank, *numbers.lengths, folder, events)
