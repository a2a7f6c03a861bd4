"""Jobs that end within an epoch and resume, with callbacks and averages that change a model; see run_fit.py."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from fit_alike import CLASSES, OUTPUT, SAME, SEQUENCES, KillAfter, Killed, X, Y, compiled, dense, distance, options
from only import only

import ringtrain
import ringtrain.hvd as hvd
from ringtrain import config_io, train
from ringtrain.config import CheckpointConfig, HealthConfig, TrainConfig, with_values
from ringtrain.errors import DataError

AT_ONCE = HealthConfig(agree_every_steps=1)


def _fit(name: str, make: Callable[[], keras.Model], *callbacks: Any, **more: Any) -> tuple[keras.Model, Any]:
    model, config = make(), options(health=AT_ONCE, **more)
    arguments = {"batch_size": 32, "epochs": 3, "validation_data": (X[:40], Y[:40]), "verbose": 0}
    return model, ringtrain.fit(model, X, Y, name=name, callbacks=callbacks, options=config, **arguments)


def _kept(name: str, make: Callable[[], keras.Model], *callbacks: Any, **config: Any) -> tuple[keras.Model, Any]:
    """By Keras' own `fit`, with all rows on each rank."""
    model = make()
    hvd.DistributedOptimizer(model.optimizer)
    run = hvd.callbacks.Run(name, batch_size=32, options=options(**config))
    held_out = (X[:40], -Y[:40])  # worse from the second epoch on
    model.fit(X[:96], Y[:96], epochs=4, verbose=0, validation_data=held_out, callbacks=[run, *callbacks], shuffle=False)
    return model, run


def _averaged() -> keras.Model:
    return compiled(dense(), optimizer=keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.9))


def _plain() -> keras.Model:
    return compiled(dense(), optimizer=keras.optimizers.SGD(0.2, momentum=0.9))


def _normalized() -> keras.Model:
    return compiled(dense(keras.layers.BatchNormalization()))


def _best() -> keras.callbacks.Callback:
    return keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)


class _FromBegin(keras.utils.PyDataset):
    """Its rows are in an order that each epoch draws when it begins."""

    num_batches = 4

    def __init__(self) -> None:
        super().__init__()
        self.draw, self.order = np.random.default_rng(5), np.arange(32)

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * 8 : index * 8 + 8]
        return X[rows], Y[rows]

    def on_epoch_begin(self) -> None:
        self.order = self.draw.permutation(100)[:32]


