"""Marks a property that makes sense under some launches only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[[], None])


def only(np: int | None = None, launcher: str | None = None) -> Callable[[F], F]:
    """Read from the source by test_properties.py, which collects properties without importing TensorFlow."""
    return lambda function: function
