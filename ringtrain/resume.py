"""Stopping and going on as if nothing had happened: a run's state, saved and restored on all ranks together.

The state is rank 0's weights and optimizer, which the other ranks share, and what differs between ranks: the states of
random seeds, moving statistics of batch normalization, gradients that are accumulated and not reduced yet. Only rank 0
receives it, in pieces. Where the run stands follows from the global step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain import checkpoint, hvd
from ringtrain.config import Config, Numbers, option_types, scaling_rule, value_of
from ringtrain.errors import CheckpointError, ConfigError, NonFiniteLoss
from ringtrain.journal import Journal
from ringtrain.reports import Attempt, Box

# What a run may change when it goes on. The rest decides what it learns; the global batch is compared as a whole.
FREE = (
    *("run.", "checkpoint.", "device.", "health.", "elastic.", "tracking.", "chaos", "data.dir", "data.file"),
    *("strategy.", "hvd.fusion_mb", "hvd.cycle_time_ms", "hvd.groups"),
    *("train.epochs", "train.batch_size", "train.max_time_s", "train.check_every_steps", "train.patience"),
    "train.target_accuracy",
)
SCALING = "optimizer.learning_rate_scaling"
# May change where the learning rate that follows from them stays.
RATES = (SCALING, "optimizer.learning_rate", "optimizer.reference_batch_size", "schedule.warmup_start")
BEST_BY = "test_accuracy"
Arrays = dict[str, NDArray[Any]]
Spec = list[dict[str, tuple[str, tuple[int, ...]]]]
"""dtype and shape of the arrays of each dictionary in a list"""


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    global_step: int = 0
    source: str = ""
    """the checkpoint; empty: from the beginning"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """of the last whole epoch"""
    monitored: tuple[float, ...] = ()
    """values of train.monitor, one per whole epoch, if it was watched"""
    metrics_state: tuple[NDArray[Any], ...] = ()
    """of this rank, in the middle of an epoch: what its metrics have seen"""
    refused: tuple[str, ...] = ()
    """why newer checkpoints were passed over"""


@dataclass(frozen=True)
class Segment:
    """A call of fit: a run that starts in the middle of an epoch needs one for the rest of it."""

    first_epoch: int
    end_epoch: int
    num_steps: int
    """per epoch"""
    first_step: int
    """the global step of its first batch, from 0"""


def segments(global_step: int, steps_per_epoch: int, epochs: int) -> list[Segment]:
    """Cuts what is left of a run into calls of fit.

    Args:
        global_step: steps done.
        steps_per_epoch: of a whole epoch.
        epochs: of the whole run.

    Returns:
        None, one or two of them.
    """
    epoch, step = divmod(global_step, steps_per_epoch)
    cut = []
    if step and epoch < epochs:
        cut.append(Segment(epoch, epoch + 1, steps_per_epoch - step, global_step))
        epoch += 1
    if epoch < epochs:
        cut.append(Segment(epoch, epochs, steps_per_epoch, epoch * steps_per_epoch))
    return cut


def started_again(config: Config, attempt: Attempt) -> Config:
    """The configuration of a run that the launcher has started again: it goes on in its own folder.

    Args:
        config: as it was given.
        attempt: what the launcher says.
    """
    name = config.run.name or attempt.run_name
    own = Path(config.run.directory) / name / "checkpoints"
    resume = "auto" if attempt.number and name and checkpoint.saved_in(own) else config.run.resume
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name, resume=resume))


def same_global_batch(config: Config, attempt: Attempt, size: int) -> Config:
    """The configuration with which other ranks than at the first start have its global batch and learning rate.

    Args:
        config: of the run.
        attempt: says how many ranks there were.
        size: ranks now.

    Raises:
        ConfigError: it cannot be shared out evenly.
    """
    then, batch_size = attempt.num_ranks, config.train.batch_size
    if not attempt.number or then in (0, size):
        return config
    if then * batch_size % size:
        raise ConfigError(
            f"train.batch_size: the run began with {then} x {batch_size} samples per step, which {size} ranks cannot"
            f" share out evenly: start it with a number of ranks that divides them"
        )
    optimizer = config.optimizer
    if config.hvd.op == "adasum":  # which the rate is scaled for one rank's batch with
        reference = max(1, optimizer.reference_batch_size * then // size)
        optimizer = dataclasses.replace(optimizer, reference_batch_size=reference)
    train = dataclasses.replace(config.train, batch_size=then * batch_size // size)
    return dataclasses.replace(config, train=train, optimizer=optimizer)


def source_of(config: Config) -> tuple[Path | None, bool]:
    """Where to look for a checkpoint to go on from.

    Args:
        config: its run section says whether, and which.

    Returns:
        The folder, None for a run that begins anew; and whether it has to have one.

    Raises:
        ConfigError: a run without a name must go on.
    """
    resume, own = config.run.resume, Path(config.run.directory) / config.run.name
    if resume == "must" and not config.run.name:
        raise ConfigError("run.resume: got must, which needs the name of the run that goes on: give --run.name as well")
    if resume in ("auto", "must"):
        return (own if config.run.name else None), resume == "must"
    return (None, False) if resume == "never" else (Path(resume), True)


class Clock(keras.callbacks.Callback):
    """Counts the run's steps; the first in the list of callbacks, for the others to look at.

    Args:
        start: where the run begins.
        steps_per_epoch: of a whole epoch.
        box: to be kept up to date.
        journal: of this rank.
    """

    def __init__(self, start: Start, steps_per_epoch: int, box: Box, journal: Journal) -> None:
        super().__init__()
        self.box = box
        self.journal = journal
        self.begun = False
        box.put(start.global_step, "")
        self.global_step = start.global_step
        self.steps_per_epoch = steps_per_epoch
        self.metrics_state = start.metrics_state

    @property
    def epoch_complete(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self.global_step % self.steps_per_epoch == 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.global_step += 1
        self.box.put(self.global_step, "")
        if not self.begun:
            self.begun = True
            self.journal.write("training", global_step=self.global_step)
        # Metrics are sums, which Keras has begun anew and makes with the first batch: here the rest of them is added.
        for variable, array in zip(self.model.metrics_variables, self.metrics_state, strict=bool(self.metrics_state)):
            variable.assign_add(array)
        self.metrics_state = ()


class Saver(keras.callbacks.Callback):
    """Saves the run's state every so many steps, epochs and minutes.

    The training thread holds on to the state as it is; another one of rank 0 copies and writes it. A checkpoint that
    cannot be written, as on a full disk, is left out; only the last one has to be there. For every rank, after whatever
    adds to an epoch's metrics, and after what agrees on time.

    Args:
        model: compiled.
        folder: that holds the run's checkpoints.
        config: of the run; its checkpoint section says when.
        facts: what else a checkpoint is to say: numbers, versions; plain values.
        clock: counts the steps.
        metrics: of the last whole epoch before.
        journal: of this rank, for every save.
        monitored: values of train.monitor; grows while training.
        is_due: whether the ranks have agreed on saving now; the same on every rank.
        while_saving: called on rank 0 with the global step, in the middle of every save.

    Attributes:
        saves: what has become of all saves so far, for the summary.
    """

    def __init__(
        self,
        model: keras.Model,
        folder: Path,
        config: Config,
        facts: Mapping[str, Any],
        clock: Clock,
        metrics: Mapping[str, float],
        journal: Journal,
        monitored: Sequence[float] = (),
        is_due: Callable[[], bool] = lambda: False,
        while_saving: Callable[[int], None] = lambda global_step: None,
    ) -> None:
        super().__init__()
        self.set_model(model)  # a run that has nothing left to train never calls fit, which would
        self.folder = folder
        self.config = config
        self.facts = {"config": dataclasses.asdict(config), **facts}
        self.clock = clock
        self.metrics = dict(metrics)
        self.journal = journal
        self.monitored = monitored
        self.is_due = is_due
        self.while_saving = while_saving
        self.saved_step = -1
        self._failed_step = -2
        self.saves: dict[str, Any] = {"count": 0, "stall_s": 0.0, "longest_stall_s": 0.0, "write_s": 0.0, "failed": []}
        self._floating = [weight for weight in model.weights if keras.backend.is_float_dtype(weight.dtype)]
        self._sum_of_weights = tf.function(
            lambda: tf.add_n([tf.cast(tf.reduce_sum(weight.value), tf.float32) for weight in self._floating]),
            autograph=False,
        )
        # Not a new thread for each: that one would go first, and the training thread wait for it.
        self._writer = ThreadPoolExecutor(1, "ringtrain-saver")
        self._written: Future[None] | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._written and self._written.done():
            self.wait()  # raises what went wrong
        every = self.config.checkpoint.every_steps
        due = self.is_due() or (every and self.clock.global_step % every == 0)
        if due and not self.clock.epoch_complete:  # then the metrics of the epoch are still to come
            self.save()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self.clock.epoch_complete:
            self.metrics = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
            every = self.config.checkpoint.every_epochs
            if self.is_due() or (every and (epoch + 1) % every == 0):
                self.save()

    @hvd.during("save")
    def save(self) -> None:
        """Begins to save the present state, unless it is saved already. A collective: call it on every rank.

        Raises:
            NonFiniteLoss: on every rank: a weight is no finite number. The checkpoint before stays the newest.
        """
        step = self.clock.global_step
        if self.saved_step == step:
            return
        begin_s = time.perf_counter()
        self.wait()  # for the one before: states do not pile up in memory
        digests = _digests(self.model)
        with hvd.during("reduce"):
            reports = hvd.allgather_object((digests, self._not_finite()), name="ringtrain_own_state")
        if worst := next((path for _, path in reports if path), ""):
            raise NonFiniteLoss(
                f"after step {step} {worst} is no finite number any more: look at the learning rate; the last"
                f" checkpoint is from before"
            )
        own = self._own_state(_places_to_save(self.model, [one for copies, _ in reports for one in copies]))
        with hvd.during("reduce"):
            rows = hvd.gather_bytes(_packed(own), name="ringtrain_own_state")
        state = None if rows is None else self._state([one for row in rows for one in _unpacked(row, _spec(own))])
        self.saved_step = step
        stall_s = time.perf_counter() - begin_s
        self.saves["count"] += 1
        self.saves["stall_s"] += stall_s
        self.saves["longest_stall_s"] = max(stall_s, self.saves["longest_stall_s"])
        self.journal.write("save", global_step=step, stall_s=stall_s)
        if state:  # last: from here on the writer wants a core, and there may be none to spare
            self._written = self._writer.submit(self._write, step, *state)

    def finish(self) -> None:
        """Saves the present state and waits until it is on the disk. A collective: call it on every rank.

        Raises:
            NonFiniteLoss: as save.
            CheckpointError: on every rank: it could not be written.
        """
        self.save()
        self.wait()
        if hvd.broadcast_object(self._failed_step == self.saved_step, 0, name="ringtrain_last_save"):
            self.saved_step = -1  # the disk may have been full for a moment
            self.save()
        hvd.run_together(self._finish)

    def _finish(self) -> None:
        self.wait()
        if self._failed_step == self.saved_step:
            raise CheckpointError(f"{self.saves['failed'][-1]['error']}; what was saved before stays")

    def wait(self) -> None:
        """Waits until what it has begun to save is on the disk, or has failed."""
        if self._written is not None:
            written, self._written = self._written, None
            written.result()

    def _own_state(self, places: Sequence[int]) -> list[Arrays]:
        """Local variables at these places, of each copy of the model in this process; metrics are the first copy's."""
        variables = _own_variables(self.model)
        wanted = {place: variables[place] for place in places}
        own = [_arrays_of(wanted, copy) for copy in range(hvd.num_copies(self.model))]
        if self.clock.epoch_complete:
            return own
        seen = _arrays_of(dict(enumerate(self.model.metrics_variables)))
        return [
            state | {f"metrics-{name}": array if copy == 0 else 0 * array for name, array in seen.items()}
            for copy, state in enumerate(own)
        ]

    def _not_finite(self) -> str:
        """The path of a weight that holds a number that is none; empty: they are all good."""
        # A sum is quick, and no finite number where there is one that is none; it may overflow without one.
        if math.isfinite(float(self._sum_of_weights())):
            return ""
        bad = (weight.path for weight in self._floating if not tf.reduce_all(tf.math.is_finite(weight.value)))
        return next(bad, "")

    def _state(self, own: list[Arrays]) -> tuple[dict[str, Any], dict[str, Any]]:
        ranks = {f"{rank}/{name}": array for rank, arrays in enumerate(own) for name, array in arrays.items()}
        facts = {
            **self.facts,
            "metrics": self.metrics,
            "monitored": list(self.monitored),
            "num_ranks": len(own),
            "variables": checkpoint.shapes_of(_shared_variables(self.model)),
        }
        return {"state": _shared_state(self.model, own, self.config.model.not_averaged), "ranks": ranks}, facts

    def _write(self, step: int, files: dict[str, Any], facts: dict[str, Any]) -> None:
        """In a thread of its own, on rank 0."""
        begin_s = time.perf_counter()
        try:
            state = files["state"]
            for name, value in state.items():  # soon, before the next update of weights would have to copy them itself
                state[name] = _storable(value)
            checkpoint.save(self.folder, step, files, facts, lambda name: self.while_saving(step))
            self._failed_step = -2
        except (OSError, CheckpointError) as error:
            self._failed_step = step
            why = error.strerror if isinstance(error, OSError) else error
            text = f"{self.folder}/step-{step:08d}: cannot be written: {why}"
            self.saves["failed"].append({"global_step": step, "error": text})
            print(f"ringtrain: {text}; training goes on", file=sys.stderr, flush=True)
        else:
            try:
                checkpoint.prune(self.folder, self.config.checkpoint.keep, BEST_BY)
            except OSError as error:
                text = f"{error.filename or self.folder}: older checkpoints stay: {error.strerror}"
                print(f"ringtrain: {text}", file=sys.stderr, flush=True)
        self.saves["write_s"] += time.perf_counter() - begin_s


