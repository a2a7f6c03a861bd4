"""Ranks that stand by: which commands can, which options go with it, and what they wait for."""

from __future__ import annotations

import base64
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ringtrain.cluster.host_agent import SCRIPT
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.standby import standing_by
from ringtrain.errors import LaunchError
from ringtrain.protocol import failures, gate
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import ATTEMPT, JOB
from ringtrain.protocol.reader import Reader

RESTARTED = LaunchOptions(command=("python", "own.py"), max_restarts=2, standby=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("python", "own.py --epochs 3"),
        ("/opt/venv/bin/python3.11", "-m package.module -m x"),
        ("python -u -W error -X dev", "own.py -u"),
    ],
)
def test_what_comes_before_the_script_stays_before_it(before: str, after: str) -> None:
    stands_by = standing_by((*before.split(), *after.split()))
    assert stands_by == (*before.split(), "-m", "ringtrain.standby", *after.split())


@pytest.mark.parametrize(
    "command", ["./own.sh", "bash -c own.py", "python", "python -u", "python -c pass", "python - x"]
)
def test_other_commands_are_refused(command: str) -> None:
    with pytest.raises(LaunchError, match=r"expected python and a script, with --standby"):
        standing_by(tuple(command.split()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_restarts": 0}, "expected --max-restarts N"),
        ({"elastic": True}, "with --elastic"),
        ({"launcher": "srun"}, "--launcher srun"),
        ({"output": "logs"}, "with --output"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(change: dict, message: str) -> None:
    assert RESTARTED.checked() == RESTARTED
    with pytest.raises(LaunchError, match=message):
        replace(RESTARTED, **change).checked()


def opened_by_an_agent(job: str, attempt: str, folder: Path) -> str:
    """Sends the launcher's orders to a host agent; returns what it says."""
    words = ["sh", "-c", SCRIPT, "ringtrain-agent", job, str(folder), "", os.environ["PATH"], "", ""]
    orders = f"{gate.order(attempt)}\n"
    agent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        agent.stdin.write(orders)
        agent.stdin.flush()
        environ = {JOB: job}
        gate.wait(os.getppid(), environ)
        assert environ[ATTEMPT] == attempt
    finally:
        said, _ = agent.communicate("end\n", timeout=60)
    return said


def test_the_agent_opens_the_gate_and_removes_it(tmp_path: Path) -> None:
    job, attempt = f"unit-{os.getpid()}", Attempt(number=3, causes=('a "b" \\n $(c)', "ü" * 500)).to_json()
    path = Path(f"{gate.GATE}-{job}")
    assert "swept" in opened_by_an_agent(job, attempt, tmp_path)
    assert not path.exists()


def test_a_gate_that_is_a_link_stays_closed(tmp_path: Path) -> None:
    """Another user of the host could make it, and name any file."""
    path = Path(f"{gate.GATE}-unit-link-{os.getpid()}")
    target = tmp_path / "attempt"
    target.write_bytes(base64.b64encode(b"{}"))
    path.symlink_to(target)
    try:
        assert gate._read(str(path)) == b""
        assert gate._read(str(target)) != b"", "the file itself would be read"
    finally:
        path.unlink()


def test_a_rank_whose_launcher_has_exited_does_not_wait() -> None:
    with pytest.raises(SystemExit):
        gate.wait(parent=os.getpid(), environ={JOB: "unit-none"})  # this process is not its own parent


def test_what_a_script_sets_before_tensorflow_is_loaded_reaches_the_launcher(capfd, tmp_path: Path) -> None:
    start = tmp_path / "environ"
    start.write_bytes(b"TF_GIVEN=1\0TF_CHANGED=1\0PATH=/bin\0")
    environ = {"TF_GIVEN": "1", "TF_CHANGED": "2", "KERAS_HOME": "/k:l", "PATH": "/usr/bin", "TF_CONFIG": "{}"}
    expected = {"TF_CHANGED": "2", "KERAS_HOME": "/k:l"}
    assert failures.changed_variables(environ, start) == expected
    failures.report_init(0, {**environ, JOB: "job"})
    lines = capfd.readouterr().err.splitlines()
    reader = Reader("job")
    assert [line for line in lines if not reader.take(line)] == []
    assert reader.initialized
    assert expected.items() <= reader.variables.items()
    kinds = [line.split(":")[2] for line in lines]
    assert kinds == ["variables", "variables", "init"], "before that of hvd.init(), at which ranks may be started"
