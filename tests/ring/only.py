"""Marks of properties and jobs, which run many in one start.

Their tests read the marks from the source, so that they are collected without importing TensorFlow.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[[], None])


def only(np: int | None = None, launcher: str | None = None) -> Callable[[F], F]:
    """Marks a function for launches with `np` ranks, or for one launcher."""
    return lambda function: function


def quick(function: F) -> F:
    """Marks a function for `make test`, as pytest.mark.quick does a test."""
    return function


def marked_functions(path: Path) -> dict[str, dict[str, Any]]:
    """Public functions of a file: by name the arguments of `only`, and "quick"."""
    functions = {}
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        marks: dict[str, Any] = {"quick": False}
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Name) and decorator.id == "quick":
                marks["quick"] = True
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "only":
                marks |= {word.arg: ast.literal_eval(word.value) for word in decorator.keywords}
        functions[node.name] = marks
    return functions
