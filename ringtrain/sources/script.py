"""Data and compiled model of a script that calls `ringtrain.fit`."""

from __future__ import annotations

import dataclasses
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ringtrain import data, hvd
from ringtrain.config import Config, changed_options, with_values
from ringtrain.derived import Numbers
from ringtrain.errors import ConfigError, OutOfSync
from ringtrain.hvd.keras_patches import layers_of
from ringtrain.monitor import fault_injection
from ringtrain.optim.optimizers import first_and_largest_rate
from ringtrain.protocol.cores import num_threads
from ringtrain.protocol.for_script import ForScript
from ringtrain.run import callback_state, consistency, devices, identity, model_state, resume
from ringtrain.run.context import ON_RANK_0, Job, Process, Validation, classes_of, on_rank
from ringtrain.run.devices import Pinning
from ringtrain.run.from_checkpoint import FromCheckpoint
from ringtrain.sources import OPTIONS, script_model
from ringtrain.sources.unlike import own_code
from ringtrain.strategies.base import Strategy

FILES = ("filepath", "filename", "log_dir")
"""attributes of Keras' callbacks with the path of a file or directory that they write"""


class ScriptSource(FromCheckpoint):
    """Model, data and arguments of `ringtrain.fit`; see `run.context.Source`."""

    def __init__(self, config: Config, model: keras.Model, arguments: data.FitArguments) -> None:
        self.model, self.faults = model, fault_injection.parse(config.chaos)
        self.arguments, self.history = arguments, keras.callbacks.History()
        self.is_quiet = arguments.verbose == 0

    def code(self) -> Mapping[str, str]:
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
        if script.is_file():  # not for `python - <own.py`
            return {"script": consistency.checksum_of(script)}
        return {}

    def pin(self, strategy: Strategy) -> Pinning:
        # The script may have used TensorFlow already. A rank that has ended without this call fails it on the others.
        try:
            pinning: Pinning = devices.pin_script(strategy.config.device, one_thread=strategy.shares_state)
        except tf.errors.UnknownError:
            raise OutOfSync(
                f"ringtrain.fit: rank {hvd.rank()} has waited for the others, of which one has exited: every rank must"
                " call it, so it cannot be under a condition such as hvd.rank() == 0; see also that rank's output"
            ) from None
        return pinning

    def read_job(self, process: Process) -> Job:
        job: Job = process.together(lambda: _job(process, self))
        return job


def _job(process: Process, source: ScriptSource) -> Job:
    """The script's data, and its model with a distributed optimizer."""
    # `batch_size` counts the rows of all ranks, so that their number does not change what is trained.
    model, arguments = source.model, source.arguments
    everyone = [*arguments.callbacks, source.history]
    size = process.strategy.num_copies
    if process.strategy.ranks_change:
        _refuse_in_elastic_job(arguments)
    batch_size = arguments.batch_size or data.BATCH_SIZE
    if arguments.batch_per_rank:
        batch_size *= size

    # The data first: the model is built for the shapes of their rows.
    train, test = data.inputs(arguments, batch_size)
    validation = validation_of(arguments, test, batch_size, "val_")
    is_divided = not arguments.batch_per_rank and not (isinstance(train, data.Stream) and train.is_shard)
    if hvd.size() > 1 and is_divided:
        _refuse_stateful(model)

    # The model is the script's own: it is made ready in place, and `unchanged_afterwards` sets it back.
    unlike = script_model.build_for_ranks(process, model, train, batch_size)

    # A stream brings its own batches, which are the steps. Their number of rows is known only if it is the same in all.
    num_train = len(train)
    more = {**train.plan, **script_model.compile_by_xla(process, model, train)}
    if isinstance(test, data.Stream) and test.is_of_rank_0:
        more["validated by"] = f"rank 0 alone, {test.why_rank_0}".removesuffix(", ")
    if isinstance(train, data.Stream):
        more |= _plan_of_stream(train, test)
        batch_size = train.batch_size
        if train.is_shard:
            batch_size *= size
        num_train *= batch_size
        if train.is_shard and size > 1:
            unlike.append("each rank has batches of its own")

    # Numbers and plan follow from what the script has compiled, as those of other runs do from the configuration.
    steps = arguments.steps_per_epoch if isinstance(train, data.NumberedRows) else None
    numbers = adopt(process, model, train.kind, num_train, len(test), batch_size, steps)
    numbers = dataclasses.replace(numbers, initial_epoch=arguments.initial_epoch)
    plan = plan_of(process, model, numbers, train.on_resume, unlike)

    # Files of callbacks: a command starts the script several times, and no start must find those of another.
    folder = ForScript.from_environment().folder
    if folder:
        write_below(Path(folder), arguments.callbacks)

    data_set = data.DataSet(train, test, 0, ())
    checksums, of_name = _checksums(process, model, data_set)
    return Job(
        data_set=data_set,
        numbers=numbers,
        checksums=checksums,
        of_name=of_name,
        model=model,
        users_callbacks=on_rank(everyone, hvd.rank()),
        all_callbacks=everyone,
        validation=validation,
        plan={**plan, **more},
        facts={
            "script": sys.argv[0],
            "unlike_one_process": unlike,
            "own_code": own_code(model),
            "on_resume": train.on_resume,
        },
    )


