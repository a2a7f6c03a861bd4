"""State of the user's callbacks: what their attributes keep, as values of a checkpoint's manifest and arrays apart.

These are numbers, lists, dicts, sets, arrays, tensors, variables, and the variables of Keras' objects, such as metrics
and models. In the manifest, a value that JSON does not know is a dictionary whose first key names its kind.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import hashlib
import io
import json
import pickle
import sys
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain import hvd
from ringtrain.hvd.keras_patches import slots_of
from ringtrain.run.model_state import Arrays

NO_STATE = ("_model", "params", "min_delta")
"""attributes of callbacks that change, but are arguments; Keras changes the sign of min_delta once per object"""
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
KERAS_OBJECTS = (keras.Layer, keras.metrics.Metric, keras.optimizers.Optimizer, keras.random.SeedGenerator)
MAX_COMPARED_BYTES = 1 << 24
"""Size up to which an object that cannot be saved is compared by its content, above by its identity."""
Values = dict[str, tuple[bytes, Any, Arrays]]
"""Digest, plain value and arrays of each attribute of a callback that can be saved."""


class OfTheModel(Exception):
    """A variable of the trained model, which every checkpoint has anyway."""


class CallbackState:
    """Attributes of callbacks, as far as they have changed since this object was made, or ever had.

    Attributes that do not change are arguments, which a resumed run takes from the script. Texts are never state, and
    may be secrets.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], model: Any = None) -> None:
        self.callbacks, self.model = callbacks, model
        self._texts = [_texts_of(callback) for callback in callbacks]
        self._first: list[dict[str, bytes]] = []
        """digests of the attributes, by callback"""
        for number in range(len(callbacks)):
            self._first.append({name: digest for name, (digest, _, _) in self._saved(number).items()})
        self._changed: list[set[str]] = [set() for _ in callbacks]
        """names of attributes that have changed, by callback: also one that has its first value again is saved"""
        self._unsaved: list[dict[str, Any]] = []
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Notes what cannot be saved, and what has changed, after callbacks have prepared their training."""
        saved = [self._saved(number) for number in range(len(self.callbacks))]
        pairs = zip(self.callbacks, saved, strict=True)
        self._unsaved = [self._unsavable(callback, values) for callback, values in pairs]
        for number, values in enumerate(saved):
            self._note_changes(number, values)

    def save(self) -> tuple[list[dict[str, Any]], Arrays]:
        """Returns plain values by callback, and arrays apart, each under a name."""
        states, arrays = [], Arrays()
        for number, callback in enumerate(self.callbacks):
            values, saved = {}, self._saved(number)
            self._report(number, saved)
            self._note_changes(number, saved)
            for name, (_, value, parts) in saved.items():
                if name in self._changed[number]:
                    values[name] = value
                    arrays |= {key: np.array(array) for key, array in parts.items()}  # training continues meanwhile
            states.append({"class": type(callback).__name__, "texts": self._texts[number], "values": values})
        return states, arrays

    def _note_changes(self, number: int, values: Values) -> None:
        first = self._first[number]
        self._changed[number] |= {name for name, (digest, _, _) in values.items() if digest != first.get(name)}

    def _saved(self, number: int) -> Values:
        """Digest, plain value and arrays of each attribute of a callback that can be saved."""
        return values_of(self.callbacks[number], variables_of(self.model), f"callback-{number}")

    def _unsavable(self, callback: keras.callbacks.Callback, saved: Container[str]) -> dict[str, Any]:
        """Content or identity of each attribute of a callback that cannot be saved, except those that Keras keeps.

        saved: Names of those that can.
        """
        known, kept_by_keras = variables_of(self.model), _attributes_of_keras(callback)
        marks = {}
        for name, value in vars(callback).items():
            if name in saved or name in NO_STATE or (name in kept_by_keras and not _is_own_callable(value)):
                continue
            try:
                encoded(value, known, name, {})
            except OfTheModel:
                continue
            except TypeError:
                marks[name] = content_of(value)
        return marks

    def _report(self, number: int, saved: Container[str]) -> None:
        """Names, once, what of a callback changes and cannot be saved."""
        if not self._unsaved:  # training has not begun
            return
        callback, before = self.callbacks[number], self._unsaved[number]
        for name, mark in self._unsavable(callback, saved).items():
            path = f"{type(callback).__name__}.{name}"
            if mark == before.get(name) or path in self._reported:
                continue
            self._reported.add(path)
            kind = type(vars(callback)[name]).__name__
            text = f"{path} changes and cannot be saved ({kind}): a resumed run has what your code sets"
            print(f"ringtrain: {text}; numbers, arrays and variables are saved", file=sys.stderr, flush=True)


class SharedCallbackState(CallbackState):
    """State of callbacks that ranks give each other, and that is restored over another one."""

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], model: Any) -> None:
        super().__init__(callbacks, model)
        known = variables_of(model)
        self._at_start = [copy.deepcopy(values_of(callback, known, "callback")) for callback in callbacks]

    def shared(self) -> list[dict[str, Any]]:
        """State for `restore` on another rank."""
        return loaded_callbacks(*self.save())

    def return_to_start(self) -> None:
        """Sets the values at the start, which the state of another rank leaves out."""
        known = variables_of(self.model)
        for callback, values in zip(self.callbacks, self._at_start, strict=True):
            _set_changed(callback, values, known)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Sets the state of another rank."""
        self.return_to_start()
        restore_callbacks(self.callbacks, states)


