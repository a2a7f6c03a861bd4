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
import socket
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
from ringtrain.run import consistency, console, devices, log_capture, resume, tracking
from ringtrain.run.callbacks import Callbacks
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
        dealer: Batch scheduler of the current generation.
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
        if config.tracking.timeline_steps:
            raise ConfigError(
                "tracking.timeline_steps: got more than 0 in an elastic run, whose ranks join and leave: 0"
            )
        self.dealer: Dealer
        self.state: Any = None
        self.reached = 0
        self.has_log = False

    def begin(self) -> devices.Pinning:
        return devices.pin(hvd.local_rank(), hvd.local_size(), self.config.device)

    def together(self, function: Callable[[], Any]) -> Any:
        """Result of a function that this rank calls alone."""
        return function()

    def watch(self, model: keras.Model) -> None:
        """Does nothing: no heartbeats are compared."""

    def clock(self, run: RunContext) -> Dealer:
        self.dealer = Dealer(run, self.state.place)
        return self.dealer

    def segments(self, run: RunContext) -> Iterator[Segment]:
        """Rest of the current epoch, then of the run."""
        dealer = self.dealer
        while dealer.place.epoch < run.config.train.epochs:
            dealer.turn_over()
            end = dealer.epoch + 1 if dealer.position else run.config.train.epochs
            steps = math.ceil((dealer.length - dealer.position) / run.numbers.global_batch_size)
            yield Segment(dealer.epoch, end, steps, run.clock.global_step)

    def batches(self, run: RunContext, part: Segment) -> Any:
        return data.dealt_batches(
            run.data_set.train,
            range(part.first_epoch, part.end_epoch),
            run.config.seed,
            self.dealer.dealt_by,
            self.dealer.position,
            run.numbers.global_batch_size,
            run.rank,
            run.size,
        )

    def last_callbacks(self, run: RunContext) -> Sequence[keras.callbacks.Callback]:
        return [Committer(self.state, run)]

    def fit(self, run: RunContext, part: Segment) -> None:
        try:
            super().fit(run, part)
        finally:
            # After a failure: before another rank, or this one again, saves the same step.
            self.dealer.callbacks.saver.wait()
        self.dealer.write_down()

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


def keep(process: Process, walk: Callable[[RunContext], Any]) -> Any:
    """Makes this rank's model alone, then agrees with the others and trains, again after every change of ranks.

    Args:
        walk: trains and finishes a run, and returns its summary and exit code.
    """
    strategy: Any = process.strategy  # Elastic
    tracking.check_packages()
    process.config = resume.started_again(process.config, process.attempt)
    job = read_data(process, strategy.together)
    # The schedule's rates are set from outside: ranks that join later must build the same.
    flat = dataclasses.replace(process.config, schedule=ScheduleConfig())
    flat_job = dataclasses.replace(job, numbers=_numbers(flat, job, hvd.size()))
    add_model(process, flat_job, flat, strategy.together)
    strategy.state = hvd.elastic.KerasState(
        flat_job.model, folder="", place=Place(planned_ranks=hvd.size()), start=resume.Start()
    )

    def from_last_commit(state: Any) -> tuple[Mapping[str, Any], int]:
        run = agree(process, flat_job, state)
        return walk(run) if isinstance(run, RunContext) else (run, 0)

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
    planned = state.place.planned_ranks if config.elastic.keep == "global-batch" else size
    job = dataclasses.replace(job, numbers=hvd.run_together(lambda: _numbers(config, job, planned)))
    consistency.same_job(process, job)
    folder = Path(state.folder)
    hvd.run_together(lambda: process.lock.take(folder, same_job=True) if rank == 0 else None)
    process.journal.open(folder, rank, size, process.attempt.number)
    _resized(state, process, terminal)

    # All ranks reduce together, from the same weights.
    hvd.elastic.set_share(job.model.optimizer, 1.0)
    gradients = hvd.check_averaging(job.model.optimizer)
    hvd.check_in_sync(job.model)
    hosts = strategy.hosts()
    if not strategy.has_log:
        later = f"-from-step-{state.start.global_step}" if state.place.resizes else ""
        path = folder / "logs" / f"rank-{rank}{later}.log"
        log_capture.log_to(path, f"rank {rank} of {size} on {socket.gethostname()}: {process.pinning}")
        strategy.has_log = True
    metrics_state = state.start.metrics_state if rank == 0 else tuple(0 * sums for sums in state.start.metrics_state)
    start = dataclasses.replace(state.start, metrics_state=metrics_state)
    return RunContext(
        **vars(process), **vars(job), hosts=hosts, start=start, folder=folder, gradients=gradients, terminal=terminal
    )