class _WarmUp(keras.callbacks.Callback):
    """Sets an attribute when training begins, and again to what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def on_train_begin(self, logs: Any = None) -> None:
        self.factor = 0.25

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.05 * self.factor

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.factor = min(1.0, self.factor + 0.25)


def _rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[:32], Y[:32]))


def _once() -> tf.data.Dataset:
    return _rows().shuffle(9, seed=1)


def _again() -> tf.data.Dataset:
    return _rows().shuffle(32, seed=2)


@only(np=2)
def orders_of_shuffles_follow_after_a_resume() -> None:
    """Of pipelines with several ones."""
    files = tf.data.Dataset.range(4)
    _orders_follow(
        two=lambda: _once().batch(4).unbatch().shuffle(16, seed=4).batch(8),
        joined=lambda: _rows().take(16).shuffle(16, seed=5).concatenate(_rows().skip(16).shuffle(16, seed=6)).batch(8),
        files=lambda: (
            files.shuffle(4, seed=3).interleave(lambda n: _rows().skip(8 * n).take(8)).shuffle(9, seed=8).batch(8)
        ),
        divided=lambda: _once().shuffle(32, seed=9).map(lambda x, y: (2 * x, y)).repeat(2).batch(16),
    )


@only(np=2)
def orders_of_repeated_rows_follow_after_a_resume() -> None:
    """Of a shuffle that is repeated, kept or cut."""
    _orders_follow(
        repeated=lambda: _again().repeat(2).batch(16),
        cached=lambda: _again().cache().batch(8),
        shuffled=lambda: _again().cache().shuffle(8, seed=7).batch(8),
        cut=lambda: _again().repeat(2).take(40).batch(8),
    )


@only(np=2)
def orders_that_rows_draw_follow_after_a_resume() -> None:
    _orders_follow(
        random=lambda: (
            tf.data.Dataset.zip(_once(), tf.data.Dataset.random(seed=4, rerandomize_each_iteration=True))
            .map(lambda row, number: (row[0] + tf.cast(number % 7, tf.float64), row[1]))
            .batch(8)
        ),
        py=_FromBegin,
    )


def _orders_follow(**kinds: Callable[[], Any]) -> None:
    """Orders of rows in training and validation, and what a callback has set back, go on where a run was killed."""
    for name, make in kinds.items():
        more: dict[str, Any] = {"epochs": 4, "verbose": 0, "shuffle": False}
        more |= {"validation_steps": 2}
        if "py" not in name:
            del more["shuffle"]

        def fit(name: str, *callbacks: Any, more: Any = more, make: Any = make) -> Any:
            model, config = compiled(dense()), options(checkpoint=CheckpointConfig(every_steps=1))
            more = more | {"validation_data": _rows().shuffle(32, seed=10).batch(4)}
            history = ringtrain.fit(model, make(), name=name, callbacks=[_WarmUp(), *callbacks], options=config, **more)
            return model, history.history

        whole, expected = fit(f"orders-{name}-whole")
        with contextlib.suppress(Killed):
            fit(f"orders-{name}", KillAfter(10))
            raise AssertionError("not killed")
        resumed, history = fit(f"orders-{name}")
        assert distance(whole, resumed) == 0, (name, distance(whole, resumed))
        assert history == expected, name


@only(np=2)
def metrics_of_another_run_begin_with_this_one() -> None:
    """Its checkpoint within an epoch, given by its path, has the sums of other metrics."""

    def fit(metrics: list[str], name: str, *callbacks: Any, **more: Any) -> dict[str, list[float]]:
        config = options(checkpoint=CheckpointConfig(every_steps=1))
        model = compiled(dense(), metrics=metrics)
        more = {"name": name, "batch_size": 32, "epochs": 2, "verbose": 0, **more}
        history: Any = ringtrain.fit(model, X, Y, callbacks=callbacks, options=config, **more)
        return history.history

    with contextlib.suppress(Killed):
        fit(["mae"], "other-metrics", KillAfter(2))
        raise AssertionError("was not killed")
    saved = OUTPUT / f"runs-{hvd.size()}" / "other-metrics" / "checkpoints" / "step-00000002"
    for metrics in (["mse"], ["mse", "mae"]):
        history = fit(metrics, f"from-other-{len(metrics)}", resume=str(saved))
        np.testing.assert_allclose(history["mse"], history["loss"], rtol=1e-6)


@only(np=2)
def validation_of_the_first_batches_has_the_rows_of_keras() -> None:
    """Each evaluation has its own order of the shuffles; batches of a PyDataset have one for all."""
    rows = tf.data.Dataset.from_tensor_slices((X[:32], Y[:32]))
    kinds: dict[str, Callable[[], Any]] = {
        "shuffled": lambda: rows.shuffle(32, seed=1).batch(4),
        "twice": lambda: rows.shuffle(8, seed=1).batch(4).unbatch().shuffle(9, seed=2).batch(4),
        "repeated": lambda: rows.shuffle(32, seed=1).repeat(2).batch(4),
        "cached": lambda: rows.shuffle(32, seed=1).batch(4).cache(),
        "py": _FromBegin,
    }
    for name, make in kinds.items():
        ours, reference = compiled(dense()), compiled(dense())
        given: dict[str, Any] = {"batch_size": 8, "epochs": 3, "shuffle": False, "validation_steps": 2, "verbose": 0}
        history = ringtrain.fit(ours, X, Y, validation_data=make(), options=options(), **given)
        expected = reference.fit(X, Y, validation_data=make(), **given)
        np.testing.assert_allclose(history.history["val_loss"], expected.history["val_loss"], rtol=1e-6, err_msg=name)


@only(np=2)
def each_evaluation_has_all_rows_of_a_cache() -> None:
    """A cache keeps the order of a shuffle before it once all is read; also after a kill and a resume."""
    rows = tf.data.Dataset.from_tensor_slices((X[:32] * np.arange(1, 33)[:, None], Y[:32]))
    kinds: dict[str, Callable[[], Any]] = {
        "after": lambda: rows.batch(4).shuffle(8, seed=1).prefetch(2).cache(),
        "before": lambda: rows.batch(4).cache().shuffle(8, seed=1),
        "unknown": lambda: rows.batch(4).shuffle(8, seed=1).filter(lambda x, y: True).cache(),
    }
    for name, make in kinds.items():

        def train(name: str, *callbacks: Any, make: Any = make) -> Any:
            model = compiled(dense())  # first: it sets the global seed, which shuffles have a part of
            more = SAME | {"epochs": 4, "validation_data": make(), "callbacks": callbacks}
            history: Any = ringtrain.fit(model, X, Y, name=f"cached-{name}", options=options(), **more)
            return history.history

        whole = train(f"{name}-whole")
        expected = compiled(dense()).fit(X, Y, **(SAME | {"epochs": 4, "validation_data": make()}))
        np.testing.assert_allclose(whole["val_loss"], expected.history["val_loss"], rtol=1e-6, err_msg=name)
        with contextlib.suppress(Killed):
            train(name, KillAfter(9))
            raise AssertionError("not killed")
        assert train(name) == whole, name


@only(np=2)
def virtual_ranks_evaluate_each_row_of_a_shuffle_once() -> None:
    held_out = tf.data.Dataset.from_tensor_slices((X[:32] * np.arange(1, 33)[:, None], Y[:32])).shuffle(32, seed=1)
    ours, reference = compiled(dense()), compiled(dense())
    config = options(train=TrainConfig(virtual_ranks=4))
    history = ringtrain.fit(ours, X, Y, validation_data=held_out.batch(4), options=config, **SAME)
    expected = reference.fit(X, Y, validation_data=held_out.batch(4), **SAME)
    np.testing.assert_allclose(history.history["val_loss"], expected.history["val_loss"], rtol=1e-6)
    with contextlib.suppress(DataError):
        cut = {"validation_data": held_out.batch(4), "validation_steps": 2}
        ringtrain.fit(compiled(dense()), X, Y, options=config, **SAME, **cut)
        raise AssertionError("trained")


@only(np=2)
def training_and_validation_data_share_a_shuffle() -> None:
    """A rank without a validation batch takes its orders, too."""

    def parts(kind: str, **more: Any) -> dict[str, Any]:
        rows = tf.data.Dataset.from_tensor_slices((X, Y))
        if kind == "after a cache":
            rows = rows.cache()
        rows = rows.shuffle(100, seed=3)
        train, test = rows.take(80).batch(32), rows.skip(80).batch(32)
        if kind == "before caches":
            train, test = train.cache(), test.cache()
        return SAME | {"x": train, "validation_data": test, "batch_size": None, "epochs": 4, **more}

    for kind, first in (("shared", 0), ("shared", 1), ("before caches", 0), ("after a cache", 0)):

        def train(name: str, *callbacks: Any, kind: str = kind, first: int = first) -> Any:
            model = compiled(dense())
            words = parts(
                kind, initial_epoch=first, callbacks=callbacks, name=f"{kind.replace(' ', '-')}-{first}-{name}"
            )
            history: Any = ringtrain.fit(model, options=options(), **words)
            return model, history.history

        ours, history = train("whole")
        reference = compiled(dense())
        expected = reference.fit(**parts(kind, initial_epoch=first))
        assert distance(ours, reference) < 1e-10, kind
        np.testing.assert_allclose(history["val_loss"], expected.history["val_loss"], rtol=1e-6, err_msg=kind)
        with contextlib.suppress(Killed):
            train("killed", KillAfter(8))
            raise AssertionError("not killed")
        resumed, again = train("killed")
        assert distance(resumed, ours) == 0 and again == history, kind


@only(np=2)
def virtual_ranks_with_regularized_weights() -> None:
    """Whose loss a mask divides."""
    layers = keras.layers.Masking(), keras.layers.LSTM(4, kernel_regularizer="l2", return_sequences=True)
    losses = []
    for virtual in (2, 4):
        keras.utils.set_random_seed(1)
        last = keras.layers.Dense(1, kernel_regularizer="l2")
        model = keras.Sequential(
            [keras.Input((5, 4)), *(type(one).from_config(one.get_config()) for one in layers), last]
        )
        config = options(train=TrainConfig(virtual_ranks=virtual))
        model.compile("sgd", "mse")
        history = ringtrain.fit(model, SEQUENCES, SEQUENCES[..., :1], batch_size=32, verbose=0, options=config)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@only(np=2)
def a_stop_saves_the_weights_of_its_step() -> None:
    """Not those that callbacks and averages leave at the end of a process."""
    for name, make, callbacks in (("averaged", _averaged, ()), ("best", _plain, (_best,))):
        whole, history = _fit(f"{name}-whole", make, *(callback() for callback in callbacks))
        chaos = f"rank={hvd.size() - 1} step=6 mode=sigterm"
        try:
            _fit(f"{name}-ended", make, *(callback() for callback in callbacks), chaos=chaos)
        except SystemExit as end:
            assert end.code == 143, end.code
        else:
            raise AssertionError("not ended")
        resumed, again = _fit(f"{name}-ended", make, *(callback() for callback in callbacks), chaos=chaos)
        assert distance(whole, resumed) == 0, (name, distance(whole, resumed))
        assert history.history == again.history, name


@only(np=2)
def a_run_goes_on_from_its_mirror() -> None:
    """Killed within an epoch on a host whose disk is then lost: the weights and files of a run that was not."""
    if importlib.util.find_spec("fsspec") is None:
        return  # an extra, which CI installs
    whole, history = _fit("mirror-whole", _plain, checkpoint=CheckpointConfig(every_steps=1))

    def mirrored(*callbacks: Any) -> tuple[keras.Model, Any]:
        config = options(health=AT_ONCE, checkpoint=CheckpointConfig(every_steps=1))
        config = with_values(config, {"run.mirror": str(OUTPUT / f"mirror-{hvd.size()}")})
        model, arguments = _plain(), {"batch_size": 32, "epochs": 3, "validation_data": (X[:40], Y[:40]), "verbose": 0}
        return model, ringtrain.fit(model, X, Y, name="lost", callbacks=callbacks, options=config, **arguments)

    with contextlib.suppress(Killed):
        mirrored(KillAfter(7))
        raise AssertionError("was not killed")
    run = OUTPUT / f"runs-{hvd.size()}" / "lost"
    while hvd.rank() == 0 and run.exists():
        shutil.rmtree(run, ignore_errors=True)  # the thread of the killed run may still write into it
    hvd.allgather_object(0, name="the_disk_is_lost")
    resumed, again = mirrored()
    assert distance(whole, resumed) == 0, distance(whole, resumed)
    assert history.history == again.history
    there = OUTPUT / f"mirror-{hvd.size()}" / "lost"
    hvd.allgather_object(0, name="the_mirror_is_written")
    for name in ("summary.json", "metrics.jsonl", "logs/journal-0.jsonl"):
        assert (there / name).read_bytes() == (run / name).read_bytes(), name
    saved = [sorted(path.name[:13] for path in (folder / "checkpoints").iterdir()) for folder in (run, there)]
    assert saved[0] == saved[1], saved


def _stops(name: str, *callbacks: Any, within: bool = False, **more: Any) -> tuple[keras.Model, Any]:
    """Stopped by a callback after the fourth epoch, with the weights of the third, or `within` the second."""
    first: list[Any] = [keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)]
    if within:
        first = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: _stop_after(first[0], 6))]
    model, config = _plain(), options(health=AT_ONCE, **more)
    given = {"batch_size": 32, "epochs": 9, "validation_data": (X[:40], -Y[:40]), "verbose": 0, "shuffle": False}
    history = ringtrain.fit(model, X, Y, name=name, callbacks=[*first, *callbacks], options=config, **given)
    return model, history


def _stop_after(callback: Any, step: int) -> None:
    if int(callback.model.optimizer.iterations) == step:
        callback.model.stop_training = True


@only(np=2)
def a_run_that_a_callback_has_stopped_trains_no_further() -> None:
    """Killed before its result is written, or ended by a signal as well: the same weights and epochs."""

    def kill(logs: Any) -> None:
        raise Killed

    for within in (False, True):
        whole, history = _stops(f"stop-{within}", within=within)
        steps = json.loads((history.run / "summary.json").read_text())["global_step"]
        ends = keras.callbacks.LambdaCallback(on_train_end=kill)
        last = 6 if within else steps
        chaos = {"chaos": f"rank={hvd.size() - 1} step={last - 1} mode=sigterm"}
        for name, callbacks, more in ((f"stop-{within}-killed", [ends], {}), (f"stop-{within}-ended", [], chaos)):
            with contextlib.suppress(Killed, SystemExit):
                _stops(name, *callbacks, within=within, **more)
                raise AssertionError(f"{name}: was not ended")
            for _ in range(2):  # then it is complete
                again, resumed = _stops(name, within=within, **more)
                assert distance(whole, again) == 0, (name, distance(whole, again))
                assert resumed.history == history.history and resumed.epoch == history.epoch, name
                assert resumed.checksum == history.checksum, name
            summary = json.loads((resumed.run / "summary.json").read_text())
            assert summary["stopped_by"] == "a callback" and summary["global_step"] == steps, name
    further = _plain()
    given = {"batch_size": 32, "epochs": 9, "verbose": 0, "shuffle": False, "resume": str(history.run)}
    more = ringtrain.fit(further, X, Y, name="stop-further", options=options(), **given)
    assert more.epoch[-1] == 8, "a path trains further"


@only(np=2)
def a_callback_that_stops_within_an_epoch_leaves_the_averages() -> None:
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                self.model.stop_training = True

    model, _ = _fit("averaged-stopped", _averaged, Stops())
    optimizer = model.optimizer
    for weight, average in zip(model.trainable_weights, optimizer._model_variables_moving_average, strict=True):
        np.testing.assert_array_equal(weight, average)


class Freezes(keras.callbacks.Callback):
    """Freezes a layer, which trains on as it was compiled."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.layers[0].trainable = False


