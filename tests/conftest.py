"""Settings of hypothesis for all tests, and the marks that follow from folders."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# No result depends on how busy the machine is.
settings.register_profile(
    "ringtrain",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ringtrain")

FOLDERS = {"unit": "unit", "ring": "ranks", "cluster": "hosts", "faults": "faults", "spark": "spark"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test by its folder; outside of unit/ a test without the mark `quick` is slow."""
    for item in items:
        folder = item.path.parent.name
        if not item.get_closest_marker("launch"):
            item.add_marker(FOLDERS[folder])
        if "spark" in item.path.stem and folder != "unit":
            item.add_marker("spark")
        if folder != "unit" and not item.get_closest_marker("quick"):
            item.add_marker("slow")