def _plan_of_stream(train: data.Stream, test: data.Split) -> dict[str, str]:
    """Rows of the plan on data that bring their own batches."""
    held_out = f"{len(test):,}"
    if isinstance(test, data.Stream):
        held_out += " batches"
    rows = {"data": f"{train.kind}: {len(train):,} batches to train, {held_out} to validate"}
    if train.is_shard:
        rows["shard"] = f"{train.num_batches} batches of its own on each rank"
    elif train.batch_size == 1:
        rows["global batch"] = "a batch of the data, whose rows are not known before"
        rows["shard"] = "a part of the rows of each batch on each rank"
    return rows


def _checksums(process: Process, model: keras.Model, data_set: data.DataSet) -> tuple[dict[str, str], set[str]]:
    """What all ranks must have in common; names of that part which all runs of one name have in common."""
    # Data. The first batch of a stream to validate need not be the same in every start.
    train, test = data_set.train, data_set.test
    in_words_of_fit = {"training data": "training data", "test data": "validation data"}
    checksums = {}
    for name, text in data.checksums(data_set).items():
        checksums[in_words_of_fit[name] + consistency.DIVIDED] = text
    if process.config.train.virtual_ranks:  # equal bits need the same instructions, and as many threads
        checksums |= devices.of_kernels(process.pinning)
        checksums["number of threads"] = str(num_threads(tf.config.threading.get_intra_op_parallelism_threads()))
    of_name = {*checksums}
    if isinstance(test, data.Stream):
        of_name.remove(f"validation data{consistency.DIVIDED}")

    # Losses, metrics and optimizers; of an endless stream the length of a call, as an epoch's last one is whole, too.
    compiled = identity.of_script(model)
    if isinstance(train, data.NumberedRows):
        compiled["shuffle"] = str(train.shuffle)
    if isinstance(train, data.Stream) and train.is_endless:
        compiled["steps_per_execution"] = str(model.steps_per_execution)
    if isinstance(train, data.Stream) and not train.is_shard:
        content = identity.content_of(train.dataset)
        if content:
            compiled[f"content of the training data{consistency.DIVIDED}"] = content
    of_name |= compiled.keys()

    # A resume compares shapes by itself, one by one, and names the first that differs.
    checksums |= compiled
    checksums["model"] = checksum_of_shapes(model_state.shapes_of(model.weights))
    return checksums, of_name


def _refuse_in_elastic_job(arguments: data.FitArguments) -> None:
    # Ranks that join would wait in collectives which the others have behind them.
    of_horovod = {"BroadcastGlobalVariablesCallback", "MetricAverageCallback"}
    if any(classes_of(callback) & of_horovod for callback in arguments.callbacks):
        raise ConfigError(f"ringtrain.fit: in an elastic job, leave out {' and '.join(sorted(of_horovod))}")
    # The run's numbers must not depend on the number of ranks, which changes.
    if arguments.batch_per_rank:
        raise ConfigError("ringtrain.fit: batch_per_rank in an elastic job: give the batch_size of all ranks together")
    if arguments.initial_epoch:
        raise ConfigError("ringtrain.fit: initial_epoch in an elastic job: give the number of epochs that are left")


def _refuse_stateful(model: keras.Model) -> None:
    """Raises ConfigError for a layer that keeps a state for each row of a batch, of which ranks have parts."""
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ConfigError(
                f"ringtrain.fit: layer {layer.name} is stateful, with a state for each row of a whole batch, and a rank"
                " trains a part of the rows: build the model for the rows of one rank, and pass batch_per_rank=True"
            )


