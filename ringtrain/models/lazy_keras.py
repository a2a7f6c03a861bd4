"""Defers the import of Keras modules that training does not use: with scikit-learn and matplotlib, about a second.

Standard library only. importlib.util.LazyLoader does not work here: code that iterates over sys.modules, such as
TensorFlow's autograph, loads all its modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

LATER = ("keras.wrappers", "keras.visualization", "keras.src.visualization")
"""Modules that are not accessed while Keras is imported."""


class Finder:
    """Import hook for modules that load on first access."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds the modules in LATER; leaves all others to the next finders."""
        spec = PathFinder.find_spec(name, path, target) if name in LATER else None
        if spec is not None:
            loader: Any = spec.loader  # not shared with other modules
            loader.exec_module = functools.partial(_put_off, loader.exec_module)
        return spec


def _put_off(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    def load(name: str) -> Any:
        module.__dict__.pop("__getattr__", None)
        try:
            execute(module)
        except BaseException:
            module.__dict__["__getattr__"] = load  # to raise the error again
            raise
        return getattr(module, name)

    module.__dict__["__getattr__"] = load


def start() -> None:
    """Installs the hook; call it before Keras is imported."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
