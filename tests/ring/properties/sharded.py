"""A sharded update gives the weights of a whole one, with a part of the slots on each rank."""

from __future__ import annotations

import unittest.mock
from typing import Any

import keras
import numpy as np
import small
import tensorflow as tf
from only import only

import ringtrain.hvd as hvd
from ringtrain.errors import OutOfSync
from ringtrain.hvd.reducers import sharded
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


@only(np=2, launcher="mpi")
def sharded_updates_equal_whole_ones_outside_of_a_graph():
    batches, make = small.shares(NUM_STEPS), EXACT_ON_2_RANKS["Adam"]
    whole = small.train(small.build(), hvd.DistributedOptimizer(make()), batches)
    eager = small.alone(small.build(), hvd.DistributedOptimizer(make(), sharded=True), batches)
    assert small.distance(eager, whole) < 1e-12
    by_hand, optimizer = small.build(), hvd.DistributedOptimizer(make(), sharded=True)
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(by_hand(x) - y))
        gradients = tape.gradient(loss, by_hand.trainable_variables)
        optimizer.apply_gradients(zip(gradients, by_hand.trainable_variables, strict=True))
    assert small.distance(by_hand, whole) < 1e-5, "Keras computes losses in float32"


@only(launcher="mpi")
def sharded_updates_take_any_variables():
    """Sparse gradients, no gradient, a scalar, dtypes, fewer values than ranks, no decay of one; assignments count."""
    random = np.random.default_rng(5)
    start = [random.normal(size=shape) for shape in ((5, 3), (), (2, 2), (1,))]
    dtypes = ("float32", "float32", "float64", "bfloat16")
    rows = tf.constant([0, hvd.rank(), 0])
    losses = tf.constant(random.normal(size=(3, 3)), tf.float32) * (1 + hvd.rank())

    def trained(**options: Any) -> list[Any]:
        named = zip(start, dtypes, "wsmb", strict=True)
        variables = [keras.Variable(value, dtype=dtype, name=name) for value, dtype, name in named]
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(variables[:1])
        hvd.DistributedOptimizer(optimizer, **options)
        optimizer.build(variables)

        @tf.function(autograph=False)
        def step() -> None:
            table, scale, _, tiny = variables
            with tf.GradientTape() as tape:
                taken = tf.gather(table.value, rows) * losses
                loss = tf.reduce_sum(taken) * scale + tf.cast(tf.reduce_sum(tiny.value), tf.float32)
            gradients = tape.gradient(loss, [one.value for one in variables])
            assert isinstance(gradients[0], tf.IndexedSlices) and gradients[2] is None
            optimizer.apply(gradients, variables)

        step()
        variables[0].assign(2 * variables[0].value)
        step()
        return [np.asarray(one.numpy(), np.float64) for one in variables]

    whole = trained(sparse_as_dense=True)
    for group_bytes in (sharded.GROUP_BYTES, 1):
        with unittest.mock.patch.object(sharded, "GROUP_BYTES", group_bytes):
            ours = trained(sharded=True)
        for theirs, own, before in zip(whole, ours, start, strict=True):
            assert np.abs(own - theirs).max() < 1e-6, (theirs, own)
            assert np.abs(own - before).max() > 1e-3 or before.shape == (2, 2), "nothing was trained"


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


def slots_are_gathered_and_scattered():
    make, batches = EXACT_ON_2_RANKS["Adam"], small.shares(NUM_STEPS)
    optimizers = [hvd.DistributedOptimizer(make(), sharded=is_sharded) for is_sharded in (True, False)]
    models = [small.train(small.build(), optimizer, batches) for optimizer in optimizers]
    slots, (own, whole) = sharded_slots(optimizers[0]), hvd.slot_bytes(optimizers[:1])
    assert whole == hvd.slot_bytes(optimizers[1:])[0] > own
    gathered = hvd.gather_slots(optimizers[:1])
    assert len(gathered) == (len(slots) if hvd.rank() == 0 else 0)
    pairs = zip(optimizers[0].variables, optimizers[1].variables, strict=True)
    for slot, unsharded in pairs if hvd.rank() == 0 else ():
        if id(slot) in gathered:
            assert np.abs(gathered[id(slot)] - unsharded.numpy()).max() < 1e-9, slot.path
    doubled = {key: 2 * value for key, value in gathered.items()}
    hvd.scatter_slots(optimizers[:1], doubled)
    again = hvd.gather_slots(optimizers[:1])
    assert again.keys() == doubled.keys()
    assert all(np.array_equal(again[key], doubled[key]) for key in again)
    hvd.broadcast_model(models[0])
    kept = hvd.gather_slots(optimizers[:1])
    assert all(np.array_equal(kept[key], again[key]) for key in again)


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
