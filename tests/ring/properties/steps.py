"""A step leaves the same state on all ranks, or changes nothing: what an elastic run continues from."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import ringtrain.hvd as hvd
from ringtrain.data import Header
from ringtrain.training.summed_step import SummedStep
from ringtrain.training.sums import SumsOverRanks, seed_of

ROWS, WIDTH = 6, 5


class Failing(SumsOverRanks):
    """Loses a rank, as far as a step can see, when all sums but the last are there."""

    def __init__(self) -> None:
        self.fails = tf.Variable(False, trainable=False)

    def totals(self, step, parts):
        total = super().totals(step, parts)
        with tf.control_dependencies([tf.debugging.Assert(~self.fails, ["lost"])]):
            return tf.nest.map_structure(lambda value: None if value is None else tf.identity(value), total)


def _batch(rank: int) -> tuple[Header, tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(rank)
    header = Header(np.ones(1), np.array([ROWS]), np.array(0.0))
    return header, (draw.normal(rank, 1.0, (ROWS, WIDTH)).astype("float32"), draw.integers(0, 3, ROWS))


def _made() -> tuple[keras.Model, SummedStep, Failing]:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.4)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss, metrics=["accuracy"])
    sums = Failing()
    _, batch = _batch(0)
    model._symbolic_build(data_batch=tuple(map(tf.convert_to_tensor, batch)))
    step = SummedStep(model, sums)
    step.divide(has_header=True, has_empty_parts=False)
    return model, step.__enter__(), sums


def _state(model: keras.Model) -> list[np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [keras.ops.convert_to_numpy(variable).copy() for variable in variables]


def _train(model: keras.Model, num_steps: int) -> None:
    model.make_train_function()
    for _ in range(num_steps):
        model.train_function(iter([_batch(hvd.rank())]))  # train_on_batch would reset the metrics first


def a_failed_step_changes_nothing():
    """Weights, slots, moving statistics, seeds and metrics; and the next one is as if it had not been."""
    model, step, sums = _made()
    _train(model, 2)
    before = _state(model)
    sums.fails.assign(True)
    try:
        _train(model, 1)
    except tf.errors.InvalidArgumentError:
        pass
    else:
        raise AssertionError("the step has not failed")
    assert step.undo() and not step.undo()
    assert all((one == other).all() for one, other in zip(before, _state(model), strict=True))
    sums.fails.assign(False)
    _train(model, 1)
    twin, *_ = _made()
    _train(twin, 3)
    assert all((one == other).all() for one, other in zip(_state(model), _state(twin), strict=True))


def all_ranks_hold_the_statistics_and_metrics_of_all_rows():
    model, step, _ = _made()
    _train(model, 1)
    inputs = [_batch(rank)[1][0] for rank in range(hvd.size())]
    mean = np.mean([rows.mean(axis=0) for rows in inputs], axis=0)
    assert np.allclose(model.layers[0].moving_mean, 0.01 * mean, atol=1e-6)
    assert hvd.check_in_sync(model)
    ranks = hvd.allgather_object(_state(model), name="states")
    for other in ranks[1:]:
        assert all((one == its).all() for one, its in zip(ranks[0], other, strict=True))
    counts = [keras.ops.convert_to_numpy(one) for one in model.metrics_variables]
    assert hvd.size() * ROWS in [float(one) for one in counts]
    masks = hvd.allgather_object(_mask(step), name="masks")
    assert len({mask.tobytes() for mask in masks}) == hvd.size(), "ranks drop the same units"


def _mask(step: SummedStep) -> np.ndarray:
    """Numbers that this rank would draw in its next step."""
    (number,) = SumsOverRanks().numbers(step)
    return keras.random.normal((4,), seed=int(step.seeds[0].value[0] + seed_of(number))).numpy()
