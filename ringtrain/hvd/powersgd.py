"""PowerSGD: low-rank approximations of gradients with error feedback (Vogels et al. 2019, arXiv 1905.13727).

A gradient is a matrix M [rows, columns] of a rank of the job. A step of power iteration, with Q of the last step:

    P = mean of M Q, orthonormalized        [rows, rank]
    Q = mean of M' P                        [columns, rank]
    gradient = P Q',  error = M - P Q'      the error is added to M of the next step

Rows and columns are what a dense or convolutional kernel's inputs and outputs are. Means are over the ranks; a matrix
is sent as soon as its gradient is computed. Vectors, and matrices that would hardly get smaller, are sent whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ringtrain.hvd.backend import Average
from ringtrain.hvd.collectives import tensor_of
from ringtrain.hvd.process import elastic

if TYPE_CHECKING:
    from ringtrain.hvd.reduction import Reduction


@dataclass(frozen=True)
class PowerSGD:
    """Compression by matrices of low rank: `hvd.Compression.powersgd(4)`.

    Args:
        rank: Columns of P and Q, at least 1. More: closer to the gradient, and more bytes.
        min_ratio: Compress a matrix only if its elements are at least this many times those of P and Q.

    Raises:
        ValueError: `rank` is below 1.
    """

    rank: int
    min_ratio: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: got rank {self.rank}, expected at least 1")

    def check(self, reduction: Reduction) -> None:
        """Raises ValueError for arguments of `DistributedOptimizer` that do not go with it."""
        if reduction.op != Average:
            raise ValueError(f"compression {self}: got another op, expected hvd.Average")
        if reduction.groups is not None:
            raise ValueError(f"compression {self} does not send gradients in groups: leave groups out")
        if elastic():
            raise ValueError(f"compression {self}: a lost rank would take what it has not sent along: not with elastic")

    def compress(self, tensor: Any) -> Any:
        """Refuses Horovod's own calls, whose compressions cast each number."""
        raise ValueError(f"{self} is a compression for hvd.DistributedOptimizer only: use none or fp16 here")

    def matrix_of(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Rows and columns of a gradient of this shape; None: it is sent whole."""
        size = math.prod(shape)
        if len(shape) < 2 or not size:
            return None
        rows, columns = size // shape[-1], shape[-1]
        if size < self.min_ratio * self.rank * (rows + columns) or self.rank > min(rows, columns):
            return None
        return rows, columns


@dataclass(frozen=True)
class Matrix:
    """State of a compressed variable."""

    shape: tuple[int, int]
    error: keras.Variable
    """what the last step left out on this rank, in the variable's shape"""
    right: keras.Variable
    """Q of the last step, [columns, rank], equal on all ranks"""


class LowRank:
    """Reduces the dense gradients of one optimizer, in place of an allreduce of each, and has its own state."""

    def __init__(self, settings: PowerSGD) -> None:
        self.settings = settings
        self._matrices: dict[int, Matrix] = {}

    def build(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Makes the state for an optimizer's variables, which `slots_of` finds."""
        added = []
        for index, variable in enumerate(variables):
            shape = self.settings.matrix_of(variable.shape)
            if shape is None or variable.dtype not in ("float32", "float64"):
                continue
            name, options = variable.path.replace("/", "_"), {"dtype": variable.dtype, "trainable": False}
            # The same numbers on every rank; those of later steps are means.
            numbers = keras.initializers.RandomNormal(stddev=1.0, seed=index)
            right_shape = shape[1], self.settings.rank
            right = keras.Variable(numbers, right_shape, name=f"{name}_powersgd_right", **options)
            error = keras.Variable("zeros", variable.shape, name=f"{name}_powersgd_error", **options)
            added += [right, error]
            self._matrices[id(tensor_of(variable))] = Matrix(shape, error, right)
        return added

    def of_one_rank(self) -> list[Any]:
        """Errors of this rank, which it has not sent yet."""
        return [matrix.error for matrix in self._matrices.values()]

    def reduce(
        self, reduction: Reduction, tensors: list[tf.Tensor], variables: Sequence[Any], name: str
    ) -> list[tf.Tensor]:
        """Means of the gradients, of compressed ones up to the error that is kept. Collective, in a graph."""
        matrices: dict[int, Matrix] = {}  # by the index of a tensor
        for index, variable in enumerate(variables):
            matrix = self._matrices.get(id(tensor_of(variable)))
            if matrix is not None:
                matrices[index] = matrix
        if not matrices:
            return reduction.allreduce(tensors, variables, name)  # the vectors of a check, which `build` has not seen

        # What the last step left out is part of this one.
        gradients: dict[int, tf.Tensor] = {}
        for index, matrix in matrices.items():
            gradient = tensors[index] + tf.cast(matrix.error.value, tensors[index].dtype)
            gradients[index] = tf.reshape(gradient, matrix.shape)

        # P, together with the tensors that are sent whole.
        lefts = [tf.matmul(gradients[index], matrix.right.value) for index, matrix in matrices.items()]
        wholes = [index for index in range(len(tensors)) if index not in matrices]
        means = reduction.means([*lefts, *(tensors[index] for index in wholes)], f"{name}_left")
        # Householder's QR: orthonormal columns also of a matrix whose rank is lower.
        lefts = [tf.linalg.qr(mean)[0] for mean in means[: len(lefts)]]

        # Q.
        rights = []
        for gradient, left in zip(gradients.values(), lefts, strict=True):
            rights.append(tf.matmul(gradient, left, transpose_a=True))
        rights = reduction.means(rights, f"{name}_right")

        results = dict(zip(wholes, means[len(lefts) :], strict=True))
        for (index, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            result = tf.matmul(left, right, transpose_b=True)
            matrix.error.assign(tf.reshape(gradients[index] - result, matrix.error.shape))
            # A column of zeros, as of a gradient that is zero, would stay zero: the next step begins with the last one.
            is_zero = tf.reduce_all(tf.equal(right, 0), axis=0)
            matrix.right.assign(tf.where(is_zero, matrix.right.value, right))
            results[index] = tf.reshape(result, tensors[index].shape)
        return [results[index] for index in range(len(tensors))]
