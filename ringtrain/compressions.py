"""Compressions of gradients by name: what options and messages must know of each, without TensorFlow.

hvd.Compression makes one from its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Compression:
    """Properties of one kind of compression."""

    bytes_of: Callable[[Sequence[int], int], float]
    """of a float32 gradient's shape and the number in the name (0: none): bytes that a rank reduces"""
    has_number: bool = False
    """whether a number follows the name: powersgd:4"""


def low_rank(shape: Sequence[int], rank: int, min_ratio: float = 2.0) -> tuple[int, int] | None:
    """Rows and columns of a gradient that PowerSGD sends as factors; None: it is not `min_ratio` times as large."""
    size = math.prod(shape)
    if len(shape) < 2 or not size:
        return None
    rows, columns = size // shape[-1], shape[-1]
    is_smaller = size >= min_ratio * rank * (rows + columns)
    if is_smaller and rank <= min(rows, columns):
        return rows, columns
    return None


def _low_rank_bytes(shape: Sequence[int], rank: int) -> float:
    matrix = low_rank(shape, rank)
    if matrix is None:
        return 4 * math.prod(shape)
    return 4 * rank * sum(matrix)


COMPRESSIONS = {
    "none": Compression(lambda shape, _: 4 * math.prod(shape)),
    "fp16": Compression(lambda shape, _: 2 * math.prod(shape)),
    "powersgd": Compression(_low_rank_bytes, has_number=True),
}

PATTERN = "|".join(f"{name}:[1-9][0-9]*" if kind.has_number else name for name, kind in COMPRESSIONS.items())
"""regular expression of all names"""
EXAMPLES = ", ".join(f"{name}:1, {name}:2, ..." if kind.has_number else name for name, kind in COMPRESSIONS.items())
"""all names, for messages"""


def kind_of(name: str) -> Compression:
    """Properties of the compression that an option names: none, fp16, powersgd:4, ..."""
    return COMPRESSIONS[name.partition(":")[0]]


def reduced_bytes(shapes: Iterable[Sequence[int]], name: str) -> float:
    """Bytes of the float32 gradients of these shapes that a rank reduces, as `hvd.compression` sends them."""
    number = int(name.partition(":")[2] or 0)
    return sum(kind_of(name).bytes_of(shape, number) for shape in shapes)