def variables_of(model: Any) -> set[int]:
    """Ids of all variables of a model and its optimizers."""
    if model is None:
        return set()
    return {id(variable) for variable in (*model.variables, *slots_of(model))}


def values_of(callback: Any, known: set[int], prefix: str) -> Values:
    """Digest, plain value and arrays of each attribute that can be saved; `known`: variables to leave out."""
    values = {}
    for name, attribute in vars(callback).items():
        arrays: Arrays = {}
        if name in NO_STATE:
            continue
        with contextlib.suppress(TypeError, OfTheModel):
            is_history = isinstance(callback, keras.callbacks.History)  # whose texts are logs
            value = encoded(attribute, known, f"{prefix}-{name}", arrays, with_texts=is_history)
            digest = hashlib.sha256(json.dumps(value).encode())
            for array in arrays.values():
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            values[name] = digest.digest(), value, arrays
    return values


def encoded(value: Any, known: set[int], prefix: str, arrays: Arrays, with_texts: bool = False) -> Any:
    """Value for JSON, with arrays put aside. Raises TypeError for what cannot be saved, and OfTheModel."""
    put = functools.partial(_put_aside, prefix=prefix, arrays=arrays)

    def all_of(parts: Any) -> list[Any]:
        return [encoded(part, known, prefix, arrays, with_texts) for part in parts]

    if isinstance(value, np.ndarray):
        return {"array": put(value)}
    if isinstance(value, np.bool_ | np.integer | np.floating) and isinstance(value.item(), bool | int | float):
        return {"scalar": value.item(), "dtype": value.dtype.str}
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    if isinstance(value, str | bytes) and with_texts:
        return value if isinstance(value, str) else value.decode(errors="replace")
    if type(value) is list:
        return all_of(value)
    if type(value) is collections.deque:
        return {"deque": all_of(value), "maxlen": value.maxlen}
    if type(value) in (set, frozenset):
        return {type(value).__name__: all_of(sorted(value, key=repr))}
    if type(value) is tuple:
        return {"tuple": all_of(value)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": dict(zip(value, all_of(value.values()), strict=True))}
    if isinstance(value, dict):
        return {"items": [all_of(item) for item in value.items()]}
    if isinstance(value, tf.Variable | keras.Variable):
        if id(value) in known:
            raise OfTheModel
        return {"variable": put(value.numpy()), "is_keras": isinstance(value, keras.Variable)}
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return {"tensor": put(value.numpy())}
    if isinstance(value, KERAS_OBJECTS):
        return {"variables": [put(variable.numpy()) for variable in _variables_in(value, known)]}
    raise TypeError(type(value).__name__)


def _put_aside(array: Any, prefix: str, arrays: Arrays) -> str:
    """Adds an array to the others and returns its name there. Raises TypeError for types that cannot be saved."""
    array = np.asarray(array)
    if array.dtype.kind not in "biufcmM":
        raise TypeError(f"an array of {array.dtype}")
    name = f"{prefix}-{len(arrays)}"
    arrays[name] = array
    return name


def _variables_in(value: Any, known: set[int]) -> list[Any]:
    """Variables of one of Keras' objects without those of the trained model. Raises OfTheModel if none are left."""
    of_value = [value.state] if isinstance(value, keras.random.SeedGenerator) else value.variables
    variables = [variable for variable in of_value if id(variable) not in known]
    if of_value and not variables:
        raise OfTheModel
    return variables


def loaded_callbacks(states: Sequence[Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """Returns what `CallbackState.save` has returned, with the arrays in their places."""

    def value_of(value: Any) -> Any:
        if isinstance(value, list):
            return [value_of(part) for part in value]
        if not isinstance(value, dict):
            return value
        (kind, content), *more = value.items()
        if kind in ("array", "tensor", "variable"):
            content = arrays[content]
        elif kind == "variables":
            content = [arrays[name] for name in content]
        elif kind == "dict":
            content = {key: value_of(inner) for key, inner in content.items()}
        else:
            content = value_of(content)
        return {kind: content, **dict(more)}

    loaded = []
    for state in states:
        values = {name: value_of(value) for name, value in state["values"].items()}
        loaded.append({**state, "values": values})
    return loaded


def restore_callbacks(callbacks: Sequence[keras.callbacks.Callback], states: Sequence[Mapping[str, Any]]) -> None:
    """Sets the loaded values; callbacks of one class must have the same order as when they were saved.

    If a class has another number of callbacks now, those are restored whose texts, such as `monitor`, are the same.
    """
    now = collections.Counter(type(callback).__name__ for callback in callbacks)
    before = collections.Counter(state["class"] for state in states)
    left = list(states)
    for callback in callbacks:
        kind = type(callback).__name__
        texts = _texts_of(callback) if now[kind] != before[kind] else None
        fits = (state for state in left if state["class"] == kind and texts in (None, state.get("texts", texts)))
        state = next(fits, None)
        if state:
            left.remove(state)
            _set(callback, state["values"])
        elif before[kind]:
            _say(f"{kind} begins anew: the checkpoint has none with the same arguments")
    for state in left:
        if before[state["class"]] > now[state["class"]]:
            _say(f"the checkpoint has the state of a {state['class']} that is not among the callbacks now")


def _say(text: str) -> None:
    """Prints a line on rank 0."""
    if not (hvd.is_initialized() and hvd.rank()):
        print(f"ringtrain: {text}", file=sys.stderr, flush=True)


def _texts_of(callback: Any) -> str:
    """Checksum of the texts in a callback's attributes, which are arguments and never state."""
    texts = {name: value for name, value in sorted(vars(callback).items()) if isinstance(value, str)}
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _set(callback: Any, values: Mapping[str, Any]) -> None:
    known = variables_of(getattr(callback, "model", None))
    for name, value in values.items():
        vars(callback)[name] = _decoded(value, vars(callback).get(name), known)


def _set_changed(callback: Any, before: Values, known: set[int]) -> None:
    """Sets the attributes that have other values than before."""
    after = values_of(callback, known, "callback")
    for name, (digest, value, parts) in before.items():
        if name in after and after[name][0] != digest:
            (state,) = loaded_callbacks([{"values": {name: value}}], parts)
            _set(callback, state["values"])


def _decoded(value: Any, current: Any, known: set[int]) -> Any:
    """Value of an attribute that holds `current`: variables in it are set, everything else is new."""
    if isinstance(value, list):
        is_alike = isinstance(current, list | tuple | collections.deque) and len(current) == len(value)
        if not is_alike:
            current = [None for _ in value]
        pairs = zip(value, current, strict=True)
        return [_decoded(part, inner, known) for part, inner in pairs]
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind in CONTAINERS:
        parts = _decoded(content, current, known)
        if kind == "deque":
            return collections.deque(parts, value["maxlen"])
        return CONTAINERS[kind](parts)
    if kind in ("dict", "items"):
        inner = current if isinstance(current, dict) else {}
        if kind == "items":
            content = {_decoded(key, None, known): part for key, part in content}
        result = {key: _decoded(part, inner.get(key), known) for key, part in content.items()}
        if type(inner) is dict:
            return result
        inner = copy.copy(inner)  # such as a defaultdict
        inner.clear()
        inner.update(result)
        return inner
    if kind == "scalar":
        return np.dtype(value["dtype"]).type(content)
    if kind == "tensor":
        return tf.constant(content)
    if kind == "variable":
        return _variable(content, current, value["is_keras"])
    if kind == "variables":
        _set_variables(current, content, known)
        return current
    return content


def _variable(content: NDArray[Any], current: Any, is_keras: bool) -> Any:
    """The current variable with a saved value, or a new one if it has another shape."""
    if isinstance(current, tf.Variable | keras.Variable) and tuple(current.shape) == content.shape:
        current.assign(content)
        return current
    if is_keras:
        return keras.Variable(content, dtype=str(content.dtype))
    return tf.Variable(content)


def _set_variables(current: Any, arrays: Sequence[NDArray[Any]], known: set[int]) -> None:
    """Sets the variables in an object, such as a metric, unless it has other ones than were saved."""
    variables = []
    if isinstance(current, KERAS_OBJECTS):
        variables = _variables_in(current, known)
    if [tuple(variable.shape) for variable in variables] != [array.shape for array in arrays]:
        print("ringtrain: a callback's object has other variables than were saved: not restored", file=sys.stderr)
        return
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


class Snapshot:
    """Values of a model, its optimizers and callbacks, to which they can return."""

    def __init__(self, model: Any, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._variables: list[Any] = []
        for variable in (*model.variables, *slots_of(model)):
            self._variables += hvd.copies_of(variable)
        self._arrays = [variable.numpy() for variable in self._variables]
        self._callbacks, self._known = callbacks, variables_of(model)
        self._attributes = [dict(vars(callback)) for callback in callbacks]
        self._values = [copy.deepcopy(values_of(callback, self._known, "callback")) for callback in callbacks]

    def restore(self) -> None:
        """Restores the values, and attributes of the callbacks that are new, gone, or another object."""
        for callback, attributes in zip(self._callbacks, self._attributes, strict=True):
            vars(callback).clear()
            vars(callback).update(attributes)
        self.restore_values()

    def restore_values(self) -> None:
        """Restores the values; attributes of the callbacks that cannot be saved, or are new, stay."""
        for variable, array in zip(self._variables, self._arrays, strict=True):
            if not np.array_equal(variable.numpy(), array):
                variable.assign(array)
        for callback, values in zip(self._callbacks, self._values, strict=True):
            _set_changed(callback, values, self._known)


@contextlib.contextmanager
def unchanged_afterwards(model: Any, callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Context after which a model, its optimizers and what can be saved of callbacks are as they were before."""
    before = Snapshot(model, callbacks)
    yield
    before.restore_values()


def _attributes_of_keras(callback: keras.callbacks.Callback) -> set[str]:
    """Names that the methods of Keras' own classes use, which a callback may derive from."""
    classes = [kind for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] == "keras"]
    names: set[str] = set()
    for kind in classes:
        for attribute in vars(kind).values():
            if isinstance(attribute, types.FunctionType):
                names.update(attribute.__code__.co_names)
    return names


def _is_own_callable(value: Any) -> bool:
    """Returns whether an object with attributes is called in place of a function, such as a schedule of a script."""
    is_function = isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType | type)
    return callable(value) and not is_function and bool(getattr(value, "__dict__", None))


def content_of(value: Any) -> Any:
    """Digest of an object that cannot be saved, or its id if it is large or cannot be pickled.

    An iterator is never equal to what it was: nothing shows how far it is.
    """
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return object()
    digest = _Digest()
    try:
        _Pickler(digest).dump(value)
    except Exception:  # of the object's own code
        return id(value)
    return digest.sha256.digest()


class _Digest:
    """File that keeps the digest of what is written."""

    def __init__(self) -> None:
        self.sha256, self.num_bytes = hashlib.sha256(), 0

    def write(self, content: Any) -> int:
        self.num_bytes += len(content)
        if self.num_bytes > MAX_COMPARED_BYTES:
            raise ValueError("too large")
        self.sha256.update(content)
        return len(content)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        """Objects that would be written as large files, or never are state."""
        is_opaque = isinstance(
            value, (*KERAS_OBJECTS, tf.Variable, keras.Variable, tf.Module, type, types.FunctionType)
        )
        return id(value) if is_opaque else None
