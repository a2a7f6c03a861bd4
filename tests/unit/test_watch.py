"""Which ranks wait for each other for ever, decided from where their main threads are."""

from __future__ import annotations

import dataclasses
import sys

from ringtrain.hvd.watch import Row, is_deadlock, place_of

LIMIT_S = 300.0
IN_GRAPH = Row(0, "host1", "in epoch 1, batch 3", "fit.py:9", is_in_graph=True, idle_s=301.0)
IN_BARRIER = Row(1, "host2", "after epoch 1, batch 2", "fit.py:9", "allreduce metrics", idle_s=301.0)


def test_ranks_in_different_places_wait_for_ever():
    assert is_deadlock([IN_GRAPH, IN_BARRIER], 2, LIMIT_S)
    elsewhere = dataclasses.replace(IN_BARRIER, rank=0, collective="allgather sizes")
    assert is_deadlock([elsewhere, IN_BARRIER], 2, LIMIT_S)
    assert str(IN_BARRIER) == "rank 1 on host2: in allreduce metrics at fit.py:9, after epoch 1, batch 2"
    assert str(IN_GRAPH) == "rank 0 on host1: in a TensorFlow graph at fit.py:9, in epoch 1, batch 3"


def test_ranks_that_may_still_come_are_waited_for():
    for other in (
        dataclasses.replace(IN_GRAPH, is_in_graph=False),  # reads, sleeps, waits for a subprocess
        dataclasses.replace(IN_GRAPH, idle_s=299.0),
        dataclasses.replace(IN_BARRIER, rank=0),  # the same collective: a slow network
    ):
        assert not is_deadlock([other, IN_BARRIER], 2, LIMIT_S)
    assert not is_deadlock([IN_BARRIER], 2, LIMIT_S), "a rank that was not heard of"
    graphs = [IN_GRAPH, dataclasses.replace(IN_GRAPH, rank=1)]
    assert not is_deadlock(graphs, 2, LIMIT_S), "a step of minutes"


def test_a_stack_tells_the_users_line():
    place = place_of(sys._getframe())
    assert place == {"line": f"{__file__}:{place['line'].rpartition(':')[2]}", "collective": "", "is_in_graph": False}
