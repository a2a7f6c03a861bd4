"""A tf.data pipeline of which each rank makes its own rows, instead of those of all ranks.

    rows -> map -> map -> batch -> prefetch                              of the script
    rows -> batch -> a rank's part -> unbatch -> map -> map -> batch -> prefetch     of a rank

`rows` is the script's own dataset, so that its shuffles continue from their state. A map before `batch` is divided if
its function has no state: then a row's result depends on this row alone. Of a map after `batch` nobody can know that;
the first batches show it, as they are and with the rows of one rank, or of all others, made smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ringtrain.data import pipeline_graph
from ringtrain.data.parts import Header, Parts, num_rows_of
from ringtrain.data.py_dataset import PyDatasetStream, RowsOfPyDataset
from ringtrain.data.streams import Stream, cut, fingerprint, same

if TYPE_CHECKING:
    import tensorflow as tf

MAPS = ("_MapDataset", "_ParallelMapDataset")
BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
REPEATED: dict[str, Callable[[Any, Any], Any]] = {
    "_PrefetchDataset": lambda dataset, earlier: dataset.prefetch(int(earlier._buffer_size)),
    "_RepeatDataset": lambda dataset, earlier: dataset.repeat(int(earlier._count)),
    "_TakeDataset": lambda dataset, earlier: dataset.take(int(earlier._count)),
    "_SkipDataset": lambda dataset, earlier: dataset.skip(int(earlier._count)),
    "_OptionsDataset": lambda dataset, earlier: dataset,
    "_AssertCardinalityDataset": lambda dataset, earlier: dataset,
}
"""Makes a dataset that has neither a function nor a state again, from its new input and the earlier dataset."""
AGAIN_AFTER_BATCH = REPEATED | {"CacheDataset": lambda dataset, earlier: dataset.cache()}
"""A cache before `batch` stays whole, with the maps before it: it is there to spare their work."""
NUM_TRIED = 2
"""batches of which the parts are compared with the whole ones"""


@dataclass(frozen=True)
class Division:
    """A pipeline whose maps can be divided over ranks.

    Attributes:
        whole: The script's dataset.
        rows: The part of it that every rank reads whole.
        before: Datasets between `rows` and the batch, in order.
        batch: The dataset that makes batches.
        after: Datasets that follow it, in order.
        remark: What stays whole, as a phrase; "": nothing that takes time.
        is_tried: Whether the first batches are compared; rows of a Python function would be missing afterwards.
        unequal: What is the case if the parts are not those of the whole batches.
    """

    whole: tf.data.Dataset
    rows: tf.data.Dataset
    before: Sequence[Any]
    batch: Any
    after: Sequence[Any]
    remark: str = ""
    is_tried: bool = True
    unequal: ClassVar[str] = "a map() after batch() does not compute each row by itself"

    def of_rank(self, parts: Parts) -> tf.data.Dataset:
        """Elements (Header, rows of a rank's parts) for each batch of the whole pipeline."""
        return self._made_from(self.rows, parts)

    def _made_from(
        self, rows: tf.data.Dataset, parts: Parts, change: Callable[[Any], Any] | None = None
    ) -> tf.data.Dataset:
        """The same of other rows. change: Of the parts, before the maps after `batch`."""
        size = int(self.batch._batch_size)
        for earlier in self.before:
            if not _is_map(earlier):
                rows = _again(earlier, rows)
        batches = rows.batch(size, drop_remainder=bool(self.batch._drop_remainder))
        own = batches.map(lambda *batch: cut(_element(batch), parts, have_same_rows=True))

        # Maps need rows; each takes the header of its batch along.
        maps = [earlier for earlier in self.before if _is_map(earlier)]
        if maps:
            own = own.map(lambda header, part: (_of_each_row(header, part), part)).unbatch()
            for earlier in maps:
                own = _mapped(own, earlier)
            own = own.batch(len(parts.places(size)))
            own = own.map(lambda headers, part: (_header_of(headers), part))
        if change:
            own = own.map(lambda header, part: (header, change(part)))
        for earlier in self.after:
            own = _mapped(own, earlier) if _is_map(earlier) else _again(earlier, own)
        return own.with_options(self.whole.options())

    def tried(self, parts: Parts) -> tuple[bool, int]:
        """Compares this rank's parts of the first batches with the whole ones.

        Returns:
            Whether they are equal, and a checksum of the whole batches.

        Raises:
            Exception: What the pipeline raises, or cannot be copied.
        """
        import tensorflow as tf

        num_rows = NUM_TRIED * int(self.batch._batch_size)
        raw = next(iter(_without_state(self.rows).take(num_rows).batch(num_rows)))
        again = tf.data.Dataset.from_tensor_slices(raw)
        all_rows = Parts(range(1), 1)
        changes: list[tuple[Any, Any]] = [(None, None)]
        if any(map(_is_map, self.after)):  # one may use all rows of a batch, such as their largest value
            for of_own in (True, False):
                halved = partial(_halved, of_own=of_own)
                changes.append((partial(halved, parts=parts), partial(halved, parts=all_rows)))
        is_equal, checksum = True, 0
        for of_whole, of_part in changes:
            whole = self._made_from(again, all_rows, of_whole).take(NUM_TRIED)
            own = self._made_from(again, parts, of_part).take(NUM_TRIED)
            for (_, batch), (header, part) in zip(whole, own, strict=True):
                expected_header, expected = parts.cut(batch)
                is_equal &= same(
                    (header.shares, header.rows, part), (expected_header.shares, expected_header.rows, expected)
                )
                if of_whole is None:
                    checksum = (checksum * 31 + int(fingerprint(batch))) % 2**31
        return is_equal, checksum


def divide(stream: Stream) -> None:
    """Lets each rank make its own rows of a stream alone, if its pipeline can be divided. Collective."""
    from ringtrain import hvd

    if not hvd.is_initialized() or hvd.size() == 1 or hvd.elastic.is_on():
        return
    division: Division | RowsOfPyDataset | None = None
    checksum = 0
    try:
        division, why = _division_of(stream)
        if division and division.is_tried:
            is_right, checksum = division.tried(Parts.of_rank(hvd.rank(), hvd.size()))
            why = "" if is_right else division.unequal
    except Exception as error:
        why = f"its first batches could not be made in parts ({type(error).__name__})"
    # All ranks, or none: each must see the same numbers in the first batches.
    of_ranks = hvd.allgather_object((why, checksum), name="ringtrain_division")
    whys = [of_rank for of_rank, _ in of_ranks if of_rank]
    if division and not whys and len(set(of_ranks)) == 1:
        stream.division = division
    stream.why_whole = next(iter(whys), "")


def _division_of(stream: Stream) -> tuple[Division | RowsOfPyDataset | None, str]:
    """The division of a stream; None and the reason, as a phrase, if its batches are made whole."""
    if stream.kind == "tf.data.Dataset":
        return division_of(stream.dataset)
    if not isinstance(stream, PyDatasetStream):
        return None, f"a {stream.kind} makes whole batches"
    if not callable(getattr(stream.source, "rows", None)):
        return None, "its PyDataset has no method rows(index, begin, end)"
    return RowsOfPyDataset(stream), ""


def division_of(dataset: tf.data.Dataset) -> tuple[Division | None, str]:
    """The division of a pipeline; None and what stands in the way, as a phrase, if there is none; "": it has no map."""
    chain = [*_chain(dataset)]
    batches = [place for place, one in enumerate(chain) if type(one).__name__ in BATCHES]
    if not _has_map(chain):
        return None, ""
    if not batches:
        padded = any(type(one).__name__ == "_PaddedBatchDataset" for one in chain)
        return None, "padded_batch() pads to the longest row of the whole batch" if padded else "it has no batch()"
    place = batches[0]
    for one in chain[:place]:
        if why := _why_whole(one, AGAIN_AFTER_BATCH):
            return None, f"after batch() comes {why}"

    # Up to the first map that can be divided; what follows it is made again.
    before: list[Any] = []
    remark = ""
    for number, one in enumerate(chain[place + 1 :], place + 1):
        why = _why_whole(one, REPEATED)
        if why:
            remark = f"{why} comes after map(): put it before" if not _is_map(one) else why
            if not _has_map(chain[number:]):
                remark = ""
            break
        before.append(one)
    while before and not _is_map(before[-1]):
        before.pop()
    after = chain[:place]
    if not any(map(_is_map, (*before, *after))):
        return None, remark
    rows = (before[-1] if before else chain[place])._inputs()[0]
    is_tried = not pipeline_graph.calls_python(rows)
    if not is_tried and any(map(_is_map, after)):
        return None, "its rows come from a Python function, and after batch() comes map()"
    return Division(dataset, rows, before[::-1], chain[place], after[::-1], remark, is_tried), ""


def _chain(dataset: Any) -> Iterator[Any]:
    """A dataset and its inputs, as long as each has one."""
    yield dataset
    inputs = dataset._inputs()
    if len(inputs) == 1:
        yield from _chain(inputs[0])


def _without_state(rows: Any) -> Any:
    """A dataset of the same kind of rows, of which an iteration changes no shuffle."""
    from_arrays = rows
    while type(from_arrays).__name__ in (*REPEATED, "_ShuffleDataset", "CacheDataset"):
        (from_arrays,) = from_arrays._inputs()
    if type(from_arrays).__name__ == "_TensorSliceDataset":
        return from_arrays
    copy = pipeline_graph.copy_of(rows)
    if copy is None:
        raise ValueError("its rows cannot be copied")
    return copy


def _halved(batch: Any, parts: Parts, of_own: bool) -> Any:
    """A batch with half of the numbers in the rows of a rank's parts, or in all others."""
    import tensorflow as tf

    def halved(leaf: Any) -> Any:
        is_number = isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_integer)
        if not is_number or not leaf.shape.rank:
            return leaf
        numbers = tf.range(num_rows_of(leaf))
        _, own = parts.cut(numbers)
        is_own = tf.reduce_any(numbers[:, None] == own[None], 1)
        is_changed = tf.reshape(is_own == of_own, [-1] + [1] * (leaf.shape.rank - 1))
        return tf.where(is_changed, leaf // tf.cast(2, leaf.dtype), leaf)

    return tf.nest.map_structure(halved, batch)


def _is_map(dataset: Any) -> bool:
    return type(dataset).__name__ in MAPS


def _has_map(datasets: Sequence[Any]) -> bool:
    """Returns whether there is a map in the pipelines that end with these datasets."""
    return any(_is_map(one) or _has_map(one._inputs()) for one in datasets)


def _why_whole(dataset: Any, again: Container[str]) -> str:
    """The reason, as a phrase, why a dataset cannot be made again for a rank's rows; "": it can."""
    if _is_map(dataset):
        state = pipeline_graph.state_of(dataset._map_func.function)
        if state:
            return f"map() with {state}"
        if again is AGAIN_AFTER_BATCH and _has_rows_of_unknown_shape(dataset):
            return "map() whose rows have a shape that may depend on the batch, as by padding: set it"
        return ""
    name = type(dataset).__name__
    in_a_file = name == "CacheDataset" and bool(dataset._filename.numpy())
    return "" if name in again and not in_a_file else f"{name.strip('_').removesuffix('Dataset').lower()}()"


def _has_rows_of_unknown_shape(batches: Any) -> bool:
    import tensorflow as tf

    for spec in tf.nest.flatten(batches.element_spec):
        if isinstance(spec, tf.TensorSpec) and (spec.shape.rank is None or None in spec.shape[1:]):
            return True
    return False


def _again(earlier: Any, dataset: tf.data.Dataset) -> Any:
    return AGAIN_AFTER_BATCH[type(earlier).__name__](dataset, earlier)


def _mapped(dataset: tf.data.Dataset, earlier: Any) -> tf.data.Dataset:
    """Elements (header, value) with the function of an earlier map applied to the value."""
    import tensorflow as tf
    from tensorflow.python.data.util import structure

    function = earlier._map_func
    spec = earlier._input_dataset.element_spec
    calls = getattr(earlier, "_num_parallel_calls", None)

    # The function as it is traced, with the constants that it has; again, where it is traced for a number of rows.
    own_spec = dataset.element_spec[1]
    pairs = zip(tf.nest.flatten(own_spec), tf.nest.flatten(spec), strict=True)
    fits = all(own.is_subtype_of(known) for own, known in pairs)

    def applied(header: Any, value: Any) -> Any:
        if fits:
            result = function.function(*structure.to_tensor_list(own_spec, value))
            return header, structure.from_compatible_tensor_list(function.output_structure, result)
        return header, function._func(*(value if type(spec) is tuple else (value,)))

    return dataset.map(applied, num_parallel_calls=None if calls is None else int(calls))


def _of_each_row(header: Header, part: Any) -> tf.Tensor:
    """A header for each row of a part, float64 [rows, numbers]: one tensor, as each row costs time per tensor."""
    import tensorflow as tf

    numbers = tf.concat([header.shares, tf.cast(header.rows, tf.float64), header.fingerprint[None]], 0)
    num_rows = num_rows_of(tf.nest.flatten(part)[0])
    return tf.repeat(numbers[None], num_rows, 0)


def _header_of(headers: tf.Tensor) -> Header:
    """The header that each row of `_of_each_row` has."""
    import tensorflow as tf

    numbers = headers[0]
    num_parts = headers.shape[1] // 2
    return Header(numbers[:num_parts], tf.cast(numbers[num_parts:-1], tf.int64), numbers[-1])


def _element(arguments: tuple[Any, ...]) -> Any:
    """Element of a dataset, given the arguments of its map."""
    return arguments[0] if len(arguments) == 1 else arguments
