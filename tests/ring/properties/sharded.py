"""A sharded update gives the weights of a whole one, with a part of the slots on each rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import small
from only import only

import ringtrain.hvd as hvd
from ringtrain.errors import OutOfSync
from ringtrain.hvd.reducers.sharded import sharded_slots
from ringtrain.optim.optimizers import SGD

NUM_STEPS = 4
EXACT_ON_2_RANKS = {
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "ringtrain's SGD": lambda: SGD(0.1, momentum=0.9, weight_decay=0.1),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "clipped by value": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}
NEAR = {
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9),
    "clipped by norm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "accumulated, loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    ),
}


def _decaying() -> Any:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def _slots(optimizer: Any) -> int:
    return sum(int(np.prod(slot.shape)) for slot in sharded_slots(optimizer))


def sharded_updates_equal_whole_ones():
    """Bit for bit on two ranks, where a sum has one order; and each rank has its part of the slots."""
    batches, kinds = small.shares(NUM_STEPS), {**EXACT_ON_2_RANKS, **NEAR, "AdamW": _decaying}
    if hvd.size() > 2 or hvd.gloo_enabled():  # other shares, another reducescatter
        kinds = {name: kinds[name] for name in ("Adam", "accumulated", "clipped by norm", "AdamW")}
    for name, make in kinds.items():
        whole = small.train(small.build(), hvd.DistributedOptimizer(make(), deterministic=True), batches)
        optimizer = hvd.DistributedOptimizer(make(), sharded=True)
        ours = small.build()
        for _ in range(2):  # once more, as before a restore
            optimizer.build(ours.trainable_variables)
        small.train(ours, optimizer, batches)
        apart = small.distance(ours, whole)
        assert apart == 0 if hvd.size() == 2 and name not in NEAR else apart < 1e-9, (name, apart)
        assert small.spread(ours) == 0, name
        assert hvd.check_in_sync(ours), name
        num_weights, num_slots = ours.count_params(), len(sharded_slots(optimizer)) // len(ours.trainable_variables)
        shares = hvd.allgather_object(_slots(optimizer))
        assert sum(shares) == num_slots * num_weights and num_slots > 0, (name, shares)
        assert max(shares) <= num_slots * -(-num_weights // hvd.size()), (name, shares)


class _NotReduced:
    """A reduction that takes this rank's own part for the reduced one."""

    def __init__(self, right: Any) -> None:
        self.right = right

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def reduce_scatter(self, vectors: Any) -> Any:
        rank, size = self.right.place()
        parts = []
        for flat in vectors:
            share, rest = divmod(int(flat.shape[0]), size)
            begin = rank * share + min(rank, rest)
            parts.append(flat[begin : begin + share + (rank < rest)])
        return parts


@only(launcher="mpi")
def the_check_and_the_comparison_see_parts_that_are_not_reduced():
    """The negative control: weights are equal on all ranks and wrong."""
    make = EXACT_ON_2_RANKS["SGD"]
    optimizer = hvd.DistributedOptimizer(make(), sharded=True)
    assert hvd.check_averaging(optimizer) == "averaged"
    type(optimizer).reduction = _NotReduced(optimizer.reduction)
    assert "expected" in small.raised(OutOfSync, lambda: hvd.check_averaging(optimizer))
    ours = small.train(small.build(), optimizer, small.shares(NUM_STEPS))
    whole = small.train(small.build(), hvd.DistributedOptimizer(make()), small.shares(NUM_STEPS))
    assert small.spread(ours) == 0
    assert small.distance(ours, whole) > 1e-3


@only(np=2, launcher="mpi")
def what_cannot_be_sharded_is_refused_by_name():
    adam = keras.optimizers.Adam
    built = adam()
    built.build([keras.Variable(np.zeros(3))])
    refused = {
        "Lamb does not update each weight by itself": (keras.optimizers.Lamb(), {}),
        "Adafactor does not": (keras.optimizers.Adafactor(), {}),
        "Muon does not": (keras.optimizers.Muon(), {}),
        "clipnorm": (adam(clipnorm=1.0), {}),
        "use_ema": (adam(use_ema=True), {}),
        "built already": (built, {}),
        "groups": (adam(), {"groups": 2}),
        "hvd.Average or hvd.Sum": (adam(), {"op": hvd.Adasum}),
    }
    for part, (optimizer, options) in refused.items():
        message = small.raised(
            ValueError, lambda pair=(optimizer, options): hvd.DistributedOptimizer(pair[0], sharded=True, **pair[1])
        )
        assert message.startswith("sharded=True: ") and part in message, message
    optimizer = hvd.DistributedOptimizer(adam(), sharded=True)
    variable = keras.Variable(np.zeros(3))
    assert "sharded" in small.raised(ValueError, lambda: optimizer.register_local_var(variable))
