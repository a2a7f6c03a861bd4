"""From a configuration to data, compiled model and callbacks: the source of `python -m ringtrain.train`.

The names are resolved without TensorFlow, so that a misspelled one is reported at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringtrain import data, models
from ringtrain.config import by_name, combinations
from ringtrain.config.derived import Numbers, derive, lower_is_better, num_shards
from ringtrain.config.sections import DEFAULTS, Config, TrainConfig, changed_options
from ringtrain.errors import ConfigError, DataError
from ringtrain.monitor import fault_injection
from ringtrain.training.run import Job, Run
from ringtrain.training.run_files import FromCheckpoint

if TYPE_CHECKING:
    import keras

    from ringtrain.strategies.base import Strategy
    from ringtrain.training.devices import Pinning


class ConfiguredSource(FromCheckpoint):
    """Data, model and callbacks that the configuration names; see `training.run.Source`."""

    is_quiet = False

    def __init__(self, config: Config) -> None:
        self.named = find(config)
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
        from ringtrain.training.job import job_of

        strategy, together = run.strategy, run.strategy.together
        config = run.config
        set_dtypes(config)
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
        numbers = together(lambda: derive(config, size, num_train, num_test, rows, is_scaled=not is_stream))
        run.stages.done("data")

        # Each run of a process gives its layers the same names, which checkpoints hold.
        keras.utils.clear_session()
        model, plan = compiled_model(named, data_set, config, numbers, strategy)
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


# ---- names of the configuration -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """Objects that the configuration names, resolved but not yet created."""

    read: Callable[[], data.DataSet | data.FitArguments]
    build_model: models.Build
    make_metrics: Callable[[], list[Any]]
    make_loss: Callable[[], Any]
    make_callbacks: Callable[[], list[keras.callbacks.Callback]]
    faults: tuple[fault_injection.Fault, ...]

    def read_data(self) -> data.DataSet:
        """Reads data with integer classes; raises ConfigError for other data."""
        data_set = self.read()
        if isinstance(data_set, data.FitArguments):
            raise ConfigError("data.name: expected data with integer classes")
        return data_set


def find(config: Config) -> Named:
    """Resolves the names in a configuration without TensorFlow, so that a misspelled one raises ConfigError at once."""
    # Names are looked up in the user's modules; nothing is made of them, as TensorFlow is not loaded yet.
    make_callbacks = own_callbacks(config)
    return Named(
        data.source(config.data, models.needs_classes(config.model)),
        models.builder(config.model),
        models.metrics(config.model.metrics),
        models.loss(config.model),
        make_callbacks,
        fault_injection.parse(config.chaos),
    )


def own_callbacks(config: Config) -> Callable[[], list[keras.callbacks.Callback]]:
    """Resolves the user's callbacks; the returned function creates them. It raises ConfigError if one is not Keras'."""
    # Found now, so that a misspelled name is reported before the data are read; made when Keras is loaded.
    named = [(name, by_name.find("train.callbacks", name, {})) for name in config.train.callbacks]

    def make() -> list[keras.callbacks.Callback]:
        import keras

        made = [
            by_name.made("train.callbacks", name, function, keras.callbacks.Callback, "a Keras callback")
            for name, function in named
        ]
        if config.train.patience:
            made.append(early_stopping(config.train))
        return made

    return make


def early_stopping(options: TrainConfig) -> keras.callbacks.EarlyStopping:
    """Keras' callback with the options of a run."""
    import keras

    mode = "min" if lower_is_better(options.monitor) else "max"
    return keras.callbacks.EarlyStopping(options.monitor, options.min_delta, options.patience, mode=mode)


def compiled_model(
    named: Named, data_set: data.DataSet, config: Config, numbers: Numbers, strategy: Strategy
) -> tuple[keras.Model, dict[str, str]]:
    """Builds the compiled model of one process, with the same weights on all ranks, and rows of the plan."""
    import keras
    import tensorflow as tf

    from ringtrain.optim import optimizers

    set_dtypes(config)  # the data's function may have set others
    keras.utils.set_random_seed(config.seed)  # the same on all ranks, so that their first weights are
    # One device may not hold all of a model that is divided.
    on_host = tf.device("CPU:0") if config.model.split else contextlib.nullcontext()
    with strategy.scope(), on_host:
        model = named.build_model(data_set.input_shape, data_set.num_classes)
        rows: dict[str, str] = {}
        if config.model.split or config.model.micro_batches > 1:
            rows |= split_model(model, config, numbers.batch_size)
        _check_own_fit(model, config)
        optimizer = model.optimizer if model.compiled else optimizers.build(config, numbers, model)
    if "columns" in config.model.split:
        _check_split_optimizer(optimizer)
    if (model.compiled or ":" in config.model.loss) and data_set.of_classes:
        rows["targets"] = f"{data_set.num_classes} integer classes; for other targets, return floats"
    if model.compiled:  # by its function: it keeps loss, metrics and optimizer
        _refuse_options_of_compile(config)
        kind, rate = type(optimizer).__name__, optimizers.last_learning_rate(optimizer)
        rows["learning rate"] = f"{rate:g} ({kind}, as {config.model.name} compiles it)"
        model.jit_compile = False
        return model, rows
    # XLA has no kernel for Horovod's allreduce; "auto" would enable XLA on GPUs.
    if config.model.loss:
        rows["loss"] = config.model.loss
    if config.train.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    metrics = _metrics(named, config, data_set)
    model.compile(optimizer, named.make_loss(), metrics=metrics, jit_compile=False)
    return model, rows


