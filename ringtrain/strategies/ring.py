"""Strategies ring and mpi-ring: one process and model per rank, Keras' fit, allreduce by Horovod or mpi4py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.config import Config
from ringtrain.derived import Numbers
from ringtrain.errors import ConfigError
from ringtrain.run import devices

if TYPE_CHECKING:
    from pathlib import Path

    from ringtrain.run.resume import Segment


class Ring:
    """Strategies ring and mpi-ring, and the base class of the others.

    Attributes:
        about: Facts on the strategy for summary.json, besides its options.
        folder: Run folder, set after `begin`.
        numbers: Derived numbers of the run, set after `begin`.
    """

    copies = 1
    folder: Path
    numbers: Numbers

    def __init__(self, config: Config) -> None:
        self.config = config
        loaded = "Horovod" if hvd.backend.WITH_HOROVOD else "mpi4py"  # which ranks with parameter servers use, too
        if loaded != ("Horovod" if config.strategy.name == "ring" else "mpi4py"):
            raise ConfigError(
                f"strategy.name: got {config.strategy.name} in a process whose ranks talk by {loaded}: only"
                f" ringtrain.train, started by itself, has other strategies than ring"
            )
        self.about: dict[str, Any] = {"ranks_talk_by": loaded}

    def begin(self) -> devices.Pinning:
        """Pins this rank's devices, before TensorFlow initializes one. Collective.

        Raises RingtrainError on every rank if the devices or the number of ranks do not match the configuration.
        """
        pinning = hvd.run_together(lambda: devices.pin(hvd.local_rank(), hvd.local_size(), self.config.device))
        if hvd.local_rank() == 0 and (warning := devices.missing_gpu(pinning, bool(hvd.nccl_built()))):
            print(f"ringtrain: {warning}", file=sys.stderr, flush=True)
        return pinning

    @property
    def device_of_sums(self) -> str:
        """Device of the reduction, "": that of the gradients. CPU:0 with shared GPUs: NCCL allows one rank per GPU."""
        return "CPU:0" if self.config.device.share_gpus else ""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the model and its optimizer must be created."""
        return contextlib.nullcontext()

    def distribute(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Wraps an optimizer so that it averages gradients over all copies of the model."""
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
        """Prepares a compiled model for its first step; does nothing here."""

    def make_all(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        """Creates the variables that Keras would create in the first step, each in the right scope."""
        with self.scope():
            model.optimizer.build(model.trainable_variables)
        # Metrics are local to this process. Created in a step, they would be the strategy's and summed when read.
        model.compute_metrics(
            tf.zeros([1, *input_shape]), tf.zeros([1], tf.int64), tf.zeros([1, num_classes]), sample_weight=None
        )
        model.reset_metrics()
        object.__setattr__(model, "_distribute_strategy", None)  # evaluate runs on one copy, without the strategy

    def watch(self, model: keras.Model) -> None:
        """Measures the phases of a compiled model's steps."""
        hvd.step_timing.PLACE.watch(model, each_gradient=self.config.tracking.timeline_steps > 0)

    def gradient_norm(self, optimizer: keras.optimizers.Optimizer) -> hvd.GradientNorm | None:
        """Tracker of the global gradient norm; None if the strategy has none."""
        return hvd.track_gradient_norm(optimizer)

    def check(self, own: dict[str, str]) -> None:
        """Raises ConfigError if workers have other code or data than this process; does nothing here."""

    def end(self, exit_code: int) -> None:
        """Called last, when the other ranks are no longer needed; does nothing here."""

    def call(
        self,
        model: keras.Model,
        steps: Iterator[Mapping[str, Any]],
        part: Segment,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        """Training loop that calls callbacks as Keras' fit does; `steps` runs a step per item and yields metrics."""
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
        """Trains a segment of the run; `batches` are this process', its copies take turns."""
        model.fit(
            batches,
            initial_epoch=part.first_epoch,
            epochs=part.end_epoch,
            steps_per_epoch=part.num_steps,
            callbacks=list(callbacks),
            shuffle=False,  # the shards are already shuffled, in the same way on every rank
            verbose=0,
        )
