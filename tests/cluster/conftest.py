"""Labs for tests; where a machine cannot have one, a skip that nobody overlooks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import lab
import pytest
import slurm_lab

REQUIRED = "RINGTRAIN_REQUIRE_LAB"
LACKING = "what a lab lacks"
"""name of a skipped test's property"""


@pytest.fixture(scope="session")
def lacking() -> str:
    """What this machine lacks for a lab; empty: nothing."""
    return lab.missing()


@pytest.fixture
def lab_possible(lacking: str, request: pytest.FixtureRequest) -> None:
    """For tests that make their labs themselves: they skip, or fail, where there can be none."""
    refuse_or_skip("a lab of hosts", lacking, request)


def refuse_or_skip(what: str, lacking: str, request: pytest.FixtureRequest) -> None:
    """Ends a test that lacks something: as a failure where it was said that nothing may be lacking."""
    if lacking and os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, and this machine cannot have {what}: it lacks {lacking}")
    if lacking:
        request.node.user_properties.append((LACKING, lacking))
        pytest.skip(f"{what} needs {lacking}")


@pytest.fixture
def make_lab(lab_possible: None) -> Iterator[Callable[..., lab.Lab]]:
    """Makes labs that end with the test; takes what lab.Lab takes."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(lab.Lab(*args, **options))


@pytest.fixture
def two_hosts(make_lab: Callable[..., lab.Lab]) -> lab.Lab:
    """A lab of host1 and host2."""
    return make_lab(2)


@pytest.fixture(scope="session")
def shared_lab() -> Iterator[Callable[[], lab.Lab]]:
    """Returns the one lab of all tests that ask for three_hosts."""
    with ExitStack() as stack:
        yield functools.cache(lambda: stack.enter_context(lab.Lab(3)))


@pytest.fixture
def three_hosts(lab_possible: None, shared_lab: Callable[[], lab.Lab]) -> Iterator[lab.Lab]:
    """A lab of host1 to host3 for tests that train there, which change nothing of it but the network and processes."""
    hosts = shared_lab()
    yield hosts
    for name in hosts.names:
        hosts.restore(name)
    hosts.kill_processes(*hosts.names)


@pytest.fixture
def slurm(lab_possible: None, request: pytest.FixtureRequest) -> Iterator[slurm_lab.Slurm]:
    """A Slurm cluster of host1 and host2."""
    refuse_or_skip("Slurm", slurm_lab.missing(), request)
    with lab.Lab(2) as hosts, slurm_lab.Slurm(hosts) as cluster:
        yield cluster


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = []
    for report in terminalreporter.getreports("skipped"):
        reasons += [reason for name, reason in getattr(report, "user_properties", ()) if name == LACKING]
    if reasons:
        terminalreporter.write_line(
            f"NOT TESTED ON SEVERAL HOSTS: {len(reasons)} tests were skipped, since this machine lacks"
            f" {'; '.join(sorted(set(reasons)))}",
            red=True,
            bold=True,
        )
