"""Forward and backward pass compiled by XLA, the reduction outside, for which XLA has no kernel."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import trainer

from ringtrain.errors import RingtrainError


def jit_gradients(model: keras.Model) -> None:
    """Makes a model's train_step compute its outputs, loss and gradients in one function compiled by XLA.

    Gradients leave it for the optimizer, which reduces, clips and applies them as ever; so do the outputs, for metrics.
    Evaluation stays as it is. XLA orders sums differently: results equal those without it up to rounding.

    Args:
        model: Before or after `compile`, which must be told jit_compile=False.

    Raises:
        RingtrainError: Keras says that a layer does not support it, or the model has a train_step of its own.
    """
    _refuse(model)

    @tf.function(jit_compile=True, reduce_retracing=True, autograph=False)
    def forward_and_backward(x: Any, y: Any, sample_weight: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)
            scaled = model.optimizer.scale_loss(loss)
        return outputs, loss, tape.gradient(scaled, model.trainable_weights)

    def train_step(data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs, loss, gradients = forward_and_backward(x, y, sample_weight)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return model.compute_metrics(x, y, outputs, sample_weight=sample_weight)

    object.__setattr__(model, "train_step", train_step)


def _refuse(model: keras.Model) -> None:
    if type(model).train_step is not keras.Model.train_step:
        raise RingtrainError(
            f"jit: {type(model).__name__} has a train_step of its own, which cannot be taken apart around the"
            " allreduce: leave train_step to Keras, or train without jit"
        )
    layer = next((layer for layer in model._flatten_layers() if not layer.supports_jit), None)
    if layer is not None:
        raise RingtrainError(
            f"jit: Keras says that layer {layer.name} ({type(layer).__name__}) does not support XLA: train without jit"
        )
    supports_jit = getattr(trainer.model_supports_jit, "before_ringtrain", trainer.model_supports_jit)
    if not supports_jit(model):
        raise RingtrainError("jit: Keras does not support XLA here (macOS, or op determinism is on): train without jit")
