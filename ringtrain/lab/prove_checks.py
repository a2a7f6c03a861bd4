"""Checks of short runs of a job: weights, samples, metrics and bits, and the likely reason where they differ."""

from __future__ import annotations

import functools
import json
import math
import signal
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.checkpoint import checkpoint
from ringtrain.checkpoint.run_folder import NO_METRICS
from ringtrain.lab import runs
from ringtrain.lab.runs import Run

TOLERANCES = {"float64": 1e-9, "float32": 2e-3}
"""largest distance of weights, slots and metrics from those of one process, relative to their norm"""
LEAST_NORM = 0.01
SIGNALED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
NOT_SEEDED = (
    "likely a layer or loss that draws random numbers outside of Keras' seed generators, or data that are shuffled or"
    " drawn without a seed"
)
NO_MEAN = (
    "likely a loss that is no mean over rows, an optimizer that changes gradients before they are averaged, or random"
    " numbers outside of Keras' seed generators"
)
NO_SUM = "likely a metric that is no sum over rows"
NOT_SAVED = (
    "likely random numbers of tf.random or NumPy in place of Keras' seed generators, or a callback with a state that"
    " changes training: no checkpoint holds these"
)
ON_RANKS = {
    "data than": "likely a data function that shuffles or draws without a seed, or divides the rows by itself",
    "data (fit": "likely data that are shuffled or drawn without a seed",
    "other batches": "likely data that are shuffled or drawn without a seed",
    "out of step": "likely a callback or layer that changes weights on one rank",
}
"""likely reasons why a job fails on several ranks, by words of the error"""
OWN_BATCHES = "each rank has batches of its own"
BY_DESIGN = ("batch normalization", "random layers", "the loss of", OWN_BATCHES)
"""beginnings of what `ringtrain.fit` says of a model whose weights depend on how a batch is divided"""


@dataclass(frozen=True)
class Check:
    """A statement about the job, and what was seen."""

    claim: str
    holds: bool | None
    """None: it cannot be shown here"""
    evidence: str


