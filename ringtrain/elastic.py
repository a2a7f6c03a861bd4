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
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console

from ringtrain import data, hvd, strategies
from ringtrain.config import Config, ScheduleConfig
from ringtrain.derived import Numbers, derive
from ringtrain.errors import ConfigError
from ringtrain.monitor import journal
from ringtrain.optim import optimizers, schedules
from ringtrain.protocol import failures, status
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import (
    checkpoint,
    consistency,
    console,
    devices,
    log_capture,
    resume,
    run_folder,
    setup,
    stopping,
    tracking,
)


def train(config: Config, named: setup.Named, attempt: Attempt) -> int:
    """Trains as train.train does. Until `_walk`, no collectives: the other ranks may be in the middle of training."""
    if config.optimizer.accumulation_steps > 1:
        raise ConfigError(
            "optimizer.accumulation_steps: got more than 1 in an elastic run, which commits whole steps: 1"
        )
    if config.tracking.timeline_steps:
        raise ConfigError("tracking.timeline_steps: got more than 0 in an elastic run, whose ranks come and go: 0")
    hvd.check_op(config.hvd)
    pinning = devices.pin(hvd.local_rank(), hvd.local_size(), config.device)
    tracking.check_packages()
    config = resume.started_again(config, attempt)
    data_set = named.read_data()
    # The schedule's rates are set from outside: ranks that join later must build the same.
    flat = dataclasses.replace(config, schedule=ScheduleConfig())
    numbers = derive(flat, hvd.size(), len(data_set.train), len(data_set.test))
    model = setup.compiled_model(named, data_set, flat, numbers, strategies.make(flat))
    checkpoint.check_exportable(model)
    gradient_norm = hvd.track_gradient_norm(model.optimizer) if config.tracking.every_steps else None
    state = hvd.elastic.KerasState(model, folder="", run=Run(planned_ranks=hvd.size()), start=resume.Start())
    with stopping.Signals() as signals:
        prints = consistency.of_code(config, tracking.versions()) | data.checksums(data_set)
        lock, own_callbacks = run_folder.RunLock(), named.make_callbacks()
        rank = Rank(config, named, attempt, prints, data_set, pinning, signals, own_callbacks, gradient_norm, lock)
        return hvd.elastic.run(_walk)(state, rank)


@dataclasses.dataclass(frozen=True)
class Run:
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


@dataclasses.dataclass
class Rank:
    """State of this process that survives all changes of ranks."""

    config: Config
    named: setup.Named
    attempt: Attempt
    prints: dict[str, str]
    """Checksums of its code and data."""
    data_set: data.DataSet
    pinning: Any
    signals: stopping.Signals
    users_callbacks: list[keras.callbacks.Callback]
    gradient_norm: Any
    lock: run_folder.RunLock
    """Lock of the run folder, if this is rank 0."""
    reached: int = 0
    """Furthest step so far."""
    begun: bool = False

    def numbers(self, num_ranks: int) -> Numbers:
        """Returns the run's numbers for this number of ranks."""
        return derive(self.config, num_ranks, len(self.data_set.train), len(self.data_set.test))


