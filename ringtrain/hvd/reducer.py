"""The seam for ways to reduce dense gradients that are no allreduce of each.

To add one: a module in reducers/ with a `Compressor` and its `Reducer` (bfloat16.py has no state, powersgd.py has), a
row in ringtrain/compressions.py, a method of `hvd.Compression` with the row's name (an attribute, if it takes no
number), and a line in reducers/__init__.py, in the help of `hvd.compression` in config.py, and in docs/slow-links.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from ringtrain.hvd.reduction import Reduction


class Reducer:
    """Reduces the dense gradients of one optimizer, and has its own state; see reducers/bfloat16.py for a small one."""

    has_state = False
    """whether a step leaves something for the next one, so that no step may be skipped"""

    def build(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Makes the state for an optimizer's variables, which `slots_of` finds."""
        return []

    def of_one_rank(self) -> list[Any]:
        """Variables of the state that differ between ranks."""
        return []

    def reduce(
        self, reduction: Reduction, tensors: list[tf.Tensor], variables: Sequence[Any], name: str
    ) -> list[tf.Tensor]:
        """Reduces gradients over the ranks. Collective, in a graph.

        Args:
            reduction: Of the optimizer. `reduction.allreduce` is Horovod's for gradients, `means` that for other
                tensors, and `gather_parts` joins tensors of the ranks along their first axis.
            tensors: This rank's gradients, none where it trains alone; shapes and dtypes stay.
            variables: Whose gradients they are, of Keras or TensorFlow: `id(tensor_of(variable))` is a key. Those of a
                check are none that `build` has seen: their gradients must be combined exactly, by
                `reduction.allreduce`.
            name: Prefix of the operations' names, which are equal on all ranks.
        """
        raise NotImplementedError


class Compressor:
    """Settings of a reducer: what `DistributedOptimizer(compression=...)` takes; `str` is its name."""

    def check(self, reduction: Reduction) -> None:
        """Raises ValueError for arguments of `DistributedOptimizer` that do not go with it."""

    def reducer(self) -> Reducer:
        """Reducer of one optimizer."""
        raise NotImplementedError

    def compress(self, tensor: Any) -> Any:
        """Refuses Horovod's own calls, whose compressions cast each number."""
        raise ValueError(f"{self} is a compression for hvd.DistributedOptimizer only: use none or fp16 here")
