"""Training and validation data from the arguments of `ringtrain.fit`: arrays, or a stream of batches."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import GeneratorType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from ringtrain import hvd
from ringtrain.data import division
from ringtrain.data.arrays import Arrays, NoSamples, NumberedRows
from ringtrain.data.dataset import Split
from ringtrain.data.fit_arguments import BATCH_SIZE, FitArguments, is_batches, with_batch_sizes
from ringtrain.data.from_rank_0 import FromRank0, StreamOfRank0, leaves, packed
from ringtrain.data.parts import fingerprint
from ringtrain.data.records import RecordRows, Records
from ringtrain.data.streams import PyDatasetStream, Stream, num_rows
from ringtrain.errors import DataError

NUM_COMPARED = 2
"""batches, which show whether a pipeline gives the same ones again"""
_read_by_rank_0: weakref.WeakSet[Any] = weakref.WeakSet()
"""pipelines whose shuffles the other ranks have not read"""


def shapes_of(train: NumberedRows | Stream) -> tuple[Any, int]:
    """Shapes of a sample's inputs, in their nest, and the number of columns of its targets, 0 if these are a nest."""
    if isinstance(train, Stream):
        batch = train.dataset.element_spec
    else:
        batch = train.rows(0, min(2, len(train)))
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    num_targets = 0
    if hasattr(y, "shape"):
        num_targets = 1
        if len(y.shape) > 1:
            num_targets = y.shape[-1] or 0
    return tf.nest.map_structure(lambda leaf: tuple(leaf.shape[1:]), x), num_targets


def splits_of(given: FitArguments, batch_size: int) -> tuple[NumberedRows | Stream, Split]:
    """Returns training and validation data; raises DataError for what `fit` cannot divide over ranks. Collective."""
    if given.shuffle not in (True, False):
        raise DataError(f"ringtrain.fit: got shuffle {given.shuffle!r}, expected True or False")
    x, held_out = for_all_ranks(given.x, given.validation_data)
    given = replace(given, x=x, validation_data=held_out)
    train: Any = _shard(given) if callable(x) else _stream(x, given)
    if train:
        _check_stream(train, given)
        if hvd.is_initialized() and hvd.size() > 1 and not train.is_shard and not train.is_of_rank_0:
            train.divide()
    else:
        given = _without_split(given)
        train = _rows(given, batch_size)
    test = _held_out(given.validation_data, given, batch_size)
    if given.max_steps:
        train = _shortened(train, given.steps_per_epoch or given.max_steps, batch_size)
        test = _shortened(test, given.max_steps, batch_size)
    return train, test


def to_evaluate(given: FitArguments) -> tuple[Split, int]:
    """Data of `ringtrain.evaluate` and `ringtrain.predict`, and the rows of a batch, 1 if these are batches."""
    x, batch_size, steps = given.x, given.batch_size, given.steps_per_epoch
    for name, number in (("batch_size", batch_size), ("steps", steps)):
        if number is not None and number < 1:
            raise DataError(f"ringtrain.fit: got {name} {number}, expected at least 1")
    is_shard = callable(x)
    if is_shard:
        x = x(hvd.rank(), hvd.size())
    if isinstance(x, list | np.ndarray) and len(x) and isinstance(x[0], str):  # which the tasks of KerasHub take
        x = tf.constant(x)
    if not is_batches(x) or given.y is not None or given.sample_weight is not None:
        x = x, given.y, given.sample_weight
    held_out = FitArguments(validation_data=x, validation_steps=steps, validation_batch_size=batch_size)
    held_out = with_batch_sizes(held_out)
    split = _held_out(x, held_out, BATCH_SIZE)
    split.is_shard = is_shard
    if isinstance(split, Stream):
        return split, 1
    if not len(split):
        raise DataError("ringtrain.fit: got arrays without rows, expected at least one")
    return split, held_out.validation_batch_size or BATCH_SIZE


# ---- rows by number --------------------------------------------------------------------------------------------------


def _without_split(given: FitArguments) -> FitArguments:
    """Arguments with validation data in place of a part of the training data."""
    if not given.validation_split or given.validation_data is not None or isinstance(given.x, Records):
        return given
    _check_arrays("x", given.x)
    arrays = given.x, given.y, given.sample_weight
    (x, y, weight), held_out = array_slicing.train_validation_split(arrays, validation_split=given.validation_split)
    return replace(given, x=x, y=y, sample_weight=weight, validation_data=held_out)


def _rows(given: FitArguments, batch_size: int) -> NumberedRows:
    """Training data that are no batches."""
    x, held_out = given.x, given.validation_data
    rows: NumberedRows
    if isinstance(x, Records):
        if given.y is not None or given.sample_weight is not None or given.validation_split:
            raise DataError(
                "ringtrain.fit: got Records with y, sample_weight or validation_split: name the columns in Records"
                " (target, weight), and pass other Records as validation_data"
            )
        if isinstance(held_out, Records) and held_out.class_names != x.class_names:
            raise DataError(
                f"ringtrain.fit: got training data with the classes {x.class_names} and validation data with"
                f" {held_out.class_names}: give both the same class_names"
            )
        rows = RecordRows(x, given.shuffle, given.class_weight)
    else:
        _check_arrays("x", x)
        rows = Arrays(x, given.y, given.sample_weight, given.class_weight, shuffle=given.shuffle)
    if not len(rows):
        raise DataError("ringtrain.fit: got no training samples, expected at least one")
    if not given.max_steps:
        _check_steps(given, math.ceil(len(rows) / batch_size), batch_size)
    return rows


