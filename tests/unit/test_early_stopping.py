"""Epochs without a better value are counted as Keras' own callbacks count them."""

from __future__ import annotations

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtrain.run.stopping import lower_is_better, plateaus


class Stopped:
    """All that Keras' EarlyStopping asks of a model."""

    stop_training = False


@given(
    values=st.lists(st.integers(0, 6), max_size=12),
    patience=st.integers(1, 4),
    mode=st.sampled_from(["min", "max"]),
    min_delta=st.sampled_from([0, 1]),
)
def test_training_ends_in_the_epoch_in_which_keras_would_end_it(values, patience, mode, min_delta):
    callback = keras.callbacks.EarlyStopping("metric", min_delta=min_delta, patience=patience, mode=mode)
    model = Stopped()
    callback.set_model(model)
    callback.on_train_begin()
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"metric": value})
        seen = values[: epoch + 1]
        assert (plateaus(seen, patience, mode == "min", min_delta) > 0) is model.stop_training, seen
        if model.stop_training:
            return


@pytest.mark.parametrize(("values", "times"), [([], 0), ([3], 0), ([3, 3, 3], 1), ([3, 3, 3, 3, 3], 2), ([3, 3, 2], 0)])
def test_it_is_counted_anew_each_time(values, times):
    assert plateaus(values, 2, True, 0) == times


def test_the_direction_follows_from_the_name():
    assert all(map(lower_is_better, ("loss", "test_loss", "mean_squared_error")))
    assert not any(map(lower_is_better, ("accuracy", "test_top_5")))
