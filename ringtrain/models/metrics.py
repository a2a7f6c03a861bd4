"""Metrics by name, besides the loss and the accuracy that every run has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringtrain.errors import ConfigError
from ringtrain.lookup import find

if TYPE_CHECKING:
    import keras


def _top_5() -> keras.metrics.Metric:
    """The share of samples whose label is among the five classes with the largest logits."""
    import keras

    return keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5")


METRICS: dict[str, Callable[[], keras.metrics.Metric]] = {"top-5": _top_5}


def metrics(names: Sequence[str]) -> Callable[[], list[keras.metrics.Metric]]:
    """Finds metrics, without making them.

    Args:
        names: keys of METRICS, or module:function of functions (classes will do) without arguments that return a Keras
            metric of labels, int64 [batch], and logits, float32 [batch, num_classes]. Its variables must be sums,
            counts or the like, as all of Keras' are: those of all ranks are added.

    Returns:
        A function that makes new ones; it raises ConfigError for what is no metric.

    Raises:
        ConfigError: there is none of such a name.
    """
    found = [find("model.metrics", name, METRICS) for name in names]

    def make() -> list[keras.metrics.Metric]:
        import keras

        made = [function() for function in found]
        for name, metric in zip(names, made, strict=True):
            if not isinstance(metric, keras.metrics.Metric):
                raise ConfigError(f"model.metrics: {name} returned {type(metric).__name__}, expected a Keras metric")
        return made

    return make
