"""The ledger of an elastic run: what all ranks' journals say together, and that nothing false passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_ledger

from ringtrain.data import part_of
from ringtrain.monitor import journal

LENGTH, BATCH = 40, 8

Events = list[dict[str, Any]]


def generation(name: str, after: str, size: int, step: int, position: int, epoch: int = 0) -> Events:
    """What all ranks write when they begin to train together, after a step."""
    event = "resize" if after else "start"
    first = {"event": event, "generation": name, "after": after, "to": size, "global_step": step}
    return [{**first, "epoch": epoch, "position": position, "rank": rank} for rank in range(size)]


def commit(name: str, size: int, after_step: int, step: int, position: int, epoch: int = 0) -> Events:
    """What they write of the steps up to one, which begin at a position."""
    trained: list[list[list[int]]] = [[] for _ in range(size)]
    for begin in range(position, position + (step - after_step) * BATCH, BATCH):
        for rank, parts in enumerate(trained):
            first, last = part_of(min(BATCH, LENGTH - begin), rank, size)
            parts.append([begin + first, begin + last])
    about = {"event": "commit", "generation": name, "epoch": epoch, "length": LENGTH}
    return [
        {**about, "after_step": after_step, "global_step": step, "rank": rank, "trained": parts}
        for rank, parts in enumerate(trained)
    ]


def whole_run() -> Events:
    """Two epochs of 5 steps. Rank 2 of 3 dies in step 5 after the commit of step 4 was written by 2 of 3 ranks: the
    others go back to step 2, and are joined by two more after step 6.
    """
    half_written = commit("a", 3, 2, 4, 16)[:2]
    first = [*generation("a", "", 3, 0, 0), *commit("a", 3, 0, 2, 0), *half_written]
    second = [*generation("b", "a", 2, 2, 16), *commit("b", 2, 2, 5, 16), *commit("b", 2, 5, 6, 0, epoch=1)]
    third = [*generation("c", "b", 4, 6, 8, epoch=1), *commit("c", 4, 6, 10, 8, epoch=1)]
    return [*first, *second, *third, {"event": "end", "generation": "c", "global_step": 10, "rank": 0}]


def test_a_run_with_changes_is_whole() -> None:
    found = sample_ledger.ledger(whole_run(), 2)
    assert found.breaches == ()
    assert found.epochs == {0: LENGTH, 1: LENGTH}
    assert found.undone == 2 * (3 + 3)  # two ranks wrote of two steps that were undone


def test_a_commit_counts_up_to_the_step_that_was_gone_back_to() -> None:
    """Also in the middle of what a rank wrote at once, as from a checkpoint between two commits."""
    events = [*generation("a", "", 1, 0, 0), *commit("a", 1, 0, 4, 0), *generation("b", "a", 1, 3, 24)]
    events += [*commit("b", 1, 3, 5, 24), {"event": "end", "generation": "b", "global_step": 5}]
    found = sample_ledger.ledger(events, 1)
    assert (found.breaches, found.undone) == ((), BATCH)


def lost_before_it_recorded() -> Events:
    """Rank 2 of 3 dies after step 3, of which it has recorded 2: the others go on from there."""
    whole = [{**event, "of_all": []} for event in commit("a", 3, 2, 3, 16)[:2]]
    for event in whole:
        event["of_all"] = [[16, 24]]
    first = [*generation("a", "", 3, 0, 0), *commit("a", 3, 0, 2, 0), *whole]
    second = [*generation("b", "a", 2, 3, 24), *commit("b", 2, 3, 5, 24)]
    return [*first, *second, {"event": "end", "generation": "b", "global_step": 5, "rank": 0}]


def test_a_step_that_a_lost_rank_could_not_record_counts() -> None:
    found = sample_ledger.ledger(lost_before_it_recorded(), 1)
    assert (found.breaches, found.undone, found.epochs) == ((), 0, {0: LENGTH})


def test_a_rank_that_was_not_lost_must_record() -> None:
    """Rank 2 has a later step; in the last generation, nobody is lost; nobody has recorded the step."""
    later = [*lost_before_it_recorded(), *commit("a", 3, 3, 4, 24)[2:]]
    for event in later:
        if event.get("generation") == "b" and event["event"] == "resize":
            event |= {"global_step": 4, "position": 32}
    assert sample_ledger.ledger(later, 1).breaches
    last = [event for event in lost_before_it_recorded() if event.get("generation") != "b"]
    last.append({"event": "end", "generation": "a", "global_step": 3, "rank": 0})
    assert any("2 of 3 ranks" in breach for breach in sample_ledger.ledger(last, 1).breaches)
    nobody = [event for event in lost_before_it_recorded() if "of_all" not in event]
    assert sample_ledger.ledger(nobody, 1).breaches


def _survivors(events: Events) -> Events:
    """What survivors have recorded of step 3."""
    return [event for event in events if "of_all" in event]


def same_part_twice(events: Events) -> None:
    first, second = _survivors(events)
    second["trained"] = first["trained"]


def samples_of_another_step(events: Events) -> None:
    for event in _survivors(events):
        event["trained"] = [[begin + 100, end + 100] for begin, end in event["trained"]]


def one_rank_twice(events: Events) -> None:
    first, second = _survivors(events)
    second["rank"] = first["rank"]


def another_whole(events: Events) -> None:
    _survivors(events)[0]["of_all"] = [[0, 1000]]


def part_of_a_survivor_missing(events: Events) -> None:
    """The first and the last part, by nobody, of which only one rank was lost."""
    _, second = _survivors(events)
    second["trained"] = [[begin + 1, end] for begin, end in second["trained"]]


@pytest.mark.parametrize(
    "tamper",
    [same_part_twice, samples_of_another_step, one_rank_twice, another_whole, part_of_a_survivor_missing],
)
def test_what_is_false_of_a_lost_rank_is_noticed(tamper: Callable[[Events], None]) -> None:
    events = lost_before_it_recorded()
    tamper(events)
    assert sample_ledger.ledger(events, 1).breaches


def drop_a_commit(events: Events) -> None:
    events.remove(next(e for e in events if e["event"] == "commit" and e["generation"] == "b" and e["rank"] == 1))


def double_a_commit(events: Events) -> None:
    events.append(next(e for e in events if e["event"] == "commit" and e["generation"] == "c"))


def shift_a_part(events: Events) -> None:
    part = next(e for e in events if e["event"] == "commit" and e["generation"] == "c")["trained"][0]
    part[0] += 1


def swap_samples_of_steps(events: Events) -> None:
    trained = next(e for e in events if e["event"] == "commit" and e["generation"] == "c")["trained"]
    trained[0], trained[1] = trained[1], trained[0]


def go_back_less(events: Events) -> None:
    """As if what rank 2 never finished had counted."""
    for event in events:
        if event["event"] == "resize" and event["generation"] == "b":
            event |= {"global_step": 4, "position": 32}


def go_back_further(events: Events) -> None:
    for event in events:
        if event["event"] == "resize" and event["generation"] == "c":
            event |= {"global_step": 5, "position": 0}


def forget_a_generation(events: Events) -> None:
    events[:] = [e for e in events if not (e["event"] == "resize" and e["generation"] == "b")]


def end_early(events: Events) -> None:
    events[-1]["global_step"] = 9


def never_end(events: Events) -> None:
    events.pop()


TAMPERINGS = [
    drop_a_commit,
    double_a_commit,
    shift_a_part,
    swap_samples_of_steps,
    go_back_less,
    go_back_further,
    forget_a_generation,
    end_early,
    never_end,
]


@pytest.mark.parametrize("tamper", TAMPERINGS)
def test_what_is_false_is_noticed(tamper: Callable[[Events], None]) -> None:
    events = copy.deepcopy(whole_run())
    tamper(events)
    assert sample_ledger.ledger(events, 2).breaches


def test_an_epoch_that_is_missing_is_noticed() -> None:
    assert sample_ledger.ledger(whole_run(), 3).breaches


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        journal.Journal(tmp_path, rank, 2).write("commit", global_step=3, trained=[(0, 4)])
    with journal.path_of(tmp_path, 1).open("a") as file:
        file.write('{"time_s": 1, "eve')  # torn
    events = journal.read(tmp_path)
    assert [(e["rank"], e["trained"]) for e in events] == [(0, [[0, 4]]), (1, [[0, 4]])]
