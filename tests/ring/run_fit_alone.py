"""One process: `ringtrain.fit` and Keras' `fit` give the same weights, history and callback events, bit for bit."""

from __future__ import annotations

import functools
import sys
from typing import Any

import keras
import numpy as np

import ringtrain
from ringtrain.config import Config, RunConfig

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(100, 6)), RANDOM.normal(size=(100, 3))
WORDS = RANDOM.integers(0, 9, (96, 6))
"""of which each occurs several times in a batch"""


class Events(keras.callbacks.Callback):
    """Records each call, with its number and the names of its logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        for when in ("train", "test", "epoch", "train_batch", "test_batch"):
            for edge in ("begin", "end"):
                name = f"on_{when}_{edge}"
                setattr(self, name, functools.partial(self.record, name))

    def record(self, name: str, *number: Any, logs: Any = None) -> None:
        self.seen.append(
            (name, *(one if isinstance(one, int) else sorted(one or {}) for one in number), sorted(logs or {}))
        )


def fitted(fit: Any, build: Any, x: Any) -> tuple[list[Any], dict[str, list[float]], list[Any]]:
    model, events, held_out = build(), Events(), (x[: len(x) // 2], Y[: len(x) // 2])
    history = fit(model, x, validation_data=held_out, callbacks=[events], batch_size=16, epochs=3, verbose=0)
    return model.get_weights(), history.history, events.seen


def dense(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    model.compile(metrics=["mae"], **options)
    return model


def of_words(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(9, 8), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def main() -> None:
    options = Config(run=RunConfig(directory=sys.argv[1]))
    adam = keras.optimizers.Adam
    for x, build in (
        (X, lambda: dense(optimizer=adam(0.01), loss="mse")),
        (X, lambda: dense(optimizer=adam(0.01), loss="mse", steps_per_execution=3)),
        (X, lambda: dense(optimizer=adam(0.01, use_ema=True), loss="mse", steps_per_execution=3)),
        (WORDS, lambda: of_words(adam(0.01))),
        (WORDS, lambda: of_words(adam(0.01, global_clipnorm=0.01))),
    ):
        y = Y[: len(x)]

        def ours(model: keras.Model, x: Any, **arguments: Any) -> Any:
            return ringtrain.fit(model, x, y, shuffle=False, options=options, **arguments)  # noqa: B023

        def keras_(model: keras.Model, x: Any, **arguments: Any) -> Any:
            return model.fit(x, y, shuffle=False, **arguments)  # noqa: B023

        results, expected = fitted(ours, build, x), fitted(keras_, build, x)
        for weight, other in zip(results[0], expected[0], strict=True):
            np.testing.assert_array_equal(weight, other)
        assert results[1] == expected[1], (results[1], expected[1])
        events = zip(results[2], expected[2], strict=False)
        assert results[2] == expected[2], [pair for pair in events if pair[0] != pair[1]][:3]
    print("bit for bit")


if __name__ == "__main__":
    main()
