"""Slots as hosts of their own: what Horovod's driver sees of a host, and what the host's ranks are told."""

from __future__ import annotations

from dataclasses import dataclass

from ringtrain.cluster import elastic


@dataclass
class SlotInfo:
    """Horovod's."""

    hostname: str
    rank: int
    local_rank: int = 0
    cross_rank: int = 0
    size: int = 0
    local_size: int = 1
    cross_size: int = 1


def test_ranks_are_told_their_real_places_without_gaps() -> None:
    assert elastic.split({"a": 2, "b": 1}) == {"a~0": 1, "a~1": 1, "b~0": 1}
    slots = [SlotInfo(name, rank) for rank, name in enumerate(["a~2", "a~3", "b~0", "a~0"])]
    placed = elastic.placement(slots)
    found = {name: (info.hostname, info.local_rank, info.local_size) for (name, _), info in placed.items()}
    assert found == {"a~0": ("a", 0, 3), "a~2": ("a", 1, 3), "a~3": ("a", 2, 3), "b~0": ("b", 0, 1)}
    assert [(info.rank, info.cross_rank, info.cross_size) for info in placed.values()] == [
        (3, 0, 2),
        (0, 0, 1),
        (1, 0, 1),
        (2, 1, 2),
    ]


def test_the_placement_of_real_hosts_stays() -> None:
    slots = [SlotInfo("a", 0, 0, 0, 3, 2, 2), SlotInfo("a", 1, 1, 0, 3, 2, 1), SlotInfo("b", 2, 0, 1, 3, 1, 2)]
    assert list(elastic.placement(slots).values()) == slots


def test_ranks_of_a_host_stay_together_and_the_first_first() -> None:
    assert elastic.together(["a~1", "b~0", "a~2", "b~1", "a~0"]) == ["a~1", "a~2", "a~0", "b~0", "b~1"]
