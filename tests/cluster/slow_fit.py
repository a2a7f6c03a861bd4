"""A script with `ringtrain.fit` whose steps take a while: slow_fit.py EPOCHS STEP_S OPTIONS, of 15 steps an epoch."""

import json
import sys
import time

import keras
import numpy as np

import ringtrain

epochs, step_s, options = int(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
keras.utils.set_random_seed(1)
draw = np.random.default_rng(1)
x, y = draw.normal(size=(300, 8)).astype("float32"), draw.normal(size=(300, 1)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
model.compile("adam", "mse")
slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(step_s))
ringtrain.fit(model, x, y, name="run", batch_size=20, epochs=epochs, verbose=0, callbacks=[slow], options=options)