def restore(model: keras.Model, folder: Path | None, must: bool, config: Config, numbers: Numbers) -> Start:
    """Gives every rank the state of the newest checkpoint that verifies, as rank 0 finds it.

    Args:
        model: compiled, the same on every rank.
        folder: a run's folder, its checkpoints' folder, or one checkpoint; None: start at the beginning.
        must: finding none is an error.
        config: of the run that goes on.
        numbers: of the run that goes on.

    Returns:
        Where the run stands, the same on every rank.

    Raises:
        CheckpointError: none verifies where there are some, or one must be there; or it is of another model.
        ConfigError: the run that goes on is another one.
    """
    found, start = hvd.run_together(lambda: _find(folder, must) if hvd.rank() == 0 else (None, Start()))

    size, copies = hvd.size(), hvd.num_copies(model)

    def load() -> list[list[Arrays]] | None:
        """Loads the shared state; returns the local state of each rank: of its copies of the model, then metrics."""
        if found is None:
            return None
        _require_same_run(found, config, numbers)
        model.optimizer.build(model.trainable_variables)
        _require_same_model(found, model)
        _require_whole_update(found, numbers)
        _assign(_shared_variables(model), found.arrays("state"))
        own = _by_rank(found.arrays("ranks"), found.manifest["num_ranks"])
        metrics = [_metrics_state(own, rank, size, copies) for rank in range(size)]
        same = len(own) == size * copies
        if found.manifest["format"] == 1:  # which had the same places for seeds alone
            seeds = [f"{index:05d}" for index in range(len(_seeds(model)))]
            own = [{place: arrays[place] for place in seeds if place in arrays} for arrays in own]
        copies_of = [own[rank * copies : (rank + 1) * copies] if same else [] for rank in range(size)]
        return [
            [*states, {str(index): array for index, array in enumerate(sums)}]
            for states, sums in zip(copies_of, metrics, strict=True)
        ]

    by_rank = hvd.run_together(load)
    start, spec = hvd.broadcast_object((start, _spec(by_rank[0]) if by_rank else []), 0, name="ringtrain_start")
    hvd.broadcast_model(model, root_rank=0)
    if not spec:
        return start
    length = sum(_num_bytes(*array) for one in spec for array in one.values())
    rows = [_packed(states) for states in by_rank] if by_rank else None
    *own_states, metrics = _unpacked(hvd.scatter_bytes(rows, length, name="ringtrain_own_state"), spec)
    for copy, state in enumerate(own_states):
        _assign(_own_variables(model), state, copy)
    return dataclasses.replace(start, metrics_state=tuple(metrics.values()))


