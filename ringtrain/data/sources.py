"""Data by name, found without TensorFlow, so that a misspelled name is reported at once; datasets.py reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ringtrain.config.by_name import find
from ringtrain.config.sections import DataConfig
from ringtrain.errors import ConfigError

if TYPE_CHECKING:
    from ringtrain.data.dataset import DataSet
    from ringtrain.data.fit_arguments import FitArguments

NAMES = ("digits", "image-folder", "imagenet-tfrecords", "npz", "records", "spark", "synthetic")
ANY_TARGETS = ("npz", "records")
"""names of data whose targets need not be integer classes"""


def source(config: DataConfig, of_classes: bool | None = True) -> Callable[[], DataSet | FitArguments]:
    """Returns a function that reads data.name: a DataSet if `of_classes` (None: if possible), else FitArguments."""
    own = None if config.name in NAMES else find("data.name", config.name, dict.fromkeys(NAMES, dict))
    if of_classes is False and own is None and config.name not in ANY_TARGETS:
        raise ConfigError(
            f"model.loss: {config.name} has integer classes: expected sparse_categorical_crossentropy, or a"
            f" module:function that takes them"
        )

    def read() -> DataSet | FitArguments:
        from ringtrain.data import datasets  # loads TensorFlow

        return datasets.read(config, own, of_classes)

    return read
