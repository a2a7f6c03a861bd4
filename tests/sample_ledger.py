"""Samples that an elastic run has trained, by what all ranks' journals say together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """Samples that an elastic run has trained, by all ranks' journals."""

    epochs: Mapping[int, int]
    """number of samples trained once, by epoch, counted from 0"""
    breaches: tuple[str, ...]
    """missing, repeated or contradictory samples; empty: every sample of every epoch was trained exactly once"""
    undone: int = 0
    """number of samples that were trained in steps after that from which the next ranks continued"""


def ledger(events: Sequence[Mapping[str, Any]], num_epochs: int) -> Ledger:
    """Verifies that each position of every epoch's order was trained exactly once.

    A generation is a group of ranks that train together. Each starts at the step from which it continues, made by any
    ranks. Later steps of the previous generation do not count.
    """
    elastic = [event for event in events if "generation" in event]
    ends = [event for event in elastic if event["event"] == "end"]
    if not ends:
        return Ledger({}, ("no journal has an end",))

    # From the last generation back to the first one, each with the last of its steps that counts.
    begun = {event["generation"]: event for event in elastic if event["event"] in ("start", "resize")}
    chain: list[tuple[Mapping[str, Any], int]] = []
    last_step, name = ends[-1]["global_step"], ends[-1]["generation"]
    while name:
        if name not in begun:
            return Ledger({}, (f"no journal has the start of generation {name}",))
        chain.append((begun[name], last_step))
        last_step, name = begun[name]["global_step"], begun[name]["after"]

    # Where the order of the samples is now, and what is wrong up to there.
    epoch, position = 0, 0
    breaches: list[str] = []
    undone = 0
    trained = dict.fromkeys(range(num_epochs), 0)
    for first, last_step in reversed(chain):
        where = f"generation {first['generation']} begins with step {first['global_step']}"
        if (epoch, position) != (first["epoch"], first["position"]):
            breaches.append(f"{where} in epoch {first['epoch']} at {first['position']}, not in {epoch} at {position}")
        steps, later = _steps_of(first, last_step, events)
        undone += later
        is_last = first is chain[0][0]
        for step in range(first["global_step"] + 1, last_step + 1):
            parts = steps.get(step, {})
            if len(parts) < first["to"] and not is_last:
                alive: set[int] = set()
                for later_step in range(step + 1, last_step + 1):
                    alive |= steps.get(later_step, {}).keys()
                parts = _with_lost(parts, alive, _whole_step(step, first, events), first["to"])
            if len(parts) != first["to"]:
                breaches.append(
                    f"step {step}: {len(steps.get(step, ()))} of {first['to']} ranks have recorded their samples"
                )
            for its_epoch, _, begin, end in sorted(parts.values(), key=lambda part: part[2:]):
                if (its_epoch, begin) != (epoch, position) and begin < end:
                    breaches.append(f"step {step}: trained {begin} of epoch {its_epoch}, not {position} of {epoch}")
                position += end - begin
            trained[epoch] = position
            if any(position >= length for _, length, _, _ in parts.values()):
                epoch, position = epoch + 1, 0
    if (epoch, position) != (num_epochs, 0):
        breaches.append(f"it ends in epoch {epoch} at {position}, not after epoch {num_epochs - 1}")
    return Ledger(trained, tuple(breaches), undone)


def _whole_step(step: int, first: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> set[tuple[int, int]]:
    """Samples of all ranks together in a step of a generation, as each of its ranks has recorded them."""
    samples = set()
    for event in events:
        if event["event"] != "commit" or event.get("generation") != first["generation"]:
            continue
        of_all = event.get("of_all", ())
        index = step - 1 - event["after_step"]
        if 0 <= index < len(of_all):
            samples.add(tuple(of_all[index]))
    return samples


def _with_lost(
    parts: Mapping[int, tuple[int, ...]], alive: Collection[int], whole: Collection[tuple[int, int]], num_ranks: int
) -> dict[int, tuple[int, ...]]:
    """Parts of a step, with what ranks trained that were lost before they recorded it; {} if that is not the case.

    Without their gradients, none could have made the step. Their parts are what the others' leave of the whole batch.
    """
    if not parts or len(whole) != 1 or min(parts) < 0 or set(alive) - set(parts):
        return {}
    ((begin, end),) = whole
    its_epoch, length, *_ = next(iter(parts.values()))
    ends = [begin, *(stop for *_, stop in sorted(parts.values(), key=lambda part: part[2:]))]
    starts = [*sorted(start for _, _, start, _ in parts.values()), end]
    gaps = [(its_epoch, length, stop, start) for stop, start in zip(ends, starts, strict=True) if stop != start]
    missing = [rank for rank in range(num_ranks) if rank not in parts]
    if len(gaps) > len(missing) or any(stop > start for *_, stop, start in gaps):
        return {}
    gaps += [(its_epoch, length, end, end)] * (len(missing) - len(gaps))  # of neighbours, as one
    return {**parts, **dict(zip(missing, gaps, strict=True))}


def _steps_of(
    first: Mapping[str, Any], last_step: int, events: Sequence[Mapping[str, Any]]
) -> tuple[dict[int, dict[int, tuple[int, ...]]], int]:
    """Samples of a generation by step and rank, up to the last step that counts, and the number that do not count."""
    steps: dict[int, dict[int, tuple[int, ...]]] = {}
    undone = 0
    for event in events:
        if event["event"] != "commit" or event.get("generation") != first["generation"]:
            continue
        for step, (begin, end) in enumerate(event["trained"], event["after_step"] + 1):
            if step > last_step:
                undone += end - begin
            else:
                # Two entries of one rank for a step are a breach.
                parts = steps.setdefault(step, {})
                key = event["rank"]
                if key in parts:
                    key = -1 - len(parts)
                parts[key] = (event["epoch"], event["length"], begin, end)
    return steps, undone
