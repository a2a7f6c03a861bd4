"""Set-up of a run by one rank: the configuration's names, data, and compiled model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringtrain import config_io, data, models
from ringtrain.config import Config, TrainConfig, changed_options
from ringtrain.derived import Numbers, lower_is_better
from ringtrain.errors import ConfigError
from ringtrain.monitor import fault_injection

if TYPE_CHECKING:
    import keras

    from ringtrain.strategies.base import Strategy


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
    names = config.train.callbacks
    functions = [config_io.find("train.callbacks", name, {}) for name in names]

    def make() -> list[keras.callbacks.Callback]:
        import keras

        made = [function() for function in functions]
        for name, callback in zip(names, made, strict=True):
            if not isinstance(callback, keras.callbacks.Callback):
                kind = type(callback).__name__
                raise ConfigError(f"train.callbacks: {name} returned {kind}, expected a Keras callback")
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
    from ringtrain.run import stopping

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
