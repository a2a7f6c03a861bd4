"""CIFAR-10 as published: five training batches and one test batch, in the binary version.

It is described at https://www.cs.toronto.edu/~kriz/cifar.html: per image one byte for the class and 3072 for the
pixels: red, green, blue, each row by row.
"""

from __future__ import annotations

import dataclasses
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ringtrain.config import DataConfig
from ringtrain.data.dataset import DataSet, checked
from ringtrain.errors import DataError

NUM_CLASSES = 10
PADDING = 4  # pixels: He et al. 2015, section 4.2
NUM_PIXELS = 3 * 32 * 32
BATCH = re.compile(r"(data_batch_\d+|test_batch)\.bin")
FOLDERS = ("", "cifar-10-batches-bin")
ARCHIVE = "cifar-10-binary.tar.gz"
Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


def cifar10(config: DataConfig) -> DataSet:
    """Reads 50000 training and 10000 test images of 32x32 RGB pixels in ten classes. Raises DataError.

    data.dir is an archive, or a folder with an archive, the folder it unpacks to, or the files themselves. Fewer
    batches than published are accepted. With data.augment, training images are shifted and flipped.
    """
    if not config.dir:
        raise DataError(f"{config.name}: give its directory or archive with --data.dir")
    path = Path(config.dir)
    try:
        files = {name: (where, content) for name, where, content in _files(path)}
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise DataError(f"{path}: cannot be read: {reason}") from error
    if "test_batch.bin" not in files or len(files) < 2:
        raise DataError(
            f"{path}: contains no CIFAR-10 in the binary version, expected data_batch_1.bin, ... and test_batch.bin, or"
            f" {ARCHIVE}"
        )
    batches = {name: _batch(*files[name]) for name in sorted(files)}
    test = batches.pop("test_batch.bin")
    images, labels = zip(*batches.values(), strict=True)
    data_set = checked(str(path), (np.concatenate(images), np.concatenate(labels)), test, NUM_CLASSES)
    train = dataclasses.replace(data_set.train, padding=PADDING if config.augment else 0)  # type: ignore[type-var]
    return dataclasses.replace(data_set, train=train)


def _files(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yields name, location for messages, and content of every batch; reads an archive only if there are no files."""
    if path.is_file():
        yield from _members(path)
        return
    for folder in (path / name for name in FOLDERS):
        if folder.is_dir():
            files = [file for file in sorted(folder.iterdir()) if BATCH.fullmatch(file.name)]
        else:
            files = []
        for file in files:
            yield file.name, str(file), file.read_bytes()
        if files:
            return
    if (path / ARCHIVE).exists():
        yield from _members(path / ARCHIVE)


def _members(archive: Path) -> Iterator[tuple[str, str, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            file = None
            if member.isfile() and BATCH.fullmatch(name):
                file = tar.extractfile(member)
            if file is not None:
                yield name, f"{archive}: {member.name}", file.read()
        while tar.fileobj and tar.fileobj.read(2**20):  # gzip's checksum is at the very end
            pass


def _batch(where: str, content: bytes) -> Batch:
    if not content or len(content) % (1 + NUM_PIXELS):
        raise DataError(
            f"{where}: got {len(content)} bytes, expected a multiple of {1 + NUM_PIXELS} (a label and 32x32 pixels in"
            f" three colors): download the file again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + NUM_PIXELS)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= NUM_CLASSES:
        number = int(np.argmax(labels >= NUM_CLASSES))
        raise DataError(f"{where}: image {number} has label {labels[number]}, expected 0 to {NUM_CLASSES - 1}")
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels
