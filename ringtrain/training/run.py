"""One run on one rank: what `train.setup` makes, and what `train.agree` adds once the ranks agree."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ringtrain.checkpoint.run_folder import RunLock
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config
from ringtrain.monitor.journal import Journal, Stages
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.status import StatusLine

if TYPE_CHECKING:
    import keras

    from ringtrain import data
    from ringtrain.checkpoint.callback_state import SharedCallbackState
    from ringtrain.hvd.step_timing import StepTimer
    from ringtrain.monitor.fault_injection import Fault
    from ringtrain.monitor.heartbeat import Monitor
    from ringtrain.strategies.base import Strategy
    from ringtrain.training.callbacks import Callbacks
    from ringtrain.training.clock import Clock, Start
    from ringtrain.training.console import Terminal
    from ringtrain.training.devices import Pinning
    from ringtrain.training.stopping import Signals


ON_RANK_0 = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger")
"""Keras' callbacks that write files or show progress."""


def on_rank(callbacks: Sequence[Any], rank: int) -> list[Any]:
    """Callbacks of a script that run on a rank."""
    return [one for one in callbacks if rank == 0 or not classes_of(one) & {*ON_RANK_0}]


def classes_of(callback: Any) -> set[str]:
    """Names of the class of an object and of those that it derives from."""
    return {kind.__name__ for kind in type(callback).__mro__}


def callbacks_in(callbacks: Any) -> tuple[Any, ...]:
    """Callbacks of an argument that Keras' methods take: a list, a nest, one alone, a `CallbackList`, or None."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return tuple(keras.tree.flatten(callbacks)) if callbacks else ()


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The folder in which a run begins, or goes on with other ranks."""

    folder: Path
    log: str
    """name of this rank's log in the folder; "": it writes to one already"""
    event: str
    """for the journal: a start, or a change of ranks"""
    facts: Mapping[str, Any]
    """of that event"""
    start_s: float = 0.0
    """Unix time at which the attempt started, which identifies it"""
    is_first: bool = True
    """whether the plan is to be shown"""


class Source(Protocol):
    """Where data, model, callbacks and the state of a run come from: the configuration, a script, or other ranks."""

    faults: tuple[Fault, ...]
    is_quiet: bool  # prints nothing

    def code(self) -> Mapping[str, str]:
        """Checksums of its code, which must be the same on all ranks."""

    def pin(self, strategy: Strategy) -> Pinning:
        """Pins this rank's devices."""

    def read_job(self, run: Run) -> Job:
        """Reads the data, and makes model and callbacks. Collective."""

    def restore(self, run: Run) -> tuple[Start, Mapping[str, Any]]:
        """Gives the model the state to begin with; returns its position, and summary.json of a complete run or {}."""

    def open_folder(self, run: Run) -> Opening:
        """Makes the run's folder, or finds it again. Collective."""


@dataclass(frozen=True)
class Validation:
    """How a run evaluates its test data."""

    prefix: str = "test_"
    """of the metrics' names"""
    batch_size: int = 1
    """rows of a batch, which one rank evaluates whole"""
    epochs: Container[int] | None = None
    """epochs, counted from 1, after which the run evaluates; None: all"""

    def is_due(self, epoch: int) -> bool:
        """Returns whether an epoch, counted from 0, is evaluated."""
        return self.epochs is None or epoch + 1 in self.epochs


@dataclass(kw_only=True)
class Job:
    """Data and model of a run."""

    data_set: data.DataSet
    numbers: Numbers
    checksums: Mapping[str, str]
    """of the data, and what else must be equal on all ranks"""
    of_name: Collection[str]
    """names of the checksums that all runs of one name have in common; others may change on a resume"""
    model: keras.Model | Any
    """compiled and built, with a distributed optimizer"""
    all_callbacks: Sequence[keras.callbacks.Callback] = ()
    """the user's, of which those that write files run on rank 0 alone"""
    validation: Validation = field(default_factory=Validation)
    plan: dict[str, str] = field(default_factory=dict)
    """rows of the printed plan that differ from those of the configuration, for what is compiled elsewhere"""
    facts: dict[str, Any] = field(default_factory=dict)
    """for summary.json"""
    named_in_errors: str = "ringtrain.fit"
    """function that the data come from"""
    callback_state: SharedCallbackState | None = None
    """of the user's callbacks, if it is kept longer than by one run; None: made when training begins"""
    begun: set[int] = field(default_factory=set)
    """ids of the user's callbacks that have seen `on_train_begin` in this process"""

    @property
    def users_callbacks(self) -> list[keras.callbacks.Callback]:
        """The user's callbacks that run on this rank."""
        from ringtrain import hvd

        return on_rank(self.all_callbacks, hvd.rank())

    def pass_over(self, first: int, end: int, was_stopped: bool = False) -> None:
        """Leaves shuffles, caches and hooks of the data, which a later fit may share, as these epochs have done."""
        for epoch in range(first, end):  # first: of the run, in whichever attempt
            self.data_set.train.end(was_stopped and epoch + 1 == end)
            if self.numbers.num_test and self.validation.is_due(epoch):
                self.data_set.test.end()


@dataclass(kw_only=True)
class Run:
    """A run on this rank."""

    # ---- from `setup`, before anything about the job is exchanged with the other ranks
    config: Config
    source: Source
    attempt: Attempt
    is_first: bool
    """whether this is the first run of the process, which a restart continues, named or not"""
    strategy: Strategy
    pinning: Pinning
    code: Mapping[str, str]
    """versions and checksums of code, as loaded: the files may change during a run"""
    status: StatusLine
    """in shared memory, for the host agent"""
    signals: Signals
    journal: Journal
    """closed until the run has a folder"""
    stages: Stages
    lock: RunLock = field(default_factory=RunLock)
    """held by rank 0 from before it reads the run folder until the end"""

    # ---- from `agree`, again after each change of ranks
    rank: int = field(init=False)
    size: int = field(init=False)
    job: Job = field(init=False)
    start: Start = field(init=False)
    is_complete: bool = False
    """whether it was complete before: nothing is trained"""
    folder: Path = field(init=False)
    hosts: list[str] = field(init=False)
    """by rank"""
    gradients: str = field(init=False)
    """how gradients were verified to be averaged"""
    terminal: Terminal = field(init=False)
    clock: Clock = field(init=False)
    monitor: Monitor | None = None
    step_timer: StepTimer | None = None

    # ---- from `fit`
    callbacks: Callbacks = field(init=False)
    started: float = 0.0
    """Unix time at which training began"""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"
