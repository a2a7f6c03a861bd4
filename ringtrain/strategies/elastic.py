"""State of a run whose ranks join and leave, under ringtrain launch --elastic: they agree again, see `run`.

Every step leaves the same state on all current ranks, or none of its own: `optim.step`. When a rank is lost, the
rank that is furthest gives its state to the others, and the step under way is made again; when hosts have joined or
left, all continue after the current step. Either way the rest of the epoch's order, from its position on, is
redistributed over the current ranks. The global batch stays that of the run's start, and with it the steps and the
learning rate. The ranks share it, also unevenly: a rank with n of its G samples has the weight n / G, so that the
update is that of one process with all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import keras
import tensorflow as tf

from ringtrain import data, hvd
from ringtrain.compressions import COMPRESSIONS, kind_of
from ringtrain.config import Config, ScheduleConfig
from ringtrain.derived import Numbers, derive, num_shards
from ringtrain.errors import ConfigError
from ringtrain.hvd import train_step
from ringtrain.optim import optimizers, schedules
from ringtrain.optim.step import Step, step_of_all_ranks
from ringtrain.optim.sums import SumsOverRanks
from ringtrain.protocol import failures
from ringtrain.run import console, devices, evaluation, from_checkpoint, model_state, resume, run_folder
from ringtrain.run.callback_state import SharedCallbackState, Snapshot
from ringtrain.run.context import Job, Opening, Process, on_rank
from ringtrain.strategies import samples
from ringtrain.strategies.base import StepsOf
from ringtrain.strategies.ring import Ring

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringtrain.run.context import RunContext
    from ringtrain.run.stopping import StopTogether


def run(process: Process, from_agreement: Callable[[], Any]) -> Any:
    """Makes this rank's model alone, then trains with the others from an agreement on, again after every change.

    Returns what `from_agreement` does.
    """
    source = process.source = OtherRanks(process)

    def from_last_step(state: Any) -> Any:
        return from_agreement()

    with process.signals:
        return hvd.elastic.run(from_last_step)(source.state)


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of an elastic run; part of the state that ranks share."""

    num_ranks: int = 0
    """Number since the last change; 0: not started."""
    epoch: int = 0
    position: int = 0
    """Samples of the epoch's order that are trained."""
    length: int = 0
    """Samples in that order."""
    generation: str = ""
    """ID of the ranks that train together."""
    resizes: tuple[dict[str, int], ...] = ()
    started: float = 0.0


