"""The training step of a model on all ranks.

    rows of this rank -> gradients -> averages over all ranks -> one update

Keras' step is enough where all ranks have equally many rows: the optimizer of `hvd.DistributedOptimizer` reduces the
gradients (hvd/reduction.py). A `Step` is around it where ranks have different numbers of rows, or losses with masks and
weights: `uneven`. A `SummedStep` is for ranks that also share moving statistics, seeds and metrics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.data.parts import Header
from ringtrain.hvd import train_step
from ringtrain.hvd.collectives import broadcast_variables
from ringtrain.hvd.keras_patches import assigned_weights, distributed, innermost
from ringtrain.training.metric_results import logs_of, metric_results
from ringtrain.training.uneven import LossWeights, sum_over_ranks


class Step:
    """Training step of a compiled and built model on all ranks; the model trains by it while it is installed."""

    share: tf.Variable | None = None
    """of this rank, where each rank has statistics of its own"""
    has_empty_parts = False

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.has_own = train_step.is_own(model)
        self.inner: train_step.TrainStep
        """the step without this layer"""
        self.fingerprint = tf.Variable(0.0, trainable=False, dtype=tf.float64)  # of all batches; below 2 ** 31
        self.metric_of: dict[str, str] = {}
        """by the name of a log, the name in `metric_results` of the result that it is"""
        self._assigned: dict[int, Any] = {}
        """weights that the model's code assigns in a step, by id"""
        self.losses = self._loss_weights()

    def _loss_weights(self) -> LossWeights:
        """Divides losses by sums over the parts of a batch: here one for each rank."""
        return LossWeights(self.model, hvd.size, sum_over_ranks, is_divided=hvd.size() > 1)

    @property
    def unlike(self) -> str:
        """What the first step has shown not to be as in one process; see `training.unlike`."""
        names = ", ".join(sorted(self.losses.of_whole_parts))
        if not names:
            return ""
        return f"the loss {names} has no number per row: it is computed of each rank's rows, and averaged"

    def divide(self, has_header: bool, has_empty_parts: bool) -> None:
        """Declares before training how batches come: as (`data.Header`, batch), and whether a share can be 0."""
        self.has_empty_parts = has_empty_parts  # whose row then changes no metric and no statistic
        # A variable, as the step may be traced once for all batches.
        if has_header:
            self.share = tf.Variable(1.0, trainable=False, dtype=tf.float64)

    def __enter__(self) -> Step:
        train_step.wrap(self.model, "ranks", self._around)
        self.losses.replace(self.share)
        return self

    def __exit__(self, *_: object) -> None:
        train_step.unwrap(self.model, "ranks")
        self.losses.restore()

    def _around(self, inner: train_step.TrainStep) -> train_step.TrainStep:
        # Called again whenever a layer further inside changes: the step calls the newest one.
        self.inner = inner
        return self.train

    def note(self, header: Header) -> None:
        """Adds a batch's fingerprint to that of all batches."""
        # Times a number, so that the same batches in another order have another fingerprint.
        self.fingerprint.assign(tf.math.floormod(self.fingerprint * 31 + header.fingerprint, tf.int32.max))

    def train(self, data: Any) -> Any:
        """A step of the model with this rank's part of the batch."""
        # The share of this rank in the batch, which weighs its gradients.
        header: Header | None = None
        if self.share is not None and isinstance(data[0], Header):
            header, data = data
            self.note(header)
            self.share.assign(header.shares[0])
        elif self.share is not None:  # of a callback's `train_on_batch`, whole and the same on every rank
            self.share.assign(1.0)

        # A rank without rows trains a placeholder row with the weight 0: what seeds and metrics had is set back.
        counted: list[Any] = []
        if self.has_empty_parts:
            counted = self._seeds_and_metrics()
        before = [tf.identity(variable.value) for variable in counted]
        with self.losses.in_step(self.share), self.noting_assigned():
            if self.has_empty_parts and self.has_own:
                logs = self.logs_of(data)
            else:
                logs = self.inner(data)
        for variable, value in zip(counted, before, strict=True):
            variable.assign(tf.where(self.share > 0, variable.value, value))  # type: ignore[operator]
        if self.has_empty_parts and header is not None:
            self._share_statistics(header)
        self.share_assigned()
        if self.has_empty_parts and self.has_own:  # results without the placeholder row
            results = metric_results(self.model)
            logs = logs | {name: results[metric] for name, metric in self.metric_of.items()}
        return logs

    def _share_statistics(self, header: Header) -> None:
        """Gives a rank without rows rank 0's statistics: what follows from weights alone has changed on all ranks."""
        statistics = hvd.weights_of_one_rank(self.model)
        if not statistics:
            return

        def share() -> Any:
            own = [tf.identity(variable.value) for variable in statistics]
            broadcast_variables(statistics, root_rank=0)
            for variable, value in zip(statistics, own, strict=True):
                variable.assign(tf.where(self.share > 0, value, variable.value))  # type: ignore[operator]
            return tf.constant(True)

        # Some rank has no rows if this one has none, or one of fewer than there are ranks.
        share_of_batch, num_rows = header.shares[0], header.rows[0]
        is_short = tf.logical_or(share_of_batch <= 0, tf.logical_and(num_rows <= 1, share_of_batch > 1))
        tf.cond(is_short, share, lambda: tf.constant(False))

    def logs_of(self, rows: Any) -> dict[str, Any]:
        """Logs of the model's step with some rows."""
        return logs_of(self.model, self.inner, rows, self.metric_of)

    @contextlib.contextmanager
    def noting_assigned(self) -> Iterator[None]:
        """Context of a model's step that notes which weights its code assigns besides the update."""
        if not self.has_own:
            yield
            return
        # What an earlier trace has shown stays: a function of TensorFlow that the step calls is traced once.
        with assigned_weights(self.model.trainable_weights, lambda weight: self._assigned.update({id(weight): weight})):
            yield

    def share_assigned(self) -> None:
        """Gives all ranks rank 0's weights, as far as a step assigns them: each rank rounds its own numbers."""
        weights = list(self._assigned.values())
        if self.has_own and tf.executing_eagerly():  # each rank may go another way through the step's code
            weights = self.model.trainable_weights
        optimizers = [innermost(one) for one in hvd.optimizers_of(self.model) if distributed(one)]
        weights = [weight for weight in weights if not any(one.is_local(weight) for one in optimizers)]
        if weights and (hvd.size() > 1 or hvd.is_shared(self.model)):
            broadcast_variables(weights, root_rank=0)

    def _seeds_and_metrics(self) -> list[Any]:
        weights = {id(variable) for variable in self.model.weights}
        both = [*self.model.variables, *self.model.metrics_variables]
        return list({id(variable): variable for variable in both if id(variable) not in weights}.values())
