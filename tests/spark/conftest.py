"""A Spark of its own for the tests; where pyspark or Java is missing, a skip that nobody overlooks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import standalone

LACKING = "what Spark lacks"
"""name of a skipped test's property"""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Notes why a test is skipped that needs Spark."""
    try:
        standalone.require()
    except pytest.skip.Exception as reason:
        item.user_properties.append((LACKING, str(reason)))
        raise


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[standalone.Cluster]:
    """A master and a worker with two slots and two GPUs that are nothing but addresses."""
    with standalone.Cluster(tmp_path_factory.mktemp("spark"), slots=2, gpus=("5", "7")) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = []
    for report in terminalreporter.getreports("skipped"):
        reasons += [reason for name, reason in getattr(report, "user_properties", ()) if name == LACKING]
    if reasons:
        terminalreporter.write_line(
            f"NOT TESTED ON SPARK: {len(reasons)} tests were skipped: {'; '.join(sorted(set(reasons)))}",
            red=True,
            bold=True,
        )
