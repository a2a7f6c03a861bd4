"""TensorFlow's strategies that keep a copy of the weights on every worker and reduce gradients in every step."""

from __future__ import annotations

import json
import os
from typing import Any

import tensorflow as tf

from peers.by_fit import fit
from peers.one_start import Trained, checksum
from peers.training import Training


def mirrored(training: Training) -> Trained:
    """MirroredStrategy: one process, a logical CPU per worker."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * training.num_workers
    tf.config.set_logical_device_configuration(cpu, parts)
    devices = [f"CPU:{number}" for number in range(training.num_workers)]
    # On logical CPUs this is its faster reduction.
    strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    return loop(training, strategy, range(training.num_workers))


def multi_worker(training: Training) -> Trained:
    """MultiWorkerMirroredStrategy: a process per worker, with TensorFlow's own ring over gRPC."""
    return loop(training, _ring_of(training), range(training.rank, training.rank + 1))


def multi_worker_fit(training: Training) -> Trained:
    """Does the same with Keras' fit."""
    strategy = _ring_of(training)
    return fit(training, strategy, _distributed(training, strategy, range(training.rank, training.rank + 1)))


def _ring_of(training: Training) -> tf.distribute.Strategy:
    workers = [f"localhost:{port}" for port in training.ports[: training.num_workers]]
    task = {"type": "worker", "index": training.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def _distributed(training: Training, strategy: tf.distribute.Strategy, workers: range) -> Any:
    """Batches of the workers in this process; endless, or each step would first agree on whether one is left."""
    return strategy.distribute_datasets_from_function(lambda context: training.batches(workers))


def loop(training: Training, strategy: tf.distribute.Strategy, workers: range) -> Trained:
    """Trains in a custom loop, as these strategies require."""
    with strategy.scope():
        model = training.model()
        optimizer, loss_of = training.optimizer(model), training.loss()
    variables = model.trainable_variables

    def on_each_worker(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            # Keras knows the strategy: its losses are this worker's share of the mean, its optimizers add up gradients.
            share = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(share, [variable.value for variable in variables]), variables)
        return share * training.num_workers

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        return strategy.run(on_each_worker, args=(x, y))

    trained = Trained(training.numbers.batch_size * training.num_workers)
    batches = iter(_distributed(training, strategy, workers))
    for _ in range(training.num_steps):
        trained.note(strategy.experimental_local_results(step(*next(batches)))[0])
    copies = [strategy.experimental_local_results(variable.value) for variable in variables]
    trained.checksums = [checksum(copy) for copy in zip(*copies, strict=True)]
    return trained
