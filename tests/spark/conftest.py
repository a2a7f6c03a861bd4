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


@pytest.fixture(scope="session")
def lacking() -> str:
    """What this machine lacks for Spark; empty: nothing."""
    try:
        check_installed()
    except MissingDependency as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def spark_installed(lacking: str, request: pytest.FixtureRequest) -> None:
    """Ends a test that lacks Spark: as a failure where it was said that nothing may be lacking."""
    if lacking and "without_spark" not in request.keywords:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, and this machine has no Spark: {lacking}")
        skipped[request.node.nodeid] = lacking
        pytest.skip(lacking)


@pytest.fixture(scope="session")
def cluster(lacking: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[standalone.Cluster]:
    """A master and a worker with two slots and two GPUs that are nothing but addresses."""
    if lacking:
        pytest.skip(lacking)
    with standalone.Cluster(tmp_path_factory.mktemp("spark"), slots=2, gpus=("5", "7")) as made:
        yield made


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "without_spark: needs neither pyspark nor Java")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if skipped:
        terminalreporter.write_line(
            f"NOT TESTED ON SPARK: {len(skipped)} tests were skipped: {'; '.join(sorted(set(skipped.values())))}",
            red=True,
            bold=True,
        )
