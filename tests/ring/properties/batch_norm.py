"""Synchronized batch normalization is that of the big batch; averaged moving statistics are one model's."""

from __future__ import annotations

import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import keras
import numpy as np
import small
from only import quick

import ringtrain.hvd as hvd
from ringtrain.errors import OutOfSync

TIGHT = 1e-6


@keras.saving.register_keras_serializable(package="tests")
class Quiet(keras.layers.BatchNormalization):
    """A user's own layer that leaves the computing to Keras."""


class Subclassed(keras.Model):
    """A model that Keras cannot clone."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = keras.layers.Dense(4), keras.layers.BatchNormalization()

    def call(self, inputs, training=None):
        return self.norm(self.dense(inputs), training=training)


@quick
def training_equals_big_batch():
    model, reference = (small.build(layers=(_norm(), keras.layers.Activation("tanh"), _norm())) for _ in range(2))
    hvd.synchronize_batch_norm(model)
    small.train(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), small.shares(6))
    small.alone(reference, keras.optimizers.SGD(0.1, momentum=0.9), small.global_batches(6))
    distance = small.distance(model, reference)
    assert distance < TIGHT, f"{distance} apart"
    assert small.spread(model) == 0
    hvd.check_in_sync(model)


def only_training_talks_to_other_ranks():
    """Rank 0 evaluates by itself, and frozen layers are quiet in training too; else this would wait for ever."""
    model = small.build(layers=(_norm(),))
    hvd.synchronize_batch_norm(model)
    x = small.shares(1)[0][0]
    if hvd.rank() == 0:
        model(x)
        model.predict(x, verbose=0)
        model.layers[1].trainable = False
        model(x, training=True)


def saved_it_is_the_plain_layer():
    for norm in (hvd.SyncBatchNormalization(), keras.layers.BatchNormalization(), Quiet()):
        model = small.build(layers=(norm,), dtype="float32")
        hvd.synchronize_batch_norm(model)
        small.train(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), small.shares(2))
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            model.save(path)
            config = zipfile.ZipFile(path).read("config.json").decode()
            loaded = keras.models.load_model(path)
        assert "ringtrain" not in config and "Sync" not in config, config
        assert type(loaded.layers[1]) is (Quiet if isinstance(norm, Quiet) else keras.layers.BatchNormalization)
        x = small.shares(1)[0][0]
        assert np.array_equal(np.asarray(loaded(x)), np.asarray(model(x)))


def any_model_can_be_synchronized():
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6), keras.layers.BatchNormalization()])
    inputs = keras.Input((6,))
    outputs = keras.layers.BatchNormalization()(inner(inner(inputs)))
    nested = keras.Model(inputs, outputs)
    subclassed = Subclassed()
    subclassed.build((None, 6))
    unbuilt = keras.Sequential([keras.layers.Dense(3), Quiet()])
    x = small.shares(1)[0][0].astype(np.float32)
    for model, expected in ((nested, 2), (subclassed, 1), (unbuilt, 1), (small.build(), 0)):
        before = [np.array(weight) for weight in model.get_weights()]
        names = [layer.name for layer in model._flatten_layers()]
        assert hvd.synchronize_batch_norm(model) == hvd.synchronize_batch_norm(model) == expected
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(before, model.get_weights(), strict=True))
        assert [layer.name for layer in model._flatten_layers()] == names
        model(x, training=True)
        moving = [v.numpy() for layer in hvd.batch_norm.batch_norm_layers(model) for v in layer.non_trainable_variables]
        for ours in moving:
            assert np.ptp(hvd.allgather(ours[None]).numpy(), axis=0).max() == 0
    assert nested.layers[-1].supports_jit is False


def averaging_makes_moving_statistics_one_models():
    model = small.build(layers=(_norm(), keras.layers.BatchNormalization()))
    small.train(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), small.shares(3))
    assert small.spread(model) > 1e-3
    own = hvd.allgather_object([v.numpy() for v in model.non_trainable_variables])
    trainable = [v.numpy() for v in model.trainable_variables]
    hvd.average_moving_statistics(model)
    assert small.spread(model) == 0
    for variable, values in zip(model.non_trainable_variables, zip(*own, strict=True), strict=True):
        assert np.allclose(variable.numpy(), np.mean(values, axis=0), rtol=1e-6)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(trainable, model.trainable_variables, strict=True))
    hvd.average_moving_statistics(small.build())


def other_weights_that_follow_the_data_stay_each_ranks_own():
    frozen = keras.layers.Dense(8, trainable=False, kernel_initializer="ones")
    model = small.build(layers=(Following(name="following"), frozen))
    small.train(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), small.shares(3))
    layer = model.get_layer("following")
    layer.num_positive.assign(100 + hvd.rank())
    hvd.check_in_sync(model)
    following = [f"{model.name}/following/{name}" for name in ("mean", "latest", "num_positive")]
    assert [weight.path for weight in hvd.weights_of_one_rank(model)] == following

    means = hvd.allgather(layer.mean.value[None]).numpy()
    hvd.average_moving_statistics(model)
    assert np.allclose(layer.mean.numpy(), means.mean(axis=0), rtol=1e-6)
    assert int(layer.num_positive) == 100 + hvd.rank()

    frozen.kernel.assign_add(np.full((8, 8), float(hvd.rank())))
    assert "kernel" in small.raised(OutOfSync, lambda: hvd.check_in_sync(model))


class Following(keras.layers.Layer):
    """Keeps a moving average, the latest sample and a count of what it sees."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")
        self.latest = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="latest")
        self.num_positive = self.add_weight(
            shape=(), dtype="int64", initializer="zeros", trainable=False, name="num_positive"
        )

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs, axis=0))
            self.latest.assign(inputs[-1])
            self.num_positive.assign_add(keras.ops.sum(keras.ops.cast(inputs > 0, "int64")))
        return inputs


def _norm(**options):
    return keras.layers.BatchNormalization(dtype="float64", momentum=0.5, **options)
