"""A run on a machine that loses its power again and again: what must hold of its checkpoints on disk."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from simulation.disk import Disk, Recorder

from ringtrain.checkpoint import checkpoint, durable, run_folder
from ringtrain.errors import RingtrainError

NUM_STARTS = 4


class Run:
    """Starts of one run, each ended by a loss of power.

    Attributes:
        violation: What did not hold, first.
        reported: Step of the newest checkpoint that was reported as complete.
        trace: What happened, if it is traced.
    """

    def __init__(self, seed: int, is_traced: bool) -> None:
        self.choose = random.Random(seed)
        self.violation, self.reported = "", 0
        self.trace: list[str] = []
        self.is_traced = is_traced
        self.keep = self.choose.choice([1, 1, 2])
        self.config = f"keep = {self.keep}\n"

    def start(self, root: Path) -> None:
        """Goes on from what is on disk, as `ringtrain.fit` does, and saves some times."""
        parent = root / "a" / "runs"
        folder = parent / "r"
        saved, refused = checkpoint.newest(folder / "checkpoints")
        step = saved.global_step if saved else 0
        self.note(f"goes on from step {step}{''.join(f'; {text}' for text in refused)}")
        if step < self.reported:
            self.violation = f"goes on from step {step} although {self.reported} was reported as complete"
            return
        if saved and saved.arrays("state")["w"][0] != step:
            self.violation = f"the checkpoint of step {step} is that of another"
            return
        config, summary = folder / "config.toml", folder / "summary.json"
        if (config.exists() and config.read_text() != self.config) or (summary.exists() and not summary.read_text()):
            self.violation = "a file is neither as it was nor as it was to be"
            return
        try:
            run_folder.create_folder(parent, "r", number_if_taken=False, reuse=bool(saved) or folder.exists())
        except RingtrainError as error:
            self.violation = f"cannot go on: {error}"
            return
        durable.write(config, self.config)
        checkpoint.remove_after(folder / "checkpoints", step)
        for _ in range(self.choose.randint(0, 3)):
            step += 1
            self.save(folder, step)
        durable.write(summary, json.dumps({"global_step": step}))

    def save(self, folder: Path, step: int) -> None:
        arrays = {"w": np.full(50, step)}
        checkpoint.save(folder / "checkpoints", step, {"state": arrays, "ranks": {}}, {"metrics": {}})
        self.recorder.events.append(("reported", step))
        checkpoint.prune(folder / "checkpoints", self.keep)

    def lose_power(self, root: Path, disk: Disk) -> Path:
        """Folder with what is left after a loss of power at any moment of the start."""
        events = self.recorder.events
        end = self.choose.randint(0, len(events))
        for event in events[:end]:
            if event[0] == "reported":
                self.reported = max(self.reported, event[1])
                self.note(f"step {event[1]} is reported")
            else:
                self.note(" ".join(str(part)[:90] for part in event).replace(f"{root}/", ""))
                disk.apply(event)
        left = root.with_name(f"{root.name}-")
        left.mkdir()
        disk.after_power_loss(self.choose, left)
        self.note("the power is lost")
        for path in sorted(left.rglob("*")):
            self.note(f"  left: {path.relative_to(left)}{'/' if path.is_dir() else f' {path.stat().st_size} bytes'}")
        return left

    def note(self, text: str) -> None:
        if self.is_traced:
            self.trace.append(text)

    @property
    def world(self) -> Any:
        return SimpleNamespace(trace=self.trace)


def simulate(seed: int, is_traced: bool = False) -> Run:
    """Starts a run, loses the power, and starts it again, some times."""
    run = Run(seed, is_traced)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        root = Path(temporary) / "disk"
        root.mkdir()
        for _ in range(NUM_STARTS):
            disk = Disk(root)
            run.recorder = Recorder(root)
            with run.recorder.recording():
                run.start(root)
            if run.violation:
                break
            left = run.lose_power(root, disk)
            shutil.rmtree(root)
            root = left
    return run
