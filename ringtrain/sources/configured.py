"""Data, model and callbacks that the configuration names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringtrain import data, models
from ringtrain.config import Config, with_values
from ringtrain.derived import derive, num_shards
from ringtrain.errors import ConfigError
from ringtrain.run import devices, identity, setup
from ringtrain.run.context import Job, Process
from ringtrain.run.from_checkpoint import FromCheckpoint

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

    def read_job(self, process: Process) -> Job:
        import tensorflow as tf

        from ringtrain import hvd
        from ringtrain.run import resume

        strategy = process.strategy
        # Ranks that join and leave share their batch in a way of their own, and hvd knows no workers of servers.
        if not strategy.ranks_change and not strategy.of_others:
            process.config = resume.same_global_batch(process.config, process.attempt, hvd.size())
        config = process.config
        setup.set_dtypes(config)
        tf.random.set_seed(None)  # the seeds of an earlier run would shuffle the data in another order on each rank
        found = process.together(self.named.read)
        if isinstance(found, data.FitArguments):
            self.named = dataclasses.replace(self.named, build_model=models.builder(config.model, of_classes=False))
        return _job(process, self.named, found)


def _job(process: Process, named: setup.Named, found: data.DataSet | data.FitArguments) -> Job:
    """Data, model and callbacks that the configuration names."""
    import keras
    import tensorflow as tf

    from ringtrain import hvd
    from ringtrain.sources import script, script_model
    from ringtrain.strategies.rows import data_of

    config, together = process.config, process.together
    name, size = config.data.name, together(lambda: num_shards(config, process.strategy.num_copies))
    rows = config.train.batch_size * size
    given = data.FitArguments(epochs=config.train.epochs)
    if isinstance(found, data.FitArguments):
        found = given = dataclasses.replace(found, epochs=config.train.epochs, seed=config.seed)

    # Data, and the numbers that follow from them.
    data_set = together(lambda: data_of(config, found, rows))
    train, test = data_set.train, data_set.test
    validation = script.validation_of(given, test, rows, "test_")
    _check_monitor(config, len(test) > 0, validation.epochs is None)
    num_train = len(train)
    plan = {
        "data": f"{name} ({train.kind}): {_size(train)} to train, {_size(test)} to test",
        "on resume": train.on_resume,
        **train.plan,
    }
    if isinstance(train, data.Stream):
        rows, num_train = train.batch_size, num_train * train.batch_size
        process.config = config = _with_unscaled_rate(config)
        num_rows = f"{rows:,}" if rows > 1 else "unknown"
        plan["global batch"] = (
            f"{num_rows}: a batch of the {train.kind}, on all ranks together; train.batch_size has no effect"
        )
    numbers = together(lambda: derive(config, size, num_train, len(test), rows))
    plan["shard"] = script.shard_of(numbers)
    checksums = together(lambda: data.checksums(data_set))
    if config.train.virtual_ranks:
        checksums |= devices.of_kernels(process.pinning)
    of_name = ["training data"]
    if not isinstance(test, data.Stream):
        of_name.append("test data")
    process.stages.done("data")

    # Each run of a process gives its layers the same names, which checkpoints hold.
    keras.utils.clear_session()
    model = setup.compiled_model(named, data_set, config, numbers, process.strategy, plan=plan)
    unlike = script_model.build(process, model, train, rows)
    plan |= script_model.compile_by_xla(process, model, train)
    if not process.strategy.shares_state:
        tf.random.set_seed(config.seed * size + hvd.rank())  # else all ranks would draw the same noise
        hvd.seed_globally_by_rank(config.seed)
    if unlike:
        plan["unlike 1 rank"] = "; ".join(unlike)
    # What its function has compiled is part of the job: ranks, and all runs of one name, have it in common.
    compiled = {**identity.of_layers(model), **identity.of_compiled(model)}
    job = Job(
        data_set=data_set,
        numbers=numbers,
        checksums={**checksums, **compiled},
        of_name={*of_name, *compiled},
        model=model,
        users_callbacks=together(named.make_callbacks),
        validation=validation,
        plan=plan,
        facts={"on_resume": train.on_resume, "unlike_one_process": unlike},
        named_in_errors=name,
    )
    # An optimizer that is not built is that of a `compile` without arguments, which a train_step does not use.
    if config.tracking.every_steps > 0 and process.strategy.has_gradient_norm and model.optimizer.built:
        job.gradient_norm = hvd.track_gradient_norm(model.optimizer)
    return job


def _size(part: data.Split) -> str:
    """Number of rows or batches, for the plan."""
    if isinstance(part, data.Stream):
        return f"{len(part):,} batches"
    return f"{len(part):,}"


def _check_monitor(config: Config, has_test: bool, is_each_epoch: bool) -> None:
    """Raises ConfigError if train.monitor is a metric of test data that some epochs do not have."""
    monitor = config.train.monitor
    if config.train.patience and monitor.startswith("test_") and not (has_test and is_each_epoch):
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
