"""A fork of the process that has TensorFlow loaded is what a Python started by itself would be."""

from __future__ import annotations

import sys
from pathlib import Path

from launching import run

TIMEOUT_S = 120
SHOWN = """
import os, sys
print(__name__, sys.argv[1:], sys.path[0], os.getcwd(), dict(sorted(os.environ.items())))
print([name for name in ("ringtrain", "horovod", "mpi4py") if name in sys.modules], sys.stdin.read())
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


def test_arguments_folder_environment_files_and_exit_code_are_the_callers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHOWN, "--one", "two words"]
    warm, cold = (run(0, command, TIMEOUT_S, {"ANY": "value"}, cwd=tmp_path, warm=warm) for warm in (True, False))
    assert warm.returncode == cold.returncode == 7, warm.stderr
    assert (warm.stdout, warm.stderr) == (cold.stdout, cold.stderr)
