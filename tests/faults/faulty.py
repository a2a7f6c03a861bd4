"""Short runs under ringtrain launch that are made to fail, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from launching import BIN, ROOT, run

from ringtrain.checkpoint import checkpoint

OPTIONS = ["--data.name", "digits", "--train.epochs", "2", "--checkpoint.every-steps", "6", "--run.name", "run"]
NUM_STEPS = 46


def train(folder: Path, chaos: str, *launch: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Trains into folder/run on two ranks of this host."""
    words = [BIN / "ringtrain", "launch", "-H", "localhost:2", *launch, "--", sys.executable, "-m", "ringtrain.train"]
    before = boxes_left()
    command = [*words, *OPTIONS, *options, "--run.directory", folder, "--chaos", chaos]
    ended = run(0, command, 1200, env={"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}, warm=True)
    assert not left_of(folder), f"still there: {left_of(folder)}"
    assert not {*boxes_left()} - {*before}, "boxes of jobs that do not live any more"
    return ended


def run_in(folder: Path) -> Path:
    """The only run that a folder holds."""
    (found,) = folder.iterdir()
    return found


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((run_in(folder) / "summary.json").read_text())


def final_files(folder: Path) -> Any:
    """Checksums of the last checkpoint's files: weights, optimizer, and what each rank has of its own."""
    return checkpoint.verify(run_in(folder) / "checkpoints" / f"step-{NUM_STEPS:08d}").manifest["files"]


def left_of(folder: Path) -> list[str]:
    """Processes that train into a folder."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended while we looked
        if str(folder).encode() in words and b"ringtrain.train" in words:
            found.append(command.parent.name)
    return found


def boxes_left() -> list[Path]:
    """Boxes in shared memory whose job has no process."""
    environments = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environments.append(environment.read_bytes())
    boxes = Path("/dev/shm").glob("ringtrain-*-*")
    return [box for box in boxes if not any(box.name.split("-")[1].encode() in one for one in environments)]