@only(np=2)
def what_optimizers_keep_beside_their_slots_is_resumed() -> None:
    """Killed within the second epoch, before a smaller batch; and layers that a callback has frozen."""

    def make() -> keras.Model:
        return compiled(
            dense(), optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.05), initial_scale=8.0)
        )

    whole, history = _fit("nadam-whole", make, Freezes())
    with contextlib.suppress(Killed):
        _fit("nadam", make, Freezes(), KillAfter(7), checkpoint=CheckpointConfig(every_steps=1))
        raise AssertionError("was not killed")
    for _ in range(2):  # then it is complete
        resumed, again = _fit("nadam", make, Freezes())
        assert distance(whole, resumed) == 0, distance(whole, resumed)
        assert history.history == again.history and history.checksum == again.checksum
        for model in (whole, resumed):
            assert [layer.trainable for layer in model.layers] == [False, True]


class Counts(keras.callbacks.Callback):
    """Changes numbers, a variable, and makes an object that the rest of the epoch needs."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.rate, self.variable = 0, 1.0, keras.Variable(1.0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begun += 1
        self.rate *= 0.5
        self.variable.assign(self.variable * 2)
        self.timer = object()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del self.timer


@only(np=2)
def an_epoch_begins_once() -> None:
    """A learning rate that each epoch multiplies, killed within the first and the second epoch."""

    def callbacks() -> list[Any]:
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8), Counts()]

    uninterrupted, every_step = callbacks(), {"checkpoint": CheckpointConfig(every_steps=1)}
    whole, history = _fit("rates-whole", _plain, *uninterrupted)
    for num_steps in (2, 4):
        with contextlib.suppress(Killed):
            _fit("rates", _plain, *callbacks(), KillAfter(num_steps), **every_step)
            raise AssertionError("was not killed")
    resumed = callbacks()
    model, again = _fit("rates", _plain, *resumed, **every_step)
    assert distance(whole, model) == 0
    assert history.history == again.history
    counts = [(one.begun, one.rate, float(one.variable.value)) for one in (uninterrupted[1], resumed[1])]
    assert counts[0] == counts[1] == (3, 0.125, 8.0), counts


@only(np=2)
def a_kept_fit_saves_before_and_exports_after_other_callbacks() -> None:
    """The exported model is the one that EarlyStopping restores; training continues from the last epoch's."""
    best = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    model, run = _kept("kept-best", _plain, best)
    assert best.stopped_epoch > best.best_epoch, "restored nothing"
    exported = keras.models.load_model(run.folder / "model.keras", compile=False)
    assert distance(model, exported) == 0
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["stopped_by"] == "a callback" and summary["checksum"] == hvd.check_in_sync(model)
    assert "on_train_end" not in vars(model.history)

    whole, _ = _kept("kept-averaged-whole", _averaged)
    rare = {"checkpoint": CheckpointConfig(every_epochs=9)}
    with contextlib.suppress(SystemExit):
        sends = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        _kept("kept-averaged", _averaged, sends, **rare)
        raise AssertionError("not ended")
    resumed, run = _kept("kept-averaged", _averaged, **rare)
    assert json.loads((run.folder / "summary.json").read_text())["resumed_from"].endswith("step-00000003")
    assert distance(whole, resumed) < 1e-12, distance(whole, resumed)

    best = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    ended, _ = _kept("kept-best-averaged", _averaged, best)
    again, _ = _kept("kept-best-averaged", _averaged)
    assert distance(again, ended) == 0, "a complete run has other weights"