def manifest_of(folder: Path | None) -> Mapping[str, Any]:
    """What the checkpoint that `restore` would find says of itself; nothing where there is none."""
    found, _ = _find(folder, must=False)
    return found.manifest if found else {}


def load_weights(model: keras.Model, source: Path) -> None:
    """Gives the model the weights of a checkpoint or of a `.keras` file, without optimizer, step or seeds."""
    if source.suffix == ".keras":
        try:
            weights = keras.models.load_model(source, compile=False).get_weights()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{source}: cannot be read as a Keras model: {error}") from error
        if [w.shape for w in weights] != [tuple(v.shape) for v in model.weights]:
            raise CheckpointError(f"{source}: a model with other weights than this one")
        model.set_weights(weights)
        return
    found, _ = _find(source, must=True)
    if found is not None:
        _require_same_model(found, model, weights_only=True)
        _assign(model.weights, found.arrays("state"))


def _find(folder: Path | None, must: bool) -> tuple[checkpoint.Checkpoint | None, Start]:
    if folder is None:
        return None, Start()
    found: checkpoint.Checkpoint | None
    refused: list[str] = []
    if (folder / checkpoint.MANIFEST).exists():
        found = checkpoint.verify(folder)
    else:
        inner = folder / "checkpoints"
        found, refused = checkpoint.newest(inner if inner.is_dir() else folder)
    if found is None and refused:
        raise CheckpointError(f"{folder}: no checkpoint verifies; {'; '.join(refused)}")
    if found is None and must:
        raise CheckpointError(f"{folder}: no checkpoint here")
    if found is None:
        return None, Start()
    saved = found.manifest
    monitored = tuple(saved.get("monitored", ()))
    return found, Start(found.global_step, str(found.folder), saved["metrics"], monitored, refused=tuple(refused))


