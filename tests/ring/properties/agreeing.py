"""Ranks are made equal, proved equal, and told apart."""

from __future__ import annotations

import socket

import keras
import numpy as np
import small
import tensorflow as tf
from only import quick

import ringtrain.hvd as hvd
from ringtrain.errors import DataError, OutOfSync, RingtrainError


@quick
def equal_ranks_have_one_checksum():
    model = _trained()
    checksums = hvd.allgather_object(hvd.check_in_sync(model))
    assert len(set(checksums)) == 1 and len(checksums[0]) == 16
    for x, y in small.shares(1):
        model.train_on_batch(x, y)
    assert hvd.check_in_sync(model) != checksums[0], "other weights, the same checksum"


def ranks_in_different_calls_are_told():
    names = ["ours", *["theirs"] * (hvd.size() - 1)]
    message = small.raised(OutOfSync, lambda: hvd.allgather_object(0, name=names[hvd.rank()]))
    assert message.startswith("the ranks are out of step: rank 1 is at theirs, the first one at ours: "), message
    mixed = hvd.allgather_object(None if hvd.rank() else 1)
    assert mixed == [1, *[None] * (hvd.size() - 1)], "objects of different types, without a name"


@quick
def a_disturbed_weight_is_named():
    model = _trained()
    if hvd.rank() == 1:
        bias = model.layers[-1].bias
        bias.assign(bias + np.array([0, 1e-9, 0]))
    message = small.raised(OutOfSync, lambda: hvd.check_in_sync(model))
    assert f"rank 1 differs in 1 of {len(model.weights) + len(model.optimizer.variables)} variables" in message
    assert "dense" in message and "bias" in message
    expected = "rank 0" if hvd.size() == 2 else "ranks 0, 2"
    assert message.endswith(expected)


class Disturb(keras.callbacks.Callback):
    """Changes one rank's weights a little in the middle of training."""

    def __init__(self):
        super().__init__()
        self.last_batch = -1

    def on_train_batch_begin(self, batch, logs=None):
        self.last_batch = batch
        if batch == 4 and hvd.rank() == 1:
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel * 1.001)


def a_weight_disturbed_in_the_middle_of_fit_is_caught():
    disturb = Disturb()
    message = small.raised(OutOfSync, lambda: _fit_checked([disturb]))
    assert "rank 1" in message
    assert disturb.last_batch == 6, "steps 1, 4, 7, ... are checked: step 5 is disturbed, step 7 finds it"


def broadcast_model_makes_everything_equal_but_seeds():
    model = small.build(seed=hvd.rank(), layers=(keras.layers.Dropout(0.5, seed=hvd.rank() + 1),))
    small.train(model, keras.optimizers.Adam(0.01 * (hvd.rank() + 1)), small.shares(hvd.rank() + 1))
    small.raised(OutOfSync, lambda: hvd.check_in_sync(model))
    seed = model.layers[1].seed_generator.state
    seed_before = seed.numpy()
    expected = hvd.broadcast_object([v.numpy() for v in [*model.weights, *model.optimizer.variables]])
    hvd.broadcast_model(model)
    hvd.check_in_sync(model)
    for value, variable in zip(expected, [*model.weights, *model.optimizer.variables], strict=True):
        assert np.array_equal(value, variable.numpy())
    assert np.array_equal(seed.numpy(), seed_before)
    assert len({str(other) for other in hvd.allgather_object(seed_before)}) == hvd.size()


def broadcast_variables_takes_all_kinds():
    root = hvd.size() - 1
    kinds = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "uint32", "int64", "bool")
    ours = [
        keras.Variable(np.full((2, 3), hvd.rank()).astype("bool" if k == "bool" else "int8"), dtype=k) for k in kinds
    ]
    ours += [tf.Variable(float(hvd.rank())), tf.Variable(tf.fill((2,), hvd.rank()))]
    hvd.broadcast_variables(ours, root_rank=root)
    assert all(np.all(np.asarray(v).astype("float64") == (1 if "bool" in str(v.dtype) else root)) for v in ours)
    floats = [keras.Variable([float(hvd.rank())]), keras.Variable([[2.0 * hvd.rank()]])]
    hvd.broadcast_variables(floats, root_rank=root, inplace=True)
    assert [float(np.asarray(v).item()) for v in floats] == [root, 2 * root]


