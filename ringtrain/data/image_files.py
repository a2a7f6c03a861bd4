"""Images in files by name: a folder for each class, and ImageNet as TFRecords. Each rank reads and decodes its rows.

ImageNet's files are train-00000-of-01024 and so on, and validation-00000-of-00128, an image and its class per record.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringtrain.config import DataConfig
from ringtrain.data import augment
from ringtrain.data.dataset import DataSet
from ringtrain.data.records import RecordRows, Records
from ringtrain.errors import DataError

TEST_FOLDERS = ("val", "test")
DEFAULT_SIZE = 224
LABELS_FILE = "labels.txt"
IMAGENET_CLASSES = 1000


def image_folder(config: DataConfig) -> DataSet:
    """Images in train/<class>/ and in val/ or test/ with the same classes.

    Raises DataError if a folder is missing, empty or unreadable, or if training and test classes differ.
    """
    root = _folder_of(config)
    classes = class_names(root / "train")
    folders = root / "train", evaluation_folder(root, classes)
    return _pictures(config, folders, "image", "class", len(classes), class_names=classes)


def imagenet_tfrecords(config: DataConfig) -> DataSet:
    """Images of ImageNet's TFRecords.

    The classes are those of labels.txt next to the records, one per line, else 1000. Raises DataError if files are
    missing, empty or damaged.
    """
    folder = _folder_of(config)
    num_classes = config.num_classes or _classes_in(folder) or IMAGENET_CLASSES
    files = shards(folder, "train"), shards(folder, "validation")
    return _pictures(config, files, "image/encoded", "image/class/label", num_classes, first_label=1)


def _folder_of(config: DataConfig) -> Path:
    if not config.dir:
        raise DataError(f"{config.name}: give its directory with --data.dir")
    return Path(config.dir)


def _pictures(
    config: DataConfig,
    files: Sequence[Any],
    image: str,
    label: str,
    num_classes: int,
    first_label: int = 0,
    class_names: Sequence[str] | None = None,
) -> DataSet:
    """Decoded images of training and test files, with these columns."""
    size = config.image_size or DEFAULT_SIZE
    splits = []
    for is_train, of_split in zip((True, False), files, strict=True):
        read = Records(of_split, image, label, class_names=class_names)
        empty = set(class_names or ()) - {block.file.folder_name for block in read.blocks}
        if empty:
            raise DataError(f"{of_split / min(empty)}: contains no image")
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


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error


def shards(folder: Path, stem: str) -> list[Path]:
    """Returns the files of a split, "train" or "validation", in order. Raises DataError if any of them is missing."""
    names = sorted(path.name for path in folder.iterdir() if re.fullmatch(rf"{stem}-\d+-of-\d+", path.name))
    if not names:
        raise DataError(f"{folder}: contains no {stem}-00000-of-..., expected TFRecords with such names")
    total = names[0].rpartition("-")[2]
    expected = [f"{stem}-{number:0{len(total)}}-of-{total}" for number in range(int(total))]
    odd = sorted(set(names) ^ set(expected))
    if odd:
        problem = "is missing" if odd[0] in expected else f"is not one of {total}"
        raise DataError(f"{folder / odd[0]}: {problem}: expected {expected[0]} to {expected[-1]} and no others")
    paths = [folder / name for name in names]
    for path in paths:
        if not path.stat().st_size:
            raise DataError(f"{path}: contains no record")
    return paths


def _classes_in(folder: Path) -> int:
    try:
        return len((folder / LABELS_FILE).read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return 0
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder / LABELS_FILE}: cannot be read: {error}") from error
