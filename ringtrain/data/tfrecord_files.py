"""TFRecord files of `tf.train.Example`s, which are read once, from length to length, to find where their rows begin.

A record is its length (uint64), a checksum of that, the bytes, a checksum of those:
https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence
from typing import IO, Any

import tensorflow as tf

from ringtrain.data import data_files
from ringtrain.data.blocks import Block, Columns, blocks_of, text_of
from ringtrain.data.data_files import DataFile
from ringtrain.errors import DataError

HEADER, FOOTER = 12, 4
BUFFER = 1 << 20
"""bytes that TensorFlow reads at once"""


class TFRecordFiles:
    """Features of examples, in blocks of successive rows."""

    kind = "TFRecord"

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str]) -> None:
        found = data_files.of_each(_scanned, [file for file in files if file.size])
        self._checksums = [checksum for checksum, _ in found.values()]
        self.blocks = [block for file, (_, starts) in found.items() for block in blocks_of(file, starts)]
        if not self.blocks:
            return
        known = self._features()
        missing = [name for name in columns if name not in known]
        if missing:
            raise DataError(f"{files[0]}: has no feature {missing[0]}: it has {', '.join(sorted(known))}")
        self.features = {name: known[name] for name in columns}

    def checksum(self) -> int:
        """Checksum of the checksums of records."""
        return zlib.crc32(str(self._checksums).encode())

    def read(self, block: Block) -> Columns:
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
        """Serialized records of a block, string [rows]; TensorFlow compares their checksums."""

        def read(opened: IO[bytes]) -> tf.Tensor:
            if not block.file.is_remote:
                return _texts_of(block.file.url, block.begin, block)
            opened.seek(block.begin)
            with tempfile.NamedTemporaryFile() as copy:
                copy.write(opened.read(block.end - block.begin))
                copy.flush()
                return _texts_of(copy.name, 0, block)

        return data_files.read_file(block.file, read, f"{block.name} cannot be read")

    def _features(self) -> dict[str, Any]:
        """Features of the first record, with its lengths."""
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


def _texts_of(path: str, begin: int, block: Block) -> tf.Tensor:
    """Records of a block, which begins at a position of a file; raises DataError if they are damaged."""

    def records(position: tf.Tensor) -> tf.data.Dataset:
        # tf.data.TFRecordDataset has no argument for the position.
        found = tf.raw_ops.TFRecordDatasetV2(
            filenames=[path], compression_type="", buffer_size=tf.constant(BUFFER, tf.int64), byte_offsets=[position]
        )
        return tf.data.experimental.from_variant(found, tf.TensorSpec([], tf.string)).take(block.num_rows)

    # In a function of tf.data: the operation forgets the position elsewhere.
    texts = tf.data.Dataset.from_tensors(tf.constant(begin, tf.int64)).flat_map(records)
    try:
        return next(iter(texts.batch(block.num_rows)))
    except tf.errors.OpError as error:
        raise DataError(f"{block.name} cannot be read: {text_of(error)}") from error


def _scanned(file: DataFile) -> tuple[int, list[int]]:
    """Checksum of the checksums in a file, and where its records begin, in bytes; DataError: one is incomplete."""

    def scan(opened: IO[bytes]) -> tuple[int, list[int]]:
        starts: list[int] = []
        checksum = position = 0
        while position < file.size:
            before = FOOTER if starts else 0  # the end of the record before comes along
            opened.seek(position - before)
            read = opened.read(before + HEADER)
            checksum = zlib.crc32(read, checksum)
            starts.append(position)
            position += HEADER + int.from_bytes(read[before : before + 8], "little") + FOOTER
        if position != file.size:
            raise DataError(
                f"{file}: record {len(starts) - 1}: the file ends within it, or a length is damaged: expected Parquet,"
                f" TFRecord without compression, or images"
            )
        opened.seek(file.size - FOOTER)
        return zlib.crc32(opened.read(FOOTER), checksum), starts

    return data_files.read_file(file, scan, cache="readahead")
