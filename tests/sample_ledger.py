"""Steps that an elastic run has trained, by what all ranks' journals say together.

The rows of a step follow from its number alone, as the global batch is kept: see data/row_order.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """Steps that an elastic run has trained, by all ranks' journals."""

    num_steps: int
    """number of steps trained once"""
    breaches: tuple[str, ...]
    """missing or repeated steps; empty: every step was trained exactly once"""
    undone: int = 0
    """number of complete steps after that from which the next ranks continued"""


def ledger(events: Sequence[Mapping[str, Any]], num_steps: int) -> Ledger:
    """Verifies that each step of the last attempt of a run was trained exactly once.

    A generation is a group of ranks that train together. Each starts at the step from which it continues, made by any
    ranks of the previous generation, whose later steps do not count.
    """
    elastic = [event for event in events if "generation" in event]
    ends = [event for event in elastic if event["event"] == "end"]
    if not ends:
        return Ledger(0, ("no journal has an end",))
    begun = {event["generation"]: event for event in elastic if event["event"] in ("start", "resize")}
    made: dict[str, set[int]] = {}
    for event in elastic:
        if event["event"] in ("commit", "end"):
            made.setdefault(event["generation"], set()).add(event["global_step"])

    # From the last generation back to the first one, each with the last of its steps that counts.
    breaches: list[str] = []
    undone = 0
    last_step, name = ends[-1]["global_step"], ends[-1]["generation"]
    if last_step != num_steps:
        breaches.append(f"it ends after step {last_step}, not {num_steps}")
    while name:
        if name not in begun:
            return Ledger(0, (f"no journal has the start of generation {name}",))
        first_step = begun[name]["global_step"]
        # A step needs all ranks: one that has noted it shows that all have trained their rows.
        reached = {first_step} | made.get(name, set())
        if last_step not in reached or min(reached) < first_step:
            breaches.append(f"generation {name} has made steps {sorted(reached)}, and {last_step} counts")
        undone += max(reached) - last_step
        last_step, name = first_step, begun[name]["after"]
    return Ledger(num_steps, tuple(breaches), undone)