class OtherRanks:
    """State of a run from the rank that is furthest, or from a checkpoint; see `run.context.Source`.

    Attributes:
        state: What the ranks share: model, folder, position, and how far this rank is.
    """

    def __init__(self, process: Process) -> None:
        strategy, configured = cast(Elastic, process.strategy), process.source
        self.faults, self.code, self.pin = configured.faults, configured.code, configured.pin
        self.is_quiet = configured.is_quiet
        job = configured.read_job(process)
        # The schedule's rates are set from outside: ranks that join later must build the same.
        flat = dataclasses.replace(process.config, schedule=ScheduleConfig())
        num_ranks = num_shards(flat, hvd.size())
        self._job = dataclasses.replace(
            job,
            numbers=_numbers(flat, job, num_ranks),
            make_clock=strategy.make_clock,
            last_callback=lambda run: Committer(self.state, run, self._of_rank_0),
        )
        configured.add_model(dataclasses.replace(process, config=flat), self._job)
        everyone = self._job.all_callbacks or self._job.users_callbacks
        if everyone:
            self._job.callback_state = SharedCallbackState(everyone, self._job.model)
            strategy.callback_state = self._job.callback_state
        # A rank that becomes rank 0 has these callbacks, but has never called them.
        of_others = on_rank(everyone, 1) if self._job.all_callbacks else everyone
        of_rank_0 = [callback for callback in everyone if callback not in of_others]
        self._of_rank_0 = SharedCallbackState(of_rank_0, self._job.model) if of_rank_0 else None
        self._saved: Mapping[str, Any] = {}
        self.strategy = strategy
        self.state = strategy.state = hvd.elastic.SharedKerasState(
            self._job.model,
            strategy.settle,
            strategy.synced,
            folder="",
            records="",
            place=Place(),
            numbers=self._job.numbers,
            start=resume.Start(),
            progress=-1,
        )

    def read_job(self, process: Process) -> Job:
        """The job with the numbers of the first ranks, whose global batch is kept."""
        state = self.state
        if hvd.rank():
            process.lock.release(to_own_job=True)  # the current rank 0 takes it
        if not state.folder:
            from_checkpoint.find_start(process)
        config = process.config
        num_ranks = hvd.run_together(lambda: num_shards(config, hvd.size()))
        if not state.folder:
            folder, _ = resume.source_of(config)
            self._saved = hvd.on_rank_0(lambda: resume.manifest_of(folder))
            saved = self._saved.get("numbers", {})
            if saved.get("batch_size") == config.train.batch_size:
                num_ranks = saved["num_ranks"]
            state.numbers = hvd.run_together(lambda: _numbers(config, self._job, num_ranks))
        users = self._job.users_callbacks
        if self._job.all_callbacks:
            users = on_rank(self._job.all_callbacks, hvd.rank())
        return dataclasses.replace(self._job, numbers=state.numbers, users_callbacks=users)

    def add_model(self, process: Process, job: Job) -> None:
        """Does nothing: the model exists."""

    def restore(self, process: Process, job: Job) -> tuple[resume.Start, Mapping[str, Any]]:
        """Position of the rank that is furthest; on the first ranks, of the newest checkpoint."""
        hvd.elastic.set_gradient_share(job.model.optimizer, 1.0)  # all ranks reduce together, from the same weights
        if self.state.folder:
            if self.state.start.frozen is not None:
                model_state.freeze_in_training(job.model, self.state.start.frozen)
            endings = hvd.allgather_object(self.strategy.ending, name="ringtrain_endings")
            return dataclasses.replace(self.state.start, ending=_common(endings)), {}
        config, saved = process.config, self._saved
        start, summary = from_checkpoint.restore(
            process, job, job.numbers, lambda start: _place_of(saved, start, job).get("epoch", 0) >= config.train.epochs
        )
        return start, summary

    def open_folder(self, process: Process, job: Job, start: resume.Start) -> Opening:
        """The run's folder, which the current rank 0 locks; and what has changed."""
        state, strategy, rank = self.state, self.strategy, hvd.rank()
        is_first = not state.folder
        if is_first:
            state.folder = str(from_checkpoint.make_folder(process, job.numbers, start))
            state.start, state.progress = start, progress(start.global_step)
            place = _place_of(self._saved, start, job)
            state.place = Place(started=time.time(), **place)
        folder = Path(state.folder)
        numbers, records = job.numbers, state.records
        hvd.on_rank_0(lambda: from_checkpoint.take_over(process, folder, numbers, records))
        event, facts = _resized(state, strategy, process)
        log = ""
        if not strategy.has_log:
            later = ""
            if state.place.resizes:
                later = f"-from-step-{state.start.global_step}"
            log, strategy.has_log = f"rank-{rank}{later}.log", True
        return Opening(folder=folder, log=log, event=event, facts=facts, is_first=is_first)


def _common(endings: Sequence[resume.Ending]) -> resume.Ending:
    """Ending of all ranks, of which some may not know that all have agreed."""
    return resume.Ending(
        stopped_by=max(one.stopped_by for one in endings),
        requested=max(one.requested for one in endings),
        is_ended=any(one.is_ended for one in endings),
        is_closed=any(one.is_closed for one in endings),
    )


def _numbers(config: Config, job: Job, num_ranks: int) -> Numbers:
    if not job.follows_schedule:  # a script's numbers do not depend on the ranks
        return job.numbers
    before = job.numbers
    rows = 0 if job.data_set.train.has_classes else before.samples_per_step
    return derive(config, num_ranks, before.num_train, before.num_test, rows)


