"""The loss of a classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


def cross_entropy(label_smoothing: float = 0.0) -> keras.losses.Loss:
    """Cross-entropy of integer labels and logits, computed in float32 whatever the logits come in.

    With label smoothing s (Szegedy et al. 2015, arXiv 1512.00567, section 7), the true one of K classes counts
    1 - s + s / K and every other s / K:

        loss = (1 - s) * -log p(label) + s * mean over classes of -log p

    Args:
        label_smoothing: s, from 0 up to 1. The loss on test data is smoothed too.

    Returns:
        Keras' SparseCategoricalCrossentropy. A model saved with it holds the plain one, without smoothing.
    """
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if label_smoothing:
        plain = loss.fn

        def smoothed(labels: Any, logits: Any, **options: Any) -> Any:
            to_every_class = -keras.ops.mean(keras.ops.log_softmax(logits), axis=-1)
            return (1 - label_smoothing) * plain(labels, logits, **options) + label_smoothing * to_every_class

        loss.fn = smoothed
    return loss
