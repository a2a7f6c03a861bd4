"""A kind of job of tests/matrix each day, with two of the things that it must bear; `make matrix` runs all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import sample
from launching import run
from matrix.run import COLUMNS, FOLDER, names_of_jobs

NEEDS_A_PACKAGE = ("keras_hub_task",)
LIMIT_S = 1800


def test_the_job_of_the_day(tmp_path: Path) -> None:
    day = sample.choose()
    number = int(day) if day.isdigit() else 0
    jobs = [job for job in names_of_jobs() if job not in NEEDS_A_PACKAGE]
    columns = [*COLUMNS][2 * number % len(COLUMNS) :][:2]
    words = ["--jobs", jobs[number % len(jobs)], "--columns", *columns]
    ended = run(0, [sys.executable, FOLDER / "run.py", *words], LIMIT_S, cwd=tmp_path)
    assert ended.returncode == 0, f"{words}: {ended.stdout[-3000:]}{ended.stderr[-3000:]}"
