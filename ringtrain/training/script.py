"""Data and compiled model of a script that calls `ringtrain.fit`."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ringtrain import data, hvd
from ringtrain.checkpoint import callback_state
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import OF_SCRIPT, Config, changed_options, with_values
from ringtrain.errors import OutOfSync
from ringtrain.monitor import fault_injection
from ringtrain.optim.optimizers import first_and_largest_rate
from ringtrain.protocol.for_script import ForScript
from ringtrain.training import agreement, devices, identity, resume
from ringtrain.training.devices import Pinning
from ringtrain.training.job import job_of
from ringtrain.training.run import ON_RANK_0, Job, Run, classes_of, on_rank
from ringtrain.training.run_files import FromCheckpoint

if TYPE_CHECKING:
    from ringtrain.strategies.base import Strategy

FILES = ("filepath", "filename", "log_dir")
"""attributes of Keras' callbacks with the path of a file or directory that they write"""


class ScriptSource(FromCheckpoint):
    """Model, data and arguments of `ringtrain.fit`; see `training.run.Source`."""

    def __init__(self, config: Config, model: keras.Model, arguments: data.FitArguments) -> None:
        self.model, self.faults = model, fault_injection.parse(config.chaos)
        self.arguments, self.history = arguments, keras.callbacks.History()
        self.is_quiet = arguments.verbose == 0

    def code(self) -> Mapping[str, str]:
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
        if script.is_file():  # not for `python - <own.py`
            return {"script": agreement.checksum_of(script)}
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

    def read_job(self, run: Run) -> Job:
        job: Job = run.strategy.together(lambda: _job(run, self))
        return job


def _job(run: Run, source: ScriptSource) -> Job:
    """The script's data, and its model with a distributed optimizer."""
    # `batch_size` counts the rows of all ranks, so that their number does not change what is trained.
    model, arguments = source.model, source.arguments
    batch_size = arguments.batch_size or data.BATCH_SIZE
    if arguments.batch_per_rank:
        batch_size *= run.strategy.num_copies
    train, test = data.splits_of(arguments, batch_size)

    # Numbers and plan follow from what the script has compiled, as those of other runs do from the configuration.
    def numbers_of(num_rows: int, rows_per_step: int) -> Numbers:
        steps = arguments.steps_per_epoch if isinstance(train, data.NumberedRows) else None
        numbers = adopt(run, model, train.kind, num_rows, len(test), rows_per_step, steps)
        return dataclasses.replace(numbers, initial_epoch=arguments.initial_epoch)

    everyone = dataclasses.replace(arguments, callbacks=[*arguments.callbacks, source.history])
    job = job_of(run, model, everyone, data.DataSet(train, test, 0, ()), batch_size, "val_", numbers_of)
    job.plan = {**plan_of(run, model, job.numbers), **job.plan}
    job.facts["script"] = sys.argv[0]

    # Files of callbacks: a command starts the script several times, and no start must find those of another.
    folder = ForScript.from_environment().folder
    if folder:
        write_below(Path(folder), arguments.callbacks)
    return job


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


def adopt(
    run: Run,
    model: keras.Model,
    data_name: str,
    num_train: int,
    num_test: int,
    batch_size: int,  # rows of a step on all ranks
    steps_per_epoch: int | None = None,
) -> Numbers:
    """Writes what a script has compiled into the configuration; returns the numbers of its run."""
    # Elastic ranks share one global batch however many they are: its numbers are those of one rank.
    used = identity.used_optimizers(model)
    num_ranks = run.strategy.num_copies
    names, per_rank = ", ".join(type(one).__name__ for one in used), math.ceil(batch_size / num_ranks)
    steps, accumulated = math.ceil(num_train / batch_size), used[0].gradient_accumulation_steps or 1
    steps = min(steps, steps_per_epoch or steps)
    first_rate, rate = first_and_largest_rate(used[0])
    # The summary and the report show the configuration: it says what was trained, and not its own defaults.
    values = {"data.name": data_name, "optimizer.name": names, "train.batch_size": per_rank}
    if rate > 0:  # 0 is no value of the option, but a callback may set the rate later
        values["optimizer.learning_rate"] = rate
    run.config = with_values(run.config, values)
    return Numbers(
        num_ranks=num_ranks,
        num_train=num_train,
        num_test=num_test,
        batch_size=per_rank,
        accumulation_steps=accumulated,
        global_batch_size=batch_size * accumulated,
        steps_per_epoch=steps,
        num_steps=steps * run.config.train.epochs,
        learning_rate=rate,
        initial_learning_rate=first_rate,
        warmup_steps=0,
        milestone_steps=(),
    )


def plan_of(run: Run, model: keras.Model, numbers: Numbers) -> dict[str, str]:
    """Rows of the plan for what a script has compiled."""
    config, options = run.config, run.config.optimizer
    # Each option that a command has chosen is named with it, as the script says otherwise.
    given = {name: value for name, value in changed_options(config).items() if name.startswith(OF_SCRIPT)}
    named = ", ".join(f"{name}={value}" for name, value in given.items()) or "defaults"
    from_command = ForScript.from_environment()
    for name in from_command.options:
        if name in given:
            named += f" ({name} from {from_command.by})"
    rows = f"{numbers.samples_per_step:,} rows on all ranks"
    if numbers.accumulation_steps > 1:
        rows += f" x {numbers.accumulation_steps} accumulated"
    plan = {
        "model": f"{config.model.name} {model.name}, {model.count_params():,} parameters",
        "global batch": rows,
        "options": named,
    }
    if from_command.trial:
        trial = ", ".join(f"{name}={value}" for name, value in from_command.trial.items())
        plan["trial"] = f"{trial} (from {from_command.by})"
    plan["learning rate"] = f"{numbers.rates} ({options.name}, as compiled)"
    return plan


def restore_callbacks(callbacks: Sequence[Any], history: keras.callbacks.History, folder: Path) -> None:
    """Gives a script's callbacks and History what they had at the end of a run that was complete. Collective."""
    states, arrays = hvd.on_rank_0(lambda: resume.callbacks_of(folder))
    callback_state.restore_callbacks(on_rank(callbacks, hvd.rank()), (states[:-1], arrays))
    callback_state.restore_callbacks([history], (states[-1:], arrays))