def averaging_is_proved_on_the_optimizers_own_reduction():
    sgd = keras.optimizers.SGD
    assert hvd.check_averaging(hvd.DistributedOptimizer(sgd())) == "averaged"
    assert hvd.check_averaging(hvd.DistributedOptimizer(sgd(), op=hvd.Sum)) == "summed"
    assert hvd.check_averaging(keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd()))) == "averaged"
    assert hvd.check_averaging(hvd.DistributedOptimizer(sgd(), backward_passes_per_step=3)) == "averaged"
    assert "wrap it" in small.raised(OutOfSync, lambda: hvd.check_averaging(sgd()))


class Bypassing(keras.optimizers.SGD):
    """Makes updates by itself."""

    def apply_gradients(self, grads_and_vars):
        for grad, variable in grads_and_vars:
            variable.assign_sub(0.1 * grad)


def an_optimizer_that_reduces_nothing_is_noticed():
    wrap = hvd.DistributedOptimizer
    model = small.build()
    model.compile(wrap(Bypassing(0.1)), "mse")
    assert "apply_gradients did not" in small.raised(OutOfSync, lambda: model.train_on_batch(*small.shares(1)[0]))
    deaf = wrap(keras.optimizers.SGD(0.1))
    type(deaf).reduce = lambda self, grads, variables: grads
    assert "expected" in small.raised(OutOfSync, lambda: hvd.check_averaging(deaf))


def the_check_leaves_the_optimizer_as_it_is():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    options = {"global_clipnorm": 0.01, "weight_decay": 0.1, "use_ema": True, "gradient_accumulation_steps": 2}
    adam = keras.optimizers.Adam()
    for make in (
        lambda: hvd.DistributedOptimizer(keras.optimizers.AdamW(schedule, **options)),
        lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.AdamW(**options))),
        lambda: hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(lambda _: adam)),
    ):
        model = small.build(dtype="float32")
        model.compile(make(), "mse")
        for x, y in small.shares(3):
            model.train_on_batch(x, y)
        before = [np.array(v) for v in (*model.weights, *model.optimizer.variables)]
        assert hvd.check_averaging(model.optimizer) == "averaged"
        after = [np.array(v) for v in (*model.weights, *model.optimizer.variables)]
        assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


@quick
def ranks_fail_together_or_not_at_all():
    assert hvd.run_together(lambda: hvd.rank()) == hvd.rank()

    def missing_on_last():
        if hvd.rank() == hvd.size() - 1:
            raise DataError("train-images.gz: not there")

    message = small.raised(DataError, lambda: hvd.run_together(missing_on_last))
    own = hvd.rank() == hvd.size() - 1
    prefix = "" if own else f"rank {hvd.size() - 1} on {socket.gethostname()}: "
    assert message == f"{prefix}train-images.gz: not there"

    def missing_before_a_collective():
        missing_on_last()
        hvd.allgather_object(0, name="within")

    if hvd.size() > 1:
        expected = DataError if own else OutOfSync
        message = small.raised(expected, lambda: hvd.run_together(missing_before_a_collective))
        assert "train-images.gz" in message or "within" in message

    def unreadable():
        with open("/proc/self/no-such-file"):
            pass

    assert "no-such-file" in small.raised(RingtrainError, lambda: hvd.run_together(unreadable))
    assert hvd.on_rank_0(lambda: f"of rank {hvd.rank()}") == "of rank 0"
    message = small.raised(RingtrainError, lambda: hvd.on_rank_0(unreadable))
    assert "no-such-file" in message and message.startswith("rank 0 on ") == (hvd.rank() > 0)


def _fit_checked(callbacks):
    model = small.build()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    check = hvd.callbacks.CheckInSyncCallback(every_steps=3)
    x, y = (np.concatenate(part) for part in zip(*small.shares(9), strict=True))
    model.fit(x, y, batch_size=small.BATCH, shuffle=False, verbose=0, callbacks=[*callbacks, check])
    return model, check


def _trained():
    model = small.build()
    return small.train(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), small.shares(2))
