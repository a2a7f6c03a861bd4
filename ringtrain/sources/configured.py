"""Data, model and callbacks that the configuration names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringtrain import data, models
from ringtrain.config import Config
from ringtrain.derived import derive, num_shards
from ringtrain.errors import ConfigError
from ringtrain.run import setup
from ringtrain.run.context import Job, Run
from ringtrain.run.run_files import FromCheckpoint

if TYPE_CHECKING:
    from ringtrain.run.devices import Pinning
    from ringtrain.strategies.base import Strategy


class ConfiguredSource(FromCheckpoint):
    """Data, model and callbacks that the configuration names; see `run.context.Source`."""

    is_quiet = False

    def __init__(self, config: Config) -> None:
        self.named = setup.find(config)
        self.faults = self.named.faults

    def code(self) -> Mapping[str, str]:
        """Empty: modules that the configuration names are compared in any case."""
        return {}

    def pin(self, strategy: Strategy) -> Pinning:
        return strategy.begin()

    def read_job(self, run: Run) -> Job:
        import keras
        import tensorflow as tf

        from ringtrain import hvd
        from ringtrain.sources.job import job_of
        from ringtrain.strategies.rows import data_of

        strategy, together = run.strategy, run.strategy.together
        config = run.config
        setup.set_dtypes(config)
        tf.random.set_seed(None)  # the seeds of an earlier run would shuffle the data in another order on each rank

        # Data, and the numbers that follow from them.
        size = together(lambda: num_shards(config, strategy.num_copies))
        rows = config.train.batch_size * size
        # A restart on other ranks keeps the global batch. Those that join and leave share it in a way of their own, as
        # virtual ranks do, and hvd knows no workers of servers.
        is_fixed = strategy.ranks_change or strategy.of_others or config.train.virtual_ranks
        if run.attempt.number and run.attempt.num_ranks and not is_fixed:
            rows = rows * run.attempt.num_ranks // hvd.size()
        named, found = self.named, together(self.named.read)
        given = data.FitArguments()
        if isinstance(found, data.FitArguments):
            given = dataclasses.replace(found, epochs=config.train.epochs, seed=config.seed)
            named = dataclasses.replace(named, build_model=models.builder(config.model, of_classes=False))
            found = given
        data_set = together(lambda: data_of(config, found, rows))
        train, num_train, num_test = data_set.train, len(data_set.train), len(data_set.test)
        _check_monitor(config, num_test > 0, given.validation_freq == 1)
        # A stream brings its own batches, the same on any number of ranks, and so does the learning rate.
        is_stream = False
        if isinstance(train, data.Stream):
            is_stream = True
            rows, num_train = train.batch_size, num_train * train.batch_size
            _refuse_scaling(config)
        numbers = together(lambda: derive(config, size, num_train, num_test, rows, is_scaled=not is_stream))
        run.stages.done("data")

        # Each run of a process gives its layers the same names, which checkpoints hold.
        keras.utils.clear_session()
        model, plan = setup.compiled_model(named, data_set, config, numbers, strategy)
        given = dataclasses.replace(given, epochs=config.train.epochs, callbacks=together(named.make_callbacks))
        job = together(lambda: job_of(run, model, given, data_set, rows, "test_", lambda *_: numbers))
        if is_stream:
            batch = f"{rows:,}" if rows > 1 else "unknown"
            plan["global batch"] = f"{batch}: a batch of the {train.kind}, on all ranks: train.batch_size has no effect"
        job.plan |= plan
        job.named_in_errors = config.data.name
        return job


def _check_monitor(config: Config, has_test: bool, is_each_epoch: bool) -> None:
    """Raises ConfigError if train.monitor is a metric of test data that some epochs do not have."""
    monitor = config.train.monitor
    if config.train.patience and monitor.startswith("test_") and not (has_test and is_each_epoch):
        lack = "is not evaluated after each epoch" if has_test else "has no test data"
        raise ConfigError(
            f"train.monitor: got {monitor}, but {config.data.name} {lack}: choose loss, or evaluate each epoch"
        )


def _refuse_scaling(config: Config) -> None:
    """Raises ConfigError for a learning rate that would follow from the batches of the data."""
    rule = config.optimizer.learning_rate_scaling
    if rule in ("linear", "sqrt"):
        raise ConfigError(
            f"optimizer.learning_rate_scaling: got {rule}, but the data bring their own batches for all ranks: leave it"
            " out"
        )
