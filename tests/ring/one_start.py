"""Properties and jobs, of which many run in one start of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launching import run
from only import marked_functions

RUNNER = Path(__file__).with_name("run_properties.py")
LIMIT_S, LAUNCH_LIMIT_S = 300, 1800
"""of one property, and of all: far above what they take"""
OPTIONS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
"""which Horovod must be told before it starts"""


def functions_of(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Marks of the public functions of files, by MODULE.NAME."""
    functions = {}
    for path in sorted(paths):
        for name, marks in marked_functions(path).items():
            functions[f"{path.stem}.{name}"] = marks
    return functions


def run_all(
    launcher: str, np: int, names: Sequence[str], folder: Path, limit_s: float = LIMIT_S, **env: str
) -> dict[str, str]:
    """Errors of each function, '' if it holds. If one hangs or ends a rank, another start runs the rest.

    folder: That of all ranks, also of other starts that continue what these begin.
    """
    wrong: dict[str, str] = {}
    while rest := names[len(wrong) :]:
        command = [sys.executable, RUNNER, folder, limit_s, *rest]
        ended = run(np, command, LAUNCH_LIMIT_S, OPTIONS | env, launcher, warm=True)
        for name in rest:
            files = {rank: folder / str(np) / str(rank) / name for rank in range(np)}
            said = {rank: file.read_text() for rank, file in files.items() if file.exists()}
            wrong[name] = "".join(f"rank {rank}: {text}" for rank, text in said.items() if text)
            if len(said) < np:
                wrong[name] += f"ranks {sorted(files.keys() - said.keys())} did not come to its end, exit code"
                wrong[name] += f" {ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
                break
    return wrong
