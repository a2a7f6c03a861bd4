"""State of callbacks: attributes that are numbers, texts, arrays and variables, and lists, tuples and dicts of these.

Of Keras' metrics, layers and models, the state is their variables. A value is kept as one for JSON, in which arrays and
variables are names of arrays. A name follows from the content, so that equal values are equal.
"""

from __future__ import annotations

import collections
import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain import hvd
from ringtrain.checkpoint.model_state import Arrays
from ringtrain.hvd.keras_patches import layers_of, slots_of

NO_STATE = {"_model", "params", "min_delta", "monitor_op", "writer", "csv_file", "progbar"}
NO_STATE |= {"_writers", "_log_write_dir", "_train_dir", "_val_dir", "_summary_module", "_batch_trace_context"}
"""attributes that Keras sets in each start: paths, open files, and min_delta, whose sign it changes once per object"""
VARIABLES = (tf.Variable, keras.Variable)
KERAS_OBJECTS = (keras.Layer, keras.metrics.Metric, keras.optimizers.Optimizer)
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
PREFIX = "callback-"
"""of the names of arrays"""
Values = dict[str, tuple[Any, Arrays]]
"""value for JSON and its arrays, by attribute"""
State = tuple[list[dict[str, Any]], Arrays]
"""class and values of each callback, and the arrays of all"""


class CallbackState:
    """Attributes of callbacks, as far as they have changed since this object was made, or ever had."""

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], model: Any = None) -> None:
        self.callbacks, self.model = callbacks, model
        self._first = [_split(callback, model)[0] for callback in callbacks]
        """what never changes is an argument, maybe a secret, that a resumed run takes from the script"""
        self._changed: list[set[str]] = [set() for _ in callbacks]
        """names of attributes that have changed, by callback: also one that has its first value again is saved"""
        self._others: list[dict[str, list[Any]]] = []
        """what cannot be saved, by callback, with what it holds at the first save"""
        self._named: set[str] = set()

    def save(self) -> State:
        """Returns what has changed, and names once what has changed since the first save and cannot be saved."""
        of_callbacks = []
        for number, callback in enumerate(self.callbacks):
            values, others = _split(callback, self.model)
            if number == len(self._others):
                self._others.append(others)
            first, changed = self._first[number], self._changed[number]
            changed |= {name for name, (plain, _) in values.items() if name not in first or plain != first[name][0]}
            of_callbacks.append({name: value for name, value in values.items() if name in changed})
            for name, parts in others.items():
                before = self._others[number].get(name, [])
                if [id(part) for part in parts] != [id(part) for part in before]:
                    self._name(f"{type(callback).__name__}.{name}", type(parts[0]).__name__)
        return _state(self.callbacks, of_callbacks)

    def _name(self, path: str, kind: str) -> None:
        """Names once an attribute that is another object, or holds other ones."""
        if path not in self._named:
            text = f"{path} changes and cannot be saved ({kind}): a resumed run has what your code sets"
            _say(f"{text}; numbers, texts, arrays and variables are saved")
        self._named.add(path)


class SharedCallbackState(CallbackState):
    """State of callbacks that ranks give each other, and that is restored over another one."""

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], model: Any) -> None:
        super().__init__(callbacks, model)
        self._at_start = _state(callbacks, self._first)

    def restore(self, state: State = ([], {})) -> None:
        """Sets the state of another rank, and otherwise the values at the start."""
        restore_callbacks(self.callbacks, self._at_start)
        restore_callbacks(self.callbacks, state)


