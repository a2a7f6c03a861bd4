"""What bench allreduce makes of its measurements, and of what people type."""

from __future__ import annotations

import pytest

from ringtrain.errors import LaunchError, OutOfSync
from ringtrain.lab import bench_allreduce as allreduce


def test_sizes_are_lists_and_ranges():
    assert allreduce.sizes("4B,64MiB") == [4, 2**26]
    assert allreduce.sizes("1KiB..64KiB,1 MiB") == [2**10, 2**12, 2**14, 2**16, 2**20]
    every = allreduce.sizes("1KiB..256MiB")
    assert len(every) == 10 and every[-1] == 2**28
    assert [allreduce.size_text(size) for size in (4, 2**10, 2**26, 3 * 2**19)] == [
        "4 B",
        "1 KiB",
        "64 MiB",
        "1536 KiB",
    ]


@pytest.mark.parametrize("text", ["", "1", "5B", "0KiB", "1kB", "KiB", "1KiB..", "-4KiB", "1MiB..1KiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(LaunchError, match="expected sizes such as 1KiB,64MiB or 1KiB"):
        allreduce.sizes(text)


def test_bus_bandwidth_is_what_a_ring_moves_through_a_ranks_link():
    measured = [
        {"method": method, "bytes": 4000, "seconds": seconds, "wire_bytes": 6000.0}
        for method, seconds in (
            (allreduce.MPI_ALLREDUCE, [1e-6, 2e-6]),
            (allreduce.COPY, [1e-6]),
            ("Horovod over MPI", [2e-6, 2e-6]),
            (allreduce.MPI_ALLREDUCE, [4e-6]),
            ("Horovod over MPI", [8e-6]),
        )
    ]
    library, copy, horovod = allreduce.summary(measured, num_ranks=4)
    assert library["seconds"].repeats == 3 and library["bus_gb_per_s"].median == pytest.approx(4 * 1.5 / 2)
    assert copy["bus_gb_per_s"].median == pytest.approx(4) and copy["speed"] is None
    assert (horovod["speed"].median, horovod["speed"].p90) == (0.5, pytest.approx(0.9))  # of 0.5, 1 and 0.5


def test_a_wrong_sum_is_noticed():
    def alone(value):
        return [value]

    right, wrong = (lambda array: lambda: array), (lambda array: lambda: array + (array == 7))
    (found,) = allreduce.measure({"right": right}, [64], 2, 0, alone)
    assert len(found["seconds"]) == 2
    with pytest.raises(OutOfSync, match=r"wrong: the sum of 64 bytes is wrong on ranks \[0\]"):
        allreduce.measure({"right": right, "wrong": wrong}, [64], 2, 0, alone)
