"""Resumes a run: finds the newest checkpoint, compares what it has in common with the run, and restores its state.

The position in the run follows from the global step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from ringtrain import hvd
from ringtrain.checkpoint import callback_state, checkpoint, model_state, run_folder
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config
from ringtrain.errors import CheckpointError, ConfigError
from ringtrain.protocol.attempt import Attempt
from ringtrain.training import console, identity
from ringtrain.training.clock import Start

if TYPE_CHECKING:
    from ringtrain.training.run import Job, Run


def started_again(config: Config, attempt: Attempt) -> Config:
    """Returns the configuration of a restarted run, which resumes in its own folder."""
    name = config.run.name or attempt.run_name
    checkpoints = Path(config.run.directory) / name / "checkpoints"
    resume = config.run.resume
    if attempt.number and name and checkpoint.saved_in(checkpoints):
        resume = "auto"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name, resume=resume))


def restore(run: Run) -> tuple[Start, Mapping[str, Any]]:
    """Restores the newest checkpoint, if there is one; returns the start, and summary.json of a complete run."""
    config, job, numbers = run.config, run.job, run.job.numbers

    # From rank 0's disk: the ranks need no common one.
    def find() -> tuple[checkpoint.Checkpoint | None, Start]:
        if hvd.rank():
            return None, Start()
        newest, start = _find(config)
        if newest is not None:
            common = identity.in_common(config, numbers, job.checksums, job.of_name)
            identity.require_same(newest, common, config, numbers)
        elif config.run.resume != "never":  # with that, an existing folder is refused later
            run_folder.look_for_lost_checkpoints(run.lock.folder, numbers.num_steps)
        return newest, start

    newest, start = hvd.run_together(find)
    start = hvd.broadcast_object(start, 0, name="ringtrain_start")
    metrics_state = model_state.restore(job.model, newest, config.seed)
    start = _at_initial_epoch(dataclasses.replace(start, metrics_state=metrics_state), numbers)
    job.numbers = dataclasses.replace(numbers, initial_epoch=start.initial_epoch)  # as checkpoints keep it
    summary = complete_summary(run, start, start.global_step >= numbers.num_steps)
    if summary:  # a script may go on with the same data
        num_epochs, num_steps = divmod(start.global_step, numbers.steps_per_epoch)
        job.pass_over(start.initial_epoch, num_epochs + bool(num_steps), was_stopped=num_steps > 0)
    return _with_frozen_layers(job, start, is_complete=bool(summary)), summary


def _find(config: Config) -> tuple[checkpoint.Checkpoint | None, Start]:
    """Returns the newest valid checkpoint of a run and the position in it; without one, None and the beginning."""
    if config.run.resume == "must" and not config.run.name:
        raise ConfigError("resume: got must, which needs the name of the run to resume: give --run.name as well")
    if config.run.resume == "never" or not config.run.name:
        return None, Start()
    folder = Path(config.run.directory) / config.run.name
    newest, start = _newest(folder)
    if newest is None and config.run.resume == "must":
        raise CheckpointError(f"{folder}: no checkpoint here")
    return newest, start


def _newest(folder: Path) -> tuple[checkpoint.Checkpoint | None, Start]:
    newest, refused = checkpoint.newest(folder / "checkpoints")
    if newest is None and refused:
        raise CheckpointError(f"{folder}: no checkpoint verifies; {'; '.join(refused)}")
    if newest is None:
        return None, Start()
    saved, of_callbacks = newest.manifest, {}
    if saved["callbacks"]:
        arrays = newest.arrays("state")
        of_callbacks = {name: arrays[name] for name in arrays if name.startswith(callback_state.PREFIX)}
    start = Start(
        global_step=newest.global_step,
        source=str(newest.folder),
        metrics=saved["metrics"],
        callbacks=(saved["callbacks"], of_callbacks),
        is_ended=saved["is_ended"],
        refused=tuple(refused),
        initial_epoch=saved["numbers"]["initial_epoch"],
        frozen=saved["frozen"],
        frozen_as_compiled=saved["frozen_as_compiled"],
    )
    return newest, start


def _at_initial_epoch(start: Start, numbers: Numbers) -> Start:
    """Position of a run that begins with a later epoch than 0, unless a checkpoint has another one, which is said."""
    initial, steps = numbers.initial_epoch, numbers.steps_per_epoch
    if not initial:
        return start
    if not start.source:
        return dataclasses.replace(start, global_step=initial * steps, initial_epoch=initial)
    if start.global_step != initial * steps and hvd.rank() == 0:
        epoch = start.global_step // steps
        text = f"{start.source} decides where this run goes on, in epoch {epoch}, counted from 0, instead of"
        print(f"ringtrain: {text} initial_epoch {initial}", file=sys.stderr, flush=True)
    return start


def _with_frozen_layers(job: Job, start: Start, is_complete: bool) -> Start:
    """Freezes the layers that callbacks of the run had frozen; returns its start with those that `compile` found."""
    frozen = model_state.frozen_layers(job.model)
    if start.frozen is not None and start.frozen != frozen:
        if start.frozen_as_compiled != frozen:  # a script that has frozen others since keeps its own
            text = f"was saved with {len(start.frozen)} frozen layers, now there are {len(frozen)}, or other ones"
            if hvd.rank() == 0:
                print(f"ringtrain: {start.source} {text}", file=sys.stderr)
        elif not is_complete:
            model_state.freeze_in_training(job.model, start.frozen)
    return dataclasses.replace(start, frozen_as_compiled=frozen)


def complete_summary(run: Run, start: Start, is_trained: bool) -> Mapping[str, Any]:
    """Summary of a run with nothing left to train or to export, else {}. Collective."""
    folder = run.lock.folder

    def read() -> Mapping[str, Any]:
        if folder is None or Path(start.source).parent != folder / "checkpoints":
            return {}
        summary = run_folder.read_summary(folder)
        # Callbacks decide for good.
        of_script, is_ended = "script" in summary, summary.get("stopped_by") == console.A_CALLBACK
        # It is complete with all its files only; an export that has failed is tried again.
        has_all = "not_exported" not in summary and (folder / "model.keras").exists()
        has_all = has_all or (of_script and (folder / checkpoint.RESULT).exists())
        has_all = has_all and summary.get("global_step") == start.global_step
        if has_all and (is_trained or is_ended):
            return summary
        return {}

    return hvd.on_rank_0(read)


def callbacks_of(folder: Path) -> callback_state.State:
    """Returns the state of the user's callbacks in the newest checkpoint of a run."""
    return _newest(folder)[1].callbacks


def restore_result(model: keras.Model, folder: Path, summary: Mapping[str, Any]) -> None:
    """Gives a model the weights with which a complete run has ended, which callbacks or averages may have set."""

    def load() -> None:
        model_state.assign(model.weights, checkpoint.load_result(folder))
        if "not_exported" in summary or not (folder / "model.keras").exists():  # what failed then is done now
            with contextlib.suppress(CheckpointError, OSError):
                checkpoint.export(model, folder)
                told = {name: value for name, value in summary.items() if name != "not_exported"}
                run_folder.write_summary(folder, told)

    hvd.on_rank_0(load)
    hvd.broadcast_model(model, root_rank=0)
    # Layers that its callbacks have frozen, unless the script has chosen others since.
    if summary.get("frozen_as_compiled") == model_state.frozen_layers(model):
        model_state.freeze(model, summary["frozen"])
