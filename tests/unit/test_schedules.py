"""The learning rate of every step, against formulas written down a second time, and inside of Keras' optimizers."""

from __future__ import annotations

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from ringtrain.config.derived import derive
from ringtrain.config.sections import Config, OptimizerConfig, ScheduleConfig, TrainConfig
from ringtrain.optim.optimizers import LearningRate, last_learning_rate
from ringtrain.optim.schedules import DECAYS, Schedule, corners, schedule_of


def expected(s: Schedule, update: int) -> float:
    """The rate of an update, by the formulas of the docstring: for numbers of updates, one by one, without NumPy."""
    warmup, total = s.warmup_steps // s.accumulation_steps, s.num_steps // s.accumulation_steps
    if update < warmup:
        return s.initial_learning_rate + (s.learning_rate - s.initial_learning_rate) * update / warmup
    t = min(1.0, (update - warmup) / (total - warmup)) if total > warmup else min(1.0, float(update - warmup))
    if s.name == "constant":
        return s.learning_rate
    if s.name == "steps":
        return s.learning_rate * s.factor ** sum(update >= m // s.accumulation_steps for m in s.milestone_steps)
    floor = s.learning_rate * s.end_factor
    if s.name == "cosine":
        return floor + (s.learning_rate - floor) * (1 + math.cos(math.pi * t)) / 2
    return floor + (s.learning_rate - floor) * (1 - t) ** s.power


@st.composite
def schedules(draw):
    accumulated, total = draw(st.integers(1, 5)), draw(st.integers(1, 400))
    warmup = draw(st.integers(0, total))
    milestones = draw(st.lists(st.integers(warmup, 2 * total), max_size=3, unique=True).map(sorted))
    return Schedule(
        name=draw(st.sampled_from(sorted(DECAYS))),
        learning_rate=draw(st.floats(1e-5, 100)),
        initial_learning_rate=draw(st.floats(1e-6, 100)),
        warmup_steps=warmup * accumulated,
        num_steps=total * accumulated,
        accumulation_steps=accumulated,
        milestone_steps=tuple(milestone * accumulated for milestone in milestones),
        factor=draw(st.floats(0.01, 2)),
        end_factor=draw(st.floats(0, 1)),
        power=draw(st.floats(0.25, 4)),
    )


@given(schedules(), st.data())
def test_every_step_has_the_rate_of_the_formula(schedule, data):
    step = data.draw(st.integers(0, schedule.num_steps + 20))
    assert float(schedule.rate(step)) == pytest.approx(
        expected(schedule, step // schedule.accumulation_steps), rel=1e-12
    )


def test_steps_are_told_apart_beyond_the_numbers_that_float32_knows():
    steps = 2**25
    schedule = Schedule("polynomial", 1.0, 1.0, 0, steps, accumulation_steps=1)
    last = float(LearningRate(**dataclasses.asdict(schedule))(tf.constant(steps - 1, tf.int64)))
    assert last == pytest.approx(2.0**-25)


def test_keras_saves_and_loads_it():
    schedule = Schedule("steps", 0.4, 0.1, 6, 60, 3, (30, 45), 0.5)
    loaded = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(LearningRate(**vars(schedule))))
    assert loaded.schedule == schedule
    optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(keras.optimizers.Adam(loaded)))
    assert optimizer._learning_rate.schedule == schedule


def rates_used(schedule: Schedule) -> list[float]:
    """What gradients of 1 move a weight by at each step, under gradient descent, traced once as in fit."""
    k = schedule.accumulation_steps
    optimizer = keras.optimizers.SGD(
        LearningRate(**dataclasses.asdict(schedule)), gradient_accumulation_steps=k if k > 1 else None
    )
    weight, moves = keras.Variable(np.zeros((), np.float32)), []
    optimizer.build([weight])
    step = tf.function(lambda: optimizer.apply([tf.ones(())], [weight]))
    for _ in range(schedule.num_steps):
        before = float(weight)
        step()
        moves.append(before - float(weight))
        assert last_learning_rate(optimizer) == pytest.approx(float(schedule.rate(len(moves) - 1)), rel=1e-6)
    return moves


