"""Base class of all strategies: what a run asks of the way in which its gradients are reduced and its steps run."""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ringtrain import data, hvd
from ringtrain.config import Config
from ringtrain.derived import Numbers
from ringtrain.errors import ConfigError
from ringtrain.hvd.keras_patches import set_untracked
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import devices, resume
from ringtrain.strategies import STRATEGIES

if TYPE_CHECKING:
    from ringtrain.run.context import RunContext


class Strategy:
    """One way to train on several devices. A subclass overrides `distribute`, `run_step` and what else differs.

    Attributes:
        about: Facts on the strategy for summary.json, besides its options.
        copies: Copies of the model in this process.
        copies_name: Plural noun for the copies in messages.
        over_grpc: Whether ranks use gRPC, which has no authentication: see docs/launching.md.
        ranks_change: Whether ranks join and leave during training.
        trains_rows: Whether it trains data that `ringtrain.fit` takes, besides samples with integer classes.
    """

    copies = 1
    copies_name = "ranks"
    over_grpc = False
    ranks_change = False
    trains_rows = False

    def __init__(self, config: Config) -> None:
        self.config = config
        loaded = "Horovod" if hvd.backend.WITH_HOROVOD else "mpi4py"  # which ranks with parameter servers use, too
        if loaded != ("mpi4py" if STRATEGIES[config.strategy.name].collectives else "Horovod"):
            raise ConfigError(
                f"strategy.name: got {config.strategy.name} in a process whose ranks talk by {loaded}: only"
                f" ringtrain.train, started by itself, has other strategies than ring"
            )
        self.about: dict[str, Any] = {"ranks_talk_by": loaded}

    # ---- what a person sees ------------------------------------------------------------------------------------------

    @property
    def shown_name(self) -> str:
        """Name in the plan, with what a user must know; "": not shown."""
        return self.config.strategy.name + ("; its servers obey every user of these hosts" if self.over_grpc else "")

    def placement(self, numbers: Numbers, pinning: devices.Pinning, hosts: Sequence[str]) -> dict[str, str]:
        """Rows of the plan on processes and devices."""
        per_host = ", ".join(f"{host}: {hosts.count(host)}" for host in dict.fromkeys(hosts))
        num_virtual = f"; {numbers.num_ranks} virtual ranks" if self.config.train.virtual_ranks > 0 else ""
        return {"ranks": f"{len(hosts) * self.copies} ({per_host}), rank 0 on {pinning}{num_virtual}"}

    def shard(self, numbers: Numbers) -> str:
        """Row of the plan on the samples that one rank trains."""
        kind = "virtual " if self.config.train.virtual_ranks > 0 else ""
        return f"{numbers.steps_per_epoch * numbers.batch_size:,} samples an epoch on each {kind}rank"

    def proof(self, summary: Mapping[str, Any], gradients: str) -> str:
        """Last line of a run: what was verified. `gradients`: how they were found to be averaged."""
        if summary["num_ranks"] == 1:
            return f"1 rank: nothing to compare, weights and optimizer {summary['checksum']}"
        is_sharded = summary.get("slot_bytes", 0) < summary.get("slot_bytes_unsharded", 0)
        equal, ending = "weights and optimizer", ""
        if is_sharded:
            equal, ending = "weights", "; slots sharded"
        return (
            f"{summary['num_ranks']} {self.copies_name} in step: gradients {gradients}, {equal} equal"
            f" {summary['checksum']}{ending}"
        )

    # ---- before training ---------------------------------------------------------------------------------------------

    def begin(self) -> devices.Pinning:
        """Pins this rank's devices, before TensorFlow initializes one. Raises errors on every rank. Collective."""
        place, options = (hvd.local_rank(), hvd.local_size()), self.config.device
        pinning = hvd.run_together(lambda: devices.pin(*place, options, **self.pinning))
        if hvd.local_rank() == 0 and (warning := devices.missing_gpu(pinning, bool(hvd.nccl_built()))):
            print(f"ringtrain: {warning}", file=sys.stderr, flush=True)
        return pinning

    @property
    def pinning(self) -> dict[str, Any]:
        """Arguments of devices.pin."""
        return {"num_devices": self.config.model.num_devices, "one_thread": self.config.train.virtual_ranks > 0}

    def together(self, function: Callable[[], Any]) -> Any:
        """Result of a function that each rank calls; its error is raised on every rank."""
        return hvd.run_together(function)

    @property
    def shares_state(self) -> bool:
        """True if moving statistics, seeds and metrics are equal on all ranks after every step."""
        return self.config.train.virtual_ranks > 0

    def num_shards(self) -> int:
        """Number of equal parts of a global batch: of the copies of the model, or of virtual ranks."""
        num_virtual, num_ranks = self.config.train.virtual_ranks, hvd.size() * self.copies
        if num_virtual and num_ranks > num_virtual:
            raise ConfigError(
                f"train.virtual_ranks: got {num_virtual} on {num_ranks} ranks, each of which trains at least one:"
                f" expected {num_ranks} or more"
            )
        return num_virtual or num_ranks

    def same_global_batch(self, config: Config, attempt: Attempt) -> Config:
        """Configuration with which a restart on another number of ranks keeps the first attempt's global batch."""
        return config if config.train.virtual_ranks else resume.same_global_batch(config, attempt, hvd.size())

    def hosts(self) -> list[str]:
        """Host of each rank. Collective."""
        hosts: list[str] = hvd.allgather_object(socket.gethostname(), name="ringtrain_hosts")
        return hosts

    def check(self, checksums: Mapping[str, str]) -> None:
        """Raises ConfigError if workers have other code or data than this process; does nothing here."""

    @property
    def device_of_sums(self) -> str:
        """Device of the reduction, "": that of the gradients. CPU:0 with shared GPUs: NCCL allows one rank per GPU."""
        return "CPU:0" if self.config.device.share_gpus else ""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the model and its optimizer must be created."""
        return contextlib.nullcontext()

    def distribute(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Wraps an optimizer so that it averages gradients over all copies of the model."""
        raise NotImplementedError

    def make_ready(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        """Prepares a compiled model for its first step; does nothing here."""

    def check_averaging(self, model: keras.Model) -> str:
        """Verifies that updates receive the ranks' gradients combined; returns how. Collective."""
        combined, *_ = [hvd.check_averaging(one) for one in hvd.optimizers_of(model)]
        return combined

    def make_all(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        """Creates the variables that Keras would create in the first step, each in the right scope."""
        if not model.optimizer.built:
            with self.scope():
                model.optimizer.build(model.trainable_variables)
        # Metrics are local to this process. Created in a step, they would be the strategy's and summed when read.
        model.compute_metrics(
            tf.zeros([1, *input_shape]), tf.zeros([1], tf.int64), tf.zeros([1, num_classes]), sample_weight=None
        )
        model.reset_metrics()
        model.steps_per_execution = 1  # a step here is a call of its own
        set_untracked(model, _distribute_strategy=None)  # evaluate runs on one copy, without the strategy

    def gradient_norm(self, optimizer: keras.optimizers.Optimizer) -> hvd.GradientNorm | None:
        """Tracker of the global gradient norm; None if the strategy has none."""
        return hvd.track_gradient_norm(optimizer)

    def watch(self, model: keras.Model) -> None:
        """Measures the phases of a compiled model's steps."""
        hvd.step_timing.PLACE.watch(model, each_gradient=self.config.tracking.timeline_steps > 0)

    def clock(self, run: RunContext) -> resume.Clock:
        """Callback that counts the run's steps."""
        per_call = run.model.steps_per_execution
        return resume.Clock(run.start, run.numbers.steps_per_epoch, run.status, run.journal, per_call)

    # ---- training ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def training(self, run: RunContext) -> Iterator[Callable[[int, int], Iterator[Any]]]:
        """Context of the whole training, whose value returns the batches of an epoch from one of its steps on."""
        yield EpochBatches(functools.partial(self.batches, run), self.iterator)

    def run_step(self, run: RunContext, batches: Iterator[Any]) -> Mapping[str, Any] | None:
        """Trains the next batch, or `steps_per_execution` of them, and returns the logs; None: the epoch has ended."""
        raise NotImplementedError

    def iterator(self, batches: tf.data.Dataset) -> Iterator[Any]:
        """Iterator over batches, for `run_step`."""
        return iter(batches)

    def batches(self, run: RunContext, epoch: int, first_step: int) -> tuple[tf.data.Dataset, int]:
        """Batches of this rank from a step of an epoch on: pairs of inputs and labels; and the epoch where they end."""
        # Batches that are accumulated into one update, or trained by several copies of the model, are cut from one:
        # this rank's shard of the global batch.
        numbers, end = run.numbers, run.config.train.epochs
        if run.config.train.virtual_ranks:
            end = epoch + 1 if first_step else end
            position = first_step * numbers.samples_per_step
            return self.dealt(run, range(epoch, end), numbers.global_batch_size, position), end
        updates, steps = divmod(epoch * numbers.steps_per_epoch + first_step, numbers.accumulation_steps)
        per_update = numbers.accumulation_steps * self.copies
        batches = data.training_batches(
            run.data_set.train, numbers.batch_size * per_update, run.rank, run.size, run.config.seed, end, updates
        )
        if per_update > 1:
            batches = batches.rebatch(numbers.batch_size, drop_remainder=True).skip(steps * self.copies)
        return batches, end

    def dealt(self, run: RunContext, epochs: range, dealt_by: int, position: int) -> tf.data.Dataset:
        """Batches of this rank for the rest of an epoch, or whole epochs, whatever ranks trained before: see data."""
        numbers, num_virtual = run.numbers, run.config.train.virtual_ranks
        return data.dealt_batches(
            run.data_set.train,
            epochs,
            run.config.seed,
            dealt_by,
            position,
            numbers.samples_per_step,
            run.rank,
            run.size,
            numbers.batch_size if num_virtual else 1,
        )

    def fingerprint(self) -> int | None:
        """Number of the global batches that this rank has trained, below 2 ** 31; None: ranks are not compared."""
        return None

    def last_callbacks(self, run: RunContext) -> Sequence[keras.callbacks.Callback]:
        """Callbacks of the strategy, after all others; none here."""
        return []

    # ---- after training ----------------------------------------------------------------------------------------------

    def summary(self, run: RunContext) -> dict[str, Any]:
        """Facts for summary.json. Collective."""
        times = {}
        if run.step_timer:
            times = {"rank": run.rank, "host": socket.gethostname(), **run.step_timer.own_times()}
        num_virtual = self.config.train.virtual_ranks
        of_virtual = {"num_ranks": run.size, "virtual_ranks": num_virtual} if num_virtual else {}
        return {"ranks": hvd.allgather_object(times, name="ringtrain_times"), "strategy": self.about, **of_virtual}

    def place(self) -> dict[str, Any]:
        """Facts for the journal's last event; none here."""
        return {}

    def end(self, exit_code: int) -> None:
        """Called last, when the other ranks are no longer needed; does nothing here."""


class EpochBatches:
    """Batches by epoch, where one iterator serves several epochs: it prepares the next epoch's before this one ends.

    Args:
        make: Returns batches from a step of an epoch on, and the epoch before which they end.
        iterator: Returns an iterator over them.
    """

    def __init__(
        self,
        make: Callable[[int, int], tuple[tf.data.Dataset, int]],
        iterator: Callable[[tf.data.Dataset], Iterator[Any]],
    ) -> None:
        self._make, self._iterator_over = make, iterator
        self._end = 0
        self._batches: Iterator[Any] = iter(())

    def __call__(self, epoch: int, first_step: int) -> Iterator[Any]:
        if epoch >= self._end:
            batches, self._end = self._make(epoch, first_step)
            self._batches = self._iterator_over(batches)
        return self._batches
