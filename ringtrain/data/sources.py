"""Where samples come from: each source is a function from the configuration to a DataSet."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.config import DataConfig
from ringtrain.data import idx
from ringtrain.errors import DataError

DEBIAN_FOLDER = Path("/usr/share/datasets")


@dataclass(frozen=True)
class Samples:
    """Inputs with their labels."""

    inputs: NDArray[Any]
    """[samples, ...]; bytes (uint8) are pixels and are trained as float32 from 0 to 1"""
    labels: NDArray[np.int64]
    """[samples], classes from 0"""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DataSet:
    """What a run learns, and what it is judged by."""

    train: Samples
    test: Samples

    @property
    def num_classes(self) -> int:
        return int(max(self.train.labels.max(), self.test.labels.max())) + 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.train.inputs.shape[1:]


def checked(name: str, train: tuple[Any, Any], test: tuple[Any, Any]) -> DataSet:
    """Makes a DataSet of arrays, after a look at their shapes.

    Args:
        name: of the source, for messages.
        train: inputs [samples, ...] and labels [samples] or [samples, 1].
        test: the same.

    Returns:
        The data set; images without a channel, [samples, height, width], get one.

    Raises:
        DataError: inputs and labels do not fit together.
    """
    splits = []
    for split, (inputs, labels) in (("training", train), ("test", test)):
        inputs, labels = np.asarray(inputs), np.asarray(labels)
        if labels.shape == (len(labels), 1):
            labels = labels[:, 0]
        if labels.ndim != 1 or len(labels) == 0 or len(inputs) != len(labels):
            raise DataError(
                f"{name}: {split} data: got inputs of shape {inputs.shape} and labels of shape {labels.shape},"
                f" expected as many labels as inputs, and at least one"
            )
        if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
            raise DataError(
                f"{name}: {split} data: got labels of {labels.dtype} from {labels.min()}, expected classes 0, 1, ..."
            )
        if inputs.ndim == 3:
            inputs = inputs[..., np.newaxis]
        splits.append(Samples(inputs, labels.astype(np.int64)))
    if splits[0].inputs.shape[1:] != splits[1].inputs.shape[1:]:
        raise DataError(
            f"{name}: a training sample has shape {splits[0].inputs.shape[1:]}, a test sample"
            f" {splits[1].inputs.shape[1:]}: expected the same"
        )
    return DataSet(*splits)


def digits(config: DataConfig) -> DataSet:
    """1797 handwritten digits of 8x8 pixels, from scikit-learn itself; every fifth of each class is for the test.

    Source: Alpaydin & Kaynak 1998, Optical Recognition of Handwritten Digits, UCI.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return checked(config.name, (train_x, train_y), (test_x, test_y))


def mnist_like(config: DataConfig, keras_name: str) -> DataSet:
    """60000 training and 10000 test images of 28x28 pixels in four IDX files.

    Looked for in data.dir; if that is empty, in the folder of Debian's package, else fetched by Keras.

    Raises:
        DataError: a file is missing or corrupt, or there is neither file nor network.
    """
    folder = Path(config.dir) if config.dir else DEBIAN_FOLDER / config.name
    if not config.dir and not folder.exists():
        return _keras_download(config, keras_name)

    def split(part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        images = idx.read(idx.find(folder, f"{part}-images-idx3-ubyte"), num_dimensions=3)
        return images, idx.read(idx.find(folder, f"{part}-labels-idx1-ubyte"), num_dimensions=1)

    return checked(f"{config.name} in {folder}", split("train"), split("t10k"))


def _keras_download(config: DataConfig, keras_name: str) -> DataSet:
    import keras

    cache = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras"))
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with (cache / f"ringtrain-{keras_name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one rank fetches, the others find what it fetched
            train, test = getattr(keras.datasets, keras_name).load_data()
    except Exception as error:  # Keras raises whatever its downloader met, a bare Exception included
        raise DataError(
            f"{config.name}: not on this host, and not to be had from the network ({error}): give the folder of its"
            f" four IDX files with --data.dir{', or install dataset-fashion-mnist' * (config.name == 'fashion-mnist')}"
        ) from error
    return checked(config.name, train, test)


def synthetic(config: DataConfig) -> DataSet:
    """Ten random images, and noisy copies of them: the same on every call, learnable, of any size."""
    draw = np.random.default_rng(0)
    size = config.image_size
    prototypes = draw.random((10, size, size), np.float32)
    labels = np.arange(config.num_samples) % 10
    noise = draw.normal(0, 0.5, (config.num_samples, size, size)).astype(np.float32)
    images = np.clip(prototypes[labels] + noise, 0, 1)
    num_test = config.num_samples // 8
    return checked(config.name, (images[num_test:], labels[num_test:]), (images[:num_test], labels[:num_test]))


DATASETS: dict[str, Callable[[DataConfig], DataSet]] = {
    "digits": digits,
    "fashion-mnist": functools.partial(mnist_like, keras_name="fashion_mnist"),
    "mnist": functools.partial(mnist_like, keras_name="mnist"),
    "synthetic": synthetic,
}
