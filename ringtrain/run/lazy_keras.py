"""What Keras loads for other uses than training is loaded when it is used: scikit-learn, matplotlib, a second's work.

Standard library only. Modules of importlib.util.LazyLoader would not do: whoever walks through sys.modules, as
TensorFlow's autograph does, wakes them all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

LATER = ("keras.wrappers", "keras.visualization", "keras.src.visualization")
"""modules that nothing looks into while Keras is imported"""


class Finder:
    """Finds modules that load themselves when something that they hold is first asked for."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds LATER; leaves the others to those that come after."""
        spec = PathFinder.find_spec(name, path, target) if name in LATER else None
        if spec is not None:
            loader: Any = spec.loader  # of this module alone
            loader.exec_module = functools.partial(_put_off, loader.exec_module)
        return spec


def _put_off(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    def load(name: str) -> Any:
        module.__dict__.pop("__getattr__", None)
        try:
            execute(module)
        except BaseException:
            module.__dict__["__getattr__"] = load  # to say it again
            raise
        return getattr(module, name)

    module.__dict__["__getattr__"] = load


def start() -> None:
    """From now on; before Keras is imported."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
