"""Models of `ringtrain.fit` that prepare data in a `fit` of their own, as the tasks of KerasHub do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import keras

from ringtrain.config import combinations
from ringtrain.config.sections import DEFAULTS, Config
from ringtrain.data import FitArguments
from ringtrain.errors import ConfigError
from ringtrain.training.run import callbacks_in

OF_RINGTRAIN = ("seed", "resume", "batch_per_rank")
"""arguments of `ringtrain.fit` that Keras' does not have"""


def through(model: keras.Model, arguments: FitArguments, train: Callable[[FitArguments], Any]) -> Any:
    """Calls the model's `fit`, in which Keras' is replaced by `train`; returns what that has returned."""
    own, keras_fit, name, trained = type(model).fit, keras.Model.fit, type(model).__name__, []
    is_inherited = "fit" not in vars(keras.Model)  # a tracker may have replaced it
    # One that trains by itself would do so on each rank alone.
    if "fit" not in inspect.unwrap(own).__code__.co_names:
        raise ConfigError(
            f"ringtrain.fit: {name} has a fit of its own that does not call super().fit: put its changes into"
            f" train_step, or call its fit with hvd.DistributedOptimizer and hvd.callbacks"
        )
    if arguments.batch_per_rank:
        combinations.check(Config(), DEFAULTS, [combinations.OWN_FIT, combinations.BATCH_PER_RANK])

    def fit(self: keras.Model, *args: Any, **named: Any) -> Any:
        if self is not model:
            return keras_fit(self, *args, **named)
        given = inspect.signature(keras_fit).bind(self, *args, **named).arguments
        used: dict[str, Any] = {one: value for one, value in given.items() if one not in ("self", "callbacks")}
        used |= {"callbacks": callbacks_in(given.get("callbacks")), "seed": arguments.seed, "resume": arguments.resume}
        trained.append(train(FitArguments(**used)))
        return trained[0]

    passed = {one: value for one, value in vars(arguments).items() if one not in OF_RINGTRAIN}
    passed = {one: value for one, value in passed.items() if not _is_default(one, value)}
    _require_parameters(own, passed, name)
    keras.Model.fit = fit
    try:
        own(model, **passed)
    finally:
        if is_inherited:
            del keras.Model.fit
        else:
            keras.Model.fit = keras_fit
    if not trained:
        raise ConfigError(f"ringtrain.fit: the fit of {name} has not called super().fit")
    return trained[0]


def _require_parameters(own: Callable[..., Any], passed: Collection[str], name: str) -> None:
    """Raises ConfigError if a model's `fit` does not have the parameters of Keras' that a script has given."""
    parameters = inspect.signature(own).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    unknown = sorted(set(passed) - set(parameters))
    if unknown:
        raise ConfigError(
            f"ringtrain.fit: {name} has a fit of its own without {', '.join(unknown)}: give it the parameters of"
            f" keras.Model.fit, or, if it needs nothing of its own, set {name}.fit = keras.Model.fit"
        )


def _is_default(name: str, value: Any) -> bool:
    default = getattr(FitArguments(), name)
    return value is default or (isinstance(value, int | float | str | tuple) and bool(value == default))
