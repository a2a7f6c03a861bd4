"""State of a run whose ranks join and leave, under ringtrain launch --elastic: they agree again, see `through_changes`.

Every step leaves the same state on all current ranks, or none of its own: `training.summed_step`. When a rank is lost,
the rank that is furthest gives its state to the others, and the step under way is made again; when hosts have joined or
left, all continue after the current step. The global batch does not depend on the ranks, and with it the position that
follows from the global step, and the learning rate. The ranks share it, also unevenly: a rank with n of its G samples
has the weight n / G, so that the update is that of one process with all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import keras

from ringtrain import hvd
from ringtrain.checkpoint import model_state, run_folder
from ringtrain.checkpoint.callback_state import SharedCallbackState, Snapshot
from ringtrain.config.derived import num_shards
from ringtrain.config.sections import Config
from ringtrain.protocol import failures
from ringtrain.strategies.base import StepsOf
from ringtrain.strategies.ring import Ring
from ringtrain.training import console, devices, evaluation, run_files
from ringtrain.training.clock import Clock, Ending, Start
from ringtrain.training.run import Job, Opening, Run, on_rank
from ringtrain.training.run_files import FromCheckpoint
from ringtrain.training.sums import SumsOverRanks


def through_changes(run: Run, from_agreement: Callable[[], Any]) -> Any:
    """Makes this rank's model alone, then trains with the others from an agreement on, again after every change."""
    source = run.source = OtherRanks(run)

    def from_last_step(state: Any) -> Any:
        return from_agreement()

    with run.signals:
        return hvd.elastic.run(from_last_step)(source.state)


# ---- where the state of a run comes from ----------------------------------------------------------------------------


class OtherRanks(FromCheckpoint):
    """State of a run from the rank that is furthest, or from a checkpoint; see `training.run.Source`."""

    def __init__(self, run: Run) -> None:
        self.strategy, configured = cast(Elastic, run.strategy), run.source
        self.faults, self.code, self.pin = configured.faults, configured.code, configured.pin
        self.is_quiet = configured.is_quiet
        self._job = configured.read_job(run)
        # A rank that becomes rank 0 has its callbacks, but has never called them.
        model, everyone = self._job.model, self._job.all_callbacks
        users = SharedCallbackState(everyone, model)
        self._job.callback_state = self.strategy.callback_state = users
        of_others = on_rank(everyone, 1)
        of_rank_0 = [callback for callback in everyone if callback not in of_others]
        self.strategy.of_rank_0 = SharedCallbackState(of_rank_0, model)
        self.state = self.strategy.state = hvd.elastic.SharedKerasState(
            model,
            self.strategy.settle,
            self.strategy.synced,
            folder="",
            records="",
            start=Start(),
            progress=(-1,),
            num_ranks=0,
            generation="",
            resizes=(),
            started=0.0,
        )

    def read_job(self, run: Run) -> Job:
        """The job of this rank, as the current ranks need it."""
        job = self._job
        if hvd.rank():
            run.lock.release()  # the current rank 0 takes it
        hvd.run_together(lambda: num_shards(run.config, hvd.size()))  # raises an error if there are more ranks
        return dataclasses.replace(job)  # with its numbers of the start, which a run changes

    def restore(self, run: Run) -> tuple[Start, Mapping[str, Any]]:
        """Position of the rank that is furthest; on the first ranks, of the newest checkpoint."""
        start = self.state.start
        if not self.state.folder:
            return super().restore(run)
        if start.frozen is not None:
            model_state.freeze_in_training(run.job.model, start.frozen)
        endings = hvd.allgather_object(self.strategy.ending, name="ringtrain_endings")
        self.strategy.ending = _common(endings)
        return dataclasses.replace(start, ending=self.strategy.ending), {}

    def open_folder(self, run: Run) -> Opening:
        """The run's folder, which the current rank 0 locks; notes the current ranks in the state."""
        state, rank, step = self.state, run.rank, run.start.global_step
        generation = hvd.broadcast_object(f"{time.time_ns():x}", root_rank=0, name="ringtrain_generation")
        change = {"from": state.num_ranks, "to": run.size}
        if not state.folder:
            opening = super().open_folder(run)
            state.folder, state.started = str(opening.folder), opening.start_s
            state.start, state.progress = run.start, (step, True, False)
        else:
            folder, records = Path(state.folder), state.records
            hvd.on_rank_0(lambda: run_files.take_over(run, folder, records))
            log = ""
            if run.journal.path is None:
                log = f"rank-{rank}-from-step-{step}.log"
            facts = {"global_step": step}
            opening = Opening(
                folder=folder, log=log, event="resize", facts=facts, start_s=state.started, is_first=False
            )
            state.resizes = (*state.resizes, {**facts, **change})
            if rank == 0:
                failures.report("recovery", "")
            text = f"continues after step {step} with {run.size} ranks, before with {state.num_ranks}"
            console.terminal_of(run).print(text)
        facts = {**opening.facts, **change, "generation": generation, "after": state.generation}
        state.num_ranks, state.generation = run.size, generation
        return dataclasses.replace(opening, facts=facts)


