"""Loss and gradient of a whole batch, of which each rank has another number of rows, masked steps or weights.

Keras divides a loss by D: the number of its values, of those that a mask keeps, or the sum of their weights. The mean
of the ranks' losses is that of one process only if D is the same on all ranks. With n_r of n rows on rank r of N, the
loss of every output is therefore multiplied by (D_r / n_r) / (D / n), and gradients by the share n_r N / n before they
are averaged. Regularization counts once, since the shares' mean is 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.errors import ConfigError
from ringtrain.hvd import train_step
from ringtrain.hvd.collectives import unique_in_graph
from ringtrain.hvd.keras_patches import compiled_losses, metrics_of, set_untracked
from ringtrain.hvd.placement import CPU

NO_XLA = "a loss with masks, sample or class weights needs an allreduce, for which XLA has no kernel: leave it out"


class LossWeights:
    """Losses and metrics of a compiled and built model, in a step with a part of a batch.

    Between `replace` and `restore`, those within `in_step` count as they do in the whole batch. Losses that are no
    mean or sum over rows, or that a model's own `train_step` computes by itself, stay those of each part. A number of
    a part that such a step adds to a `keras.metrics.Mean` counts as the mean over its rows.
    """

    def __init__(
        self,
        model: keras.Model,
        num_parts: Callable[[], Any],
        over_parts: Callable[[Any], Any],  # sums a number, float64 [], over the parts; see `training.sums.Sums`
        is_divided: bool = True,  # whether there can be several parts
    ) -> None:
        self.model, self.num_parts, self.over_parts, self.is_divided = model, num_parts, over_parts, is_divided
        self.of_whole_parts: set[str] = set()  # losses of the script without a number per row, used so far
        self._share: Any = None
        self._losses: list[Any] | None = None
        self._weighed: list[Any] = []
        self._updated: list[Any] = []
        """metrics whose updates are replaced"""
        self._in_step = False
        self._is_per_row = False
        """whether the sum of all losses has a value per row, since one of them has no reduction"""

    def replace(self, share: tf.Variable | None) -> None:
        """Replaces losses and metrics. With `share`, the optimizers weigh gradients by it."""
        model, compiled = self.model, self.model._compile_loss
        self._weighed = []
        if share is not None:
            self._weighed = hvd.optimizers_of(model)
        for optimizer in self._weighed:
            hvd.weigh_gradients(optimizer, share)
        self._losses = []
        if self.is_divided:
            self._losses = compiled_losses(model)
        reductions = [getattr(entry.loss, "reduction", "") for entry in self._losses]
        self._is_per_row = "none" in reductions or None in reductions
        if compiled and self._losses:
            compiled._flat_losses[:] = [entry._replace(loss=self._weighted(entry.loss)) for entry in self._losses]
            for metric in compiled.metrics:
                self._replace_update(metric, self._of_output)
        if self.is_divided:
            self._replace_update(model._loss_tracker, self._of_values)
            for metric in metrics_of(model):
                if type(metric) is keras.metrics.Mean:
                    self._replace_update(metric, self._of_number)

    def restore(self) -> None:
        """Undoes `replace`, if it was called."""
        compiled = self.model._compile_loss
        for optimizer in self._weighed:
            hvd.weigh_gradients(optimizer, None)
        if self._losses:
            compiled._flat_losses[:] = self._losses
        for metric in self._updated:
            vars(metric).pop("update_state", None)
        self._losses, self._weighed, self._updated = None, [], []

    @contextlib.contextmanager
    def in_step(self, share: Any) -> Iterator[None]:
        """Context of a step with a part of the rows; `share`: see `StepResult`, None: parts are equal."""
        self._in_step = self._losses is not None
        self._share = tf.constant(1.0, tf.float64) if share is None else share
        for layer in hvd.batch_norm_layers(self.model):
            set_untracked(layer, share=share)
        try:
            yield
        finally:
            self._in_step = False
            for layer in hvd.batch_norm_layers(self.model):
                set_untracked(layer, share=None)

    def _replace_update(self, metric: Any, of_step: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        """Makes a metric change the values and weights that a step passes to it."""
        update_state = metric.update_state

        def update(values: Any, sample_weight: Any = None) -> Any:
            if self._in_step:
                values, sample_weight = of_step(values, sample_weight)
            return update_state(values, sample_weight=sample_weight)

        set_untracked(metric, update_state=update)
        self._updated.append(metric)

    def _of_output(self, loss: Any, weight: Any) -> tuple[Any, Any]:
        """Loss of one output, in whose mean each batch counts 1; without a reduction, each of its rows does."""
        part = self._share / self._num_parts
        if self._is_per_row:
            loss = loss * tf.cast(part, loss.dtype)
        if loss.shape.rank:
            return loss, tf.ones_like(loss)
        # Eagerly `weight` is the number of this part's rows: a batch then counts as many times.
        return loss, part if weight is None else weight

    def _of_values(self, loss: Any, num_rows: Any) -> tuple[Any, Any]:
        """Loss of a step. Without a reduction it has a value per row, of which Keras tracks the mean."""
        if num_rows is None:  # of a step of the model's own, in whose mean each batch counts 1
            return self._of_output(tf.convert_to_tensor(loss), None)
        if loss.shape.rank:
            loss = loss * tf.cast(self._share / self._num_parts, loss.dtype)
        return loss, num_rows

    def _of_number(self, values: Any, weight: Any) -> tuple[Any, Any]:
        """A number of a part, in whose mean each batch counts 1; values of rows, each of which does, as they are."""
        if weight is None and not tf.convert_to_tensor(values).shape.rank:
            weight = self._share / self._num_parts
        return values, weight

    @property
    def _num_parts(self) -> Any:
        return tf.cast(self.num_parts(), tf.float64)

    def _weighted(self, loss: Any) -> Callable[..., Any]:
        def weighted(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            value = loss(y_true, y_pred, sample_weight)
            if not self._in_step:
                return value
            factor = tf.cast(self._factor(loss, y_true, y_pred, sample_weight), value.dtype)
            if self._is_per_row and not value.shape.rank:  # Keras adds it to each value of the others
                factor = factor * tf.cast(tf.math.divide_no_nan(self._num_parts, self._share), value.dtype)
            return value * factor

        return weighted

    def _factor(self, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        """(D_r / n_r) / (D / n), which is 1 without a message where each row counts the same."""
        share = self._share
        if not isinstance(loss, keras.Loss) or type(loss).__call__ is not keras.Loss.__call__:
            return 1.0  # its divisor is unknown
        if loss.reduction in ("sum", "none", None):
            return tf.math.divide_no_nan(self._num_parts, share)
        if loss.reduction != "mean_with_sample_weight":
            sample_weight = None
        is_weighted = sample_weight is not None
        values = _Ones(loss)
        divisor = values(y_true, y_pred, sample_weight)
        is_masked = values.has_mask
        for leaf in keras.tree.flatten(y_pred):
            is_masked |= getattr(leaf, "_keras_mask", None) is not None
        num_rows = [tuple(leaf.shape[:1]) for leaf in keras.tree.flatten((y_true, y_pred))]
        if (not values.shape or values.shape[:1] not in num_rows) and not _is_of_keras(loss):
            self.of_whole_parts.add(loss.name)
        if not values.shape or (not is_weighted and not is_masked and None not in values.shape[1:]):
            return 1.0
        if train_step.has_layer(self.model, "jit"):
            raise ConfigError(f"train.jit: {NO_XLA}")
        divisor = tf.stop_gradient(tf.cast(divisor, tf.float64) * tf.cast(share > 0, tf.float64))
        return tf.math.divide_no_nan(self._num_parts * divisor, self.over_parts(divisor) * share)


def _is_of_keras(loss: keras.Loss) -> bool:
    function = getattr(loss, "fn", type(loss))
    return str(getattr(function, "__module__", "")).startswith("keras.")


def sum_over_ranks(divisor: Any) -> Any:
    """Sum of a number over the ranks, within a graph. Collective."""
    name = f"HorovodAllreduce_{unique_in_graph('ringtrain_divisor')}"
    with tf.device(CPU):
        return hvd.allreduce(divisor, name=name, op=hvd.Sum, device_dense=CPU, ignore_name_scope=True)


class _Ones(keras.losses.Loss):
    """Sum of a loss' values if each were 1, by Keras' own rules for masks and weights."""

    def __init__(self, loss: keras.Loss) -> None:
        super().__init__(name=loss.name, reduction="sum", dtype=loss.dtype)
        self.loss = loss
        self.shape: tuple[int | None, ...] = ()
        self.has_mask = False

    def call(self, y_true: Any, y_pred: Any) -> Any:
        values = keras.ops.convert_to_tensor(self.loss.call(y_true, y_pred))  # a function may return a plain number
        self.shape = tuple(values.shape)
        ones = keras.ops.ones_like(values)
        mask = getattr(values, "_keras_mask", None)  # of a loss with ignore_class
        if mask is not None:
            keras.src.backend.set_keras_mask(ones, mask)
            self.has_mask = True
        return ones
