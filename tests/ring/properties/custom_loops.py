"""Training loops without `compile` and `fit`, as scripts for Horovod and Keras' guides have them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import small
import tensorflow as tf

import ringtrain.hvd as hvd
from ringtrain.errors import OutOfSync

STEPS = 4


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.02)


def _reference(num_steps: int = STEPS) -> keras.Model:
    return small.alone(small.build(), _adam(), small.global_batches(num_steps))


def _loss(model: keras.Model, x: Any, y: Any) -> Any:
    return keras.ops.mean(keras.losses.mean_squared_error(y, model(x, training=True)))


def _step_with_optimizer(model: keras.Model, optimizer: Any, x: Any, y: Any) -> None:
    with tf.GradientTape() as tape:
        loss = _loss(model, x, y)
    optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)


def an_optimizer_of_a_model_that_is_not_compiled_is_broadcast_and_checked() -> None:
    model, optimizer = small.build(seed=hvd.rank()), hvd.DistributedOptimizer(_adam())
    hvd.broadcast_model(model, optimizer=optimizer)
    model.set_weights(small.build().get_weights())
    step = tf.function(_step_with_optimizer)
    for x, y in small.shares(STEPS):
        step(model, optimizer, tf.constant(x), tf.constant(y))
    assert small.distance(model, _reference()) < 1e-6
    checksum = hvd.check_in_sync(model, optimizer)
    assert checksum != hvd.check_in_sync(model)  # of the weights alone
    optimizer._momentums[0].assign(optimizer._momentums[0] + hvd.rank())
    hvd.check_in_sync(model)
    assert "first in" in small.raised(OutOfSync, lambda: hvd.check_in_sync(model, optimizer))
    hvd.broadcast_model(model, optimizer=optimizer)
    hvd.check_in_sync(model, optimizer)


def the_first_step_broadcasts_in_its_graph() -> None:
    model, optimizer = small.build(seed=hvd.rank()), hvd.DistributedOptimizer(_adam())
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any, is_first: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(model, x, y)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        if is_first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return hvd.allreduce(loss), hvd.allgather(loss[None]), hvd.broadcast(loss, root_rank=0)

    @tf.function
    def taped(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = _loss(model, x, y)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_weights)
        for gradient, variable in zip(gradients, model.trainable_weights, strict=True):
            variable.assign_sub(0.1 * gradient)

    for index, (x, y) in enumerate(small.shares(STEPS)):
        step(tf.constant(x), tf.constant(y), index == 0)
        taped(tf.constant(x), tf.constant(y))
    hvd.check_in_sync(model, optimizer)


def elastic_states_of_a_model_that_is_not_compiled() -> None:
    for kind in (hvd.elastic.KerasState, hvd.elastic.TensorFlowKerasState):
        model, optimizer = small.build(seed=hvd.rank()), hvd.DistributedOptimizer(_adam())
        state = kind(model, optimizer, batch=hvd.rank(), epoch=10 + hvd.rank())

        @hvd.elastic.run
        def train(state: Any, model: keras.Model = model, optimizer: Any = optimizer) -> int:
            for x, y in small.shares(STEPS)[state.batch :]:
                _step_with_optimizer(model, optimizer, tf.constant(x), tf.constant(y))
                state.batch += 1
                state.commit()
            return int(optimizer.iterations)

        assert train(state) == STEPS and (state.batch, state.epoch) == (STEPS, 10)
        hvd.check_in_sync(model, optimizer)
        kept = [np.array(one) for one in (*model.weights, *optimizer.variables)]
        _step_with_optimizer(model, optimizer, *map(tf.constant, small.shares(1)[0]))
        state.batch = 99
        state.restore()
        assert state.batch == STEPS
        for value, variable in zip(kept, (*model.weights, *optimizer.variables), strict=True):
            np.testing.assert_array_equal(value, np.array(variable))


def micro_steps_are_accumulated_also_sparse_and_local_ones() -> None:
    passes = 4
    for averages in (True, False):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            backward_passes_per_step=passes,
            average_aggregated_gradients=averages,
            sparse_as_dense=True,
        )
        shared, table, local = (tf.Variable(value, dtype=tf.float64) for value in ([0.0], [[1.0], [2.0]], [0.0]))
        optimizer.register_local_var(local)

        @tf.function
        def step(optimizer: Any = optimizer, shared: Any = shared, table: Any = table, local: Any = local) -> None:
            with tf.GradientTape() as tape:
                row = tf.reduce_sum(tf.gather(table, [0]))
                loss = tf.reduce_sum(-shared * (hvd.rank() + 1.0) + row - local * (hvd.rank() + 1.0))
            variables = [shared, table, local]
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        optimizer.build([shared, table, local])
        for _ in range(2 * passes + 1):
            step()
        times = 2.0 if averages else 2.0 * passes
        mean = (hvd.size() + 1) / 2
        np.testing.assert_allclose(shared.numpy(), [times * mean])
        np.testing.assert_allclose(table.numpy(), [[1.0 - times], [2.0]])
        np.testing.assert_allclose(local.numpy(), [times * (hvd.rank() + 1) / hvd.size()])
