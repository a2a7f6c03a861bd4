"""Sums of virtual ranks are the same on any number of ranks; options with which they would not be are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data.parts import Parts
from ringtrain.training import devices, virtual_ranks


def expected(rows: np.ndarray) -> np.ndarray:
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


@pytest.mark.parametrize("num", [1, 2, 4, 8, 16])
def test_the_sum_is_that_of_the_tree_for_any_number_of_ranks(num: int) -> None:
    """In a graph, where TensorFlow would change the order of a plain sum: the control."""
    rows = np.random.default_rng(num).normal(size=(num, 1000)).astype(np.float32)
    for size in range(1, num + 1):
        of_ranks = [list(Parts.of_rank(rank, size, num).numbers) for rank in range(size)]
        assert [one for own in of_ranks for one in own] == [*range(num)] and all(of_ranks)
        nodes = [node for rank in range(size) for node in virtual_ranks.own_nodes(num, rank, size)]
        assert sum(node.width for node in nodes) == num and len(nodes) < size + 2 * num.bit_length()

        @tf.function(autograph=False)
        def add(given: tf.Tensor, of_ranks=of_ranks, nodes=nodes) -> tf.Tensor:
            one = virtual_ranks.Node
            parts = [virtual_ranks.added(tf.gather(given, own), [one(1, each) for each in own]) for own in of_ranks]
            return virtual_ranks.added(tf.concat(parts, 0), nodes)

        total = add(rows).numpy()
        assert total.shape == (1, 1000) and total[0].tobytes() == expected(rows).tobytes()
    if num > 2:
        assert np.add.reduce(rows, axis=0).tobytes() != expected(rows).tobytes()


def test_what_chooses_kernels_is_told_apart(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name : Some CPU\nflags : avx avx2\n\nprocessor : 1\nmodel name : Another\n")
    pinning = devices.Pinning()
    first = devices.of_kernels(pinning, {}, info)
    assert first["processor"].startswith("Some CPU") and first["setting of kernels"] == "none"
    assert first == devices.of_kernels(pinning, {"PATH": "/bin"}, info)
    assert first != devices.of_kernels(pinning, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, info)
    info.write_text(info.read_text().replace("avx2", "avx2 avx512f"))
    assert first != devices.of_kernels(pinning, {}, info)
