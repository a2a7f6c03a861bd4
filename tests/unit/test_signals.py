"""Which process of a rank gets a signal: that of the program, whatever shells and tools stand in front of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtrain.cluster import host_agent
from ringtrain.protocol.env import FIRST_PROCESS, JOB
from ringtrain.protocol.failures import report_process

pytestmark = pytest.mark.quick

TIMEOUT_S = 60
NAME = "test-of-signals"
CATCHING = "trap 'exit 7' TERM INT; echo begun; while :; do sleep 0.05; done"
PYTHON = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: sys.exit(7))
print("begun", flush=True)
while True:
    time.sleep(0.2)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A host agent of this host; it ends what is left of the job."""
    job = f"{NAME}-{os.getpid()}"
    argv = host_agent.argv("", job, (), tmp_path, os.environ["PATH"], "", timeout_s=TIMEOUT_S)
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        while "ready" not in (line := process.stdout.readline()):
            assert line
        yield process
        process.communicate("end\n", timeout=TIMEOUT_S)


def rank(*words: str | Path) -> subprocess.Popen[str]:
    """A rank's command, when its program has begun."""
    environ = os.environ | {JOB: f"{NAME}-{os.getpid()}"}
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def tell(agent: subprocess.Popen[str], number: int, process: object) -> None:
    assert agent.stdin is not None
    agent.stdin.write(f"signal {number} {process}\n")
    agent.stdin.flush()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_called_by_its_name_is_no_program(agent, tmp_path: Path, number: int) -> None:
    script = tmp_path / "train.sh"
    script.write_text('#!/bin/bash\n"$@"; code=$?; exit $((code + 1))\n')
    script.chmod(0o755)
    with rank(script, sys.executable, "-c", PYTHON) as started:
        tell(agent, number, started.pid)
        assert started.wait(TIMEOUT_S) == 8, "the program's 7, by the script that waited for it"


CHILD_CATCHES = [sys.executable, "-c", "import subprocess, sys; subprocess.call(sys.argv[1:])", "bash", "-c", CATCHING]
SHELL_IGNORES = ["bash", "-c", 'trap "" TERM; (trap - TERM; exec sh -c "echo begun; exec sleep 600"); exit 9']


@pytest.mark.parametrize("words", [CHILD_CATCHES, SHELL_IGNORES])
def test_a_program_that_does_not_catch_it_goes_on(agent, words: list[str]) -> None:
    """It would end at once, upon which launchers end the ranks that save."""
    with rank(*words) as started:
        tell(agent, signal.SIGTERM, f"{started.pid}:{started.pid}")
        assert agent.stdout.readline() == f"{host_agent.SAYS}taken 0\n"
        assert started.poll() is None
        started.kill()


def test_of_a_rank_that_is_gone_nothing_is_said(agent) -> None:
    with rank("echo", "begun") as gone:
        gone.wait(TIMEOUT_S)
    with rank(sys.executable, "-c", PYTHON) as started:
        tell(agent, signal.SIGTERM, f"{gone.pid}:{gone.pid}")
        tell(agent, signal.SIGTERM, f"{started.pid}:{started.pid}")
        assert agent.stdout.readline() == f"{host_agent.SAYS}taken 1\n"
        assert started.wait(TIMEOUT_S) == 7


def test_a_number_that_means_a_process_outside_the_job_is_not_believed(agent) -> None:
    with rank(sys.executable, "-c", PYTHON) as started:
        tell(agent, signal.SIGTERM, f"{os.getpid()}:{started.pid}")
        assert started.wait(TIMEOUT_S) == 7


def test_a_process_reports_itself_once_and_only_below_the_first_one(capfd) -> None:
    of_this = {JOB: "j", FIRST_PROCESS: str(os.getppid())}
    report_process(of_this)
    assert f":process:{os.getppid()}:{os.getpid()}:" in capfd.readouterr().err
    report_process(of_this)  # as a process that this one has started, in whose environment it is
    for other in ("", str(os.getpid()), "4194305"):  # none; this one; none of this namespace's
        report_process({JOB: "j", FIRST_PROCESS: other})
    assert capfd.readouterr().err == ""
