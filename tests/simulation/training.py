"""Ranks of an elastic job in virtual time: the code of a run around a model whose state says what it has trained.

Of production, these run: `hvd.elastic` (its loop, the shared state, commits), the strategy with its scheduler and
committer, `train.agree`, the agreement on stops, and the loop of epochs. The rest of a run is modeled
as far as it communicates or can be interrupted: evaluation, checkpoints, results, and the lock of the folder.

Weights and slots are each the list of the rows of all steps that they have seen: one that trained a row twice, or not
at all, shows it. A step changes the slots between its two reductions, and the weights after both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
from simulation.members import Aborted, Member
from simulation.world import Gone

from ringtrain import hvd
from ringtrain import train as main_path
from ringtrain.config.sections import Config
from ringtrain.data import part_of
from ringtrain.errors import RunDirectoryError, exit_code_of
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.failures import failure_of
from ringtrain.strategies import elastic
from ringtrain.training import loop, stopping
from ringtrain.training.run import Job, Run

Rows = tuple[int, int, int]
"""epoch, first row, row after the last"""
State = tuple[Rows, ...]
LOCK_S = 30.0
MOMENTS = ("process", "python", "model", "restored")


class Variable:
    def __init__(self) -> None:
        self.value: State = ()

    def assign(self, value: State) -> None:
        self.value = value


class Kept(tuple):  # type: ignore[type-arg]
    """A variable's value as an array."""

    def copy(self) -> Kept:
        return self


class Model:
    def __init__(self) -> None:
        self.name, self.steps_per_execution = "model", 1
        self.stop_training = False
        self.weights, self.slots = [Variable()], [Variable()]
        self.metrics_variables: list[Any] = []
        self.optimizer = SimpleNamespace(variables=self.slots, built=True)

    @property
    def variables(self) -> list[Variable]:
        return [*self.weights, *self.slots]

    def reset_metrics(self) -> None: ...

    def _get_metrics_result_or_logs(self, logs: Any) -> dict[str, float]:
        return {}


class Step:
    """A step that can be undone."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.before: list[State] | None = None

    def undo(self) -> bool:
        if self.before is None:
            return False
        for variable, value in zip(self.model.variables, self.before, strict=True):
            variable.assign(value)
        self.before = None
        return True


class Snapshot:
    def __init__(self, model: Model, callbacks: Any) -> None:
        self.model, self.values = model, [variable.value for variable in model.variables]

    def restore(self) -> None:
        for variable, value in zip(self.model.variables, self.values, strict=True):
            variable.assign(value)

    restore_values = restore


class Strategy(elastic.Elastic):
    """The elastic strategy; what its base class does to train is `steps`."""

    def __init__(self, config: Config, member: Member) -> None:
        super().__init__(config)
        self.member = member


@contextlib.contextmanager
def steps(strategy: Any, run: Any) -> Iterator[Any]:
    """In place of `Ring.training`."""
    step = strategy.step = strategy.step or Step(run.job.model)

    def steps_of(epoch: int, first: int) -> Iterator[Mapping[str, Any]]:
        while True:
            train_step(strategy.member, run, step, epoch)
            yield {}

    yield steps_of


def train_step(member: Member, run: Any, step: Step, epoch: int) -> None:
    model, job, numbers = run.job.model, member.cluster, run.job.numbers
    position = run.clock.global_step % numbers.steps_per_epoch * numbers.samples_per_step
    rows_of_step = min(numbers.samples_per_step, numbers.num_train - position)
    begin, end = (position + row for row in part_of(rows_of_step, member.number, member.size))
    member.world.sleep(job.step_s * member.world.random.uniform(0.8, 1.2))
    before = [variable.value for variable in model.variables]
    step.before = before
    of_ranks = member.exchange("gradients", (epoch, begin, end, before))
    first, last = of_ranks[0][1], of_ranks[-1][2]
    rows = (epoch, first, last)
    model.slots[0].assign((*model.slots[0].value, rows))
    member.exchange("sums of metrics", None)
    model.weights[0].assign((*model.weights[0].value, rows))
    step.before = None
    job.on_step(member, of_ranks, model.weights[0].value)


class Journal:
    """Journal of a process, on a disk that all hosts share."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.path: Path | None = None
        self.about: dict[str, Any] = {}
        self.spent: Any = dict

    def open(self, folder: Any, rank: int, size: int, run_start: int, start_s: float) -> None:
        self.path = folder
        about = {"host": self.member.machine.name, "process": self.member.pid, "run_start": run_start}
        self.about = {"rank": rank, "size": size, "start_s": start_s, **about}

    def write(self, event: str, **facts: Any) -> None:
        if self.about:
            time_s = self.member.world.now_s
            self.member.cluster.events.append({"time_s": time_s, "event": event, **self.about, **facts})


class Lock:
    """`RunLock`."""

    mirror = None
    is_lost = False

    def __init__(self, member: Member) -> None:
        self.member, self.files = member, member.cluster.storage
        self.folder: Path | None = None

    def take(self, folder: Path, same_job: bool = False) -> None:
        holder = self.files.holder
        if self.folder == folder:
            return
        is_free = self.member.world.wait_for(
            lambda: self.files.holder is None or not self.files.holder.is_alive, LOCK_S
        )
        holder = self.files.holder
        if not is_free and holder.machine is self.member.machine:
            raise RunDirectoryError(f"{folder}: in use by process {holder.pid}")
        self.folder, self.files.holder = folder, self.member

    def raise_if_lost(self) -> None: ...

    def release(self) -> None:
        if self.files.holder is self.member:
            self.files.holder = None
            self.member.world.wake_waiting()
        self.folder = None


