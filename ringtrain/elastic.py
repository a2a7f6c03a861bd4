"""Main path of a run whose ranks join and leave, under ringtrain launch --elastic; as in train.py.

The current ranks train from the last commit, which all of them hold in memory. When a rank is lost, the others return
to it; when hosts have joined or left, all continue from a commit made just then. Either way the rest of the epoch's
order, from its position on, is redistributed over the current ranks:

    elastic.keep global-batch     The global batch stays that of the run's start, and with it the steps and the
                                  learning rate. The ranks share it, also unevenly: a rank with n of its G samples
                                  has the weight n / G, so that the update is that of one process with all of them.
    elastic.keep per-rank-batch   Each rank keeps train.batch_size. Global batch and learning rate follow the number of
                                  ranks, by optimizer.learning_rate_scaling, and the schedule follows the completed
                                  fraction of the run's epochs. The last step of an epoch in which ranks have joined
                                  or left may be smaller.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ringtrain import data, hvd
from ringtrain.config import Config, ScheduleConfig
from ringtrain.derived import Numbers, derive
from ringtrain.errors import ConfigError
from ringtrain.optim import optimizers, schedules
from ringtrain.protocol import failures
from ringtrain.run import consistency, console, devices, evaluation, resume
from ringtrain.run.context import Job, Process, RunContext
from ringtrain.run.resume import Segment
from ringtrain.run.setup import add_model, read_data
from ringtrain.strategies.ring import Ring


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of an elastic run; part of every commit."""

    planned_ranks: int
    """Number of ranks whose global batch is kept."""
    num_ranks: int = 0
    """Number since the last change; 0: not started."""
    epoch: int = 0
    position: int = 0
    """Samples of the epoch's order that are trained."""
    dealt_by: int = 0
    """Global batch size that the epoch's order is made for."""
    length: int = 0
    """Samples in that order."""
    generation: str = ""
    """ID of the ranks that train together."""
    resizes: tuple[dict[str, int], ...] = ()
    started: float = 0.0


class Elastic(Ring):
    """Strategy ring whose ranks join and leave. Until `agree`, no collectives: other ranks may be training.

    Attributes:
        scheduler: Batch scheduler of the current generation.
        reached: Furthest step of this process so far.
        has_log: Whether this process writes to a log of the run.
    """

    ranks_change = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.optimizer.accumulation_steps > 1:
            raise ConfigError(
                "optimizer.accumulation_steps: got more than 1 in an elastic run, which commits whole steps: 1"
            )
        if config.model.split:
            raise ConfigError("model.split: ranks that join and leave have one device: leave it out")
        if config.optimizer.sharded:
            raise ConfigError("optimizer.sharded: a rank that is lost would take its slots along: leave it out")
        if config.tracking.timeline_steps:
            raise ConfigError(
                "tracking.timeline_steps: got more than 0 in an elastic run, whose ranks join and leave: 0"
            )
        self.scheduler: BatchScheduler
        self.state: Any = None
        self.reached = 0
        self.has_log = False

    def begin(self) -> devices.Pinning:
        return devices.pin(hvd.local_rank(), hvd.local_size(), self.config.device, **self.pinning)

    def together(self, function: Callable[[], Any]) -> Any:
        """Result of a function that this rank calls alone."""
        return function()

    def watch(self, model: keras.Model) -> None:
        """Does nothing: no heartbeats are compared."""

    def clock(self, run: RunContext) -> BatchScheduler:
        self.scheduler = BatchScheduler(run, self.state.place)
        return self.scheduler

    def segments(self, run: RunContext) -> Iterator[Segment]:
        """Rest of the current epoch, then of the run."""
        scheduler = self.scheduler
        while scheduler.place.epoch < run.config.train.epochs:
            scheduler.turn_over()
            place = scheduler.current
            end = place.epoch + 1 if place.position else run.config.train.epochs
            steps = math.ceil((place.length - place.position) / run.numbers.global_batch_size)
            yield Segment(place.epoch, end, steps, run.clock.global_step)

    def batches(self, run: RunContext, part: Segment) -> Any:
        return self.dealt(run, part, self.scheduler.current.dealt_by, self.scheduler.current.position)

    def last_callbacks(self, run: RunContext) -> Sequence[keras.callbacks.Callback]:
        return [Committer(self.state, run)]

    def fit(self, run: RunContext, part: Segment) -> None:
        try:
            super().fit(run, part)
        finally:
            # After a failure: before another rank, or this one again, saves the same step.
            run.callbacks.saver.wait()
        self.scheduler.write_down()

    def summary(self, run: RunContext) -> dict[str, Any]:
        place = self.state.place
        return {
            "num_ranks": run.size,
            "resizes": list(place.resizes),
            "fit_s": time.time() - place.started,
            "started": place.started,
            "strategy": self.about,
        }

    def place(self) -> dict[str, Any]:
        return {"generation": self.state.place.generation}


