"""Defects that are planted in production code, to show that a simulation finds them."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Defect:
    owner: Any
    """module or class"""
    attribute: str
    replacement: Any
    """None: the function with other text"""
    changes: tuple[tuple[str, str], ...] = ()
    """text of the function, which occurs once, and what replaces it"""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Context in which the code has the defect."""
        replacement = self.replacement
        if self.changes:
            replacement = _changed(getattr(self.owner, self.attribute), *self.changes)
        with mock.patch.object(self.owner, self.attribute, replacement):
            yield


def text(owner: Any, attribute: str, *changes: tuple[str, str]) -> Defect:
    """Defect of a function by other text in its source."""
    return Defect(owner, attribute, None, changes)


def seeds_to_find(defect: Defect, simulate: Callable[[int], Any], first: int, count: int) -> int:
    """Number of schedules, from a seed on, until one shows the defect; 0: none of so many."""
    with defect.planted():
        for number in range(count):
            if simulate(first + number).violation:
                return number + 1
    return 0


def _changed(function: Callable[..., Any], *changes: tuple[str, str]) -> Callable[..., Any]:
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert source.count(old) == 1, f"{function.__qualname__} has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    namespace: dict[str, Any] = {}
    exec(compile(f"from __future__ import annotations\n{source}", "planted", "exec"), function.__globals__, namespace)
    return namespace[function.__name__]
