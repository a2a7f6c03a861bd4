"""A process per rank with one copy of the model, Keras' own fit, and a ring between them: Horovod's, or mpi4py's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.config import Config, Numbers
from ringtrain.errors import ConfigError
from ringtrain.run import devices

if TYPE_CHECKING:
    from pathlib import Path

    from ringtrain.run.resume import Segment


class Ring:
    """Strategies ring and mpi-ring, and what the others begin with.

    Attributes:
        about: what summary.json says of the strategy besides its options.
        folder: of the run, when it is there.
        numbers: of the run, when they are known.
    """

    copies = 1
    folder: Path
    numbers: Numbers

    def __init__(self, config: Config) -> None:
        self.config = config
        loaded = "Horovod" if hvd.backend.WITH_HOROVOD else "mpi4py"  # by which parameter servers' ranks meet
        if loaded != ("Horovod" if config.strategy.name == "ring" else "mpi4py"):
            raise ConfigError(
                f"strategy.name: got {config.strategy.name} in a process whose ranks talk by {loaded}: only"
                f" ringtrain.train, started by itself, has other strategies than ring"
            )
        self.about: dict[str, Any] = {"ranks_talk_by": loaded}

    def begin(self) -> devices.Pinning:
        """Takes this rank's devices. A collective, before TensorFlow touches one.

        Raises:
            RingtrainError: on every rank: the devices are not as wanted, or the ranks not as many.
        """
        pinning = hvd.run_together(lambda: devices.pin(hvd.local_rank(), hvd.local_size(), self.config.device))
        if hvd.local_rank() == 0 and (warning := devices.missing_gpu(pinning, bool(hvd.nccl_built()))):
            print(f"ringtrain: {warning}", file=sys.stderr, flush=True)
        return pinning

    @property
    def device_of_sums(self) -> str:
        """Device that adds up gradients, "": that of the gradients. NCCL refuses two ranks on one GPU."""
        return "CPU:0" if self.config.device.share_gpus else ""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Where the model and its optimizer have to be made."""
        return contextlib.nullcontext()

    def distribute(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Makes an optimizer average its gradients over all copies of the model."""
        options = self.config.hvd
        return hvd.DistributedOptimizer(
            optimizer,
            op={"average": hvd.Average, "adasum": hvd.Adasum}[options.op],
            compression=getattr(hvd.Compression, options.compression),
            groups=options.groups or None,
            device_dense=self.device_of_sums,
            device_sparse=self.device_of_sums,
            deterministic=options.deterministic or self.config.strategy.name == "mpi-ring",
        )

    def make_ready(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        """What has to be made of a compiled model before its first step, if anything."""

    def make_all(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        """Makes the variables that Keras would else make within the first step, each where it belongs."""
        with self.scope():
            model.optimizer.build(model.trainable_variables)
        # Metrics are this process': made by a step they would be the strategy's, which adds them up when they are read.
        model.compute_metrics(
            tf.zeros([1, *input_shape]), tf.zeros([1], tf.int64), tf.zeros([1, num_classes]), sample_weight=None
        )
        model.reset_metrics()
        object.__setattr__(model, "_distribute_strategy", None)  # evaluate is for one copy, outside of the strategy

    def watch(self, model: keras.Model) -> None:
        """Has a compiled model note where the time of its steps goes."""
        hvd.step_timing.PLACE.watch(model, each_gradient=self.config.tracking.timeline_steps > 0)

    def gradient_norm(self, optimizer: keras.optimizers.Optimizer) -> hvd.GradientNorm | None:
        """What knows how long the gradients of an update were, if anything does."""
        return hvd.track_gradient_norm(optimizer)

    def check(self, own: dict[str, str]) -> None:
        """Makes sure that what trains beside this process has its code and data.

        Raises:
            ConfigError: it has not.
        """

    def end(self, exit_code: int) -> None:
        """After all: nothing is asked of other ranks any more."""

    def call(
        self,
        model: keras.Model,
        steps: Iterator[Mapping[str, Any]],
        part: Segment,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        """Calls callbacks as fit does, around steps of another kind than Keras'.

        Args:
            steps: makes a step when it is asked for the next, and gives the metrics.
        """
        called = keras.callbacks.CallbackList(
            list(callbacks), model=model, epochs=part.end_epoch, steps=part.num_steps, verbose=0
        )
        model.stop_training = False
        called.on_train_begin()
        for epoch in range(part.first_epoch, part.end_epoch):
            model.reset_metrics()
            called.on_epoch_begin(epoch)
            for number in range(part.num_steps):
                called.on_train_batch_begin(number)
                called.on_train_batch_end(number, next(steps))
                if model.stop_training:
                    break
            called.on_epoch_end(epoch, dict(model.get_metrics_result()))
            if model.stop_training:
                break
        called.on_train_end()

    def fit(
        self, model: keras.Model, batches: Any, part: Segment, callbacks: Sequence[keras.callbacks.Callback]
    ) -> None:
        """Trains.

        Args:
            batches: this process', for each of its copies one after the other.
        """
        model.fit(
            batches,
            initial_epoch=part.first_epoch,
            epochs=part.end_epoch,
            steps_per_epoch=part.num_steps,
            callbacks=list(callbacks),
            shuffle=False,  # the shards are shuffled already, in the same way on every rank
            verbose=0,
        )
