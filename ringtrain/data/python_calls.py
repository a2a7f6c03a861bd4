"""Python functions that threads of tf.data call by `tf.numpy_function`, also while the process ends.

An iterator that nothing has deleted reads ahead until Python has ended: a call that returns then ends the process by a
signal. So the end of calls is awaited before.
"""

from __future__ import annotations

import atexit
import codecs
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.errors import DataError

END_LIMIT_S = 5.0
QUIET_S = 0.1
"""without a call, until no other is expected"""


class _Calls:
    """Calls that are under way."""

    def __init__(self) -> None:
        self._lock, self._num_open, self._last_end = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._num_open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_open -= 1
            self._last_end = time.monotonic()

    def wait(self) -> None:
        """Waits until there is none, and no other comes."""
        deadline = time.monotonic() + END_LIMIT_S
        while time.monotonic() < deadline and (self._num_open or time.monotonic() - self._last_end < QUIET_S):
            time.sleep(QUIET_S / 5)


_calls = _Calls()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def called(*arguments: Any) -> Any:
        bound: Any = reference()
        return bound(*arguments)

    return called


def of_tensorflow(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method for `tf.numpy_function`, which keeps what it is given until the process ends."""
    bound = weakly(method)

    def called(*arguments: Any) -> Any:
        with _calls:
            return bound(*arguments)

    return called


def rows_of(method: Callable[..., Any], numbers: Any, specs: Sequence[Any]) -> list[Any]:
    """Tensors of the rows with these numbers, which a method returns in a list; `specs`: dtype and shape of a row."""
    if not specs:
        return []
    dtypes = [tf.string if dtype.kind == "O" else tf.as_dtype(dtype) for dtype, _ in specs]
    values = tensors_of(method, [numbers], dtypes)
    return [tf.ensure_shape(one, [*numbers.shape, *shape]) for one, (_, shape) in zip(values, specs, strict=True)]


def tensors_of(method: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Tensors of the arrays that a bound method returns in a list; see `text_of_data_error` for its DataError."""
    bound = of_tensorflow(method)

    def called(*arguments: Any) -> list[Any]:
        try:
            found = bound(*arguments)
        except DataError as error:  # TensorFlow would print the traceback of an exception
            nothing = [np.empty(0, tf.as_dtype(dtype).as_numpy_dtype) for dtype in dtypes]
            return [*nothing, f"DataError: {error}"]
        return [*found, ""]

    *found, problem = tf.numpy_function(called, inputs, [*dtypes, tf.string])
    checked = tf.raw_ops.Assert(condition=tf.equal(problem, ""), data=[problem])
    with tf.control_dependencies([checked]):
        return [tf.identity(one) for one in found]


ASSERTED = re.compile(r"assertion failed: \[DataError: (.*?)\](?:\s*\[\[|\s*$)", re.MULTILINE)


def text_of_data_error(error: Exception) -> str:
    """Text of the DataError by which an operation of a pipeline has failed; "": it was another error."""
    asserted = ASSERTED.search(str(error))
    if not asserted:
        return ""
    return codecs.escape_decode(asserted[1].encode())[0].decode(errors="replace")  # as the operation prints texts


atexit.register(_calls.wait)
