"""Strategies ring and mpi-ring: one process and model per rank, Keras' fit, allreduce by Horovod or mpi4py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from ringtrain import hvd
from ringtrain.errors import ConfigError
from ringtrain.optim import virtual_ranks
from ringtrain.optim.shared_step import SharedStep
from ringtrain.strategies.base import Strategy

if TYPE_CHECKING:
    from ringtrain.run.context import RunContext
    from ringtrain.run.resume import Segment


class Ring(Strategy):
    """Strategies ring and mpi-ring.

    Attributes:
        step: Step that keeps the state of all ranks equal; None: each rank has seeds and moving statistics of its own.
    """

    step: SharedStep | None = None

    @property
    def shown_name(self) -> str:
        name = self.config.strategy.name
        return name if name != "ring" else ""

    def distribute(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        options, sharded = self.config.hvd, self.config.optimizer.sharded
        try:
            return hvd.DistributedOptimizer(
                optimizer,
                op={"average": hvd.Average, "adasum": hvd.Adasum}[options.op],
                compression=getattr(hvd.Compression, options.compression),
                groups=options.groups or None,
                device_dense=self.device_of_sums,
                device_sparse=self.device_of_sums,
                deterministic=options.deterministic or self.config.strategy.name == "mpi-ring",
                jit_update=self.config.optimizer.jit,
                sharded=sharded,
            )
        except ValueError as error:
            if not str(error).startswith("sharded=True: "):
                raise
            raise ConfigError(str(error).replace("sharded=True", "optimizer.sharded", 1)) from error

    def make_ready(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        if num_virtual := self.config.train.virtual_ranks:
            self.step = virtual_ranks.VirtualRanks(model, input_shape, num_virtual)

    def check_averaging(self, model: keras.Model) -> str:
        combined = super().check_averaging(model)
        if num_virtual := self.config.train.virtual_ranks:
            virtual_ranks.check_order(model, num_virtual)
            combined += " in a fixed order"
        return combined

    def fit(self, run: RunContext, part: Segment) -> None:
        run.model.fit(
            self.batches(run, part),
            initial_epoch=part.first_epoch,
            epochs=part.end_epoch,
            steps_per_epoch=part.num_steps,
            callbacks=list(run.callbacks.ordered),
            shuffle=False,  # the shards are already shuffled, in the same way on every rank
            verbose=0,
        )
