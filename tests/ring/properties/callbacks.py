"""Horovod's callbacks, right under Keras 3."""

from __future__ import annotations

import keras
import numpy as np
import small

import ringtrain.hvd as hvd


class Record(keras.callbacks.Callback):
    """What the optimizer is at the beginning of each batch."""

    def __init__(self):
        super().__init__()
        self.rates = []
        self.first_checksum = None

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))
        if self.first_checksum is None:
            self.first_checksum = hvd.check_in_sync(self.model)


def broadcast_comes_before_the_first_step():
    model = small.build(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (hvd.rank() + 1))), "mse")
    record = Record()
    _fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), record], steps=2)
    assert record.first_checksum, "check_in_sync held at the beginning of the first batch"
    assert np.isclose(record.rates[0], 0.01), "the optimizer's state is broadcast as well"
    assert small.spread(model) == 0


def a_rank_with_fewer_batches_joins():
    """It takes part in the others' reductions until their ends."""
    model = small.train(small.build(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), [])
    hvd.broadcast_model(model)
    _fit(model, [], steps=2 + hvd.rank())
    hvd.join()


def a_model_without_weights_is_broadcast_after_its_first_batch():
    """On all ranks, also where some have weights already."""
    for built_on in (lambda rank: False, lambda rank: rank == 0):
        keras.utils.set_random_seed(hvd.rank())
        inputs = [keras.Input((6,), dtype="float64")] if built_on(hvd.rank()) else []
        model = keras.Sequential([*inputs, keras.layers.Dense(3, dtype="float64")])
        assert model.built == built_on(hvd.rank())
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (hvd.rank() + 1))), "mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.CheckInSyncCallback()]
        _fit(model, callbacks, steps=2)
        assert small.spread(model) == 0
        assert np.isclose(float(model.optimizer.learning_rate), 0.01)


def metrics_are_weighed_by_samples():
    """Rank r sees r + 1 batches: its metric counts r + 1 times. The mean of means would be another number."""
    model = small.build()
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    for validation in (False, True):
        batches = small.shares(2 * (hvd.rank() + 1))
        x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
        val = small.shares(hvd.size() - hvd.rank())
        val_x, val_y = (np.concatenate(part) for part in zip(*val, strict=True))
        options = {"validation_data": (val_x, val_y)} if validation else {}
        history = model.fit(
            x, y, batch_size=small.BATCH, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()], **options
        ).history
        for prefix, own in (("", (x, y)), ("val_", (val_x, val_y)))[: 1 + validation]:
            everybody = hvd.allgather_object(own)
            all_x, all_y = (np.concatenate(part) for part in zip(*everybody, strict=True))
            loss, mae = model.evaluate(all_x, all_y, verbose=0)
            assert np.isclose(history[f"{prefix}loss"][0], loss, rtol=1e-5)
            assert np.isclose(history[f"{prefix}mae"][0], mae, rtol=1e-5)
            unweighted = np.mean(hvd.allgather_object(model.evaluate(*own, verbose=0)[0]))
            assert not np.isclose(unweighted, loss, rtol=1e-5), "the shares are too much alike to tell"


def warm_up_follows_its_formula_also_on_resume():
    rates = []
    for epochs in ((0, 4), (0, 2), (2, 4)):
        model = small.build()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.3, momentum=0.9)), "mse")
        record = Record()
        warm_up = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.3, warmup_epochs=3, verbose=1)
        history = _fit(model, [warm_up, record], steps=5, epochs=epochs)
        rates.append(record.rates)
        assert np.isclose(history["lr"][-1], record.rates[-1])
    size = hvd.size()
    expected = [0.3 / size * (min((step + 1) / 5, 3) * (size - 1) / 3 + 1) for step in range(20)]
    assert np.allclose(rates[0], expected, rtol=1e-6), (rates[0], expected)
    assert np.allclose(rates[1] + rates[2][:5], expected[:15], rtol=1e-6)


def schedules_follow_epochs_and_batches():
    by_batch = {"multiplier": lambda epoch: 1 + epoch, "staircase": False, "steps_per_epoch": 2}
    cases = [
        ({"multiplier": lambda epoch: 0.1 ** (epoch // 2)}, [1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]),
        ({"multiplier": 0.5, "start_epoch": 1, "end_epoch": 3}, [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]),
        (by_batch, [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5]),
    ]
    for options, expected in cases:
        model = small.build()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)), "mse")
        record = Record()
        schedule = hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.2, **options)
        _fit(model, [schedule, record], steps=2, epochs=(0, 4))
        assert np.allclose(record.rates, 0.2 * np.array(expected), rtol=1e-6), (record.rates, expected)
    scheduled = small.build()
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    scheduled.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(decay)), "mse")
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    assert "LearningRateSchedule of its own" in small.raised(ValueError, lambda: _fit(scheduled, [callback], steps=2))


def momentum_is_corrected_when_the_rate_changes():
    """Goyal et al. 2017, equation 10: v <- m (new / old) v - new g, against a loop in NumPy."""
    rates = [0.1, 0.2, 0.05, 0.05]
    for correction in (True, False):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.layers[0].kernel.assign([[1.0]])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), "mse")
        schedule = hvd.callbacks.LearningRateScheduleCallback(
            1.0,
            lambda epoch: rates[round(epoch * 4)],
            staircase=False,
            steps_per_epoch=4,
            momentum_correction=correction,
        )
        model.fit(np.ones((4, 1)), np.zeros((4, 1)), batch_size=1, shuffle=False, verbose=0, callbacks=[schedule])
        weight, velocity, old = 1.0, 0.0, 0.1
        for rate in rates:
            velocity = 0.5 * (rate / old if correction else 1.0) * velocity - rate * 2 * weight
            weight, old = weight + velocity, rate
        assert np.isclose(float(model.get_weights()[0].item()), weight, rtol=1e-5), correction


def best_model_is_written_by_rank_0_alone():
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        model = small.build()
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        best.filepath = str(Path(folder) / "best.keras")
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        _fit(model, [best], steps=2)
        assert Path(best.filepath).exists() == (hvd.rank() == 0)


def best_model_checkpoint_takes_both_orders():
    """`horovod.keras` has no save_weights_only: its third argument is the mode."""
    names = ("mode", "save_weights_only", "save_freq")
    for arguments, expected in (
        (("loss", 0, True, "min", 5), ("min", True, 5)),
        (("loss", 0, "max"), ("max", False, "epoch")),
        (("loss", 0, "max", 5), ("max", False, 5)),
    ):
        best = hvd.callbacks.BestModelCheckpoint(*arguments)
        assert tuple(getattr(best, name) for name in names) == expected, arguments


def _fit(model, callbacks, steps, epochs=(0, 1)):
    x, y = (np.concatenate(part) for part in zip(*small.shares(steps), strict=True))
    return model.fit(
        x,
        y,
        batch_size=small.BATCH,
        shuffle=False,
        verbose=0,
        initial_epoch=epochs[0],
        epochs=epochs[1],
        callbacks=callbacks,
    ).history
