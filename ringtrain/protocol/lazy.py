"""Names of a package whose modules are imported when a name is used, as some load TensorFlow."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_of(
    package: str, modules: Mapping[str, str], advice: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, from the module of each name, which may be the module itself."""
    known = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")
        module = importlib.import_module(f"{package}.{modules[name]}")
        return known.setdefault(name, getattr(module, name, module))

    return get, lambda: sorted([*known, *modules])
