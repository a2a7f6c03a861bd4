"""TensorFlow's strategies with a copy of the weights per device, which reduce gradients in every step.

The variables of model and optimizer belong to the strategy, metrics are local to the process. A step calls
the model's train_step on each copy.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses.loss import scale_loss_for_distribution
from numpy.typing import NDArray

from ringtrain import data, hvd
from ringtrain.config.derived import Numbers
from ringtrain.errors import ConfigError, DeviceError
from ringtrain.hvd.distributed import distribute
from ringtrain.hvd.keras_patches import set_untracked
from ringtrain.hvd.reduction import probe
from ringtrain.strategies.base import StepsOf, Strategy
from ringtrain.strategies.parameter_server import cluster
from ringtrain.training import devices, rows

if TYPE_CHECKING:
    from ringtrain.training.run import Run


class SumReduction(threading.local):  # each copy's step is traced in a thread of its own
    """Sums gradients over copies before clipping, like hvd's Reduction; Keras divides the loss, so it is the mean."""

    share: Any = None  # of a copy in the batch: see `hvd.weigh_gradients`
    op = hvd.Average
    accumulated_scale = 1.0
    process_set = hvd.global_process_set

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[bool]) -> list[Any]:
        """Returns the reduced gradients, on each copy."""
        total = tf.distribute.ReduceOp.SUM
        # Dense, since each copy would sum the parts of a sparse gradient in a different order.
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return list(tf.distribute.get_replica_context().all_reduce(total, dense))

    def trial(self, optimizer: Any) -> NDArray[Any]:
        """Reduction test: each copy reduces its one-hot vector; returns one result per local copy."""
        number = self.strategy.num_replicas_in_sync
        with self.strategy.scope():
            variable = probe(number)

        def on_each_copy() -> Any:
            own = tf.one_hot(tf.distribute.get_replica_context().replica_id_in_sync_group, number)
            return optimizer.reduce([scale_loss_for_distribution(own)], [variable])[0]

        results = tf.function(lambda: self.strategy.run(on_each_copy), autograph=False)()
        return np.stack([one.numpy() for one in self.strategy.experimental_local_results(results)])


def create_variables(model: keras.Model, strategy: Strategy) -> None:
    """Creates a strategy's variables. Those of metrics follow outside of its scope: they are local to this process."""
    if not model.optimizer.built:
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
    model.steps_per_execution = 1  # a step here is a call of its own
    set_untracked(model, _distribute_strategy=None)  # evaluate runs on one copy, without the strategy


class Mirrored(Strategy):
    """Base class of towers and multi-worker; `strategy` is set by `begin`."""

    strategy: tf.distribute.Strategy

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = self.strategy.scope()
        return scope

    def distribute(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        summed: Any = SumReduction(self.strategy)
        distributed: keras.optimizers.Optimizer = distribute(optimizer, summed, 1)
        return distributed

    def create_variables(self, model: keras.Model, train: data.NumberedRows, rows_per_step: int) -> None:
        rows.check_parts(rows_per_step, len(train), self.num_copies, self.copies_name)
        create_variables(model, self)

    @contextlib.contextmanager
    def training(self, run: Run) -> Iterator[StepsOf]:
        parts = data.Parts.of_rank(run.rank, run.size, self.num_copies)
        train: Any = run.job.data_set.train
        config = run.config
        batches_of = data.RowBatches(
            train, run.job.numbers.samples_per_step, parts, config.seed, num_epochs=config.train.epochs
        )
        optimizers = hvd.optimizers_of(run.job.model)
        local = self.strategy.experimental_local_results

        def on_copy(share: Any, batch: Any) -> Any:
            for optimizer in optimizers:
                hvd.weigh_gradients(optimizer, share)
            return run.job.model.train_step(batch)

        @tf.function(autograph=False)
        def step(batches: Iterator[Any]) -> Any:
            batch, shares, sizes = next(batches), None, self.copies
            if not batches_of.is_even:
                (shares, sizes, _), batch = batch

            def of_copy(context: Any) -> tuple[Any, Any]:
                index = parts.numbers.index(context.replica_id_in_sync_group)
                share = None if shares is None else shares[index]
                return share, tf.nest.map_structure(lambda leaf: tf.split(leaf, sizes)[index], batch)

            parts_of_batch = self.strategy.experimental_distribute_values_from_function(of_copy)
            logs = self.strategy.run(on_copy, args=parts_of_batch)
            return {name: local(value)[-1] for name, value in logs.items()}  # those of the last copy cover all copies

        with rows.errors_named(run.job.named_in_errors):
            yield lambda epoch, first_step: map(step, itertools.repeat(batches_of(epoch, first_step)))


class Towers(Mirrored):
    """In-graph replication: one process, a copy of the model on each device, no messages."""

    copies_name = "towers"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        options, gpus = config.strategy, len(tf.config.list_physical_devices("GPU"))
        self.copies = options.towers or gpus or 2

    def begin(self) -> devices.Pinning:
        options, ranks = self.config.strategy, hvd.size()
        if ranks > 1:
            raise ConfigError(
                f"strategy.name: towers is one process, this run has {ranks} ranks: start it without a launcher or with"
                f" -np 1, and say --strategy.towers {ranks}; or train with multi-worker"
            )
        pinning = devices.pin(0, 1, self.config.device, {}, self.copies)
        kind = "CPU" if pinning.gpu is None else "GPU"
        num_gpus = self.copies if kind == "GPU" else 0
        if options.controller != "cpu:0" and int(options.controller[4:]) >= num_gpus:
            raise DeviceError(
                f"strategy.controller: got {options.controller}, this run has {num_gpus} GPUs: take cpu:0"
            )
        # On all devices: NCCL, or, without GPUs, TensorFlow's ring (None), which works for any number of devices.
        adding = tf.distribute.NcclAllReduce() if num_gpus else None
        if options.reduction == "one-device":
            adding = tf.distribute.ReductionToOneDevice(f"/{options.controller}")
        self.strategy = tf.distribute.MirroredStrategy([f"{kind}:{index}" for index in range(self.copies)], adding)
        self.about["copies"] = self.copies
        return pinning

    def placement(self, numbers: Numbers, pinning: devices.Pinning, hosts: Sequence[str]) -> dict[str, str]:
        return {"towers": f"{numbers.num_ranks} in one process on {hosts[0]}: {pinning}"}


class MultiWorker(Mirrored):
    """One process per rank, with TensorFlow's own collectives over gRPC or NCCL."""

    over_grpc = True

    def begin(self) -> devices.Pinning:
        pinning = super().begin()
        task = {"type": "worker", "index": hvd.rank()}
        places = cluster.addresses(hvd.rank(), hvd.allgather_object)
        self.about["workers"] = [place for (place,) in places]
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": self.about["workers"]}, "task": task})
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        return pinning
