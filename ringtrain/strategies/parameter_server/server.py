"""Process of a parameter server or a worker: TensorFlow's server, and for a worker its samples.

The coordinator builds the graphs of the steps. A worker's samples come from a Python function of this process, which
the coordinator's graph calls by its name (token) in TensorFlow's table of such functions.
"""

from __future__ import annotations

import contextlib
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
from ringtrain.config import Config
from ringtrain.derived import derive
from ringtrain.errors import ConfigError, RingtrainError
from ringtrain.models import lazy_keras
from ringtrain.monitor import fault_injection, journal
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import consistency, devices, log_capture
from ringtrain.strategies.parameter_server import listening
from ringtrain.strategies.parameter_server.cluster import SIGNALS, Roles


@dataclass(frozen=True)
class Place:
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


def main(place: Place, told: Connection, held: Connection) -> None:
    """Serves until the rank closes its end of `held`, or dies.

    Sends ("ready", Ready), ("failed", error class, message) and ("skipped", sample names) to `told`.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_rank, args=(held,), daemon=True).start()
    log_capture.watch()
    lazy_keras.start()
    lock = threading.Lock()

    def tell(message: Any) -> None:
        with lock:
            told.send(message)

    try:
        tell(("ready", _serve(place, tell)))
    except (RingtrainError, OSError) as error:
        kind = type(error) if isinstance(error, RingtrainError) else RingtrainError
        tell(("failed", kind, str(error)))
    threading.Event().wait()


def _end_with_the_rank(held: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        held.recv()
    os._exit(0)


def _serve(place: Place, tell: Callable[[Any], None]) -> Ready:
    from ringtrain.run import setup, tracking

    role, index = place.roles.of(place.rank)
    host = socket.gethostname()
    if role == "ps":
        return Ready(host, pinning=start(place.roles, role, index, devices.Pinning(num_threads=1)))
    config = place.config
    beside = place.roles.on_host_of(place.rank)
    pinning = devices.decide(beside.index(place.rank), len(beside), config.device)
    # Function before server, which accepts steps immediately; server before data, while its port is still free.
    feed = Feed(place, index, tell)
    token, used = feed.register(), start(place.roles, role, index, pinning)
    data_set = setup.find(config).read_data()
    together = config.train.batch_size * len(place.roles.workers)
    if together > len(data_set.train):
        raise ConfigError(
            f"train.batch_size: got {config.train.batch_size}, and {len(place.roles.workers)} workers, which are"
            f" {together} samples at a time: expected no more than the {len(data_set.train)} that there are"
        )
    feed.begin(data_set)
    return Ready(host, token, consistency.of_code(config, tracking.versions()) | data.checksums(data_set), used)


def start(roles: Roles, role: str, index: int, pinning: devices.Pinning) -> str:
    """Starts TensorFlow's server ("ps" or "worker"), which runs until the process exits; describes its devices."""
    import tensorflow as tf

    # One thread more than for computing, in which a step waits for servers.
    threads = pinning.num_threads or len(os.sched_getaffinity(0))
    settings = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads + 1)
    restrict(settings, pinning)
    with listening.only_for(roles.addresses, [roles.port_of(role, index)]):
        made = tf.distribute.Server(tf.train.ClusterSpec(roles.cluster), role, index, "grpc", settings, start=False)
    made.start()
    return str(pinning)


def restrict(settings: Any, pinning: devices.Pinning) -> None:
    """Sets the GPU and its memory limits in the settings of a server."""
    if pinning.gpu is None:
        settings.device_count["GPU"] = 0
        return
    own = settings.gpu_options
    own.visible_device_list = str(pinning.gpu)
    own.allow_growth = pinning.memory_growth
    own.per_process_gpu_memory_fraction = pinning.memory_fraction
    if pinning.memory_mb:
        own.experimental.virtual_devices.add(memory_limit_mb=[pinning.memory_mb])


class Feed:
    """Batches of a worker, one per call. Its shard is that of rank `index` in a job with one rank per worker."""

    def __init__(self, place: Place, index: int, tell: Callable[[Any], None]) -> None:
        self.place, self.index, self.tell = place, index, tell
        self.lock, self.begun = threading.Lock(), threading.Event()
        self.skipped: frozenset[str] = frozenset()
        self.batches: Iterator[tuple[NDArray[Any], NDArray[Any]]] | None = None
        self.saboteur: fault_injection.FaultInjector | None = None

    def begin(self, data_set: data.DataSet) -> None:
        """Sets the data; calls before that wait."""
        self.data_set = data_set
        self.begun.set()

    def __call__(self, where: bytes) -> list[NDArray[Any]]:
        """Next batch: inputs, labels, and float64 [2] of the worker's index and the Unix time of the call.

        Args:
            where: Three words: index of the first batch in this worker's shard of the run (used in a process' first
                call only), completed steps of the run, run folder.
        """
        facts = np.array([self.index, time.time()])
        self.begun.wait()
        position, step, folder = where.split(b" ", 2)
        with self.lock:
            config, roles = self.place.config, self.place.roles
            if self.batches is None or self.saboteur is None:
                # Practically endless: fast workers compute more batches than others.
                epochs = (config.train.epochs + 1) * (len(roles.workers) + 1)
                size, batch_size = len(roles.workers), config.train.batch_size
                batches = data.training_batches(
                    self.data_set.train, batch_size, self.index, size, config.seed, epochs, int(position)
                )
                self.batches = batches.as_numpy_iterator()
                self.saboteur = self._saboteur(Path(os.fsdecode(folder)))
            self.saboteur.after_step(int(step), None)
            inputs, labels = next(self.batches)
            try:
                self.data_set.raise_unreadable()
            except RingtrainError as error:
                self.tell(("failed", type(error), str(error)))
                threading.Event().wait()  # until the process exits: there is no batch to return
            if self.data_set.skipped != self.skipped:
                self.skipped = self.data_set.skipped
                self.tell(("skipped", set(self.skipped)))
            return [inputs, labels, facts]

    def register(self) -> str:
        """Adds the function to TensorFlow's table; returns its name, equal in all processes that add it first."""
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        with tf.Graph().as_default() as self.graph:  # the graph keeps the function alive
            outputs = tf.numpy_function(self, [tf.constant("")], [tf.float32, tf.int64, tf.float64])
        return str(outputs[0].op.get_attr("token").decode())

    def _saboteur(self, folder: Path) -> fault_injection.FaultInjector:
        config, roles = self.place.config, self.place.roles
        attempt = Attempt.from_environment()
        own_journal = journal.Journal(folder, self.place.rank, len(roles.hosts), attempt.number)
        faults = tuple(fault for fault in fault_injection.parse(config.chaos) if fault.rank == self.place.rank)
        copies = 1 if config.strategy.name == "ps-async" else len(roles.workers) - config.strategy.backup_workers
        numbers = derive(config, copies, len(self.data_set.train), len(self.data_set.test))
        own = self.place.rank
        return fault_injection.FaultInjector(
            faults, own, numbers.num_steps, numbers.steps_per_epoch, folder, own_journal
        )
