"""Metrics that do not add to their state are found before the first step, from rows or from their specification."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import ringtrain.hvd as hvd
from ringtrain.errors import ConfigError
from ringtrain.optim import divided, metric_states

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(8, 3)).astype("float32"), DRAW.normal(size=(8, 1)).astype("float32")
UPDATES = {
    "largest": lambda state, errors: keras.ops.maximum(state, keras.ops.max(errors)),
    "last": lambda state, errors: keras.ops.mean(errors),
    "decaying": lambda state, errors: 0.9 * state + keras.ops.sum(errors),
    "largest_of_batches": lambda state, errors: state + keras.ops.max(errors),
    "total": lambda state, errors: state + keras.ops.sum(errors),
}


class Own(keras.metrics.Metric):
    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.state = self.add_variable((), "zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.state.assign(UPDATES[self.name](self.state, keras.ops.abs(y_true - y_pred)))

    def result(self) -> Any:
        return keras.ops.copy(self.state)


def compiled(*metrics: Any) -> keras.Model:
    hvd.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=list(metrics))
    model._symbolic_build(data_batch=(X, Y))
    return model


def test_each_kind_of_state_is_told_apart() -> None:
    model = compiled(*map(Own, UPDATES), "mae", keras.metrics.AUC(from_logits=True))
    seen = metric_states.of_test_step(model, lambda begin, end: (X[begin:end], abs(Y[begin:end]) % 1))
    assert seen is not None
    assert seen.not_over_updates == ["largest", "last", "decaying"]
    assert seen.not_over_rows == ["largest", "last", "largest_of_batches"]
    assert all(not np.any(variable) for variable in model.metrics_variables), "metrics are as before"


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_that_is_no_addition_is_refused_without_data(name: str) -> None:
    model = compiled(Own(name))
    if name in ("largest", "last", "decaying"):
        with pytest.raises(ConfigError, match=f"an update of {name} is no addition"):
            divided.refuse_metrics(model, (X, Y))
    else:
        assert divided.refuse_metrics(model, (X, Y)) == []


def test_a_metric_that_is_never_reset_may_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "reset_state", lambda self: None)
    model = compiled(Own("total"))
    model.metrics[-1].metrics[0].state.assign(5.0)
    assert divided.refuse_metrics(model, (X, Y)) == []
    assert float(model.metrics[-1].metrics[0].state.value) == 5.0


def test_a_metric_that_cannot_be_tested_is_named() -> None:
    assert divided.refuse_metrics(compiled(Own("total")), (X[:, :2], Y)) == ["total"]
