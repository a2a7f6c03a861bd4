"""Runs two lists of tests at the same time, which take about as long: those whose jobs mostly wait, and all others.

python tests/support/lanes.py [OPTION OF PYTEST ...]

The output of the first list is printed when both have ended; the exit code is 0 if all tests have passed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

WAITING = [
    *("tests/cluster", "tests/spark", "tests/faults"),
    *(f"tests/ring/test_{name}.py" for name in ("begin", "compare", "launch", "pages", "sweep", "tune")),
    *(f"tests/ring/test_{name}.py" for name in ("prove", "slow_links", "virtual_ranks")),
]
OTHERS = sorted({str(path) for path in Path("tests/ring").glob("test_*.py")} - {*WAITING})


def main(options: Sequence[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", "--durations=25", "--durations-min=20", *options]
    with tempfile.TemporaryFile() as said:
        beside = subprocess.Popen([*pytest, *WAITING], stdout=said, stderr=subprocess.STDOUT)
        try:
            others = subprocess.run([*pytest, *OTHERS], check=False).returncode
        finally:
            waiting = beside.wait()
        said.seek(0)
        sys.stdout.buffer.write(said.read())
    return waiting or others


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
