"""Starts programs under the real launcher, with a hard limit in time, and leaves nothing behind."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
WARM = Path(__file__).parent / "support" / "warm.py"
COLD = "RINGTRAIN_TEST_COLD"
"""variable: if set, every rank imports its libraries itself, which takes longer"""
MARK = "RINGTRAIN_TEST"
"""variable that all processes of a test inherit, by whose value they are found"""
MPIRUN = [
    *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
    *("--tag-output", "--bind-to", "none", "--map-by", "slot", "--mca", "pml", "ob1", "--mca", "btl", "^openib"),
]


def run(
    np: int,
    argv: Sequence[str | Path],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    launcher: str = "mpirun",
    cwd: Path = ROOT,
    warm: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a program on np ranks of this host and waits for it.

    Args:
        np: number of ranks; 0 starts the program itself, without a launcher.
        argv: the program and its arguments, e.g. [sys.executable, "-m", "ringtrain.train"].
        timeout_s: after this many seconds everything the launch started is killed and the test fails.
        env: added to (and winning over) this process' environment.
        launcher: "mpirun", told what horovodrun tells it (which takes seconds to find that out); "mpi" or "gloo" for
            horovodrun itself.
        cwd: folder to start in.
        warm: sys.executable at the beginning, or behind --, is a fork that has its libraries loaded; where something
            else stands there, the trainers that it starts are. For tests of anything but the start itself.

    Returns:
        The finished process, with stdout and stderr as text and whatever return code it had.

    Raises:
        TimeoutError: with the output so far.
    """
    flags: dict[str, list[str | Path]] = {
        "mpirun": [BIN / "mpirun", *MPIRUN],
        "mpi": [BIN / "horovodrun"],
        "gloo": [BIN / "horovodrun", "--gloo"],
    }
    start = [*flags[launcher], "-np", np, "-H", f"localhost:{np}"]
    words = list(argv)
    full_env = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "OMPI_MCA_mpi_yield_when_idle": "1",
        **(env or {}),
    }
    if warm and not os.environ.get(COLD):
        at = words.index("--") + 1 if "--" in words else 0
        if words[at] == sys.executable:
            words[at : at + 1] = warm_python()
        else:
            full_env |= warm_env(full_env["PYTHONPATH"])
    command = [str(word) for word in [*(start if np else []), *words]]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=full_env,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException as failure:
            _end_family(process.pid)
            stdout, stderr = process.communicate()
            if isinstance(failure, subprocess.TimeoutExpired):
                raise TimeoutError(
                    f"{' '.join(command)}: still running after {timeout_s} s, killed\n{stdout}\n{stderr}"
                ) from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@functools.cache
def warm_python() -> list[str | Path]:
    """What stands for sys.executable on a command line whose processes fork from a server, which this starts."""
    folder = tempfile.mkdtemp(prefix="ringtrain-warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    socket = f"{folder}/socket"
    server = subprocess.Popen(
        [sys.executable, WARM, "serve", socket],
        stdin=subprocess.PIPE,  # ends the server when this process ends
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"{WARM} serve {socket} has ended with {server.wait()}")
    return [sys.executable, "-I", "-S", WARM, socket]


def warm_env(path: str = str(ROOT)) -> dict[str, str]:
    """Variables, with a PYTHONPATH, by which trainers and ranks of benches that a program starts fork as well."""
    *_, socket = map(str, warm_python())
    return {"RINGTRAIN_TEST_WARM": socket, "PYTHONPATH": os.pathsep.join([str(WARM.with_name("warm_start")), path])}


def marked(mark: str) -> dict[int, str]:
    """Running processes whose MARK has this value: id and command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def end_marked(mark: str) -> None:
    """Kills all processes whose MARK has this value, and those that they start meanwhile."""
    while found := marked(mark):
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _end_family(process: int) -> None:
    """Kills a process we started and all its descendants, whatever sessions and groups launchers gave them."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
    family = [process]
    for member in family:  # grows while it is walked
        family += [child for child, parent in parents.items() if parent == member]
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
