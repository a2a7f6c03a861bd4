"""Keras' fit on the backend of the start, KERAS_BACKEND: on all cores in one process, or in several processes."""

from __future__ import annotations

import os
from typing import Any

from peers.one_start import Trained, watch
from peers.training import Training
from ringtrain.errors import ConfigError

OPTIMIZERS = ("sgd", "adam")


def all_cores(training: Training) -> Trained:
    """Trains all workers' batches in one process, on as many cores as they have together."""
    import keras

    num_cores = training.config.device.threads * training.num_workers
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_cores])
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(num_cores)
        tf.config.threading.set_inter_op_parallelism_threads(num_cores)
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(num_cores)
    x, y = training.samples(range(training.num_workers))
    return _fit_arrays(training, x, y, training.numbers.batch_size * training.num_workers)


def jax_processes(training: Training) -> Trained:
    """Trains in a process per worker, whose gradients JAX averages by Gloo."""
    import jax
    import keras

    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"  # one thread per worker
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{training.ports[0]}", training.num_workers, training.rank)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    x, y = training.samples(range(training.rank, training.rank + 1))
    return _fit_arrays(training, x, y, training.numbers.batch_size)


def _fit_arrays(training: Training, x: Any, y: Any, batch_size: int) -> Trained:
    import keras

    name, learning_rate = training.config.optimizer.name, training.numbers.learning_rate
    if name not in OPTIMIZERS:
        raise ConfigError(f"Keras' fit on other backends: got optimizer.name {name}, expected one of {OPTIMIZERS}")
    momentum = {"momentum": training.config.optimizer.momentum} if name == "sgd" else {}
    model = training.model()
    model.compile(
        keras.optimizers.get({"class_name": name, "config": {"learning_rate": learning_rate, **momentum}}),
        training.loss(),
        metrics=["accuracy"],
        jit_compile=False if keras.backend.backend() == "tensorflow" else "auto",
    )
    watched = watch()
    model.fit(x, y, batch_size=batch_size, epochs=1, callbacks=[watched], shuffle=False, verbose=0)
    watched.trained.images_per_end = training.numbers.batch_size * training.num_workers
    return watched.trained
