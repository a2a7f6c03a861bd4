"""A step of virtual ranks that changes variables besides its update is refused, wherever its graph changes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

import ringtrain.hvd as hvd
from ringtrain.errors import ConfigError
from ringtrain.optim import own_step


@pytest.fixture(scope="module")
def model() -> keras.Model:
    hvd.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="first"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_weights)
    return model


def steps(model: keras.Model) -> dict[str, Callable[[], Any]]:
    """Ways in which a graph changes the kernel of the first layer, while it only reads that of the second."""
    kernel, other = model.weights[0], model.weights[2]
    change = tf.function(lambda: kernel.assign_add(tf.ones_like(kernel)))
    called = tf.function(lambda: tf.reduce_sum(other.value) + tf.reduce_sum(change()))
    drawn = tf.random.uniform
    return {
        "by itself": lambda: kernel.assign(kernel + 1.0),
        "in a function of a function": called,
        "in a branch": lambda: tf.cond(drawn([]) > 0, called, lambda: 0.0),
        "in a case": lambda: tf.switch_case(tf.cast(drawn([]), tf.int32), [called, lambda: 0.0, lambda: 1.0]),
        "in a condition": lambda: tf.while_loop(lambda number: called() < 3.0, lambda number: [number + 1], [0]),
        "in a loop": lambda: tf.map_fn(lambda number: called() + number, tf.ones([3])),
    }


def changed(model: keras.Model, step: Callable[[], Any], allowed: Sequence[Any] = ()) -> str:
    """What a refusal says; "": the step is not refused."""
    effects = own_step.Effects(model, allowed)

    @tf.function(autograph=False)
    def traced() -> None:
        begin = own_step.num_operations()
        step()
        effects.refuse(begin)

    try:
        traced.get_concrete_function()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_change_is_found_and_a_read_is_none(model: keras.Model) -> None:
    for where, step in steps(model).items():
        assert "first/kernel besides" in changed(model, step), where
        assert not changed(model, step, allowed=model.weights[:1]), where


def test_other_variables_and_slots_are_found(model: keras.Model) -> None:
    outside = tf.Variable(1.0)
    assert "a variable that no layer" in changed(model, lambda: outside.assign_add(1.0))
    slots, weights = model.optimizer.variables, model.trainable_weights
    update = lambda: model.optimizer.apply([tf.ones_like(weight) for weight in weights])  # noqa: E731
    assert "changes adam" in changed(model, update, allowed=weights)
    assert not changed(model, update, allowed=[*weights, *slots])
