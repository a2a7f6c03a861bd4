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
from ringtrain.hvd.collectives import elastic
from ringtrain.hvd.distributed import Distributed
from ringtrain.hvd.keras_patches import innermost, optimizers_of
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
        valid = {
            f"local_steps: got {self.steps}, expected at least 1": self.steps >= 1,
            f"outer: got {self.outer!r}, expected 'average' or 'nesterov'": self.outer in ("average", "nesterov"),
            f"learning_rate: got {self.learning_rate}, expected more than 0": self.learning_rate > 0,
            f"momentum: got {self.momentum}, expected 0 or more, below 1": 0 <= self.momentum < 1,
            f"warmup_steps: got {self.warmup_steps}, expected at least 0": self.warmup_steps >= 0,
        }
        message = next((message for message, holds in valid.items() if not holds), "")
        if message:
            raise ValueError(message)


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
        return f"after each round of {self.local.steps} local steps" if self.local.steps > 1 else ""

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

        def like(name: str) -> list[keras.Variable]:
            return [self.add_variable_from_reference(one, name) for one in self._trainable_variables]

        # Not self.starts = ...: Keras tracks attributes, and each is tracked already.
        state = {
            "starts": like("round_start"),
            "velocities_of_rounds": like("round_velocity") if self.local.outer == "nesterov" else [],
            "steps_of_round": self.add_variable((), "zeros", "int64", name="round_steps"),
            "ending": tf.function(self.end_round, autograph=False),
        }
        self.__dict__.update(state)
        added = (*self.added, *state["starts"], *state["velocities_of_rounds"], state["steps_of_round"])
        self.__dict__["added"] = added

    def of_one_rank(self, now: bool) -> list[Any]:
        shared = {id(variable) for variable in (*self.added, self._iterations, *self._rates())}
        slots = [variable for variable in self.variables if id(variable) not in shared] if self.built else []
        is_local = not now or (self.built and int(self.steps_of_round) > 0)
        weights = [variable for variable in self._trainable_variables if is_local] if self.built else []
        return [*super().of_one_rank(now), *slots, *weights]

    def _rates(self) -> list[Any]:
        return [self._learning_rate] if isinstance(self._learning_rate, keras.Variable) else []

    def reduce(self, grads: Any, variables: Any) -> list[Any]:
        """Remembers the weights if a round starts; gradients are this rank's own, but for those of ordinary steps."""
        begins = tf.equal(self.steps_of_round.value, 0)
        tf.cond(begins, self._begin_round, lambda: None)
        local, alone = [self.is_local(variable) for variable in variables], self.reduction.of_this_rank
        if not self.local.warmup_steps:
            return alone(grads, variables, local)
        arguments, ordinary = (grads, variables, local), self.reduction.uncompressed
        return list(tf.cond(self._is_ordinary(), lambda: ordinary(*arguments), lambda: alone(*arguments)))

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        super()._backend_update_step(grads, trainable_variables, learning_rate)
        one = 1 - tf.cast(self._is_ordinary(), tf.int64) if self.local.warmup_steps else 1
        made = self.steps_of_round.value.assign_add(one)
        places = self.places_of_round()
        tf.cond(made >= self.local.steps, lambda: self.end_round(places), lambda: None)
        PLACE.note("reduced", [variable.value for variable in trainable_variables])

    def _is_ordinary(self) -> tf.Tensor:
        return self.iterations < self.local.warmup_steps

    def _begin_round(self) -> None:
        for start, variable in zip(self.starts, self._trainable_variables, strict=True):
            start.assign(variable)

    def places_of_round(self) -> tuple[int, ...]:
        """Indices of the weights that rounds change: neither those of this rank alone, nor those of frozen layers."""
        each = enumerate(self._trainable_variables)
        return tuple(place for place, one in each if one.trainable and not self.is_local(one))

    def end_round(self, places: Sequence[int]) -> None:
        """Sets weights to the outer optimizer's. A collective."""
        variables = [self._trainable_variables[place] for place in places]
        starts = [self.starts[place] for place in places]
        changes = [start.value - variable.value for start, variable in zip(starts, variables, strict=True)]
        means = self.reduction.of_rounds(changes, variables, [False] * len(variables))
        for place, start, variable, mean in zip(places, starts, variables, means, strict=True):
            if self.local.outer == "nesterov":
                velocity = self.velocities_of_rounds[place]
                velocity.assign(self.local.momentum * velocity.value + mean)
                mean = mean + self.local.momentum * velocity.value
            rate = self.local.learning_rate if self.local.outer == "nesterov" else 1.0
            variable.assign(start.value - scaled(mean, rate))
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        self.steps_of_round.assign(0)


def refuse_local(optimizer: Any, reduction: Any, sharded: bool) -> None:
    """Raises ValueError for an optimizer that cannot make local steps; the message says why."""
    reasons = {
        "elastic: a rank that is lost would take its steps along": elastic(),
        "MultiOptimizer: its parts have steps of their own": isinstance(optimizer, keras.optimizers.MultiOptimizer),
        "LossScaleOptimizer: one rank may skip a step": isinstance(optimizer, keras.optimizers.LossScaleOptimizer),
        "use_ema: it would average the weights of one rank": optimizer.use_ema,
        "sharded: slots are each rank's own": sharded,
        "op: expected hvd.Average": reduction.op != Average,
        "compression_start_step: warm-up steps are not compressed": reduction.compression_start_step,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if reason:
        raise ValueError(f"local_steps does not work with {reason}")


def steps_of_round(model: keras.Model) -> int:
    """Number of local steps since the ranks' weights were equal; 0 also without local steps."""
    optimizers = [innermost(one) for one in optimizers_of(model)]
    return max(
        [int(one.steps_of_round) for one in optimizers if isinstance(one, LocalUpdates) and one.built], default=0
    )


def local_steps_of(model: keras.Model) -> int:
    """Updates per round of a model's optimizers; 1 without local steps."""
    optimizers = map(innermost, optimizers_of(model))
    return max([one.local.steps for one in optimizers if isinstance(one, LocalUpdates)], default=1)


@during("reduce")
def end_round(model: keras.Model) -> None:
    """Ends the round of local steps under way: all ranks have the same weights. A collective.

    Call it before weights are evaluated or saved as a model, e.g. at the end of an epoch; `ringtrain.train`,
    `ringtrain.fit` and `hvd.callbacks.EndRoundCallback` do. Without local steps, and after a round's last step, it
    does nothing.

    Args:
        model: Model whose optimizers were made by `DistributedOptimizer(local_steps=...)`.
    """
    for optimizer in map(innermost, optimizers_of(model)):
        if isinstance(optimizer, LocalUpdates) and optimizer.built and int(optimizer.steps_of_round):
            optimizer.ending(optimizer.places_of_round())
