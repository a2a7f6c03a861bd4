"""How often faults happen: a sample, or the full counts with RINGTRAIN_CHAOS=full (make chaos); and their table."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

FULL = os.environ.get("RINGTRAIN_CHAOS") == "full"
ROW = "row of the table of faults"
"""name of a test's property that is a row"""


@pytest.fixture(scope="session")
def count() -> Callable[[int, int], int]:
    """Chooses between the number for a sample and the full one."""
    return lambda sample, full: full if FULL else sample


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Adds a row, what was done and what came of it, to the table at the end."""
    return lambda what, result: request.node.user_properties.append((ROW, f"| {what} | {result} |"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = []
    for report in terminalreporter.getreports("passed"):
        if report.when == "call":
            rows += [row for name, row in report.user_properties if name == ROW]
    if rows:
        terminalreporter.section("faults")
        for row in rows:
            terminalreporter.write_line(row)
