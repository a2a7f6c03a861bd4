"""Loss and gradient of a whole batch, of which each rank has another number of rows, masked steps or weights.

Keras divides a loss by D: the number of its values, of those that a mask keeps, or the sum of their weights. The mean
of the ranks' losses is that of one process only if D is the same on all ranks. With n_r of n rows on rank r of N, the
loss of every output is therefore multiplied by (D_r / n_r) / (D / n), and gradients by the share n_r N / n before they
are averaged. Regularization counts once, since the shares' mean is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.hvd.collectives import unique_in_graph
from ringtrain.hvd.placement import CPU


class UnevenBatches:
    """Context in which a compiled and built model trains as one process would with the batches of all ranks.

    The factors apply to steps, not to evaluation. Losses that are no mean or sum over rows, or that a model's own
    `train_step` computes by itself, stay those of each rank.

    Args:
        has_shares: Whether batches come as (share, batch), since the ranks' numbers of rows differ.
        has_empty_parts: Whether a share can be 0. The row in its place then changes no metric and no statistic.

    Attributes:
        fingerprint: Of all batches so far, if they come as ([share, fingerprint], batch); below 2 ** 31.
    """

    def __init__(self, model: keras.Model, has_shares: bool, has_empty_parts: bool) -> None:
        self.model, self.has_empty_parts = model, has_empty_parts
        self.size: Any = hvd.size()
        self.is_divided = hvd.size() > 1
        self.share = tf.Variable(1.0, trainable=False, dtype=tf.float64) if has_shares else None
        self.fingerprint = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._in_step = False

    def __enter__(self) -> UnevenBatches:
        model, compiled = self.model, self.model._compile_loss
        self._train_step, self._losses = model.train_step, list(compiled._flat_losses if compiled else ())
        if self.share is not None:
            self._weigh(self.share)
        # Not model.train_step = ...: Keras would track and save the attribute.
        object.__setattr__(model, "train_step", self._step)
        if compiled and self.is_divided:
            compiled._flat_losses[:] = [one._replace(loss=self._weighted(one.loss)) for one in self._losses]
            self._replace_update(model._loss_tracker, self._of_values)
            for metric in compiled.metrics:
                self._replace_update(metric, self._of_output)
        for layer in hvd.batch_norm_layers(model):
            object.__setattr__(layer, "share", self.share)
        return self

    def __exit__(self, *_: object) -> None:
        object.__setattr__(self.model, "train_step", self._train_step)
        if self.share is not None:
            self._weigh(None)
        if compiled := self.model._compile_loss:
            compiled._flat_losses[:] = self._losses
            for metric in (self.model._loss_tracker, *compiled.metrics):
                vars(metric).pop("update_state", None)
        for layer in hvd.batch_norm_layers(self.model):
            object.__setattr__(layer, "share", None)

    def _weigh(self, share: tf.Variable | None) -> None:
        for optimizer in hvd.optimizers_of(self.model):
            hvd.weigh_gradients(optimizer, share)

    def _step(self, data: Any) -> Any:
        """A step of the model with this rank's part of the batch."""
        if self.share is not None:
            share, data = data
            if share.shape.rank:  # with the fingerprint of the batch
                self.fingerprint.assign(tf.math.floormod(self.fingerprint * 31 + share[1], tf.int32.max))
                share = share[0]
            self.share.assign(share)
        share, changed = self.share, self._changed_by_a_row() if self.has_empty_parts else []
        before = [tf.identity(variable.value) for variable in changed]
        self._in_step = True
        try:
            logs = self._train_step(data)
        finally:
            self._in_step = False
        for variable, value in zip(changed, before, strict=True):
            variable.assign(tf.where(share > 0, variable.value, value))  # type: ignore[operator]
        return logs

    def _changed_by_a_row(self) -> list[Any]:
        """Metrics, seeds and this rank's moving statistics."""
        weights = {id(variable) for variable in self.model.weights}
        seeds_and_metrics = [*self.model.variables, *self.model.metrics_variables]
        rest = {id(variable): variable for variable in seeds_and_metrics if id(variable) not in weights}
        return [*rest.values(), *hvd.weights_of_one_rank(self.model)]

    def _replace_update(self, metric: Any, of_step: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        """Makes a metric change the values and weights that a step passes to it."""
        update_state = metric.update_state

        def update(values: Any, sample_weight: Any = None) -> Any:
            if self._in_step:
                values, sample_weight = of_step(values, sample_weight)
            return update_state(values, sample_weight=sample_weight)

        object.__setattr__(metric, "update_state", update)

    def _of_output(self, loss: Any, weight: Any) -> tuple[Any, Any]:
        """Loss of one output, in whose mean each batch counts 1."""
        return loss, self._share / self.size

    def _of_values(self, loss: Any, num_rows: Any) -> tuple[Any, Any]:
        """Loss of a step. Without a reduction it has a value per row, of which Keras tracks the mean."""
        return (loss * tf.cast(self._share / self.size, loss.dtype) if loss.shape.rank else loss), num_rows

    @property
    def _share(self) -> Any:
        return tf.constant(1.0, tf.float64) if self.share is None else self.share

    def _weighted(self, loss: Any) -> Callable[..., Any]:
        def weighted(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            value = loss(y_true, y_pred, sample_weight)
            if not self._in_step:
                return value
            return value * tf.cast(self._factor(loss, y_true, y_pred, sample_weight), value.dtype)

        return weighted

    def _factor(self, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        """(D_r / n_r) / (D / n), which is 1 without a message where each row counts the same."""
        share = self._share
        if not isinstance(loss, keras.Loss) or type(loss).__call__ is not keras.Loss.__call__:
            return 1.0  # its divisor is unknown
        if loss.reduction in ("sum", "none", None):
            return tf.math.divide_no_nan(tf.cast(self.size, tf.float64), share)
        is_weighted = loss.reduction == "mean_with_sample_weight" and sample_weight is not None
        values = _Ones(loss)
        divisor = values(y_true, y_pred, sample_weight if is_weighted else None)
        is_masked = any(getattr(leaf, "_keras_mask", None) is not None for leaf in keras.tree.flatten(y_pred))
        if not values.shape or (not is_weighted and not is_masked and None not in values.shape[1:]):
            return 1.0
        divisor = tf.stop_gradient(tf.cast(divisor, tf.float64) * tf.cast(share > 0, tf.float64))
        return tf.math.divide_no_nan(self.size * divisor, self._total(divisor) * share)

    def _total(self, divisor: Any) -> Any:
        """Sum over the ranks."""
        name = f"HorovodAllreduce_{unique_in_graph('ringtrain_divisor')}"
        with tf.device(CPU):
            return hvd.allreduce(divisor, name=name, op=hvd.Sum, device_dense=CPU, ignore_name_scope=True)


class _Ones(keras.losses.Loss):
    """Sum of a loss' values if each were 1, by Keras' own rules for masks and weights."""

    def __init__(self, loss: keras.Loss) -> None:
        super().__init__(name=loss.name, reduction="sum", dtype=loss.dtype)
        self.loss = loss
        self.shape: tuple[int | None, ...] = ()

    def call(self, y_true: Any, y_pred: Any) -> Any:
        values = keras.ops.convert_to_tensor(self.loss.call(y_true, y_pred))  # a function may return a plain number
        self.shape = tuple(values.shape)
        return keras.ops.ones_like(values)
