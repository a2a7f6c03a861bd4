"""Base class of all strategies: what a run asks of the way in which its gradients are reduced and its steps run."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import keras

from ringtrain import hvd
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config
from ringtrain.errors import ConfigError
from ringtrain.protocol.env import COLLECTIVES
from ringtrain.strategies import STRATEGIES
from ringtrain.training import devices
from ringtrain.training.clock import Clock

if TYPE_CHECKING:
    from ringtrain.training.run import Run

T = TypeVar("T")
StepsOf = Callable[[int, int], Iterator[Mapping[str, Any]]]
"""Called with an epoch and one of its steps. Each item trains the next batch, or `steps_per_execution` of them; it is
Keras' logs. They end early if the data of the epoch do."""


class Strategy:
    """One way to train on several devices. A subclass overrides `distribute`, `training` and what else differs."""

    copies = 1  # of the model in this process
    copies_name = "ranks"  # plural noun for the copies in messages
    over_grpc = False  # whether ranks use gRPC, which has no authentication: see docs/launching.md
    ranks_change = False  # whether ranks join and leave during training; until they agree, others may be training
    may_compile = False  # whether XLA may compile forward and backward pass of a step
    trains_here = True  # whether this process computes gradients, whose phases can be measured
    other_hosts: Sequence[str] = ()  # of further processes, which are no ranks of this training loop
    # Host, versions and checksums of processes that read data: they must equal those of this one.
    of_others: Sequence[tuple[str, Mapping[str, str]]] = ()

    def __init__(self, config: Config) -> None:
        self.config = config
        loaded = "Horovod" if hvd.backend.WITH_HOROVOD else "mpi4py"  # which ranks with parameter servers use, too
        if loaded != ("mpi4py" if STRATEGIES[config.strategy.name].collectives else "Horovod"):
            raise ConfigError(
                f"strategy.name: got {config.strategy.name} in a process whose ranks talk by {loaded}: set"
                f" {COLLECTIVES}=mpi4py for mpi-ring, or import no ringtrain.hvd before; only ringtrain.train, started"
                f" by itself, has the others"
            )
        # Whether moving statistics, seeds and metrics are equal on all ranks after every step.
        self.shares_state = self.ranks_change or config.train.virtual_ranks > 0
        self.about: dict[str, Any] = {"ranks_talk_by": loaded}  # facts for summary.json, besides its options

    @property
    def num_copies(self) -> int:
        """Copies of the model in all processes, each of which trains `train.batch_size` samples in a step."""
        return hvd.size() * self.copies

    def together(self, action: Callable[[], T]) -> T:
        """Runs an action on all ranks, and raises its error on each; on a rank that joins others, on this one alone."""
        if self.ranks_change:
            return action()
        return hvd.run_together(action)

    # ---- before training ---------------------------------------------------------------------------------------------

    def begin(self) -> devices.Pinning:
        """Pins this rank's devices, before TensorFlow initializes one. Raises errors on every rank. Collective."""
        pinning = hvd.run_together(lambda: devices.pin_rank(self.config, hvd.local_rank(), hvd.local_size()))
        if hvd.local_rank() == 0:
            warning = devices.missing_gpu(pinning, bool(hvd.nccl_built()))
            if warning:
                print(f"ringtrain: {warning}", file=sys.stderr, flush=True)
        return pinning

    def placement(self, numbers: Numbers, pinning: devices.Pinning, hosts: Sequence[str]) -> dict[str, str]:
        """Rows of the plan on processes and devices."""
        per_host = ", ".join(f"{host}: {hosts.count(host)}" for host in dict.fromkeys(hosts))
        num_virtual = ""
        if self.config.train.virtual_ranks > 0:
            num_virtual = f"; {numbers.num_ranks} virtual ranks"
        return {"ranks": f"{len(hosts) * self.copies} ({per_host}), rank 0 on {pinning}{num_virtual}"}

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the model and its optimizer must be created."""
        return contextlib.nullcontext()

    def distribute(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Wraps an optimizer so that it averages gradients over all copies of the model."""
        raise NotImplementedError

    def create_variables(self, model: keras.Model, train: Any, rows_per_step: int) -> None:
        """Creates variables of a compiled model that Keras would create elsewhere, later; there are none here."""

    def share_rows(self, model: keras.Model, batch: Any) -> None:
        """Prepares a built model, by a batch or its specs, for a state that all ranks share; does nothing here."""

    # ---- training and after it ---------------------------------------------------------------------------------------

    def clock(self, run: Run) -> Clock:
        """Makes the callback that counts the steps of a run."""
        per_call = run.job.model.steps_per_execution
        return Clock(run.start, run.job.numbers.steps_per_epoch, run.status, run.journal, per_call)

    def last_callbacks(self, run: Run) -> list[keras.callbacks.Callback]:
        """Makes the callbacks of a strategy that follow all others; there are none here."""
        return []

    def training(self, run: Run) -> contextlib.AbstractContextManager[StepsOf]:
        """Context of the whole training, whose value makes the steps of an epoch from one of them on."""
        raise NotImplementedError

    def fingerprint(self) -> int | None:
        """Number of the global batches so far, below 2 ** 31, by which ranks compare them; None: they do not."""
        return None

    def summary(self, run: Run) -> dict[str, Any]:
        """Facts for summary.json. Collective."""
        times = {}
        if run.step_timer:
            place = {"host": socket.gethostname(), "device": str(run.pinning)}
            times = {"rank": run.rank, **place, **run.step_timer.own_times()}
        num_virtual = self.config.train.virtual_ranks
        of_virtual = {}
        if num_virtual:
            of_virtual = {"num_ranks": run.size, "virtual_ranks": num_virtual}
        return {"ranks": hvd.allgather_object(times, name="ringtrain_times"), "strategy": self.about, **of_virtual}

    def proof(self, summary: Mapping[str, Any], gradients: str) -> str:
        """Last line of a run: what was verified. `gradients`: how they were found to be averaged."""
        if summary["num_ranks"] == 1:
            return f"1 rank: nothing to compare, weights and optimizer {summary['checksum']}"
        return (
            f"{summary['num_ranks']} {self.copies_name} in step: gradients {gradients}, weights and optimizer equal"
            f" {summary['checksum']}"
        )

    def end(self, exit_code: int) -> None:
        """Called last, when the other ranks are no longer needed; does nothing here."""
