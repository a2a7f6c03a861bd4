"""Training and validation data from the arguments of `ringtrain.fit`: arrays, or a stream of batches."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import GeneratorType
from typing import Any

import numpy as np

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
IN_A_FILE = "as one process alone can write the file of cache()"
_read_by_rank_0: weakref.WeakSet[Any] = weakref.WeakSet()
"""pipelines whose shuffles the other ranks have not read"""


def shapes_of(train: NumberedRows | Stream) -> tuple[Any, int]:
    """Shapes of a sample's inputs, in their nest, and the number of columns of its targets, 0 if these are a nest."""
    import keras
    import tensorflow as tf

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


def inputs(given: FitArguments, batch_size: int) -> tuple[NumberedRows | Stream, Split]:
    """Returns training and validation data; raises DataError for what `fit` cannot divide over ranks."""
    if isinstance(given.shuffle, str) and given.shuffle != "batch":
        raise DataError(f'ringtrain.fit: got shuffle {given.shuffle!r}, expected True, False or "batch"')
    how = (given.class_weight, given.steps_per_epoch, given.num_epochs, bool(given.shuffle), given.seed)
    of_rank_0, why_held_out = why_rank_0(given.x), why_rank_0(given.validation_data)
    if division.share_a_shuffle(given.x, given.validation_data):
        of_rank_0 = why_held_out = of_rank_0 or why_held_out
        _read_by_rank_0.update([given.x, given.validation_data] if of_rank_0 else [])
    if why_held_out:
        given = replace(given, validation_data=FromRank0(given.validation_data))
    x = FromRank0(given.x) if of_rank_0 else given.x
    stream = _shard(x, *how) if callable(x) else _stream(x, *how)
    if stream:
        if of_rank_0:
            stream.kind, stream.why_rank_0 = "tf.data.Dataset", of_rank_0
        _check_stream(stream, given)
        if not stream.is_shard and not isinstance(x, FromRank0):
            _divide(stream)
        held_out = _held_out(given.validation_data, given, batch_size, why_held_out)
        if given.max_steps:
            if given.max_steps < stream.num_batches:
                stream.num_batches, stream.may_end_early = given.max_steps, False
            held_out = _shortened(held_out, given.max_steps, batch_size)
        return stream, held_out
    train, validation_data = _rows(given)
    if not len(train):
        raise DataError("ringtrain.fit: got no training samples, expected at least one")
    if not given.max_steps:
        _check_steps(given, math.ceil(len(train) / batch_size), batch_size)
        return train, _held_out(validation_data, given, batch_size, why_held_out)
    num_steps = given.max_steps
    if given.steps_per_epoch:  # a pass over the arrays has whole epochs
        num_batches = math.ceil(len(train) / batch_size)
        num_steps = given.steps_per_epoch * max(1, min(given.num_epochs, num_batches // given.steps_per_epoch))
    return (
        _shortened(train, num_steps, batch_size),
        _shortened(_held_out(validation_data, given, batch_size, why_held_out), given.max_steps, batch_size),
    )


def to_evaluate(given: FitArguments, of_rank_0: str) -> tuple[Split, int]:
    """Data of `ringtrain.evaluate` and `ringtrain.predict`, and the rows of a batch, 1 if these are batches."""
    import tensorflow as tf

    from ringtrain import hvd

    x, batch_size, steps = given.x, given.batch_size, given.steps_per_epoch
    for name, number in (("batch_size", batch_size), ("steps", steps)):
        if number is not None and number < 1:
            raise DataError(f"ringtrain.fit: got {name} {number}, expected at least 1")
    is_shard = callable(x)
    if is_shard:
        x = x(hvd.rank(), hvd.size())
    if isinstance(x, list | np.ndarray) and len(x) and isinstance(x[0], str):  # which the tasks of KerasHub take
        x = tf.constant(x)
    if of_rank_0:  # why, as `why_rank_0` returns it
        x = FromRank0(x)
    if not is_batches(x) or given.y is not None or given.sample_weight is not None:
        x = x, given.y, given.sample_weight
    held_out = FitArguments(validation_data=x, validation_steps=steps, validation_batch_size=batch_size)
    held_out = with_batch_sizes(held_out)
    split = _held_out(x, held_out, BATCH_SIZE, of_rank_0)
    split.is_shard = is_shard
    if isinstance(split, Stream):
        return split, 1
    if not len(split):
        raise DataError("ringtrain.fit: got arrays without rows, expected at least one")
    return split, held_out.validation_batch_size or BATCH_SIZE


def _divide(stream: Stream) -> None:
    """Lets each rank make its own rows of a stream alone, if its pipeline is plain."""
    from ringtrain import hvd

    if not hvd.is_initialized() or hvd.size() == 1:
        return
    if stream.kind == "tf.data.Dataset":
        stream.division, stream.why_whole = division.division_of(stream.dataset)
    else:
        stream.why_whole = f"a {stream.kind} makes whole batches"


def _rows(given: FitArguments) -> tuple[NumberedRows, Any]:
    """Training data that are no batches, and validation data as arguments."""
    from keras.src.trainers.data_adapters import array_slicing

    x, y, weight, held_out = given.x, given.y, given.sample_weight, given.validation_data
    if isinstance(x, Records):
        if y is not None or weight is not None or given.validation_split:
            raise DataError(
                "ringtrain.fit: got Records with y, sample_weight or validation_split: name the columns in Records"
                " (target, weight), and pass other Records as validation_data"
            )
        if isinstance(held_out, Records) and held_out.class_names != x.class_names:
            raise DataError(
                f"ringtrain.fit: got training data with the classes {x.class_names} and validation data with"
                f" {held_out.class_names}: give both the same class_names"
            )
        return RecordRows(x, given.shuffle, given.class_weight), held_out
    _check_arrays("x", x)
    if given.validation_split and held_out is None:
        (x, y, weight), held_out = array_slicing.train_validation_split(
            (x, y, weight), validation_split=given.validation_split
        )
    return Arrays(x, y, weight, given.class_weight, shuffle=given.shuffle), held_out


def _shortened(split: Any, num_steps: int, batch_size: int) -> Any:
    """The first rows of arrays, or batches of a stream. The last batch keeps the size that the job's last one has."""
    if isinstance(split, Stream):
        split.num_batches = min(split.num_batches, num_steps)
        return split
    if not isinstance(split, NumberedRows):
        return split
    whole, rest = divmod(len(split), batch_size)
    if whole + (rest > 0) <= num_steps:
        return split
    return split.first((num_steps - 1) * batch_size + (rest or batch_size))


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


def why_rank_0(x: Any) -> str:
    """Why rank 0 must read data for all ranks, as a phrase; "": it need not. Collective."""
    import tensorflow as tf

    from ringtrain import hvd

    if not hvd.is_initialized() or hvd.size() == 1 or hvd.elastic.is_on():
        return ""
    pipeline, why = x.batches if isinstance(x, FromRank0) else x, ""
    if isinstance(x, tf.data.Dataset):
        if x in _read_by_rank_0:
            why = "which alone has read it before"
        elif division.caches_in_file(x):
            why = IN_A_FILE
        elif _is_random(x):
            why = "as each iteration of the first batches gives others"
    whys = hvd.allgather_object(why, name="ringtrain_why_rank_0")
    why = next(filter(None, whys), "")
    if isinstance(pipeline, tf.data.Dataset) and (why or x is not pipeline):
        _read_by_rank_0.add(pipeline)
    return why


def _is_random(dataset: Any) -> bool:
    """Returns whether two copies of a pipeline begin with different batches, as shuffles without a seed do."""
    import tensorflow as tf

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


def _held_out(held_out: Any, given: FitArguments, batch_size: int, why_rank_0: str = "") -> Split:
    """Validation data."""
    import keras
    import tensorflow as tf

    from ringtrain import hvd

    if held_out is None:
        return NoSamples()
    steps = given.validation_steps
    if isinstance(held_out, FromRank0) and hvd.size() > 1:
        source = held_out.batches
        of_rank_0 = StreamOfRank0(lambda: _batches(_held_out(source, given, batch_size)))
        of_rank_0.why_rank_0 = why_rank_0
        return of_rank_0
    held_out = held_out.batches if isinstance(held_out, FromRank0) else held_out
    if isinstance(held_out, GeneratorType):
        return _generated(held_out, steps)
    is_endless = isinstance(held_out, tf.data.Dataset) and held_out.cardinality() == tf.data.INFINITE_CARDINALITY
    if not steps and (is_endless or (isinstance(held_out, keras.utils.PyDataset) and held_out.num_batches is None)):
        raise DataError("ringtrain.fit: got held-out data without an end, expected a number of steps with it")
    stream = _stream(held_out, None, None, 1, False, given.seed, take=steps)
    if stream:
        stream.is_held_out = True
        return stream
    samples: NumberedRows
    if isinstance(held_out, Records):
        samples = RecordRows(held_out)
    else:
        _check_arrays("held-out data", held_out)
        samples = Arrays(*keras.utils.unpack_x_y_sample_weight(held_out))
    rows = given.validation_batch_size or batch_size
    return samples.first(steps * rows) if steps else samples


def _shard(function: Callable[[int, int], Any], *how: Any) -> Stream:
    """Stream of the batches that `function`, of rank and number of ranks, returns for this rank alone."""
    from ringtrain import hvd

    result = function(hvd.rank(), hvd.size())
    stream = _stream(result, *how)
    if stream is None:
        raise DataError(
            f"ringtrain.fit: x is a function, which returned {type(result).__name__}, expected the batches of one rank:"
            f" a tf.data.Dataset, a PyDataset or a generator"
        )
    stream.is_shard, stream.kind = True, f"{stream.kind}, a shard of {hvd.size()}"
    stream.may_end_early = False  # on one rank alone, while the others would wait for its gradients
    stream.advice = "batches of a step must have as many rows on every rank: use batch(n, drop_remainder=True)"
    return stream


def _stream(
    x: Any, class_weight: Any, steps: int | None, epochs: int, shuffle: bool, seed: int, take: int | None = None
) -> Stream | None:
    """Stream of a dataset, PyDataset or generator; None for others."""
    import keras
    import tensorflow as tf
    from keras.src.trainers.data_adapters import generator_data_adapter, py_dataset_adapter, tf_dataset_adapter

    from ringtrain import hvd

    if isinstance(x, FromRank0) and hvd.size() > 1:
        return StreamOfRank0(lambda: _batches(_stream(x.batches, class_weight, steps, epochs, shuffle, seed, take)))
    x = x.batches if isinstance(x, FromRank0) else x
    if isinstance(x, tf.data.Dataset):
        dataset = tf_dataset_adapter.TFDatasetAdapter(x, class_weight=class_weight)._dataset
        stream = Stream("tf.data.Dataset", dataset.take(take) if take else dataset, steps, epochs, _batch_size(x))
        stream.is_cut = bool(take) and int(dataset.cardinality()) != take
        return stream
    if isinstance(x, GeneratorType):
        if not steps:
            raise DataError("ringtrain.fit: got a generator without steps_per_epoch, expected the batches of an epoch")
        if class_weight:
            raise DataError("ringtrain.fit: got class_weight with a generator: let it yield (x, y, sample_weight)")
        adapter = generator_data_adapter.GeneratorDataAdapter(x)
        return Stream("generator", adapter.get_tf_dataset(), steps, epochs, num_rows(adapter._first_batches[0]))
    if not isinstance(x, keras.utils.PyDataset):
        return None
    if x.num_batches is None:
        dataset = py_dataset_adapter.PyDatasetAdapter(x, class_weight).get_tf_dataset()
        return Stream("PyDataset", dataset.take(take) if take else dataset, steps, epochs)
    if steps and steps != x.num_batches:
        raise DataError(
            f"ringtrain.fit: got steps_per_epoch {steps} and a PyDataset of {x.num_batches} batches: leave it out"
        )
    return PyDatasetStream(x, class_weight, shuffle, seed, take)


def _generated(held_out: Any, steps: int | None) -> Stream:
    """The first validation batches of a generator, which can be read once, and every epoch needs again."""
    import tensorflow as tf
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    if not steps:
        raise DataError("ringtrain.fit: got a generator of held-out data, expected a number of steps with it")
    dataset = GeneratorDataAdapter(held_out).get_tf_dataset()
    spec, batches = dataset.element_spec, [leaves(batch) for batch in dataset.take(steps)]
    again = tf.data.Dataset.from_generator(lambda: (packed(spec, batch) for batch in batches), output_signature=spec)
    stream = Stream("generator", again.apply(tf.data.experimental.assert_cardinality(len(batches))))
    stream.is_held_out = True
    return stream


def _batches(source: Any) -> Stream:
    if not isinstance(source, Stream):
        raise DataError("from_rank_0: expected batches; of arrays, pass all to fit, on every rank")
    return source


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


def _check_arrays(argument: str, nest: Any) -> None:
    import keras

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