def _walk(state: Any, own: Rank) -> int:
    """Trains from the last commit to the end; every rank calls it, again after every change of ranks."""
    config, model, rank, size = own.config, state.model, hvd.rank(), hvd.size()
    hvd.check_placement("" if config.device.share_gpus else devices.identity(own.pinning))
    consistency.refuse(hvd.allgather_object((socket.gethostname(), own.prints), name="ringtrain_prints"))
    terminal = console.console_for(rank)
    if not state.folder and not _begin(state, own, terminal):
        own.lock.release()
        return 0
    if rank:
        own.lock.release()  # the current rank 0 takes it
    planned = state.run.planned_ranks if config.elastic.keep == "global-batch" else size
    numbers = hvd.run_together(lambda: own.numbers(planned))
    setup.refuse_differences(hvd.allgather_object((config, numbers), name="ringtrain_numbers"))
    folder = Path(state.folder)
    hvd.run_together(lambda: own.lock.take(folder, same_job=True) if rank == 0 else None)
    log = journal.Journal(folder, rank, size, own.attempt.number)
    run = _resized(state, own, log, terminal)

    # All ranks reduce together, from the same weights.
    hvd.elastic.set_share(model.optimizer, 1.0)
    gradients = hvd.check_averaging(model.optimizer)
    hvd.check_in_sync(model)
    hosts = hvd.allgather_object(socket.gethostname(), name="ringtrain_hosts")
    if not own.begun:
        later = f"-from-step-{state.start.global_step}" if run.resizes else ""
        path = folder / "logs" / f"rank-{rank}{later}.log"
        hvd_line = f"rank {rank} of {size} on {socket.gethostname()}: {own.pinning}"
        log_capture.log_to(path, hvd_line)
        own.begun = True

    metrics_state = state.start.metrics_state if rank == 0 else tuple(0 * sums for sums in state.start.metrics_state)
    start = dataclasses.replace(state.start, metrics_state=metrics_state)
    dealer = Dealer(start, run, numbers, config, log, status.StatusLine(rank))
    with console.Progress(terminal, numbers.num_steps, config.train.epochs, log_capture.to_log) as progress:
        course = setup.Course(
            config,
            numbers,
            model,
            own.data_set,
            folder,
            start,
            dealer,
            log,
            progress,
            own.signals,
            own.named.faults,
            own.users_callbacks,
            own.gradient_norm,
        )
        dealer.course, dealer.own = course, own
        while dealer.place.epoch < config.train.epochs and not course.stop.stopped_by:
            dealer.turn_over()
            begun = dealer.position > 0
            epochs = range(dealer.epoch, dealer.epoch + 1 if begun else config.train.epochs)
            batches = data.dealt_batches(
                own.data_set.train,
                epochs,
                config.seed,
                dealer.dealt_by,
                dealer.position,
                numbers.global_batch_size,
                rank,
                size,
            )
            try:
                model.fit(
                    batches,
                    initial_epoch=epochs.start,
                    epochs=epochs.stop,
                    steps_per_epoch=math.ceil((dealer.length - dealer.position) / numbers.global_batch_size),
                    callbacks=[*course.callbacks, Committer(state, dealer)],
                    shuffle=False,
                    verbose=0,
                )
            finally:
                course.saver.wait()  # after a failure: before another rank, or this one again, saves the same step
        dealer.write_down()
        course.saver.finish()
        hvd.average_moving_statistics(model, config.model.not_averaged)

    more = {"num_ranks": size, "resizes": list(run.resizes), "fit_s": time.time() - run.started, "started": run.started}
    summary = course.finish(hosts, own.attempt, **more, strategy=strategies.make(config).about)
    console.show_result(terminal, folder, summary, gradients)
    facts = {
        "global_step": dealer.global_step,
        "stopped_by": course.stop.stopped_by,
        "exit_code": course.stop.exit_code,
    }
    log.write("end", generation=run.generation, **facts)
    own.lock.release()
    return course.stop.exit_code