@only(np=3)
def a_checkpoint_of_keras_has_the_moving_statistics_of_all_ranks() -> None:
    for name, fit in (("fit", _without_validation), ("kept", _kept)):
        path = OUTPUT / f"statistics-{name}-{hvd.size()}.keras"
        writes = [keras.callbacks.ModelCheckpoint(path)] if hvd.rank() == 0 or name == "fit" else []
        model, _ = fit(f"statistics-{name}", _normalized, *writes)
        hvd.allgather_object("written")
        assert distance(model, keras.models.load_model(path)) == 0, name


def _without_validation(name: str, make: Callable[[], keras.Model], *callbacks: Any) -> tuple[keras.Model, Any]:
    model = make()
    arguments = {"batch_size": 32, "epochs": 2, "verbose": 0, "callbacks": callbacks}
    return model, ringtrain.fit(model, X, Y, name=name, options=options(), **arguments)


class TwoNumbers(keras.metrics.MeanAbsoluteError):
    """A metric whose result is a dictionary."""

    def result(self) -> Any:
        return {"middle": super().result(), "twice": 2 * super().result()}


class PerClass(keras.metrics.Metric):
    """A metric whose result is an array, of which one number is NaN."""

    def __init__(self) -> None:
        super().__init__(name="per_class")
        self.sums = self.add_weight(shape=(3,), initializer="zeros")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.sums.assign_add(keras.ops.sum(y, axis=0))

    def result(self) -> Any:
        return self.sums * keras.ops.cast([1.0, 2.0, np.nan], self.sums.dtype)


