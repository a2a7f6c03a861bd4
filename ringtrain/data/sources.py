"""Data by name, found without TensorFlow, so that a misspelled name is reported at once; datasets.py reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringtrain.config.by_name import find
from ringtrain.config.sections import DataConfig
from ringtrain.errors import ConfigError

if TYPE_CHECKING:
    from ringtrain.data.dataset import DataSet
    from ringtrain.data.fit_arguments import FitArguments


def _named(function: str) -> Callable[..., Any]:
    """A function of datasets.py, which is imported when it is called."""
    return find("data.name", f"ringtrain.data.datasets:{function}", {})


DATASETS = {
    "digits": _named("digits"),
    "image-folder": _named("image_folder"),
    "imagenet-tfrecords": _named("imagenet_tfrecords"),
    "npz": _named("npz"),
    "records": _named("records"),
    "spark": _named("spark"),
    "synthetic": _named("synthetic"),
}
ANY_TARGETS = ("npz", "records")
"""names of data whose targets need not be integer classes"""


def source(config: DataConfig, of_classes: bool | None = True) -> Callable[[], DataSet | FitArguments]:
    """Returns a function that reads data.name: a DataSet if `of_classes` (None: if possible), else FitArguments."""
    function, is_own = find("data.name", config.name, DATASETS), config.name not in DATASETS
    if of_classes is False and not is_own and config.name not in ANY_TARGETS:
        raise ConfigError(
            f"model.loss: {config.name} has integer classes: expected sparse_categorical_crossentropy, or a"
            f" module:function that takes them"
        )

    def read() -> DataSet | FitArguments:
        from ringtrain.data import datasets  # loads TensorFlow

        if is_own:
            return datasets.classes_or_arguments(config.name, function(), config.num_classes, of_classes)
        return datasets.by_name(config, function, of_classes)

    return read
