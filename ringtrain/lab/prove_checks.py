"""Checks of short runs of a job: weights, samples, metrics and bits, and the likely reason where they differ."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.protocol.json_text import parse_json
from ringtrain.run import checkpoint

TOLERANCES = {"float64": 1e-9, "float32": 2e-3}
"""largest distance of weights, slots and metrics from those of one process, relative to their norm"""
NOT_SEEDED = (
    "likely a layer or loss that draws random numbers outside of Keras' seed generators, or data that are shuffled or"
    " drawn without a seed"
)
NO_MEAN = (
    "likely a loss that is no mean over rows, an optimizer that changes gradients before they are averaged, or random"
    " numbers outside of Keras' seed generators"
)
NO_SUM = "likely a metric that is no sum over rows"
OWN_BATCHES = "each rank has batches of its own"
NOT_SAVED = (
    "likely random numbers of tf.random or NumPy in place of Keras' seed generators, or a callback with a state that"
    " changes training: no checkpoint holds these"
)


@dataclass(frozen=True)
class Check:
    """A statement about the job, and what was seen."""

    claim: str
    holds: bool | None
    """None: it cannot be shown here"""
    evidence: str


def like_one_process(precision: str, one: Outcome, ranks: Outcome, part: Outcome) -> list[Check]:
    """Checks of weights and metrics of all ranks against one process with the whole batch.

    `part`: one process that trains a part of each batch only, the negative control.
    """
    limit, claim = TOLERANCES[precision], f"weights and slots of one process with the whole batch, {precision}"
    if part.error:
        return [Check(claim, False, part.error)]
    phrases = [phrase for phrase in ranks.told() if phrase.startswith(BY_DESIGN)]
    if phrases:
        return [Check(claim, None, f"depends on how a batch is divided, by design: {'; '.join(phrases)}")]
    distance, wrong = ranks.apart(one), part.apart(one)
    evidence = f"{distance:.1e} apart, at most {limit:.0e}; a process with a part of each batch only: {wrong:.1e}"
    if distance > limit:
        told = [phrase for phrase in ranks.told() if "rank's rows" in phrase]
        return [Check(claim, False, f"{evidence}; {'; '.join(told) or NO_MEAN}")]
    if wrong <= limit:
        why = "the job changes its weights too little to tell: try a larger learning rate"
        return [Check(claim, None, f"{evidence}; {why}")]
    return [Check(claim, True, evidence), same_metrics(precision, one, ranks)]


def same_metrics(precision: str, one: Outcome, ranks: Outcome) -> Check:
    """Check of the metrics of all epochs."""
    apart_by_name: dict[str, float] = {}
    claim = f"metrics of one process, {precision}"
    if len(ranks.metrics()) != len(one.metrics()):
        return Check(claim, False, f"{len(ranks.metrics())} epochs in place of {len(one.metrics())}; {NO_SUM}")
    for ours, its in zip(ranks.metrics(), one.metrics(), strict=True):
        for name in ours.keys() & its.keys():
            value, expected = (np.atleast_1d(np.asarray(one[name], float)) for one in (ours, its))  # None: NaN
            distance = np.abs(value - expected) / np.maximum(np.abs(expected), 1e-3)
            distance[np.isnan(distance)] = np.inf
            distance[np.isnan(value) & np.isnan(expected)] = 0.0
            apart_by_name[name] = max(float(distance.max()), apart_by_name.get(name, 0.0))
    worst = max(apart_by_name, key=lambda name: apart_by_name[name])
    holds = apart_by_name[worst] <= max(TOLERANCES[precision], 1e-6)  # metrics are float32 at best
    evidence = f"{', '.join(sorted(apart_by_name))}: at most {apart_by_name[worst]:.1e} apart ({worst})"
    why = "" if holds else f"; {NO_SUM}"
    return Check(claim, holds, evidence + why)


def every_sample_once(one: Outcome, ranks: Outcome) -> Check:
    """Check of the samples that the ranks have trained."""
    claim = "every sample once in an epoch, on all ranks together"
    if OWN_BATCHES in ranks.told():
        return Check(claim, None, f"{OWN_BATCHES}: a function of the rank divides the data")
    expected, trained = one.rows(), ranks.rows()
    for epoch, rows in expected.items():
        missing, more = rows - trained.get(epoch, Counter()), trained.get(epoch, Counter()) - rows
        if missing or more:
            return Check(
                claim,
                False,
                f"epoch {epoch + 1}: {missing.total()} of {rows.total()} samples that one process trains are missing,"
                f" {more.total()} are others: {NOT_SEEDED}",
            )
    num_samples = max(rows.total() for rows in expected.values())
    return Check(claim, True, f"{len(expected)} epochs of {num_samples} samples, by their checksums")


def same_bits(reason: str, claim: str, first: Outcome, second: Outcome) -> Check:
    """Check that two runs are equal; `reason`: the likely one if they are not."""
    error = first.error or second.error
    if error:
        return Check(claim, False, error)
    difference = first.same_bits(second)
    if not difference:
        return Check(claim, True, "equal in every bit: weights, slots, metrics")
    if difference.startswith("metric "):
        reason = f"{NO_SUM}, or one that reads a clock"
    return Check(claim, False, f"{difference}; {reason}")


def fails_on_ranks(num_ranks: int, error: str) -> Check:
    """The job trains on one process, but not on several."""
    return Check(f"the job trains on {num_ranks} ranks", False, error + _why_on_ranks(error))


def _why_on_ranks(error: str) -> str:
    """Likely reason why ranks fail."""
    if any(words in error for words in ("data than", "data (fit", "other batches")):
        return "; likely a data function that shuffles or draws without a seed, or divides the rows by itself"
    if "out of step" in error:
        return "; likely a callback or layer that changes weights on one rank"
    return ""


def in_sync(ranks: Outcome) -> Check:
    """Check of the run's own comparison of its ranks."""
    claim = "ranks equal after every epoch"
    if ranks.error:
        return Check(claim, False, ranks.error)
    summary = parse_json((ranks.folder / "summary.json").read_text(encoding="utf-8"))
    return Check(claim, bool(summary["in_sync"]), f"checksum {summary['checksum']} on {summary['num_ranks']} ranks")