def _place_of(saved: Mapping[str, Any], start: resume.Start, job: Job) -> dict[str, Any]:
    """Returns the position of a checkpoint in its epoch."""
    if not start.source:
        return {}
    if "elastic" in saved:
        return {**saved["elastic"], "resizes": tuple(saved["elastic"]["resizes"])}
    epoch, step = divmod(start.global_step, saved["numbers"]["steps_per_epoch"])
    if not step:
        return {"epoch": epoch}
    return {"epoch": epoch, "position": step * job.numbers.samples_per_step, "length": rows_of_epoch(job, epoch)}


def _resized(state: Any, strategy: Elastic, process: Process) -> tuple[str, dict[str, Any]]:
    """Records the current ranks in the state that a failure returns to; returns the journal's event and its facts."""
    place, size, global_step, resizes = state.place, hvd.size(), state.start.global_step, state.place.resizes
    of_ranks = hvd.allgather_object((strategy.reached, f"{time.time_ns():x}"), name="ringtrain_news")
    lost_steps = 0
    if place.num_ranks:
        lost_steps = max(0, max(reached for reached, _ in of_ranks) - global_step)
    change = {"from": place.num_ranks, "to": size, "lost_steps": lost_steps}
    event = "start"
    if place.num_ranks:
        event = "resize"
        if hvd.rank() == 0:
            failures.report_recovery()
        resizes = (*resizes, {"global_step": global_step, **change})
        repeated = "; a step is repeated" if lost_steps else ""
        text = f"continues after step {global_step} with {size} ranks, before with {place.num_ranks}{repeated}"
        console.terminal_of(process).print(text, highlight=False)
    generation = of_ranks[0][1]
    state.place = dataclasses.replace(place, num_ranks=size, generation=generation, resizes=resizes)
    strategy.reached = global_step
    epoch, position = place.epoch, place.position
    if place.position == place.length > 0:
        epoch, position = place.epoch + 1, 0
    where = {"global_step": global_step, "epoch": epoch, "position": position}
    return event, {**where, "generation": generation, "after": place.generation, **change}


