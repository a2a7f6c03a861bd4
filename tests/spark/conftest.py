"""A Spark of its own for the tests; where pyspark or Java is missing, a skip that nobody overlooks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import standalone

from ringtrain.cluster.spark.session import check_installed
from ringtrain.errors import MissingDependency

REQUIRED = "RINGTRAIN_REQUIRE_SPARK"
skipped: dict[str, str] = {}
"""tests, and what they would need"""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ends a test where Spark is lacking: as a failure where it was said that nothing may be lacking."""
    try:
        check_installed()
    except MissingDependency as error:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, and this machine has no Spark: {error}", pytrace=False)
        skipped[item.nodeid] = str(error)
        pytest.skip(str(error))


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
