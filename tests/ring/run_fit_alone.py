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


def fitted(fit: Any, build: Any) -> tuple[list[Any], dict[str, list[float]], list[Any]]:
    model, events = build(), Events()
    history = fit(model, validation_data=(X[:40], Y[:40]), callbacks=[events], batch_size=16, epochs=3, verbose=0)
    return model.get_weights(), history.history, events.seen


def main() -> None:
    for steps, ema in ((1, False), (3, False), (3, True)):

        def build() -> keras.Model:
            keras.utils.set_random_seed(3)
            layers = [keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
            adam = keras.optimizers.Adam(0.01, use_ema=ema)  # noqa: B023
            model.compile(adam, "mse", metrics=["mae"], steps_per_execution=steps)  # noqa: B023
            return model

        options = Config(run=RunConfig(directory=sys.argv[1]))
        ours = fitted(lambda m, **rest: ringtrain.fit(m, X, Y, shuffle=False, options=options, **rest), build)  # noqa: B023
        keras_ = fitted(lambda m, **rest: m.fit(X, Y, shuffle=False, **rest), build)
        for one, other in zip(ours[0], keras_[0], strict=True):
            np.testing.assert_array_equal(one, other)
        assert ours[1] == keras_[1], (ours[1], keras_[1])
        assert ours[2] == keras_[2], [pair for pair in zip(ours[2], keras_[2], strict=False) if pair[0] != pair[1]][:3]
    print("bit for bit")


if __name__ == "__main__":
    main()
