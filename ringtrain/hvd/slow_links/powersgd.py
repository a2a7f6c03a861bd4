"""PowerSGD: low-rank approximations of gradients with error feedback (Vogels et al. 2019, arXiv 1905.13727).

A gradient is a matrix M [rows, columns] of a rank of the job. A step of power iteration, with Q of the last step:

    P = mean of M Q, orthonormalized        [rows, rank]
    Q = mean of M' P                        [columns, rank]
    gradient = P Q',  error = M - P Q'      the error is added to M of the next step

Rows and columns are what a dense or convolutional kernel's inputs and outputs are. Means are over the ranks; a matrix
is sent as soon as its gradient is computed. Vectors, and matrices that would hardly get smaller, are sent whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from ringtrain.derived import low_rank
from ringtrain.hvd.collectives import tensor_of

Mean = Callable[[list[tf.Tensor], str], list[tf.Tensor]]
"""Function of tensors and a name: their means over the ranks."""


class OfOptimizers:
    """Compression that an allreduce cannot have, since it is no cast of each number."""

    @classmethod
    def compress(cls, tensor: Any) -> Any:
        raise ValueError(f"{cls.__name__} is a compression for hvd.DistributedOptimizer only: use none or fp16 here")


@dataclass(frozen=True)
class PowerSGD(OfOptimizers):
    """Compression by matrices of low rank: `hvd.Compression.powersgd(4)`.

    Args:
        rank: Columns of P and Q, at least 1. More: closer to the gradient, and more bytes.
        error_feedback: Add what a step leaves out to the next gradient. False is for experiments: it trains worse.
        min_ratio: Compress a matrix only if its elements are at least this many times those of P and Q.

    Raises:
        ValueError: `rank` is below 1.
    """

    rank: int
    error_feedback: bool = True
    min_ratio: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: got rank {self.rank}, expected at least 1")

    def matrix_of(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Rows and columns of a gradient of this shape; None: it is sent whole."""
        return low_rank(shape, self.rank, self.min_ratio)


@dataclass(frozen=True)
class Matrix:
    """State of a compressed variable."""

    shape: tuple[int, int]
    error: keras.Variable | None
    """what the last step left out on this rank, in the variable's shape"""
    right: keras.Variable
    """Q of the last step, [columns, rank], equal on all ranks"""


class LowRank:
    """State of PowerSGD for the variables of one optimizer, which holds it."""

    def __init__(self, settings: PowerSGD) -> None:
        self.settings = settings
        self._matrices: dict[int, Matrix] = {}

    def build(self, optimizer: Any, variables: Sequence[Any]) -> list[keras.Variable]:
        """Adds the state of the compressed ones of an optimizer's variables, and returns it."""
        added = []
        for index, variable in enumerate(variables):
            shape = self.settings.matrix_of(variable.shape)
            if shape is None or variable.dtype not in ("float32", "float64"):
                continue
            name = f"{variable.path.replace('/', '_')}_powersgd_right"
            # The same numbers on every rank; those of later steps are means.
            numbers = keras.initializers.RandomNormal(stddev=1.0, seed=index)
            right = optimizer.add_variable((shape[1], self.settings.rank), numbers, variable.dtype, name=name)
            added.append(right)
            error = None
            if self.settings.error_feedback:
                error = optimizer.add_variable_from_reference(variable, "powersgd_error")
                added.append(error)
            self._matrices[id(tensor_of(variable))] = Matrix(shape, error, right)
        return added

    def errors(self) -> list[keras.Variable]:
        """Variables that differ between ranks."""
        return [matrix.error for matrix in self._matrices.values() if matrix.error is not None]

    def compresses(self, variable: Any) -> bool:
        return id(tensor_of(variable)) in self._matrices

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], whole: Sequence[Any], mean: Mean
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the means of compressed gradients, up to the error that is kept, and those of `whole` tensors."""
        matrices = [self._matrices[id(tensor_of(variable))] for variable in variables]
        own = []
        for matrix, gradient in zip(matrices, gradients, strict=True):
            kept = gradient if matrix.error is None else gradient + tf.cast(matrix.error.value, gradient.dtype)
            own.append(tf.reshape(kept, matrix.shape))
        lefts = [tf.matmul(one, matrix.right.value) for one, matrix in zip(own, matrices, strict=True)]
        means = mean([*lefts, *whole], "left")
        # Householder's QR: orthonormal columns also of a matrix whose rank is lower.
        lefts = [tf.linalg.qr(one)[0] for one in means[: len(lefts)]]
        rights = mean([tf.matmul(one, left, transpose_a=True) for one, left in zip(own, lefts, strict=True)], "right")
        results = []
        for matrix, one, left, right, gradient in zip(matrices, own, lefts, rights, gradients, strict=True):
            result = tf.matmul(left, right, transpose_b=True)
            if matrix.error is not None:
                matrix.error.assign(tf.reshape(one - result, matrix.error.shape))
            # A column of zeros, as of a gradient that is zero, would stay zero: the next step begins with the last one.
            is_zero = tf.reduce_all(tf.equal(right, 0), axis=0)
            matrix.right.assign(tf.where(is_zero, matrix.right.value, right))
            results.append(tf.reshape(result, gradient.shape))
        return results, means[len(lefts) :]