def _begin(state: Any, own: Rank, terminal: Console) -> bool:
    """Finds the start position and the run folder, once, on the first ranks. Returns False if the run is complete."""
    config, model, size = own.config, state.model, hvd.size()
    setup.lock_folder(own.lock, config, own.attempt)
    folder, must = resume.source_of(config)
    saved = hvd.run_together(lambda: resume.manifest_of(folder) if hvd.rank() == 0 else {})
    saved = hvd.broadcast_object(saved, root_rank=0, name="ringtrain_manifest")
    planned = size
    if saved and saved["numbers"]["batch_size"] == config.train.batch_size and config.elastic.keep == "global-batch":
        planned = saved["numbers"]["num_ranks"]
    numbers = hvd.run_together(lambda: own.numbers(planned))
    if saved and config.elastic.keep == "per-rank-batch":  # the global batch may then be different
        train = dataclasses.replace(config.train, batch_size=saved["numbers"]["batch_size"])
        then = dataclasses.replace(own, config=dataclasses.replace(config, train=train))
        same = hvd.run_together(lambda: then.numbers(saved["numbers"]["num_ranks"]))
        start = resume.restore(model, folder, must, config, same)
    else:
        start = resume.restore(model, folder, must, config, numbers)
    place = _place_of(saved, start)
    if setup.is_complete(own.lock, config, start, place.get("epoch", 0) >= config.train.epochs):
        return False
    if config.run.init_from and not start.source:
        source = Path(config.run.init_from)
        hvd.run_together(lambda: resume.load_weights(model, source) if hvd.rank() == 0 else None)
        hvd.broadcast_model(model, root_rank=0)
    state.folder = str(setup.agree_on_folder(config, numbers, own.attempt, own.lock))
    if hvd.rank() == 0:
        failures.report_run(Path(state.folder).name)
    if start.source:
        path = Path(state.folder) / "checkpoints"
        hvd.run_together(lambda: checkpoint.remove_after(path, start.global_step) if hvd.rank() == 0 else None)
    # Rank 0 resumes with the metric sums of all ranks.
    sums = hvd.allgather_object(start.metrics_state, name="ringtrain_metrics_state")
    state.start = dataclasses.replace(start, metrics_state=tuple(sum(parts) for parts in zip(*sums, strict=True)))
    state.run = Run(planned, started=time.time(), **place)
    hosts = hvd.allgather_object(socket.gethostname(), name="ringtrain_hosts")
    console.show_plan(terminal, config, numbers, own.pinning, hosts)
    console.show_start(terminal, config, start, own.attempt.causes)
    return True


def _place_of(saved: dict[str, Any], start: resume.Start) -> dict[str, Any]:
    """Returns the position of a checkpoint in its epoch."""
    if not start.source:
        return {}
    if "elastic" in saved:
        return {**saved["elastic"], "resizes": tuple(saved["elastic"]["resizes"])}
    steps, batch = saved["numbers"]["steps_per_epoch"], saved["numbers"]["global_batch_size"]
    epoch, step = divmod(start.global_step, steps)
    return {"epoch": epoch, "position": step * batch, "dealt_by": batch, "length": steps * batch}


def _resized(state: Any, own: Rank, log: journal.Journal, terminal: Console) -> Run:
    """Records the current ranks in the state that a failure returns to."""
    run, size, global_step = state.run, hvd.size(), state.start.global_step
    news = hvd.allgather_object((own.reached, f"{time.time_ns():x}"), name="ringtrain_news")
    lost_steps = max(0, max(reached for reached, _ in news) - global_step) if run.num_ranks else 0
    event, resizes = "start", run.resizes
    if run.num_ranks and hvd.rank() == 0:
        failures.report_recovery()
    if run.num_ranks:
        event = "resize"
        resizes = (*resizes, {"global_step": global_step, "from": run.num_ranks, "to": size, "lost_steps": lost_steps})
        again = f"; {lost_steps} steps are made again" * bool(lost_steps)
        ranks = "1 rank" if run.num_ranks == 1 else f"{run.num_ranks} ranks"
        terminal.print(f"{ranks} became {size} after step {global_step}{again}", highlight=False)
    after = run.generation
    state.run = dataclasses.replace(run, num_ranks=size, generation=news[0][1], resizes=resizes)
    state.save()
    own.reached = global_step
    place = {"epoch": run.epoch, "position": run.position, "generation": news[0][1], "after": after}
    changed = {"from": run.num_ranks, "to": size, "lost_steps": lost_steps}
    journal.begin(log, event, global_step=global_step, **place, **changed)
    return state.run


