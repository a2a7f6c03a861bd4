"""`ringtrain.fit`: a script's model, data and arguments of Keras' `fit`, on the main path of train.py.

Not named `fit`, since a module of that name would replace the function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain import config_io, data, own_fit, sources, strategies
from ringtrain.config import Config, changed_options, with_values
from ringtrain.errors import ConfigError, RingtrainError
from ringtrain.monitor import journal
from ringtrain.protocol.for_script import ForScript
from ringtrain.run.context import classes_of

if TYPE_CHECKING:
    import keras

STRATEGIES = ("ring", "mpi-ring")
_ended: set[Path] = set()
"""Folders of the runs that this process has ended."""
REFUSED = {
    "BackupAndRestore": "name= saves and resumes, on all ranks together",
    "OrbaxCheckpoint": "it does not write for several processes here; name= saves and resumes",
}
ARGUMENTS = {
    "run.name": "name",
    "run.resume": "resume",
    "train.epochs": "epochs",
    "train.batch_size": "batch_size",
}
"""Options that are arguments of `fit`."""
OPTION = re.compile(r"--([a-z]+)\.([a-z_-]+)")


def fit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
    *,
    name: str = "",
    batch_per_rank: bool = False,
    seed: int = 0,
    resume: str = "auto",
    options: Config | Mapping[str, Any] | None = None,
) -> keras.callbacks.History:
    """Trains a compiled model on all ranks, as `model.fit` does on one.

    The same call gives the same model on any number of ranks, up to rounding: a step trains `batch_size` rows in all,
    of which each rank has a part, and the last, smaller batch of an epoch is trained, too. Weights, `class_weight` and
    masks count as in one process. Metrics are those of all rows, in History and for callbacks.

    Every rank calls it, with the same data; rank 0's weights are used. The run has a folder with its metrics,
    checkpoints and summary.json, `history.run`. A run that is started again under the same name resumes after its last
    checkpoint, also in the middle of an epoch. SIGTERM, SIGINT and SIGUSR1 save and end all ranks together.

    Args:
        model: Compiled model, with any loss. It may be unbuilt.
        x, y, sample_weight: Arrays with the rows first, or nests of them: NumPy, tensors, pandas, sparse or ragged. Or
            x gives batches, the same on all ranks, of which each is a step of all ranks together: a `tf.data.Dataset`,
            a `keras.utils.PyDataset`, or a generator. Or x is a function (rank, number of ranks) that returns such
            batches for this rank alone; a step is then one batch of each rank, all with the same number of rows.
            `ringtrain.from_rank_0(batches)` gives all ranks those that rank 0 reads.
        name: Folder of the run in `runs`. It stands for one training: other data, layers, loss, metrics or optimizer
            are refused. "": its time, so that nothing is resumed.
        batch_size: Rows of a step on all ranks. None: 32. With `batch_per_rank`: on each rank.
        epochs: Passes over the data, including those before a resume and `initial_epoch`.
        verbose: 0 prints nothing; 1, 2 and "auto" a line per epoch and every 10 s.
        callbacks: Keras callbacks, which run on every rank; those that write files (ModelCheckpoint, CSVLogger,
            TensorBoard, RemoteMonitor) on rank 0 only. Numbers, arrays and variables that they keep are saved.
        validation_data: (x, y) or (x, y, sample_weight), evaluated after each epoch: metrics val_...
        shuffle: Whether every epoch has another order, which `seed` and the epoch determine.
        class_weight: Weight by class, for one output.
        initial_epoch: Number of the first epoch, from 0, if there is no checkpoint to resume from, which decides.
        steps_per_epoch: Batches of an epoch, for generators and data without an end. All epochs are one iteration. With
            arrays a divisor of their number of batches, or so few that all epochs are within one pass.
        seed: Of the order and, on the other ranks than rank 0, of dropout.
        resume: "auto", "must" (fail without a checkpoint), or "never".
        options: Further options, such as `{"checkpoint.every_steps": 100}` or the same as a `Config`.
        validation_split, validation_steps, validation_batch_size, validation_freq: As in `keras.Model.fit`.

    Returns:
        History of all epochs; `history.run` is the run's folder, `history.checksum` that of weights and optimizer.

    Raises:
        RingtrainError: On every rank: data or arguments that cannot be trained, ranks that differ, a non-finite loss.
        SystemExit, KeyboardInterrupt: The run was ended by a signal, after it was saved.

    Example:
        >>> model.compile("adam", "mse")
        >>> history = ringtrain.fit(model, x, y, name="first", batch_size=64, epochs=10, validation_split=0.1)
        >>> history.history["val_loss"][-1], history.run
    """
    import keras

    # One object with all arguments, as other ways to call it (own_fit, the configuration) make the same.
    epochs, steps_per_epoch = within_limits_of_keras(epochs, steps_per_epoch)
    arguments = data.FitArguments(
        x=x,
        y=y,
        batch_size=batch_size,
        epochs=epochs,
        verbose=verbose,
        callbacks=sources.callbacks_in(callbacks),
        validation_split=validation_split,
        validation_data=validation_data,
        shuffle=shuffle,
        class_weight=class_weight,
        sample_weight=sample_weight,
        initial_epoch=initial_epoch,
        steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps,
        validation_batch_size=validation_batch_size,
        validation_freq=validation_freq,
        batch_per_rank=batch_per_rank,
        seed=seed,
        resume=resume,
    )
    # Errors name what the script has written: an argument, not an option of the command line.
    try:
        with in_words_of_a_script():
            settings = options_of("ringtrain.fit", options)
            # KerasHub's tasks turn texts or images into arrays in a fit of their own, which ends in Keras'.
            if type(model).fit is not keras.Model.fit:
                return own_fit.through(model, arguments, lambda given: _fit(model, name, settings, given))
            return _fit(model, name, settings, arguments)
    except RingtrainError as error:
        # Its text says all: frames of ringtrain would only hide the script's line.
        is_filtered = keras.config.is_traceback_filtering_enabled()
        raise error.with_traceback(None if is_filtered else error.__traceback__)  # noqa: B904


def within_limits_of_keras(epochs: int, steps_per_epoch: int | None) -> tuple[int, int | None]:
    """Epochs and steps of an epoch up to `keras.config.max_epochs` and `max_steps_per_epoch`."""
    import keras

    # A person sets them to try out a script, whichever fit it calls.
    limit = keras.config.max_epochs()
    if limit and limit < epochs:
        warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
        epochs = limit
    limit = keras.config.max_steps_per_epoch()
    if limit and (steps_per_epoch is None or limit < steps_per_epoch):
        warnings.warn(f"Limiting steps_per_epoch to {limit}", stacklevel=3)
        steps_per_epoch = limit
    return epochs, steps_per_epoch


def options_of(door: str, options: Config | Mapping[str, Any] | None) -> Config:
    """Configuration of the options of a script, which may be dotted or in sections."""
    # A Config was checked when it was made; a dict has the names of the command line.
    if isinstance(options, Config):
        return options
    # Other types, such as a list of words, would end in an error that names neither the function nor the argument.
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            f"{door}: got {type(options).__name__} for options, expected a ringtrain.config.Config, or a dict such as"
            ' {"checkpoint.every_steps": 100}'
        )
    return config_io.from_tables(options or {}, f"{door}: options")


@contextlib.contextmanager
def in_words_of_a_script() -> Iterator[None]:
    """Context in which errors name arguments instead of options of the command line."""
    # The same error with another text, so that its class and its traceback stay.
    try:
        yield
    except RingtrainError as error:
        error.args = (OPTION.sub(lambda option: _argument(option[1], option[2]), str(error)), *error.args[1:])
        raise


def _argument(section: str, key: str) -> str:
    name = f"{section}.{key.replace('-', '_')}"
    return ARGUMENTS.get(name, f"{name} in options")


def start(options: Config | Mapping[str, Any] | None = None, num_devices: int = 1) -> None:
    """Starts Horovod and pins this rank's GPU. Call it on hosts with several GPUs, before the model is built.

    Without it, `fit` starts Horovod itself, when TensorFlow has already placed the model on a device.

    Args:
        options: The same as for `fit`.
        num_devices: GPUs of this rank, or logical CPUs without GPUs, for a model that `hvd.split` divides.
    """
    # As in train.setup: Horovod reads its settings when it starts, and TensorFlow takes a GPU at its first use.
    config = options_of("ringtrain.start", options)
    strategies.prepare(config)
    from ringtrain import hvd
    from ringtrain.run import devices

    hvd.configure(config.hvd)
    hvd.elastic.listen()
    hvd.init()
    devices.pin_script(config.device, num_devices, one_thread=config.train.virtual_ranks > 0)


def _fit(model: keras.Model, name: str, options: Config, arguments: data.FitArguments) -> keras.callbacks.History:
    """Trains a compiled model on this rank together with the others."""
    arguments = data.with_batch_sizes(arguments)
    # A command such as ringtrain prove starts the script as it is, and wants a few steps of it.
    from_command = ForScript.from_environment()
    if from_command.steps:
        arguments = _short(model, arguments, from_command)
    # Options first: which library the ranks talk by is decided before ringtrain.hvd is imported.
    config = _config(model, name, options, arguments)
    strategies.prepare(config)
    from ringtrain import hvd, train
    from ringtrain.run import resume
    from ringtrain.sources import script, script_model

    # A rank that joins runs the script from its beginning, with the others in the middle of this call.
    if hvd.elastic.is_on() and hvd.process.PROCESS.num_runs:
        raise ConfigError(
            "ringtrain.fit: a second call in an elastic job, in which a rank that joins would begin with the first one:"
            " give each call a script of its own, or leave out --elastic"
        )
    # Runs in a command's folder have names, so that a repeated start of the script resumes them.
    if from_command.folder and not name:
        config = with_values(config, {"run.name": f"fit-{hvd.process.PROCESS.num_runs + 1}"})
    if from_command.observer:
        observe = config_io.imported("observer", from_command.observer)
        arguments = dataclasses.replace(arguments, callbacks=[*arguments.callbacks, observe(config.run.name)])
    # The main path of train.py, with the script as its source. The model is the script's own: what a run adds to it,
    # such as the reduction of its optimizer, is removed again, also after an error.
    source = script.ScriptSource(config, model, arguments)
    run = train.setup(config, source, None, journal.Stages())
    may_be_compiled = not hvd.ranks_reduce() and not run.strategy.shares_state and not config.train.jit
    with script_model.unchanged_afterwards(model, may_be_compiled=may_be_compiled), train.journaled(run):
        summary, exit_code = train.to_the_end(run)
    # A signal has ended all ranks after the same step; the script must not go on as if training were complete. A later
    # one ends it, too, now that the run is complete.
    end_by_signal(exit_code or run.signals.exit_code)
    # The script gets what `model.fit` returns, and in addition where the run is and what was verified.
    history: Any = source.history
    history.run = run.folder
    if run.is_complete:
        # A run that was complete: the script gets its model and history, as if it had trained now.
        if history.run.resolve() in _ended and hvd.rank() == 0:
            text = "is complete, this call has trained nothing: raise epochs, or give fit another name"
            print(f"ringtrain: {history.run} {text}", file=sys.stderr, flush=True)
        resume.restore_result(model, history.run, summary)
        script.restore_callbacks(arguments.callbacks, history, history.run)
        model.history, model.stop_training = history, bool(summary["stopped_by"])
    _ended.add(history.run.resolve())
    history.checksum = summary["checksum"]
    return history


def _short(model: keras.Model, arguments: data.FitArguments, from_command: ForScript) -> data.FitArguments:
    """Arguments of a call that a command makes short, and that resumes when the script is started again."""
    # The command counts steps, and Keras trains whole calls of several.
    per_call = model.steps_per_execution
    max_steps = max(1, from_command.steps // per_call) * per_call
    values: dict[str, Any] = {"max_steps": max_steps, "resume": "auto"}
    if arguments.steps_per_epoch:
        values["steps_per_epoch"] = min(arguments.steps_per_epoch, max_steps)
    values["epochs"] = min(arguments.epochs, arguments.initial_epoch + from_command.epochs)
    if arguments.batch_per_rank and from_command.ranks:  # as many rows on any number of ranks
        values |= {"batch_size": (arguments.batch_size or 32) * from_command.ranks, "batch_per_rank": False}
    return dataclasses.replace(arguments, **values)


def end_by_signal(exit_code: int) -> None:
    """Raises KeyboardInterrupt or SystemExit if a signal has ended the run."""
    # As where no run handles signals: SIGINT interrupts the script, which may catch that, and others end it.
    if exit_code == 128 + signal.SIGINT:
        sys.excepthook = functools.partial(_print_uncaught, sys.excepthook)
        raise KeyboardInterrupt
    if exit_code:
        raise SystemExit(exit_code)


def _print_uncaught(before: Callable[..., Any], kind: type[BaseException], *error: Any) -> None:
    """Prints no traceback of a run that Ctrl-C has ended: where it stands has been printed."""
    if not issubclass(kind, KeyboardInterrupt):
        before(kind, *error)


def _config(model: keras.Model, name: str, options: Config, arguments: data.FitArguments) -> Config:
    """Configuration that describes the script's job; raises ConfigError for what `fit` cannot do."""
    # The model: it keeps loss, metrics and optimizer, and one rank has one copy of it.
    if not getattr(model, "compiled", False):
        raise ConfigError("ringtrain.fit: the model is not compiled: call model.compile(optimizer, loss) first")
    strategy = model.distribute_strategy
    num_devices = strategy.num_replicas_in_sync
    if num_devices > 1 or model._distribute_strategy is not None:
        raise ConfigError(
            f"ringtrain.fit: the model is in the scope of a {type(strategy).__name__} (devices: {num_devices}): leave"
            " the strategy out, and start a rank for each device, by ringtrain launch"
        )
    # Options of the run alone. Those of data, model and training would contradict the script without a word.
    from_command = ForScript.from_environment()
    for option in (*changed_options(options), *from_command.options):
        if not option.startswith(sources.OPTIONS):
            allowed = ", ".join(sources.OPTIONS).replace(".,", ".*,")  # such as checkpoint.*
            raise ConfigError(
                f"ringtrain.fit: options set {option}, which is an argument of fit or the script's own here: expected"
                f" only {allowed}"
            )
    # Other strategies need a model that is made in their scope.
    if options.strategy.name not in STRATEGIES:
        raise ConfigError(f"ringtrain.fit: got strategy.name {options.strategy.name}, expected ring or mpi-ring")
    # Arguments that Keras would find wrong on each rank by itself; callbacks whose work the run does for all ranks.
    for argument in ("batch_size", "epochs", "steps_per_epoch", "validation_steps", "validation_batch_size"):
        number = getattr(arguments, argument)
        if number is not None and number < 1:
            raise ConfigError(f"ringtrain.fit: got {argument} {number}, expected at least 1")
    if not 0 <= arguments.initial_epoch < arguments.epochs:
        raise ConfigError(
            f"ringtrain.fit: got initial_epoch {arguments.initial_epoch} with epochs {arguments.epochs}, which include"
            f" those before it: expected 0 to {arguments.epochs - 1}"
        )
    # These would write and resume on each rank by itself, beside the run that does it for all.
    for callback in arguments.callbacks:
        why = next((REFUSED[name] for name in classes_of(callback) if name in REFUSED), "")
        if why:
            raise ConfigError(f"ringtrain.fit: leave out {type(callback).__name__}: {why}")
    # What is known before the data are read; `sources.script.adopt` adds sizes and learning rate. A command that has
    # started the script, such as a tuning, decides last; its runs are not copied to a mirror.
    of_command: dict[str, Any] = {}
    if from_command.folder:  # its trials are not mixed with the script's own runs
        of_command["run.directory"] = from_command.folder
        of_command["run.mirror"] = ""
    return with_values(
        options,
        {
            "run.name": name,
            "run.resume": arguments.resume,
            "data.name": "arrays",
            "model.name": type(model).__name__,
            "optimizer.learning_rate_scaling": "none",
            "train.epochs": arguments.epochs,
            "seed": arguments.seed,
            **of_command,
            **from_command.options,
        },
    )
