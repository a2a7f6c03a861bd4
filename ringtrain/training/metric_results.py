"""Results of a model's metrics, and which logs of a step they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from ringtrain.hvd.keras_patches import replaced
from ringtrain.hvd.train_step import TrainStep


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Logs without dictionaries in them, as Keras passes them on: a step may return that of all compiled metrics."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            flat |= flat_logs(value)
        else:
            flat[name] = value
    return flat


def logs_of(model: keras.Model, step: TrainStep, rows: Any, metric_of: dict[str, str]) -> dict[str, Any]:
    """Logs of a step with some rows. Notes in `metric_of` which of them are results of metrics, by whatever name."""
    results: list[tuple[Any, keras.Metric, str]] = []

    def noting(metric: keras.Metric) -> Any:
        original = metric.result

        def result() -> Any:
            value = original()
            results.extend((of_metric, metric, name) for name, of_metric in _by_name(metric, value).items())
            return value

        return result

    # A log is a metric's if it is the very tensor that `result` has returned: equal values would prove nothing.
    with replaced([(metric, {"result": noting(metric)}) for metric in model.metrics]):
        logs = flat_logs(step(rows))
    known = _results(model)
    for log, value in logs.items():
        for of_metric, metric, name in results:
            if of_metric is value and (id(metric), name) in known:
                metric_of[log], _ = known[id(metric), name]
    return logs


def _by_name(metric: keras.Metric, result: Any) -> dict[str, Any]:
    """Results of a metric by name: one, or those of a dictionary."""
    if isinstance(result, Mapping):
        return flat_logs(result)
    return {metric.name: result}


def _results(model: keras.Model) -> dict[tuple[int, str], tuple[str, Any]]:
    """Results of a model's metrics with their names in `metric_results`, by the metric's id and its own name."""
    found = []
    for metric in model.metrics:
        found += [(metric, name, value) for name, value in _by_name(metric, metric.result()).items()]
    last = {name: metric for metric, name, _ in found}
    results = {}
    for number, (metric, name, value) in enumerate(found, 1):
        unique = name
        if last[name] is not metric:
            unique = f"{name} (result {number})"
        results[id(metric), name] = unique, value
    return results


def metric_results(model: keras.Model) -> dict[str, Any]:
    """Results of a model's metrics by name, and what a `compute_metrics` of its own makes of their states."""
    # Of several metrics of one name, only the last has it here, as in Keras; the others are numbered.
    results = dict(_results(model).values()) | flat_logs(model.get_metrics_result())
    if type(model).compute_metrics is keras.Model.compute_metrics:
        return results
    unchanged = {"update_state": lambda *_, **__: None}
    try:
        with replaced([(metric, unchanged) for metric in model.metrics]):
            return results | flat_logs(model.compute_metrics(None, None, None, None))
    except Exception:  # the model's own code: it needs the batch
        return results
