"""Kinds of job x what they must bear: python tests/matrix/run.py [--jobs JOB ...] [--columns COLUMN ...].

Each cell holds, or is refused by name with its reason. Prints a table in Markdown and the reasons; exit code 1 if one
fails.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import sample_ledger

from ringtrain.monitor import journal
from ringtrain.protocol.env import FOR_SCRIPT
from ringtrain.protocol.for_script import ForScript
from ringtrain.protocol.json_text import parse_json

FOLDER = Path(__file__).parent
BIN = Path(sys.executable).parent
TIMEOUT_S = 600
VIRTUAL = {"train.virtual_ranks": 4}
DIFFERS = "its data differ in each start"
NOT_PROVED = {
    "metric_of_an_extreme": "metric largest differs; likely no sum over rows",
    "generator_of_rank_0": "other rows, or in another order",
}
"""what `prove` must name of jobs that are not the same on any number of ranks"""
TOLERANCE = 2e-3
"""of losses, relative; sums over ranks round otherwise"""


class Runs:
    """Starts of jobs below a folder, each under a name; results are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[str, str] = {}

    def start(
        self, name: str, np: int, job: str, options: Mapping[str, object], launch: Sequence[str] = (), code: int = 0
    ) -> str:
        """What the job printed after RESULT or REFUSED on the first rank; raises RuntimeError if it fails."""
        told = ForScript(by="matrix", options={"run.directory": str(self.folder / name), **options})
        words = [BIN / "ringtrain", "launch", "-np", np, "--oversubscribe", "--forward", FOR_SCRIPT, *launch]
        command = [*words, "--", sys.executable, FOLDER / "jobs.py", job]
        ended = subprocess.run(
            list(map(str, command)),
            env=os.environ | {FOR_SCRIPT: told.to_json(), "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        found = re.search(r"(RESULT|REFUSED) \w+ (\w+ \{[^{}]*\}|[^\n]*)", ended.stdout)
        if (ended.returncode != 0) is not (code != 0) or (code == 0 and not found):
            lines = [line for line in ended.stderr.splitlines() if "Error" in line or "ringtrain:" in line]
            raise RuntimeError((lines or ["nothing was printed"])[-1][:300])
        if not found:
            return ""
        return f"REFUSED {found[2]}" if found[1] == "REFUSED" else found[2]

    def once(self, name: str, np: int, job: str, options: Mapping[str, object]) -> str:
        if f"{name}/{job}" not in self.kept:
            self.kept[f"{name}/{job}"] = self.start(name, np, job, options)
        return self.kept[f"{name}/{job}"]


def losses(result: str) -> np.ndarray:
    history = ast.literal_eval(result[result.index("{") :].replace("nan", "None"))
    return np.concatenate([np.array(history[name], float) for name in sorted(history)])


def equals_one_process(num: int) -> Callable[[Runs, str], str]:
    def cell(runs: Runs, job: str) -> str:
        one, several = runs.once("one", 1, job, {}), runs.once(f"plain-{num}", num, job, {})
        if losses(one).shape != losses(several).shape:
            raise RuntimeError("the histories have other lengths")
        apart = float(np.max(np.abs(losses(one) - losses(several)) / np.maximum(np.abs(losses(one)), 1e-2)))
        summary = parse_json((runs.folder / f"plain-{num}" / job / "summary.json").read_text(encoding="utf-8"))
        if apart < TOLERANCE:
            return "equal"
        reasons = summary.get("unlike_one_process")
        if reasons or job == "generator_of_rank_0":
            return "as planned: " + ("; ".join(reasons) or DIFFERS)
        raise RuntimeError(f"losses are {apart:.1e} apart")

    return cell


def baseline(runs: Runs, job: str) -> tuple[dict[str, object], str]:
    """Options with which a job has the same bits on any number of ranks, and its result in one process."""
    alone = runs.once("virtual", 1, job, VIRTUAL)
    if alone.startswith("REFUSED") or job == "generator_of_rank_0":
        return {}, ""
    return dict(VIRTUAL), alone


def resumed(runs: Runs, job: str) -> str:
    options, expected = baseline(runs, job)
    often = {"checkpoint.every_steps": 2, "health.agree_every_steps": 1}
    runs.start("killed", 2, job, {**options, **often, "chaos": "rank=1 step=9 mode=sigkill"}, code=1)
    again = runs.start("killed", 3, job, {**options, **often})
    if expected and again != expected:
        raise RuntimeError(f"resumed {again[:60]}, expected {expected[:60]}")
    return "same bits" if expected else "to the end"


def elastic(runs: Runs, job: str) -> str:
    options, expected = baseline(runs, job)
    launch = ("--elastic", "-H", "localhost:3", "--min-np", "1", "--max-np", "3")
    chaos = {"chaos": "rank=1 step=7 mode=sigkill, rank=0 step=12 mode=sigkill"}
    try:
        ended = runs.start("elastic", 3, job, {**options, **chaos}, launch)
    except RuntimeError as error:
        if "in an elastic job" in str(error):
            return f"refused: {str(error).partition('in an elastic job, ')[2]}"
        raise
    if ended.startswith("REFUSED"):
        return f"refused: {ended.partition(': ')[2]}"
    ledger = sample_ledger.ledger(journal.read(runs.folder / "elastic" / job), 3)
    if ledger.breaches:
        raise RuntimeError(ledger.breaches[0])
    if expected and ended != expected:
        raise RuntimeError(f"ended with {ended[:60]}, expected {expected[:60]}")
    return "same bits" if expected else "each row once"


def same_bits(runs: Runs, job: str) -> str:
    alone = runs.once("virtual", 1, job, VIRTUAL)
    if alone.startswith("REFUSED"):
        return f"refused: {alone.partition(': ')[2]}"
    if job == "generator_of_rank_0":
        return f"as planned: {DIFFERS}"
    for num in (2, 3):
        if runs.once(f"virtual-{num}", num, job, VIRTUAL) != alone:
            raise RuntimeError(f"{num} ranks: {runs.kept[f'virtual-{num}/{job}'][:60]}, expected {alone[:60]}")
    return "same bits"


def command(*words: str) -> Callable[[Runs, str], str]:
    """A command of ringtrain with the script, which must end well."""

    def cell(runs: Runs, job: str) -> str:
        own = runs.folder / words[0] / job
        own.mkdir(parents=True)
        script = [sys.executable, FOLDER / "jobs.py", job]
        monitor = "g_loss" if job == "adversarial" else "loss"
        given = [word.format(folder=own, space=FOLDER / "space.toml", monitor=monitor) for word in words]
        ended = subprocess.run(
            list(map(str, [BIN / "ringtrain", *given, "--", *script])),
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=3 * TIMEOUT_S,
            cwd=own,
            check=False,
        )
        if ended.returncode:
            said = (ended.stdout + ended.stderr).splitlines()
            if words[0] == "prove" and job in NOT_PROVED and NOT_PROVED[job] in " ".join(ended.stdout.split()):
                return f"named: {NOT_PROVED[job]}"
            lines = [line for line in said if "DOES NOT HOLD" in line or ("ringtrain" in line and "Error" in line)]
            raise RuntimeError((lines or said or [""])[-1][:200])
        return "holds"

    return cell


COLUMNS: dict[str, Callable[[Runs, str], str]] = {
    "2 ranks": equals_one_process(2),
    "3 ranks": equals_one_process(3),
    "killed, resumed": resumed,
    "elastic": elastic,
    "bits on 1, 2, 3": same_bits,
    "prove": command("prove", "-np", "2", "--steps", "4"),
    "sweep": command(
        *("sweep", "-H", "localhost:2", "--space", "{space}", "--sampler", "grid"),
        *("--objective", "{monitor}", "--folder", "{folder}/trials"),
    ),
}


def names_of_jobs() -> list[str]:
    """Of jobs.py, without importing TensorFlow."""
    return re.findall(r"^    (\w+),$", (FOLDER / "jobs.py").read_text(encoding="utf-8").partition("JOBS = (")[2], re.M)


def short(cell: str, reasons: dict[str, int]) -> str:
    """A cell with the number of its reason, which is added to those before."""
    kind, _, reason = cell.partition(": ")
    return f"{kind} ({reasons.setdefault(reason, len(reasons) + 1)})" if reason else kind


def main() -> int:
    """Fills the table; returns the exit code."""
    names = names_of_jobs()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", default=names, choices=names)
    parser.add_argument("--columns", nargs="+", default=[*COLUMNS], choices=[*COLUMNS])
    options = parser.parse_args()
    print(f"| | {' | '.join(options.columns)} |", "|---" * (len(options.columns) + 1) + "|", sep="\n", flush=True)
    has_failed = False
    reasons: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        for job in options.jobs:
            cells = []
            for column in options.columns:
                try:
                    cells.append(COLUMNS[column](runs, job))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    has_failed = True
                    cells.append(f"FAILS: {error}".replace("|", "/")[:300])
            print(f"| {job.replace('_', ' ')} | {' | '.join(short(cell, reasons) for cell in cells)} |", flush=True)
    for reason, number in reasons.items():
        print(f"{number}. {reason}")
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
