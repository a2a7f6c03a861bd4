"""The shard's promises, for any size of data, batch and ring."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtrain.data.shard import epoch_order, evaluation_shard, training_shard

SEEDS = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 7), SEEDS, st.integers(0, 50))
def test_no_sample_comes_twice_and_every_rank_makes_the_same_steps(num_samples, batch_size, size, seed, epoch):
    shards = [training_shard(num_samples, batch_size, rank, size, seed, epoch) for rank in range(size)]
    steps = num_samples // (batch_size * size)
    assert {shard.shape for shard in shards} == {(steps, batch_size)}
    seen = np.concatenate([shard.ravel() for shard in shards])
    assert len(np.unique(seen)) == len(seen) == steps * batch_size * size
    assert len(seen) > num_samples - batch_size * size
    assert np.all((seen >= 0) & (seen < num_samples))


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 7), SEEDS, st.integers(0, 50))
def test_ranks_together_see_the_global_batches_of_one_rank(num_samples, batch_size, size, seed, epoch):
    shards = [training_shard(num_samples, batch_size, rank, size, seed, epoch) for rank in range(size)]
    alone = training_shard(num_samples, batch_size * size, 0, 1, seed, epoch)
    assert np.array_equal(np.concatenate(shards, axis=1), alone)


@settings(deadline=None)
@given(st.integers(20, 500), SEEDS, st.integers(0, 50))
def test_orders_differ_between_epochs_and_seeds_and_are_repeatable(num_samples, seed, epoch):
    order = epoch_order(num_samples, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(num_samples))
    assert np.array_equal(order, epoch_order(num_samples, seed, epoch))
    assert not np.array_equal(order, epoch_order(num_samples, seed, epoch + 1))
    assert not np.array_equal(order, epoch_order(num_samples, seed ^ 1, epoch))


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 7))
def test_evaluation_covers_every_sample_once(num_samples, size):
    shards = [evaluation_shard(num_samples, rank, size) for rank in range(size)]
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(num_samples))
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1
