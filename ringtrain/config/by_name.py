"""Functions and classes that options name: a key of a table, or module:function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ringtrain.config.options import nearest
from ringtrain.errors import ConfigError


def find(option: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns the function that a key of `known` or "module:function" names; raises ConfigError with `option`."""
    if name in known:
        return known[name]
    if ":" not in name and not known:
        raise ConfigError(f"{option}: got {name}, expected module:function")
    if ":" not in name:
        raise ConfigError(f"{option}: got {name}, {nearest(name, known)} (or module:function for your own)")
    # Imported when it is called, after devices are pinned: it may initialize devices.
    return lambda *args, **kwargs: imported(option, name)(*args, **kwargs)


def made(option: str, name: str, function: Callable[[], Any], kind: Any, expected: str) -> Any:
    """Calls a function that an option names; raises ConfigError unless it returns an instance of `kind`."""
    result = function()
    if not isinstance(result, kind):
        raise ConfigError(f"{option}: {name} returned {type(result).__name__}, expected {expected}")
    return result


def imported(option: str, name: str) -> Callable[..., Any]:
    """Imports the function or class that "module:function" names; raises ConfigError if there is none."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        searched = ""
        if isinstance(error, ModuleNotFoundError):
            searched = f" (searched: {Path.cwd()} and PYTHONPATH)"
        raise ConfigError(f"{option}: got {name}, but importing {module_name} failed: {error}{searched}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest(function_name, functions)
        raise ConfigError(f"{option}: {module_name} has no function {function_name!r}: {hint}")
    return function