class Storage:
    """What the run's folder has."""

    def __init__(self) -> None:
        self.holder: Member | None = None
        self.checkpoints: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}


class Signals:
    def __init__(self, member: Member) -> None:
        self.member = member

    def __enter__(self) -> None:
        self.member.catches_signals = True

    def __exit__(self, *_: object) -> None:
        self.member.catches_signals = False

    @property
    def received(self) -> int:
        return self.member.received


class Source:
    """Data and model of the command line."""

    faults, code, pin, is_quiet = (), None, None, True

    def __init__(self, member: Member) -> None:
        self.member = member

    def read_job(self, process: Any) -> Job:
        numbers = self.member.cluster.numbers_of_run
        data_set: Any = SimpleNamespace(train=SimpleNamespace())
        return Job(data_set=data_set, numbers=numbers, checksums={}, of_name=(), model=Model())


class Evaluation(keras.callbacks.Callback):
    def __init__(self, member: Member) -> None:
        super().__init__()
        self.member, self.logs = member, {}  # type: ignore[var-annotated]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.member.world.sleep(self.member.cluster.step_s)
        self.member.exchange("evaluation", None)


class Stopper(keras.callbacks.Callback):
    """A callback of a script that asks for the end, on one rank."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.member = member

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.member.wants_stop:
            self.model.stop_training = True


class Saver(keras.callbacks.Callback):
    """Saves after each epoch, and at the end; rank 0 writes in the background."""

    def __init__(self, member: Member, run: Any) -> None:
        super().__init__()
        self.member, self.run, self.model_state = member, run, run.job.model
        self.metrics: dict[str, float] = {}
        self.is_closed = run.start.ending.is_closed
        self.saved_step = -1
        self.written_s = 0.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        is_last = self.run.job.model.stop_training or epoch + 1 == self.run.config.train.epochs
        if self.run.clock.epoch_complete or is_last:
            self.save()
        if is_last:
            self.wait()

    def save(self) -> None:
        step = self.run.clock.global_step
        if step == self.saved_step:
            return
        self.wait()
        self.member.exchange("ringtrain_own_state", None)
        self.saved_step = step
        if self.run.rank == 0:
            self._write(step)

    def _write(self, step: int) -> None:
        numbers = dataclasses.asdict(self.run.job.numbers)
        values = [variable.value for variable in self.run.job.model.variables]
        saved = {"global_step": step, "numbers": numbers, "values": values}
        world, storage = self.member.world, self.member.cluster.storage
        self.written_s = world.now_s + world.random.choice([0.05, 0.5])

        def write() -> None:
            if self.member.is_alive:
                storage.checkpoints.append(saved)

        world.at(self.written_s, write)

    def wait(self) -> None:
        self.member.world.sleep(max(0.0, self.written_s - self.member.world.now_s))

    def finish(self) -> None:
        self.wait()


def callbacks_of(member: Member, run: Any) -> SimpleNamespace:
    found = SimpleNamespace(evaluation=Evaluation(member))
    run.callbacks = found
    found.saver = Saver(member, run)
    found.stop = stopping.StopTogether(run)
    last = run.strategy.last_callbacks(run)
    found.ordered = [run.clock, found.evaluation, Stopper(member), found.stop, found.saver, *last]
    return found


def train(member: Member) -> int:
    """`train.main` of a rank; returns its exit code."""
    hvd.elastic.listen()
    member.init()
    config = member.cluster.config
    strategy = Strategy(config, member)
    signals: Any = Signals(member)
    run: Any = Run(
        config=config,
        source=Source(member),  # type: ignore[arg-type]
        attempt=Attempt(),
        strategy=strategy,
        pinning=None,  # type: ignore[arg-type]
        code={},
        status=SimpleNamespace(put=lambda *_: None),  # type: ignore[arg-type]
        signals=signals,
        journal=Journal(member),  # type: ignore[arg-type]
        stages=SimpleNamespace(done=lambda _: None, moments=dict.fromkeys(MOMENTS, 0.0)),  # type: ignore[arg-type]
        is_first=True,
        lock=Lock(member),  # type: ignore[arg-type]
    )
    member.trainer = run

    def from_agreement() -> int:
        if main_path.agree(run):
            return 0
        member.cluster.on_agreed(member, run)
        run.callbacks = callbacks_of(member, run)
        member.training = run
        loop.train(run)
        return finish(member, run)

    return int(elastic.through_changes(run, from_agreement))


def finish(member: Member, run: Any) -> int:
    """`train.finish`, as far as it communicates."""
    stop = run.callbacks.stop
    member.exchange("ringtrain_results", None)
    facts = run.strategy.summary(run)
    if run.rank == 0:
        values = [variable.value for variable in run.job.model.variables]
        member.cluster.storage.summary = {**facts, "values": values, "stopped_by": stop.stopped_by}
    run.journal.write("end", **run.clock.where, stopped_by=stop.stopped_by, exit_code=stop.exit_code)
    run.lock.release()
    return int(stop.exit_code)


def main(member: Member) -> None:
    """The process of a rank, from its start to its end."""
    job, world = member.cluster, member.world
    world.sleep(job.load_s * world.random.uniform(0.7, 1.3))
    fault = job.starting_fault(member)
    if fault:
        member.failure = "while it starts"
        member.end(fault)
        return
    try:
        code = train(member)
    except Aborted:
        code = -6
    except Gone:
        raise
    except Exception as error:
        code = exit_code_of(error)
        failure = failure_of(error, member.number, code, with_traceback=False, host=member.machine.name)
        for line in failure.lines(member.job.id):
            member.say(line)
        member.note(f"fails: {error!r}")
        member.trainer and member.trainer.lock.release()
        job.on_error(member, error)
    member.end(code)