def run(process: Process, fit_and_finish: Callable[[RunContext], Any]) -> Any:
    """Makes this rank's model alone, then agrees with the others and trains, again after every change of ranks.

    Returns the summary and the exit code, as `fit_and_finish` does.
    """
    strategy: Any = process.strategy  # Elastic
    job = read_data(process)
    # The schedule's rates are set from outside: ranks that join later must build the same.
    flat = dataclasses.replace(process.config, schedule=ScheduleConfig())
    flat_job = dataclasses.replace(job, numbers=_numbers(flat, job, strategy.num_shards()))
    add_model(process, flat_job, flat)
    strategy.state = hvd.elastic.KerasState(
        flat_job.model, folder="", place=Place(planned_ranks=strategy.num_shards()), start=resume.Start()
    )

    def from_last_commit(state: Any) -> tuple[Mapping[str, Any], int]:
        agreed = agree(process, flat_job, state)
        return fit_and_finish(agreed) if isinstance(agreed, RunContext) else (agreed, 0)

    with process.signals:
        return hvd.elastic.run(from_last_commit)(strategy.state)


def _numbers(config: Config, job: Job, num_ranks: int) -> Numbers:
    return derive(config, num_ranks, len(job.data_set.train), len(job.data_set.test))


def agree(process: Process, job: Job, state: Any) -> RunContext | Mapping[str, Any]:
    """Agrees with the current ranks on the last commit, or on the start of the run; see train.agree."""
    strategy: Any = process.strategy  # Elastic
    config, rank, size = process.config, hvd.rank(), hvd.size()
    terminal = console.console_for(rank)
    consistency.same_code(process)
    if not state.folder and (summary := _begin(process, job, state, terminal)):
        process.lock.release()
        return summary
    if rank:
        process.lock.release()  # the current rank 0 takes it
    num_shards = hvd.run_together(strategy.num_shards)
    planned = state.place.planned_ranks if config.elastic.keep == "global-batch" else num_shards
    job = dataclasses.replace(job, numbers=hvd.run_together(lambda: _numbers(config, job, planned)))
    consistency.same_job(process, job)
    folder = Path(state.folder)
    hvd.run_together(lambda: process.lock.take(folder, same_job=True) if rank == 0 else None)
    process.journal.open(folder, rank, size, process.attempt.number)
    _resized(state, process, terminal)

    # All ranks reduce together, from the same weights.
    hvd.elastic.set_share(job.model.optimizer, 1.0)
    gradients = strategy.check_averaging(job.model)
    hvd.check_in_sync(job.model)
    hosts = strategy.hosts()
    if not strategy.has_log:
        later = f"-from-step-{state.start.global_step}" if state.place.resizes else ""
        consistency.open_log(process, folder / "logs" / f"rank-{rank}{later}.log")
        strategy.has_log = True
    metrics_state = state.start.metrics_state if rank == 0 else tuple(0 * sums for sums in state.start.metrics_state)
    start = dataclasses.replace(state.start, metrics_state=metrics_state)
    return RunContext(
        **vars(process), **vars(job), hosts=hosts, start=start, folder=folder, gradients=gradients, terminal=terminal
    )


