"""A script of one's own: two inputs, two outputs, any loss. `ringtrain.fit(model, ...)` instead of `model.fit(...)`.

    ringtrain launch -np 2 -- python examples/own_fit.py --name two-outputs

It also runs by itself, with one process, and gives the same model. Start it again to see that the run is complete.
"""

import argparse

import keras
import numpy as np

import ringtrain


def data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Sequences of 1 to 10 steps, padded with zeros, and a limit: the sums so far, and whether the last exceeds it."""
    random = np.random.default_rng(0)
    steps = np.arange(10) < random.integers(1, 11, 2000)[:, None]
    sequences = random.normal(size=(2000, 10, 1)) * steps[..., None]
    limits = random.normal(size=(2000, 1))
    sums = np.cumsum(sequences, axis=1)
    return {"sequence": sequences, "limit": limits}, {"sums": sums, "above": (sums[:, -1] > limits).astype(float)}


def build() -> keras.Model:
    sequence, limit = keras.Input((None, 1), name="sequence"), keras.Input((1,), name="limit")
    hidden = keras.layers.GRU(16, return_sequences=True)(keras.layers.Masking()(sequence))
    sums = keras.layers.Dense(1, name="sums")(hidden)
    last = keras.layers.GRU(8)(hidden)
    above = keras.layers.Dense(1, activation="sigmoid", name="above")(keras.layers.Concatenate()([last, limit]))
    model = keras.Model({"sequence": sequence, "limit": limit}, {"sums": sums, "above": above})
    losses = {"sums": "mse", "above": "binary_crossentropy"}
    model.compile(keras.optimizers.Adam(0.01), losses, metrics={"above": ["accuracy", "auc"]})
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="", help="folder of the run in runs/; empty: its time")
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    x, y = data()
    history = ringtrain.fit(build(), x, y, name=options.name, batch_size=64, epochs=4, validation_split=0.1)
    if ringtrain.hvd.rank() == 0:
        print(f"AUC {history.history['val_above_auc'][-1]:.3f}, files in {history.run}")
