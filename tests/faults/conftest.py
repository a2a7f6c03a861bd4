"""How often faults happen: a sample, or the full counts with RINGTRAIN_CHAOS=full (make chaos); and their table."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

FULL = os.environ.get("RINGTRAIN_CHAOS") == "full"
ROWS: list[tuple[str, str]] = []


@pytest.fixture(scope="session")
def count() -> Callable[[int, int], int]:
    """Chooses between the number for a sample and the full one."""
    return lambda sample, full: full if FULL else sample


@pytest.fixture(scope="session")
def tally() -> Callable[[str, str], None]:
    """Adds a row, what was done and what came of it, to the table at the end."""
    return lambda what, result: ROWS.append((what, result))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("faults")
        for what, result in ROWS:
            terminalreporter.write_line(f"| {what} | {result} |")
