"""What all runs of one name have in common, in words: options, data, layers, loss, metrics and optimizer."""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ringtrain import hvd
from ringtrain.checkpoint.checkpoint import Checkpoint
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import OPTIMIZERS, Config, option_types, value_of
from ringtrain.errors import ConfigError
from ringtrain.hvd.keras_patches import innermost, layers_of
from ringtrain.hvd.model_parallel.columns import is_part

if TYPE_CHECKING:
    import tensorflow as tf

FREE = (
    "run.",
    "checkpoint.",
    "device.",
    "health.",
    "elastic.",
    "tracking.",
    "chaos",
    "data.dir",
    "data.file",
    "strategy.",
    "hvd.groups",
    "train.epochs",
    "train.batch_size",
    "train.max_time_s",
    "train.check_every_steps",
    "train.patience",
    "model.split",
    "optimizer.learning_rate",  # with the options that scale it: the resulting rate is compared
    "optimizer.reference_batch_size",
    "schedule.warmup_start",
)
"""Beginnings of options that may change on a resume. The others affect the result."""
NO_SETTINGS = (
    "name",
    "dtype",
    "fn",
    "seed",
    "trainable",
    "synchronized",
    "module",
    "registered_name",
    "build_config",
)
"""Keys of a configuration that are counted in a process, follow from the data or an option, or are part of the name."""
WITHOUT_SETTINGS = ("InputLayer", "Lambda")
"""Layers whose configuration is a shape, or code with the path of its file."""


def in_common(
    config: Config, numbers: Numbers, checksums: Mapping[str, str], of_name: Collection[str]
) -> dict[str, str]:
    """Returns what all runs of one name have in common, by name. `of_name`: names of these checksums."""
    common = {"global batch (batch_size x ranks)": str(numbers.global_batch_size)}
    for option in option_types():
        shapes_rates = option == "train.epochs" and config.schedule.name in ("cosine", "polynomial")
        if shapes_rates or not option.startswith(FREE):
            common[option] = str(value_of(config, option))
    # Rates may follow from other options and numbers of ranks, up to rounding.
    common["learning rate"] = f"{numbers.learning_rate:.9g}"
    common["first learning rate"] = f"{numbers.initial_learning_rate:.9g}"
    common["training samples"] = str(numbers.num_train)
    if _is_of_a_script(config):
        common["steps of an epoch"] = str(numbers.steps_per_epoch)
    return common | {name: text for name, text in checksums.items() if name in of_name}


def require_same(newest: Checkpoint, common: Mapping[str, str], config: Config, numbers: Numbers) -> None:
    """Raises ConfigError if a checkpoint is of a run that has not this in common with the present one."""
    before = newest.manifest["in_common"]
    then = "give fit another name" if _is_of_a_script(config) else "give the run another --run.name"
    for name, current in common.items():
        if before.get(name, current) == current:
            continue
        what = f"{name} {before[name]}, this run has {current}"
        if "checksum" in current:
            what = f"another {name.partition(' (')[0]}"
        raise ConfigError(
            f"{newest.folder}: was made with {what}: {then}; to train its weights further, begin with those of its"
            f" model.keras"
        )
    # Accumulated gradients are those of a rank's rows.
    then_ranks, accumulated = newest.manifest["num_ranks"], numbers.accumulation_steps
    is_whole = config.train.virtual_ranks or not newest.global_step % accumulated
    if not is_whole and then_ranks != numbers.num_ranks:
        raise ConfigError(
            f"{newest.folder}: was made by {then_ranks} ranks between two updates (step {newest.global_step},"
            f" optimizer.accumulation_steps {accumulated}): resume with {then_ranks} ranks, or from a checkpoint of an"
            f" epoch's end"
        )


def _is_of_a_script(config: Config) -> bool:
    """Returns whether `ringtrain.fit` has made a configuration: its optimizer is the name of a class."""
    return config.optimizer.name not in OPTIMIZERS


