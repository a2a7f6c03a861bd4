"""Resumes a run: finds the checkpoint, compares its options, and restores it on all ranks together.

The position in the run follows from the global step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
from numpy.typing import NDArray

from ringtrain import hvd
from ringtrain.checkpoint import callback_state, checkpoint, model_state, run_folder
from ringtrain.checkpoint.model_state import Arrays
from ringtrain.config import Config
from ringtrain.derived import Numbers
from ringtrain.errors import CheckpointError, ConfigError
from ringtrain.monitor.journal import Journal
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.status import StatusLine
from ringtrain.run import evaluation, identity


@dataclass(frozen=True)
class Ending:
    """Why training is about to end."""

    stopped_by: str = ""
    """Reason on which the ranks have agreed."""
    requested: str = ""
    """Reason that a rank has given, and on which they agree next."""
    is_ended: bool = False
    """Whether a callback has asked for the end."""
    is_closed: bool = False
    """Whether nothing is saved any more, since the loss is not finite."""


@dataclass(frozen=True)
class Start:
    """Position at which a run starts or resumes."""

    global_step: int = 0
    source: str = ""
    """Checkpoint folder; "": start from scratch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last complete epoch."""
    step_logs: Mapping[str, Any] = field(default_factory=dict)
    """Logs of the last step, if the end of its epoch is to be made up for."""
    is_open: bool = False
    """Whether the end of an epoch is to be made up for: a change of ranks has interrupted it."""
    begun_epoch: int = -1
    """The epoch for which callbacks have seen `on_epoch_begin`, if ranks have changed since."""
    callbacks: callback_state.State = field(default_factory=lambda: ([], {}))
    """State of the callbacks of a script or of train.callbacks."""
    is_ended: bool = False
    """Whether a callback had asked for the end when the checkpoint was saved."""
    ending: Ending = Ending()
    """Of the ranks that trained before a change of ranks."""
    metrics_state: tuple[NDArray[Any], ...] = ()
    """Metric sums of this rank, if in the middle of an epoch."""
    refused: tuple[str, ...] = ()
    """Why newer checkpoints were skipped."""
    initial_epoch: int = 0
    """Epoch in which the run has begun, in whichever attempt."""
    frozen: Sequence[int] | None = None
    """`model_state.frozen_layers` when the checkpoint was saved; None: not known."""
    frozen_as_compiled: Sequence[int] | None = None
    """The same when that training began, in whichever attempt."""

    @property
    def is_later(self) -> bool:
        """Whether training has begun before: in another process, or on other ranks."""
        return bool(self.source or (self.global_step and not self.initial_epoch))


def started_again(config: Config, attempt: Attempt) -> Config:
    """Returns the configuration of a restarted run, which resumes in its own folder."""
    name = config.run.name or attempt.run_name
    checkpoints = Path(config.run.directory) / name / "checkpoints"
    resume = config.run.resume
    if attempt.number and name and checkpoint.saved_in(checkpoints):
        resume = "auto"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name, resume=resume))


def same_global_batch(config: Config, attempt: Attempt, size: int) -> Config:
    """Keeps the global batch and learning rate of the first attempt in a restart with other ranks."""
    then, batch_size = attempt.num_ranks, config.train.batch_size
    if not attempt.number or then in (0, size) or config.train.virtual_ranks:
        return config
    if then * batch_size % size:
        raise ConfigError(
            f"train.batch_size: the run began with {then} x {batch_size} samples per step, which {size} ranks cannot"
            f" share out evenly: start it with a number of ranks that divides them"
        )
    optimizer = config.optimizer
    if config.hvd.op == "adasum":  # its learning rate is scaled by the batch of one rank
        reference = max(1, optimizer.reference_batch_size * then // size)
        optimizer = dataclasses.replace(optimizer, reference_batch_size=reference)
    train = dataclasses.replace(config.train, batch_size=then * batch_size // size)
    return dataclasses.replace(config, train=train, optimizer=optimizer)


def source_of(config: Config) -> tuple[Path | None, bool]:
    """Returns the folder to resume from (None: start from scratch), and whether it must hold a checkpoint."""
    resume = config.run.resume
    if resume == "must" and not config.run.name:
        raise ConfigError("resume: got must, which needs the name of the run to resume: give --run.name as well")
    if resume == "never" or not config.run.name:
        return None, False
    return Path(config.run.directory) / config.run.name, resume == "must"


class Clock(keras.callbacks.Callback):
    """Counts the steps of a run. It must be the first callback, since the others read it."""

    is_open = False

    def __init__(
        self, start: Start, steps_per_epoch: int, status: StatusLine, journal: Journal, steps_per_call: int = 1
    ) -> None:
        super().__init__()
        self.steps_per_call = steps_per_call
        self.status = status
        self.journal = journal
        self.begun = False
        status.put(start.global_step, "")
        self.global_step = self.before = start.global_step
        self.steps_per_epoch = steps_per_epoch
        self.metrics_state = start.metrics_state
        self.step_logs = start.step_logs
        self.results: dict[str, Any] = {}
        """of the metrics after the first step of a resumed epoch, before the sums of earlier steps are added"""
        self.begun_epoch = start.begun_epoch

    @property
    def where(self) -> dict[str, Any]:
        """Position of the run, for the journal's last event."""
        return {"global_step": self.global_step}

    @property
    def epoch(self) -> int:
        """Number of the epoch under way or, between two, of the next one."""
        return self.global_step // self.steps_per_epoch

    @property
    def steps_left(self) -> int:
        """Number of steps that are left of the epoch under way or, between two, of the next one."""
        return self.steps_per_epoch - self.global_step % self.steps_per_epoch

    def begin_epoch(self) -> tuple[int, range]:
        """Begins an epoch, or goes on with it; returns its number and those of the steps that are left of it."""
        return self.epoch, range(self.global_step % self.steps_per_epoch, self.steps_per_epoch)

    @property
    def epoch_complete(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self.global_step % self.steps_per_epoch == 0

    def end_epoch(self) -> None:
        """Counts an epoch whose data have ended early as a complete one."""
        self.before = self.global_step
        self.global_step = math.ceil(self.global_step / self.steps_per_epoch) * self.steps_per_epoch
        self.status.put(self.global_step, "")

    def keep_state(self) -> None:
        """Keeps the state before the end of an epoch or of training, if ranks change: not here."""

    def passed(self, every: int) -> bool:
        """Returns whether the last call of a step has reached a multiple of `every`."""
        return self.global_step // every > self.before // every

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.restore_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.before = self.global_step
        self.global_step += min(self.steps_per_call, self.steps_per_epoch - self.before % self.steps_per_epoch)
        self.status.put(self.global_step, "")
        if not self.begun:
            self.begun = True
            self.journal.write("training", global_step=self.global_step)
        self.results = {}
        if self.metrics_state:  # only now, as Keras has created the metrics in this step
            self.results = evaluation.results_of_metrics(self.model)
            for variable, array in zip(self.model.metrics_variables, self.metrics_state, strict=True):
                variable.assign_add(array)
            self.metrics_state = ()

    def restore_metrics(self) -> None:
        """Gives the metrics their state of the epoch's steps before a resume, once, if they are created already."""
        if not self.metrics_state:  # `metrics_variables` walks through all layers
            return
        variables = self.model.metrics_variables
        if len(variables) != len(self.metrics_state):
            return
        for variable, array in zip(variables, self.metrics_state, strict=True):
            variable.assign(array)
        self.metrics_state = ()


def restore(
    model: keras.Model,
    folder: Path | None,
    must: bool,  # raise CheckpointError without a checkpoint, too
    config: Config,
    numbers: Numbers,
    common: Mapping[str, str],  # if it differs in the checkpoint, raise ConfigError
) -> Start:
    """Restores on every rank the newest valid checkpoint of rank 0's run folder; returns the same position on all."""
    newest, start = hvd.run_together(lambda: _find(folder, must) if hvd.rank() == 0 else (None, Start()))

    def load() -> list[list[Arrays]] | None:
        """Loads the shared state; returns the local state of each rank: of its copies of the model, then metrics."""
        if newest is None:
            return None
        identity.require_same(newest, common, config, numbers)
        if not model.optimizer.built:  # a second build of a LossScaleOptimizer would add its variables once more
            model.optimizer.build(model.trainable_variables)
        model_state.require_same_model(newest, model)
        model_state.assign(model_state.shared_variables(model), newest.arrays("state"))
        return _local_states(newest, model, config.seed)

    by_rank = hvd.run_together(load)
    rows, length = None, 0
    if by_rank:
        rows = [model_state.to_bytes(states) for states in by_rank]
        length = rows[0].size
    start, length = hvd.broadcast_object((start, length), 0, name="ringtrain_start")
    hvd.broadcast_model(model, root_rank=0)
    if not length:
        return start
    row = hvd.scatter_bytes(rows, length, name="ringtrain_own_state")
    *own_states, metrics = model_state.from_bytes(row, hvd.num_copies(model) + 1)
    hvd.global_seed(create=True)
    for copy, state in enumerate(own_states):
        model_state.assign(model_state.own_variables(model), state, copy)
    return dataclasses.replace(start, metrics_state=tuple(metrics.values()))


def _local_states(newest: checkpoint.Checkpoint, model: keras.Model, seed: int) -> list[list[Arrays]]:
    """Local state of each rank in a checkpoint: of its copies of the model, then its metrics."""
    size, copies = hvd.size(), hvd.num_copies(model)
    of_ranks = model_state.by_rank(newest.arrays("ranks"), newest.manifest["num_ranks"])
    is_shared, was_shared = hvd.is_shared(model), newest.manifest.get("shared_state", False)
    if is_shared:
        metrics = [model_state.metrics_state(of_ranks, 0, 0)] * size  # the sum of all, on each rank
        of_ranks = of_ranks[:1] * size
        same = True
    else:
        metrics = [model_state.metrics_state(of_ranks, rank, size, copies) for rank in range(size)]
        same = len(of_ranks) == size * copies and not was_shared
    if is_shared:  # only the seeds have the same indices
        seeds = [f"{index:05d}" for index in range(len(hvd.seeds(model)))]
        for rank, arrays in enumerate(of_ranks):
            of_ranks[rank] = {key: arrays[key] for key in seeds if key in arrays}
    if not same:
        first = of_ranks[:1] if was_shared else of_ranks  # there, all ranks have the same seeds
        of_ranks = model_state.seeds_for(model, first, size * copies, seed, newest.global_step)
    by_rank = []
    for rank in range(size):
        states = of_ranks[rank * copies : (rank + 1) * copies]
        sums = {str(index): array for index, array in enumerate(metrics[rank])}
        by_rank.append([*states, sums])
    return by_rank


def callbacks_of(folder: Path) -> callback_state.State:
    """Returns the state of the user's callbacks in the checkpoint that `restore` would find."""
    return _find(folder, must=True)[1].callbacks


def _find(folder: Path | None, must: bool) -> tuple[checkpoint.Checkpoint | None, Start]:
    if folder is None:
        return None, Start()
    newest, refused = checkpoint.newest(folder / "checkpoints")
    if newest is None and refused:
        raise CheckpointError(f"{folder}: no checkpoint verifies; {'; '.join(refused)}")
    if newest is None and must:
        raise CheckpointError(f"{folder}: no checkpoint here")
    if newest is None:
        return None, Start()
    saved = newest.manifest
    start = Start(newest.global_step, str(newest.folder), saved["metrics"], refused=tuple(refused))
    start = dataclasses.replace(
        start,
        is_ended=saved.get("is_ended", False),
        initial_epoch=saved["numbers"].get("initial_epoch", 0),
        frozen=saved.get("frozen"),
        frozen_as_compiled=saved.get("frozen_as_compiled"),
    )
    states = saved.get("callbacks", [])
    if states:
        arrays = newest.arrays("state")
        of_callbacks = {name: arrays[name] for name in arrays if name.startswith(callback_state.PREFIX)}
        start = dataclasses.replace(start, callbacks=(states, of_callbacks))
    return newest, start


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