def set_dtypes(config: Config) -> None:
    """Sets the dtypes of this process, before data are read: Keras converts them."""
    import keras

    # Of data, losses and metrics; an earlier run of this process may have had another.
    keras.config.set_floatx("float64" if config.train.precision == "float64" else "float32")
    keras.config.set_dtype_policy(config.train.precision)


def _metrics(named: Named, config: Config, data_set: data.DataSet) -> list[Any]:
    """Metrics of a model that its function has not compiled, each once. Raises ConfigError for an unknown monitor."""
    from ringtrain.training import stopping

    # A metric that comes by itself may be asked for, too. A monitor that is none of them would be waited for in vain.
    metrics = [*models.accuracy(config.model), *named.make_metrics()]
    metrics = list(dict.fromkeys(metrics))
    stopping.check_monitor(config.train.monitor, metrics, not data_set.of_classes)
    return metrics


def split_model(model: keras.Model, config: Config, batch_size: int) -> dict[str, str]:
    """Divides a model over this rank's devices; returns rows of the plan. `batch_size`: rows of a step on a rank."""
    from ringtrain import hvd

    # Layers follow each other on devices; columns of one layer are on all of them.
    options = config.model
    layers = options.num_devices if "layers" in options.split else 1
    columns = options.num_devices if "columns" in options.split else 1
    try:
        stages = hvd.split(model, layers, options.micro_batches, columns)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None
    # What each device holds, as the user has to see whether it fits.
    rows = {"micro-batches": f"{options.micro_batches} of {batch_size / options.micro_batches:g} rows"}
    for number, (device, (num_bytes, names)) in enumerate(hvd.columns_of(model).items(), start=1):
        rows[f"part {number}"] = f"on {device}: weights {num_bytes / 1e6:.3g} MB of {', '.join(names)}"
    if len(stages) == 1:
        return rows
    for number, stage in enumerate(stages, start=1):
        weights, outputs = stage.bytes_of()
        where = f"{stage.layers[0].name} to {stage.layers[-1].name} on {stage.device}"
        rows[f"stage {number}"] = f"{where}: weights {weights / 1e6:.3g} MB, outputs {outputs / 1e3:.3g} kB per row"
    return rows


def _check_split_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ConfigError for an optimizer whose updates need whole weights, for a model that is split by columns."""
    from ringtrain import hvd

    # hvd knows no options: the error of its function gets the option's name here.
    try:
        hvd.refuse_optimizer(optimizer)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def _check_own_fit(model: keras.Model, config: Config) -> None:
    """Raises ConfigError for a model that prepares its data in a `fit` of its own, which is not called here."""
    import keras

    # The loop calls train_step: data that only this `fit` prepares would never reach it.
    if type(model).fit is not keras.Model.fit:
        raise ConfigError(
            f"model.name: {config.model.name} returns a {type(model).__name__}, which has a fit of its own: train it"
            f" by ringtrain.fit, or put its changes into train_step"
        )


def _refuse_options_of_compile(config: Config) -> None:
    """Raises ConfigError for options that a model which its function has compiled does not take."""
    for option, value in changed_options(config).items():
        if option.startswith(("optimizer.", "schedule.", "model.loss", "model.metrics", "model.label_smoothing")):
            raise ConfigError(
                f"{option}: got {value}, but {config.model.name} returns a compiled model: compile it there with that,"
                " or leave it uncompiled"
            )


# ---- data ---------------------------------------------------------------------------------------------------------


def data_of(config: Config, found: data.DataSet | data.FitArguments, rows: int) -> data.DataSet:
    """Training and test data of the configuration, in steps of `rows` rows; raises ConfigError and DataError."""
    import keras
    import tensorflow as tf

    from ringtrain.training.rows import errors_named

    data_set = _data_set(config, found, rows)
    train = data_set.train
    # A row is read only where it matters: a damaged first file is reported when it is trained.
    if combinations.problem(config, DEFAULTS, [combinations.OTHER_ROWS]):
        leaves = []
        with errors_named(config.data.name):
            if isinstance(train, data.NumberedRows):
                leaves = keras.tree.flatten(train.rows(0, 1))
        if not leaves or not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
            combinations.check(config, DEFAULTS, [combinations.OTHER_ROWS])
    return data_set


def _data_set(config: Config, found: data.DataSet | data.FitArguments, rows: int) -> data.DataSet:
    if isinstance(found, data.DataSet):
        return dataclasses.replace(found, train=_first(config, found.train), test=_first(config, found.test))
    name = config.data.name
    if config.model.loss == models.OF_CLASSES and not config.data.num_classes and ":" not in config.model.name:
        raise ConfigError(
            f"data.num_classes: expected the number of classes of {name}, for the outputs of {config.model.name}"
        )
    from ringtrain.training.rows import errors_named  # loads TensorFlow

    with errors_named(name):
        try:
            train, test = data.splits_of(found, rows)
            if isinstance(train, data.NumberedRows) and found.steps_per_epoch:
                raise DataError("got steps_per_epoch with arrays: leave it out")
            train, test = _first(config, train), _first(config, test)
            shape, num_targets = data.shapes_of(train)
        except ValueError as error:  # of Keras, such as different numbers of rows, or text
            raise DataError(f"{name}: {' '.join(str(error).split())}") from error
    return data.DataSet(train, test, config.data.num_classes or num_targets, shape)


def _first(config: Config, split: Any) -> Any:
    """The first data.max_samples rows of a split, if there is such a limit."""
    most = config.data.max_samples
    if not most or isinstance(split, data.NoSamples):
        return split
    if not isinstance(split, data.NumberedRows):
        raise DataError("data.max_samples: the data bring their own batches: leave it out")
    return split.first(most)
