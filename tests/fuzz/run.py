"""Draws jobs, trains them on ranks, and compares them with Keras' own `fit`: run.py --minutes 10.

Every job has one class: `equal` to one process; `refused`, by an error of ringtrain's; `not equal`, for a reason of
docs/fit.md that the grammar knows; and the failures `different`, `crash`, `hang` and `not resumed`, each of which is
printed as the shortest script that still shows it, with a line for corpus.txt.
"""

from __future__ import annotations

import argparse
import collections
import json
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import grammar
from launching import BIN, ROOT, run, warm_python

RANKS, CORPUS = Path(__file__).with_name("ranks.py"), Path(__file__).with_name("corpus.txt")

TOLERANCE = 1e-7
LIMIT_S = 300.0
"""of a job on ranks"""
BATCH = 24
"""jobs of one start"""
FAILURES = ("different", "crash", "hang", "not resumed")
ANY_SIZE = {"order of rows", "ScheduleFreeAdamW"}
"""reasons why ranks differ from Keras, and not from each other on any number of ranks"""
OF_PARTS = {
    "a metric that is no sum": ("largest", "log.csv"),
    "the end of an unknown length counts in losses of outputs": ("p_loss", "q_loss", "log.csv"),
    "steps that are no multiple of steps_per_execution": ("evaluate", "predict"),
}
"""reasons that say something of single values alone, and words in the paths of these"""


@dataclass(frozen=True)
class Result:
    """Class of a job on so many ranks, and where it differs."""

    kind: str
    detail: str = ""
    unlike: tuple[str, ...] = ()
    """what the plan names as unlike one process"""
    reasons: tuple[str, ...] = ()
    """why it is not equal"""
    values: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    """what rank 0 has returned"""


def difference(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], within: float) -> str:
    """Paths whose values differ by more than a fraction, the largest difference first, or ""."""
    if expected.keys() != found.keys():
        return f"only in one: {sorted(expected.keys() ^ found.keys())[:6]}"
    differences = []
    for path, value in expected.items():
        other = found[path]
        if value.shape != other.shape or value.dtype.kind not in "fiub" or other.dtype.kind not in "fiub":
            if value.shape != other.shape or not np.array_equal(value, other):
                differences.append((float("inf"), path))
        elif not np.array_equal(np.isfinite(value), np.isfinite(other)):
            differences.append((float("inf"), path))
        elif not np.array_equal(value, other, equal_nan=True):
            size = max(float(np.max(np.abs(value), where=np.isfinite(value), initial=0.0)), 1e-3)
            apart = np.abs(np.subtract(value, other, dtype=float))
            distance = float(np.max(apart, where=np.isfinite(apart), initial=0.0)) / size
            if distance > within:
                differences.append((distance, path))
    differences.sort(reverse=True)
    return ", ".join(f"{path} {distance:.1e}" for distance, path in differences[:4])


def _is_finite(value: np.ndarray) -> bool:
    return value.dtype.kind not in "fc" or bool(np.all(np.isfinite(value)))


def without(values: Mapping[str, np.ndarray], *words: str) -> dict[str, np.ndarray]:
    return {path: value for path, value in values.items() if not any(word in path for word in words)}


def words_of(reasons: Iterable[str]) -> list[str]:
    """Words in the paths that these reasons say something of."""
    return [word for reason in reasons for word in OF_PARTS.get(reason, ())]


def resumed(before: Mapping[str, np.ndarray], after: SimpleNamespace, within: float = 0.0) -> str:
    """What is wrong with a run that was started again, which has not seen what the process before it had printed."""
    return (
        after.error[-3000:]
        or after.refused
        or difference(without(before, "/seen"), without(after.values, "/seen"), within)
    )


