"""Phase and timestamps of a process."""

from __future__ import annotations

import keras
import tensorflow as tf

from ringtrain.hvd.step_timing import PhaseTracker


def test_a_reset_tracker_is_like_new():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    place = PhaseTracker()
    place.watch(model)
    place.enter("save")
    place.waited_s, place.on_change = 3.0, lambda: None
    model.fit(tf.ones((2, 2)), tf.ones((2, 1)), verbose=0)
    assert place.moments()[0]
    place.reset()
    new = PhaseTracker()
    assert (place.phase, place.changes, place.waited_s) == (new.phase, new.changes, new.waited_s)
    assert place.moments() == (0.0, 0.0, 0.0)
