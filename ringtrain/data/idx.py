"""IDX, the file format of MNIST and its relatives: magic number, sizes, then bytes; gzipped or not.

The format is described at the end of http://yann.lecun.com/exdb/mnist/: two zero bytes, the type of the values (8:
unsigned byte), the number of dimensions; one big-endian int32 per dimension; the values, last index fastest.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ringtrain.errors import DataError

UNSIGNED_BYTE = 8


def read(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """Reads an IDX file of unsigned bytes.

    Args:
        path: of the file; gzip is recognised by its first two bytes.
        num_dimensions: 3 for images, 1 for labels.

    Returns:
        uint8, e.g. [60000, 28, 28] or [60000].

    Raises:
        DataError: names the file and what is wrong with it.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: broken gzip: {error}: fetch the file again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    header = 4 + 4 * num_dimensions
    if len(content) < header:
        raise DataError(f"{path}: truncated: got {len(content)} bytes, expected a header of {header} bytes")
    got, expected = int.from_bytes(content[:4]), UNSIGNED_BYTE << 8 | num_dimensions
    if got != expected:
        raise DataError(
            f"{path}: not IDX with {num_dimensions} dimension{'s' * (num_dimensions != 1)} of unsigned bytes:"
            f" got magic number {got}, expected {expected}"
        )
    shape = struct.unpack(f">{num_dimensions}I", content[4:header])
    if len(content) != header + math.prod(shape):
        problem = "truncated" if len(content) < header + math.prod(shape) else "longer than it says"
        raise DataError(
            f"{path}: {problem}: got {len(content)} bytes, expected {header + math.prod(shape)}: fetch the file again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def find(folder: Path, stem: str) -> Path:
    """Finds a file under its name or gzipped.

    Args:
        folder: where to look.
        stem: e.g. "train-images-idx3-ubyte".

    Returns:
        The path, the uncompressed file's when there are both.

    Raises:
        DataError: neither is there.
    """
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.exists():
            return path
    raise DataError(f"{folder / stem}: not found, nor the same with .gz")