class Dealer(resume.Clock):
    """Elastic batch scheduler: counts steps and samples, and sets gradient weight and learning rate of each step."""

    course: setup.Course
    own: Rank

    def __init__(
        self,
        start: resume.Start,
        run: Run,
        numbers: Numbers,
        config: Config,
        log: journal.Journal,
        box: status.StatusLine,
    ) -> None:
        super().__init__(start, numbers.steps_per_epoch, box, log)
        self.run, self.numbers, self.log = run, numbers, log
        self.rank, self.size = hvd.rank(), hvd.size()
        self.epoch, self.position, self.dealt_by, self.length = run.epoch, run.position, run.dealt_by, run.length
        self.schedule = schedules.schedule_of(config, numbers)
        self.rate = math.nan
        self.trained: list[tuple[int, int]] = []
        self.kept: list[np.ndarray] | None = None
        every = (config.elastic.commit_every_steps, config.health.agree_every_steps, config.checkpoint.every_steps)
        self.written_every = [steps for steps in every if steps]
        self.last_written = start.global_step

    @property
    def epoch_complete(self) -> bool:
        return self.position in (0, self.length)

    @property
    def place(self) -> Run:
        """Current position; after an epoch's last step, the start of the next one."""
        if self.position == self.length > 0:
            return dataclasses.replace(self.run, epoch=self.epoch + 1, position=0, dealt_by=0, length=0)
        epoch, position, dealt_by, length = self.epoch, self.position, self.dealt_by, self.length
        return dataclasses.replace(self.run, epoch=epoch, position=position, dealt_by=dealt_by, length=length)

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
        rate *= self.course.watch.share
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
        self.own.reached = self.global_step
        self.trained.append(self.part)
        self.course.saver.facts["elastic"] = self._to_save()
        if self.epoch_complete or any(self.global_step % every == 0 for every in self.written_every):
            self.write_down()

    def write_down(self) -> None:
        """Writes to the journal what this rank has trained, before a commit or a checkpoint may contain it."""
        if self.trained:
            what = {"epoch": self.epoch, "length": self.length, "after_step": self.last_written}
            generation = self.run.generation
            self.log.write("commit", generation=generation, global_step=self.global_step, **what, trained=self.trained)
        self.trained, self.last_written = [], self.global_step

    def _to_save(self) -> dict[str, Any]:
        place = self.place
        names = ("epoch", "position", "dealt_by", "length", "generation", "resizes")
        return {name: getattr(place, name) for name in names}


class Committer(keras.callbacks.Callback):
    """Commits every few steps and after each epoch; must be the last callback."""

    def __init__(self, state: Any, dealer: Dealer) -> None:
        super().__init__()
        self.state = state
        self.dealer = dealer
        self.every_steps = dealer.own.config.elastic.commit_every_steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.dealer.global_step % self.every_steps == 0 and not self.dealer.epoch_complete:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._commit()

    def _commit(self) -> None:
        dealer, course = self.dealer, self.dealer.course
        hvd.average_moving_statistics(self.model, course.config.model.not_averaged)
        # Every rank has written what it trained to the journal before any rank has the sums.
        sums: tuple[Any, ...] = ()
        own = [np.asarray(keras.ops.convert_to_numpy(one), np.float64) for one in self.model.metrics_variables]
        flat = np.concatenate([part.reshape(-1) for part in own])
        total = hvd.allreduce(flat, op=hvd.Sum, name="ringtrain_commit").numpy()
        if not dealer.epoch_complete:
            ends = np.cumsum([part.size for part in own])[:-1]
            sums = tuple(part.reshape(one.shape) for part, one in zip(np.split(total, ends), own, strict=True))
        self.state.run = dealer.place
        self.state.start = dataclasses.replace(
            self.state.start,
            global_step=dealer.global_step,
            metrics=course.saver.metrics,
            monitored=tuple(course.watch.values),
            metrics_state=sums,
        )
        self.state.commit()
