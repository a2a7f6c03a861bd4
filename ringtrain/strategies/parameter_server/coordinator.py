"""Coordinator of ps-async and ps-sync: weights on parameter servers, gradients from workers.

There is one copy of the weights, distributed over the servers. The coordinator, rank 0, schedules and counts the steps;
its training loop is that of a single rank. Samples are read in the workers' processes, see server.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain import data, hvd
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config
from ringtrain.errors import ConfigError
from ringtrain.hvd.distributed import distribute
from ringtrain.hvd.keras_patches import set_untracked
from ringtrain.monitor import fault_injection, journal
from ringtrain.strategies.base import StepsOf, Strategy
from ringtrain.strategies.mirrored import create_variables
from ringtrain.strategies.parameter_server import server
from ringtrain.strategies.parameter_server.cluster import RankGroup
from ringtrain.training import devices, log_capture

if TYPE_CHECKING:
    from ringtrain.training.run import Run

AHEAD = 2
"""steps per worker that are scheduled in advance"""
NUM_FACTS = 7
"""values that a worker reports per batch besides targets and outputs"""
LOSS, SHARE, NUM_ROWS = 4, 5, 6
"""places of three of them"""


class NoReduction:
    """Identity in place of hvd's Reduction: the gradients are already reduced, or one worker's."""

    op = hvd.Average
    accumulated_scale = 1.0
    process_set = hvd.global_process_set

    def __init__(self, trial: Callable[[Any], NDArray[Any]]) -> None:
        self.trial = trial

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[bool]) -> list[Any]:
        return list(gradients)


class ParameterServers(Strategy):
    """Base class of ps-async and ps-sync, on the coordinator."""

    over_grpc = True
    trains_here = False

    def __init__(self, config: Config, group: RankGroup) -> None:
        super().__init__(config)
        self.group, self.other_hosts = group, group.roles.hosts[1:]
        self.num_workers = len(group.roles.workers)
        self.updates = Counter[int]()
        """applied gradients by worker"""
        self.busy_s, self.idle_s = Counter[int](), Counter[int]()
        """time per worker within epochs, without the first gradient, which includes TensorFlow's graph construction; a
        worker is busy from the moment it requests samples"""
        self.ended_s: dict[int, float] = {}
        """by worker, when its last gradient of this epoch was computed, on its own clock"""
        self.global_step = 0

    def begin(self) -> devices.Pinning:
        """Starts the first server and waits for the workers. Uses no GPU, and cores like any rank of its host."""
        roles = self.group.roles
        pinning = devices.coordinate(roles.hosts.count(roles.hosts[0]), self.config.device)
        server.start(roles, "ps", 0, pinning)
        ready = self.group.wait_until_ready()
        self.tokens = {ready[rank].token for rank in roles.workers}
        if len(self.tokens) > 1:
            raise ConfigError(f"workers name their functions {', '.join(sorted(self.tokens))}: expected the same name")
        self.of_others = [(ready[rank].host, ready[rank].prints) for rank in roles.workers]
        cluster = tf.train.ClusterSpec(roles.cluster)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, "", "chief", 0, rpc_layer="grpc")
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.about |= {
            "servers": [f"rank {rank} on {roles.hosts[rank]}" for rank in roles.servers],
            "workers": [f"rank {rank} on {roles.hosts[rank]}: {ready[rank].pinning}" for rank in roles.workers],
        }
        return pinning

    def placement(self, numbers: Numbers, pinning: devices.Pinning, hosts: Sequence[str]) -> dict[str, str]:
        rows = {}
        for role in ("servers", "workers"):
            ranks = self.about[role]
            rows[role] = f"{len(ranks)}: {', '.join(ranks[:4])}"
            if len(ranks) > 4:
                rows[role] += ", ..."
        return rows

    def proof(self, summary: Mapping[str, Any], gradients: str) -> str:
        noun = "worker"
        if self.num_workers > 1:
            noun = "workers"
        workers = f"{self.num_workers} {noun}, one copy of the weights"
        return f"{workers}: {self.gradients_seen(gradients)}; weights and optimizer {summary['checksum']}"

    def gradients_seen(self, gradients: str) -> str:
        """Clause of the proof about the gradients."""
        raise NotImplementedError

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = self.strategy.scope()
        return scope

    def distribute(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        untouched: Any = NoReduction(self.trial)
        distributed: keras.optimizers.Optimizer = distribute(optimizer, untouched, 1)
        return distributed

    def trial(self, optimizer: Any) -> NDArray[Any]:
        """Reduction test: each worker sends its one-hot vector; returns the vectors that reach the optimizer."""
        raise NotImplementedError

    def create_variables(self, model: keras.Model, train: data.NumberedRows, rows_per_step: int) -> None:
        create_variables(model, self)
        counter = model.optimizer._iterations
        # Keras reads the counter and assigns it plus 1, which would count two concurrent updates as one.
        set_untracked(counter, assign_add=counter.value.assign_add)
        self.model = model
        x, y, weights = keras.utils.unpack_x_y_sample_weight(train.rows(0, 1))
        outputs = model(keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype.name), x))
        self.of_row = y, outputs
        """targets and outputs, as a worker reports them"""
        has_shapes = all(hasattr(part, "shape") and None not in part.shape[1:] for part in self.of_row)
        if weights is not None or not has_shapes:
            raise ConfigError(
                f"strategy.name: {self.config.strategy.name} computes metrics of one tensor of targets and one of"
                f" outputs, with known shapes and no sample weights, and {model.name} has others: train it with ring"
            )

    def batch(self, where: tf.Tensor) -> tuple[Any, Any, tf.Tensor]:
        """A worker's next batch, its share, and (worker index, request time), in the graph that the worker runs."""
        (token,) = self.tokens
        nest = self.batches.dataset.element_spec
        specs = tf.nest.flatten(nest)
        *leaves, begun = tf.raw_ops.PyFunc(
            input=[where], token=token, Tout=[*(spec.dtype for spec in specs), tf.float64]
        )
        for leaf, spec in zip(leaves, specs, strict=True):
            leaf.set_shape(spec.shape)
        begun.set_shape([2])
        batch, share = tf.nest.pack_sequence_as(nest, leaves), 1.0
        if not self.batches.is_even:
            header, batch = batch
            share = header.shares[0]
        return batch, share, begun

    def where(self, position: int, step: int) -> tf.Tensor:
        """Argument of `batch`, see server.WorkerBatches."""
        return tf.constant(f"{position} {step} {self.folder}")

    def gradients(self, batch: Any) -> tuple[Any, Any, list[Any]]:
        """Loss, targets with outputs, and gradients, as in a training step of Keras."""
        model = self.model
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x, y, outputs, None, training=True)
        return loss, (y, outputs), tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    @contextlib.contextmanager
    def training(self, run: Run) -> Iterator[StepsOf]:
        self.folder, self.global_step = run.folder, run.clock.global_step
        train: Any = run.job.data_set.train
        self.batches = server.row_batches(run.config, train, 0, self.num_workers)
        self.fault_injectors = self._of_servers(run)
        # No pool of threads, which would wait for steps of lost workers.
        threads = [threading.Thread(target=target, daemon=True) for target in self.thread_targets()]
        for thread in threads:
            thread.start()
        try:
            yield lambda epoch, first_step: self.steps(run.job.numbers.steps_per_epoch - first_step)
        finally:
            self.release()
        for thread in threads:
            thread.join()
        self.group.receive_all()
        self.about |= self.statistics()

    def _of_servers(self, run: Run) -> list[fault_injection.FaultInjector]:
        """Fault injectors of the servers, which run no steps themselves."""
        faults, length, group, injectors = run.source.faults, run.job.numbers.lengths, self.group, []
        for rank in {fault.rank for fault in faults} & {*group.roles.servers[1:]}:
            events = journal.Journal(run.folder, rank, group.size, run.attempt.number)
            kill = functools.partial(group.send, rank, "signal")
            injectors.append(fault_injection.FaultInjector(faults, rank, *length, run.folder, events, kill))
        return injectors

    def thread_targets(self) -> Sequence[Callable[[], None]]:
        """Functions of the threads that run during the steps."""
        raise NotImplementedError

    def release(self) -> None:
        """Tells those threads to exit after their current work."""
        raise NotImplementedError

    def steps(self, num_steps: int) -> Iterator[dict[str, Any]]:
        """Runs steps of one epoch and yields the metrics after each."""
        raise NotImplementedError

    def report(self, facts: Sequence[Any], reported: Sequence[Any]) -> tf.Tensor:
        """Worker's report on a batch: one float64 vector, since each tensor would be a separate message."""
        # Facts: worker index, start and end of computing in Unix time, updates in between, loss, share.
        parts = [*facts, tf.shape(reported[0])[0], *reported]
        return tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts], 0)

    @tf.function(autograph=False, reduce_retracing=True)
    def observe(self, report: Any) -> dict[str, Any]:
        """Updates the coordinator's metrics from a worker's report."""
        model, num_rows = self.model, tf.cast(report[NUM_ROWS], tf.int32)
        sizes = [num_rows * math.prod(row.shape[1:]) for row in self.of_row]
        parts = []
        for values, row in zip(tf.split(report[NUM_FACTS:], sizes), self.of_row, strict=True):
            parts.append(tf.cast(tf.reshape(values, [-1, *row.shape[1:]]), row.dtype))
        model._loss_tracker.update_state(report[LOSS], sample_weight=num_rows)
        results: dict[str, Any] = model.compute_metrics(None, *parts, sample_weight=None)
        return results

    def count(self, report: NDArray[np.float64]) -> dict[str, Any]:
        """Counts an applied gradient, from a worker's report; returns the metrics."""
        self.group.receive_all()
        for injector in self.fault_injectors:
            injector.after_step(self.global_step, self.model)
        self.updates[int(report[0])] += 1
        return self.observe(report)

    def record_times(self, report: NDArray[np.float64]) -> None:
        """Records when a gradient was computed, from a worker's report, also if it is dropped."""
        worker, begin_s, end_s = int(report[0]), report[1], report[2]
        if worker in self.ended_s:
            self.busy_s[worker] += end_s - begin_s
            self.idle_s[worker] += max(0.0, begin_s - self.ended_s[worker])
        self.ended_s[worker] = end_s

    def wait_on(self, workers: Sequence[int]) -> None:
        """Reads messages and records which workers training waits for, so that a stall report names them."""
        self.group.receive_all()
        ranks = ", ".join(str(self.group.roles.workers[worker]) for worker in workers[:4])
        if len(workers) > 4:
            ranks += ", ..."
        hvd.step_timing.PHASES.phase = f"the wait for gradients of rank {ranks}"

    def statistics(self) -> dict[str, Any]:
        """Statistics of the steps for summary.json."""
        updates, waiting = [], []
        for worker in range(self.num_workers):
            updates.append(self.updates[worker])
            share = None
            if self.busy_s[worker]:
                share = self.idle_s[worker] / (self.idle_s[worker] + self.busy_s[worker])
            waiting.append(share)
        return {
            "updates": updates,
            "waiting": waiting,
            "workers_lost": self.group.lost,
        }

    def end(self, exit_code: int) -> None:
        """Stops the other ranks, then sends stderr to the log only: TensorFlow logs errors on disconnect."""
        self.group.end(exit_code)
        log_capture.log_only()