def _anew(config: Config) -> str:
    """How to train from the beginning instead."""
    return "give the run another --run.name" if config.run.resume in ("auto", "must") else "leave out --run.resume"


def _require_same_run(found: checkpoint.Checkpoint, config: Config, numbers: Numbers) -> None:
    saved = found.manifest
    then, now = saved["numbers"]["global_batch_size"], numbers.global_batch_size
    if then != now:
        raise ConfigError(
            f"{found.folder}: has a global batch of {then}, this run one of {now} = {numbers.batch_size} x"
            f" {numbers.num_ranks}: set train.batch_size so that they are equal, or {_anew(config)}"
        )
    rates, warm = ("learning_rate", "initial_learning_rate"), found.global_step >= numbers.warmup_steps
    new = [getattr(numbers, name) for name in rates[: 2 - warm]]
    old = [saved["numbers"].get(name, rate) for name, rate in zip(rates, new, strict=False)]
    same_rates = all(map(math.isclose, old, new))
    for option in option_types():
        section, _, key = option.rpartition(".")
        # As the manifest has them: tuples are lists. A checkpoint from before there was an option had its default.
        default, wanted = (json.loads(json.dumps(value_of(one, option))) for one in (Config(), config))
        before = (saved["config"].get(section, {}) if section else saved["config"]).get(key, default)
        if option in RATES and same_rates:
            continue
        if option == SCALING:
            optimizer = saved["config"].get("optimizer", {}).get("name", config.optimizer.name)
            before, wanted = scaling_rule(before, optimizer), scaling_rule(wanted, config.optimizer.name)
        shapes_rates = option == "train.epochs" and config.schedule.name in ("cosine", "polynomial")
        if (shapes_rates or not option.startswith(FREE)) and before != wanted:
            raise ConfigError(
                f"{found.folder}: was made with {option} = {before!r}, this run has {wanted!r}: go on with the same, or"
                f" {_anew(config)}"
            )
    if not same_rates:
        start = "" if warm else f" --schedule.warmup-start {old[1] / old[0]!r}"
        had, has = (" after a warm-up from ".join(map(str, each)) for each in (old, new))
        ranks, keep = saved["numbers"]["num_ranks"], f"keep it with --{SCALING.replace('_', '-')} none"
        raise ConfigError(
            f"{found.folder}: has the learning rate {had} with {ranks} ranks, this run {has} with {numbers.num_ranks}:"
            f" {keep} --optimizer.learning-rate {old[0]!r}{start}, or {_anew(config)}"
        )


