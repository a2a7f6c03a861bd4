"""Every optimizer of Keras gets averaged gradients: also those whose updates would be the same with a sum."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import small
import tensorflow as tf
from only import only

import ringtrain.hvd as hvd
from ringtrain.errors import OutOfSync
from ringtrain.hvd.collectives import tensor_of
from ringtrain.optim.optimizers import LARS, SGD

MADE = {
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
}
OURS = {
    "LARS": lambda: LARS(0.1, trust_coefficient=0.1, weight_decay=0.01, global_clipnorm=0.01),
    "SGD of ringtrain": lambda: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}
NUM_STEPS = 3
SUMMED = ("Adam", "Adamax", "Lion", "RMSprop", "SGD")
"""trained with a sum in place of the average as well"""


class _Recorded:
    """A training of one optimizer: its model, and the gradients that its last update got, by variable."""

    def __init__(self, name: str, optimizer: Any, batches: Any) -> None:
        # Keras' Muon knows float32 only.
        self.tolerance = 1e-4 if name == "Muon" else 1e-6
        self.model = small.build(dtype="float32" if name == "Muon" else "float64")
        self.received = [tf.Variable(tf.zeros_like(variable.value)) for variable in self.model.trainable_variables]
        places = {id(tensor_of(variable)): place for place, variable in enumerate(self.model.trainable_variables)}
        update = optimizer.update_step

        def record(gradient: Any, variable: Any, learning_rate: Any) -> None:
            received = self.received[places[id(tensor_of(variable))]]
            received.assign(tf.cast(gradient, received.dtype))
            update(gradient, variable, learning_rate)

        object.__setattr__(optimizer, "update_step", record)
        small.train(self.model, optimizer, batches)

    def compare_gradients(self, reference: _Recorded) -> None:
        for ours, theirs in zip(self.received, reference.received, strict=True):
            scale = np.abs(theirs).max()
            assert scale > 0, "nothing was recorded"
            apart = np.abs(ours.numpy() - theirs.numpy()).max() / scale
            assert apart < self.tolerance, f"gradients are {apart} of the largest apart from the big batch's"


@only(np=2, launcher="mpi")
def every_optimizer_of_keras_equals_big_batch():
    """Weights, and the gradients that the updates get.

    A sum in place of the average leaves the weights of Adamax and Lion as they are: only gradients tell.
    """
    apart = {}
    for name, make in (MADE | OURS).items():
        ours = _Recorded(name, hvd.DistributedOptimizer(make()), small.shares(NUM_STEPS))
        reference = _Recorded(name, make(), small.global_batches(NUM_STEPS))
        assert small.distance(ours.model, reference.model) < ours.tolerance, name
        ours.compare_gradients(reference)
        if name not in SUMMED:
            continue
        summed = _Recorded(name, hvd.DistributedOptimizer(make(), op=hvd.Sum), small.shares(NUM_STEPS))
        message = small.raised(AssertionError, lambda pair=(summed, reference): pair[0].compare_gradients(pair[1]))
        assert "apart from the big batch's" in message, name
        apart[name] = small.distance(summed.model, reference.model)
    blind = {name for name, distance in apart.items() if distance < 1e-6}
    assert {"Adamax", "Lion"} <= blind and "SGD" not in blind, apart
    wrappers = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}
    classes = {name for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    optimizers = {name for name in classes if issubclass(getattr(keras.optimizers, name), keras.optimizers.Optimizer)}
    assert optimizers == set(MADE) | wrappers, "Keras has an optimizer that is not tried here"


class _Wrong:
    """A reduction whose result something else takes the place of; called as `Reduction` is."""

    def __init__(self, right: Any, change: Any) -> None:
        self.right, self.change = right, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def __call__(self, gradients: Any, variables: Any, local: Any) -> list[Any]:
        return [self.change(*pair) for pair in zip(gradients, self.right(gradients, variables, local), strict=True)]


@only(np=2, launcher="mpi")
def the_check_names_a_sum_in_place_of_the_average_for_every_optimizer():
    """And an optimizer that reduces nothing, or takes one rank's gradients for all."""
    wrongs = {
        "sum": lambda gradient, reduced: hvd.size() * reduced,
        "own": lambda gradient, reduced: gradient,
        "first rank's": lambda gradient, reduced: hvd.broadcast(gradient, 0, name="first"),
    }
    for name, make in MADE.items():
        assert hvd.check_averaging(hvd.DistributedOptimizer(make())) == "averaged", name
        for wrong, change in wrongs.items():
            optimizer = hvd.DistributedOptimizer(make())
            type(optimizer).reduction = _Wrong(optimizer.reduction, change)
            message = small.raised(OutOfSync, lambda optimizer=optimizer: hvd.check_averaging(optimizer))
            assert f"expected {1 / hvd.size()} everywhere" in message, (name, wrong)