def _begin(process: Process, job: Job, state: Any, terminal: Any) -> Mapping[str, Any]:
    """Finds start and run folder, once, on the first ranks. Returns summary.json if the run is complete, else {}."""
    config, size = process.config, hvd.size()
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
    strategy = process.strategy
    placement = strategy.placement(numbers, process.pinning, strategy.hosts())
    console.show_plan(terminal, config, numbers, placement, strategy.shard(numbers), strategy.shown_name)
    console.show_start(terminal, config, start, process.attempt.causes)
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
    place, size, global_step = state.place, hvd.size(), state.start.global_step
    news = hvd.allgather_object((strategy.reached, f"{time.time_ns():x}"), name="ringtrain_news")
    lost_steps = max(0, max(reached for reached, _ in news) - global_step) if place.num_ranks else 0
    event, resizes = "start", place.resizes
    if place.num_ranks and hvd.rank() == 0:
        failures.report_recovery()
    if place.num_ranks:
        event = "resize"
        resizes = (
            *resizes,
            {"global_step": global_step, "from": place.num_ranks, "to": size, "lost_steps": lost_steps},
        )
        again = f"; {lost_steps} steps are made again" * bool(lost_steps)
        ranks = "1 rank" if place.num_ranks == 1 else f"{place.num_ranks} ranks"
        terminal.print(f"{ranks} became {size} after step {global_step}{again}", highlight=False)
    generation, after = news[0][1], place.generation
    state.place = dataclasses.replace(place, num_ranks=size, generation=generation, resizes=resizes)
    state.save()
    strategy.reached = global_step
    process.journal.write(
        event,
        **{"global_step": global_step, "epoch": place.epoch, "position": place.position},
        **{"generation": generation, "after": after, "from": place.num_ranks, "to": size, "lost_steps": lost_steps},
    )