class OwnLogs(keras.Model):
    """Returns texts and arrays in its logs."""

    def train_step(self, data: Any) -> Any:
        rows = tf.shape(data[0])[0]
        logs = {"kind": tf.constant("text"), "rows": tf.zeros([rows]), "pair": tf.constant([1.0, 2.0])}
        return super().train_step(data) | logs


@only(np=2)
def logs_of_any_kind() -> None:
    """Metrics that return dictionaries and arrays with NaN, texts and arrays in logs: recorded, and resumed."""

    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs |= {"note": "text", "array": np.array([epoch, np.nan]), "none": None}

    def make(kind: Any = keras.Model) -> keras.Model:
        base = dense()
        model = kind(base.inputs, base.outputs)
        return compiled(model, metrics=[TwoNumbers("numbers"), PerClass()])

    reference = make()
    given = {"batch_size": 32, "epochs": 2, "verbose": 0, "validation_data": (X[:40], Y[:40])}
    expected = reference.fit(X, Y, shuffle=False, **given).history
    for name, kind in (("logs", keras.Model), ("own-logs", OwnLogs)):
        more = {"name": name, "options": options(checkpoint=CheckpointConfig(every_steps=1)), "shuffle": False, **given}
        with contextlib.suppress(Killed):
            ringtrain.fit(make(kind), X, Y, callbacks=[Adds(), KillAfter(6)], **more)
            raise AssertionError("was not killed")
        model = make(kind)
        history = ringtrain.fit(model, X, Y, callbacks=[Adds()], **more)
        assert distance(model, reference) < 1e-10
        assert history.history["note"] == ["text", "text"], history.history
        lines = (history.run / "metrics.jsonl").read_text().splitlines()
        for epoch, record in enumerate(json.loads(line, parse_constant=_refused) for line in lines):
            assert record["note"] == "text" and record["array"] == [epoch, None]
        assert epoch == 1, "a record is lost"
        for metric in () if kind is OwnLogs else expected:
            np.testing.assert_allclose(history.history[metric], expected[metric], rtol=1e-6, err_msg=metric)
    assert {"middle", "twice", "per_class", "val_middle"} <= set(expected)


