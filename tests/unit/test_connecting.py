"""Hosts that close connections or do not answer."""

from __future__ import annotations

import os
import selectors
from pathlib import Path
from typing import Any

import pytest

from ringtrain.cluster import agents, supervisor
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.launch_options import LaunchOptions

DENIED = "Access denied by pam_slurm_adopt: you have no active jobs on this node"
EARLY = "kex_exchange_identification: Connection closed by remote host"
CLOSED = "Connection closed by 10.1.0.2 port 22"
PAM, BUSY = f"{DENIED}\n{CLOSED}", f"{EARLY}\n{CLOSED}"
KEY = "Permission denied (publickey)."


@pytest.mark.parametrize(("answer", "said"), [(PAM, DENIED), (BUSY, EARLY), (KEY, KEY)])
def test_a_host_that_refuses_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, said: str
) -> None:
    """In place of ssh to another machine: a program that answers what sshd does."""
    (tmp_path / "answer").write_text(f"{answer}\n")
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\ncat {tmp_path}/answer >&2; exit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    job = Job(("true",), 1, (Host("far", 1),), {"PATH": os.environ["PATH"]}, here=frozenset(), id="test-of-connecting")
    watch = supervisor.Supervisor(job, LaunchOptions(start_timeout=4))
    with pytest.raises(agents.HostsLost, match="far does not answer") as lost, watch:
        watch.prepare(Plan((), ()))
    assert str(lost.value) == f"far does not answer: {said}"


class Connection:
    """In place of the process of an agent: ends with a code, if it is given one."""

    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


def connect(
    monkeypatch: pytest.MonkeyPatch, num_hosts: int, at_once: int, answer_s: float, ends: dict[str, int]
) -> Any:
    """Agents of hosts that answer after a time, or end with a code; the time is the test's own."""
    now_s = [0.0]
    monkeypatch.setattr(agents.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(agents, "CONNECTING", at_once)
    hosts = [f"host{number}" for number in range(num_hosts)]
    job = Job(("true",), num_hosts, tuple(map(Host, hosts)), here=frozenset(), id="j")
    connecting = agents.HostAgents(job, selectors.DefaultSelector(), answer_timeout_s=20)

    def start(host: str, is_checked: bool) -> agents.HostAgent:
        assert sum(not agent.ready and agent.host not in ends for agent in connecting.members) < at_once
        process: Any = Connection()
        process.returncode = ends.get(host)
        connecting.members.append(agents.HostAgent(host, process, started_s=now_s[0]))
        return connecting.members[-1]

    def poll() -> None:
        now_s[0] += 1
        for agent in connecting.members:
            if agent.host not in ends and now_s[0] >= agent.started_s + answer_s:
                agent.ready = True

    monkeypatch.setattr(connecting, "start", start)
    monkeypatch.setattr(connecting, "drop", lambda agent: connecting.members.remove(agent))
    connecting.connect(hosts, False, poll)
    return connecting


def test_only_hosts_that_do_not_answer_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last hosts answer after 60 s, which is 6 s after they were asked."""
    silent: Any = {"host3": None, "host30": None}
    with pytest.raises(agents.HostsLost) as lost:
        connect(monkeypatch, num_hosts=40, at_once=4, answer_s=6, ends={"host1": -9, "host2": 255, **silent})
    assert lost.value.hosts == ("host1", "host2", "host3", "host30")
    assert str(lost.value) == (
        "host1: its host agent was killed by signal 9, without a message; host2: its host agent exited with code 255,"
        " without a message; host3 does not answer: no answer in 20 s; host30 does not answer: no answer in 20 s"
    )
