"""Layers, loss, metrics and optimizer of a model in words, by which the runs of one name are compared."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


OF_LOSSES = ("loss", "loss_weights")
OF_METRICS = ("metrics", "weighted_metrics")
NO_SETTINGS = ("name", "dtype", "fn")
"""Keys of a configuration that are counted in a process, follow from the data, or are part of the name."""
NO_SETTINGS_OF_LAYERS = (
    *NO_SETTINGS,
    "seed",
    "trainable",  # as the weights show, which are compared by themselves
    "synchronized",  # an option of the run
    "module",
    "registered_name",
    "build_config",
)
"""The same of a layer."""
WITHOUT_SETTINGS = ("InputLayer", "Lambda")
"""Layers whose configuration is a shape, or code with the path of its file."""


def of_script(model: keras.Model) -> dict[str, str]:
    """Layers, loss, metrics and optimizers of a script's model, which all runs of one name have in common."""
    return {**of_layers(model), **of_compiled(model), **of_optimizers(used_optimizers(model))}


def of_layers(model: keras.Model) -> dict[str, str]:
    """Settings of Keras' own layers, such as an activation or a regularizer, which shapes of weights do not show."""
    from ringtrain.hvd.keras_patches import layers_of
    from ringtrain.hvd.model_parallel.columns import is_part

    described: dict[str, str] = {}
    for layer in layers_of(model):
        if is_part(layer):
            continue  # a run may resume with its model divided or not
        if not type(layer).__module__.startswith("keras.src.layers.") or type(layer).__name__ in WITHOUT_SETTINGS:
            continue
        # What a layer has learned of its data before training may be long, as a vocabulary is.
        if ".preprocessing." not in type(layer).__module__:
            words = _named(type(layer).__name__, _of_layer(_settings(layer)))
            described[f"layer {len(described) + 1}"] = words
    return {"number of layers": str(len(described)), **described}


def _of_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration of a layer without what does not change its result, also inside of other layers and functions."""
    settings = {}
    for name, value in config.items():
        if name in NO_SETTINGS_OF_LAYERS or name.endswith("_initializer") or value is None:
            continue
        settings[name] = _of_layer(value) if isinstance(value, Mapping) else value
    return settings


def used_optimizers(model: keras.Model) -> list[Any]:
    """Optimizers that train a built model, each without its loss scale."""
    from ringtrain import hvd
    from ringtrain.hvd.keras_patches import innermost

    # One that is not built is that of a `compile` without arguments, which the script's own train_step does not use.
    used = [optimizer for optimizer in hvd.optimizers_of(model) if optimizer.built] or [model.optimizer]
    return [innermost(optimizer) for optimizer in used]


def of_compiled(model: keras.Model) -> dict[str, str]:
    """Loss and metrics with which a model was compiled."""
    import keras

    compiled = getattr(model, "_compile_config", None)
    settings = compiled.config if compiled else {}
    described = {name: words_of(settings.get(name)) for name in (*OF_LOSSES, *OF_METRICS)}
    losses = {name: value for name, value in vars(model).items() if isinstance(value, keras.Loss) and name[0] != "_"}
    losses.pop("loss", None)
    if losses:  # of a train_step
        described["losses"] = words_of(losses)
    return described


def of_optimizers(optimizers: Sequence[Any]) -> dict[str, str]:
    """Settings of optimizers, but for the first one's constant learning rate, which is an option of the run."""
    described: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers, start=1):
        settings = _settings(optimizer)
        if number == 1 and not isinstance(settings.get("learning_rate"), Mapping):
            settings.pop("learning_rate", None)
        prefix = "optimizer" if number == 1 else f"optimizer {number}"
        described |= {f"{prefix}.{name}": words_of(value) for name, value in settings.items()}
    return described


def content_of(dataset: tf.data.Dataset) -> str:
    """Checksum of the arrays in memory from which a dataset is made, in any order; "" if there are none.

    Nothing of the dataset is read. Texts do not count, since paths may change.
    """
    checksum, num_arrays, datasets = 0, 0, [dataset]
    while datasets:
        source = datasets.pop()
        datasets += source._inputs()
        for tensor in getattr(source, "_tensors", None) or ():
            is_numeric = tensor.dtype.is_numpy_compatible and tensor.dtype != "string"
            if is_numeric and tensor.shape.rank and tensor.shape.num_elements():
                rows = np.asarray(tensor).reshape(len(tensor), -1).view(np.uint8)
                width = math.gcd(8, rows.shape[1])  # as few and wide numbers as a row has
                total = rows.view(f"u{width}").sum(dtype=np.uint64)
                checksum = zlib.crc32(total.tobytes(), checksum)
                num_arrays += 1
    if not num_arrays:
        return ""
    return f"with checksum {checksum:08x} of {num_arrays} arrays"


def words_of(value: Any) -> str:
    """Describes a setting in the same words in every process; functions and unknown objects by their names."""
    import keras

    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return f"{value:.7g}"
    if value is None or isinstance(value, str | int):
        return str(value)
    if isinstance(value, Mapping):
        if {"class_name", "config"} <= set(value):  # as Keras writes objects
            config = value["config"]
            if isinstance(config, Mapping):
                return _named(value["class_name"], config)
            return words_of(config)
        entries = [f"{key}: {words_of(value[key])}" for key in sorted(value, key=str)]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(words_of, value))}]"
    if isinstance(value, keras.Loss | keras.Metric):
        function = getattr(value, "fn", getattr(value, "_fn", None))
        return _named(_name_of(function or type(value)), _settings(value))
    if isinstance(value, np.ndarray):
        return f"{value.shape} with checksum {zlib.crc32(value.tobytes()):08x}"
    if callable(value):
        return _name_of(value)
    return _name_of(type(value))


def _named(name: str, config: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in config.items() if key not in NO_SETTINGS and value != "sum_over_batch_size"}
    settings = ", ".join(f"{key}={words_of(value)}" for key, value in sorted(shown.items()))
    return f"{name}({settings})" if settings else name


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _settings(thing: Any) -> dict[str, Any]:
    """Configuration of an optimizer, loss or metric; {} if its class cannot give it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about lambdas, which nothing loads again
            config = dict(thing.get_config())
    except Exception:  # of the script's own code
        return {}
    return {name: value for name, value in config.items() if name not in NO_SETTINGS}
