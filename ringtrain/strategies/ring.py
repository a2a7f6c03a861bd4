"""Strategies ring and mpi-ring: one process and model per rank, allreduce by Horovod or mpi4py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras

from ringtrain import hvd
from ringtrain.config.derived import num_shards
from ringtrain.errors import ConfigError
from ringtrain.strategies.base import StepsOf, Strategy
from ringtrain.training import rows, virtual_ranks
from ringtrain.training.devices import device_of_sums
from ringtrain.training.summed_step import SummedStep
from ringtrain.training.sums import Sums

if TYPE_CHECKING:
    from ringtrain.training.run import Run


class Ring(Strategy):
    """Strategies ring and mpi-ring."""

    may_compile = True
    # Keeps the state of all ranks equal; None: each rank has seeds and moving statistics of its own.
    step: SummedStep | None = None
    _steps: rows.Rows | None = None
    """of the run under way"""

    def distribute(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        options = self.config.hvd
        device = device_of_sums(self.config.device)
        try:
            return hvd.DistributedOptimizer(
                optimizer,
                op={"average": hvd.Average, "adasum": hvd.Adasum}[options.op],
                compression=hvd.Compression.named(options.compression),
                groups=options.groups or None,
                device_dense=device,
                device_sparse=device,
                deterministic=options.deterministic or self.config.strategy.name == "mpi-ring",
            )
        except ValueError as error:
            if not str(error).startswith(("compression", "op=")):
                raise
            raise ConfigError(str(error)) from error

    def proof(self, summary: Mapping[str, Any], gradients: str) -> str:
        if self.config.train.virtual_ranks:
            gradients += " in a fixed order"
        return super().proof(summary, gradients)

    def fingerprint(self) -> int | None:
        if self._steps is None:
            return None
        return self._steps.fingerprint()

    def sums(self) -> Sums | None:
        """How statistics and metrics are summed over the ranks with the gradients; None: each rank has its own."""
        num_virtual = self.config.train.virtual_ranks
        if not num_virtual:
            return None
        return virtual_ranks.SumsOverVirtualRanks(num_virtual)

    def share_rows(self, model: keras.Model, batch: Any) -> None:
        if self.config.train.virtual_ranks:
            num_shards(self.config, hvd.size())  # raises an error if there are more ranks
            virtual_ranks.refuse_unlike(model, batch)
        sums = self.sums()
        if sums is not None:
            self.step = SummedStep(model, sums)

    @contextlib.contextmanager
    def training(self, run: Run) -> Iterator[StepsOf]:
        with contextlib.ExitStack() as stack:
            num_virtual = self.config.train.virtual_ranks
            if num_virtual:
                virtual_ranks.check_order(run.job.model, num_virtual)
                stack.enter_context(virtual_ranks.sums_as_written())
            stack.enter_context(rows.errors_named(run.job.named_in_errors))
            self._steps = steps = stack.enter_context(rows.Rows(run, self.step))
            # An earlier one has other gradients and losses; it is the same after a change of ranks.
            run.job.model.make_train_function(force=not self.ranks_change)
            yield steps
