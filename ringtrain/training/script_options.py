"""What a call of `ringtrain.fit` asks for, as the configuration of its run, and how the call ends after a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ringtrain import data
from ringtrain.config import files
from ringtrain.config.sections import OF_SCRIPT, Config, changed_options, with_values
from ringtrain.errors import ConfigError, RingtrainError
from ringtrain.protocol.for_script import ForScript
from ringtrain.training.run import classes_of

if TYPE_CHECKING:
    import keras

STRATEGIES = ("ring", "mpi-ring")
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
    return files.from_tables(options or {}, f"{door}: options")


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


def config_of(model: keras.Model, name: str, options: Config, arguments: data.FitArguments) -> Config:
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
        if not option.startswith(OF_SCRIPT):
            allowed = ", ".join(OF_SCRIPT).replace(".,", ".*,")  # such as checkpoint.*
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
    # What is known before the data are read; `training.script.adopt` adds sizes and learning rate. A command that has
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


def shortened(model: keras.Model, arguments: data.FitArguments, from_command: ForScript) -> data.FitArguments:
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