def _require_whole_update(found: checkpoint.Checkpoint, numbers: Numbers) -> None:
    """Within an update, each rank holds gradients of samples that another number of ranks would deal out otherwise."""
    then, accumulated = found.manifest["num_ranks"], numbers.accumulation_steps
    if not found.global_step % accumulated:
        return
    between = f"between two updates (step {found.global_step}, optimizer.accumulation_steps {accumulated})"
    if then > 1 and found.manifest["format"] == 1:
        raise ConfigError(
            f"{found.folder}: was made {between} in format 1, of which each rank's gradients cannot be restored: go on"
            f" from a checkpoint of an epoch's end"
        )
    if then != numbers.num_ranks:
        raise ConfigError(
            f"{found.folder}: was made by {then} ranks {between}: go on with {then} ranks, or from a checkpoint of an"
            f" epoch's end"
        )


def _require_same_model(found: checkpoint.Checkpoint, model: keras.Model, weights_only: bool = False) -> None:
    ours = checkpoint.shapes_of(model.weights if weights_only else _shared_variables(model))
    theirs = found.manifest["variables"][: len(ours) if weights_only else None]
    for (name, *own), (other_name, *other) in zip(ours, theirs, strict=False):
        if own != other:
            raise CheckpointError(
                f"{found.folder}: of another model: {other_name} has shape {other[0]} and type {other[1]}, {name} here"
                f" has {own[0]} and {own[1]}"
            )
    if len(ours) != len(theirs):
        raise CheckpointError(f"{found.folder}: of another model: {len(theirs)} variables, expected {len(ours)}")


