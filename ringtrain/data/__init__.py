"""Data sets by name or module:function, sharded over ranks, as tf.data pipelines.

dataset:        two splits of samples, in memory or read on demand
sources:        data sets by name: digits, MNIST, synthetic, npz
cifar:          CIFAR-10
image_files:    JPEG and PNG files, decoded and resized
image_folder:   a folder of images per class
tfrecords:      TFRecord files and their index
make_tfrecords: command: images to TFRecords
spark_rows:     rows that Spark streams to this rank
arrays:         arrays as Keras' fit takes them, and a rank's rows of each global batch
streams:        batches of a tf.data.Dataset, PyDataset or generator, and a rank's rows of each
from_rank_0:    batches that rank 0 sends to the other ranks
inputs:         training and validation data from arguments of Keras' fit
sharding:       distribution of the samples over the ranks
augment:        crops and flips, determined by seed and sample number
pipeline:       batches as tf.data
pipeline_graph: what the graph of a tf.data pipeline shows
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

import numpy as np

from ringtrain.config import DataConfig
from ringtrain.config_io import find
from ringtrain.data.arrays import Arrays, NoSamples, RowBatches
from ringtrain.data.dataset import DataSet, Samples, Split, check_numbers, checked, checksums
from ringtrain.data.inputs import FitArguments, arguments_of, inputs, is_nest, shapes_of
from ringtrain.data.pipeline import dealt_batches, evaluation_batches, training_batches
from ringtrain.data.sharding import evaluation_shard, part_of, training_shard
from ringtrain.data.sources import DATASETS, PREPARE, arrays_of_npz
from ringtrain.data.streams import Stream, StreamRows
from ringtrain.errors import ConfigError, DataError


def prepare(config: DataConfig, is_first: bool = True) -> None:
    """Prepares files for the other ranks and later starts, e.g. an index of TFRecords, if `is_first`."""
    if is_first and config.dir and config.name in PREPARE:
        PREPARE[config.name](Path(config.dir))


@overload
def source(config: DataConfig) -> Callable[[], DataSet]: ...


@overload
def source(config: DataConfig, of_classes: bool | None) -> Callable[[], DataSet | FitArguments]: ...


def source(config: DataConfig, of_classes: bool | None = True) -> Callable[[], DataSet | FitArguments]:
    """Resolves a data source without reading any data.

    Args:
        config: `name` is a key of DATASETS, or module:function of a function without arguments that returns (training
            inputs, training labels), (test inputs, test labels), as those of keras.datasets do, or arguments of
            `ringtrain.fit`: see `inputs.arguments_of`.
        of_classes: Whether targets are integer classes. None: they are if they can be.

    Returns:
        A function that reads a DataSet, if targets are integer classes, else arguments of `ringtrain.fit`.

    Raises:
        ConfigError: The source does not exist, or has other targets. The returned function raises DataError.
    """
    function = find("data.name", config.name, DATASETS)
    if of_classes is False and config.name in DATASETS and config.name != "npz":
        raise ConfigError(
            f"model.loss: {config.name} has integer classes: expected sparse_categorical_crossentropy, or a"
            f" module:function that takes them"
        )

    def read() -> DataSet | FitArguments:
        if config.name not in DATASETS:
            return _classes_or_arguments(config.name, function(), config.num_classes, of_classes)
        try:
            if config.name == "npz" and not of_classes:
                path, *splits = arrays_of_npz(config)
                return _classes_or_arguments(path, splits, config.num_classes, of_classes)
            data_set: DataSet = function(config)
            return data_set
        except OSError as error:  # not handled by the source, e.g. a directory without permission
            raise DataError(f"{error.filename or config.name}: cannot be read: {error.strerror or error}") from error

    return read


def _classes_or_arguments(name: str, result: Any, num_classes: int, of_classes: bool | None) -> DataSet | FitArguments:
    """DataSet of ((inputs, labels), (inputs, labels)) whose labels are integer classes, else arguments of fit."""
    given = arguments_of(name, result)
    is_pairs = isinstance(result, tuple | list) and all(isinstance(pair, tuple | list) for pair in result)
    pairs = [*result] if is_pairs and all(len(pair) == 2 for pair in result) else []
    if pairs and (of_classes or (of_classes is None and all(_has_classes(*pair) for pair in pairs))):
        train, test = pairs
        return checked(name, train, test, num_classes)
    if of_classes:
        raise DataError(
            f"{name}: returned targets that are not known to be integer classes: expected"
            f" ((inputs, labels), (test inputs, test labels)), or a loss named by model.loss, or a model of your own"
            f" that is compiled"
        )
    for split, pair in zip(("training", "validation"), pairs, strict=False):
        for part, values in zip(("inputs", "targets"), pair, strict=True):
            if isinstance(values, np.ndarray) and values.dtype.kind == "f":
                check_numbers(f"{name}: {split} {part}", values)
    return given


def _has_classes(x: Any, labels: Any) -> bool:
    """Returns whether the inputs are one array, and each sample has one integer label of at least 0."""
    if is_nest(x) or is_nest(labels):
        return False
    array = np.asarray(labels)
    is_one_each = array.shape in ((array.size,), (array.size, 1))
    return is_one_each and np.issubdtype(array.dtype, np.integer) and bool(array.min(initial=0) >= 0)
