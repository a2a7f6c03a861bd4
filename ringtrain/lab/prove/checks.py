"""Checks of short runs of a job: weights, samples, metrics and bits, and the likely reason where they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringtrain.lab.prove.outcomes import Outcome, Start
from ringtrain.protocol.json_text import parse_json

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
NO_FIRST_SEED = "the first weights differ: call keras.utils.set_random_seed(1) before the model is built"
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


def of_fits(function: Callable[..., Check | list[Check]], *starts: Start) -> list[Check]:
    """Checks of all runs of some starts, those of one claim as one: `function` gets the outcomes of a run."""
    by_claim: dict[str, list[tuple[str, Check]]] = {}
    for fit in starts[0].fits:
        found = function(*(start.outcome(fit) for start in starts))
        for check in found if isinstance(found, list) else [found]:
            by_claim.setdefault(check.claim, []).append((fit, check))
    return [_of_claim(claim, found) for claim, found in by_claim.items()]


def _of_claim(claim: str, found: Sequence[tuple[str, Check]]) -> Check:
    """The check of several runs: what does not hold for one does not hold."""
    fit, worst = min(found, key=lambda one: (False, None, True).index(one[1].holds))
    if len(found) == 1:
        return worst
    num_held = sum(check.holds is True for _, check in found)
    return Check(claim, worst.holds, f"{num_held} of {len(found)} runs; {fit}: {worst.evidence}")


def like_one_process(precision: str, one: Outcome, ranks: Outcome, part: Outcome, where: str = "") -> list[Check]:
    """Checks of weights and metrics of all ranks against one process with the whole batch.

    `part`: one process that trains a part of each batch only, the negative control.
    """
    limit, claim = TOLERANCES[precision], f"weights and slots of one process with the whole batch, {precision}{where}"
    error = one.error or ranks.error or part.error
    if error:
        if precision == "float64":
            return [Check(claim, None, "the job does not train in float64")]
        return [Check(claim, False, error)]
    phrases = ranks.unlike_one_process()
    if phrases:
        return [Check(claim, None, f"depends on how a batch is divided, by design: {'; '.join(phrases)}")]
    if precision == "float64":
        for line in ranks.recorded():
            for name in line.get("narrow", ()):
                return [Check(claim, None, f"layer {name} computes in another dtype, as the model asks")]
    distance, wrong = ranks.apart(one), part.apart(one)
    evidence = f"{distance:.1e} apart, at most {limit:.0e}; a process with a part of each batch only: {wrong:.1e}"
    if distance > limit:
        told = [phrase for phrase in ranks.told() if "rank's rows" in phrase]
        evidence += f"; {'; '.join(told) or NO_MEAN}"
    elif wrong <= limit:
        evidence += "; the job changes its weights too little to tell: try a larger learning rate"
        return [Check(claim, None, evidence)]
    found = [Check(claim, distance <= limit, evidence)]
    if distance <= limit:
        found.append(same_metrics(precision, one, ranks, where))
    return found


def as_rounded(narrow: Sequence[Check], wide: Sequence[Check]) -> list[Check]:
    """Checks in both precisions: what holds in float64 alone is not shown in float32, where rounding is amplified."""
    first, *rest = narrow
    if first.holds is False and wide[0].holds:
        distance, _, _ = first.evidence.partition(";")
        why = "but not in float64: rounding that the optimizer amplifies, e.g. where gradients are zero"
        first = Check(first.claim, None, f"{distance}, {why}")
    return [first, *rest, *wide]


def same_metrics(precision: str, one: Outcome, ranks: Outcome, where: str = "") -> Check:
    """Check of the metrics of all epochs."""
    apart_by_name: dict[str, float] = {}
    claim = f"metrics of one process, {precision}{where}"
    if len(ranks.metrics()) != len(one.metrics()):
        return Check(claim, False, f"{len(ranks.metrics())} epochs in place of {len(one.metrics())}; {NO_SUM}")
    for ours, its in zip(ranks.metrics(), one.metrics(), strict=True):
        for name in ours.keys() & its.keys():
            value, expected = (np.asarray(one[name], float) for one in (ours, its))  # None, for NaN, becomes NaN
            distance = np.abs(value - expected) / np.maximum(np.abs(expected), 1e-3)
            distance = np.where(
                np.isnan(value) & np.isnan(expected), 0.0, np.where(np.isnan(distance), np.inf, distance)
            )
            apart_by_name[name] = max(float(distance.max()), apart_by_name.get(name, 0.0))
    worst = max(apart_by_name, key=lambda name: apart_by_name[name])
    holds = apart_by_name[worst] <= max(TOLERANCES[precision], 1e-6)  # metrics are float32 at best
    evidence = f"{', '.join(sorted(apart_by_name))}: at most {apart_by_name[worst]:.1e} apart ({worst})"
    why = "" if holds else f"; {NO_SUM}"
    return Check(claim, holds, evidence + why)


def every_sample_once(one: Outcome, ranks: Outcome, where: str = "") -> Check:
    """Check of the samples that the ranks have trained."""
    claim = f"every sample once in an epoch, on all ranks together{where}"
    if one.error or ranks.error:
        return Check(claim, False, one.error or ranks.error)
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


def same_bits(claim: str, first: Outcome, second: Outcome, again: Outcome | None = None) -> Check:
    """Check that two runs are equal; `again`: a repetition of the first, which tells why they are not."""
    error = first.error or second.error
    if error:
        return Check(claim, False, error + _why_on_ranks(error))
    difference = first.same_bits(second)
    if not difference:
        return Check(claim, True, "equal in every bit: weights, slots, metrics")
    if difference.startswith("metric "):
        return Check(claim, False, f"{difference}; {NO_SUM}, or one that reads a clock")
    if again is not None and not again.error and not first.same_bits(again):
        return Check(claim, False, f"{difference}; two equal runs are equal: {NOT_SAVED}")
    if again is not None and not again.error:
        difference += "; even two equal runs differ"
    return Check(claim, False, f"{difference}; {_why_not_again(first, second)}")


def _why_not_again(first: Outcome, second: Outcome) -> str:
    """Likely reason why two equal runs differ."""
    reasons = []
    weights = [one.first("first_weights") for one in (first, second)]
    if weights[0] != weights[1]:
        reasons.append(NO_FIRST_SEED)
    if first.orders() and first.orders() != second.orders():
        reasons.append("other rows, or in another order")
    if not reasons:
        return NOT_SEEDED
    return "; ".join(reasons)


def same_bits_as_it_is(claim: str, first: Outcome, as_it_is: Outcome, again: Outcome) -> Check:
    """Check that a script trains the same without our seed, too; `again`: with it, as `first`."""
    check, seeded = same_bits(claim, first, as_it_is), same_bits(claim, first, again)
    if check.holds:
        return check
    if seeded.holds:
        return Check(claim, False, f"{check.evidence}; with a seed that is set before the script, they are equal")
    # Both starts have the same first weights then, so that lines which draw by themselves can be told.
    why = "" if seeded.evidence == check.evidence else f": {seeded.evidence}"
    return Check(claim, False, f"{check.evidence}; also with a seed that is set before the script{why}")


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


def killed(claim: str, codes: Sequence[int], undisturbed: Outcome, resumed: Outcome, again: Outcome) -> Check:
    """Check of a run that was stopped, then killed, then ended, in as many starts with these exit codes."""
    if resumed.error:
        return Check(claim, False, resumed.error)
    if not {143, 137} <= set(codes[:-1]):
        text = f"the earlier starts ended with {', '.join(map(str, codes[:-1]))}, expected 143 (SIGTERM), 137 (SIGKILL)"
        return Check(claim, None, text)
    return same_bits(claim, undisturbed, resumed, again)


def control(claim: str, first: Outcome, second: Outcome) -> Check:
    """Negative control: two runs that must differ."""
    error = first.error or second.error
    if error:
        return Check(claim, False, error)
    difference = first.same_bits(second)
    return Check(claim, bool(difference), difference or "they are equal, so equal runs show nothing")


def verdict(checks: Sequence[Check]) -> bool:
    """Returns whether no check has failed."""
    return all(check.holds is not False for check in checks)
