"""The shard's promises, for any size of data, batch and ring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtrain.data import Samples, part_batches
from ringtrain.data.row_order import epoch_order, evaluation_shard, file_order, part_of, skipped_samples

SEEDS = st.integers(0, 2**32 - 1)


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 7), SEEDS, st.integers(0, 50))
def test_no_sample_comes_twice_and_every_rank_makes_the_same_steps(num_samples, batch_size, size, seed, epoch):
    order = epoch_order(num_samples, batch_size * size, seed, epoch)
    shards = np.split(order, size, axis=1)
    steps = num_samples // (batch_size * size)
    assert {shard.shape for shard in shards} == {(steps, batch_size)}
    seen = np.concatenate([shard.ravel() for shard in shards])
    assert len(np.unique(seen)) == len(seen) == steps * batch_size * size
    assert len(seen) > num_samples - batch_size * size
    assert np.all((seen >= 0) & (seen < num_samples))


@given(st.integers(40, 500), st.integers(1, 20), SEEDS, st.integers(0, 50))
def test_orders_differ_between_epochs_and_seeds_and_are_repeatable(num_samples, global_batch_size, seed, epoch):
    order = epoch_order(num_samples, global_batch_size, seed, epoch)
    assert np.array_equal(order, epoch_order(num_samples, global_batch_size, seed, epoch))
    assert not np.array_equal(order, epoch_order(num_samples, global_batch_size, seed, epoch + 1))
    assert not np.array_equal(order, epoch_order(num_samples, global_batch_size, seed ^ 1, epoch))


@st.composite
def samples_and_batch(draw):
    global_batch_size = draw(st.integers(1, 60))
    return draw(st.integers(global_batch_size, 500)), global_batch_size


@given(samples_and_batch(), SEEDS, st.integers(1, 40))
def test_samples_take_turns_at_being_left_out(sizes, seed, num_epochs):
    num_samples, global_batch_size = sizes
    times = np.zeros(num_samples, int)
    before = np.array([], int)
    for epoch in range(num_epochs):
        trained = epoch_order(num_samples, global_batch_size, seed, epoch).ravel()
        times[trained] += 1
        assert np.all(np.isin(before, trained))  # what one epoch left out, the next one trains
        before = np.setdiff1d(np.arange(num_samples), trained)
        assert len(before) == num_samples % global_batch_size
        assert np.array_equal(np.sort(skipped_samples(num_samples, global_batch_size, seed, epoch)), before)
        assert times.max() - times.min() <= 1


@st.composite
def files_and_batch(draw):
    per_file = draw(st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(sum))
    size = draw(st.integers(1, min(7, sum(per_file))))
    return per_file, draw(st.integers(1, sum(per_file) // size)), size


@given(files_and_batch(), SEEDS, st.integers(1, 12))
def test_samples_in_files_are_trained_as_often_as_any(files, seed, num_epochs):
    per_file, batch_size, size = files
    num_samples = sum(per_file)
    times = np.zeros(num_samples, int)
    for epoch in range(num_epochs):
        order = file_order(per_file, batch_size * size, seed, epoch)
        assert order.shape == (num_samples // (batch_size * size), batch_size * size)
        assert len(np.unique(order)) == order.size
        times[order.ravel()] += 1
        assert times.max() - times.min() <= 1


@given(files_and_batch(), SEEDS, st.integers(0, 50))
def test_a_rank_reads_whole_files_but_for_the_ends_of_its_stretch(files, seed, epoch):
    per_file, batch_size, size = files
    file_of = np.repeat(np.arange(len(per_file)), per_file)
    order = file_order(per_file, batch_size * size, seed, epoch)
    opened = [len(np.unique(file_of[shard])) for shard in np.split(order, size, axis=1)]
    assert sum(opened) <= np.count_nonzero(per_file) + size - 1


@given(st.integers(20, 500), SEEDS, st.integers(0, 50))
def test_order_of_files_differs_between_epochs_and_seeds_and_is_repeatable(num_samples, seed, epoch):
    per_file = [num_samples // 2, num_samples - num_samples // 2]
    order = file_order(per_file, 4, seed, epoch)
    assert np.array_equal(order, file_order(per_file, 4, seed, epoch))
    assert not np.array_equal(order, file_order(per_file, 4, seed, epoch + 1))
    assert not np.array_equal(order, file_order(per_file, 4, seed ^ 1, epoch))


def test_files_are_shuffled_and_the_samples_within_a_rank_too():
    orders = [file_order([10] * 6, 6, 0, epoch) for epoch in range(8)]  # as many places as files: each has one
    assert all(np.array_equal(order // 10, np.tile(order[0] // 10, (10, 1))) for order in orders)
    assert len({tuple(order[0] // 10) for order in orders}) == 8
    assert not any(np.array_equal(np.sort(order[:, place]), order[:, place]) for order in orders for place in range(6))


@given(st.integers(0, 500), st.integers(1, 7))
def test_evaluation_covers_every_sample_once(num_samples, size):
    shards = [evaluation_shard(num_samples, rank, size) for rank in range(size)]
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(num_samples))
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 500), st.integers(1, 9))
def test_parts_of_ranks_are_those_of_array_split(num_samples, size):
    parts = [np.arange(*part_of(num_samples, rank, size)) for rank in range(size)]
    for part, expected in zip(parts, np.array_split(np.arange(num_samples), size), strict=True):
        assert np.array_equal(part, expected)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_parts_of_ranks_are_the_global_batches_on_any_number_of_ranks(data):
    """Also from a step within an epoch on, and with parts of unequal sizes; a rank without samples gets another's."""
    num_samples, size, samples_per_step = (data.draw(st.integers(*bounds)) for bounds in ((20, 60), (1, 4), (1, 10)))
    global_batch_size = samples_per_step * data.draw(st.integers(1, 2))
    steps = num_samples // global_batch_size * global_batch_size // samples_per_step
    first_step = data.draw(st.integers(0, 2 * steps - 1))
    samples = Samples(np.arange(num_samples, dtype=np.float32)[:, None], np.arange(num_samples))
    orders = [epoch_order(num_samples, global_batch_size, 3, epoch).reshape(-1, samples_per_step) for epoch in (0, 1)]
    expected = np.concatenate(orders)[first_step:]
    sizes = global_batch_size, samples_per_step
    for rank in range(size):
        first, end = part = part_of(samples_per_step, rank, size)
        batches = [labels.numpy() for _, labels in part_batches(samples, *sizes, part, 3, 2, first_step)]
        assert np.array_equal(batches, expected[:, first:end] if first < end else expected[:, :1])
