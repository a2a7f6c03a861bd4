"""Early stopping, a lower learning rate on a plateau, and the end of a run at a target accuracy.

All are pure functions of the metric's values so far, one per epoch. Every checkpoint holds these values, so a resumed
run makes the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from ringtrain import hvd
from ringtrain.config import Config, lower_is_better, nearest
from ringtrain.derived import Numbers
from ringtrain.errors import ConfigError
from ringtrain.optim import optimizers
from ringtrain.run.resume import Clock, Start
from ringtrain.run.stopping import StopTogether

ACCURACY = "test_accuracy"


def plateaus(values: Sequence[float], patience: int, lower_is_better: bool, min_delta: float) -> int:
    """Counts how often `patience` epochs in a row brought no improvement over `min_delta`, as Keras' callbacks do."""
    best, waited, reached = math.inf, 0, 0
    for value in values:
        signed = value if lower_is_better else -value
        waited += 1
        if signed < best - min_delta:
            best, waited = signed, 0
        elif waited >= patience:
            waited, reached = 0, reached + 1
    return reached


class Plateau(keras.callbacks.Callback):
    """Applies patience, plateau_patience and target_accuracy. Belongs after `Evaluation`, before `StopTogether`."""

    def __init__(self, config: Config, numbers: Numbers, clock: Clock, stop: StopTogether, start: Start) -> None:
        super().__init__()
        self.config = config
        self.full_rate = numbers.learning_rate
        self.clock = clock
        self.stop = stop
        self.values = list(start.monitored)
        stop.stopped_by = self._over(start.metrics.get(ACCURACY, 0.0))

    def on_train_begin(self, logs: Any = None) -> None:
        self._set_rate()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if not self.clock.epoch_complete:
            return
        # Rank 0's values for all ranks, so that all decide the same even if a callback changes one rank's logs.
        train, names = self.config.train, list(logs or {})
        own = [
            None if (value := (logs or {}).get(name)) is None else float(value) for name in (train.monitor, ACCURACY)
        ]
        value, accuracy = hvd.broadcast_object(own, 0, name="ringtrain_monitor")
        if value is None and (train.patience or self.config.schedule.plateau_patience):
            raise ConfigError(
                f"train.monitor: got {train.monitor}, expected a metric of this model: {', '.join(names)}"
            )
        if accuracy is None and train.target_accuracy:
            raise ConfigError(
                f"train.target_accuracy: this model has no {ACCURACY}, only {', '.join(names)}: leave it out"
            )
        self.values += [] if value is None else [value]
        self._set_rate()
        if why := self._over(accuracy or 0.0):
            self.stop.want(why)

    @property
    def share(self) -> float:
        """Remaining fraction of the learning rate."""
        patience = self.config.schedule.plateau_patience
        return self.config.schedule.plateau_factor ** self._plateaus(patience) if patience else 1.0

    def _set_rate(self) -> None:
        if self.config.schedule.plateau_patience:
            optimizers.set_share(self.model.optimizer, self.full_rate, self.share)

    def _over(self, accuracy: float) -> str:
        return reason_to_stop(self.config, self.values, accuracy)

    def _plateaus(self, patience: int) -> int:
        train = self.config.train
        return plateaus(self.values, patience, lower_is_better(train.monitor), train.min_delta)


def reason_to_stop(config: Config, values: Sequence[float], accuracy: float) -> str:
    """Returns the option that ends training now, or "". `values`: train.monitor per epoch; `accuracy`: on test data."""
    train = config.train
    if train.patience and plateaus(values, train.patience, lower_is_better(train.monitor), train.min_delta):
        return "train.patience"
    return "train.target_accuracy" if 0 < train.target_accuracy <= accuracy else ""


def check_monitor(monitor: str, metrics: Sequence[keras.metrics.Metric]) -> None:
    """Raises ConfigError unless `monitor` is loss, accuracy or one of these metrics, optionally prefixed with test_."""
    names = ["loss", "accuracy", *(metric.name for metric in metrics)]
    known = [*names, *(f"test_{name}" for name in names)]
    if monitor not in known:
        raise ConfigError(f"train.monitor: got {monitor}, {nearest(monitor, known)}")