def killed(claim: str, codes: Sequence[int], undisturbed: Outcome, resumed: Outcome) -> Check:
    """Check of a run that was stopped, then killed, then ended, in as many starts with these exit codes."""
    if not resumed.error and not {143, 137} <= set(codes[:-1]):
        text = f"the earlier starts ended with {', '.join(map(str, codes[:-1]))}, expected 143 (SIGTERM), 137 (SIGKILL)"
        return Check(claim, None, text)
    return same_bits(NOT_SAVED, claim, undisturbed, resumed)


def verdict(checks: Sequence[Check]) -> bool:
    """Returns whether no check has failed."""
    return all(check.holds is not False for check in checks)


LEAST_NORM = 0.01
BY_DESIGN = ("batch normalization", "random layers", "the loss of", "each rank has batches")
"""beginnings of what `ringtrain.fit` says of a model whose weights depend on how a batch is divided"""


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
    def last(self) -> checkpoint.Checkpoint:
        """Its last checkpoint."""
        return checkpoint.verify(max((self.folder / "checkpoints").iterdir()))

    def state(self) -> dict[str, NDArray[Any]]:
        """Weights and optimizer at its end."""
        return {name: array for name, array in self.last.arrays("state").items() if name.isdigit()}

    def kinds(self) -> dict[str, str]:
        """Kind of each array of `state`: "weights", or a slot's name."""
        paths = [path for path, *_ in self.last.manifest["variables"]]
        first = next((place for place, path in enumerate(paths) if path.endswith("/iteration")), len(paths))
        kinds = ["weights"] * first + [path.rpartition("_")[2] for path in paths[first:]]
        return {name: kinds[int(name)] for name in self.state()}

    def apart(self, other: Outcome) -> float:
        """Largest distance of an array from that of another run."""
        return apart(self.state(), other.state(), self.kinds())

    @property
    def num_steps(self) -> int:
        return int(parse_json((self.folder / "summary.json").read_text(encoding="utf-8"))["global_step"])

    def metrics(self) -> list[dict[str, float]]:
        """Metrics of its epochs."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        timed = ("epoch", "global_step", "time_s", "train_s", "evaluate_s", "images_per_s", "learning_rate")
        found = []
        for line in lines:
            found.append({name: value for name, value in parse_json(line).items() if name not in timed})
        return found

    def recorded(self) -> list[dict[str, Any]]:
        """Lines of all ranks' `prove_rows.Rows` about this run."""
        found = []
        for file in sorted(self.recordings.glob("*.jsonl")):
            for text in file.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                if line["fit"] == self.folder.name:
                    found.append(line)
        return found

    def first(self, name: str) -> Any:
        """The first recorded value of a name; None: there is none."""
        return next((line[name] for line in self.recorded() if name in line), None)

    def rows(self) -> dict[int, Counter[int]]:
        """Number of times each sample was trained, by epoch."""
        found: dict[int, Counter[int]] = {}
        for line in self.recorded():
            if "rows" in line:
                found.setdefault(line["epoch"], Counter()).update(line["rows"])
        return found

    def told(self) -> list[str]:
        """Parts of the model whose results are not, or may not be, those of one process, a phrase each."""
        summary = parse_json((self.folder / "summary.json").read_text(encoding="utf-8"))
        return [*summary.get("unlike_one_process", ()), *summary.get("own_code", ())]

    def same_bits(self, other: Outcome) -> str:
        """ "" if all bits of weights, slots and metrics are equal, else the first difference."""
        ours, theirs = self.state(), other.state()
        for name, array in ours.items():
            if array.tobytes() != theirs[name].tobytes():
                path = self.last.manifest["variables"][int(name)][0]
                return f"{path} differs by up to {apart({name: array}, theirs, {}):.1e} of its norm"
        if len(self.metrics()) != len(other.metrics()):
            return f"number of epochs differs: {len(self.metrics())} and {len(other.metrics())}"
        for own, others in zip(self.metrics(), other.metrics(), strict=True):
            for name in own:
                if own[name] != others.get(name):
                    return f"metric {name} differs"
        return ""


def apart(ours: Mapping[str, NDArray[Any]], others: Mapping[str, NDArray[Any]], kinds: Mapping[str, str]) -> float:
    """Largest distance of two states' arrays, relative to their norms.

    An array of less than `LEAST_NORM` of its kind's norm counts as if it had that: weights whose gradient is zero in
    theory, such as the bias of an attention's keys, are nothing but rounding.
    """
    floats = {name: array for name, array in others.items() if array.dtype.kind == "f" and name in ours}
    norms = {name: float(np.linalg.norm(np.asarray(array, float))) for name, array in floats.items()}
    squares: defaultdict[str, float] = defaultdict(float)
    for name, norm in norms.items():
        squares[kinds.get(name, name)] += norm**2
    distances = [0.0]
    for name, norm in norms.items():
        if ours[name].shape == floats[name].shape:
            least = LEAST_NORM * math.sqrt(squares[kinds.get(name, name)])
            distance = float(np.linalg.norm(np.subtract(ours[name], floats[name], dtype=float)))
            distances.append(distance / max(norm, least, 1e-12))
    return max(distances)
