"""A model with a distributed optimizer is saved as one with the plain optimizer, and wrapped again by load_model."""

from __future__ import annotations

import errno
import json
import shutil
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import SimpleNamespace

import horovod.tensorflow.keras
import keras
import numpy as np
import small

import ringtrain.hvd as hvd
from ringtrain import config, derived
from ringtrain.errors import CheckpointError, OutOfSync
from ringtrain.hvd import collectives
from ringtrain.monitor.journal import Journal
from ringtrain.protocol.status import StatusLine
from ringtrain.run import checkpoint, resume, saver
from ringtrain.run.context import Validation
from ringtrain.run.run_folder import RunLock


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
            if hvd.rank() == 0 and options:
                model = hvd.load_model(path)
            if options:
                message = small.raised(OutOfSync, lambda model=model: hvd.broadcast_model(model))
                assert "factor after accumulation is 2.0 on rank 1, 1.0 on the first rank" in message


def a_model_saved_with_jit_is_loaded_without():
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model = small.train(small.build(), keras.optimizers.SGD(0.1), small.shares(1), jit_compile=True)
        model.save(path)
        loaded = hvd.load_model(path)
        assert model.jit_compile and not loaded.jit_compile
        hvd.broadcast_model(loaded)
        x, y = small.shares(1)[0]
        loaded.train_on_batch(x, y)
        hvd.check_in_sync(loaded)


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


def bytes_are_gathered_on_rank_0_alone_and_scattered_in_pieces():
    size, rank = hvd.size(), hvd.rank()
    whole = collectives.PIECE_BYTES
    try:
        for piece_bytes in (whole, 10):
            collectives.PIECE_BYTES = piece_bytes
            for length in (0, 1, 23):
                own = np.arange(length, dtype=np.uint8) + np.uint8(100 * rank)
                rows = hvd.gather_bytes(own, name="gathered")
                assert (rows is None) == (rank > 0)
                if rows is not None:
                    assert rows.tolist() == [[n + 100 * r for n in range(length)] for r in range(size)]
                assert np.array_equal(hvd.scatter_bytes(rows, length, name="scattered"), own)
    finally:
        collectives.PIECE_BYTES = whole


def a_checkpoint_holds_once_what_is_equal_on_all_ranks():
    """Frozen weights are saved once; seeds, moving statistics and, between updates, accumulated gradients by rank."""
    folder = Path(hvd.broadcast_object(mkdtemp()))
    model = _with_local_state()
    saver, settings, numbers = _saver(model, folder)
    batches, expected = small.shares(2), []
    for x, y in batches:
        model.train_on_batch(x, y)
        saver.clock.on_train_batch_end(0)
        saver.save()
        saver.wait()
        expected.append(_values(model))
    hvd.allgather_object(None, name="saved")
    paths = checkpoint.saved_in(folder)[::-1]
    frozen = model.layers[0]
    num_moving, num_trained = 2 * 64, 64 * 3 + 3
    num_seeds = 2 + 2 * len(hvd.global_seed())
    num_accumulated = (2 * 64 + num_trained, 0)
    for path, values, accumulated in zip(paths, expected, num_accumulated, strict=True):
        own = checkpoint.verify(path).arrays("ranks")
        counts = [array.size for name, array in own.items() if "metrics" not in name]
        assert frozen.kernel.numpy().size not in counts, counts
        assert sum(counts) == hvd.size() * (num_seeds + num_moving + accumulated), counts
        other = _with_local_state(seed=8)
        resume.restore(other, path, True, settings, numbers)
        for before, after in zip(values, _values(other), strict=True):
            assert np.array_equal(before, after)
    assert len({str(values[-1]) for values in hvd.allgather_object(expected[0], name="differing")}) == hvd.size()
    if hvd.rank() == 0:
        whole = checkpoint.verify(paths[1])
        files = {name: whole.arrays(name) for name in ("state", "ranks")}
        path = checkpoint.save(folder, 4, files, {**whole.manifest, "format": 1, "global_step": 4})
    other = _with_local_state(seed=8)
    resume.restore(other, folder, True, settings, numbers)
    (seed,) = (variable.numpy() for variable in hvd.seeds(model))
    (restored,) = (variable.numpy() for variable in hvd.seeds(other))
    assert np.array_equal(seed, restored), "a checkpoint of format 1 has seeds at the same places"
    hvd.allgather_object(None, name="compared")
    if hvd.rank() == 0:
        shutil.rmtree(folder)


def a_last_save_that_failed_is_tried_again():
    folder = Path(hvd.broadcast_object(mkdtemp()))
    model = _with_local_state()
    for failures in (1, 2):
        saver, *_ = _saver(model, folder)
        saver.clock.on_train_batch_end(0)
        left = ["state"] * failures

        def full(step, left=left):
            if left:
                left.pop()
                raise OSError(errno.ENOSPC, "No space left on device")

        saver.while_saving = full
        if failures == 1:
            saver.finish()
            if hvd.rank() == 0:
                assert checkpoint.newest(folder)[0].global_step == 1 and len(saver.saves["failed"]) == 1
                shutil.rmtree(folder / "step-00000001")
        else:
            message = small.raised(CheckpointError, saver.finish)
            assert "step-00000001: cannot be written: No space left on device; earlier checkpoints are kept" in message
    if hvd.rank() == 0:
        shutil.rmtree(folder)


def _with_local_state(seed=7):
    layers = keras.layers
    frozen = layers.Dense(64, trainable=False)
    keras.utils.set_random_seed(seed)
    dropout = layers.Dropout(0.5, seed=seed + hvd.rank())
    model = keras.Sequential([keras.Input((6,)), frozen, layers.BatchNormalization(), dropout, layers.Dense(3)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2), "mse")
    hvd.broadcast_model(model)
    return model


def _saver(model, folder):
    optimizer = config.OptimizerConfig(accumulation_steps=2)
    settings = config.Config(optimizer=optimizer, train=config.TrainConfig(batch_size=small.BATCH))
    numbers = derived.derive(settings, hvd.size(), 1000, 10)
    journal = Journal(folder, hvd.rank(), hvd.size())
    clock = resume.Clock(resume.Start(), numbers.steps_per_epoch, StatusLine(hvd.rank()), journal)
    clock.set_model(model)
    run = SimpleNamespace(
        model=model,
        checkpoints=folder,
        config=settings,
        numbers=numbers,
        start=resume.Start(),
        clock=clock,
        journal=journal,
        validation=Validation(),
        checksums={},
        lock=RunLock(),
        memory=None,
        strategy=SimpleNamespace(ranks_change=False),
        users_callbacks=[],
        callback_state=None,
        resumes_within_epochs=False,
    )
    return saver.Saver(run), settings, numbers


def _values(model):
    """Everything that a rank trains with; the last of it are accumulated gradients."""
    metrics = {id(variable) for variable in model.metrics_variables}
    own = [variable for variable in model.variables if id(variable) not in metrics]
    return [variable.numpy() for variable in (*own, *model.optimizer.variables)]


def _same_variables(loaded, model):
    for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        assert np.array_equal(ours.numpy(), theirs.numpy()), ours.path
    assert small.distance(loaded, model) == 0
