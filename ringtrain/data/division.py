"""A plain tf.data pipeline of which each rank makes its own rows, instead of those of all ranks.

    rows -> map -> map -> batch -> prefetch                          of the script
    rows -> batch -> a rank's part -> unbatch -> map -> map -> batch     of a rank

`rows` is the script's own dataset, so that its shuffles continue from their state. The maps have no state, so that a
row's result depends on this row alone. Of any other pipeline, every rank makes whole batches and takes its rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringtrain.data import pipeline_graph
from ringtrain.data.parts import Header, Parts, num_rows_of
from ringtrain.data.streams import Stream, cut

if TYPE_CHECKING:
    import tensorflow as tf

MAPS = ("_MapDataset", "_ParallelMapDataset")
BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
UNCHANGED = ("_PrefetchDataset", "_OptionsDataset", "_AssertCardinalityDataset")
"""datasets with the elements of their inputs"""


@dataclass(frozen=True)
class Division:
    """A pipeline whose maps are divided over ranks.

    Attributes:
        whole: The script's dataset.
        rows: The part of it that every rank reads whole.
        maps: Datasets with the functions that follow, in order.
        batch: The dataset that makes batches.
        num_passes: How often these are repeated; -1: without an end.
    """

    whole: tf.data.Dataset
    rows: tf.data.Dataset
    maps: Sequence[Any]
    batch: Any
    num_passes: int

    def of_rank(self, parts: Parts) -> tf.data.Dataset:
        """Elements (Header, rows of a rank's parts) for each batch of the whole pipeline."""
        size = int(self.batch._batch_size)
        batches = self.rows.batch(size, drop_remainder=bool(self.batch._drop_remainder))
        own = batches.map(lambda *batch: cut(batch[0] if len(batch) == 1 else batch, parts))
        # Maps need rows; each takes the header of its batch along.
        own = own.map(lambda header, part: (_of_each_row(header, part), part)).unbatch()
        for earlier in self.maps:
            own = _mapped(own, earlier)
        own = own.batch(len(parts.places(size)))
        own = own.map(lambda headers, part: (_header_of(headers), part))
        return own.repeat(self.num_passes).with_options(self.whole.options())


def divide(stream: Stream) -> None:
    """Lets each rank make its own rows of a stream alone, if its pipeline is plain."""
    from ringtrain import hvd

    if not hvd.is_initialized() or hvd.size() == 1 or hvd.elastic.is_on():
        return
    if stream.kind == "tf.data.Dataset":
        stream.division, stream.why_whole = division_of(stream.dataset)
    else:
        stream.why_whole = f"a {stream.kind} makes whole batches"


def division_of(dataset: Any) -> tuple[Division | None, str]:
    """The division of a pipeline; None and what stands in the way, as a phrase, if there is none; "": it has no map."""
    if not _has_map(dataset):
        return None, ""
    batch, num_passes = dataset, 1
    while type(batch).__name__ in (*UNCHANGED, "_RepeatDataset"):
        if type(batch).__name__ == "_RepeatDataset":
            if num_passes != 1:
                return None, "it is repeated twice"
            num_passes = int(batch._count)
        (batch,) = batch._inputs()
    if type(batch).__name__ not in BATCHES:
        return None, f"it ends with {_name_of(batch)}(), not with batch()"
    maps: list[Any] = []
    (rows,) = batch._inputs()
    while type(rows).__name__ in (*UNCHANGED, *MAPS):
        if _is_map(rows):
            state = pipeline_graph.state_of(rows._map_func.function)
            if state and not maps:
                return None, f"map() with {state}"
            if state:
                break
            maps.insert(0, rows)
        (rows,) = rows._inputs()
    if not maps:
        return None, f"{_name_of(rows)}() comes after map(): put it before"
    if not _are_of_one_shape(rows):
        return None, "its rows before map() may have several shapes"
    return Division(dataset, rows, maps, batch, num_passes), ""


def _is_map(dataset: Any) -> bool:
    return type(dataset).__name__ in MAPS


def _has_map(dataset: Any) -> bool:
    """Returns whether there is a map in the pipeline that ends with this dataset."""
    return _is_map(dataset) or any(map(_has_map, dataset._inputs()))


def _name_of(dataset: Any) -> str:
    """Name of the method that makes such a dataset."""
    name = type(dataset).__name__.strip("_").removesuffix("Dataset")
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _are_of_one_shape(rows: Any) -> bool:
    """Returns whether all rows of a dataset are known to have one shape, so that they make batches."""
    import tensorflow as tf

    specs = tf.nest.flatten(rows.element_spec)
    return all(isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() for spec in specs)


def _mapped(dataset: tf.data.Dataset, earlier: Any) -> tf.data.Dataset:
    """Elements (header, value) with the function of an earlier map, as it is traced, applied to the value."""
    from tensorflow.python.data.util import structure

    function, spec = earlier._map_func, dataset.element_spec[1]
    calls = getattr(earlier, "_num_parallel_calls", None)

    def applied(header: Any, value: Any) -> Any:
        result = function.function(*structure.to_tensor_list(spec, value))
        return header, structure.from_compatible_tensor_list(function.output_structure, result)

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