def _begin(process: Process, job: Job, state: Any, terminal: Any) -> Mapping[str, Any]:
    """Finds start and run folder, once, on the first ranks. Returns summary.json if the run is complete, else {}."""
    config, size = process.config, hvd.run_together(process.strategy.num_shards)
    folder, _ = resume.source_of(config)
    saved = hvd.run_together(lambda: resume.manifest_of(folder) if hvd.rank() == 0 else {})
    saved = hvd.broadcast_object(saved, root_rank=0, name="ringtrain_manifest")
    planned = size
    if saved and saved["numbers"]["batch_size"] == config.train.batch_size and config.elastic.keep == "global-batch":
        planned = saved["numbers"]["num_ranks"]
    numbers = must_match = hvd.run_together(lambda: _numbers(config, job, planned))
    if saved and config.elastic.keep == "per-rank-batch":  # the global batch may then be different
        train = dataclasses.replace(config.train, batch_size=saved["numbers"]["batch_size"])
        then = dataclasses.replace(config, train=train)
        must_match = hvd.run_together(lambda: _numbers(then, job, saved["numbers"]["num_ranks"]))
    start, summary = consistency.restore(
        process, job, must_match, lambda start: _place_of(saved, start).get("epoch", 0) >= config.train.epochs
    )
    if summary:
        return summary
    state.folder = str(consistency.make_folder(process, numbers, start))
    # Rank 0 resumes with the metric sums of all ranks.
    sums = hvd.allgather_object(start.metrics_state, name="ringtrain_metrics_state")
    state.start = dataclasses.replace(start, metrics_state=tuple(sum(parts) for parts in zip(*sums, strict=True)))
    state.place = Place(planned, started=time.time(), **_place_of(saved, start))
    console.show_plan(terminal, process, numbers, process.strategy.hosts(), job.plan)
    console.show_start(terminal, process, start)
    return {}


def _place_of(saved: dict[str, Any], start: resume.Start) -> dict[str, Any]:
    """Returns the position of a checkpoint in its epoch."""
    if not start.source:
        return {}
    if "elastic" in saved:
        return {**saved["elastic"], "resizes": tuple(saved["elastic"]["resizes"])}
    steps, batch = saved["numbers"]["steps_per_epoch"], saved["numbers"]["global_batch_size"]
    epoch, step = divmod(start.global_step, steps)
    return {"epoch": epoch, "position": step * batch, "dealt_by": batch, "length": steps * batch}


def _resized(state: Any, process: Process, terminal: Any) -> None:
    """Records the current ranks in the state that a failure returns to."""
    strategy: Any = process.strategy  # Elastic
    place, size, global_step, resizes = state.place, hvd.size(), state.start.global_step, state.place.resizes
    of_ranks = hvd.allgather_object((strategy.reached, f"{time.time_ns():x}"), name="ringtrain_news")
    lost_steps = max(0, max(reached for reached, _ in of_ranks) - global_step) if place.num_ranks else 0
    change = {"from": place.num_ranks, "to": size, "lost_steps": lost_steps}
    if place.num_ranks:
        if hvd.rank() == 0:
            failures.report_recovery()
        resizes = (*resizes, {"global_step": global_step, **change})
        repeated = f"; {lost_steps} steps are repeated" * bool(lost_steps)
        text = f"continues after step {global_step} with {size} ranks, before with {place.num_ranks}{repeated}"
        terminal.print(text, highlight=False)
    generation, event = of_ranks[0][1], "resize" if place.num_ranks else "start"
    state.place = dataclasses.replace(place, num_ranks=size, generation=generation, resizes=resizes)
    state.save()
    strategy.reached = global_step
    where = {"global_step": global_step, "epoch": place.epoch, "position": place.position}
    process.journal.write(event, **where, generation=generation, after=place.generation, **change)