def _check_steps(given: FitArguments, num_batches: int, batch_size: int) -> None:
    """Raises DataError for a steps_per_epoch with which an epoch would go beyond the end of the arrays."""
    steps = given.steps_per_epoch or num_batches
    if steps > num_batches:
        warnings.warn(f"Your input ran out of data: epochs have {num_batches} steps instead of {steps}", stacklevel=2)
    elif num_batches % steps and steps * given.num_epochs > num_batches:
        raise DataError(
            f"ringtrain.fit: got steps_per_epoch {steps} with arrays of {num_batches} batches of {batch_size} rows:"
            f" leave it out, or pass a divisor of {num_batches}"
        )


def _check_arrays(argument: str, nest: Any) -> None:
    kinds = [type(leaf) for leaf in keras.tree.flatten(nest) if leaf is not None]
    wrong = [kind for kind in kinds if not _is_array(kind)]
    if wrong or not kinds:
        kind = f"{wrong[0].__module__}.{wrong[0].__name__}" if wrong else "nothing"
        raise DataError(
            f"ringtrain.fit: got {kind} for {argument}, expected arrays in memory (NumPy, tensors or pandas, also in"
            f" dicts and tuples), ringtrain.Records, a tf.data.Dataset, a PyDataset or a generator, or a function of"
            f" rank and number of ranks that returns one"
        )


def _is_array(kind: type) -> bool:
    return hasattr(kind, "shape") and (hasattr(kind, "__array__") or hasattr(kind, "dtype"))


def _shortened(split: Any, num_steps: int, batch_size: int) -> Any:
    """The first batches. The last one of arrays keeps the size that the job's last one has."""
    if isinstance(split, Stream) and num_steps < split.num_batches:
        split.num_batches, split.may_end_early = num_steps, False
    elif isinstance(split, NumberedRows) and num_steps < math.ceil(len(split) / batch_size):
        return split.first((num_steps - 1) * batch_size + (len(split) % batch_size or batch_size))
    return split


def _held_out(held_out: Any, given: FitArguments, batch_size: int) -> Split:
    """Validation data."""
    if held_out is None:
        return NoSamples()
    stream = _stream(held_out, given, is_held_out=True)
    if stream:
        return stream
    if isinstance(held_out, FromRank0):
        held_out = held_out.batches  # of one process
    samples: NumberedRows
    if isinstance(held_out, Records):
        samples = RecordRows(held_out)
    else:
        _check_arrays("held-out data", held_out)
        samples = Arrays(*keras.utils.unpack_x_y_sample_weight(held_out))
    rows = given.validation_batch_size or batch_size
    return samples.first(given.validation_steps * rows) if given.validation_steps else samples


# ---- batches ---------------------------------------------------------------------------------------------------------


def for_all_ranks(*sources: Any) -> list[Any]:
    """The sources, of which rank 0 reads for all what ranks would read differently. Collective."""
    if not hvd.is_initialized() or hvd.size() == 1 or hvd.elastic.is_on():
        return [*sources]
    of_ranks = hvd.allgather_object([_why_rank_0(source) for source in sources], name="ringtrain_why_rank_0")
    reasons = [next(filter(None, of_source), "") for of_source in zip(*of_ranks, strict=True)]
    if any(reasons) and division.share_a_shuffle(*sources):
        reasons = [next(filter(None, reasons))] * len(reasons)
    marked = []
    for source, why in zip(sources, reasons, strict=True):
        one = FromRank0(source, why) if why else source
        if isinstance(one, FromRank0) and isinstance(one.batches, tf.data.Dataset):
            _read_by_rank_0.add(one.batches)
        marked.append(one)
    return marked


def _why_rank_0(x: Any) -> str:
    """Why rank 0 must read data for all ranks, as a phrase; "": it need not."""
    if not isinstance(x, tf.data.Dataset):
        return ""
    if x in _read_by_rank_0:
        return "which alone has read it before"
    if division.caches_in_file(x):
        return "as one process alone can write the file of cache()"
    return "as each iteration of the first batches gives others" if _is_random(x) else ""


def _is_random(dataset: Any) -> bool:
    """Returns whether two copies of a pipeline begin with different batches, as shuffles without a seed do."""
    if division.calls_python(dataset):  # functions may have a state, which changes
        return False
    contents = []
    for _ in range(2):
        copy = division.copy_of(dataset)
        if copy is None:
            return False
        try:
            contents.append([int(fingerprint(batch)) for batch in copy.take(NUM_COMPARED)])
        except tf.errors.OpError:  # which training meets, too
            return False
    return contents[0] != contents[1]


