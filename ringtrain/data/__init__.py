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
inputs:         training and validation data from arguments of Keras' fit
sharding:       distribution of the samples over the ranks
augment:        crops and flips, determined by seed and sample number
pipeline:       batches as tf.data
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ringtrain.config import DataConfig
from ringtrain.config_io import find
from ringtrain.data.arrays import Arrays, NoSamples, RowBatches
from ringtrain.data.dataset import DataSet, Samples, checked, checksums
from ringtrain.data.inputs import FitArguments, inputs
from ringtrain.data.pipeline import dealt_batches, evaluation_batches, training_batches
from ringtrain.data.sharding import evaluation_shard, part_of, training_shard
from ringtrain.data.sources import DATASETS, PREPARE
from ringtrain.data.streams import Stream, StreamRows
from ringtrain.errors import DataError


def prepare(config: DataConfig, is_first: bool = True) -> None:
    """Prepares files for the other ranks and later starts, e.g. an index of TFRecords, if `is_first`."""
    if is_first and config.dir and config.name in PREPARE:
        PREPARE[config.name](Path(config.dir))


def source(config: DataConfig) -> Callable[[], DataSet]:
    """Resolves a data source without reading any data.

    Args:
        config: `name` is a key of DATASETS, or module:function of a function without arguments that returns (training
            inputs, training labels), (test inputs, test labels), as those of keras.datasets do.

    Raises:
        ConfigError: The source does not exist. The returned function raises DataError.
    """
    function = find("data.name", config.name, DATASETS)

    def read() -> DataSet:
        if config.name not in DATASETS:
            train, test = function()
            return checked(config.name, train, test, config.num_classes)
        try:
            return function(config)
        except OSError as error:  # not handled by the source, e.g. a directory without permission
            raise DataError(f"{error.filename or config.name}: cannot be read: {error.strerror or error}") from error

    return read