def judged(job: grammar.Job, reference: SimpleNamespace, ranks: Sequence[Mapping[str, SimpleNamespace]]) -> Result:
    """Result of a job by the outcomes of all ranks."""
    first = ranks[0]["ranks"]
    if reference.error:
        return Result("discarded", reference.error[-2000:])
    errors = [rank["ranks"].error for rank in ranks if rank["ranks"].error]
    if errors:
        return Result("crash", errors[0][-3000:])
    if first.refused.startswith("NonFinite") and all(map(_is_finite, reference.values.values())):
        return Result("different", first.refused)
    if first.refused:
        return Result("refused", first.refused)
    # Rank 0 alone writes files, and what each rank evaluates by itself may be rounded otherwise.
    by_itself = ("/files", "/seen") if "seen.append(model.evaluate" in job.script else ("/files",)
    for number, rank in enumerate(ranks[1:], 1):
        of_both = [without(values, "/files") for values in (first.values, rank["ranks"].values)]
        wrong = difference(*of_both, TOLERANCE)
        wrong = wrong or difference(*(without(values, *by_itself) for values in of_both), 0.0)
        if wrong:
            return Result("different", f"rank {number} from rank 0: {wrong}", first.unlike)
    differs = difference(reference.values, first.values, TOLERANCE)
    reasons = [*job.unequal]
    nearly = ranks[0].get("nearly keras", reference)
    if difference(reference.values, nearly.values, TOLERANCE):
        reasons.append("rounding grows")
    # At such an end, Keras may count a step before it knows that there are no data for it.
    counts = [values.get("/optimizer/0") for values in (reference.values, first.values)]
    if any(word in job.words.get("pipeline", "") for word in grammar.UNKNOWN_LENGTH) and counts[0] != counts[1]:
        reasons.append(grammar.END_AS_STEP)
    if OF_PARTS.keys() >= set(reasons):
        in_others = [without(values, *words_of(reasons)) for values in (reference.values, first.values)]
        differs_in_others = difference(*in_others, TOLERANCE)
        if differs_in_others:
            return Result("different", differs_in_others, first.unlike)
    for number, rank in enumerate(ranks):
        expected = without(first.values, "/files") if number else first.values
        wrong = "resumed" in rank and resumed(expected, rank["resumed"])
        if wrong:
            return Result("not resumed", f"rank {number}: {wrong}", first.unlike)
    if differs:
        return Result("not equal", differs, first.unlike, tuple(reasons), first.values)
    return Result("equal", "", first.unlike, (), first.values)


def trained(
    jobs: Sequence[grammar.Job], size: int, folder: Path, resumes: bool, package: Path = ROOT
) -> Iterable[Result]:
    """Results of jobs on a number of ranks; a start that ends is made again behind the job that ended it."""
    for number, job in enumerate(jobs):
        (folder / f"{number}.py").write_text(job.script)
    done = 0
    while done < len(jobs):
        words = []
        for number in range(done, len(jobs)):
            mode = "compare" if OF_PARTS.keys() >= set(jobs[number].unequal) else "train"
            ends = resumes and jobs[number].is_resumable
            words.append(f"{number}:{mode}:{_step(jobs[number]) if ends else 0}")
        try:
            limit_s, env = LIMIT_S * len(words) + 60, {"PYTHONPATH": str(package)}
            ended = run(size, [sys.executable, RANKS, folder, *words], limit_s, env, warm=True)
            output = ended.stderr
        except TimeoutError as error:
            output = str(error)
        begun = [path.with_suffix(".keras") for path in folder.glob("*.claim")]
        unfinished = [path for path in begun if not path.exists()]
        for path in unfinished:
            path.write_bytes(pickle.dumps({"keras": {"error": f"Keras has ended its process\n{output[-1500:]}"}}))
        while done < len(jobs):
            files = [folder / f"{done}.{size}.{rank}" for rank in range(size)]
            if unfinished and not all(file.exists() for file in files):
                break
            done += 1
            if not all(file.exists() for file in files):
                kind = "hang" if "Timeout" in output or "still running" in output else "crash"
                yield Result(kind, output[-3000:])
                break
            reference = _outcomes(folder / f"{done - 1}.keras")["keras"]
            yield judged(jobs[done - 1], reference, [_outcomes(file) for file in files])


def _step(job: grammar.Job) -> int:
    """Step before which a run of the job ends."""
    return random.Random(job.seed).randrange(1, 9)


def _outcomes(file: Path) -> dict[str, SimpleNamespace]:
    """Fields of ranks.Outcome by the kind of the run."""
    return {kind: SimpleNamespace(**fields) for kind, fields in pickle.loads(file.read_bytes()).items()}


def killed(jobs: Sequence[grammar.Job], results: Mapping[int, list[Result]], folder: Path) -> list[Result]:
    """Results of jobs that are killed, and started again on as many or other ranks; each start has two of them."""
    found = [results[min(results)][number] for number in range(len(jobs))]
    numbers = [n for n, result in enumerate(found) if result.values and jobs[n].is_resumable]
    sizes = [size for size in sorted(results) for _ in range(2)]
    for place in range(len(numbers) + 1):
        size = sizes[place % len(sizes)]
        words = []
        if place:
            words.append(f"{numbers[place - 1]}:again:0")
        if place < len(numbers):
            words.append(f"{numbers[place]}:kill:{_step(jobs[numbers[place]])}")
        ended = run(size, [sys.executable, RANKS, folder, *words], 2 * LIMIT_S, warm=True)
        if not place:
            continue
        number, before = numbers[place - 1], sizes[(place - 1) % len(sizes)]
        file = folder / f"{number}.again.0"
        if not file.exists():
            found[number] = Result("not resumed", f"killed on {before}, again on {size} ranks: {ended.stderr[-3000:]}")
            continue
        expected, within = results[size][number], 0.0 if size == before else TOLERANCE
        again = _outcomes(file)["again"]
        if size != before and set(expected.reasons) - ANY_SIZE:
            again = SimpleNamespace(error=again.error, refused="", values=expected.values)
        wrong = resumed(expected.values, again, within)
        if wrong:
            found[number] = Result("not resumed", f"killed on {before}, again on {size} ranks: {wrong}")
    return found


def without_a_rank(jobs: Sequence[grammar.Job], found: Sequence[Result], folder: Path) -> list[Result]:
    """Results of jobs of which one of three ranks is killed, in an elastic start of its own."""
    after = list(found)
    launch = [BIN / "ringtrain", "launch", "--elastic", "-H", "localhost:3", "--min-np", 1, "--max-np", 3]
    launch += ["--blacklist-cooldown", 0, 0, "--", *warm_python(), RANKS, folder]
    for number, (job, result) in enumerate(zip(jobs, found, strict=True)):
        if not result.values:
            continue
        try:
            ended = run(0, [*launch, f"{number}:death:{_step(job)}"], LIMIT_S, cwd=folder)
        except TimeoutError as error:
            after[number] = Result("hang", f"without a rank: {str(error)[-3000:]}")
            continue
        file = folder / f"{number}.death.0"
        if not file.exists():
            after[number] = Result("crash", f"without a rank: {ended.stderr[-3000:]}")
            continue
        outcome, wrong = _outcomes(file)["death"], ""
        if outcome.values and set(result.reasons) <= ANY_SIZE:
            wrong = difference(without(result.values, "/seen"), without(outcome.values, "/seen"), TOLERANCE)
        if outcome.error or wrong:
            after[number] = Result("different", f"without a rank: {outcome.error[-3000:] or wrong}")
    return after


def by_a_configuration(jobs: Sequence[grammar.Job], found: Sequence[Result], size: int, folder: Path) -> list[Result]:
    """Results of jobs with one fit, which `ringtrain.train` trains as well: the weights are those of `fit`."""
    after = list(found)
    numbers = []
    for number, (job, result) in enumerate(zip(jobs, found, strict=True)):
        is_plain = "initial_epoch" not in job.script and "OPTIONS = {}" in job.script
        if result.kind == "equal" and is_plain and job.script.count("fit(model") == 1:
            numbers.append(number)
    words = [f"{number}:configured:0" for number in numbers]
    ended = run(size, [sys.executable, RANKS, folder, *words], LIMIT_S * len(words) + 60, warm=True)
    for number in numbers:
        file = folder / f"{number}.configured.0"
        if not file.exists():
            after[number] = Result("crash", f"configured: {ended.stderr[-3000:]}")
            break
        outcome, expected = _outcomes(file)["configured"], found[number].values
        wrong = ""
        if outcome.values:
            wrong = difference({path: expected[path] for path in outcome.values}, outcome.values, TOLERANCE)
        if outcome.error or wrong:
            after[number] = Result("different", f"configured: {outcome.error[-3000:] or wrong}")
    return after


def results_of(
    jobs: Sequence[grammar.Job],
    sizes: Sequence[int],
    resumes: bool = False,
    kills: bool = False,
    deaths: bool = False,
    configures: bool = False,
    package: Path = ROOT,
) -> list[Result]:
    """Results of jobs on several numbers of ranks, of which the first failure counts.

    package: Folder of the ringtrain that ranks train with, unless they are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = {size: list(trained(jobs, size, Path(folder), resumes, package)) for size in sizes}
        merged = killed(jobs, results, Path(folder)) if kills else list(results[sizes[0]])
        if deaths:
            merged = without_a_rank(jobs, merged, Path(folder))
        if configures:
            merged = by_a_configuration(jobs, merged, sizes[0], Path(folder))
    for number, job in enumerate(jobs):
        first = results[sizes[0]][number]
        for size in sizes[1:]:
            other = results[size][number]
            is_virtual, wrong = "virtual_ranks" in job.script, ""
            if first.values and other.values and (is_virtual or set(first.reasons) <= ANY_SIZE):
                # `ringtrain.evaluate` divides its batches over the real ranks, whose states are added up.
                apart = ["/evaluate/largest"] if "a metric that is no sum" in first.reasons else []
                of_both = [without(one.values, *apart) for one in (first, other)]
                wrong = difference(*of_both, TOLERANCE)
            if first.values and other.values and is_virtual:  # what `fit` trains has the same bits
                of_fit = [without(one.values, "/evaluate", "/predict") for one in (first, other)]
                wrong = wrong or difference(*of_fit, 0.0)
            if other.kind in FAILURES:
                merged[number] = replace(other, detail=f"{other.detail}\n{size} ranks: {other.detail[-200:]}")
            elif wrong and merged[number].kind not in FAILURES:
                merged[number] = Result("different", f"{size} ranks from {sizes[0]}: {wrong}")
    return merged


def shrunk(job: grammar.Job, sizes: Sequence[int], result: Result, until: float) -> tuple[grammar.Job, Result]:
    """The job with as many first options as show the same class."""
    resumes = result.kind == "not resumed" and "killed on" not in result.detail
    kills = result.kind == "not resumed" and not resumes
    deaths, configures = result.detail.startswith("without a rank"), result.detail.startswith("configured")
    simplest = dict(job.choices)
    names = [name for name, number in simplest.items() if number]
    portion = max(1, len(names) // 2)
    while names and time.time() < until:
        begin = 0
        while begin < len(names) and time.time() < until:
            tried = simplest | dict.fromkeys(names[begin : begin + portion], 0)
            other = grammar.job(job.seed, tried)
            (found,) = results_of([other], sizes, resumes, kills, deaths, configures)
            if found.kind == result.kind:
                job, result, simplest = other, found, tried
                del names[begin : begin + portion]
            else:
                begin += portion
        if portion == 1:
            break
        portion //= 2
    return job, result


def line_of(job: grammar.Job) -> str:
    """The job for the corpus: its seed, and the choices that are not first options, by their texts."""
    return json.dumps([job.seed, {name: job.words[name] for name, number in job.choices.items() if number}])


def job_of(line: str) -> grammar.Job:
    seed, words = json.loads(line)
    return grammar.job(seed, words, is_whole=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="first seed (default: the time)")
    parser.add_argument("--jobs", type=int, help="number of jobs, in place of --minutes")
    parser.add_argument("-np", dest="sizes", type=int, nargs="+", default=[2], help="numbers of ranks of each job")
    parser.add_argument("--resumes", action="store_true", help="also end each job before a step and start it again")
    parser.add_argument("--kills", action="store_true", help="also kill all ranks of each job, and start it again")
    parser.add_argument("--deaths", action="store_true", help="also lose a rank of each job, in an elastic start")
    parser.add_argument("--configured", action="store_true", help="also train each job by ringtrain.train")
    parser.add_argument("--corpus", action="store_true", help="the jobs of corpus.txt first")
    parser.add_argument("--show", action="store_true", help="print the scripts, and train none")
    parser.add_argument("--no-shrink", dest="shrinks", action="store_false")
    given = parser.parse_args()
    first = int(time.time()) if given.seed is None else given.seed
    corpus = [job_of(line) for line in CORPUS.read_text().splitlines() if line.startswith("[")] if given.corpus else []
    print(f"{len(corpus)} jobs of the corpus, seeds from {first}, on {given.sizes} ranks", flush=True)
    end, started = time.time() + given.minutes * 60, time.time()
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    seed = first
    while corpus or (seed - first < given.jobs if given.jobs else time.time() < end):
        jobs, corpus = corpus[:BATCH], corpus[BATCH:]
        if not jobs:
            jobs = [grammar.job(seed + offset) for offset in range(min(BATCH, given.jobs or BATCH))]
            seed += len(jobs)
        if given.show:
            print(*(job.script for job in jobs), sep="\n# ----\n")
            continue
        results = results_of(jobs, given.sizes, given.resumes, given.kills, given.deaths, given.configured)
        for job, result in zip(jobs, results, strict=True):
            counts[result.kind] += 1
            counts["named, but equal"] += result.kind == "equal" and bool(result.unlike)
            text = result.detail.strip().splitlines()
            why = "; ".join(dict.fromkeys((*job.unequal, *result.unlike)))
            print(f"{job.seed:>12} {result.kind:<12} {text[-1][:150] if text else ''} [{why[:100]}]", flush=True)
            if result.kind in FAILURES:
                failures.append((job, result))
    minutes = (time.time() - started) / 60
    print(f"{counts.total() - counts['named, but equal']} jobs in {minutes:.1f} minutes: {dict(counts)}")
    for job, result in failures[:3] if given.shrinks else failures:
        if given.shrinks:
            job, result = shrunk(job, given.sizes, result, time.time() + 300)
        print(f"\n# {result.kind}: {result.detail}\n{line_of(job)}\n{job.script}")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
