"""Training and validation data from the arguments of `ringtrain.fit`: arrays, or a stream of batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from ringtrain.data.arrays import Arrays, NoSamples
from ringtrain.data.dataset import Split
from ringtrain.data.streams import PyDatasetStream, Stream, num_rows
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """Arguments of `ringtrain.fit`, which describes them."""

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: str | int
    callbacks: Sequence[keras.callbacks.Callback]
    validation_split: float
    validation_data: Any
    shuffle: bool | str
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Collection[int]
    batch_per_rank: bool
    seed: int
    resume: str


def inputs(given: FitArguments, batch_size: int) -> tuple[Arrays | Stream, Split]:
    """Returns training and validation data; raises DataError for what `fit` cannot divide over ranks."""
    from keras.src.trainers.data_adapters import array_slicing

    stream = _stream(
        given.x, given.class_weight, given.steps_per_epoch, given.epochs, given.shuffle is True, given.seed
    )
    if stream:
        _check_stream(stream, given)
        return stream, _validation(given.validation_data, given, batch_size)
    if given.steps_per_epoch:
        raise DataError(
            "ringtrain.fit: got steps_per_epoch, which arrays have by themselves: leave it out, or pass fewer rows"
        )
    _check_arrays("x", given.x)
    x, y, weight, held_out = given.x, given.y, given.sample_weight, given.validation_data
    if given.validation_split and held_out is None:
        (x, y, weight), held_out = array_slicing.train_validation_split(
            (x, y, weight), validation_split=given.validation_split
        )
    return Arrays(x, y, weight, given.class_weight, shuffle=given.shuffle is True), _validation(
        held_out, given, batch_size
    )


def _validation(held_out: Any, given: FitArguments, batch_size: int) -> Split:
    import keras
    import tensorflow as tf

    if held_out is None:
        return NoSamples()
    steps = given.validation_steps
    if isinstance(held_out, GeneratorType):
        return _read_once(held_out, steps)
    is_endless = isinstance(held_out, tf.data.Dataset) and held_out.cardinality() == tf.data.INFINITE_CARDINALITY
    if not steps and (is_endless or (isinstance(held_out, keras.utils.PyDataset) and held_out.num_batches is None)):
        raise DataError("ringtrain.fit: got validation_data without an end, expected validation_steps with it")
    if stream := _stream(held_out, None, None, 1, False, given.seed, take=steps):
        stream.is_held_out = True
        return stream
    _check_arrays("validation_data", held_out)
    arrays = Arrays(*keras.utils.unpack_x_y_sample_weight(held_out))
    rows = given.validation_batch_size or batch_size
    return arrays.first(steps * rows) if steps else arrays


def _stream(
    x: Any, class_weight: Any, steps: int | None, epochs: int, shuffle: bool, seed: int, take: int | None = None
) -> Stream | None:
    """Stream of a dataset, PyDataset or generator; None for others."""
    import keras
    import tensorflow as tf
    from keras.src.trainers.data_adapters import generator_data_adapter, py_dataset_adapter, tf_dataset_adapter

    if isinstance(x, tf.data.Dataset):
        dataset = tf_dataset_adapter.TFDatasetAdapter(x, class_weight=class_weight)._dataset
        return Stream("tf.data.Dataset", dataset.take(take) if take else dataset, steps, epochs, _batch_size(x))
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


def _read_once(generator: Any, steps: int | None) -> Stream:
    """Validation batches of a generator, which every epoch needs again."""
    import tensorflow as tf
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    if not steps:
        raise DataError("ringtrain.fit: got a generator as validation_data, expected validation_steps with it")
    dataset = GeneratorDataAdapter(generator).get_tf_dataset()
    batches = list(dataset.take(steps))
    again = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=dataset.element_spec)
    return Stream("generator", again.apply(tf.data.experimental.assert_cardinality(len(batches))))


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
            f" dicts and tuples), a tf.data.Dataset, a PyDataset or a generator"
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
