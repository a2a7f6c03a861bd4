"""Rows of large NumPy arrays, read where they are: TensorFlow copies the arrays of a pipeline, also from a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGE = 64 << 20
"""bytes from which on an array is not copied; rows of a smaller copy take less time of the processor"""


def is_large(array: Any) -> bool:
    """Returns whether an array is so large that its rows are read where it is, instead of from a copy."""
    if type(array) not in (np.ndarray, np.memmap) or array.nbytes < LARGE:
        return False
    # TensorFlow takes numbers of the processor's byte order alone.
    return array.dtype.kind in "biufc" and array.dtype.isnative


def rows(
    arrays: Sequence[NDArray[Any]], numbers: Any, converted: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray
) -> list[Any]:
    """Tensors with the rows of these numbers, int64 [n], of each array.

    Args:
        converted: Function that is applied to the rows.
    """
    import tensorflow as tf

    if not arrays:
        return []

    def taken(numbers: NDArray[np.int64]) -> list[NDArray[Any]]:
        return [converted(array[numbers]) for array in arrays]  # take() copies arrays in Fortran's order first

    nothing = [converted(array[:0]) for array in arrays]
    found = tf.nest.flatten(tf.numpy_function(taken, [numbers], [array.dtype for array in nothing]))
    shapes = [(*numbers.shape, *array.shape[1:]) for array in nothing]
    return [tf.ensure_shape(tensor, shape) for tensor, shape in zip(found, shapes, strict=True)]
