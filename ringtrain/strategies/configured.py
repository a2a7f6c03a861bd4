"""Strategy of a configured run whose data are no samples with integer classes: the loop of `ringtrain.fit`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ringtrain import data, hvd, models
from ringtrain.config import with_values
from ringtrain.derived import derive
from ringtrain.errors import ConfigError, DataError
from ringtrain.run import setup
from ringtrain.run.context import Job, Process, RunContext
from ringtrain.strategies import script

STRATEGIES = ("ring", "mpi-ring")
SCALING = "optimizer.learning_rate_scaling"


class Configured(script.Script):
    """Strategy ring for data as `ringtrain.fit` takes them, and the model that the configuration names."""

    def __init__(self, process: Process, train: data.Arrays | data.Stream, batch_size: int) -> None:
        super().__init__(process.config)
        self.train, self.batch_size = train, batch_size
        self.plan: dict[str, str] = {}

    def make_ready(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        script.make_ready(self, model, self.train, self.batch_size)
        tf.random.set_seed(self.config.seed * hvd.size() + hvd.rank())  # else all ranks would draw the same noise
        if self.unlike_one_process:
            self.plan["unlike 1 rank"] = "; ".join(self.unlike_one_process)

    def gradient_norm(self, optimizer: keras.optimizers.Optimizer) -> hvd.GradientNorm | None:
        # One that is not built is that of a `compile` without arguments, which the model's own train_step does not use.
        return super().gradient_norm(optimizer) if optimizer.built else None

    def fit(self, run: RunContext, part: Any) -> None:
        with _named(self.config.data.name):
            super().fit(run, part)

    def summary(self, run: RunContext) -> dict[str, Any]:
        facts = super().summary(run)
        del facts["script"]
        return facts


def read_data(process: Process) -> Job:
    """Reads the data that the configuration names; `process.strategy` becomes the one that can train them."""
    config, together = process.config, process.strategy.together
    tf.random.set_seed(None)  # an earlier run of this process would have its ranks shuffle each in its own way
    found = together(process.named.read)
    if isinstance(found, data.DataSet):
        return setup.job_of(process, found)
    _check(process)
    size, name = hvd.size(), config.data.name
    rows = config.train.batch_size * size
    given = dataclasses.replace(found, epochs=config.train.epochs, seed=config.seed)

    def split() -> tuple[data.Arrays | data.Stream, data.Split]:
        with _named(name):
            try:
                train, test = data.inputs(given, rows)
            except ValueError as error:  # of Keras, such as different numbers of rows
                raise DataError(f"{name}: {' '.join(str(error).split())}") from error
        if not len(train):
            raise DataError(f"{name}: got no training samples, expected at least one")
        return train, test

    train, test = together(split)
    num_train, batches = len(train), [" batches" * isinstance(one, data.Stream) for one in (train, test)]
    sizes = f"{num_train:,}{batches[0]} to train, {len(test):,}{batches[1]} to test"
    plan = {"data": f"{name} ({train.kind}): {sizes}", "on resume": train.on_resume}
    if isinstance(train, data.Stream):
        rows, num_train = train.batch_size, num_train * train.batch_size
        _keep_rate(process)
        plan["global batch"] = f"{rows:,}" * (rows > 1) or "unknown"
        plan["global batch"] += f": a batch of the {train.kind}, on all ranks together; train.batch_size has no effect"
    strategy = process.strategy = Configured(process, train, rows)
    strategy.plan = plan
    shape, num_targets = together(lambda: data.shapes_of(train))
    process.named = dataclasses.replace(process.named, build_model=models.builder(config.model, of_classes=False))
    data_set = data.DataSet(train, test, config.data.num_classes or num_targets, shape)
    return Job(
        data_set=data_set,
        numbers=together(lambda: derive(process.config, size, num_train, len(test), rows)),
        checksums=together(lambda: data.checksums(data_set)),
        validation=script.validation_of(given, test, rows, "test_"),
        plan=plan,
    )


def _check(process: Process) -> None:
    """Raises ConfigError for options that need samples with integer classes."""
    config = process.config
    if config.strategy.name not in STRATEGIES or process.strategy.ranks_change:
        raise ConfigError(f"data.name: {config.data.name}: {setup.NO_CLASSES}")
    if config.train.jit:
        raise ConfigError("train.jit: it needs samples with integer classes: leave it out")


def _keep_rate(process: Process) -> None:
    """Batches that the data bring are the same for any number of ranks: so is the learning rate."""
    rule = process.config.optimizer.learning_rate_scaling
    if rule in ("linear", "sqrt"):
        raise ConfigError(f"{SCALING}: got {rule}, but the data bring their own batches for all ranks: leave it out")
    process.config = with_values(process.config, {SCALING: "none"})


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Context whose errors name the data instead of `ringtrain.fit`."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("ringtrain.fit:", f"{name}:", 1)) from error
