"""Measures the steps of a script with `ringtrain.fit` by a short start of it; see run.measuring."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtrain.errors import LaunchError
from ringtrain.lab import jobs, script
from ringtrain.lab.ranks import Start
from ringtrain.lab.script import Script
from ringtrain.protocol.for_script import ForScript

QUIET = {"checkpoint.every_epochs": 0, "checkpoint.every_steps": 0, "tracking.mlflow": "", "tracking.wandb": "off"}
"""options of a run that is thrown away"""
POLL_S = 0.05


class TimeIsUp(LaunchError):
    """A start took longer than it may."""


def measure(
    start: Start,
    job: Script,
    *,
    num_ranks: int = 0,
    options: Mapping[str, Any] = {},
    environ: Mapping[str, str] = {},
    launcher: str = "",
    limit_s: float = float("inf"),
    **settings: Any,
) -> dict[str, Any]:
    """Starts the script, whose ranks end as soon as their first `fit` is measured, and returns rank 0's results.

    Args:
        num_ranks: 0: `-np` of the command line, else all slots.
        options: Of `ringtrain.fit`, by dotted name.
        environ: Further variables of the ranks.
        launcher: "": from the command line.
        limit_s: Seconds after which the ranks are ended, and TimeIsUp is raised.
        settings: Of run.measuring.Measure.
    """
    if start.launch.started_by.submits or start.launch.launcher == "spark":
        raise LaunchError(
            f"got --launcher {start.launch.launcher}, expected mpirun, horovodrun, horovodrun-gloo or srun"
        )
    words = [*start.launch_words]
    if num_ranks:
        words += ["-np", str(num_ranks)]
    if launcher:
        words += ["--launcher", launcher]
    for name in environ:
        words += ["--forward", name]
    with tempfile.TemporaryDirectory(prefix="ringtrain-measure-") as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        for_script = ForScript(
            by=f"ringtrain {start.name}",
            options={**QUIET, **options},
            folder=str(Path(folder, "runs")),
            measure={"out": str(out), **settings},
        )
        variables = {**os.environ, **environ, **script.variables(for_script)}
        process = jobs.start_launch(words, job.command, variables, log)
        end_s = time.monotonic() + limit_s
        try:
            while process.poll() is None and time.monotonic() < end_s:
                time.sleep(POLL_S)
            is_late = process.poll() is None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
        if is_late:
            raise TimeIsUp(f"{start.name}: {job.name} has not been measured within {limit_s:.0f} s")
        code = process.returncode
        if code:
            raise LaunchError(f"{start.name}: {job.name}: {jobs.reason_of(log, code)}")
        if not out.exists():
            raise LaunchError(
                f"{start.name}: {job.name} has ended without a measured ringtrain.fit; or {folder} on rank 0's host is"
                f" not this one: start from that host, or set TMPDIR to a folder that both see"
            )
        results: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return results