def _common(endings: Sequence[Ending]) -> Ending:
    """Ending of all ranks, of which some may not know that all have agreed."""
    return Ending(
        stopped_by=max(one.stopped_by for one in endings),
        requested=max(one.requested for one in endings),
        is_ended=any(one.is_ended for one in endings),
        is_closed=any(one.is_closed for one in endings),
    )


# ---- training --------------------------------------------------------------------------------------------------------


class Elastic(Ring):
    """Strategy ring whose ranks join and leave. Until `agree`, no collectives: other ranks may be training."""

    ranks_change = True
    trains_here = False  # no heartbeats are compared
    state: Any  # that the ranks share, from `OtherRanks`
    callback_state: SharedCallbackState  # of the user's callbacks
    of_rank_0: SharedCallbackState  # of callbacks that run on rank 0 only, which another rank may become

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.ending = Ending()  # why this rank was about to end before the last change
        self._clock: ElasticClock | None = None
        """of the current ranks, once they train"""

    @property
    def num_copies(self) -> int:
        return 1  # however many ranks share the batch

    def begin(self) -> devices.Pinning:
        return devices.pin_rank(self.config, devices.slot(), hvd.local_size())

    def sums(self) -> Any:
        return super().sums() or SumsOverRanks()

    def share_rows(self, model: keras.Model, batch: Any) -> None:
        super().share_rows(model, batch)
        model.train_function = None  # an earlier one makes another step

    def settle(self) -> tuple[Any, ...]:
        """Undoes an interrupted step or end of an epoch or of training, and notes how far this rank is."""
        state, clock = self.state, self._clock
        if clock is None:
            return tuple(state.progress)  # nothing was trained since the last change
        self.ending = clock.undo_end()
        if self.step:
            self.step.undo()
        clock.write_commit()
        metrics = clock.metrics_state
        if not metrics and (clock.is_open or not clock.epoch_complete):
            metrics = tuple(evaluation.states_of_metrics(state.model))
        state.start = dataclasses.replace(
            state.start,
            global_step=clock.global_step,
            is_open=clock.is_open,
            metrics_state=metrics,
            step_logs=clock.step_logs,
            begun_epoch=clock.begun_epoch,
            callbacks=self.callback_state.save(),
            frozen=model_state.frozen_layers(state.model),
        )
        # Of those that are furthest, rank 0: it alone has called its own callbacks since.
        state.progress = (clock.global_step, not clock.is_open, clock.run.rank == 0)
        return tuple(state.progress)

    def synced(self) -> None:
        """Forgets what was trained before a change of ranks: the state is that of the rank that was furthest."""
        self._clock = None
        if self.config.train.virtual_ranks:
            self.state.model.train_function = None  # it is made for the virtual ranks of this rank

    def clock(self, run: Run) -> ElasticClock:
        return ElasticClock(run, self.state.generation)

    def last_callbacks(self, run: Run) -> list[keras.callbacks.Callback]:
        return [Committer(self, run)]

    @contextlib.contextmanager
    def training(self, run: Run) -> Iterator[StepsOf]:
        self._clock = cast(ElasticClock, run.clock)
        run.started = self.state.started
        with super().training(run) as steps_of:
            yield steps_of

    def summary(self, run: Run) -> dict[str, Any]:
        return {"num_ranks": run.size, "resizes": list(self.state.resizes), "strategy": self.about}


