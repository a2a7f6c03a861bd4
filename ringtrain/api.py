"""What a script calls: `ringtrain.fit`, `evaluate`, `predict` and `start`. The work is done by train and training."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain import data, strategies
from ringtrain.config import by_name
from ringtrain.config.sections import Config, with_values
from ringtrain.errors import ConfigError, RingtrainError
from ringtrain.monitor import journal
from ringtrain.protocol.for_script import ForScript
from ringtrain.training import script_options
from ringtrain.training.run import callbacks_in

if TYPE_CHECKING:
    import keras

_ended: set[Path] = set()
"""Folders of the runs that this process has ended."""


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
    epochs, steps_per_epoch = script_options.within_limits_of_keras(epochs, steps_per_epoch)
    arguments = data.FitArguments(
        x=x,
        y=y,
        batch_size=batch_size,
        epochs=epochs,
        verbose=verbose,
        callbacks=callbacks_in(callbacks),
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
        with script_options.in_words_of_a_script():
            settings = script_options.options_of("ringtrain.fit", options)
            # KerasHub's tasks turn texts or images into arrays in a fit of their own, which ends in Keras'.
            if type(model).fit is not keras.Model.fit:
                from ringtrain.training import own_fit

                return own_fit.through(model, arguments, lambda given: _fit(model, name, settings, given))
            return _fit(model, name, settings, arguments)
    except RingtrainError as error:
        # Its text says all: frames of ringtrain would only hide the script's line.
        is_filtered = keras.config.is_traceback_filtering_enabled()
        raise error.with_traceback(None if is_filtered else error.__traceback__)  # noqa: B904


def _fit(model: keras.Model, name: str, options: Config, arguments: data.FitArguments) -> keras.callbacks.History:
    """Trains a compiled model on this rank together with the others."""
    arguments = data.with_batch_sizes(arguments)
    # A command such as ringtrain prove starts the script as it is, and wants a few steps of it.
    from_command = ForScript.from_environment()
    if from_command.steps:
        arguments = script_options.shortened(model, arguments, from_command)
    # Options first: which library the ranks talk by is decided before ringtrain.hvd is imported.
    config = script_options.config_of(model, name, options, arguments)
    strategies.prepare(config)
    from ringtrain import hvd, train
    from ringtrain.training import resume, script, script_model

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
        observe = by_name.imported("observer", from_command.observer)
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
    script_options.end_by_signal(exit_code or run.signals.exit_code)
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


def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
) -> Any:
    """Evaluates a compiled model on all ranks, as `model.evaluate` does on one.

    Each rank evaluates some of the batches that one process has, and the metrics are those of all rows, equal to one
    process up to rounding. Every rank calls it with the same data, and gets the same result. Rank 0's weights are used.

    Args:
        model: Compiled model, as `ringtrain.fit` has left it. One from `runs/<name>/model.keras` needs a `compile`.
        x, y, sample_weight: Data of `keras.Model.evaluate`, the same on all ranks; or what `ringtrain.fit` takes for x:
            `ringtrain.from_rank_0(batches)`, all of which rank 0 evaluates, or a function (rank, number of ranks) that
            returns batches for this rank alone.
        batch_size: Rows of a batch, which one rank evaluates whole. None: 32.
        verbose: 0 prints nothing. Otherwise, rank 0 shows its own batches.
        steps: Batches of all ranks; None: all.
        callbacks: Keras callbacks. They run on every rank with its batches, and `on_test_end` has the metrics of all;
            those that write files run on rank 0 only.
        return_dict: Whether metrics are returned by name.

    Returns:
        Metrics as `model.evaluate` returns them: a number, a list, or with `return_dict` a dict.

    Raises:
        RingtrainError: On every rank: data that differ between ranks, or an error of one rank.

    Example:
        >>> history = ringtrain.fit(model, x, y, epochs=10)
        >>> loss, accuracy = ringtrain.evaluate(model, test_x, test_y)
    """
    given = data.FitArguments(x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps_per_epoch=steps)
    _start_once()
    from ringtrain.training import held_out

    logs = held_out.evaluate(model, given, callbacks, verbose)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Computes a model's outputs on all ranks, as `model.predict` does on one.

    Each rank computes some of the batches that one process has; all of them get all outputs, in the order of the rows.
    Every rank calls it with the same data, and needs memory for several times the outputs. Rank 0's weights are used.

    Args:
        model: Model, as `ringtrain.fit` has left it, or loaded from `runs/<name>/model.keras`.
        x: Data of `keras.Model.predict`, or as for `evaluate`.
        batch_size: Rows of a batch, which one rank computes whole. None: 32.
        verbose: 0 prints nothing. Otherwise, rank 0 shows its own batches.
        steps: Batches of all ranks; None: all.
        callbacks: Keras callbacks. They run on every rank with its batches; those that write files on rank 0 only. If
            one sets `stop_predicting`, the outputs end there.

    Returns:
        Outputs as `model.predict` returns them: arrays, or ragged tensors if their later dimensions differ between
        batches, in the nest that the model returns.

    Raises:
        RingtrainError: On every rank: data that differ between ranks, or an error of one rank.

    Example:
        >>> model = keras.models.load_model("runs/first/model.keras")
        >>> classes = ringtrain.predict(model, test_x).argmax(axis=1)
    """
    given = data.FitArguments(x=x, batch_size=batch_size, steps_per_epoch=steps)
    _start_once()
    from ringtrain.training import held_out

    return held_out.predict(model, given, callbacks, verbose)


def _start_once() -> None:
    """Starts Horovod, if that has not been done."""
    from ringtrain import hvd

    if not hvd.is_initialized():
        start()


def start(options: Config | Mapping[str, Any] | None = None, num_devices: int = 1) -> None:
    """Starts Horovod and pins this rank's GPU. Call it on hosts with several GPUs, before the model is built.

    Without it, `fit` starts Horovod itself, when TensorFlow has already placed the model on a device.

    Args:
        options: The same as for `fit`.
        num_devices: GPUs of this rank, or logical CPUs without GPUs, for a model that `hvd.split` divides.
    """
    # As in train.setup: Horovod reads its settings when it starts, and TensorFlow takes a GPU at its first use.
    config = script_options.options_of("ringtrain.start", options)
    strategies.prepare(config)
    from ringtrain import hvd
    from ringtrain.training import devices

    hvd.configure(config.hvd)
    hvd.elastic.listen()
    hvd.init()
    devices.pin_script(config.device, num_devices, one_thread=config.train.virtual_ranks > 0)
