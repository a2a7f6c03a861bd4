"""Which ranks wait for each other for ever, decided from where their main threads are."""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
import time

import keras
import pytest
import tensorflow as tf

from ringtrain.hvd import stall_watch
from ringtrain.hvd.stall_watch import JOIN, REDUCTION, Row, Watch, is_deadlock, is_standstill, place_of
from ringtrain.hvd.step_timing import PhaseTracker

LIMIT_S = 300.0
IN_GRAPH = Row(0, "host1", "in epoch 1, batch 3", "fit.py:9", is_in_graph=True, idle_s=301.0)
IN_REDUCTION = dataclasses.replace(IN_GRAPH, collective=REDUCTION, num_ranks=2)
IN_BARRIER = Row(1, "host2", "after epoch 1, batch 2", "fit.py:9", "allreduce metrics", 2, idle_s=301.0)


def test_ranks_in_different_collectives_wait_for_ever():
    elsewhere = dataclasses.replace(IN_BARRIER, rank=0, collective="allgather sizes")
    for other in (IN_REDUCTION, elsewhere):
        assert is_standstill([other, IN_BARRIER], 2, LIMIT_S) and is_deadlock([other, IN_BARRIER])
    assert str(IN_BARRIER) == "rank 1 on host2: in allreduce metrics at fit.py:9, after epoch 1, batch 2"
    assert str(IN_GRAPH) == "rank 0 on host1: in a TensorFlow graph at fit.py:9, in epoch 1, batch 3"
    assert str(IN_REDUCTION).startswith("rank 0 on host1: in the reduction of gradients at fit.py:9")


def test_ranks_that_may_still_come_are_waited_for():
    for other in (
        dataclasses.replace(IN_GRAPH, is_in_graph=False),  # reads, sleeps, waits for a subprocess
        dataclasses.replace(IN_REDUCTION, idle_s=299.0),
        dataclasses.replace(IN_BARRIER, rank=0),  # the same collective: a slow network
    ):
        assert not is_standstill([other, IN_BARRIER], 2, LIMIT_S)
    assert not is_standstill([IN_BARRIER], 2, LIMIT_S), "a rank that was not heard of"
    graphs = [IN_GRAPH, dataclasses.replace(IN_GRAPH, rank=1)]
    assert not is_standstill(graphs, 2, LIMIT_S), "a step of minutes"
    for other in (IN_GRAPH, dataclasses.replace(IN_REDUCTION, collective=JOIN)):
        assert is_standstill([other, IN_BARRIER], 2, LIMIT_S) and not is_deadlock([other, IN_BARRIER])
    pair = [IN_REDUCTION, dataclasses.replace(IN_REDUCTION, rank=2)]
    assert not is_deadlock([IN_BARRIER, *pair]), "two ranks of a set, which are all in one reduction"


def test_a_reduction_is_noted_while_its_graph_waits_in_it():
    place, seen = PhaseTracker(), []

    def wait(gradient):
        deadline_s = time.monotonic() + 60
        while not place.awaited() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        seen.append(place.awaited())
        return gradient

    @tf.function(autograph=False)
    def step(gradient):
        return place.reducing(3, [gradient], lambda: [tf.py_function(wait, [gradient], tf.float32)])

    assert place.awaited() == 0
    step(tf.ones(2))
    assert seen == [3] and place.awaited() == 0


def test_a_stopped_watch_ends_its_thread_and_closes_its_port(monkeypatch):
    monkeypatch.setattr(stall_watch.horovod, "rank", lambda: 0)
    monkeypatch.setattr(stall_watch.horovod, "size", lambda: 2)
    monkeypatch.setattr(stall_watch.collectives, "broadcast_object", lambda value, root_rank, name: value)
    watch = Watch()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "ringtrain-watch")
    address = ("127.0.0.1", watch._wire.port)
    socket.create_connection(address).close()
    watch.stop()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_a_stack_tells_the_users_line():
    place = place_of(sys._getframe())
    assert place == {
        "line": f"{__file__}:{place['line'].rpartition(':')[2]}",
        "collective": "",
        "num_ranks": 0,
        "is_in_graph": False,
    }


def test_a_reset_tracker_is_like_new():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    place = PhaseTracker()
    place.watch(model, each_gradient=True)
    place.enter("save")
    place.waited_s, place.on_change = 3.0, lambda: None
    model.fit(tf.ones((2, 2)), tf.ones((2, 1)), verbose=0)
    assert place.moments()[0] and place.gradients
    place.reset()
    new = PhaseTracker()
    assert (place.phase, place.changes, place.waited_s) == (new.phase, new.changes, new.waited_s)
    assert (place.moments(), place.each(), place.gradients) == ((0.0, 0.0, 0.0), ([], []), [])
    assert place.awaited() == 0