@dataclass(frozen=True)
class Outcome:
    """A start of the job, of which the first run is compared."""

    folder: Path
    error: str = ""
    """why it has failed; "": it has not"""
    code: int = 0
    """exit code of its launch"""
    recordings: Path = Path()
    """folder of what `prove_rows.Rows` has written on all ranks"""

    @functools.cached_property
    def record(self) -> Run:
        """Contents of its folder."""
        return runs.read(self.folder)

    @functools.cached_property
    def last(self) -> checkpoint.Checkpoint:
        """Its last checkpoint."""
        return checkpoint.verify(max((self.folder / "checkpoints").iterdir()))

    @functools.cached_property
    def state(self) -> dict[str, NDArray[Any]]:
        """Weights and optimizer at its end."""
        return {name: array for name, array in self.last.arrays("state").items() if name.isdigit()}

    def kinds(self) -> dict[str, str]:
        """Kind of each array of `state`: "weights", or a slot's name."""
        paths = [path for path, *_ in self.last.manifest["variables"]]
        first = next((place for place, path in enumerate(paths) if path.endswith("/iteration")), len(paths))
        kinds = ["weights"] * first + [path.rpartition("_")[2] for path in paths[first:]]
        return {name: kinds[int(name)] for name in self.state}

    def is_narrow(self) -> bool:
        """Returns whether a part of its state has less than 64 bits."""
        return any(array.dtype.kind == "f" and array.dtype.itemsize < 8 for array in self.state.values())

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of its epochs."""
        found = []
        for epoch in self.record.epochs:
            found.append({name: value for name, value in epoch.items() if name not in NO_METRICS})
        return found

    def rows(self) -> dict[int, Counter[int]]:
        """Number of times each sample was trained, by epoch."""
        found: dict[int, Counter[int]] = defaultdict(Counter)
        for file in self.recordings.glob("*.jsonl"):
            for text in file.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                if line["fit"] == self.folder.name:
                    found[line["epoch"]].update(line["rows"])
        return found

    def told(self) -> list[str]:
        """Parts of the model whose results are not, or may not be, those of one process, a phrase each."""
        return [*self.record.summary.get("unlike_one_process", ()), *self.record.summary.get("own_code", ())]


def like_one_process(precision: str, one: Outcome, ranks: Outcome) -> list[Check]:
    """Checks of weights and metrics of all ranks against one process with the whole batch."""
    limit, claim = TOLERANCES[precision], f"weights and slots of one process with the whole batch, {precision}"
    phrases = [phrase for phrase in ranks.told() if phrase.startswith(BY_DESIGN)]
    if phrases:
        return [Check(claim, None, f"depends on how a batch is divided, by design: {'; '.join(phrases)}")]
    distance = apart(ranks.state, one.state, one.kinds())
    evidence = f"{distance:.1e} apart, at most {limit:.0e}"
    if distance > limit:
        told = [phrase for phrase in ranks.told() if "rank's rows" in phrase]
        return [Check(claim, False, f"{evidence}; {'; '.join(told) or NO_MEAN}")]
    return [Check(claim, True, evidence), same_metrics(precision, one, ranks)]


def same_metrics(precision: str, one: Outcome, ranks: Outcome) -> Check:
    """Check of the metrics of all epochs."""
    claim, limit = f"metrics of one process, {precision}", max(TOLERANCES[precision], 1e-6)  # they are float32 at best
    ours, expected = ranks.metrics(), one.metrics()
    if len(ours) != len(expected):
        return Check(claim, False, f"{len(ours)} epochs in place of {len(expected)}; {NO_SUM}")
    different = set()
    for own, its in zip(ours, expected, strict=True):
        for name in own.keys() & its.keys():
            values = np.asarray(own[name], float), np.asarray(its[name], float)  # None: NaN
            if not np.allclose(*values, rtol=limit, atol=1e-3 * limit, equal_nan=True):
                different.add(name)
    if different:
        return Check(claim, False, f"{', '.join(sorted(different))} differ by more than {limit:.0e}; {NO_SUM}")
    return Check(claim, True, f"{', '.join(sorted(ours[0]))}: at most {limit:.0e} apart")


def every_sample_once(one: Outcome, ranks: Outcome) -> Check:
    """Check of the samples that the ranks have trained."""
    claim = "every sample once in an epoch, on all ranks together"
    if OWN_BATCHES in ranks.told():
        return Check(claim, None, f"{OWN_BATCHES}: a function of the rank divides the data")
    expected, trained = one.rows(), ranks.rows()
    num_samples = max(rows.total() for rows in expected.values())
    if not num_samples:
        return Check(claim, None, "rows that are ragged or sparse are not compared")
    for epoch, rows in expected.items():
        missing, more = rows - trained[epoch], trained[epoch] - rows
        if missing or more:
            return Check(
                claim,
                False,
                f"epoch {epoch + 1}: {missing.total()} of {rows.total()} samples that one process trains are missing,"
                f" {more.total()} are others: {NOT_SEEDED}",
            )
    return Check(claim, True, f"{len(expected)} epochs of {num_samples} samples, by their checksums")


def same_bits(reason: str, claim: str, first: Outcome, second: Outcome) -> Check:
    """Check that two runs are equal; `reason`: the likely one if they are not."""
    error = first.error or second.error
    if error:
        return Check(claim, False, error)
    for name, array in first.state.items():
        if array.tobytes() != second.state[name].tobytes():
            path = first.last.manifest["variables"][int(name)][0]
            distance = apart({name: array}, second.state, {})
            return Check(claim, False, f"{path} differs by up to {distance:.1e} of its norm; {reason}")
    if first.metrics() != second.metrics():
        return Check(claim, False, f"metrics differ; {NO_SUM}, or one that reads a clock")
    return Check(claim, True, "equal in every bit: weights, slots, metrics")


def killed(claim: str, codes: Sequence[int], undisturbed: Outcome, resumed: Outcome) -> Check:
    """Check of a run that was stopped, then killed, then ended, in as many starts with these exit codes."""
    if not resumed.error and not {*SIGNALED} <= {*codes[:-1]}:
        return Check(claim, None, f"its starts ended with {codes}, expected {SIGNALED} before the last")
    return same_bits(NOT_SAVED, claim, undisturbed, resumed)


def fails_on_ranks(num_ranks: int, error: str) -> Check:
    """The job trains on one process, but not on several."""
    likely = next((f"; {reason}" for words, reason in ON_RANKS.items() if words in error), "")
    return Check(f"the job trains on {num_ranks} ranks", False, error + likely)


def in_sync(ranks: Outcome) -> Check:
    """Check of the run's own comparison of its ranks."""
    summary = ranks.record.summary
    evidence = f"checksum {summary['checksum']} on {summary['num_ranks']} ranks"
    return Check("ranks equal after every epoch", bool(summary["in_sync"]), evidence)


def apart(ours: Mapping[str, NDArray[Any]], others: Mapping[str, NDArray[Any]], kinds: Mapping[str, str]) -> float:
    """Largest distance of two states' arrays, relative to their norms."""
    floats = {name: array for name, array in others.items() if array.dtype.kind == "f" and name in ours}
    norms = {name: float(np.linalg.norm(np.asarray(array, float))) for name, array in floats.items()}
    squares: defaultdict[str, float] = defaultdict(float)
    for name, norm in norms.items():
        squares[kinds.get(name, name)] += norm**2
    distances = [0.0]
    for name, norm in norms.items():
        if ours[name].shape == floats[name].shape:
            # Weights whose gradient is zero in theory, such as the bias of attention keys, are nothing but rounding.
            least = LEAST_NORM * math.sqrt(squares[kinds.get(name, name)])
            distance = float(np.linalg.norm(np.subtract(ours[name], floats[name], dtype=float)))
            distances.append(distance / max(norm, least, 1e-12))
    return max(distances)
