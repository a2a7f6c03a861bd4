"""What bench allreduce makes of its measurements, and of what people type."""

from __future__ import annotations

import pytest

from ringtrain.errors import LaunchError, OutOfSync
from ringtrain.lab import bench_allreduce as allreduce


def test_sizes_are_numbers_with_units():
    assert [allreduce.num_bytes_of(word) for word in ("4B", "1KiB", "64MiB")] == [4, 2**10, 2**26]
    for word in ("1", "5B", "0KiB", "-4KiB"):
        with pytest.raises(LaunchError, match="expected sizes such as 1KiB,64MiB"):
            allreduce.num_bytes_of(word)


def test_bus_bandwidth_is_what_a_ring_moves_through_a_ranks_link():
    measured = [
        {"method": method, "bytes": 4000, "num_ranks": 4, "seconds": seconds}
        for method, seconds in (
            (allreduce.MPI_ALLREDUCE, [1e-6, 2e-6]),
            ("Horovod over MPI", [2e-6, 2e-6]),
            (allreduce.MPI_ALLREDUCE, [4e-6]),
            ("Horovod over MPI", [8e-6]),
        )
    ]
    library, horovod = allreduce.summary(measured)
    assert library["seconds"].repeats == 3 and library["bus_gb_per_s"].median == pytest.approx(4 * 1.5 / 2)
    assert (horovod["speed"].median, horovod["speed"].p90) == (0.5, pytest.approx(0.9))  # of 0.5, 1 and 0.5


def test_a_wrong_sum_is_noticed():
    def alone(value):
        return [value]

    right, wrong = (lambda array: lambda: array), (lambda array: lambda: array + (array == 7))
    (found,) = allreduce.measure({"right": right}, [64], 0, alone)
    assert len(found["seconds"]) == allreduce.NUM_BLOCKS
    with pytest.raises(OutOfSync, match=r"wrong: the sum of 64 bytes is wrong on ranks \[0\]"):
        allreduce.measure({"right": right, "wrong": wrong}, [64], 0, alone)
