"""A model with a distributed optimizer is saved as one with the plain optimizer, and wrapped again by load_model."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import horovod.tensorflow.keras
import keras
import numpy as np
import small

import ringtrain.hvd as hvd


@keras.saving.register_keras_serializable(package="tests")
class Registered(keras.optimizers.SGD):
    """A user's own optimizer."""


@keras.saving.register_keras_serializable(package="tests")
class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A user's own schedule."""

    def __init__(self, start):
        self.start = start

    def __call__(self, step):
        return self.start / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {"start": self.start}


class Unregistered(Halving):
    """A schedule that Keras cannot load; wrapping must not need to."""


def saves_and_loads_as_the_plain_optimizer():
    makers = [
        lambda: keras.optimizers.Adam(0.01),
        lambda: Registered(0.1, momentum=0.9),
        lambda: keras.optimizers.SGD(Halving(0.1)),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    ]
    for make in makers:
        with TemporaryDirectory() as folder:
            model = small.train(small.build(), hvd.DistributedOptimizer(make()), small.shares(3))
            path = Path(folder) / "model.keras"
            model.save(path)
            config = json.loads(zipfile.ZipFile(path).read("config.json"))["compile_config"]["optimizer"]
            assert "ringtrain" not in json.dumps(config) and "Distributed" not in json.dumps(config), config
            loaded = keras.models.load_model(path)
            assert type(loaded.optimizer) is type(make())
            _same_variables(loaded, model)


def load_model_wraps_again():
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model = small.train(small.build(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), small.shares(3))
        model.save(path)
        loaded = hvd.load_model(path)
        assert hvd.check_averaging(loaded.optimizer) == "averaged"
        _same_variables(loaded, model)
        for x, y in small.shares(2):
            loaded.train_on_batch(x, y)
            model.train_on_batch(x, y)
        assert small.distance(loaded, model) == 0
        assert small.spread(loaded) == 0


def one_rank_may_load_what_the_others_build():
    """The resume of Horovod's ImageNet scripts: rank 0 loads, the callback broadcasts."""
    for options in ({}, {"backward_passes_per_step": 2}):
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            model = small.build()
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **options), "mse")
            if hvd.rank() == 0:
                model.save(path)
                model = hvd.load_model(path, **options)
            hvd.broadcast_model(model)
            for x, y in small.shares(4):
                model.train_on_batch(x, y)
            hvd.check_in_sync(model)


def horovods_own_wrapper_is_recognized():
    theirs = horovod.tensorflow.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = small.build()
    model.compile(theirs, "mse")
    for use in (
        lambda: hvd.broadcast_model(model),
        lambda: hvd.check_in_sync(model),
        lambda: hvd.DistributedOptimizer(theirs),
    ):
        assert "import ringtrain.hvd" in small.raised(ValueError, use)


def wrapping_keeps_state_and_schedule():
    optimizer = keras.optimizers.SGD(Unregistered(0.1), momentum=0.9)
    model = small.train(small.build(), optimizer, small.global_batches(2))
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert wrapped is optimizer and isinstance(wrapped, keras.optimizers.SGD)
    assert int(wrapped.iterations) == 2
    copy = type(wrapped).from_config({**wrapped.get_config(), "learning_rate": 0.1})
    assert hvd.check_averaging(copy) == "averaged", "a copy made from the configuration must not forget the ring"
    hvd.check_in_sync(model)


def _same_variables(loaded, model):
    for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        assert np.array_equal(ours.numpy(), theirs.numpy()), ours.path
    assert small.distance(loaded, model) == 0
