"""mixed_float16: one rank's overflow is everybody's, however LossScaleOptimizer and DistributedOptimizer are nested."""

from __future__ import annotations

import keras
import numpy as np
import small
import tensorflow as tf

import ringtrain.hvd as hvd
from ringtrain.hvd.keras_hooks import teach_keras

OVERFLOWING_STEP = 3
NUM_STEPS = 6


def distributed_around_loss_scale():
    _overflow_is_everybodys(lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(_sgd())))


def loss_scale_around_distributed():
    _overflow_is_everybodys(lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(_sgd())))


def the_one_that_compile_adds():
    _overflow_is_everybodys(lambda: hvd.DistributedOptimizer(_sgd()))


def with_accumulation_and_fp16_compression():
    def make():
        sgd = hvd.DistributedOptimizer(
            _sgd(), backward_passes_per_step=2, average_aggregated_gradients=True, compression=hvd.Compression.fp16
        )
        return keras.optimizers.LossScaleOptimizer(sgd)

    _overflow_is_everybodys(make, updates=(NUM_STEPS - 1) // 2)


def only_one_rank_overflows():
    """The negative control of this file: decided rank by rank, as Keras does it, the ranks would part."""
    teach_keras()
    decided_alone = keras.optimizers.LossScaleOptimizer.check_finite.before_ringtrain
    gradients = [tf.constant([np.inf if hvd.rank() == 1 else 1.0])]
    decisions = hvd.allgather_object(bool(decided_alone(keras.optimizers.LossScaleOptimizer(_sgd()), gradients)))
    assert decisions == [rank != 1 for rank in range(hvd.size())]


def a_plain_loss_scale_optimizer_stays_keras_own():
    optimizer = keras.optimizers.LossScaleOptimizer(_sgd())
    assert bool(optimizer.check_finite([tf.constant([1.0])]))
    assert not bool(optimizer.check_finite([tf.constant([np.inf])]))


def loss_scale_equals_big_batch_without_overflow():
    def make(wrap):
        return keras.optimizers.LossScaleOptimizer(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), initial_scale=8.0)

    model = small.train(small.build(), make(hvd.DistributedOptimizer), small.shares(4))
    reference = small.train(small.build(), make(small.plain), small.global_batches(4))
    assert small.distance(model, reference) < 1e-6


def a_check_finite_of_ones_own_is_refused():
    class Own(keras.optimizers.LossScaleOptimizer):
        def check_finite(self, grads):
            return tf.constant(True)

    message = small.raised(ValueError, lambda: hvd.DistributedOptimizer(Own(_sgd())))
    assert "LossScaleOptimizer(hvd.DistributedOptimizer" in message


def _overflow_is_everybodys(make, updates=NUM_STEPS - 1):
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, dtype=policy), keras.layers.Dense(3, dtype=policy)]
    )
    # compile looks at the model's own policy
    model.dtype_policy = policy
    model.compile(make(), "mse")
    hvd.broadcast_model(model)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    for step, (x, y) in enumerate(small.shares(NUM_STEPS)):
        if step == OVERFLOWING_STEP and hvd.rank() == 1:
            x = np.full_like(x, 6e4)
        model.train_on_batch(x, y)
    scale = float(model.optimizer.dynamic_scale)
    assert scale == 2.0**14, f"the loss scale is {scale}, expected one halving of 2 ** 15"
    assert int(model.optimizer.iterations) == updates
    assert small.spread(model) == 0
    hvd.check_in_sync(model)


def _sgd():
    return keras.optimizers.SGD(0.01, momentum=0.9)
