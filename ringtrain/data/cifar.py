"""CIFAR-10 as published: five training batches and one test batch, in the binary or the Python version.

Both are described at https://www.cs.toronto.edu/~kriz/cifar.html. Binary: per image one byte for the class and 3072 for
the pixels: red, green, blue, each row by row. Python: pickles of a dictionary with the same bytes as an array.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.config import DataConfig
from ringtrain.data.dataset import DataSet, checked
from ringtrain.errors import DataError

NUM_CLASSES = 10
PADDING = 4  # pixels: He et al. 2015, section 4.2
NUM_PIXELS = 3 * 32 * 32
BATCH = re.compile(r"(data_batch_\d+|test_batch)(\.bin)?")
FOLDERS = ("", "cifar-10-batches-bin", "cifar-10-batches-py")
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
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
    # never both versions: that would train every image twice
    version = ".bin" if "test_batch.bin" in files else ""
    names = sorted(name for name in files if BATCH.fullmatch(name).group(2) == (version or None))  # type: ignore[union-attr]
    if f"test_batch{version}" not in names or len(names) < 2:
        raise DataError(
            f"{path}: contains no CIFAR-10, expected data_batch_1, ... and test_batch, with or without .bin, or"
            f" {' or '.join(ARCHIVES)}"
        )
    batches = {name: _batch(*files[name], binary=bool(version)) for name in names}
    test = batches.pop(f"test_batch{version}")
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
    for archive in (path / name for name in ARCHIVES):
        if archive.exists():
            yield from _members(archive)
            return


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


def _batch(where: str, content: bytes, binary: bool) -> Batch:
    pixels, labels = _from_binary(where, content) if binary else _from_pickle(where, content)
    if len(labels) == 0:
        raise DataError(f"{where}: contains no image")
    if labels.max() >= NUM_CLASSES or labels.min() < 0:
        number = int(np.argmax((labels >= NUM_CLASSES) | (labels < 0)))
        raise DataError(f"{where}: image {number} has label {labels[number]}, expected 0 to {NUM_CLASSES - 1}")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def _from_binary(where: str, content: bytes) -> Batch:
    if not content or len(content) % (1 + NUM_PIXELS):
        raise DataError(
            f"{where}: got {len(content)} bytes, expected a multiple of {1 + NUM_PIXELS} (a label and 32x32 pixels in"
            f" three colors): download the file again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + NUM_PIXELS)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _from_pickle(where: str, content: bytes) -> Batch:
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = batch[b"data"], np.asarray(batch[b"labels"])
        if not isinstance(pixels, np.ndarray):
            raise TypeError(f"its data is a {type(pixels).__name__}")
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # a broken pickle may raise anything
        raise DataError(
            f"{where}: not a batch of CIFAR-10's Python version: {error!r}: download the file again"
        ) from error
    if (
        pixels.dtype != np.uint8
        or pixels.shape != (len(labels), NUM_PIXELS)
        or (len(labels) and labels.dtype.kind != "i")
    ):
        raise DataError(
            f"{where}: got data of {pixels.dtype} and shape {pixels.shape} with {len(labels)} labels of {labels.dtype},"
            f" expected bytes of shape (images, {NUM_PIXELS}) and as many integers"
        )
    return pixels, labels.astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Unpickler that can only build arrays, as a pickle may otherwise call any function by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise DataError(f"the pickle asks for {module}.{name}, which CIFAR-10 does not need: not loaded")
        return ALLOWED[module, name]


def _encode(text: str, encoding: str) -> bytes:
    """Replaces _codecs.encode, with which Python 3 writes bytes into pickles of old protocols."""
    if encoding != "latin1":
        raise DataError(f"the pickle asks for the encoding {encoding}: not loaded")
    return text.encode("latin1")


_reconstruct = np.zeros(0).__reduce__()[0]  # its module depends on NumPy's version
ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): bytes,  # empty bytes
}