@pytest.mark.parametrize("name", sorted(DECAYS))
def test_an_optimizer_makes_each_update_at_its_own_rate(name):
    """Also one that accumulates gradients: Keras hands its schedules the number of batches, not of updates."""
    moves = rates_used(Schedule(name, 0.4, 0.1, 3, 10, 1, (5, 8)))
    schedule = Schedule(name, 0.4, 0.1, 9, 30, 3, (15, 24))
    accumulated = rates_used(schedule)
    assert moves == pytest.approx([expected(schedule, update) for update in range(10)], abs=1e-6)
    assert accumulated[2::3] == pytest.approx(moves, abs=1e-6)
    assert accumulated[0::3] == accumulated[1::3] == [0.0] * 10


def config_of(**schedule):
    return Config(schedule=ScheduleConfig(**schedule), train=TrainConfig(epochs=10, batch_size=8))


def test_epochs_become_steps():
    config = config_of(name="steps", warmup_epochs=1.25, milestones=(3.5, 6))
    schedule = schedule_of(config, derive(config, 2, 200, 20))  # 13 steps an epoch
    assert (schedule.warmup_steps, schedule.milestone_steps, schedule.num_steps) == (16, (46, 78), 130)
    config = dataclasses.replace(
        config_of(name="steps", warmup_epochs=1.1, milestones=(3.4, 6)), optimizer=OptimizerConfig(accumulation_steps=3)
    )
    numbers = derive(config, 2, 200, 20)  # 4 1/3 updates an epoch
    assert (numbers.global_batch_size, numbers.steps_per_epoch) == (48, 13)
    schedule = schedule_of(config, numbers)  # whole updates, the nearest ones
    assert (schedule.warmup_steps, schedule.milestone_steps, schedule.num_steps) == (15, (45, 78), 130)
    assert schedule.learning_rate == pytest.approx(0.001 * (48 / 32) ** 0.5)


def test_the_rate_follows_from_the_global_batch_alone():
    """So that a run may go on with other ranks, batches and accumulations that make the same global batch."""
    curves = []
    for ranks, batch_size, accumulated in ((1, 48, 1), (2, 24, 1), (3, 16, 1), (2, 12, 2), (1, 16, 3)):
        config = dataclasses.replace(
            config_of(name="cosine", warmup_epochs=1.5),
            train=TrainConfig(epochs=4, batch_size=batch_size),
            optimizer=OptimizerConfig(accumulation_steps=accumulated),
        )
        schedule = schedule_of(config, derive(config, ranks, 480, 20))
        curves.append(schedule.rate(np.arange(0, schedule.num_steps, accumulated)))
    assert all(np.array_equal(curve, curves[0]) for curve in curves)


def test_warm_up_begins_at_the_rate_before_scaling_or_at_a_share():
    for ranks, scaling, start, expected_start in (
        (4, "linear", 0.0, 0.001),
        (16, "sqrt", 0.0, 0.001),
        (4, "linear", 0.1, 0.0001),
        (1, "none", 0.0, 0.001),  # nothing to grow from
        (1, "linear", 0.0, 0.00025),  # scaled down: it never exceeds the full rate
    ):
        config = dataclasses.replace(
            config_of(warmup_epochs=2.0, warmup_start=start), optimizer=OptimizerConfig(learning_rate_scaling=scaling)
        )
        schedule = schedule_of(config, derive(config, ranks, 2000, 20))
        assert schedule.rate(0) == pytest.approx(expected_start)
        assert schedule.is_constant == (start == 0 and expected_start == schedule.learning_rate)


@given(schedules())
def test_corners_are_steps_of_the_run_in_order(schedule):
    steps = [step for step, _ in corners(schedule)]
    assert steps == sorted(steps) and steps[-1] == schedule.num_steps - 1