class LogsOfARank(keras.Model):
    """Returns logs of other names and shapes on each rank, and one of all ranks."""

    def train_step(self, data: Any) -> Any:
        logs = {f"of_{hvd.rank()}": tf.constant(1.0), "sizes": tf.zeros([1 + hvd.rank()])}
        return super().train_step(data) | logs | {"rank": tf.constant(float(hvd.rank()))}


@only(np=2)
def logs_that_differ_by_rank() -> None:
    """They are named once and left out, also for callbacks, which must decide the same on all ranks."""
    seen: list[set[str]] = []
    sees = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append({*logs}))

    def make() -> keras.Model:
        base = dense()
        return compiled(LogsOfARank(base.inputs, base.outputs))

    def kept() -> None:
        model = make()
        hvd.DistributedOptimizer(model.optimizer)
        callbacks = [hvd.callbacks.Run(batch_size=32, options=options()), sees]
        model.fit(X[:96], Y[:96], batch_size=32, epochs=2, verbose=0, callbacks=callbacks)

    def fitted() -> None:
        ringtrain.fit(make(), X, Y, batch_size=32, epochs=2, verbose=0, callbacks=[sees], options=options())

    for fit in (fitted, kept):
        seen.clear()
        with contextlib.redirect_stderr(io.StringIO()) as said:
            fit()
        assert seen == [{"loss", "rank"}] * 2, (fit.__name__, seen)
        text = "left out are logs that not all ranks have in one shape: of_0, of_1"
        assert said.getvalue().count(text) == (hvd.rank() == 0), (fit.__name__, said.getvalue())


