"""Records of TFRecord files.

A record is its length (uint64), a checksum of that, the bytes, a checksum of those:
https://www.tensorflow.org/tutorials/load_data/tfrecord. The files are scanned once, from length to length, for the
position of each record. From then on any record can be read directly.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

HEADER, FOOTER = 12, 4
AROUND = HEADER + FOOTER
"""bytes of a record besides its content"""


def starts_and_checksum(read_at: Callable[[int, int], bytes], size: int, path: object) -> tuple[NDArray[np.int64], int]:
    """Returns the byte positions of a file's records, and a checksum of the checksums that it has of all but the last.

    Args:
        read_at: Reads a number of bytes from a position on.
        size: Bytes of the file.

    Raises:
        DataError: The file has no record, or one whose end is not in it.
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
        raise DataError(f"{path}: contains no record")
    if position != size:
        wrong = [number for number, header in enumerate(headers) if not length_fits(header)]
        number = wrong[0] if wrong else len(starts) - 1
        problem = "the file ends within it"
        if wrong:
            problem = "corrupt length: the records after it cannot be located"
        raise DataError(f"{path}: record {number}: {problem}")
    return np.array(starts, np.int64), checksum


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
