"""ImageNet as TFRecords: train-00000-of-01024 and so on, validation-00000-of-00128, an image and its class per record.

A record is its length (uint64), a checksum of that, the bytes, a checksum of those:
https://www.tensorflow.org/tutorials/load_data/tfrecord. The files are scanned once, from length to length, for the
position of each record. From then on any record can be read directly.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ringtrain.config import DataConfig
from ringtrain.data import row_order
from ringtrain.data.dataset import DataSet
from ringtrain.data.image_files import DEFAULT_SIZE, Images, Unreadable
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

LABELS_FILE = "labels.txt"
IMAGENET_CLASSES = 1000
FIRST_LABEL = 1
HEADER, FOOTER = 12, 4
AROUND = HEADER + FOOTER
"""bytes of a record besides its content"""
NUM_READERS = 16


def imagenet_tfrecords(config: DataConfig) -> DataSet:
    """Finds every record; each image is read during training, by the rank that trains it.

    The classes are those of labels.txt next to the records, one per line, else 1000. Raises
    DataError if files are missing, empty or damaged; data.on_error "skip" skips damaged ones.
    """
    if not config.dir:
        raise DataError(f"{config.name}: give its directory with --data.dir")
    folder = Path(config.dir)
    num_classes = config.num_classes or _classes_in(folder) or IMAGENET_CLASSES
    size = config.image_size or DEFAULT_SIZE

    def split(stem: str, augment: bool) -> Images:
        import tensorflow as tf

        unreadable = Unreadable(config.on_error == "skip")
        paths = shards(folder, stem)
        starts = _scanned(paths, unreadable)
        if not any(map(len, starts)):
            raise DataError(f"{folder}: no record in any file {stem}-*")
        per_file = [len(file) for file in starts]
        first_in_file = np.cumsum([0, *per_file])
        with tf.device("CPU"):
            path_of_file = tf.constant([str(path) for path in paths])
            file_of = tf.constant(np.repeat(np.arange(len(paths), dtype=np.int32), per_file))
            start_of = tf.constant(np.concatenate(starts))

        def read(number: tf.Tensor) -> tf.data.Dataset:
            path = tf.gather(path_of_file, tf.gather(file_of, number))
            return records(path, tf.gather(start_of, number)).map(encoded_and_class)

        def name_of(number: int) -> str:
            file = int(np.searchsorted(first_in_file, number, side="right")) - 1
            return record_name(paths[file], number - int(first_in_file[file]))

        return Images(
            num_images=int(first_in_file[-1]),
            read=read,
            name_of=name_of,
            order=functools.partial(row_order.file_order, per_file),
            num_classes=num_classes,
            size=size,
            augment=augment,
            unreadable=unreadable,
            first_label=FIRST_LABEL,
        )

    return DataSet(split("train", config.augment), split("validation", False), num_classes, (size, size, 3))


def _scanned(paths: Sequence[Path], unreadable: Unreadable) -> list[NDArray[np.int64]]:
    with ThreadPoolExecutor(NUM_READERS) as readers:
        return list(readers.map(functools.partial(record_starts, unreadable=unreadable), paths))


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
    return [folder / name for name in names]


def record_starts(path: Path, unreadable: Unreadable) -> NDArray[np.int64]:
    """Returns the byte positions of a file's records up to a damaged one. Raises DataError unless it may be skipped."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return starts_and_checksum(functools.partial(os.pread, file.fileno()), size, path, unreadable)[0]
    except OSError as error:
        unreadable.add(str(path), f"cannot be read: {error.strerror}")
        return np.array([], np.int64)


def starts_and_checksum(
    read_at: Callable[[int, int], bytes], size: int, path: object, unreadable: Unreadable
) -> tuple[NDArray[np.int64], int]:
    """Returns the same, and a checksum of the checksums that a file has of its records, without the last.

    Args:
        read_at: Reads a number of bytes from a position on.
        size: Bytes of the file.
    """
    starts: list[int] = []
    checksum = 0
    headers: list[bytes] = []
    position = 0
    while position < size:
        # The end of the record before comes along.
        before = FOOTER if position else 0
        read = read_at(before + HEADER, position - before)
        checksum, header = zlib.crc32(read, checksum), read[before:]
        starts.append(position)
        headers.append(header)
        if len(header) < HEADER:
            break
        position += HEADER + int.from_bytes(header[:8], "little") + FOOTER
    if not starts:
        unreadable.add(str(path), "contains no record")
    elif position != size:
        wrong = [number for number, header in enumerate(headers) if not length_fits(header)]
        number = wrong[0] if wrong else len(starts) - 1
        problem = "the file ends within it"
        if wrong:
            problem = "corrupt length: the records after it cannot be located"
        unreadable.add(record_name(path, number), problem)
        del starts[number:]
    return np.array(starts, np.int64), checksum


def record_name(path: object, number: int) -> str:
    return f"{path}: record {number}"


def records(path: tf.Tensor, start: tf.Tensor, num_records: int = 1, buffer_size: int = 0) -> tf.data.Dataset:
    """Reads successive records from a position on.

    With the raw operation, as tf.data.TFRecordDataset has no argument for the position. To be called in a function of
    tf.data, which forgets the position elsewhere.

    Args:
        buffer_size: Bytes that are read at once; 0: no more than the record.
    """
    import tensorflow as tf

    found = tf.raw_ops.TFRecordDatasetV2(
        filenames=tf.reshape(path, [1]),
        compression_type="",
        buffer_size=tf.constant(buffer_size, tf.int64),
        byte_offsets=tf.reshape(start, [1]),
    )
    return tf.data.experimental.from_variant(found, tf.TensorSpec([], tf.string)).take(num_records)


def encoded_and_class(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Parses a record, string [], to the encoded image, string [], and the class, int64 [] from 0."""
    import tensorflow as tf

    types = {"image/encoded": tf.string, "image/class/label": tf.int64}
    features = {name: tf.io.FixedLenFeature([], dtype) for name, dtype in types.items()}
    values = tf.io.parse_single_example(record, features)
    return values["image/encoded"], values["image/class/label"] - FIRST_LABEL


def _classes_in(folder: Path) -> int:
    try:
        return len((folder / LABELS_FILE).read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return 0
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder / LABELS_FILE}: cannot be read: {error}") from error


def length_fits(header: bytes) -> bool:
    """Returns whether a record's length matches the checksum after it: CRC-32C, rotated and shifted."""
    if len(header) < HEADER:
        return True  # truncated, which is a different error
    checksum = crc32c(header[:8])
    masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return masked == struct.unpack("<I", header[8:])[0]


def crc32c(content: bytes) -> int:
    """Computes the checksum of RFC 3720, appendix B.4; slow, for a few bytes."""
    remainder = 0xFFFFFFFF
    for byte in content:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF
