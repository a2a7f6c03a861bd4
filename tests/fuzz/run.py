"""Draws jobs, trains them on ranks, and compares them with Keras' own `fit`: run.py --minutes 10.

Every job has one class: `equal` to one process; `refused`, by an error of ringtrain's; `not equal`, for a reason that
docs/fit.md names; and the failures `different`, `crash`, `hang` and `not resumed`, each of which is printed as the
shortest script that still shows it.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import grammar
from launching import run

RANKS = Path(__file__).with_name("ranks.py")

TOLERANCE = 1e-7
LIMIT_S = 300.0
"""of a job on ranks"""
BATCH = 12
"""jobs of one start"""
FAILURES = ("different", "crash", "hang", "not resumed")


@dataclass(frozen=True)
class Result:
    """Class of a job on so many ranks, and where it differs."""

    kind: str
    detail: str = ""
    unlike: tuple[str, ...] = field(default=())


def worst(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], within: float) -> str:
    """Paths whose values differ by more than a fraction, the largest difference first, or ""."""
    if expected.keys() != found.keys():
        return f"only in one: {sorted(expected.keys() ^ found.keys())[:6]}"
    differences = []
    for path, value in expected.items():
        other = found[path]
        if value.shape != other.shape or value.dtype.kind not in "fiub" or other.dtype.kind not in "fiub":
            if value.shape != other.shape or not np.array_equal(value, other):
                differences.append((float("inf"), path))
        elif not np.array_equal(value, other, equal_nan=True):
            size = max(float(np.nanmax(np.abs(value), initial=0.0)), 1e-3)
            distance = float(np.max(np.abs(np.subtract(value, other, dtype=float)), initial=0.0)) / size
            if not distance <= within:
                differences.append((distance, path))
    differences.sort(reverse=True)
    return ", ".join(f"{path} {distance:.1e}" for distance, path in differences[:4])


def judged(job: grammar.Job, ranks: Sequence[Mapping[str, Any]]) -> Result:
    """Result of a job by the outcomes of all ranks."""
    reference, first = ranks[0]["keras"], ranks[0]["ranks"]
    if reference.error or any(worst(reference.values, rank["keras"].values, 0.0) for rank in ranks):
        return Result("discarded", reference.error[-2000:] or "two references differ")
    errors = [rank["ranks"].error for rank in ranks if rank["ranks"].error]
    if errors:
        return Result("crash", errors[0][-3000:])
    if first.refused:
        return Result("refused", first.refused)
    for number, rank in enumerate(ranks):
        if difference := worst(first.values, rank["ranks"].values, 0.0):
            return Result("different", f"rank {number} from rank 0: {difference}", first.unlike)
    difference = worst(reference.values, first.values, TOLERANCE)
    if difference and not job.unequal and not first.unlike:
        return Result("different", difference)
    if "resumed" in ranks[0]:
        for number, rank in enumerate(ranks):
            resumed = rank["resumed"]
            # A process that is started again has not seen what the one before it had printed.
            kept = [
                {path: value for path, value in one.values.items() if "/seen" not in path} for one in (first, resumed)
            ]
            wrong = resumed.error[-3000:] or resumed.refused or worst(*kept, 0.0)
            if wrong:
                return Result("not resumed", f"rank {number}: {wrong}", first.unlike)
    if difference:
        return Result("not equal", difference, (*job.unequal, *first.unlike))
    return Result("equal", unlike=first.unlike)


def trained(
    jobs: Sequence[grammar.Job], size: int, folder: Path, resumes: bool
) -> Iterable[tuple[grammar.Job, Result]]:
    """Results of jobs on a number of ranks; a start that ends is made again behind the job that ended it."""
    left = list(jobs)
    while left:
        names = []
        for number, job in enumerate(left):
            step = grammar.Draw(job.seed, {})("killed at", *range(1, 9)) if resumes else 0
            names.append(f"{number}:{step}")
            (folder / f"{number}.py").write_text(job.script)
        for path in folder.glob("*.[0-9]*.[0-9]*"):
            path.unlink()
        try:
            ended = run(size, [sys.executable, RANKS, folder, LIMIT_S, *names], LIMIT_S * len(left) + 60)
            output = ended.stderr
        except TimeoutError as error:
            output = str(error)
        while left:
            job = left[0]
            number = len(names) - len(left)
            files = [folder / f"{number}.{size}.{rank}" for rank in range(size)]
            if not all(file.exists() for file in files):
                left.pop(0)
                kind = "hang" if "Timeout" in output or "still running" in output else "crash"
                yield job, Result(kind, output[-3000:])
                break
            left.pop(0)
            yield job, judged(job, [_outcomes(file) for file in files])


def _outcomes(file: Path) -> dict[str, SimpleNamespace]:
    """Fields of ranks.Outcome by the kind of the run."""
    return {kind: SimpleNamespace(**fields) for kind, fields in pickle.loads(file.read_bytes()).items()}


def result_of(job: grammar.Job, size: int, resumes: bool) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        ((_, result),) = trained([job], size, Path(folder), resumes)
    return result


def shrunk(job: grammar.Job, size: int, result: Result, until: float) -> tuple[grammar.Job, Result]:
    """The job with as many first options as show the same class."""
    resumes = result.kind == "not resumed"
    simplest = dict(job.choices)
    names = [name for name, number in simplest.items() if number]
    portion = max(1, len(names) // 2)
    while names and time.time() < until:
        begin = 0
        while begin < len(names) and time.time() < until:
            tried = simplest | dict.fromkeys(names[begin : begin + portion], 0)
            other = grammar.job(job.seed, tried)
            found = result_of(other, size, resumes)
            if found.kind == result.kind:
                job, result, simplest = other, found, tried
                del names[begin : begin + portion]
            else:
                begin += portion
        if portion == 1:
            break
        portion //= 2
    return job, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="first seed (default: the time)")
    parser.add_argument("--jobs", type=int, help="number of jobs, in place of --minutes")
    parser.add_argument("-np", dest="size", type=int, default=2)
    parser.add_argument("--resumes", action="store_true", help="also end each job before a step and start it again")
    parser.add_argument("--no-shrink", dest="shrinks", action="store_false")
    given = parser.parse_args()
    first = int(time.time()) if given.seed is None else given.seed
    end, started = time.time() + given.minutes * 60, time.time()
    print(f"seeds from {first}, on {given.size} ranks", flush=True)
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    seed = first
    while (seed - first < given.jobs) if given.jobs else time.time() < end:
        number = min(BATCH, given.jobs - (seed - first)) if given.jobs else BATCH
        jobs = [grammar.job(seed + offset) for offset in range(number)]
        seed += number
        with tempfile.TemporaryDirectory() as folder:
            for job, result in trained(jobs, given.size, Path(folder), given.resumes):
                counts[result.kind] += 1
                counts["named, but equal"] += result.kind == "equal" and bool(result.unlike)
                text = result.detail.strip().splitlines()
                why = "; ".join(dict.fromkeys((*job.unequal, *result.unlike)))
                print(f"{job.seed:>12} {result.kind:<12} {text[-1][:150] if text else ''} [{why[:100]}]", flush=True)
                if result.kind in FAILURES:
                    failures.append((job, result))
    minutes = (time.time() - started) / 60
    print(f"{counts.total() - counts['named, but equal']} jobs in {minutes:.1f} minutes: {dict(counts)}")
    for job, result in failures[:3] if given.shrinks else []:
        job, result = shrunk(job, given.size, result, time.time() + 300)
        print(f"\n# seed {job.seed}, {result.kind} on {given.size} ranks: {result.detail}\n{job.script}")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
