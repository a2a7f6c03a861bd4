"""Everything ringtrain.hvd promises, under the real horovodrun: many properties in one start."""

from __future__ import annotations

import ast
import functools
import sys
import tempfile
from pathlib import Path

import pytest
from launching import run

HERE = Path(__file__).parent
LAUNCHES = (("mpi", 2), ("mpi", 3), ("gloo", 2))
LIMIT_S = 900  # far above what they take: for machines with other work to do
# What Horovod must be told before it starts for a timeline or a process set to be made later.
OPTIONS = {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def _properties() -> dict[str, dict[str, object]]:
    """Names of all properties, with the launches they are for, read from the source."""
    found = {}
    for path in sorted((HERE / "properties").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                marks = [mark for mark in node.decorator_list if isinstance(mark, ast.Call)]
                only = {word.arg: ast.literal_eval(word.value) for mark in marks for word in mark.keywords}
                found[f"{path.stem}.{node.name}"] = only
    return found


PROPERTIES = _properties()


def _applies(name: str, launcher: str, np: int) -> bool:
    only = PROPERTIES[name]
    return only.get("np", np) == np and only.get("launcher", launcher) == launcher


CASES = [(launcher, np, name) for launcher, np in LAUNCHES for name in PROPERTIES if _applies(name, launcher, np)]


@functools.cache
def _outcomes(launcher: str, np: int) -> tuple[dict[str, list[str | None]], str]:
    """Per property what each rank wrote (None where it wrote nothing), and the launch's own end."""
    names = [name for case_launcher, case_np, name in CASES if (case_launcher, case_np) == (launcher, np)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, HERE / "run_properties.py", folder, *names]
        try:
            finished = run(np, command, LIMIT_S, env=OPTIONS, launcher=launcher)
            end = f"exit code {finished.returncode}\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}"
        except TimeoutError as error:
            end = str(error)[-6000:]
        files = {name: [Path(folder) / str(rank) / name for rank in range(np)] for name in names}
        outcomes = {name: [f.read_text() if f.exists() else None for f in paths] for name, paths in files.items()}
    return outcomes, end


@pytest.mark.parametrize(("launcher", "np", "name"), CASES)
def test_property(launcher: str, np: int, name: str) -> None:
    outcomes, end = _outcomes(launcher, np)
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome is not None, f"rank {rank} did not come to an end with it: {end}"
        assert outcome == "", f"rank {rank}: {outcome}"