def _stream(x: Any, given: FitArguments, is_held_out: bool = False) -> Stream | None:
    """Stream of a dataset, PyDataset or generator to train, or to evaluate; None for others. Collective."""
    if isinstance(x, FromRank0) and hvd.size() > 1:
        return StreamOfRank0(lambda: _batches(_stream(x.batches, given, is_held_out)), x.why)
    x = x.batches if isinstance(x, FromRank0) else x
    make: Callable[..., Stream]
    if isinstance(x, tf.data.Dataset):
        make = _of_dataset
    elif isinstance(x, GeneratorType):
        make = _kept if is_held_out else _generated
    elif isinstance(x, keras.utils.PyDataset):
        make = _of_py_dataset
    else:
        return None
    if is_held_out:  # an evaluation is one iteration, or some steps of it
        given = replace(given, class_weight=None, shuffle=False, steps_per_epoch=None)
    else:
        given = replace(given, validation_steps=None)
    stream = make(x, given)
    stream.is_held_out = is_held_out
    return stream


def _batches(source: Any) -> Stream:
    if not isinstance(source, Stream):
        raise DataError("from_rank_0: expected batches; of arrays, pass all to fit, on every rank")
    return source


def _of_dataset(x: Any, given: FitArguments) -> Stream:
    dataset, steps = TFDatasetAdapter(x, class_weight=given.class_weight)._dataset, given.validation_steps
    taken = dataset.take(steps) if steps else dataset
    stream = Stream("tf.data.Dataset", taken, given.steps_per_epoch, given.num_epochs, _batch_size(x))
    if steps and int(dataset.cardinality()) != steps:
        stream.has_unread = False
    return stream


def _generated(x: Any, given: FitArguments) -> Stream:
    if not given.steps_per_epoch:
        raise DataError("ringtrain.fit: got a generator without steps_per_epoch, expected the batches of an epoch")
    if given.class_weight:
        raise DataError("ringtrain.fit: got class_weight with a generator: let it yield (x, y, sample_weight)")
    adapter = GeneratorDataAdapter(x)
    batch_size = num_rows(adapter._first_batches[0])
    return Stream("generator", adapter.get_tf_dataset(), given.steps_per_epoch, given.num_epochs, batch_size)


def _kept(x: Any, given: FitArguments) -> Stream:
    """The first validation batches of a generator, which can be read once, and every epoch needs again."""
    if not given.validation_steps:
        raise DataError("ringtrain.fit: got a generator of held-out data, expected a number of steps with it")
    dataset = GeneratorDataAdapter(x).get_tf_dataset()
    spec, batches = dataset.element_spec, [leaves(batch) for batch in dataset.take(given.validation_steps)]
    again = tf.data.Dataset.from_generator(lambda: (packed(spec, batch) for batch in batches), output_signature=spec)
    return Stream("generator", again.apply(tf.data.experimental.assert_cardinality(len(batches))))


def _of_py_dataset(x: Any, given: FitArguments) -> Stream:
    steps = given.steps_per_epoch
    if x.num_batches is None:
        dataset = PyDatasetAdapter(x, given.class_weight).get_tf_dataset()
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        if given.validation_steps:
            dataset = dataset.take(given.validation_steps)
        return Stream("PyDataset", dataset, steps, given.num_epochs)
    if steps and steps != x.num_batches:
        raise DataError(
            f"ringtrain.fit: got steps_per_epoch {steps} and a PyDataset of {x.num_batches} batches: leave it out"
        )
    return PyDatasetStream(x, given.class_weight, given.shuffle, given.seed, given.validation_steps)


def _shard(given: FitArguments) -> Stream:
    """Stream of the batches that a function of rank and number of ranks returns for this rank alone."""
    result = given.x(hvd.rank(), hvd.size())
    stream = _stream(result, given)
    if stream is None:
        raise DataError(
            f"ringtrain.fit: x is a function, which returned {type(result).__name__}, expected the batches of one rank:"
            f" a tf.data.Dataset, a PyDataset or a generator"
        )
    stream.is_shard, stream.kind = True, f"{stream.kind}, a shard of {hvd.size()}"
    stream.may_end_early = False  # on one rank alone, while the others would wait for its gradients
    stream.advice = "batches of a step must have as many rows on every rank: use batch(n, drop_remainder=True)"
    return stream


def _check_stream(stream: Stream, given: FitArguments) -> None:
    if given.y is not None or given.sample_weight is not None or given.validation_split:
        raise DataError(
            f"ringtrain.fit: got a {stream.kind} with y, sample_weight or validation_split: put targets and weights"
            f" into its batches, and pass validation_data"
        )
    if given.batch_size or given.batch_per_rank:
        raise DataError(
            f"ringtrain.fit: got a batch_size with a {stream.kind}, which has its own batches: leave it out"
        )


def _batch_size(dataset: Any) -> int:
    """Rows of a dataset's batches, from its shapes or the step that has made them; 1: unknown."""
    sizes = {spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if spec.shape.rank}
    while sizes == {None} and dataset is not None:
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            return int(size)
        dataset = getattr(dataset, "_input_dataset", None)
    return next(iter(sizes)) if len(sizes) == 1 and sizes != {None} else 1
