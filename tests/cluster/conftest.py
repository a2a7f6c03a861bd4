"""Labs for tests; where a machine cannot have one, a skip that nobody overlooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import lab
import pytest

REQUIRED = "RINGTRAIN_REQUIRE_LAB"
skipped: list[str] = []


@pytest.fixture(scope="session")
def lacking() -> str:
    """What this machine lacks for a lab; empty: nothing."""
    return lab.missing()


@pytest.fixture
def lab_possible(lacking: str, request: pytest.FixtureRequest) -> None:
    """For tests that make their labs themselves: they skip, or fail, where there can be none."""
    if lacking and os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, and this machine cannot have a lab of hosts: it lacks {lacking}")
    if lacking:
        skipped.append(request.node.nodeid)
        pytest.skip(f"a lab of hosts needs {lacking}")


@pytest.fixture
def make_lab(lab_possible: None) -> Iterator[Callable[..., lab.Lab]]:
    """Makes labs that end with the test; takes what lab.Lab takes."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(lab.Lab(*args, **options))


@pytest.fixture
def two_hosts(make_lab: Callable[..., lab.Lab]) -> lab.Lab:
    """A lab of host1 and host2."""
    return make_lab(2)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if skipped:
        terminalreporter.write_line(
            f"NOT TESTED ON SEVERAL HOSTS: {len(skipped)} tests were skipped, since this machine lacks {lab.missing()}",
            red=True,
            bold=True,
        )
