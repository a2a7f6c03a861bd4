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
        The function.

    Raises:
        ConfigError: nothing has that name, or the user's module cannot be imported.
    """
    if name in known:
        return known[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise ConfigError(f"{option}: got {name}, {nearest(name, known)} (or module:function for your own)")
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