def write_below(folder: Path, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Moves the files that Keras' callbacks write into a directory: another start of the script may write them, too."""
    # Of Keras' callbacks, those of rank 0 write files. A path that leads upwards must not leave the folder.
    for callback in callbacks:
        for attribute in FILES:
            path = vars(callback).get(attribute)
            if (
                not classes_of(callback) & {*ON_RANK_0}
                or not isinstance(path, str)
                or Path(path).is_relative_to(folder)
            ):
                continue
            parts = [part for part in Path(path).parts if part not in ("..", Path(path).anchor)]
            moved = Path(folder, *parts)
            moved.parent.mkdir(parents=True, exist_ok=True)
            setattr(callback, attribute, str(moved))


def checksum_of_shapes(shapes: list[list[Any]]) -> str:
    """Checksum of the weights' shapes and dtypes; their names depend on earlier models of the process."""
    return f"with {len(shapes)} weights and checksum {zlib.crc32(str([one[1:] for one in shapes]).encode()):08x}"


def adopt(
    process: Process,
    model: keras.Model,
    data_name: str,
    num_train: int,
    num_test: int,
    batch_size: int,
    steps_per_epoch: int | None = None,
) -> Numbers:
    """Writes what a script has compiled into the configuration; returns the numbers of its run.

    Args:
        batch_size: Rows of a step on all ranks.
    """
    # Elastic ranks share one global batch however many they are: its numbers are those of one rank.
    used = identity.used_optimizers(model)
    num_ranks = process.strategy.num_copies
    names, per_rank = ", ".join(type(one).__name__ for one in used), math.ceil(batch_size / num_ranks)
    steps, accumulated = math.ceil(num_train / batch_size), used[0].gradient_accumulation_steps or 1
    steps = min(steps, steps_per_epoch or steps)
    first_rate, rate = first_and_largest_rate(used[0])
    # The summary and the report show the configuration: it says what was trained, and not its own defaults.
    values = {"data.name": data_name, "optimizer.name": names, "train.batch_size": per_rank}
    if rate > 0:  # 0 is no value of the option, but a callback may set the rate later
        values["optimizer.learning_rate"] = rate
    process.config = with_values(process.config, values)
    return Numbers(
        num_ranks=num_ranks,
        num_train=num_train,
        num_test=num_test,
        batch_size=per_rank,
        accumulation_steps=accumulated,
        global_batch_size=batch_size * accumulated,
        steps_per_epoch=steps,
        num_steps=steps * process.config.train.epochs,
        learning_rate=rate,
        initial_learning_rate=first_rate,
        warmup_steps=0,
        milestone_steps=(),
    )


def plan_of(
    process: Process, model: keras.Model, numbers: Numbers, on_resume: str, unlike: Sequence[str] = ()
) -> dict[str, str]:
    """Rows of the plan for what a script has compiled."""
    config, options = process.config, process.config.optimizer
    # Each option that a command has chosen is named with it, as the script says otherwise.
    given = {name: value for name, value in changed_options(config).items() if name.startswith(OPTIONS)}
    named = ", ".join(f"{name}={value}" for name, value in given.items()) or "defaults"
    from_command = ForScript.from_environment()
    for name in from_command.options:
        if name in given:
            named += f" ({name} from {from_command.by})"
    rows = f"{numbers.samples_per_step:,} rows on all ranks"
    if numbers.accumulation_steps > 1:
        rows += f" x {numbers.accumulation_steps} accumulated"
    plan = {
        "data": f"{config.data.name}: {numbers.num_train:,} to train, {numbers.num_test:,} to validate",
        "on resume": on_resume,
        "model": f"{config.model.name} {model.name}, {model.count_params():,} parameters",
        "global batch": rows,
        "options": named,
    }
    if from_command.trial:
        trial = ", ".join(f"{name}={value}" for name, value in from_command.trial.items())
        plan["trial"] = f"{trial} (from {from_command.by})"
    plan["learning rate"] = f"{numbers.rates} ({options.name}, as compiled)"
    plan["shard"] = shard_of(numbers)
    if unlike:
        plan["unlike 1 rank"] = "; ".join(unlike)
    own = own_code(model)
    if own and hvd.size() > 1:
        plan["own code"] = "; ".join(own)
    return plan


def shard_of(numbers: Numbers) -> str:
    """Row of the plan on the rows that one rank trains."""
    n = numbers
    return f"up to {n.batch_size} of {n.samples_per_step} rows of a step on each rank, the last batch included"


def restore_callbacks(callbacks: Sequence[Any], history: keras.callbacks.History, folder: Path) -> None:
    """Gives a script's callbacks and History what they had at the end of a run that was complete. Collective."""
    states, arrays = hvd.on_rank_0(lambda: resume.callbacks_of(folder))
    callback_state.restore_callbacks(on_rank(callbacks, hvd.rank()), (states[:-1], arrays))
    callback_state.restore_callbacks([history], (states[-1:], arrays))


def validation_of(given: data.FitArguments, test: data.Split, batch_size: int, prefix: str) -> Validation:
    """Returns the evaluation that arguments of `fit` describe; `batch_size`: rows of a training step on all ranks."""
    if isinstance(test, data.Stream):
        evaluated = 1
    else:
        evaluated = given.validation_batch_size or batch_size
    # Keras' argument is a number of epochs or a list of them; a run has the epochs themselves, or None for all.
    freq = given.validation_freq
    if not isinstance(freq, int):
        return Validation(prefix, evaluated, freq)
    if freq == 1:
        return Validation(prefix, evaluated)
    return Validation(prefix, evaluated, range(freq, given.epochs + 1, freq))
