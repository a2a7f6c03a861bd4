"""TensorFlow's ParameterServerStrategy: weights on a server, updated asynchronously by workers."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from peers.by_fit import fit
from peers.one_start import Trained, checksum
from peers.training import Training


def run(training: Training) -> Trained:
    """Schedules steps and holds the parameter server on rank 0; every other rank is a worker."""
    cluster = _cluster(training)
    if training.rank:
        return _serve(training, cluster)
    strategy = _coordinated(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = training.model()
        optimizer, loss_of = training.optimizer(model), training.loss()
    variables = model.trainable_variables

    @tf.function(autograph=False)
    def step(batches: Any) -> Any:
        return strategy.run(on_a_worker, args=next(batches))  # Keras' optimizers must run inside their strategy

    def on_a_worker(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
        return loss, tf.timestamp()  # in program order, so after the update

    @tf.function
    def batches_of_a_worker() -> Any:
        return training.batches(range(training.num_workers))

    batches = iter(coordinator.create_per_worker_dataset(batches_of_a_worker))
    steps = [coordinator.schedule(step, args=(batches,)) for _ in range(training.num_steps * training.num_workers)]
    coordinator.join()
    seen = sorted((float(end_s), float(loss)) for loss, end_s in (one.fetch() for one in steps))
    ends_s, losses = zip(*seen, strict=True)
    return Trained(training.numbers.batch_size, list(ends_s), list(losses), [checksum(variables)])


def run_fit(training: Training) -> Trained:
    """Does the same with Keras' fit."""
    cluster = _cluster(training)
    return (
        _serve(training, cluster) if training.rank else fit(training, _coordinated(cluster), training.batches(range(1)))
    )


def _cluster(training: Training) -> tf.train.ClusterSpec:
    chief, server, *workers = (f"localhost:{port}" for port in training.ports)
    return tf.train.ClusterSpec({"chief": [chief], "ps": [server], "worker": workers})


def _coordinated(cluster: tf.train.ClusterSpec) -> tf.distribute.Strategy:
    tf.distribute.Server(cluster, "ps", 0, "grpc", _threads())
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, "", "chief", 0, rpc_layer="grpc")
    return tf.distribute.ParameterServerStrategy(resolver)


def _serve(training: Training, cluster: tf.train.ClusterSpec) -> Trained:
    tf.distribute.Server(cluster, "worker", training.rank - 1, "grpc", _threads())
    while not (training.folder / "rank-0.json").exists():  # a TensorFlow server never exits by itself
        time.sleep(0.1)
    return Trained(training.numbers.batch_size)


def _threads() -> tf.compat.v1.ConfigProto:
    """One computing thread, and one more since a step waits for the server in it."""
    return tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
