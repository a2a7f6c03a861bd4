"""Parts of a batch that one rank trains, and what comes with its rows: one part, or one per virtual rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ringtrain.data import row_order

MODULUS = 2**31 - 1
"""Fingerprints are below this."""
FINGERPRINTED = 1024
"""numbers of each part of a batch that count, at least"""


class Header(NamedTuple):
    """Sizes of the parts of a batch that one rank trains, as arrays or as tensors of a pipeline."""

    shares: Any
    """float64 [own parts]: rows of a part times the number of all parts, divided by all rows; 0: it has none"""
    rows: Any
    """int64 [own parts]: rows of a part in the batch; 1 for one without rows, whose place another row takes"""
    fingerprint: Any
    """float64 []: number that must be equal on all ranks; 0: nothing is compared"""


class Parts(NamedTuple):
    """Neighbouring parts of each batch."""

    numbers: range
    """of this rank's parts"""
    num_parts: int
    """of the parts of all ranks"""

    @classmethod
    def of_rank(cls, rank: int, size: int, num_virtual: int = 0) -> Parts:
        """A rank's part; with virtual ranks, those of the virtual ranks that it computes."""
        if num_virtual:
            return cls(range(*row_order.part_of(num_virtual, rank, size)), num_virtual)
        return cls(range(rank, rank + 1), size)

    def bounds(self, num_rows: int) -> list[tuple[int, int]]:
        """First row of each part of a batch, and the row after its last one."""
        return [row_order.part_of(num_rows, number, self.num_parts) for number in self.numbers]

    def places(self, num_rows: int) -> list[int]:
        """Places in a batch of this rank's rows; those of a part without rows are the first one's."""
        places: list[int] = []
        for begin, end in self.bounds(num_rows):
            places += range(begin, end) if begin < end else (0,)
        return places

    def cut(self, batch: Any) -> tuple[Header, Any]:
        """This rank's rows of a batch of tensors, dense, ragged or sparse, with the header of the batch."""
        lengths = tf.stack([num_rows_of(leaf) for leaf in with_rows(batch)])
        text = "DataError: ringtrain.fit: got a batch of tensors with {} rows, expected one number of rows"
        same = tf.reduce_all(lengths == lengths[0])
        with tf.control_dependencies([tf.raw_ops.Assert(condition=same, data=[tf.strings.format(text, lengths)])]):
            rows = tf.identity(lengths[0])
        bounds = self._bounds(rows)
        lengths_read = _num_read(bounds)

        def part_of(leaf: Any) -> Any:
            if leaf.shape.rank == 0:  # a number, such as a temperature, that is the same for all rows
                return leaf
            pieces = []
            for (begin, end), length in zip(bounds, lengths_read, strict=True):
                first = begin * tf.cast(begin < end, begin.dtype)
                pieces.append(rows_of(leaf, first, first + length))
            return _joined(pieces)

        header = self.header(rows)._replace(fingerprint=tf.cast(fingerprint(batch), tf.float64))
        return header, tf.nest.map_structure(part_of, batch)

    def header(self, rows: tf.Tensor) -> Header:
        """Header of a batch with this number of rows, int64 [], in a graph."""
        bounds, shares = self._bounds(rows), []
        for begin, end in bounds:
            shares.append(tf.cast(end - begin, tf.float64) * self.num_parts / tf.cast(rows, tf.float64))
        return Header(tf.stack(shares), tf.stack(_num_read(bounds)), tf.zeros([], tf.float64))

    def _bounds(self, rows: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """As `bounds`, of a number of rows in a graph, int64 []."""
        each, more = rows // self.num_parts, rows % self.num_parts
        bounds = []
        for number in self.numbers:
            begin = number * each + tf.minimum(tf.constant(number, rows.dtype), more)
            bounds.append((begin, begin + each + tf.cast(number < more, rows.dtype)))
        return bounds


def header_of_shard(batch: Any) -> Header:
    """Header of a batch of which all rows are this rank's; the fingerprint is their number."""
    rows = num_rows_of(with_rows(batch)[0])
    return Header(tf.ones([1], tf.float64), rows[None], tf.cast(rows, tf.float64))


def _num_read(bounds: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
    """Numbers of rows that are read of parts: one of a part without rows."""
    return [tf.maximum(end - begin, 1) for begin, end in bounds]


def with_rows(batch: Any) -> list[Any]:
    """Tensors of a batch that have rows: all but single numbers."""
    return [leaf for leaf in tf.nest.flatten(batch) if leaf.shape.rank != 0]


def num_rows_of(leaf: Any) -> tf.Tensor:
    """Number of rows of a tensor, int64 []."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return leaf.nrows(out_type=tf.int64) if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, tf.int64)[0]


def rows_of(leaf: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    """Rows of a tensor from `begin` up to `end`, int64 []."""
    if isinstance(leaf, tf.SparseTensor):
        rest = leaf.dense_shape[1:]
        return tf.sparse.slice(leaf, tf.concat([[begin], 0 * rest], 0), tf.concat([[end - begin], rest], 0))
    return leaf[begin:end]


def _joined(pieces: list[Any]) -> Any:
    if len(pieces) == 1:
        return pieces[0]
    return tf.sparse.concat(0, pieces) if isinstance(pieces[0], tf.SparseTensor) else tf.concat(pieces, 0)


def fingerprint(batch: Any) -> tf.Tensor:
    """Number of evenly spaced values of all parts of a batch, below MODULUS."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    return tf.math.floormod(tf.add_n([_fingerprint(leaf) for leaf in leaves]), MODULUS)


def _fingerprint(leaf: Any) -> tf.Tensor:
    """Number of evenly spaced values of a part of a batch, below MODULUS."""
    values = leaf.values if isinstance(leaf, tf.SparseTensor) else leaf
    values = values.flat_values if isinstance(values, tf.RaggedTensor) else values
    values = tf.reshape(values, [-1])
    values = values[:: tf.maximum(1, tf.size(values) // FINGERPRINTED)]
    text = tf.io.serialize_tensor(values)
    return tf.strings.to_hash_bucket_fast(text, MODULUS)
