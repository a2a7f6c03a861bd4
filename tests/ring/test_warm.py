"""A fork of the process that has TensorFlow loaded is what a Python started by itself would be."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import COLD, ROOT, run, warm_python

TIMEOUT_S = 120
SHOWN = """
import os, sys
print(__name__, sys.argv[1:], sys.path[0], os.getcwd(), dict(sorted(os.environ.items())))
print([name for name in ("ringtrain", "horovod", "mpi4py") if name in sys.modules], sys.stdin.read())
print("to stderr", file=sys.stderr)
sys.exit(7)
"""
# Short sleeps: a signal just before a system call does not interrupt it.
PATIENT = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it
print(os.getpid(), flush=True)
for _ in range(5000): time.sleep(0.2)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_arguments_folder_environment_files_and_exit_code_are_the_callers(kind: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    program = {"-c": ["-c", SHOWN], "-m": ["-m", "shown"], "file": [tmp_path / "shown.py"]}[kind]
    command = [sys.executable, *program, "--one", "two words"]
    warm, cold = (run(0, command, TIMEOUT_S, {"ANY": "value"}, cwd=tmp_path, warm=warm) for warm in (True, False))
    assert warm.returncode == cold.returncode == 7, warm.stderr
    assert (warm.stdout, warm.stderr) == (cold.stdout, cold.stderr)


def test_tensorflow_is_loaded_unless_it_shall_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import sys; print('tensorflow' in sys.modules)"]
    assert run(0, command, TIMEOUT_S, warm=True).stdout == "True\n"
    monkeypatch.setenv(COLD, "1")
    assert run(0, command, TIMEOUT_S, warm=True).stdout == "False\n"


@pytest.mark.parametrize("warm", [True, False])
def test_trainers_that_a_program_starts_fork_as_well_and_nothing_else_does(warm: bool, tmp_path: Path) -> None:
    (tmp_path / "loaded.py").write_text("import sys\nprint('tensorflow' in sys.modules)\nsys.exit(7)\n")
    program = f"{sys.executable} -m ringtrain.lab.ranks loaded:any [] out; echo $?; {sys.executable} -m loaded"
    ended = run(0, ["sh", "-c", program], TIMEOUT_S, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, warm=warm)
    assert ended.stdout.split() == [str(warm), "7", "False"], ended.stderr


def test_a_signal_that_ends_the_program_ends_the_caller() -> None:
    for number in (signal.SIGKILL, signal.SIGABRT):
        program = f"import os, sys; sys.stdout.flush(); os.kill(os.getpid(), {number:d})"
        assert run(0, [sys.executable, "-c", program], TIMEOUT_S, warm=True).returncode == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_caller_reaches_the_program(number: signal.Signals) -> None:
    """With SIGKILL the program is killed as well."""
    words = [*warm_python(), "-c", PATIENT]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    # A shell's background jobs ignore SIGINT, and so would the program.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, **streams, env=env, preexec_fn=heeding) as caller:
        assert caller.stdout is not None
        program = psutil.Process(int(caller.stdout.readline()))
        caller.send_signal(number)
        assert caller.wait(TIMEOUT_S) == -number
        program.wait(TIMEOUT_S)