def of_script(model: keras.Model) -> dict[str, str]:
    """Layers, loss, metrics and optimizers of a script's model."""
    described = {**of_layers(model), **of_compiled(model)}
    for number, optimizer in enumerate(used_optimizers(model), start=1):
        settings = _settings(optimizer)
        if number == 1 and not isinstance(settings.get("learning_rate"), Mapping):
            settings.pop("learning_rate", None)  # a number of the run, which callbacks may have changed here
        described[f"optimizer {number}"] = f"{type(optimizer).__name__}({_entries(settings)})"
    return described


def of_layers(model: keras.Model) -> dict[str, str]:
    """Settings of Keras' own layers, such as an activation or a regularizer, which shapes of weights do not show."""
    described: dict[str, str] = {}
    for layer in layers_of(model):
        kind, module = type(layer).__name__, type(layer).__module__
        # A run may resume with its model divided or not. What a layer has learned of its data may be long.
        if is_part(layer) or not module.startswith("keras.src.layers.") or kind in WITHOUT_SETTINGS:
            continue
        if ".preprocessing." not in module:
            described[f"layer {len(described) + 1}"] = f"{kind}({_entries(_settings(layer))})"
    return {"number of layers": str(len(described)), **described}


def used_optimizers(model: keras.Model) -> list[Any]:
    """Optimizers that train a built model, each without its loss scale."""
    # One that is not built is that of a `compile` without arguments, which the script's own train_step does not use.
    used = [optimizer for optimizer in hvd.optimizers_of(model) if optimizer.built] or [model.optimizer]
    return [innermost(optimizer) for optimizer in used]


def of_compiled(model: keras.Model) -> dict[str, str]:
    """Loss and metrics with which a model was compiled."""
    compiled = getattr(model, "_compile_config", None)
    settings = compiled.config if compiled else {}
    names = ("loss", "loss_weights", "metrics", "weighted_metrics")
    described = {name: words_of(settings.get(name)) for name in names}
    losses = {name: value for name, value in vars(model).items() if isinstance(value, keras.Loss) and name[0] != "_"}
    losses.pop("loss", None)
    if losses:  # of a train_step
        described["losses"] = words_of(losses)
    return described


def content_of(dataset: tf.data.Dataset) -> str:
    """Checksum of the arrays that a dataset, which is not read, is made from, in any order; "" if there are none."""
    checksum, num_arrays, datasets = 0, 0, [dataset]
    while datasets:
        source = datasets.pop()
        datasets += source._inputs()
        for tensor in getattr(source, "_tensors", None) or ():
            is_numeric = tensor.dtype.is_numpy_compatible and tensor.dtype != "string"  # paths may change
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
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return f"{value:.7g}"
    if value is None or isinstance(value, str | int):
        return str(value)
    if isinstance(value, Mapping):
        if not {"class_name", "config"} <= set(value):
            return f"{{{_entries(value, ': ')}}}"
        if isinstance(value["config"], Mapping):  # as Keras writes objects
            return f"{value['class_name']}({_entries(value['config'])})"
        return words_of(value["config"])
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(words_of, value))}]"
    if isinstance(value, keras.Loss | keras.Metric):
        function = getattr(value, "fn", getattr(value, "_fn", None))
        return f"{words_of(function or type(value))}({_entries(_settings(value))})"
    if isinstance(value, np.ndarray):
        return f"{value.shape} with checksum {zlib.crc32(value.tobytes()):08x}"
    return str(getattr(value, "__name__", type(value).__name__))


def _settings(thing: Any) -> dict[str, Any]:
    """Configuration of a layer, an optimizer, a loss or a metric; {} if its class cannot give it."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # of the script's own code
        warnings.simplefilter("ignore")  # about lambdas, which nothing loads again
        return dict(thing.get_config())
    return {}


def _entries(config: Mapping[str, Any], equals: str = "=") -> str:
    entries = []
    for key, value in sorted(config.items(), key=lambda item: str(item[0])):
        if value is not None and key not in NO_SETTINGS and not str(key).endswith("_initializer"):
            entries.append(f"{key}{equals}{words_of(value)}")
    return ", ".join(entries)
