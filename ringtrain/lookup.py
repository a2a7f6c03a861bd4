"""Finds what the configuration names: in a dictionary, or as module:function in the user's own code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ringtrain.config import nearest
from ringtrain.errors import ConfigError


def find(option: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Finds a function by name.

    Args:
        option: that holds the name, for messages, e.g. "model.name".
        name: a key of known, or "module:function".
        known: what ringtrain brings along.

    Returns:
        The function. A user's module is imported when it is called, which is after devices are pinned: modules of
        models and layers like to touch them.

    Raises:
        ConfigError: nothing has that name; when called, the user's module cannot be imported.
    """
    if name in known:
        return known[name]
    if ":" not in name and not known:
        raise ConfigError(f"{option}: got {name}, expected module:function")
    if ":" not in name:
        raise ConfigError(f"{option}: got {name}, {nearest(name, known)} (or module:function for your own)")
    return lambda *args, **kwargs: _imported(option, name)(*args, **kwargs)


def _imported(option: str, name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{option}: got {name}, but importing {module_name} failed: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest(function_name, functions)
        raise ConfigError(f"{option}: {module_name} has no function {function_name!r}: {hint}")
    return function