def _shared_variables(model: keras.Model) -> list[Any]:
    return [*model.weights, *model.optimizer.variables]


def _seeds(model: keras.Model) -> list[Any]:
    known = {id(variable) for variable in (*model.weights, *model.metrics_variables)}
    return [variable for variable in model.variables if id(variable) not in known]


def _own_variables(model: keras.Model) -> list[Any]:
    """Seeds, weights that follow a rank's data, and accumulated gradients, which are the optimizer's variables."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    accumulated = getattr(optimizer, "_accumulated_gradients", None) or []
    return [*_seeds(model), *hvd.weights_of_one_rank(model), *accumulated]


def _digests(model: keras.Model) -> list[list[bytes]]:
    """Checksums of the variables that may differ, for each copy of the model in this process."""

    def digest(variable: Any) -> bytes:
        return hashlib.sha256(np.asarray(variable.numpy()).reshape(-1).view(np.uint8).data).digest()[:8]

    variables, copies = _own_variables(model), range(hvd.num_copies(model))
    return [[digest(hvd.copies_of(variable)[copy]) for variable in variables] for copy in copies]


def _places_to_save(model: keras.Model, digests: Sequence[Sequence[bytes]]) -> list[int]:
    """Indices in `_own_variables` of those that differ between ranks, and of the seeds, which are no weights."""
    num_seeds = len(_seeds(model))
    return [place for place, one in enumerate(zip(*digests, strict=True)) if place < num_seeds or len(set(one)) > 1]


def _shared_state(model: keras.Model, own: list[Arrays], not_averaged: Sequence[str] = ()) -> dict[str, Any]:
    """Rank 0's weights and optimizer; of moving statistics, which differ within an epoch, the means over the ranks."""
    state = {f"{index:05d}": _held(variable) for index, variable in enumerate(_shared_variables(model))}
    places = {id(variable): f"{index:05d}" for index, variable in enumerate(_own_variables(model))}
    averaged = {id(variable) for variable in hvd.moving_statistics(model, not_averaged)}
    for index, variable in enumerate(model.weights):
        if id(variable) in averaged:
            arrays = [_loaded(variable, rank[places[id(variable)]]) for rank in own if places[id(variable)] in rank]
            if arrays:  # else they are equal
                mean = np.mean([array.astype(np.float64) for array in arrays], axis=0)
                state[f"{index:05d}"] = _storable(mean.astype(arrays[0].dtype))
    return state


