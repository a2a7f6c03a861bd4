"""Images in folders: train/<class>/*.jpg, and val/ or test/ with the same classes."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np

from ringtrain.config import DataConfig
from ringtrain.data import sharding
from ringtrain.data.dataset import DataSet
from ringtrain.data.image_files import Images, Unreadable
from ringtrain.errors import DataError

ENDINGS = (".jpg", ".jpeg", ".png")
TEST_FOLDERS = ("val", "test")
DEFAULT_SIZE = 224


def image_folder(config: DataConfig) -> DataSet:
    """Lists the image files; each image is read during training, by the rank that trains it.

    Raises DataError if a folder is missing, empty or unreadable, or if training and test classes differ.
    """
    if not config.dir:
        raise DataError(f"{config.name}: give its directory with --data.dir")
    root = Path(config.dir)
    classes = class_names(root / "train")
    size = config.image_size or DEFAULT_SIZE

    def split(folder: Path, augment: bool) -> Images:
        import tensorflow as tf

        files: list[bytes] = []
        counts = []
        for name in classes:
            of_class = [os.fsencode(path) for path in pictures(folder / name)]
            files += of_class
            counts.append(len(of_class))
        with tf.device("CPU"):
            paths = tf.constant(files)
            labels = tf.constant(np.repeat(np.arange(len(classes)), counts))

        def read(number: tf.Tensor) -> tf.data.Dataset:
            file = tf.data.Dataset.from_tensors(number)
            return file.map(lambda number: (tf.io.read_file(tf.gather(paths, number)), tf.gather(labels, number)))

        return Images(
            num_images=len(paths),
            read=read,
            name_of=lambda number: os.fsdecode(paths[number].numpy()),
            order=functools.partial(sharding.epoch_order, len(paths)),
            num_classes=len(files),
            size=size,
            augment=augment,
            unreadable=Unreadable(config.on_error == "skip"),
        )

    test = split(evaluation_folder(root, classes), augment=False)
    return DataSet(split(root / "train", config.augment), test, len(classes), (size, size, 3))


def class_names(folder: Path) -> list[str]:
    """Returns the sorted subfolders, whose indices are the classes. Raises DataError if there are none."""
    names = sorted(path.name for path in _entries(folder) if path.is_dir())
    if not names:
        raise DataError(f"{folder}: contains no directories, expected one per class")
    return names


def evaluation_folder(root: Path, classes: list[str]) -> Path:
    """Returns the folder of the test images. Raises DataError if there is none or its classes differ from training."""
    for folder in (root / name for name in TEST_FOLDERS):
        if folder.exists():
            names = class_names(folder)
            if names != classes:
                odd = sorted(set(names) ^ set(classes))[0]
                raise DataError(
                    f"{folder}: expected the same classes as in {root / 'train'}: only one of them has {odd!r}"
                )
            return folder
    raise DataError(f"{root}: contains neither {' nor '.join(TEST_FOLDERS)}, expected a directory of test images")


def pictures(folder: Path) -> list[Path]:
    """Returns the image files of a folder, sorted. Raises DataError if it cannot be read or has none."""
    paths = sorted(path for path in _entries(folder) if path.suffix.lower() in ENDINGS)
    if not paths:
        raise DataError(f"{folder}: contains no images, expected files that end in {', '.join(ENDINGS)}")
    return paths


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error
