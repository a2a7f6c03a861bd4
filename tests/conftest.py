"""Settings of hypothesis for all tests, and the marks that follow from folders."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import sample
from hypothesis import HealthCheck, settings

# No result depends on how busy the machine is.
settings.register_profile(
    "ringtrain",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ringtrain")
sample.choose()  # once for all processes of pytest
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

FOLDERS = {
    "unit": "unit",
    "simulation": "unit",
    "ring": "ranks",
    "cluster": "hosts",
    "faults": "faults",
    "spark": "spark",
}


PASSED = "ringtrain/passed"
"""key of pytest's cache: tests that the last `make test` passed"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="of the slow tests a third, others on each of three days")
    parser.addoption("--rest", action="store_true", help="leave out the tests that the last `make test` passed")


def pytest_report_header() -> str:
    return f"sample: {sample.VARIABLE}={sample.choose()}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadscope a process takes a group of tests, which share what is dear to start."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduling(config, log)


def group_of(nodeid: str) -> str:
    """Group of a test: a folder whose tests share a lab or a Spark, one launch of properties, or else a file.

    pytest-xdist's own groups (3.8) are not seen by pytest 9.
    """
    path, _, test = nodeid.partition("::")
    folder, _, file = path.removeprefix("tests/").partition("/")
    if file in ("test_launch.py", "test_run.py"):
        return "faults"  # killed launchers leave shared memory for a while, which tests of faults look for
    if folder in ("cluster", "faults", "spark"):
        return folder
    if test.startswith("test_property["):
        launch = test.partition("[")[2].rpartition("-")[0]
        return f"{path}[{launch}]"
    return path


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and sample.is_time_up():
        pytest.skip(f"begins after {sample.END}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test by its folder; outside of unit/ a test without the mark `quick` is slow.

    With --sample two thirds of the slow tests are left for the next two days; test_job and test_property choose their
    own cases.
    """
    passed = set(config.cache.get(PASSED, [])) if config.getoption("rest") else set()
    left = [item for item in items if item.nodeid in passed]
    for item in items:
        folder = item.path.parent.name
        if not item.get_closest_marker("launch"):
            item.add_marker(FOLDERS[folder])
        if "spark" in item.path.stem and FOLDERS[folder] != "unit":
            item.add_marker("spark")
        if FOLDERS[folder] != "unit" and not item.get_closest_marker("quick"):
            item.add_marker("slow")
        chooses = getattr(item, "originalname", "") in ("test_job", "test_property")
        is_left = config.getoption("sample") and not chooses and not sample.is_due(item.nodeid, one_in=3)
        if is_left and item.get_closest_marker("slow"):
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """`make test` notes what passed, which `make test-all` does not run again."""
    if config.option.markexpr == "quick":
        reports = terminalreporter.getreports("passed")
        config.cache.set(PASSED, sorted({report.nodeid for report in reports}))
