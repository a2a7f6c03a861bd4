"""Hosts that close connections: which of them are asked again, and how often."""

from __future__ import annotations

import os
from pathlib import Path

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


@pytest.mark.parametrize(
    ("answers", "tries", "said"),
    [
        ((PAM,), 1, DENIED),
        ((BUSY, KEY), 2, KEY),
        ((BUSY,), 5, EARLY),
        ((CLOSED,), 5, CLOSED),
        ((KEY,), 1, KEY),
    ],
)
def test_a_host_that_refuses_for_good_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...], tries: int, said: str
) -> None:
    """In place of ssh to another machine: a program that answers what sshd does, the last answer again and again."""
    for number, answer in enumerate(answers, start=1):
        (tmp_path / f"answer-{number}").write_text(f"{answer}\n")
    ssh = tmp_path / "ssh"
    ssh.write_text(f"""#!/bin/sh
cd {tmp_path}; echo >>tries; number=$(wc -l <tries)
[ $number -le {len(answers)} ] || number={len(answers)}
cat answer-$number >&2; exit 255
""")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(agents, "AGAIN_S", 0.01)
    job = Job(("true",), 1, (Host("far", 1),), {"PATH": os.environ["PATH"]}, here=frozenset(), id="test-of-connecting")
    watch = supervisor.Supervisor(job, LaunchOptions(start_timeout=4))
    with pytest.raises(agents.HostsLost, match="far does not answer") as lost, watch:
        watch.prepare(Plan((), ()))
    assert str(lost.value) == f"far does not answer: {said}"
    assert (tmp_path / "tries").read_text().count("\n") == tries