def _metrics_state(own: list[Arrays], rank: int, size: int, copies: int = 1) -> list[NDArray[Any]]:
    """What a rank's metrics go on with, all its copies'; with another number of ranks, rank 0's with everybody's."""
    by_rank = [[array for name, array in sorted(arrays.items()) if name.startswith("metrics-")] for arrays in own]
    same = len(own) == size * copies
    mine = by_rank[rank * copies : (rank + 1) * copies] if same else by_rank
    return [np.asarray(np.sum(arrays, axis=0) * (same or rank == 0)) for arrays in zip(*mine, strict=True)]


def _arrays_of(variables: Mapping[int, Any], copy: int = 0) -> Arrays:
    return {f"{index:05d}": _storable(hvd.copies_of(one)[copy].numpy()) for index, one in variables.items()}


def _packed(states: Sequence[Arrays]) -> NDArray[np.uint8]:
    """All arrays' bytes, one after the other."""
    parts = [array.reshape(-1).view(np.uint8) for state in states for array in state.values()]
    return np.concatenate([np.zeros(0, np.uint8), *parts])


def _spec(states: Sequence[Arrays]) -> Spec:
    return [{name: (array.dtype.str, array.shape) for name, array in state.items()} for state in states]


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


def _unpacked(flat: NDArray[np.uint8], spec: Spec) -> list[Arrays]:
    """Reads what `_packed` has written."""
    states, begin = [], 0
    for one in spec:
        states.append(Arrays())
        for name, (dtype, shape) in one.items():
            end = begin + _num_bytes(dtype, shape)
            states[-1][name] = flat[begin:end].view(dtype).reshape(shape)
            begin = end
    return states


def _by_rank(arrays: Mapping[str, NDArray[Any]], num_ranks: int) -> list[Arrays]:
    own: list[Arrays] = [{} for _ in range(num_ranks)]
    for name, array in arrays.items():
        rank, _, place = name.partition("/")
        own[int(rank)][place] = array
    return own


def _assign(variables: list[Any], arrays: Mapping[str, NDArray[Any]], copy: int | None = None) -> None:
    """Sets the variables that there are arrays for, in all copies of the model or in one."""
    for index, variable in enumerate(variables):
        array = arrays.get(f"{index:05d}")
        if array is None:
            continue  # equal on all ranks, so that it is part of the shared state alone
        array = _loaded(variable, array)
        (variable if copy is None else hvd.copies_of(variable)[copy]).assign(array)


def _loaded(variable: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Undoes `_storable`."""
    return array.view(keras.ops.convert_to_numpy(variable).dtype) if str(variable.dtype) == "bfloat16" else array


def _held(variable: Any) -> Any:
    """The value as it is now: a variable that changes while somebody holds its tensor gets memory of its own."""
    tensor = hvd.copies_of(variable)[0].read_value()
    return tensor if "CPU" in tensor.device else _storable(tensor)  # a GPU's memory is dear


def _storable(value: Any) -> NDArray[Any]:
    array = np.array(value)  # a copy: training goes on while it is written
    # NumPy's files do not know bfloat16.
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array
