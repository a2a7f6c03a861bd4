"""Precision, XLA, and additions in one order.

Under mixed_float16 one rank's overflow is everybody's, however LossScaleOptimizer and DistributedOptimizer are nested.
"""

from __future__ import annotations

import keras
import numpy as np
import small
import tensorflow as tf
from only import quick

import ringtrain.hvd as hvd
from ringtrain.config.sections import HvdConfig
from ringtrain.errors import ConfigError
from ringtrain.hvd.keras_patches import teach_keras

OVERFLOWING_STEP = 3
NUM_STEPS = 6


def distributed_around_loss_scale():
    _overflow_is_everybodys(lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(_sgd())))


def with_accumulation_and_fp16_compression():
    def make():
        sgd = hvd.DistributedOptimizer(
            _sgd(), backward_passes_per_step=2, average_aggregated_gradients=True, compression=hvd.Compression.fp16
        )
        return keras.optimizers.LossScaleOptimizer(sgd)

    _overflow_is_everybodys(make, updates=(NUM_STEPS - 1) // 2)


@quick
def only_one_rank_overflows():
    """The negative control of this file: decided rank by rank, as Keras does it, the ranks would part."""
    teach_keras()
    decided_alone = keras.optimizers.LossScaleOptimizer.check_finite.__wrapped__
    gradients = [tf.constant([np.inf if hvd.rank() == 1 else 1.0])]
    decisions = hvd.allgather_object(bool(decided_alone(keras.optimizers.LossScaleOptimizer(_sgd()), gradients)))
    assert decisions == [rank != 1 for rank in range(hvd.size())]


def sixteen_bits_do_not_overflow_in_the_sum():
    """The mean of the ranks' gradients is in the range of float16, their sum is not."""
    alone = hvd.allreduce(tf.constant([4e4]), compression=hvd.Compression.fp16, op=hvd.Sum).numpy()
    assert np.isinf(alone), "Horovod's own sum: if it does not overflow, this shows nothing"
    for dtype, compression in (("float32", hvd.Compression.fp16), ("float16", hvd.Compression.none)):
        for options in ({}, {"deterministic": True}, {"groups": 1}, {"gradient_predivide_factor": hvd.size() * 1.5}):
            sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3), compression=compression, **options)
            variables = [keras.Variable([0.0], dtype=dtype) for _ in range(2)]
            sgd.apply([tf.constant([4e4], dtype)] * 2, variables)
            assert np.allclose([variable.numpy() for variable in variables], -40.0, rtol=2e-3), (dtype, options)
    total = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3), compression=hvd.Compression.fp16, op=hvd.Sum)
    variable = keras.Variable([0.0])
    total.apply([tf.constant([4e4])], [variable])
    assert np.allclose(variable.numpy(), -40.0 * hvd.size(), rtol=2e-3)


def an_overflow_of_the_compressed_sum_halves_the_loss_scale():
    """The scaled gradients are reduced, then asked whether they are finite; what float16 cannot hold is not applied."""
    for nested in (
        lambda sgd, wrap: wrap(keras.optimizers.LossScaleOptimizer(sgd)),
        lambda sgd, wrap: keras.optimizers.LossScaleOptimizer(wrap(sgd)),
    ):
        optimizer = nested(_sgd(), lambda one: hvd.DistributedOptimizer(one, compression=hvd.Compression.fp16))
        variable = keras.Variable([1.0])
        for gradient in (1e6 * hvd.size() * (hvd.rank() == 1), 32.0):  # the first is finite, on every rank
            optimizer.apply_gradients([(tf.constant([gradient]), variable)])
        assert float(optimizer.dynamic_scale) == 2.0**14
        assert int(optimizer.iterations) == 1
        assert np.allclose(variable.numpy(), 1 - 0.01 * 32 / 2.0**14, rtol=1e-6)


@quick
def deterministic_equals_big_batch():
    """All gradients of a dtype travel as one vector: a step has one reduction, and not one for each of 4 variables."""
    for deterministic, num_reductions in ((False, 4), (True, 1)):
        optimizer = hvd.DistributedOptimizer(_sgd(), deterministic=deterministic)
        with small.horovods_operations() as found:
            model = small.train(small.build(), optimizer, small.shares(5), run_eagerly=True)
        assert len(found) == num_reductions, found
    assert small.distance(model, small.alone(small.build(), _sgd(), small.global_batches(5))) < 1e-6


def deterministic_knows_several_dtypes_and_compression():
    variables = [keras.Variable(np.zeros((2, 3)), dtype=dtype) for dtype in ("float32", "float64", "float32")]
    gradients = [tf.cast(tf.fill((2, 3), index + hvd.rank()), v.dtype) for index, v in enumerate(variables)]
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), deterministic=True, compression=compression)
        for variable in variables:
            variable.assign(np.zeros((2, 3)))
        sgd.apply(gradients, variables)
        for index, variable in enumerate(variables):
            assert np.allclose(variable.numpy(), -(index + (hvd.size() - 1) / 2))


def deterministic_mode_turns_fusion_off():
    environ = {"HOROVOD_CYCLE_TIME": "7"}
    configure = lambda **options: hvd.configure(HvdConfig(**options), environ)  # noqa: E731
    configure()
    assert environ == {"HOROVOD_CYCLE_TIME": "7"}
    configure(deterministic=True)
    assert environ["HOROVOD_FUSION_THRESHOLD"] == "0"
    environ["HOROVOD_AUTOTUNE"] = "1"
    assert "unset it" in small.raised(ConfigError, lambda: configure(deterministic=True))


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
