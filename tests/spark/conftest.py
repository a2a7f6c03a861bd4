"""A Spark of its own for the tests; where pyspark or Java is missing, a skip that nobody overlooks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import standalone

skipped: dict[str, str] = {}
"""tests, and what they would need"""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Counts the tests that are skipped because Spark is lacking."""
    try:
        standalone.require()
    except pytest.skip.Exception as reason:
        skipped[item.nodeid] = str(reason)
        raise


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[standalone.Cluster]:
    """A master and a worker with two slots and two GPUs that are nothing but addresses."""
    with standalone.Cluster(tmp_path_factory.mktemp("spark"), slots=2, gpus=("5", "7")) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if skipped:
        terminalreporter.write_line(
            f"NOT TESTED ON SPARK: {len(skipped)} tests were skipped: {'; '.join(sorted(set(skipped.values())))}",
            red=True,
            bold=True,
        )