class BatchScheduler(resume.Clock):
    """Counts steps and samples, and sets gradient weight and learning rate of each step.

    Attributes:
        current: Position in the current epoch, also after its last step.
    """

    def __init__(self, run: RunContext, place: Place) -> None:
        super().__init__(run.start, run.numbers.steps_per_epoch, run.status, run.journal)
        self.run, self.current = run, place
        self.schedule = schedules.schedule_of(run.config, run.numbers)
        self.rate = math.nan
        self.trained: list[tuple[int, int]] = []
        self.metrics_before: list[np.ndarray] = []
        config = run.config
        every = (config.elastic.commit_every_steps, config.health.agree_every_steps, config.checkpoint.every_steps)
        self.written_every = [steps for steps in every if steps]
        self.last_written = run.start.global_step

    @property
    def epoch_complete(self) -> bool:
        return self.current.position in (0, self.current.length)

    @property
    def place(self) -> Place:
        """Current position; after an epoch's last step, the start of the next one."""
        current = self.current
        if current.position == current.length > 0:
            return dataclasses.replace(current, epoch=current.epoch + 1, position=0, dealt_by=0, length=0)
        return current

    def turn_over(self) -> None:
        """Moves to the next epoch, if this one is over."""
        self.current = self.place
        if not self.current.position:
            size, steps = self.run.numbers.global_batch_size, self.run.numbers.steps_per_epoch
            self.current = dataclasses.replace(self.current, dealt_by=size, length=steps * size)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.turn_over()
        current, numbers, rank, size = self.current, self.run.numbers, self.run.rank, self.run.size
        self.in_step = min(numbers.global_batch_size, current.length - current.position)
        whole = numbers.batch_size if self.run.config.train.virtual_ranks else 1
        first, last = data.part_of(self.in_step, rank, size, whole)
        self.part = current.position + first, current.position + last
        hvd.elastic.set_share(self.model.optimizer, (last - first) * size / self.in_step)
        if first == last:  # a sample of another rank, which counts it
            self.metrics_before = evaluation.states_of_metrics(self.model)
        steps = numbers.steps_per_epoch
        rate = float(self.schedule.rate(current.epoch * steps + current.position * steps // current.length))
        rate *= self.run.callbacks.plateau.share
        if rate != self.rate:  # otherwise a rate set by callbacks is kept
            self.rate = rate
            optimizers.set_rate(self.model.optimizer, rate)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.part[0] == self.part[1]:
            self.model.reset_metrics()
            for variable, array in zip(self.model.metrics_variables, self.metrics_before, strict=False):
                variable.assign(array)
        super().on_train_batch_end(batch, logs)
        self.current = dataclasses.replace(self.current, position=self.current.position + self.in_step)
        strategy: Any = self.run.strategy  # Elastic
        strategy.reached = self.global_step
        self.trained.append(self.part)
        not_saved = ("planned_ranks", "num_ranks", "started")
        place = {name: value for name, value in vars(self.place).items() if name not in not_saved}
        self.run.callbacks.saver.facts["elastic"] = place
        if self.epoch_complete or any(self.global_step % every == 0 for every in self.written_every):
            self.write_down()

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
            )
        self.trained, self.last_written = [], self.global_step


class Committer(keras.callbacks.Callback):
    """Commits every few steps and after each epoch; must be the last callback."""

    def __init__(self, state: Any, run: RunContext) -> None:
        super().__init__()
        self.state, self.run = state, run
        self.scheduler: Any = run.clock

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        is_due = self.scheduler.global_step % self.run.config.elastic.commit_every_steps == 0
        if is_due and not self.scheduler.epoch_complete:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._commit()

    def _commit(self) -> None:
        scheduler, callbacks = self.scheduler, self.run.callbacks
        hvd.average_moving_statistics(self.model, self.run.config.model.not_averaged)
        # Every rank has written what it trained to the journal before any rank has the sums.
        sums = evaluation.sums_over_ranks(evaluation.states_of_metrics(self.model), "ringtrain_commit")
        self.state.place = scheduler.place
        self.state.start = dataclasses.replace(
            self.state.start,
            global_step=scheduler.global_step,
            metrics=callbacks.saver.metrics,
            monitored=tuple(callbacks.plateau.values),
            metrics_state=() if scheduler.epoch_complete else tuple(sums),
        )
        self.state.commit()