class Snapshot:
    """Values of a model, its optimizers and callbacks, to which they can return."""

    def __init__(self, model: Any, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._arrays: list[tuple[Any, NDArray[Any]]] = []
        for variable in (*model.variables, *slots_of(model)):
            self._arrays += [(copy, copy.numpy()) for copy in hvd.copies_of(variable)]
        self._trainable = [(layer, layer.trainable) for layer in layers_of(model)]  # outer layers first
        self._callbacks, self._state = callbacks, state_of(callbacks, model)
        self._attributes = [dict(vars(callback)) for callback in callbacks]

    def restore(self) -> None:
        """Restores the values, and attributes of the callbacks that are new, gone, or another object."""
        for callback, attributes in zip(self._callbacks, self._attributes, strict=True):
            vars(callback).clear()
            vars(callback).update(attributes)
        self.restore_values()

    def restore_values(self) -> None:
        """Restores the values; attributes of the callbacks that cannot be saved, or are new, stay."""
        for variable, array in self._arrays:
            if not np.array_equal(variable.numpy(), array):
                variable.assign(array)
        for layer, trainable in self._trainable:
            if layer.trainable != trainable:
                layer.trainable = trainable
        restore_callbacks(self._callbacks, self._state)


def _split(callback: Any, model: Any = None) -> tuple[Values, dict[str, list[Any]]]:
    """Attributes of a callback that can be saved, and the others, with what each holds, by which a change is seen."""
    values, others = Values(), {}
    # Variables of the trained model are not saved again.
    of_model = {id(variable) for variable in (*model.variables, *slots_of(model))} if model is not None else set()
    for name, value in vars(callback).items():
        arrays = Arrays()
        if name in NO_STATE:
            continue
        try:
            values[name] = _encoded(value, of_model, arrays), arrays
        except TypeError:
            parts = value if isinstance(value, CONTAINERS) else getattr(value, "__dict__", {}).values()
            others[name] = [value] if isinstance(value, KERAS_OBJECTS) else [value, *parts]
    return values, others


def _encoded(value: Any, of_model: set[int], arrays: Arrays) -> Any:
    """Value for JSON, with arrays put aside. Raises TypeError for what cannot be saved."""
    if isinstance(value, np.ndarray | np.generic):
        return {"array": _put_aside(np.asarray(value), arrays)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list:
        return [_encoded(part, of_model, arrays) for part in value]
    if type(value) is tuple:
        return {"tuple": _encoded([*value], of_model, arrays)}
    if type(value) is dict:
        return {"dict": _encoded([[*item] for item in value.items()], of_model, arrays)}
    if isinstance(value, KERAS_OBJECTS):
        return {"variables": _encoded([*value.variables], of_model, arrays)}
    if isinstance(value, VARIABLES) and id(value) not in of_model:
        return {"variable": _put_aside(value.numpy(), arrays)}
    raise TypeError(type(value).__name__)


def _put_aside(array: NDArray[Any], arrays: Arrays) -> str:
    """Adds an array to the others and returns its name there. Raises TypeError for types that cannot be saved."""
    if array.dtype.kind not in "biufcmM":
        raise TypeError(f"an array of {array.dtype}")
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    name = f"{PREFIX}{digest.hexdigest()[:32]}"
    arrays[name] = array
    return name


def _decoded(value: Any, arrays: Mapping[str, NDArray[Any]], current: Any) -> Any:
    """Value of an attribute that holds `current`: variables in it are set, everything else is new."""
    if isinstance(value, list):
        if not isinstance(current, list | tuple) or len(current) != len(value):
            current = [None for _ in value]
        return [_decoded(part, arrays, old) for part, old in zip(value, current, strict=True)]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(content, arrays, current))
    if kind == "dict":
        before = current if isinstance(current, dict) else {}
        items = [(_decoded(key, arrays, None), part) for key, part in content]
        return {key: _decoded(part, arrays, before.get(key)) for key, part in items}
    if kind == "variables":
        _decoded(content, arrays, [*getattr(current, "variables", ())])
        return current
    array = arrays[content]
    if kind == "array":
        return array.copy()[()]  # a scalar, if it has no dimension
    if isinstance(current, VARIABLES) and tuple(current.shape) == array.shape:
        current.assign(array)
        return current
    return keras.Variable(array, dtype=str(array.dtype))


def _state(callbacks: Sequence[keras.callbacks.Callback], of_callbacks: Sequence[Values]) -> State:
    """State with these values of each callback, and copies of their arrays, as training continues meanwhile."""
    states, arrays = [], Arrays()
    for callback, values in zip(callbacks, of_callbacks, strict=True):
        plain = {}
        for name, (value, of_value) in values.items():
            plain[name] = value
            arrays |= {key: np.array(array) for key, array in of_value.items()}
        states.append({"class": type(callback).__name__, "values": plain})
    return states, arrays


def state_of(callbacks: Sequence[keras.callbacks.Callback], model: Any) -> State:
    """All that can be saved of callbacks."""
    return _state(callbacks, [_split(callback, model)[0] for callback in callbacks])


def restore_callbacks(callbacks: Sequence[keras.callbacks.Callback], state: State) -> None:
    """Sets attributes that have other values; callbacks of a class must have the same order as when they were saved."""
    states, arrays = state
    for kind in sorted({one["class"] for one in states}):
        now = [callback for callback in callbacks if type(callback).__name__ == kind]
        before = [one["values"] for one in states if one["class"] == kind]
        if len(now) != len(before):
            _say(f"the state of {len(before)} {kind} is not restored: the callbacks have {len(now)} now")
            continue
        for callback, values in zip(now, before, strict=True):
            same, _ = _split(callback)
            for name, plain in values.items():
                if name not in same or same[name][0] != plain:
                    vars(callback)[name] = _decoded(plain, arrays, vars(callback).get(name))


def _say(text: str) -> None:
    """Prints a line on rank 0."""
    if not (hvd.is_initialized() and hvd.rank()):
        print(f"ringtrain: {text}", file=sys.stderr, flush=True)
