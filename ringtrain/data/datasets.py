"""The data sets that have a name, and what a function of the user's returns: see sources.py."""

from __future__ import annotations

import functools
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringtrain.config.by_name import imported
from ringtrain.config.sections import DataConfig
from ringtrain.data import augment
from ringtrain.data.classes import check_numbers, checked
from ringtrain.data.dataset import DataSet
from ringtrain.data.fit_arguments import FitArguments, arguments_of, is_nest
from ringtrain.data.records import RecordRows, Records
from ringtrain.data.spark_rows import spark as spark
from ringtrain.errors import ConfigError, DataError

TEST_FOLDERS = ("val", "test")
IMAGE_SIZE = 224
LABELS_FILE = "labels.txt"
IMAGENET_CLASSES = 1000


def digits(config: DataConfig) -> DataSet:
    """Reads scikit-learn's 1797 digits of 8x8 pixels (Alpaydin & Kaynak 1998, UCI), a fifth of each class to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return checked(config.name, (train_x, train_y), (test_x, test_y))


def npz(config: DataConfig) -> tuple[str, Any, Any]:
    """Reads (x_train, y_train) and (x_test, y_test) of one file; returns its path, too. Raises DataError."""
    if not config.file:
        raise DataError(f"{config.name}: give its file with --data.file")
    path = Path(config.dir, config.file)
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in names if name not in arrays]
            if missing:
                raise DataError(f"{path}: contains {', '.join(arrays) or 'nothing'}, expected {', '.join(names)}")
            train_x, train_y, test_x, test_y = (arrays[name] for name in names)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a file of arrays written by numpy.savez: {error}") from error
    return str(path), (train_x, train_y), (test_x, test_y)


def records(config: DataConfig) -> FitArguments:
    """Rows of files that are read while they are trained; see `ringtrain.Records`. Raises ConfigError or DataError."""
    for option, given in (("url", config.url), ("inputs", config.inputs)):
        if not given:
            raise ConfigError(f"data.{option}: expected it with data.name records")
    inputs = list(config.inputs) if len(config.inputs) > 1 else config.inputs[0]
    transform = None
    if config.transform:
        transform = imported("data.transform", config.transform)

    def of(urls: tuple[str, ...], class_names: Sequence[str] | None) -> Records:
        return Records(urls, inputs, config.target or None, transform=transform, class_names=class_names)

    train = of(config.url, None)
    return FitArguments(x=train, validation_data=of(config.test_url, train.class_names) if config.test_url else None)


def synthetic(config: DataConfig) -> DataSet:
    """Makes noisy copies of ten random images: the same on every call, learnable, of any size."""
    draw = np.random.default_rng(0)
    size = config.image_size or 28
    prototypes = draw.random((10, size, size), np.float32)
    labels = np.arange(config.num_samples) % 10
    noise = draw.normal(0, 0.5, (config.num_samples, size, size)).astype(np.float32)
    images = np.clip(prototypes[labels] + noise, 0, 1)
    num_test = config.num_samples // 8
    return checked(config.name, (images[num_test:], labels[num_test:]), (images[:num_test], labels[:num_test]))


def _folder_of(config: DataConfig) -> Path:
    if not config.dir:
        raise DataError(f"{config.name}: give its directory with --data.dir")
    return Path(config.dir)


def image_folder(config: DataConfig) -> DataSet:
    """Images in train/<class>/ and in val/ or test/ with classes of these."""
    root = _folder_of(config)
    held_out = next((root / name for name in TEST_FOLDERS if (root / name).exists()), None)
    if not held_out:
        raise DataError(f"{root}: contains neither {' nor '.join(TEST_FOLDERS)}, expected a directory of test images")
    folders = [path for path in (root / "train").iterdir() if path.is_dir() and not path.name.startswith(".")]
    names = sorted(path.name for path in folders)
    train, test = (Records(part, "image", "class", class_names=names) for part in (root / "train", held_out))
    return _images(config, train, test, len(names))


def imagenet_tfrecords(config: DataConfig) -> DataSet:
    """Images of ImageNet's TFRecords, train-00000-of-01024 and so on; labels.txt names the classes, one per line."""
    folder = _folder_of(config)
    labels, num_classes = folder / LABELS_FILE, config.num_classes or IMAGENET_CLASSES
    if labels.exists() and not config.num_classes:
        num_classes = len(labels.read_bytes().splitlines())
    columns = "image/encoded", "image/class/label"
    train, test = (Records(_shards(folder, part), *columns) for part in ("train", "validation"))
    return _images(config, train, test, num_classes, first_label=1)


def _shards(folder: Path, stem: str) -> list[Path]:
    """Files of a split, "train" or "validation", in order. Raises DataError if one is missing or empty."""
    paths = sorted(path for path in folder.iterdir() if re.fullmatch(rf"{stem}-\d+-of-\d+", path.name))
    totals = {int(path.name.rpartition("-")[2]) for path in paths}
    if totals != {len(paths)}:
        raise DataError(f"{folder}: contains {len(paths)} files {stem}-00000-of-..., expected all, as their names say")
    for path in paths:
        if not path.stat().st_size:
            raise DataError(f"{path}: contains no record")
    return paths


def _images(config: DataConfig, train: Records, test: Records, num_classes: int, first_label: int = 0) -> DataSet:
    """Decoded images of training and test files."""
    size = config.image_size or IMAGE_SIZE
    splits = []
    for read, is_train in ((train, True), (test, False)):
        decode = functools.partial(
            augment.pictures,
            num_rows=len(read),
            size=size,
            num_classes=num_classes,
            first_label=first_label,
            is_random=is_train and config.augment,
        )
        splits.append(RecordRows(read, shuffle=is_train, transform=decode))
    return DataSet(splits[0], splits[1], num_classes, (size, size, 3), of_classes=True)


def by_name(
    config: DataConfig, function: Callable[[DataConfig], Any], of_classes: bool | None
) -> DataSet | FitArguments:
    """Data of one of the functions above; see `sources.source`."""
    try:
        found: Any = function(config)
    except OSError as error:  # e.g. a directory without permission
        raise DataError(f"{error.filename or config.name}: cannot be read: {error.strerror or error}") from error
    if isinstance(found, tuple):
        path, *pairs = found
        return classes_or_arguments(path, pairs, config.num_classes, of_classes)
    return found


def classes_or_arguments(name: str, result: Any, num_classes: int, of_classes: bool | None) -> DataSet | FitArguments:
    """DataSet of ((inputs, labels), (inputs, labels)) whose labels are integer classes, else arguments of fit."""
    given = arguments_of(name, result)
    is_pairs = isinstance(result, tuple | list) and all(isinstance(pair, tuple | list) for pair in result)
    pairs = [*result] if is_pairs and all(len(pair) == 2 for pair in result) else []
    if pairs and (of_classes or (of_classes is None and all(_are_classes(*pair) for pair in pairs))):
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


def _are_classes(x: Any, labels: Any) -> bool:
    """Returns whether the inputs are one array, and each sample has one integer label of at least 0."""
    if is_nest(x) or is_nest(labels):
        return False
    array = np.asarray(labels)
    is_one_each = array.shape in ((array.size,), (array.size, 1))
    return is_one_each and np.issubdtype(array.dtype, np.integer) and bool(array.min(initial=0) >= 0)
