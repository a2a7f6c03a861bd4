"""TensorFlow's strategies with a copy of the weights per device, which reduce gradients in every step.

The variables of model and optimizer belong to the strategy, metrics are local to the process. A step calls
the model's train_step on each copy.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses.loss import scale_loss_for_distribution
from numpy.typing import NDArray

from ringtrain import hvd
from ringtrain.derived import Numbers
from ringtrain.errors import ConfigError, DeviceError
from ringtrain.hvd.distributed import distribute
from ringtrain.hvd.keras_patches import set_untracked
from ringtrain.run import devices
from ringtrain.strategies import samples
from ringtrain.strategies.base import StepsOf, Strategy
from ringtrain.strategies.parameter_server import cluster

if TYPE_CHECKING:
    from ringtrain.run.context import RunContext


class SumReduction:
    """Sums gradients over copies before clipping, like hvd's Reduction; Keras divides the loss, so it is the mean."""

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

    def trial(self, probe: Callable[[int], Callable[[Any], Any]]) -> NDArray[Any]:
        """Reduction test: each copy reduces its one-hot vector; returns one result per local copy."""
        number = self.strategy.num_replicas_in_sync
        with self.strategy.scope():
            send = probe(number)

        def on_each_copy() -> Any:
            own = tf.one_hot(tf.distribute.get_replica_context().replica_id_in_sync_group, number)
            return send(scale_loss_for_distribution(own))

        results = tf.function(lambda: self.strategy.run(on_each_copy), autograph=False)()
        return np.stack([one.numpy() for one in self.strategy.experimental_local_results(results)])

    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks."""
        return {"op": "averaged", "by": type(self.strategy).__name__}


def create_variables(model: keras.Model, strategy: Strategy, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Creates the variables that Keras would create in the first step, each in the right scope."""
    if not model.optimizer.built:
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
    # Metrics are local to this process. Created in a step, they would be the strategy's and summed when read.
    model.compute_metrics(
        tf.zeros([1, *input_shape]), tf.zeros([1], tf.int64), tf.zeros([1, num_classes]), sample_weight=None
    )
    model.reset_metrics()
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

    def make_ready(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        create_variables(model, self, input_shape, num_classes)

    @contextlib.contextmanager
    def training(self, run: RunContext) -> Iterator[StepsOf]:
        local = self.strategy.experimental_local_results

        @tf.function(autograph=False)
        def step(data: Any) -> Any:
            logs = self.strategy.run(run.model.train_step, args=(data,))
            return {name: local(value)[-1] for name, value in logs.items()}  # those of the last copy cover all copies

        yield samples.Steps(lambda batches: step(next(batches)), samples.shards(run), self.iterator)

    def iterator(self, batches: tf.data.Dataset) -> Iterator[Any]:
        """Iterator over batches, for `step`."""
        return iter(batches)


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

    def iterator(self, batches: tf.data.Dataset) -> Iterator[Any]:
        """One batch per copy. Repeats forever: with an end, each step would first check every copy for it."""
        return iter(self.strategy.distribute_datasets_from_function(lambda context: batches.repeat()))


class MultiWorker(Mirrored):
    """One process per rank, with TensorFlow's own collectives over gRPC or NCCL."""

    over_grpc = True

    def begin(self) -> devices.Pinning:
        pinning = super().begin()
        named = self.config.strategy.communication
        if named == "nccl" and pinning.gpu is None:
            raise DeviceError("strategy.communication: got nccl, this run has no GPU: expected ring or auto")
        task = {"type": "worker", "index": hvd.rank()}
        places = cluster.addresses(hvd.rank(), hvd.allgather_object)
        self.about["workers"] = [place for (place,) in places]
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": self.about["workers"]}, "task": task})
        over = tf.distribute.experimental.CommunicationImplementation[named.upper()]
        options = tf.distribute.experimental.CommunicationOptions(implementation=over)
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        return pinning
