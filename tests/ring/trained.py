"""Runs of the trainer in FOLDER/run, and what they leave there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launching import run

TIMEOUT_S = 600  # far above what anything here takes: for machines with other work to do
STEPS_PER_EPOCH = 23
"""of digits, with a global batch of 64: the last has 29 rows"""


def train(
    folder: Path,
    *options: object,
    np: int = 2,
    code: int = 0,
    program: tuple[str, str] = ("-m", "ringtrain.train"),
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Trains digits, unless the options say otherwise, and expects an exit code. Modules of this folder are found."""
    words = [*program, "--data.name", "digits", "--run.name", "run", "--run.directory", folder, *options]
    paths = {"PYTHONPATH": str(Path(__file__).parent)}
    ended = run(np, [sys.executable, *map(str, words)], TIMEOUT_S, {**paths, **(env or {})}, warm=True, **more)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_text())


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Lines of a file without what the clock decides."""
    lines = (folder / "run" / name).read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.endswith("_s")} for line in lines]


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "checkpoints").glob("step-*"))


def checksums(folder: Path, step: int) -> dict[str, str]:
    """Checksums of the files of a checkpoint."""
    manifest = folder / "run" / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    return json.loads(manifest.read_text().partition("\n")[2])["files"]


def cut_off(whole: Path, folder: Path, step: int) -> Path:
    """The folder of a run that was killed some time after its checkpoint of a step."""
    shutil.copytree(whole, folder)
    for path in checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (folder / "run" / "summary.json").unlink()
    return folder
