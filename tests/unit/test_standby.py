"""Ranks that stand by: which commands can, which options go with it, and what they wait for."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ringtrain.cluster.host_agent import SCRIPT
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.standby import standing_by
from ringtrain.errors import LaunchError
from ringtrain.protocol import failures, gate
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import ATTEMPT, GATE, JOB, MARK
from ringtrain.protocol.reader import Reader

RESTARTED = LaunchOptions(command=("python", "own.py"), max_restarts=2, standby=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("python", "own.py --epochs 3"),
        ("/opt/venv/bin/python3.11", "-m package.module -m x"),
        ("python -u -W error -X dev", "own.py -u"),
        ("python -uBI -Werror", "own.py"),
    ],
)
def test_what_comes_before_the_script_stays_before_it(before: str, after: str) -> None:
    stands_by = standing_by((*before.split(), *after.split()))
    assert stands_by == (*before.split(), "-m", "ringtrain.standby", *after.split())


OTHERS = (
    *("./own.sh", "bash -c own.py", "python", "python -u", "python - x"),
    *("python -c pass", "python -uc pass x", "python -mpackage x"),
)


@pytest.mark.parametrize("command", OTHERS)
def test_other_commands_are_refused(command: str) -> None:
    with pytest.raises(LaunchError, match=r"expected python and a script, with --standby|from standard input"):
        replace(RESTARTED, command=tuple(command.split())).checked()


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


def orders(job: str, folder: Path, *lines: str) -> tuple[str, str]:
    """Sends orders to a host agent; returns its answer to the first, and all that it says afterwards."""
    words = ["sh", "-c", SCRIPT, "ringtrain-agent", job, str(folder), "", os.environ["PATH"], "", ""]
    agent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    agent.stdin.write("\n".join([*lines, ""]))
    agent.stdin.flush()
    answer = ""
    while "opened" not in answer:
        answer = agent.stdout.readline()
        assert answer, "the agent has ended"
    environ = {GATE: lines[0].split()[1]}
    if "not-" not in answer:
        gate.wait(os.getppid(), environ)
    said, _ = agent.communicate("end\n", timeout=60)
    return answer + environ.get(ATTEMPT, ""), said


def test_the_agent_opens_the_gate_and_removes_it(tmp_path: Path) -> None:
    name, attempt = f"unit-{os.getpid()}", Attempt(number=3, causes=('a "b" \\n $(c)', "ü" * 500)).to_json()
    answer, said = orders(name, tmp_path, gate.order(name, attempt))
    assert answer == f"ringtrain-agent:opened\n{attempt}"
    assert "swept" in said
    assert not Path(gate.FOLDER, name).exists()


@pytest.mark.parametrize("kind", ["folder", "link", "link to nothing"])
def test_a_gate_that_cannot_be_opened_is_reported(tmp_path: Path, kind: str) -> None:
    """Something is in its place; what a link leads to stays as it is."""
    name, target = f"unit-taken-{os.getpid()}", tmp_path / "target"
    place = Path(gate.FOLDER, name)
    if kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(target)
    if kind == "link":
        target.write_text("kept")
    try:
        answer, _ = orders(name, tmp_path, gate.order(name, "{}"))
        assert answer == "ringtrain-agent:not-opened\n"
        assert (target.read_text() if target.exists() else "") == ("kept" if kind == "link" else "")
    finally:
        if kind == "folder":
            place.rmdir()
        else:
            place.unlink(missing_ok=True)


def test_a_rank_does_not_begin_while_the_gate_is_written() -> None:
    path, environ = Path(gate.FOLDER, f"unit-half-{os.getpid()}"), {GATE: f"unit-half-{os.getpid()}"}
    text = base64.b64encode(b'{"number": 1}') + b"\n"
    path.write_bytes(text[:7])
    try:
        waiting = threading.Thread(target=gate.wait, args=(os.getppid(), environ))
        waiting.start()
        waiting.join(10 * gate.LOOK_S)
        assert waiting.is_alive() and ATTEMPT not in environ
        path.write_bytes(text)
        waiting.join(60)
        assert environ[ATTEMPT] == '{"number": 1}'
    finally:
        path.write_bytes(text)
        path.unlink()


def test_a_gate_that_is_a_link_stays_closed(tmp_path: Path) -> None:
    path = Path(gate.FOLDER, f"unit-link-{os.getpid()}")
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
        gate.wait(parent=os.getpid(), environ={GATE: "unit-none"})  # this process is not its own parent


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


def test_of_other_variables_the_launcher_takes_none() -> None:
    """A host may report anything, and what is taken is in the environment of the launcher's own programs."""
    reader = Reader("job")
    given = {"LD_PRELOAD": "/tmp/a.so", "PATH": "/tmp", "TF_A=B": "1", "TF_B": "a\0b", "TF_C": "1"}
    text = base64.b64encode(json.dumps(given).encode()).decode()
    assert reader.take(f"{MARK}:job:variables:{text}:")
    assert reader.variables == {"TF_C": "1"}
