"""Ranks are where they were meant to be, each on a device of its own."""

from __future__ import annotations

import os
import socket

import keras
import numpy as np
import small
import tensorflow as tf

import ringtrain.hvd as hvd
from ringtrain import strategies
from ringtrain.config.sections import Config, DeviceConfig
from ringtrain.errors import PlacementError
from ringtrain.protocol.env import PLAN
from ringtrain.protocol.placement import PlannedPlacement
from ringtrain.training import devices


def ranks_in_their_places_pass():
    hvd.check_placement()
    hvd.check_placement(f"GPU-{hvd.rank()}")
    _with_plan(PlannedPlacement(hvd.size(), ((socket.gethostname(), hvd.size()),)))


def two_ranks_on_one_gpu_are_named_on_every_rank():
    message = small.raised(PlacementError, lambda: hvd.check_placement("GPU-0"))
    assert "GPU-0, which rank 0 has" in message
    assert "--device.share-gpus" in message


def small_collectives_are_on_the_cpu():
    """Where the second CPU device stands for a GPU, on which Horovod would hand them to NCCL."""
    with tf.device("CPU:1"):
        model = small.build(layers=(keras.layers.BatchNormalization(dtype="float64"),))
        small.train(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), small.shares(2))
        with small.horovods_operations() as placed:
            hvd.check_placement()
            hvd.broadcast_model(model)
            hvd.run_together(lambda: None)
            hvd.broadcast_object("any")
            hvd.average_moving_statistics(model)
            hvd.check_in_sync(model)
            hvd.allreduce([1.0])
            hvd.allgather(np.ones(2))
            hvd.broadcast(3, 0)
            hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {})
            model.optimizer.reduction.true_on_all_ranks(tf.constant(True))
            hvd.elastic.TensorFlowState([tf.Variable([1.0])]).check_host_updates()
    assert len(placed) > 10
    assert not [each for each in placed if not each[1].endswith("CPU:0")], placed


def shared_gpus_reduce_on_the_cpu():
    """NCCL refuses two ranks on one GPU. Others reduce where their gradients are."""
    for share_gpus in (True, False):
        config = Config(device=DeviceConfig(share_gpus=share_gpus))
        with tf.device("CPU:1"), small.horovods_operations() as placed:
            model = small.build(layers=(keras.layers.BatchNormalization(dtype="float64"),))
            hvd.synchronize_batch_norm(model, devices.device_of_sums(config.device))
            optimizer = strategies.make(config).distribute(keras.optimizers.SGD(0.1))
            small.train(model, optimizer, small.shares(1), run_eagerly=True)
        assert len(placed) >= 8
        assert {device.endswith("CPU:0") for _, device in placed} == {share_gpus}, placed


def ranks_that_are_elsewhere_are_named_on_every_rank():
    apart = PlannedPlacement(hvd.size(), tuple((f"host{rank}", 1) for rank in range(hvd.size())))
    message = small.raised(PlacementError, lambda: _with_plan(apart))
    rows = [line.split() for line in message.splitlines()[2:-1]]
    assert [row[0] for row in rows] == [str(rank) for rank in range(1, hvd.size())]
    assert message.endswith("the launcher did not get the hosts, or their names mean one machine")


def another_number_of_ranks_is_noticed():
    other = PlannedPlacement(hvd.size() + 1, ((socket.gethostname(), hvd.size() + 1),))
    message = small.raised(PlacementError, lambda: _with_plan(other))
    assert f"one of {hvd.size() + 1}" in message


def _with_plan(plan: PlannedPlacement) -> None:
    os.environ[PLAN] = plan.to_json()
    try:
        hvd.check_placement()
    finally:
        del os.environ[PLAN]
