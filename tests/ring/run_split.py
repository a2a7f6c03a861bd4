"""Cases of hvd.split on three logical CPUs, in one process; prints "cases N" when all hold.

python tests/ring/run_split.py
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers
from tensorflow.python.eager import context

from ringtrain import hvd
from ringtrain.config.sections import DeviceConfig
from ringtrain.training import devices

ROWS, PARTS = 48, 4
X = np.random.default_rng(0).normal(size=(ROWS, 8, 8, 1))
Y = np.random.default_rng(1).integers(0, 5, ROWS)
Weights = list[np.ndarray]


def branched() -> keras.Model:
    """A block with a sum, batch norm, dropout, and regularizers in the first and the last stage."""
    inputs = keras.Input((8, 8, 1))
    first = layers.Conv2D(4, 3, padding="same", activation="relu", kernel_regularizer="l2", name="first")(inputs)
    second = layers.Conv2D(4, 3, padding="same", activity_regularizer="l2", name="second")(first)
    tensor = layers.BatchNormalization(name="norm")(layers.Add(name="sum")([first, second]))
    tensor = layers.Dense(24, activation="relu", name="wide")(layers.Flatten(name="flat")(tensor))
    tensor = layers.Dropout(0.3, seed=1, name="drop")(tensor)
    return keras.Model(inputs, layers.Dense(5, kernel_regularizer="l2", name="last")(tensor))


def dense() -> keras.Model:
    hidden = [layers.Dense(width, activation="tanh", name=f"dense-{width}") for width in (32, 24, 16)]
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Flatten(name="flat"), *hidden, layers.Dense(5, name="last")]
    )


def halves() -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    model = dense()
    keras.config.set_dtype_policy("float32")
    return model


def several() -> keras.Model:
    """Two inputs and two outputs, by name."""
    right, left = keras.Input((8, 8, 1), name="right"), keras.Input((3,), name="left")
    tensor = layers.Concatenate(name="both")([layers.Flatten(name="flat")(right), left])
    tensor = layers.Dense(9, activation="relu", name="wide")(tensor)
    heads = {"small": layers.Dense(1, name="small")(tensor), "large": layers.Dense(2, name="large")(tensor)}
    return keras.Model({"right": right, "left": left}, heads)


def compiled(make: Callable[[], keras.Model], optimizer: Callable[[], Any], layers: int, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = make()
    hvd.split(model, layers, **{"micro_batches": PARTS, **options})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(optimizer()), loss, metrics=["accuracy"])
    return model


def trained(model: keras.Model, epochs: int = 2) -> tuple[Weights, Any, Any]:
    logs = model.fit(X, Y, batch_size=ROWS // 2, epochs=epochs, verbose=0, shuffle=False).history
    return model.get_weights(), logs, model.evaluate(X, Y, verbose=0)


def apart(ours: Weights, others: Weights) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(ours, others, strict=True))


def divided() -> keras.Model:
    """Convolutions and a pair of Dense layers by columns and rows; softmax of a whole output; what stays whole."""
    inputs = keras.Input((8, 8, 1))
    tensor = layers.Conv2D(6, 3, padding="same", activation="relu", kernel_regularizer="l2", name="conv")(inputs)
    tensor = layers.Conv2D(7, 3, strides=2, activation="tanh", name="conv-2")(tensor)
    tensor = layers.Flatten(name="flat")(layers.BatchNormalization(name="norm")(tensor))
    tensor = layers.Dense(20, activation="gelu", name="wide")(tensor)
    tensor = layers.Dense(12, activation="softmax", name="soft")(tensor)
    tensor = layers.Dense(9, activation="relu", use_bias=False, name="plain")(layers.Dropout(0.2, seed=1)(tensor))
    tensor = layers.Dense(8, kernel_constraint="non_neg", name="bound")(tensor)
    return keras.Model(inputs, layers.Dense(5, name="last")(tensor))


def rows_of_words() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    words = keras.ops.cast(keras.ops.abs(inputs[:, :, 0, 0]) * 4, "int32")
    tensor = layers.Embedding(30, 7, name="words")(words)
    tensor = layers.GlobalAveragePooling1D(name="mean")(layers.Dense(6, activation="relu", name="each")(tensor))
    return keras.Model(inputs, layers.Dense(5, name="last")(tensor))


def by_columns(make: Callable[[], keras.Model], num: int) -> tuple[keras.Model, list[Weights]]:
    """The trained model, and its weights and slots as the whole model has them."""
    keras.config.set_floatx("float64")
    model = compiled(make, lambda: keras.optimizers.Adam(0.01), 1, columns=num)
    trained(model)
    keras.config.set_floatx("float32")
    wholes = [hvd.whole_variables(each) for each in (model.weights, model.optimizer.variables)]
    return model, [[one.numpy() for one in each] for each in wholes]


def columns_have_the_weights_and_slots_of_the_whole(make: Callable[[], keras.Model], *numbers: int) -> None:
    _, whole = by_columns(make, 1)
    for num in numbers:
        model, found = by_columns(make, num)
        assert all(apart(one, other) < 1e-12 for one, other in zip(found, whole, strict=True))
        kinds = {"/".join(layers) for _, layers in hvd.columns_of(model).values()}
        words = {"words (columns)/each (rows)/last (columns)"}
        divided = "conv (columns)/conv-2 (rows)/{}wide (columns)/soft (rows)/plain (columns){}/last (columns)"
        assert kinds == (
            words if make is rows_of_words else {divided.format(*x) for x in (("norm/", "/bound"), ("", ""))}
        )
        for one in (*model.trainable_variables, *model.optimizer.variables[2:]):
            part = re.search(r"_(columns|rows)(\d)of", one.path)
            assert one.value.device.endswith(f"CPU:{part[2] if part else 0}"), one.path


def a_saved_model_is_whole_and_loads_into_parts() -> None:
    model, (weights, _) = by_columns(divided, 2)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        loaded = keras.models.load_model(f"{folder}/model.keras", compile=False)
        assert apart(loaded.get_weights(), weights) == 0
        assert apart([loaded.predict(X, verbose=0)], [model.predict(X, verbose=0)]) < 1e-6
        model.save_weights(f"{folder}/model.weights.h5")
        other = compiled(divided, lambda: keras.optimizers.Adam(0.01), 1, columns=3)
        other.load_weights(f"{folder}/model.weights.h5")
        assert apart([one.numpy() for one in hvd.whole_variables(other.weights)], weights) < 1e-6


def stages_have_the_bits_of_one(make: Any, optimizer: Any) -> None:
    one, *others = (trained(compiled(make, optimizer, num)) for num in (1, 2, 3))
    for weights, logs, evaluated in others:
        assert apart(one[0], weights) == 0
        assert np.allclose([*logs.values()], [*one[1].values()], rtol=1e-6), logs
        assert np.allclose(evaluated, one[2], rtol=1e-6), evaluated


def named_inputs_and_outputs() -> None:
    x, y = {"left": X[:, :3, 0, 0], "right": X}, {"large": X[:, :2, 1, 0], "small": X[:, 2:3, 1, 0]}
    ended = []
    for num in (1, 2):
        keras.utils.set_random_seed(3)
        model = several()
        hvd.split(model, num, PARTS)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), {"small": "mse", "large": "mae"})
        model.fit(x, y, sample_weight=np.linspace(0, 1, ROWS), batch_size=20, verbose=0, shuffle=False)
        ended.append([*model.get_weights(), *model.predict(x, verbose=0).values()])
    assert apart(*ended) == 0


def one_stage_is_keras_with_the_mean_of_micro_batches() -> None:
    keras.config.set_floatx("float64")
    ours, model = compiled(dense, lambda: keras.optimizers.SGD(0.1), 1), dense()
    model.set_weights(ours.get_weights())
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(X, Y, batch_size=ROWS // 2, epochs=2, verbose=0, shuffle=False)
    weights, _, _ = trained(ours)
    assert apart(weights, dense().get_weights()) > 0 and apart(weights, model.get_weights()) < 1e-12
    keras.config.set_floatx("float32")


def all_of_a_part_runs_on_its_device() -> None:
    """Matrix products of both directions, slots and updates, as executed; control: one stage, on one device."""
    for ways, products, updates in (
        ({}, {"CPU:0": 11}, {"CPU:0": 8}),
        ({"layers": 2}, {"CPU:0": 2, "CPU:1": 9}, {"CPU:0": 2, "CPU:1": 6}),
        ({"columns": 2}, {"CPU:0": 11, "CPU:1": 11}, {"CPU:0": 8, "CPU:1": 6}),
    ):
        model = compiled(dense, lambda: keras.optimizers.SGD(0.1, momentum=0.9), **{"layers": 1, **ways})
        context.enable_run_metadata()
        model.train_on_batch(X, Y)
        graphs = context.context().export_run_metadata().partition_graphs
        nodes = [node for graph in graphs for node in graph.node if "/" in node.name]  # of the step's graph
        context.disable_run_metadata()
        found = Counter(node.device[-5:] for node in nodes if "MatMul" in node.op)
        assert found == {device: PARTS * number for device, number in products.items()}, (ways, found)
        found = Counter(node.device[-5:] for node in nodes if node.op == "ResourceApplyKerasMomentum")
        assert found == updates, (ways, found)
        assert Counter(one.value.device[-5:] for one in model.optimizer.momentums) == updates


CASES: dict[str, Callable[[], None]] = {
    "branched": lambda: stages_have_the_bits_of_one(branched, lambda: keras.optimizers.Adam(0.01)),
    "columns": lambda: columns_have_the_weights_and_slots_of_the_whole(divided, 2, 3),
    "columns of words": lambda: columns_have_the_weights_and_slots_of_the_whole(rows_of_words, 2),
    "momentum": lambda: stages_have_the_bits_of_one(
        dense, lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0)
    ),
    "loss scale": lambda: stages_have_the_bits_of_one(
        halves, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    ),
    **{
        one.__name__: one
        for one in (
            named_inputs_and_outputs,
            one_stage_is_keras_with_the_mean_of_micro_batches,
            all_of_a_part_runs_on_its_device,
            a_saved_model_is_whole_and_loads_into_parts,
        )
    },
}


def main() -> None:
    devices.pin(0, 1, DeviceConfig(threads=1), {}, 3)
    assert devices.pin_late(0, 1, DeviceConfig(threads=1)).num_devices == 3, "as ringtrain.fit does later"
    hvd.init()
    for name, case in {n: c for n, c in CASES.items() if not sys.argv[1:] or n in sys.argv[1:]}.items():
        keras.utils.clear_session()
        try:
            case()
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    print(f"cases {len(CASES)}")


if __name__ == "__main__":
    main()
