"""Strategy for configured data other than samples with integer classes: those that `ringtrain.fit` takes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ringtrain import data, hvd, models
from ringtrain.config import Config, value_of, with_values
from ringtrain.derived import derive
from ringtrain.errors import ConfigError, DataError
from ringtrain.run import setup
from ringtrain.run.context import Job, Process, RunContext
from ringtrain.strategies import script
from ringtrain.strategies.ring import Ring


class Configured(script.Script):
    """Strategy ring for data that `ringtrain.fit` takes, and the model that the configuration names."""

    ends_with_callbacks = False

    def __init__(self, config: Config, train: data.Arrays | data.Stream, batch_size: int, plan: dict[str, str]) -> None:
        super().__init__(config)
        self.train, self.batch_size, self.plan = train, batch_size, plan

    def make_ready(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        self.build(model, self.train, self.batch_size)
        tf.random.set_seed(self.config.seed * hvd.size() + hvd.rank())  # else all ranks would draw the same noise
        hvd.seed_globally_by_rank(self.config.seed)
        if self.unlike_one_process:
            self.plan["unlike 1 rank"] = "; ".join(self.unlike_one_process)

    def gradient_norm(self, optimizer: keras.optimizers.Optimizer) -> hvd.GradientNorm | None:
        # One that is not built is that of a `compile` without arguments, which the model's own train_step does not use.
        return super().gradient_norm(optimizer) if optimizer.built else None

    @contextlib.contextmanager
    def training(self, run: RunContext) -> Iterator[Callable[[int, int], Iterator[Any]]]:
        with _errors_named(self.config.data.name), super().training(run) as batches_of:
            yield batches_of

    def summary(self, run: RunContext) -> dict[str, Any]:
        facts = super().summary(run)
        del facts["script"]
        return facts


def read_data(process: Process) -> Job:
    """Reads the configured data; sets `process.strategy` to Configured unless they are samples with integer classes."""
    config, together = process.config, process.strategy.together
    tf.random.set_seed(None)  # the seeds of an earlier run would shuffle the data in another order on each rank
    result = together(process.named.read)
    if isinstance(result, data.DataSet):
        return setup.job_of(process, result)
    size, name = hvd.size(), config.data.name
    if type(process.strategy) is not Ring:  # nor a subclass, whose ranks join and leave
        raise ConfigError(f"data.name: {name}: {setup.NO_CLASSES}")
    for option in ("train.jit", "train.virtual_ranks"):
        if value_of(config, option):
            raise ConfigError(f"{option}: it needs samples with integer classes: leave it out")
    rows = config.train.batch_size * size
    given = dataclasses.replace(result, epochs=config.train.epochs, seed=config.seed)

    def split() -> tuple[data.Arrays | data.Stream, data.Split, Any, int]:
        with _errors_named(name):
            try:
                train, test = data.inputs(given, rows)
                if isinstance(train, data.Arrays) and given.steps_per_epoch:
                    raise DataError("got steps_per_epoch with arrays: leave it out")
                if most := config.data.max_samples:
                    if not isinstance(train, data.Arrays):
                        raise DataError("data.max_samples: the rows are not in memory: leave it out")
                    train, test = train.first(most), test.first(most) if isinstance(test, data.Arrays) else test
                return train, test, *data.shapes_of(train)
            except ValueError as error:  # of Keras, such as different numbers of rows, or text
                raise DataError(f"{name}: {' '.join(str(error).split())}") from error

    train, test, shape, num_targets = together(split)
    validation = script.validation_of(given, test, rows, "test_")
    _check_monitor(config, len(test) > 0, validation.epochs is None)
    num_train, batches = len(train), [" batches" * isinstance(part, data.Stream) for part in (train, test)]
    sizes = f"{num_train:,}{batches[0]} to train, {len(test):,}{batches[1]} to test"
    plan = {"data": f"{name} ({train.kind}): {sizes}", "on resume": train.on_resume}
    if isinstance(train, data.Stream):
        rows, num_train = train.batch_size, num_train * train.batch_size
        plan |= train.plan
        process.config = _with_unscaled_rate(config)
        plan["global batch"] = (
            f"{f'{rows:,}' if rows > 1 else 'unknown'}: a batch of the {train.kind}, on all ranks together;"
            f" train.batch_size has no effect"
        )
    process.strategy = Configured(process.config, train, rows, plan)
    process.named = dataclasses.replace(process.named, build_model=models.builder(config.model, of_classes=False))
    data_set = data.DataSet(train, test, config.data.num_classes or num_targets, shape)
    return Job(
        data_set=data_set,
        numbers=together(lambda: derive(process.config, size, num_train, len(test), rows)),
        checksums=together(lambda: data.checksums(data_set)),
        of_name=("training data",) if isinstance(test, data.Stream) else ("training data", "test data"),
        validation=validation,
        plan=plan,
    )


def _check_monitor(config: Config, has_test: bool, is_each_epoch: bool) -> None:
    """Raises ConfigError if train.monitor is a metric of test data that some epochs do not have."""
    monitor, is_monitored = config.train.monitor, config.train.patience or config.schedule.plateau_patience
    if is_monitored and monitor.startswith("test_") and not (has_test and is_each_epoch):
        lack = "is not evaluated after each epoch" if has_test else "has no test data"
        raise ConfigError(
            f"train.monitor: got {monitor}, but {config.data.name} {lack}: choose loss, or evaluate each epoch"
        )


def _with_unscaled_rate(config: Config) -> Config:
    """Returns the configuration of batches whose size, and so the learning rate, is the same on any number of ranks."""
    option, rule = "optimizer.learning_rate_scaling", config.optimizer.learning_rate_scaling
    if rule in ("linear", "sqrt"):
        raise ConfigError(f"{option}: got {rule}, but the data bring their own batches for all ranks: leave it out")
    return with_values(config, {option: "none"})


@contextlib.contextmanager
def _errors_named(name: str) -> Iterator[None]:
    """Context in which errors of data name their function instead of `ringtrain.fit`."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("ringtrain.fit:", f"{name}:", 1)) from error
