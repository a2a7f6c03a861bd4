"""Who may know whom: the arrows of the package, read off its import statements."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ringtrain"

# A room may import itself, and what is listed for it. The launch half: errors <- cluster. The training half, from left
# to right: errors <- config <- leaves <- train. Both halves: <- lab <- cli.
LEAVES = {"hvd", "devices", "data", "models", "schedules", "optimizers", "checkpoint", "tracking", "health"}
TRAINING_HALF = {"config", "settings", "lookup", "stderr", "display", *LEAVES, "evaluation", "resume", "plateau"}
TRAINING_HALF |= {
    "trace",
    "timeline",
    "chaos",
    "journal",
    "beats",
    "suspects",
    "heartbeat",
    "fingerprint",
    "lean",
    "strategies",
    "pieces",
    "elastic",
    "train",
}
MAY_IMPORT = {
    "": set(),
    "errors": set(),
    "json_text": set(),
    "reports": set(),
    "ring": set(),
    "plain_pickle": set(),
    "mpi": {"errors", "reports"},
    "told": {"reports"},
    "trace": {"errors"},
    "timeline": {"errors", "config", "hvd", "trace"},
    "journal": set(),
    "beats": set(),
    "fingerprint": {"errors", "config"},
    "suspects": set(),
    "heartbeat": {"errors", "config", "reports", "hvd", "journal", "beats", "suspects"},
    "post_mortem": {"errors", "reports", "journal"},
    "config": {"errors"},
    "settings": {"errors", "config"},
    "lookup": {"errors", "config"},
    "stderr": {"reports"},
    "lean": set(),
    "chaos": {"errors", "config", "journal"},
    "display": {"config", "schedules", "reports"},
    **{leaf: {"errors", "config"} for leaf in LEAVES},
    "devices": {"errors", "config", "reports"},
    "hvd": {"errors", "config", "reports", "told", "ring", "mpi", "plain_pickle", "beats", ""},
    "data": {"errors", "config", "lookup", "reports"},
    "models": {"errors", "config", "lookup"},
    "optimizers": {"config", "schedules"},
    "tracking": {"errors", "config", "reports", "schedules", "optimizers", "display", ""},
    "health": {"errors", "config", "hvd", "journal"},
    "resume": {"errors", "config", "checkpoint", "hvd", "journal", "reports"},
    "evaluation": {"errors", "hvd", "data", "resume"},
    "strategies": TRAINING_HALF - {"train", "elastic"} | {"errors", "reports", "told", "mpi", ""},
    "plateau": {"errors", "config", "hvd", "optimizers", "health", "resume"},
    "pieces": TRAINING_HALF - {"train", "elastic"} | {"errors", "reports"},
    "elastic": TRAINING_HALF - {"train"} | {"errors", "reports"},
    "train": TRAINING_HALF | {"errors", "reports"},
    "cluster": {"errors", "reports", "plain_pickle", ""},
    "lab": TRAINING_HALF | {"errors", "reports", "ring", "cluster", "post_mortem", ""},
    "cli": TRAINING_HALF | {"errors", "cluster", "lab", ""},
    "__main__": {"cli"},
}
EVERYWHERE = {"json_text"}
"""may be imported by every room"""
ONLY_IN = {
    # Horovod's launcher; Horovod without ringtrain, to compare with.
    "horovod": {"hvd", "cluster/horovod_driver.py", "lab/strategies/by_hand.py"},
    "subprocess": {"cluster/run.py", "cluster/doctor.py", "cluster/probe.py", "cluster/spark/seat.py"},
    "mpi4py": {"cluster/doctor.py", "lab/sums.py", "mpi.py"},
    "pyspark": {f"cluster/spark/{name}.py" for name in ("session", "trials", "trial", "driver", "seat", "feed")},
}
NO_TENSORFLOW_AT_IMPORT = {
    "",
    "errors",
    "json_text",
    "reports",
    "ring",
    "plain_pickle",
    "mpi",
    "told",
    "trace",
    "journal",
    "beats",
    "suspects",
    "post_mortem",
    "config",
    "settings",
    "lookup",
    "stderr",
    "lean",
    "display",
    "devices",
    "data",
}
NO_TENSORFLOW_AT_IMPORT |= {"models", "checkpoint", "schedules", "pieces", "train", "cluster", "cli"}


def room_of(module: str) -> str:
    """The room of a module's full name: "ringtrain.data.idx" -> "data"; the package itself is ""."""
    return [*module.split("."), ""][1]


