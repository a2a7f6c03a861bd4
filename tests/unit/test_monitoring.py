"""Which ranks wait for each other for ever, decided from where their main threads are."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
import threading
import time
import types

import keras
import pytest
import tensorflow as tf

from ringtrain.hvd import monitoring
from ringtrain.hvd.monitoring import REDUCTION, place_of
from ringtrain.hvd.process import PROCESS
from ringtrain.hvd.step_timing import PhaseTracker
from ringtrain.monitor.diagnosis import JOIN, Row, ScriptStalls, is_deadlock, is_standstill, position

LIMIT_S = 300.0
IN_GRAPH = Row(0, "host1", after="in epoch 1, batch 3", line="fit.py:9", is_in_graph=True, idle_s=301.0)
IN_REDUCTION = dataclasses.replace(IN_GRAPH, collective=REDUCTION, num_ranks=2)
IN_BARRIER = Row(1, "host2", after="after epoch 1, batch 2", line="fit.py:9", idle_s=301.0)
IN_BARRIER = dataclasses.replace(IN_BARRIER, collective="allreduce metrics", num_ranks=2)


def test_ranks_in_different_collectives_wait_for_ever():
    elsewhere = dataclasses.replace(IN_BARRIER, rank=0, collective="allgather sizes")
    for other in (IN_REDUCTION, elsewhere):
        assert is_standstill([other, IN_BARRIER], 2, LIMIT_S) and is_deadlock([other, IN_BARRIER])
    assert position(IN_BARRIER) == "rank 1 on host2: in allreduce metrics at fit.py:9, after epoch 1, batch 2"
    assert position(IN_GRAPH) == "rank 0 on host1: in a TensorFlow graph at fit.py:9, in epoch 1, batch 3"
    assert position(IN_REDUCTION).startswith("rank 0 on host1: in the reduction of gradients at fit.py:9")


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


def test_a_script_ends_when_it_waits_forever_and_is_warned_about_a_graph_once():
    rows = [IN_REDUCTION, IN_BARRIER]
    stalls = ScriptStalls(LIMIT_S, 2)
    finding = stalls.look(rows, 0.0)
    assert finding.stall.startswith("ranks have waited for different things for 301 s\n  rank 0 on host1: ")
    assert finding.blocking == rows[:1] and not finding.warning
    assert not stalls.look([IN_REDUCTION, dataclasses.replace(IN_BARRIER, silent_s=9.0)], 0.0).stall
    finding = stalls.look([IN_GRAPH, IN_BARRIER], 0.0)
    assert "rank 0 on host1: in a TensorFlow graph" in finding.warning and not finding.stall
    assert stalls.has_warned and not stalls.look([IN_GRAPH, IN_BARRIER], 1.0).warning


def test_the_monitor_of_a_run_replaces_that_of_a_script(monkeypatch):
    stopped = []
    script = types.SimpleNamespace(stop=lambda: stopped.append(True), activity=None)
    monkeypatch.setattr(PROCESS, "monitor", script)
    run = contextlib.nullcontext()
    with monitoring.replaced_by(run):
        assert stopped and PROCESS.monitor is run
    assert PROCESS.monitor is None


def test_a_stopped_monitor_ends_its_thread_and_closes_its_port(monkeypatch):
    monkeypatch.setattr(monitoring.horovod, "rank", lambda: 0)
    monkeypatch.setattr(monitoring.horovod, "size", lambda: 2)
    monkeypatch.setattr(monitoring.collectives, "broadcast_object", lambda value, root_rank, name: value)
    monkeypatch.setattr(monitoring.collectives, "elastic", lambda: False)
    monkeypatch.setattr(PROCESS, "monitor", None)
    activity = monitoring.begin()
    assert monitoring.begin() is activity
    monitor = PROCESS.monitor
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "ringtrain-heartbeat")
    address = ("127.0.0.1", monitor._transport.port)
    socket.create_connection(address).close()
    monitor.stop()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


@pytest.mark.parametrize(("text", "expected"), [("-1", 0.0), ("nan", 0.0), ("0", 0.0), ("2.5", 2.5)])
def test_a_time_limit_below_zero_means_never(monkeypatch, text, expected):
    monkeypatch.setenv("RINGTRAIN_STALL_TIMEOUT", text)
    assert monitoring._timeout_s() == expected


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
    place.watch(model)
    place.enter("save")
    place.waited_s, place.on_change = 3.0, lambda: None
    model.fit(tf.ones((2, 2)), tf.ones((2, 1)), verbose=0)
    assert place.moments()[0]
    place.reset()
    new = PhaseTracker()
    assert (place.phase, place.changes, place.waited_s) == (new.phase, new.changes, new.waited_s)
    assert place.moments() == (0.0, 0.0, 0.0)
    assert place.awaited() == 0