def _refused(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@only(np=2)
def a_callback_ends_a_loss_of_nan_quietly() -> None:
    """On all ranks, without an error and without a checkpoint."""
    y = Y.copy()
    y[-1] = np.nan  # in the last batch of the first epoch, on the last rank
    given = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0, "name": "nan"}
    config = options(checkpoint=CheckpointConfig(every_steps=1), health=AT_ONCE)
    history = ringtrain.fit(_plain(), X, y, callbacks=[keras.callbacks.TerminateOnNaN()], options=config, **given)
    summary = json.loads((history.run / "summary.json").read_text())
    assert summary["stopped_by"] == "a callback" and summary["global_step"] == 4
    hvd.allgather_object("ended")
    saved = sorted(path.name for path in (history.run / "checkpoints").glob("step-*"))
    assert saved[-1] == "step-00000003", saved


@only(np=2)
def one_rank_that_stops_before_the_first_step_stops_all() -> None:
    """After a step: the others wait for it until then."""

    class Stops(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.stop_training = hvd.rank() == hvd.size() - 1

    given = {"batch_size": 32, "epochs": 3, "verbose": 0, "name": "stops-before"}
    history = ringtrain.fit(_plain(), X, Y, callbacks=[Stops()], options=options(health=AT_ONCE), **given)
    summary = json.loads((history.run / "summary.json").read_text())
    assert summary["stopped_by"] == "a callback" and history.epoch == [0], summary


def seeds_go_on_with_another_number_of_ranks() -> None:
    """Begun by 2 ranks and continued by 3: no rank draws the numbers of its first epoch again, or another rank's."""
    seen: list[Any] = []

    class Sees(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append([seed.numpy().tolist() for seed in (*hvd.seeds(self.model), *hvd.global_seed())])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            keras.random.uniform(())

    def fit(*callbacks: Any, name: str = "seeds") -> None:
        config = options("seeds", checkpoint=CheckpointConfig(every_steps=1))
        model = compiled(dense(keras.layers.Dropout(0.2), keras.layers.Dropout(0.2)))
        given = {"batch_size": 32, "epochs": 2, "verbose": 0, "name": name, "options": config}
        ringtrain.fit(model, X, Y, callbacks=[Sees(), *callbacks], **given)

    if hvd.size() == 2:
        with contextlib.suppress(Killed):
            fit(KillAfter(6))
            raise AssertionError("was not killed")
        return
    fit()
    fit(name="seeds-begun")
    states, begun = zip(*hvd.allgather_object(seen), strict=True)
    for drawn in zip(*states, *begun, strict=True):  # of one generator, on all ranks of both runs
        assert len({tuple(state) for state in drawn}) == 2 * hvd.size(), (states, begun)
    if hvd.rank() == 0:
        counts = [[state[1] for state in of_rank_0[:2]] for of_rank_0 in (states[0], begun[0])]
        assert counts == [[6, 6], [0, 0]], counts


# ---- the configured trainer ----------------------------------------------------------------------------------------


def _samples() -> Any:
    return (X, CLASSES), (X[:20], CLASSES[:20])


def _averaging(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Dense(num_classes)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.9), loss, metrics=["accuracy"])
    return model


def _falls() -> keras.callbacks.Callback:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)


