"""TFRecord files of `tf.train.Example`s. An index next to a file, or reading it, says where its rows begin."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ringtrain.data import data_files, tfrecords
from ringtrain.data.blocks import Block, Columns, blocks_of, text_of
from ringtrain.data.data_files import INDEX, OTHER_INDEX, DataFile
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

BUFFER = 1 << 20
"""bytes that TensorFlow reads at once"""
IN_MEMORY = "/dev/shm"
"""where a block behind a URL becomes a file for TensorFlow, which compares its checksums"""


class Positions(NamedTuple):
    """Where the rows of a file begin, in bytes."""

    starts: list[int]
    checksum: int
    """of the file, without reading it all"""
    is_indexed: bool = False


class TFRecordFiles:
    """Features of examples, in blocks of successive rows.

    Args:
        columns: Names of features; None: all.
        features: As for `tf.io.parse_example`; None: those of the first record.
    """

    kind = "TFRecord"

    def __init__(
        self, files: Sequence[DataFile], columns: Sequence[str] | None, features: Mapping[str, Any] | None
    ) -> None:
        import tensorflow as tf

        found = data_files.of_each(_positions, [file for file in files if file.size])
        self._checksums = [positions.checksum for positions in found.values()]
        self._indexed = {file for file, positions in found.items() if positions.is_indexed}
        self.blocks = [block for file, positions in found.items() for block in blocks_of(file, positions.starts)]
        if not self.blocks:
            return
        self._known = dict(features) if features else self._features()
        columns = sorted(self._known) if columns is None else columns
        missing = [name for name in columns if name not in self._known]
        if missing:
            raise DataError(f"{files[0]}: has no feature {missing[0]}: it has {', '.join(sorted(self._known))}")
        self.features = {name: self._known[name] for name in columns}
        for name, feature in self.features.items():
            if not isinstance(feature, tf.io.FixedLenFeature):
                raise DataError(f"ringtrain.Records: feature {name} is {feature}, expected a FixedLenFeature")

    def checksum(self) -> int:
        """Checksum of the checksums of records; behind a URL, of the version."""
        return zlib.crc32(str(self._checksums).encode())

    def types(self) -> dict[str, str]:
        types = {}
        for name, feature in sorted(self._known.items()):
            types[name] = feature.dtype.name
            if feature.shape:
                types[name] += f" {list(feature.shape)}"
        return types

    def read(self, block: Block) -> Columns:
        import tensorflow as tf

        texts = self._texts(block)
        try:
            with tf.device("CPU"):
                numbers = tf.range(block.number, block.number + block.num_rows)
                names = tf.strings.join(["record ", tf.strings.as_string(numbers)])  # in error messages
                values = tf.io.parse_example(texts, self.features, names)
        except tf.errors.OpError as error:
            raise DataError(f"{block.name} cannot be read: {text_of(error)}") from error
        return {name: value.numpy() for name, value in values.items()}

    def _texts(self, block: Block) -> tf.Tensor:
        """Serialized records of a block, string [rows]; their checksums are compared."""

        def read(opened: IO[bytes]) -> tf.Tensor:
            if not block.file.is_remote:
                return _texts_of(block.file.url, block.begin, block.num_rows)
            opened.seek(block.begin)
            content = opened.read(block.end - block.begin)
            try:
                return _texts_of_copy(content, block.num_rows)
            except ValueError as error:
                or_index = f", or {block.file}{INDEX} {OTHER_INDEX}" if block.file in self._indexed else ""
                raise DataError(f"{block.name} cannot be read: {error}{or_index}") from error

        return data_files.read_file(block.file, read, f"{block.name} cannot be read")

    def _features(self) -> dict[str, Any]:
        """Features of the first record, with its lengths."""
        import tensorflow as tf

        block = self.blocks[0]
        text = self._texts(block)[0].numpy()
        dtypes = {"bytes_list": tf.string, "float_list": tf.float32, "int64_list": tf.int64}
        try:
            example = tf.train.Example.FromString(text)
        except Exception as error:  # of protobuf
            raise DataError(f"{block.name} cannot be read as tf.train.Example: {text_of(error)}") from error
        features = {}
        for name, feature in example.features.feature.items():
            kind = feature.WhichOneof("kind")
            if kind:
                length = len(getattr(feature, kind).value)
                features[name] = tf.io.FixedLenFeature([] if length == 1 else [length], dtypes[kind])
        return features


def _positions(file: DataFile) -> Positions:
    if not file.is_remote:
        checksum, *starts = _scanned(file)
        return Positions(starts, checksum)
    text = data_files.index_of(file)
    if text:
        starts = from_index(file, text)
    else:
        starts = _scanned(file)[1:]
    # The same with and without an index.
    return Positions(starts, zlib.crc32(f"{file.version} {starts}".encode()), bool(text))


def _texts_of_copy(content: bytes, num_rows: int) -> tf.Tensor:
    """Records of a block's bytes, from a file for TensorFlow, which compares their checksums."""
    import tensorflow as tf

    for folder in (IN_MEMORY, None):
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as copy:  # it may be missing, or full
            copy.write(content)
            copy.flush()
            texts = _texts_of(f"/proc/self/fd/{copy.fileno()}", 0, num_rows)
            num_bytes = int(tf.reduce_sum(tf.strings.length(texts))) + len(texts) * tfrecords.AROUND
            if num_bytes != len(content):
                raise ValueError(f"its records have {num_bytes:,} bytes, expected {len(content):,}")
            return texts
    raise DataError(f"{tempfile.gettempdir()}: cannot be written: a block behind a URL is copied there")


def _texts_of(path: str, begin: int, num_rows: int) -> tf.Tensor:
    """Records of a file from a position on; raises ValueError if they are damaged."""
    import tensorflow as tf

    position = tf.data.Dataset.from_tensors((path, tf.constant(begin, tf.int64)))
    records = position.flat_map(lambda path, begin: tfrecords.records(path, begin, num_rows, BUFFER))
    try:
        return next(iter(records.batch(num_rows)))
    except tf.errors.OpError as error:
        raise ValueError(text_of(error)) from error


def _scanned(file: DataFile) -> list[int]:
    """The checksum of a file's checksums, and positions of its records."""

    def scan(opened: IO[bytes]) -> list[int]:
        def read_at(length: int, position: int) -> bytes:
            opened.seek(position)
            return opened.read(length)

        starts, checksum = tfrecords.starts_and_checksum(read_at, file.size, file)
        last = read_at(tfrecords.FOOTER, file.size - tfrecords.FOOTER)
        return [zlib.crc32(last, checksum), *starts.tolist()]

    return data_files.read_file(file, scan, window=data_files.WINDOW)


def from_index(file: DataFile, text: str) -> list[int]:
    """Positions of a file's records in its index, which has a line "position length" of each (as DALI's tfrecord2idx).

    Raises:
        DataError: The index is of another file.
    """
    rows = [line.split() for line in text.splitlines()]
    fits = all(len(row) == 2 and row[0].isdecimal() and row[1].isdecimal() for row in rows)
    ends = [0, *(int(begin) + int(length) for begin, length in rows)] if fits else []
    if not fits or ends[-1] != file.size or [int(begin) for begin, _ in rows] != ends[:-1]:
        raise DataError(f"{file}{INDEX}: {OTHER_INDEX}")
    return ends[:-1]


def index(file: DataFile) -> str:
    """Text of a file's index."""
    _, *starts = _scanned(file)
    return "".join(f"{begin} {end - begin}\n" for begin, end in itertools.pairwise([*starts, file.size]))
