"""Batches that ranks train."""

from __future__ import annotations

from typing import Any

from ringtrain import data


def of_rank(
    rows: data.NumberedRows,
    batch_size: int,
    rank: int = 0,
    size: int = 1,
    seed: int = 3,
    epoch: int = 0,
    first_step: int = 0,
) -> list[Any]:
    """A rank's rows of each global batch of an epoch, from a step on. A rank without a row in a batch has another's."""
    batches = data.RowBatches(rows, batch_size, data.Parts.of_rank(rank, size), seed)
    return [batch if batches.is_even else batch[1] for batch in batches(epoch, first_step)]
