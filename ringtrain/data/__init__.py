"""Data sets by name, and the shard that gives every sample to one rank."""

from __future__ import annotations

from collections.abc import Callable

from ringtrain.config import DataConfig
from ringtrain.data.pipeline import evaluation_batches, training_batches
from ringtrain.data.shard import evaluation_shard, training_shard
from ringtrain.data.sources import DATASETS, DataSet, Samples, checked
from ringtrain.lookup import find

__all__ = [
    "DATASETS",
    "DataSet",
    "Samples",
    "evaluation_batches",
    "evaluation_shard",
    "source",
    "training_batches",
    "training_shard",
]


def source(config: DataConfig) -> Callable[[], DataSet]:
    """Finds a data source without reading any data.

    Args:
        config: its name is a key of DATASETS, or module:function of a function without arguments that returns
            (training inputs, training labels), (test inputs, test labels), as those of keras.datasets do.

    Returns:
        A function that reads the data; it raises DataError.

    Raises:
        ConfigError: there is no such source.
    """
    found = find("data.name", config.name, DATASETS)
    if config.name in DATASETS:
        return lambda: found(config)
    return lambda: checked(config.name, *found())