def modules_named(node: ast.AST, package: str) -> list[str]:
    """Full names of the modules that an import statement names; package is where relative ones start."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    start = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
    base = ".".join(filter(None, [start, node.module]))
    if base == "ringtrain":
        return [f"ringtrain.{alias.name}" for alias in node.names]
    return [base]


def only_for_type_checkers(tree: ast.AST) -> set[ast.AST]:
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {node for block in blocks for node in ast.walk(block)}


def breaches(path: str, source: str) -> list[str]:
    """What a module does that the house forbids.

    Args:
        path: inside the package, e.g. "data/idx.py".
        source: its text.
    """
    found = []
    tree = ast.parse(source)
    parts = ["ringtrain", *Path(path).with_suffix("").parts]
    room = "" if parts[1] == "__init__" else parts[1]
    if room not in MAY_IMPORT:
        return [f"{path}: the room {room} is not in the drawing"]
    inside_functions = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    typing_only = only_for_type_checkers(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append(f"{path}:{node.lineno}: assert")
        for module in modules_named(node, ".".join(parts[:-1])):
            top = module.split(".")[0]
            if top == "ringtrain" and room_of(module) not in {room} | MAY_IMPORT[room] | EVERYWHERE:
                found.append(f"{path}:{node.lineno}: {room or 'ringtrain'} imports {module}")
            if top in ONLY_IN and not {room, path} & ONLY_IN[top]:
                found.append(f"{path}:{node.lineno}: imports {top}")
            early = node not in inside_functions and node not in typing_only
            if early and top in ("tensorflow", "keras", "pyspark") and room in NO_TENSORFLOW_AT_IMPORT:
                found.append(f"{path}:{node.lineno}: {top} before the configuration is read")
    return found


def test_the_package_keeps_to_the_drawing():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    assert [b for file in files for b in breaches(str(file.relative_to(PACKAGE)), file.read_text())] == []


FORBIDDEN = {
    "import horovod.tensorflow": "train.py",
    "from horovod import tensorflow": "lab/bench.py",
    "import subprocess": "hvd/sync.py",
    "def f():\n    from subprocess import run": "data/idx.py",
    "from ringtrain.cluster import job": "train.py",
    "def f():\n    import pyspark": "cluster/run.py",
    "from ringtrain import train": "hvd/__init__.py",
    "from ringtrain.hvd import rank": "devices.py",
    "import ringtrain.tracking": "checkpoint.py",
    "from ..config import Config": "cluster/job.py",
    "from .. import train": "data/idx.py",
    "from ringtrain import data": "config.py",
    "assert True": "models.py",
    "import tensorflow as tf": "devices.py",
    "import keras": "train.py",
    "from pyspark import RDD": "cluster/spark/feed.py",
    "x = 1": "unheard_of.py",
}


@pytest.mark.parametrize("source", FORBIDDEN)
def test_what_is_not_drawn_is_noticed(source):
    assert len(breaches(FORBIDDEN[source], source)) == 1


ALLOWED = {
    "import horovod": "hvd/sync.py",
    "import horovod.tensorflow as hvd": "lab/strategies/by_hand.py",
    "import subprocess": "cluster/run.py",
    "from ringtrain.data.shard import training_shard": "data/pipeline.py",
    "from .shard import training_shard": "data/pipeline.py",
    "def f():\n    import tensorflow as tf": "devices.py",
    "if TYPE_CHECKING:\n    import keras": "models.py",
    "import keras": "tracking.py",
    "from ringtrain import cluster, train": "cli.py",
}


@pytest.mark.parametrize("source", ALLOWED)
def test_what_is_drawn_is_allowed(source):
    assert breaches(ALLOWED[source], source) == []
