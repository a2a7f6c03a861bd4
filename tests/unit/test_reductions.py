"""Bytes of reductions of compressed gradients."""

from __future__ import annotations

from ringtrain.compressions import low_rank, reduced_bytes


def test_bytes_of_a_reduction() -> None:
    shapes = [(5, 5, 32, 64), (64,), (3136, 1024), (1024, 10), (1024, 2), ()]
    elements = 51200 + 64 + 3136 * 1024 + 10240 + 2048 + 1
    assert reduced_bytes(shapes, "none") == 4 * elements
    assert reduced_bytes(shapes, "fp16") == 2 * elements
    # The last two matrices have fewer columns than ranks, or are hardly smaller.
    assert reduced_bytes(shapes, "powersgd:4") == 4 * (4 * (800 + 64) + 64 + 4 * (3136 + 1024) + 4 * 1034 + 2048 + 1)
    assert low_rank((1024, 10), 8) is None
    assert low_rank((1024, 10), 8, min_ratio=1.0) == (1024, 10)
    assert low_rank((6, 6), 7, min_ratio=0.0) is None