class ElasticClock(Clock):
    """Counts the steps of some ranks; the end of an epoch or of training can be undone."""

    def __init__(self, run: Run, generation: str) -> None:
        super().__init__(run.start, run.job.numbers.steps_per_epoch, run.status, run.journal)
        self.run, self.generation = run, generation  # ID of the ranks that train together
        self.is_open = run.start.is_open  # the last step of an epoch is made, but not all that belongs to its end
        self._before_end: tuple[Snapshot, Ending] | None = None

    @property
    def where(self) -> dict[str, Any]:
        return {**super().where, "generation": self.generation}

    @property
    def epoch(self) -> int:
        return super().epoch - self.is_open

    def begin_epoch(self) -> tuple[int, range]:
        if self.is_open:  # only its end is made up for
            return self.epoch, range(0)
        return super().begin_epoch()

    def end_epoch(self) -> None:
        super().end_epoch()
        self.is_open = True

    def keep_state(self) -> None:
        self._before_end = Snapshot(self.run.job.model, self.run.job.users_callbacks), self.run.callbacks.stop.ending
        if self.is_open:  # the evaluation of the epoch replaces them
            self.metrics_state = tuple(evaluation.states_of_metrics(self.run.job.model))

    def close_epoch(self) -> None:
        """Ends the epoch for good: a change of ranks no longer undoes what its end has changed."""
        self.is_open, self._before_end, self.metrics_state = False, None, ()

    def undo_end(self) -> Ending:
        """Undoes an interrupted end of an epoch or of training; returns why training was about to end before it."""
        if self._before_end is None:
            return self.run.callbacks.stop.ending
        snapshot, ending = self._before_end
        snapshot.restore()
        return ending

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch, logs)
        hvd.step_timing.PHASES.enter("step")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        hvd.step_timing.PHASES.enter("callbacks")
        super().on_train_batch_end(batch, logs)
        if self.epoch_complete:
            self.is_open = True
            self.step_logs = {name: keras.ops.convert_to_numpy(value) for name, value in (logs or {}).items()}

    def write_commit(self) -> None:
        """Writes to the journal which step this rank has made with the others of its generation."""
        self.journal.write("commit", **self.where)


class Committer(keras.callbacks.Callback):
    """Asks every few steps for hosts that have joined or left, and closes epochs; must be the last callback."""

    def __init__(self, strategy: Elastic, run: Run) -> None:
        super().__init__()
        self.state, self.of_rank_0, self.run = strategy.state, strategy.of_rank_0, run
        self.clock = cast(ElasticClock, run.clock)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.num_commits += 1  # a step is progress, after which the same failure is another one
        is_due = self.clock.global_step % self.run.config.elastic.commit_every_steps == 0
        if is_due and not self.clock.epoch_complete:
            self._share()
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.clock.epoch_complete:
            return  # training was stopped
        callbacks = self.run.callbacks
        self._share()
        # From here on nothing of the epoch's end is undone.
        self.state.start = dataclasses.replace(self.state.start, metrics=callbacks.saver.metrics)
        # Another host may have the next rank 0, and no common file system with this one.
        records = run_folder.records_of(self.run.folder) if self.run.rank == 0 else ""
        self.state.records = hvd.broadcast_object(records, root_rank=0, name="ringtrain_records")
        self.clock.close_epoch()
        self._commit()

    def _commit(self) -> None:
        self.clock.write_commit()
        if not self.run.callbacks.stop.stopped_by:  # else new ranks would find nothing to train
            self.state.commit()

    def _share(self) -> None:
        """Gives all ranks the state of the callbacks that run on rank 0 only. Collective."""
        if not self.of_rank_0.callbacks:
            return
        state = self.of_rank_0.save() if self.run.rank == 0 else ([], {})
        state = hvd.broadcast_object(state, root_rank=0, name="ringtrain_callbacks_of_rank_0")
        if self.run.rank > 0:
            self.of_rank_0.restore(state)
