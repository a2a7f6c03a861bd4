"""The ledger of an elastic run: what all ranks' journals say together, and that nothing false passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_ledger

from ringtrain.monitor import journal

Events = list[dict[str, Any]]


def generation(name: str, after: str, size: int, step: int) -> Events:
    """What all ranks write when they begin to train together, after a step."""
    first = {"event": "resize" if after else "start", "generation": name, "after": after, "to": size}
    return [{**first, "global_step": step, "rank": rank} for rank in range(size)]


def commit(name: str, ranks: list[int], step: int) -> Events:
    return [{"event": "commit", "generation": name, "global_step": step, "rank": rank} for rank in ranks]


def whole_run() -> Events:
    """Of 10 steps. Ranks 1 and 2 of 3 die after step 4, which rank 0 has not noted: it goes back to step 3.

    Two more join after step 6.
    """
    first = [*generation("a", "", 3, 0), *commit("a", [0, 1, 2], 2), *commit("a", [1], 4), *commit("a", [0], 3)]
    second = [*generation("b", "a", 1, 3), *commit("b", [0], 5), *commit("b", [0], 6)]
    third = [*generation("c", "b", 3, 6), *commit("c", [0, 1, 2], 9)]
    return [*first, *second, *third, {"event": "end", "generation": "c", "global_step": 10, "rank": 0}]


def test_a_run_with_changes_is_whole() -> None:
    assert sample_ledger.ledger(whole_run(), 10) == sample_ledger.Ledger(10, (), undone=1)
    assert sample_ledger.ledger(whole_run(), 11).breaches, "a step is missing"
    resumed = [*generation("a", "", 1, 3), {"event": "end", "generation": "a", "global_step": 5, "rank": 0}]
    assert sample_ledger.ledger(resumed, 5).breaches == (), "it counts from the checkpoint"


def drop_a_commit(events: Events) -> None:
    events[:] = [e for e in events if not (e["event"] == "commit" and e["generation"] == "b" and e["global_step"] == 6)]


def commit_of_earlier_steps(events: Events) -> None:
    events.extend(commit("c", [1], 5))


def go_back_less(events: Events) -> None:
    """As if what ranks that are lost have never made had counted."""
    for event in events:
        if event["event"] == "resize" and event["generation"] == "b":
            event["global_step"] = 5


def forget_a_generation(events: Events) -> None:
    events[:] = [e for e in events if not (e["event"] == "resize" and e["generation"] == "b")]


def end_early(events: Events) -> None:
    events[-1]["global_step"] = 9


TAMPERINGS = [drop_a_commit, commit_of_earlier_steps, go_back_less, forget_a_generation, end_early, list.pop]


@pytest.mark.parametrize("tamper", TAMPERINGS)
def test_what_is_false_is_noticed(tamper: Callable[[Events], None]) -> None:
    events = copy.deepcopy(whole_run())
    tamper(events)
    assert sample_ledger.ledger(events, 10).breaches


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        journal.Journal(tmp_path, rank, 2).write("commit", global_step=3, values=[(0, 4)])
    with journal.path_of(tmp_path, 1).open("a") as file:
        file.write('{"time_s": 1, "eve')  # torn
    events = journal.read(tmp_path)
    assert [(e["rank"], e["values"]) for e in events] == [(0, [[0, 4]]), (1, [[0, 4]])]
