"""State of a run whose ranks join and leave, under ringtrain launch --elastic: they agree again as in train.py.

Every step leaves the same state on all current ranks, or none of its own: `optim.step`. When a rank is lost, the
rank that is furthest gives its state to the others, and the step under way is made again; when hosts have joined or
left, all continue after the current step. Either way the rest of the epoch's order, from its position on, is
redistributed over the current ranks. The global batch stays that of the run's start, and with it the steps and the
learning rate. The ranks share it, also unevenly: a rank with n of its G samples has the weight n / G, so that the
update is that of one process with all of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ringtrain import hvd
from ringtrain.config import Config, ScheduleConfig
from ringtrain.derived import Numbers, derive, num_shards
from ringtrain.protocol import failures
from ringtrain.run import console, from_checkpoint, model_state, resume
from ringtrain.run.callback_state import SharedCallbackState
from ringtrain.run.context import Job, Opening, Process
from ringtrain.sources import on_rank
from ringtrain.strategies.elastic import Committer, Elastic, Place, progress, rows_of_epoch


def run(process: Process, from_agreement: Callable[[], Any]) -> Any:
    """Makes this rank's model alone, then trains with the others from an agreement on, again after every change.

    Returns what `from_agreement` does.
    """
    source = process.source = OtherRanks(process)

    def from_last_step(state: Any) -> Any:
        return from_agreement()

    with process.signals:
        return hvd.elastic.run(from_last_step)(source.state)


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
            place=Place(planned_ranks=num_ranks),
            start=resume.Start(),
            progress=-1,
        )

    def read_job(self, process: Process) -> Job:
        """The job with the numbers of the current ranks, or of those whose global batch is kept."""
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
            planned = num_ranks
            if self._saved and self._saved["numbers"]["batch_size"] == config.train.batch_size:
                planned = self._saved["numbers"]["num_ranks"]
            state.place = dataclasses.replace(state.place, planned_ranks=planned)
        numbers = hvd.run_together(lambda: _numbers(config, self._job, state.place.planned_ranks))
        users = self._job.users_callbacks
        if self._job.all_callbacks:
            users = on_rank(self._job.all_callbacks, hvd.rank())
        return dataclasses.replace(self._job, numbers=numbers, users_callbacks=users)

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
            state.place = Place(state.place.planned_ranks, started=time.time(), **place)
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
    steps, batch = saved["numbers"]["steps_per_epoch"], saved["numbers"]["global_batch_size"]
    epoch, step = divmod(start.global_step, steps)
    if not job.data_set.train.has_classes:
        batch = job.numbers.samples_per_step
        length = rows_of_epoch(job, epoch)
        return {"epoch": epoch, "position": step * batch, "dealt_by": batch, "length": length * (step > 0)}
    return {"epoch": epoch, "position": step * batch, "dealt_by": batch, "length": steps * batch}


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