class Counted(keras.callbacks.Callback):
    """Counts the trainings that begin and end, and their epochs and evaluations, before a resume as well."""

    seen: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.epochs = self.evaluations = 0

    def on_train_begin(self, logs: Any = None) -> None:
        Counted.seen.append("begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1

    def on_test_begin(self, logs: Any = None) -> None:
        self.evaluations += 1

    def on_train_end(self, logs: Any = None) -> None:
        Counted.seen.append(f"end of {self.epochs} epochs, {self.evaluations} evaluations")


@only(np=2)
def configured_averages_and_rates() -> None:
    """Ended within an epoch and resumed: averages replace weights at the end only, and each epoch begins once."""
    words = ["--data.name", "resume_jobs:_samples", "--model.name", "resume_jobs:_averaging"]
    words += ["--train.batch-size", str(24 // hvd.size()), "--train.epochs", "3", "--health.agree-every-steps", "1"]
    words += ["--run.directory", str(OUTPUT / f"averaging-{hvd.size()}"), "--tracking.every-steps", "0"]
    words += ["--train.callbacks", "resume_jobs:_falls", "resume_jobs:Counted"]
    whole = train.train(config_io.read([*words, "--run.name", "whole"]))
    chaos = ["--chaos", f"rank={hvd.size() - 1} step=6 mode=sigterm"]
    stopped = train.train(config_io.read([*words, "--run.name", "ended", *chaos]))
    assert stopped["stopped_by"] == "SIGTERM" and 4 < stopped["global_step"] < 8
    path = OUTPUT / f"averaging-{hvd.size()}"
    left = train.train(config_io.read([*words, "--run.name", "left", "--run.resume", str(path / "whole")]))
    assert left["checksum"] == whole["checksum"]
    saved = [np.load(path / name / "checkpoints" / "step-00000012" / "state.npz") for name in ("whole", "left")]
    for name in saved[0]:  # with nothing to train, it begins and saves the trained weights, not their averages
        np.testing.assert_array_equal(saved[0][name], saved[1][name], err_msg=name)
    Counted.seen.clear()
    resumed = train.train(config_io.read([*words, "--run.name", "ended", *chaos]))  # the fault happens once
    assert resumed["resumed_from"] and resumed["global_step"] == whole["global_step"]
    assert resumed["checksum"] == whole["checksum"]
    assert Counted.seen == ["begin", "end of 3 epochs, 3 evaluations"]
