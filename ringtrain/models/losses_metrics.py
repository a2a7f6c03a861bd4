"""Loss and metrics of classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringtrain.config_io import find
from ringtrain.errors import ConfigError

if TYPE_CHECKING:
    import keras


def cross_entropy(label_smoothing: float = 0.0) -> keras.losses.Loss:
    """Returns the cross-entropy of integer labels and logits, computed in float32 for logits of any dtype.

    With label smoothing s (Szegedy et al. 2015, arXiv 1512.00567, section 7), the true class of K counts 1 - s + s / K
    and every other class s / K:

        loss = (1 - s) * -log p(label) + s * mean over classes of -log p

    The loss on test data is smoothed, too. A saved model contains Keras' plain loss, without smoothing.
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


def _top_5() -> keras.metrics.Metric:
    import keras

    return keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5")


METRICS: dict[str, Callable[[], keras.metrics.Metric]] = {"top-5": _top_5}


def metrics(names: Sequence[str]) -> Callable[[], list[keras.metrics.Metric]]:
    """Resolves metrics without creating them.

    Args:
        names: keys of METRICS, or module:function of functions or classes without arguments that return a Keras metric
            of labels, int64 [batch], and logits, float32 [batch, num_classes]. Its variables are added over all ranks,
            so they must be sums, counts or the like, as in all Keras metrics.

    Raises:
        ConfigError: A name does not exist; in the returned function, an object is not a Keras metric.
    """
    functions = [find("model.metrics", name, METRICS) for name in names]

    def make() -> list[keras.metrics.Metric]:
        import keras

        made = [function() for function in functions]
        for name, metric in zip(names, made, strict=True):
            if not isinstance(metric, keras.metrics.Metric):
                raise ConfigError(f"model.metrics: {name} returned {type(metric).__name__}, expected a Keras metric")
        return made

    return make