class Elastic(Ring):
    """Strategy ring whose ranks join and leave. Until `agree`, no collectives: other ranks may be training.

    Attributes:
        scheduler: Batch scheduler of the current generation, once it trains.
        ending: Why this rank was about to end before the last change.
        reached: Furthest step that this process has begun.
        has_log: Whether this process writes to a log of the run.
    """

    ranks_change = True
    trains_here = False  # no heartbeats are compared

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.optimizer.accumulation_steps > 1:
            raise ConfigError(
                "optimizer.accumulation_steps: got more than 1 in an elastic run, which commits whole steps: 1"
            )
        if config.model.not_averaged:
            raise ConfigError("model.not_averaged: in an elastic run no rank has weights of its own: leave it out")
        if config.model.split:
            raise ConfigError("model.split: ranks that join and leave have one device: leave it out")
        if kind_of(config.hvd.compression).keeps_errors:
            keeping = " or ".join(name for name, kind in COMPRESSIONS.items() if kind.keeps_errors)
            raise ConfigError(
                f"hvd.compression {keeping}: a rank that is lost would take what it has not sent along: leave it out"
            )
        if config.tracking.timeline_steps:
            raise ConfigError(
                "tracking.timeline_steps: got more than 0 in an elastic run, whose ranks join and leave: 0"
            )
        self.scheduler: BatchScheduler | None = None
        self.state: Any = None
        self.callback_state: SharedCallbackState | None = None
        self.ending = resume.Ending()
        self.reached = 0
        self.has_log = False

    def begin(self) -> devices.Pinning:
        return devices.pin_rank(self.config, devices.slot(), hvd.local_size())

    def make_clock(self, run: RunContext) -> BatchScheduler:
        """Makes the scheduler of a generation."""
        self.scheduler = BatchScheduler(run, self.state.place)
        return self.scheduler

    def make_ready(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().make_ready(model, input_shape, num_classes)
        self.step = self.step or step_of_all_ranks(model, input_shape, SumsOverRanks())

    def share_rows(self, model: keras.Model, batch: Any) -> None:
        super().share_rows(model, batch)
        if model.steps_per_execution > 1:
            raise ConfigError("steps_per_execution: an elastic job commits each step by itself: compile it with 1")
        accumulates = any(one.gradient_accumulation_steps for one in hvd.optimizers_of(model))
        if accumulates and train_step.is_own(model):
            raise ConfigError(
                f"gradient_accumulation_steps: in an elastic job, {type(model).__name__}.train_step would accumulate"
                " gradients of a rank that may be lost: leave it out"
            )
        if self.step is None:
            self.step = Step(model, SumsOverRanks())
        model.train_function = None  # an earlier one makes another step

    def settle(self) -> int:
        """Undoes an interrupted step or end of an epoch or of training, and notes how far this rank is."""
        state, scheduler = self.state, self.scheduler
        if scheduler is None:
            return int(state.progress)  # nothing was trained since the last change
        self.ending = scheduler.undo_end()
        self.reached = max(self.reached, scheduler.global_step + bool(self.step and self.step.undo()))
        scheduler.write_down()
        state.place = scheduler.current if scheduler.is_open else scheduler.place
        sums = scheduler.metrics_state or scheduler.sums
        if not scheduler.is_open and not scheduler.metrics_state:
            sums = ()
            if scheduler.place.position:
                sums = tuple(evaluation.states_of_metrics(state.model))
        callbacks = self.callback_state.save() if self.callback_state else ([], {})
        state.start = dataclasses.replace(
            state.start,
            global_step=scheduler.global_step,
            metrics_state=sums,
            step_logs=scheduler.step_logs,
            begun_epoch=scheduler.begun_epoch,
            callbacks=callbacks,
            frozen=model_state.frozen_layers(state.model),
        )
        is_rank_0 = scheduler.run.rank == 0  # of those that are furthest: it alone has called its own callbacks since
        state.progress = progress(scheduler.global_step, not scheduler.is_open, is_rank_0)
        return int(state.progress)

    def synced(self) -> None:
        """Forgets what was trained before a change of ranks: the state is that of the rank that was furthest."""
        self.scheduler = None
        if self.config.train.virtual_ranks:
            self.state.model.train_function = None  # it is made for the virtual ranks of this rank

    def batches_of(self, run: RunContext) -> samples.BatchesOf:
        scheduler = cast(BatchScheduler, run.clock)

        def batches_of(epoch: int, first_step: int) -> tuple[tf.data.Dataset, int]:
            current = scheduler.current
            end = epoch + 1 if current.position else run.config.train.epochs
            return samples.dealt(run, range(epoch, end), current.position), end

        return batches_of

    @contextlib.contextmanager
    def training(self, run: RunContext) -> Iterator[StepsOf]:
        scheduler = cast(BatchScheduler, run.clock)
        scheduler.note_place()
        scheduler.stop = run.callbacks.stop
        with super().training(run) as steps_of:
            yield steps_of
        scheduler.write_down()

    def summary(self, run: RunContext) -> dict[str, Any]:
        place = self.state.place
        return {
            "num_ranks": run.size,
            "resizes": list(place.resizes),
            "fit_s": time.time() - place.started,
            "started": place.started,
            "strategy": self.about,
        }


def progress(global_step: int, is_closed: bool = True, is_rank_0: bool = False) -> int:
    """Number that is higher for a rank that is further, or whose state is preferred at the same step.

    is_closed: All that belongs to the end of the step's epoch, if it has ended, is done.
    """
    return 4 * global_step + 2 * is_closed + is_rank_0


class BatchScheduler(resume.Clock):
    """Counts steps and samples, and sets gradient weight and learning rate of each step.

    Attributes:
        current: Position in the current epoch, also after its last step.
        is_open: Whether the epoch's last step is made, but not all that belongs to its end.
        sums: What the metrics held after that step.
        stop: Callback that ends training; None: training has not begun.
    """

    def __init__(self, run: RunContext, place: Place) -> None:
        super().__init__(run.start, run.numbers.steps_per_epoch, run.status, run.journal)
        self.run, self.current = run, place
        self.is_open = place.position == place.length > 0
        self.stop: StopTogether | None = None
        self._before_end: tuple[Snapshot, resume.Ending] | None = None
        self.sums: tuple[NDArray[Any], ...] = ()
        self.schedule: schedules.Schedule | None = None
        if run.follows_schedule:
            self.schedule = schedules.schedule_of(run.config, run.numbers)
        self.rate = math.nan
        self.trained: list[tuple[int, int]] = []
        self.of_all: list[tuple[int, int]] = []
        config = run.config
        every = (config.elastic.commit_every_steps, config.health.agree_every_steps, config.checkpoint.every_steps)
        self.written_every = [steps for steps in every if steps]
        self.last_written = run.start.global_step

    @property
    def where(self) -> dict[str, Any]:
        return {**super().where, "generation": self.current.generation}

    @property
    def epoch_complete(self) -> bool:
        return self.current.position in (0, self.current.length)

    @property
    def place(self) -> Place:
        """Current position; after an epoch's last step, the start of the next one."""
        current = self.current
        if current.position == current.length > 0:
            return dataclasses.replace(current, epoch=current.epoch + 1, position=0, length=0)
        return current

    @property
    def epoch(self) -> int:
        return self.current.epoch if self.is_open else self.place.epoch

    @property
    def steps_left(self) -> int:
        current = self.current
        return math.ceil((current.length - current.position) / self.run.numbers.samples_per_step)

    def begin_epoch(self) -> tuple[int, range]:
        # One that was interrupted after its last step has none left: only its end is made up for.
        if not self.is_open:
            self.turn_over()
        first = self.current.position // self.run.numbers.samples_per_step
        return self.epoch, range(first, first + self.steps_left)

    def end_epoch(self) -> None:
        super().end_epoch()
        self.current, self.is_open = dataclasses.replace(self.current, position=self.current.length), True
        self.sums = tuple(evaluation.states_of_metrics(self.model))
        self.note_place()

    def keep_state(self) -> None:
        self._before_end = Snapshot(self.run.model, self.run.users_callbacks), self.ending

    @property
    def ending(self) -> resume.Ending:
        """Why training is about to end."""
        return self.stop.ending if self.stop else self.run.start.ending

    def close_epoch(self) -> None:
        """Ends the epoch for good: a change of ranks no longer undoes what its end has changed."""
        self.is_open, self._before_end = False, None

    def undo_end(self) -> resume.Ending:
        """Undoes an interrupted end of an epoch or of training; returns why training was about to end before it."""
        if self._before_end is None:
            return self.ending
        snapshot, ending = self._before_end
        snapshot.restore()
        return ending

    def restore_metrics(self) -> None:
        self.sums = self.metrics_state or self.sums
        super().restore_metrics()

    def turn_over(self) -> None:
        """Moves to the next epoch, if this one is over."""
        self.current = self.place
        if not self.current.position:
            length = rows_of_epoch(self.run, self.current.epoch)
            self.current = dataclasses.replace(self.current, length=length)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch, logs)
        hvd.step_timing.PLACE.enter("step")
        self.turn_over()
        current, numbers, run = self.current, self.run.numbers, self.run
        self.in_step = min(numbers.samples_per_step, current.length - current.position)
        parts = data.Parts.of_rank(run.rank, run.size, run.config.train.virtual_ranks)
        bounds = parts.bounds(self.in_step)
        first, last = bounds[0][0], bounds[-1][1]
        self.part = current.position + first, current.position + last
        if run.data_set.train.has_classes:  # else each batch has its share
            hvd.elastic.set_gradient_share(self.model.optimizer, (last - first) * run.size / self.in_step)
        if self.schedule is None:
            return
        steps = numbers.steps_per_epoch
        rate = float(self.schedule.rate(current.epoch * steps + current.position * steps // current.length))
        rate *= self.run.callbacks.plateau.share
        if rate != self.rate:  # otherwise a rate set by callbacks is kept
            self.rate = rate
            optimizers.set_rate(self.model.optimizer, rate)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        hvd.step_timing.PLACE.enter("callbacks")
        super().on_train_batch_end(batch, logs)
        before = self.current.position
        self.current = dataclasses.replace(self.current, position=before + self.in_step)
        if self.current.position == self.current.length:
            self.is_open, self.sums = True, tuple(evaluation.states_of_metrics(self.model))
            self.step_logs = {name: keras.ops.convert_to_numpy(value) for name, value in (logs or {}).items()}
        self.trained.append(self.part)
        self.of_all.append((before, self.current.position))
        self.note_place()
        if self.epoch_complete or any(self.global_step % every == 0 for every in self.written_every):
            self.write_down()

    def note_place(self) -> None:
        """Puts the position into the facts of the next checkpoint."""
        not_saved = ("num_ranks", "started")
        place = {name: value for name, value in vars(self.place).items() if name not in not_saved}
        self.run.callbacks.saver.facts["elastic"] = place

    def write_down(self) -> None:
        """Writes to the journal what this rank has trained, before a commit or a checkpoint may contain it."""
        if self.trained:
            current, after_step = self.current, self.last_written
            self.journal.write(
                "commit",
                generation=current.generation,
                global_step=self.global_step,
                epoch=current.epoch,
                length=current.length,
                after_step=after_step,
                trained=self.trained,
                of_all=self.of_all,
            )
        self.trained, self.of_all, self.last_written = [], [], self.global_step


def rows_of_epoch(job: Job, epoch: int) -> int:
    """Rows that an epoch trains: of arrays, also the last batch, which is smaller."""
    numbers = job.numbers
    rows, steps = numbers.samples_per_step, numbers.steps_per_epoch
    if job.data_set.train.has_classes:
        return rows * steps
    first = epoch * steps % math.ceil(numbers.num_train / rows)
    return min(numbers.num_train - first * rows, rows * steps)


class Committer(keras.callbacks.Callback):
    """Asks every few steps for hosts that have joined or left, and closes epochs; must be the last callback.

    Args:
        of_rank_0: State of the callbacks that run on rank 0 only, which another rank may become.
    """

    def __init__(self, state: Any, run: RunContext, of_rank_0: SharedCallbackState | None) -> None:
        super().__init__()
        self.state, self.run, self.of_rank_0 = state, run, of_rank_0
        self.scheduler = cast(BatchScheduler, run.clock)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.num_commits += 1  # a step is progress, after which the same failure is another one
        is_due = self.scheduler.global_step % self.run.config.elastic.commit_every_steps == 0
        if is_due and not self.scheduler.epoch_complete and not self.run.callbacks.stop.stopped_by:
            self._share()
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.scheduler.epoch_complete:
            return  # training was stopped
        callbacks = self.run.callbacks
        self._share()
        # From here on nothing of the epoch's end is undone.
        metrics, monitored = callbacks.saver.metrics, tuple(callbacks.plateau.values)
        self.state.start = dataclasses.replace(self.state.start, metrics=metrics, monitored=monitored)
        # Another host may have the next rank 0, and no common file system with this one.
        records = run_folder.records_of(self.run.folder) if self.run.rank == 0 else ""
        self.state.records = hvd.broadcast_object(records, root_rank=0, name="ringtrain_records")
        self.scheduler.close_epoch()
        if not callbacks.stop.stopped_by:  # else new ranks would find nothing to train
            self.state.commit()

    def _share(self) -> None:
        """Gives all ranks the state of the callbacks that run on rank 0 only. Collective."""
        if self.of_rank_0 is None:
            return
        state = self.of_rank_0.save() if self.run.rank == 0 else ([], {})
        state = hvd.broadcast_object(state, root_rank=0, name="ringtrain_callbacks_of_rank_0")
        if self.run.rank > 0:
            self.of_rank_0.restore(state)
