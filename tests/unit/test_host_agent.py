"""Host agents' words, as the launcher reads them."""

from __future__ import annotations

import os
import selectors
import subprocess
from pathlib import Path
from typing import Any

import pytest
from planning import TWO_HOSTS

from ringtrain.cluster import host_agent
from ringtrain.cluster.agents import HostAgent
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.supervisor import Supervisor
from ringtrain.protocol import status
from ringtrain.protocol.status import STATUS_FILES

pytestmark = pytest.mark.quick


def supervisor_of_two_hosts() -> Supervisor:
    return Supervisor(TWO_HOSTS, LaunchOptions(launcher="srun"))


def agent_of(host: str, **reported: str) -> HostAgent:
    """An agent without a process."""
    process: Any = None
    return HostAgent(host, process, **reported)  # type: ignore[arg-type]


def output(job: str = "job", before: str = "", **env: str) -> bytes:
    """Output of an agent of this host, which begins and ends; `before`: shell commands of its login shell."""
    words = host_agent.argv("", job, (), Path("/"), os.environ["PATH"], "", timeout_s=5)
    words[2] = before + words[2]
    env = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(words, env=env, input=b"end\n", stdout=subprocess.PIPE, check=True, timeout=60).stdout


def test_a_line_that_comes_in_two_parts_is_read_whole() -> None:
    watch = supervisor_of_two_hosts()
    agents = [agent_of(host) for host in ("host1", "host2")]
    pipes = [os.pipe() for _ in agents]
    for agent, (end, _) in zip(agents, pipes, strict=True):
        watch._selector.register(end, selectors.EVENT_READ, agent)
    for part in (b"ringtrain-agent:netw", b"orks 10.1.0.\xc3", b"\xbc3/16\nringtrain-agent:ready host", b"1 1.0"):
        for _, start in pipes:
            os.write(start, part)
        watch._poll()
    assert [agent.networks for agent in agents] == ["10.1.0.ü3/16"] * 2
    assert not any(agent.ready for agent in agents)
    for _, start in pipes:
        os.close(start)
    watch._poll()
    assert all(agent.ready and agent.closed for agent in agents)
    assert agents[0].lines[-1] == "ringtrain-agent:ready host1 1.0"
    for end, _ in pipes:
        os.close(end)


@pytest.mark.parametrize(
    ("connection", "reached"),
    [
        ("10.1.0.9 51000 10.1.0.3 22", "10.1.0.3"),
        ("fe80::9%eth0 51000 fe80::3%eth0 22", ""),
        ("UNKNOWN 65535 UNKNOWN 65535", ""),
    ],
)
def test_an_agent_reports_its_networks_and_the_address_that_ssh_reaches(connection: str, reached: str) -> None:
    """Also where a login shell prints a line without its end."""
    before = "printf 'Welcome to host2'; ip() { echo '1: eth0 inet 10.1.0.3/16 x'; }\n"
    agent = agent_of("host2")
    supervisor_of_two_hosts().agents.read(agent, output(before=before, SSH_CONNECTION=connection))
    assert (agent.networks, agent.reached) == ("10.1.0.3/16", reached)
    assert agent.ready and agent.cleaned_up


def test_this_host_is_reached_by_the_address_it_sends_from() -> None:
    watch = supervisor_of_two_hosts()
    here = agent_of("", networks="127.0.0.5/32 192.168.0.0/16:bridge")
    there = agent_of("host2", networks="10.1.0.4/24", reached="127.0.0.1")
    watch.agents.members = [here, there]
    assert watch.agents.local_networks() == ("192.168.0.0/16",)
    # The address that the kernel sends from, in a network of another mask on a bridge.
    here.networks, there.reached = f"{host_agent.source_address('10.1.0.4')}/20:bridge", "10.1.0.4"
    assert watch.agents.local_networks() == ()


@pytest.mark.parametrize("counted", ["wc -l", "echo 1; true"])
def test_a_host_agent_reports_processes_that_the_kernel_killed_for_lack_of_memory(counted: str, tmp_path: Path) -> None:
    """By the kernel's count at the end and at the start, here that of a `sed` of the test's own."""
    calls = tmp_path / "calls"
    (tmp_path / "sed").write_text(
        f'#!/bin/sh\ncase "$*" in *oom_kill*) echo >>{calls}; {counted} <{calls} ;; *) exec /bin/sed "$@" ;; esac\n'
    )
    (tmp_path / "sed").chmod(0o755)
    watch = supervisor_of_two_hosts()
    watch.agents.read(agent_of("host2"), output(PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert len(calls.read_text()) == 2
    assert watch.agents.out_of_memory == ({"host2"} if counted == "wc -l" else set())


def test_only_status_lines_of_this_user_are_believed(tmp_path: Path) -> None:
    """Others may write into the same folder: a line end forges no report, and a link leads nowhere."""
    job, other = f"told{os.getpid()}", tmp_path / "other"
    other.write_text("9 save")
    paths = [Path(f"{STATUS_FILES}-{job}-{rank}") for rank in ("0", "1", "2", "3", "x\nringtrain-agent:memory")]
    forged = "5 reduce\nringtrain-agent:memory\n\x1b[2J"
    try:
        for path in paths[:1] + paths[2:]:
            path.write_text(forged)
        paths[1].symlink_to(other)
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(paths[2], 65534, 65534)
        said = output(job)
        watch = supervisor_of_two_hosts()
        watch.agents.read(agent_of("host2"), said)
        believed = {0, 3} if is_root else {0, 2, 3}
        assert {rank: step for rank, (step, _) in watch.agents.status.items()} == dict.fromkeys(believed, 5)
        assert all(phase.startswith("reduce") and phase.isprintable() for _, phase in watch.agents.status.values())
        assert not watch.agents.out_of_memory and b"\x1b" not in said
        assert [path.exists() for path in paths] == [False, True, is_root, False, False]
        paths[3].write_text(forged)
        assert [status.take(job, rank).split(" ")[:2] for rank in (0, 3)] == [[""], ["5", "reduce"]]
        assert status.take(job, 1) == "" and other.exists()
        assert status.take(job, 2) == "" or not is_root
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_a_host_that_was_lost_before_the_end_is_not_lost_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent was killed, and the one that would clean up there at the end does not answer, either."""
    watch = supervisor_of_two_hosts()
    monkeypatch.setattr(host_agent, "argv", lambda *_, **__: ["true"])
    lost, here = watch.agents.start("host2", is_checked=False), watch.agents.start("", is_checked=False)
    lost.ready = here.ready = here.cleaned_up = True
    lost.process.wait()
    watch.agents.drop(lost)
    assert watch.agents.not_cleaned_up == ["host2"]
    watch._process = subprocess.Popen(["true"], stderr=subprocess.PIPE)
    watch._process.wait()
    watch.end()
    assert watch.lost_hosts == []


def test_a_rank_that_starts_after_the_order_to_clean_up_is_killed() -> None:
    """mpirun may start some until it is killed on its own host."""
    job = f"test-of-late-ranks-{os.getpid()}"
    argv = host_agent.argv("", job, (), Path.cwd(), os.environ["PATH"], "", timeout_s=60)
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        while "ready" not in (line := agent.stdout.readline()):
            assert line
        agent.stdin.write("end starting\n")
        agent.stdin.flush()
        late = "sleep 1; RINGTRAIN_JOB=$1 exec sleep 600"
        with subprocess.Popen(["sh", "-c", late, "late", job], start_new_session=True) as rank:
            assert rank.wait(60) == -9
        output, _ = agent.communicate(timeout=60)
    assert output.splitlines()[-1] == "ringtrain-agent:swept"
