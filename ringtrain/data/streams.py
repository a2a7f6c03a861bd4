"""Batches of a tf.data.Dataset, of which each rank trains its rows, with a fingerprint that ranks can compare."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ringtrain.data.dataset import Split
from ringtrain.data.pipeline import ahead
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

MODULUS = 2**31 - 1
"""Fingerprints are below this."""
FINGERPRINTED = 1024
"""numbers of each part of a batch that count"""


class Stream(Split):
    """Whole batches of a `tf.data.Dataset`; its samples are counted in batches.

    Args:
        dataset: Of known length, with elements x, (x, y) or (x, y, sample_weight).
        class_weight: Weight by class, for one output.

    Attributes:
        batch_size: Rows of a batch; 1: unknown.

    Raises:
        DataError: The dataset's length is unknown or infinite, or it has no batches.
    """

    def __init__(self, dataset: tf.data.Dataset, class_weight: Any = None) -> None:
        from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

        self.num_batches = int(dataset.cardinality())
        if self.num_batches <= 0:
            length = {-1: "infinite", -2: "unknown", 0: "0"}[self.num_batches]
            raise DataError(
                f"ringtrain.fit: got a tf.data.Dataset whose length is {length}, expected a number of batches: use"
                f" dataset.take(n), or dataset.apply(tf.data.experimental.assert_cardinality(n)) if it has n"
            )
        self.dataset = TFDatasetAdapter(dataset, class_weight=class_weight)._dataset
        self.batch_size = _batch_size(dataset)

    def __len__(self) -> int:
        return self.num_batches

    def checksum(self) -> int:
        """Checksum of length, shapes and dtypes; `StreamRows` compares the batches."""
        return zlib.crc32(f"{self.num_batches} {self.dataset.element_spec}".encode())

    def part(self, numbers: NDArray[Any]) -> tf.data.Dataset:
        """The batches with these successive numbers."""
        return self.dataset.skip(int(numbers[0]) if len(numbers) else 0).take(len(numbers))

    def rows(self, begin: int, end: int) -> Any:
        """Batch of so many rows of zeros. Reading one would shuffle the dataset once more."""
        import tensorflow as tf

        def zeros(spec: Any) -> Any:
            return tf.zeros([end - begin, *(size or 1 for size in spec.shape[1:])], spec.dtype)

        return tf.nest.map_structure(zeros, self.dataset.element_spec)


class StreamRows:
    """One rank's rows of each batch of a dataset, which all ranks read whole; as `RowBatches`.

    A batch comes as (float64 [2], batch): the rank's share, and the fingerprint of the whole batch. Epoch e, from 0, is
    iteration 2 e of the dataset, as in Keras' `fit`, which begins an iteration at the end of each epoch, too, and
    discards it. After a resume, the epoch's earlier batches are read again.
    """

    is_even, has_empty_parts = False, True

    def __init__(self, stream: Stream, rank: int, size: int) -> None:
        self.steps, self._iterations = stream.num_batches, 0
        self.dataset = ahead(
            stream.dataset.map(lambda *batch: _cut(batch[0] if len(batch) == 1 else batch, rank, size))
        )

    def __call__(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """Iterator over the batches of an epoch from a step on. Epochs must be asked for in order."""
        for _ in range(2 * epoch - self._iterations):  # each iterator gives the shuffle its next order
            iter(self.dataset)
        self._iterations = 2 * epoch + 1
        batches = iter(self.dataset)
        for _ in range(first_step):
            next(batches)
        return batches


def _cut(batch: Any, rank: int, size: int) -> tuple[tf.Tensor, Any]:
    import tensorflow as tf

    leaves = tf.nest.flatten(batch)
    num_rows = _num_rows(leaves[0])
    each, more = num_rows // size, num_rows % size
    begin = rank * each + tf.minimum(tf.constant(rank, num_rows.dtype), more)
    end = begin + each + tf.cast(rank < more, num_rows.dtype)
    share = tf.cast(end - begin, tf.float64) * size / tf.cast(num_rows, tf.float64)
    begin, end = tf.cond(begin < end, lambda: (begin, end), lambda: (tf.zeros_like(begin), tf.ones_like(end)))
    fingerprint = tf.math.floormod(tf.add_n([_fingerprint(leaf) for leaf in leaves]), MODULUS)
    part = tf.nest.map_structure(lambda leaf: _rows(leaf, begin, end), batch)
    return tf.stack([share, tf.cast(fingerprint, tf.float64)]), part


def _num_rows(leaf: Any) -> tf.Tensor:
    import tensorflow as tf

    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return leaf.nrows(out_type=tf.int64) if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, tf.int64)[0]


def _rows(leaf: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    import tensorflow as tf

    if isinstance(leaf, tf.SparseTensor):
        rest = leaf.dense_shape[1:]
        return tf.sparse.slice(leaf, tf.concat([[begin], 0 * rest], 0), tf.concat([[end - begin], rest], 0))
    return leaf[begin:end]


def _fingerprint(leaf: Any) -> tf.Tensor:
    """Number of the first values of a part of a batch, below MODULUS."""
    import tensorflow as tf

    values = leaf.values if isinstance(leaf, tf.SparseTensor) else leaf
    values = values.flat_values if isinstance(values, tf.RaggedTensor) else values
    text = tf.io.serialize_tensor(tf.reshape(values, [-1])[:FINGERPRINTED])
    return tf.strings.to_hash_bucket_fast(text, MODULUS)


def _batch_size(dataset: Any) -> int:
    """Rows of a dataset's batches, from its shapes or the step that has made them; 1: unknown."""
    import tensorflow as tf

    sizes = {spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if spec.shape.rank}
    while sizes == {None} and dataset is not None:
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            return int(size)
        dataset = getattr(dataset, "_input_dataset", None)
    return next(iter(sizes)) if len(sizes) == 1 and sizes != {None} else 1
