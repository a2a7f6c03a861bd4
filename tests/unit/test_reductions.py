"""Bytes and number of reductions of compressed gradients and local steps."""

from __future__ import annotations

from typing import Any

import pytest

from ringtrain.compressions import low_rank, reduced_bytes
from ringtrain.config import HvdConfig
from ringtrain.derived import num_reductions


@pytest.mark.parametrize(
    ("options", "updates", "expected"),
    [
        ({}, 7, (0, 7)),
        ({"compression": "fp16", "compression_start_step": 3}, 7, (3, 4)),
        ({"compression": "fp16", "compression_start_step": 30}, 7, (7, 0)),
        ({"local_steps": 4}, 20, (0, 6)),  # of 10 per epoch: 4, 4 and 2
        ({"local_steps": 4}, 13, (0, 3)),  # the fourth round has not ended
        ({"local_steps": 4, "local_warmup_steps": 5}, 20, (5, 5)),
        ({"local_steps": 40, "local_warmup_steps": 12}, 30, (12, 2)),
    ],
)
def test_reductions_are_counted(options: dict[str, Any], updates: int, expected: tuple[int, int]) -> None:
    assert num_reductions(HvdConfig(**options), updates, 10) == expected


def test_bytes_of_a_reduction() -> None:
    shapes = [(5, 5, 32, 64), (64,), (3136, 1024), (1024, 10), (1024, 2), ()]
    elements = 51200 + 64 + 3136 * 1024 + 10240 + 2048 + 1
    assert reduced_bytes(shapes, "none") == 4 * elements
    assert reduced_bytes(shapes, "fp16") == reduced_bytes(shapes, "bf16") == 2 * elements
    # The last two matrices have fewer columns than ranks, or are hardly smaller.
    assert reduced_bytes(shapes, "powersgd:4") == 4 * (4 * (800 + 64) + 64 + 4 * (3136 + 1024) + 4 * 1034 + 2048 + 1)
    assert low_rank((1024, 10), 8) is None
    assert low_rank((1024, 10), 8, min_ratio=1.0) == (1024, 10)
    assert low_rank((6, 6), 7, min_ratio=0.0) is None
