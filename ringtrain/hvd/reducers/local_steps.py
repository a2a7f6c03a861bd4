"""Rounds of local steps: each rank updates its weights by itself, and the ranks communicate once per round.

Local SGD (Stich 2018, arXiv 1805.09767) averages the weights after each round. DiLoCo (Douillard et al. 2023, arXiv
2311.08105) takes what a round has changed, averaged over the ranks, as the gradient of an outer optimizer. Ordinary
steps may come first (post-local SGD, Lin et al. 2018, arXiv 1808.07217). Slots of the optimizer stay each rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from ringtrain.hvd.backend import Average
from ringtrain.hvd.distributed import Distributed
from ringtrain.hvd.keras_patches import innermost, optimizers_of
from ringtrain.hvd.process import elastic
from ringtrain.hvd.reduction import scaled
from ringtrain.hvd.step_timing import PLACE, during


@dataclass(frozen=True)
class LocalSteps:
    """Rounds of local steps, for `DistributedOptimizer(local_steps=...)`.

    With d the mean over the ranks of (weights at the round's start - weights at its end), the weights become

        start - d                                        outer "average"
        v <- momentum * v + d
        start - learning_rate * (d + momentum * v)       outer "nesterov"

    Args:
        steps: Updates per round, at least 1. With 1, SGD without momentum and "average", weights are those of ordinary
            steps up to rounding.
        outer: Optimizer between rounds.
        learning_rate, momentum: Of outer "nesterov".
        warmup_steps: Number of ordinary updates before the first round.

    Raises:
        ValueError: A value is out of its range.
    """

    steps: int
    outer: Literal["average", "nesterov"] = "average"
    learning_rate: float = 0.7
    momentum: float = 0.9
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"local_steps: got {self.steps}, expected at least 1")
        if self.outer not in ("average", "nesterov"):
            raise ValueError(f"outer: got {self.outer!r}, expected 'average' or 'nesterov'")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate: got {self.learning_rate}, expected more than 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: got {self.momentum}, expected 0 or more, below 1")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps: got {self.warmup_steps}, expected at least 0")


class LocalUpdates(Distributed):
    """Mixin for a single optimizer whose updates are local, and which averages weights at the end of a round.

    Attributes:
        local: Settings.
        starts: Weights at the round's start.
        velocities_of_rounds: Slots of the outer optimizer; [] without momentum.
        steps_of_round: int64 [], updates of the current round; 0 during ordinary steps.
    """

    local: LocalSteps
    starts: list[keras.Variable]
    velocities_of_rounds: list[keras.Variable]
    steps_of_round: keras.Variable
    ending: Any
    """`end_round` as a tf.function, retraced when layers were frozen"""

    of_object = (*Distributed.of_object, "starts", "velocities_of_rounds", "steps_of_round", "ending")

    @property
    def no_loss_scale(self) -> str:
        return "local_steps"

    @property
    def update_name(self) -> str:
        return f"local_steps={self.local}"

    @property
    def when_reduced(self) -> str:
        if self.local.steps == 1:
            return ""
        return f"after each round of {self.local.steps} local steps"

    def why_apart(self) -> str:
        if not self.built or not int(self.steps_of_round):
            return ""
        return "within a round of local steps, ranks have other weights: call hvd.end_round(model)"

    def prepare_probe(self) -> None:
        super().prepare_probe()
        self.__dict__["local"] = LocalSteps(1)  # what a round of one update has changed

    def add_state(self) -> None:
        if self.added:
            return
        super().add_state()

        weights = self._trainable_variables
        starts = [self.add_variable_from_reference(weight, "round_start") for weight in weights]
        velocities = []
        if self.local.outer == "nesterov":
            velocities = [self.add_variable_from_reference(weight, "round_velocity") for weight in weights]
        steps = self.add_variable((), "zeros", "int64", name="round_steps")
        # Not self.starts = ...: Keras tracks attributes, and each is tracked already.
        self.__dict__["starts"] = starts
        self.__dict__["velocities_of_rounds"] = velocities
        self.__dict__["steps_of_round"] = steps
        self.__dict__["ending"] = tf.function(self.end_round, autograph=False)
        self.__dict__["added"] = (*self.added, *starts, *velocities, steps)

    def of_one_rank(self, now: bool) -> list[Any]:
        if not self.built:
            return super().of_one_rank(now)
        shared = {id(variable) for variable in (*self.added, self._iterations, *self._rates())}
        slots = [variable for variable in self.variables if id(variable) not in shared]
        # Between rounds, the weights are equal.
        weights: list[Any] = []
        if not now or int(self.steps_of_round) > 0:
            weights = self._trainable_variables
        return [*super().of_one_rank(now), *slots, *weights]

    def _rates(self) -> list[Any]:
        if isinstance(self._learning_rate, keras.Variable):
            return [self._learning_rate]
        return []

    def reduce(self, grads: Any, variables: Any) -> list[Any]:
        """Remembers the weights if a round starts; gradients are this rank's own, but for those of ordinary steps."""
        begins = tf.equal(self.steps_of_round.value, 0)
        tf.cond(begins, self._begin_round, lambda: None)
        local = [self.is_local(variable) for variable in variables]

        def of_this_rank() -> list[Any]:
            return self.reduction.of_this_rank(grads, variables, local)

        def of_all_ranks() -> list[Any]:
            return self.reduction.uncompressed(grads, variables, local)

        if not self.local.warmup_steps:
            return of_this_rank()
        return list(tf.cond(self._is_ordinary(), of_all_ranks, of_this_rank))

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        super()._backend_update_step(grads, trainable_variables, learning_rate)
        # An ordinary step belongs to no round.
        added: Any = 1
        if self.local.warmup_steps:
            added = 1 - tf.cast(self._is_ordinary(), tf.int64)
        num_steps = self.steps_of_round.value.assign_add(added)
        places = self.places_of_round()
        tf.cond(num_steps >= self.local.steps, lambda: self.end_round(places), lambda: None)
        PLACE.note("reduced", [variable.value for variable in trainable_variables])

    def _is_ordinary(self) -> tf.Tensor:
        return self.iterations < self.local.warmup_steps

    def _begin_round(self) -> None:
        for start, variable in zip(self.starts, self._trainable_variables, strict=True):
            start.assign(variable)

    def places_of_round(self) -> tuple[int, ...]:
        """Indices of the weights that rounds change: neither those of this rank alone, nor those of frozen layers."""
        places = []
        for index, variable in enumerate(self._trainable_variables):
            if variable.trainable and not self.is_local(variable):
                places.append(index)
        return tuple(places)

    def end_round(self, places: Sequence[int]) -> None:
        """Sets weights to the outer optimizer's. A collective."""
        variables = [self._trainable_variables[index] for index in places]
        starts = [self.starts[index] for index in places]
        changes = [start.value - variable.value for start, variable in zip(starts, variables, strict=True)]
        means = self.reduction.of_rounds(changes, variables, [False] * len(variables))
        for index, start, variable, mean in zip(places, starts, variables, means, strict=True):
            rate = 1.0
            if self.local.outer == "nesterov":
                rate = self.local.learning_rate
                velocity = self.velocities_of_rounds[index]
                velocity.assign(self.local.momentum * velocity.value + mean)
                mean = mean + self.local.momentum * velocity.value
            variable.assign(start.value - scaled(mean, rate))
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        self.steps_of_round.assign(0)


def refuse_local(optimizer: Any, reduction: Any) -> None:
    """Raises ValueError for an optimizer that cannot make local steps; the message says why."""
    reasons = {
        "elastic: a rank that is lost would take its steps along": elastic(),
        "MultiOptimizer: its parts have steps of their own": isinstance(optimizer, keras.optimizers.MultiOptimizer),
        "LossScaleOptimizer: one rank may skip a step": isinstance(optimizer, keras.optimizers.LossScaleOptimizer),
        "use_ema: it would average the weights of one rank": optimizer.use_ema,
        "op: expected hvd.Average": reduction.op != Average,
        "compression_start_step: warm-up steps are not compressed": reduction.compression_start_step,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if reason:
        raise ValueError(f"local_steps does not work with {reason}")


def steps_of_round(model: keras.Model) -> int:
    """Number of local steps since the ranks' weights were equal; 0 also without local steps."""
    optimizers = [optimizer for optimizer in _local_optimizers(model) if optimizer.built]
    return max((int(optimizer.steps_of_round) for optimizer in optimizers), default=0)


def local_steps_of(model: keras.Model) -> int:
    """Updates per round of a model's optimizers; 1 without local steps."""
    return max((optimizer.local.steps for optimizer in _local_optimizers(model)), default=1)


def _local_optimizers(model: keras.Model) -> list[LocalUpdates]:
    optimizers = map(innermost, optimizers_of(model))
    return [optimizer for optimizer in optimizers if isinstance(optimizer, LocalUpdates)]


@during("reduce")
def end_round(model: keras.Model) -> None:
    """Ends the round of local steps under way: all ranks have the same weights. A collective.

    Call it before weights are evaluated or saved as a model, e.g. at the end of an epoch; `ringtrain.train`,
    `ringtrain.fit` and `hvd.callbacks.EndRoundCallback` do. Without local steps, and after a round's last step, it
    does nothing.

    Args:
        model: Model whose optimizers were made by `DistributedOptimizer(local_steps=...)`.
    """
    for optimizer in _local_optimizers(model):
        if optimizer.built and int(optimizer.steps_of_round):
            optimizer.ending(optimizer.places_of_round())