class Dealer(resume.Clock):
    """Elastic batch scheduler: counts steps and samples, and sets gradient weight and learning rate of each step."""

    def __init__(self, run: RunContext, place: Place) -> None:
        super().__init__(run.start, run.numbers.steps_per_epoch, run.status, run.journal)
        self.context, self.begun_at, self.numbers = run, place, run.numbers
        self.rank, self.size = run.rank, run.size
        self.strategy: Any = run.strategy
        self.epoch, self.position = place.epoch, place.position
        self.dealt_by, self.length = place.dealt_by, place.length
        config = run.config
        self.schedule = schedules.schedule_of(config, run.numbers)
        self.rate = math.nan
        self.trained: list[tuple[int, int]] = []
        self.kept: list[np.ndarray] | None = None
        every = (config.elastic.commit_every_steps, config.health.agree_every_steps, config.checkpoint.every_steps)
        self.written_every = [steps for steps in every if steps]
        self.last_written = run.start.global_step

    @property
    def callbacks(self) -> Callbacks:
        return self.context.callbacks

    @property
    def epoch_complete(self) -> bool:
        return self.position in (0, self.length)

    @property
    def place(self) -> Place:
        """Current position; after an epoch's last step, the start of the next one."""
        if self.position == self.length > 0:
            return dataclasses.replace(self.begun_at, epoch=self.epoch + 1, position=0, dealt_by=0, length=0)
        epoch, position, dealt_by, length = self.epoch, self.position, self.dealt_by, self.length
        return dataclasses.replace(self.begun_at, epoch=epoch, position=position, dealt_by=dealt_by, length=length)

    def turn_over(self) -> None:
        """Moves to the next epoch, if this one is over."""
        self.epoch, self.position = self.place.epoch, self.place.position
        if not self.position:
            self.dealt_by = self.numbers.global_batch_size
            self.length = self.numbers.steps_per_epoch * self.dealt_by

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.turn_over()
        in_step = min(self.numbers.global_batch_size, self.length - self.position)
        first, last = data.part_of(in_step, self.rank, self.size)
        self.part = self.position + first, self.position + last
        self.position_then = self.position + in_step
        hvd.elastic.set_share(self.model.optimizer, (last - first) * self.size / in_step)
        if first == last:  # a sample of another rank, which counts it
            self.kept = [keras.ops.convert_to_numpy(variable) for variable in self.model.metrics_variables]
        steps = self.numbers.steps_per_epoch
        rate = float(self.schedule.rate(self.epoch * steps + self.position * steps // self.length))
        rate *= self.callbacks.plateau.share
        if rate != self.rate:  # otherwise a rate set by callbacks is kept
            self.rate = rate
            optimizers.set_rate(self.model.optimizer, rate)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.kept is not None:
            self.model.reset_metrics()
            for variable, array in zip(self.model.metrics_variables, self.kept, strict=False):
                variable.assign(array)
            self.kept = None
        super().on_train_batch_end(batch, logs)
        self.position = self.position_then
        self.strategy.reached = self.global_step
        self.trained.append(self.part)
        self.callbacks.saver.facts["elastic"] = self._to_save()
        if self.epoch_complete or any(self.global_step % every == 0 for every in self.written_every):
            self.write_down()

    def write_down(self) -> None:
        """Writes to the journal what this rank has trained, before a commit or a checkpoint may contain it."""
        if self.trained:
            what = {"epoch": self.epoch, "length": self.length, "after_step": self.last_written}
            generation = self.begun_at.generation
            self.journal.write(
                "commit", generation=generation, global_step=self.global_step, **what, trained=self.trained
            )
        self.trained, self.last_written = [], self.global_step

    def _to_save(self) -> dict[str, Any]:
        place = self.place
        names = ("epoch", "position", "dealt_by", "length", "generation", "resizes")
        return {name: getattr(place, name) for name in names}


class Committer(keras.callbacks.Callback):
    """Commits every few steps and after each epoch; must be the last callback."""

    def __init__(self, state: Any, run: RunContext) -> None:
        super().__init__()
        self.state = state
        self.context = run
        self.dealer: Any = run.clock
        self.every_steps = run.config.elastic.commit_every_steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.dealer.global_step % self.every_steps == 0 and not self.dealer.epoch_complete:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._commit()

    def _commit(self) -> None:
        dealer, callbacks = self.dealer, self.context.callbacks
        hvd.average_moving_statistics(self.model, self.context.config.model.not_averaged)
        # Every rank has written what it trained to the journal before any rank has the sums.
        sums: tuple[Any, ...] = ()
        own = [np.asarray(keras.ops.convert_to_numpy(one), np.float64) for one in self.model.metrics_variables]
        flat = np.concatenate([part.reshape(-1) for part in own])
        total = hvd.allreduce(flat, op=hvd.Sum, name="ringtrain_commit").numpy()
        if not dealer.epoch_complete:
            ends = np.cumsum([part.size for part in own])[:-1]
            sums = tuple(part.reshape(one.shape) for part, one in zip(np.split(total, ends), own, strict=True))
        self.state.place = dealer.place
        self.state.start = dataclasses.replace(
            self.state.start,
            global_step=dealer.global_step,
            metrics=callbacks.saver.metrics,
            monitored=tuple(callbacks.plateau.values),
            metrics_state=sums,
        )
        self.state.commit()
