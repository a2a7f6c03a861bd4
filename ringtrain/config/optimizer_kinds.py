"""Optimizers by name: what options and derived numbers must know of each, without TensorFlow."""

from __future__ import annotations

from typing import Literal, NamedTuple


class OptimizerKind(NamedTuple):
    """Class (module:name), learning-rate scaling that auto means, and options that not all optimizers take."""

    path: str
    scaling: Literal["linear", "sqrt"]
    options: tuple[str, ...] = ()


# A step of the adaptive optimizers does not grow with the gradient: they scale by sqrt.
OPTIMIZERS = {
    "sgd": OptimizerKind("ringtrain.optim.optimizers:SGD", "linear", ("momentum", "nesterov")),
    "adam": OptimizerKind("keras.optimizers:Adam", "sqrt"),  # arXiv 1412.6980
    "adamw": OptimizerKind("keras.optimizers:AdamW", "sqrt"),  # arXiv 1711.05101
    "lamb": OptimizerKind("keras.optimizers:Lamb", "sqrt"),  # arXiv 1904.00962
    "lars": OptimizerKind("ringtrain.optim.optimizers:LARS", "linear", ("momentum", "trust_coefficient")),
}
