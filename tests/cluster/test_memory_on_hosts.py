"""A job on hosts with disks of their own loses the host of rank 0, and goes on from a copy in the memory of another."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lab
import launching
import pytest

from ringtrain.errors import CheckpointError
from ringtrain.protocol.env import LEASE
from ringtrain.run import checkpoint, memory_folder

TIMEOUT_S = 300
SAVED, COPIED = 20, 3
"""steps between two checkpoints on disk, and between two copies"""
OPTIONS = {
    "checkpoint.every_epochs": 0,
    "checkpoint.every_steps": SAVED,
    "checkpoint.memory_every_steps": COPIED,
}
SCRIPT = """
import json, sys, time
import keras, numpy as np, ringtrain
keras.utils.set_random_seed(1)
draw = np.random.default_rng(1)
x, y = draw.normal(size=(300, 8)).astype("float32"), draw.normal(size=(300, 1)).astype("float32")
layers = [keras.layers.Dense(16, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
model.compile("adam", "mse")
slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(float(sys.argv[3])))
options = {**json.loads(sys.argv[2]), "run.directory": sys.argv[1]}
ringtrain.fit(model, x, y, name="run", batch_size=20, epochs=3, verbose=0, callbacks=[slow], options=options)
"""


def command(kind: str, script: Path, directory: Path, step_s: float) -> list[str | Path]:
    """A job of 44 or 45 steps, of which those after the first checkpoint take at least some seconds."""
    if kind == "fit":
        script.write_text(SCRIPT)
        return [script, directory, json.dumps(OPTIONS), str(step_s)]
    chaos = f"rank=0 step={SAVED - 2} mode=slow seconds={step_s}" if step_s else ""
    words: list[str | Path] = ["-m", "ringtrain.train", "--data.name", "digits", "--train.epochs", "2"]
    words += ["--run.name", "run", "--run.directory", directory, "--chaos", chaos]
    for option, value in OPTIONS.items():
        words += [f"--{option.replace('_', '-')}", str(value)]
    return words


@pytest.mark.parametrize("kind", ["fit", "train"])
def test_rank_0_and_its_disk_are_lost(three_hosts: lab.Lab, tmp_path: Path, kind: str) -> None:
    """The final weights are those of a run that nothing happened to, bit for bit."""
    hosts = three_hosts
    environment = {"PYTHONPATH": str(launching.ROOT), LEASE: "6"}
    disk = Path("/run") / tmp_path.name  # of each host its own
    folder = memory_folder.folder_of(disk / "lost" / "run")
    memory = {name: hosts.seen_from_here(name, folder) for name in hosts.names}

    def launch(slots: str, name: str, step_s: float) -> list[str | Path]:
        start = ["python", "-m", "ringtrain", "launch", "-H", slots, "-np", "2", "--max-restarts", "2", "--"]
        return [*start, *hosts.warm_python(), *command(kind, tmp_path / "own.py", disk / name, step_s)]

    whole = hosts.run("host1", launch("host1:1,host2:1", "whole", 0), TIMEOUT_S, env=environment)
    assert whole.returncode == 0, whole.stderr
    pipes: Mapping[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    slots = "host1:1,host2:1,host3:1"
    with hosts.start(
        "host3", launch(slots, "lost", 0.1), env=environment, **pipes
    ) as process:  # where no rank is at first
        lab.wait_for(lambda: newest(memory["host2"]) > SAVED, TIMEOUT_S, "a copy after the first checkpoint")
        hosts.cut("host1")
        of_hosts = [digests(memory[name]) for name in ("host1", "host2")]
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stdout + stderr
    in_both = of_hosts[0].keys() & of_hosts[1].keys()
    assert in_both and all(of_hosts[0][step] == of_hosts[1][step] for step in in_both)
    taken = re.search(r"step (\d+) is from the memory of host2", stdout + stderr)
    assert taken, stdout + stderr
    saved = newest(hosts.seen_from_here("host1", disk / "lost" / "run" / "checkpoints"))
    assert int(taken[1]) > saved >= SAVED
    undisturbed = summary(hosts, "host1", disk / "whole")
    result = summary(hosts, "host3", disk / "lost")
    assert result["hosts"] == ["host3", "host2"] and result["restarts"] == 1
    assert result["resumed_from"].endswith(f"step-{int(taken[1]):08d}")
    assert result["checksum"] == undisturbed["checksum"]
    assert result["metrics"] == undisturbed["metrics"]
    assert not memory["host2"].exists() and not memory["host3"].exists()  # as the run is complete
    shutil.rmtree(memory["host1"])


def newest(folder: Path) -> int:
    """Step of the newest checkpoint or copy in a folder; 0: there is none."""
    return max([checkpoint.step_of(path.name) for path in folder.glob("step-*")], default=0)


def digests(memory: Path) -> dict[int, str]:
    """SHA-256 of the copies in the memory of a host, by their steps."""
    found = {}
    for path in memory.glob("step-*"):
        with contextlib.suppress(CheckpointError, OSError):  # the oldest one is just being removed
            manifest, digest = checkpoint.read_manifest(path)
            found[manifest["global_step"]] = digest
    return found


def summary(hosts: lab.Lab, host: str, directory: Path) -> dict[str, Any]:
    """summary.json on the disk of a host."""
    text = hosts.seen_from_here(host, directory / "run" / "summary.json").read_text()
    return json.loads(text)
