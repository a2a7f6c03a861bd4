"""Starts programs, and writes the files that a plan asks for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import Plan
from ringtrain.errors import LaunchError
from ringtrain.protocol.env import OWN_RANK, STARTER

PR_SET_PDEATHSIG = 1  # of Linux' prctl


def call(
    argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] = os.environ, only_good: bool = False
) -> str:
    """Runs a short command.

    Args:
        argv: the command, looked for on the environment's PATH.
        timeout_s: after which it is given up.
        only_good: what it writes to standard error is left where it is, and ending with another code than 0 is an
            error.

    Returns:
        What it wrote, errors as well.

    Raises:
        LaunchError: it is not there, or does not end.
    """
    program = find(argv[0], environ)
    try:
        ended = subprocess.run(
            [program, *argv[1:]],
            env=dict(environ),
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
    if only_good and ended.returncode:
        raise LaunchError(f"{shlex.join(argv)}: ended with {ended.returncode}")
    return ended.stdout


def find(program: str, environ: Mapping[str, str] = os.environ) -> str:
    """The path of a program.

    Raises:
        LaunchError: it is not installed here.
    """
    found = shutil.which(program, path=environ.get("PATH", ""))
    if not found:
        raise LaunchError(
            f"no {program} on PATH: activate the environment (source .venv/bin/activate), load the MPI's module, or"
            f" choose another --launcher"
        )
    return found


def start_beside(argv: Sequence[str], environ: Mapping[str, str], log: Path, held: int) -> subprocess.Popen[bytes]:
    """Starts a command that runs beside this process, and is sent SIGTERM when this process ends, however it ends.

    Args:
        log: file that gets what it writes, at its end.
        held: a file descriptor that it keeps open as long as it lives: a lock is free when it is gone.
    """
    libc, this = ctypes.CDLL(None), os.getpid()

    def bind() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != this:  # it had ended before
            os._exit(1)

    with open(log, "ab") as file:
        # In a process group of its own: the terminal's Ctrl-C is for this process alone.
        return subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=(held,),
            preexec_fn=bind,
        )


def submit(plan: Plan, own_folder: str, environ: Mapping[str, str] = os.environ) -> int:
    """Writes a plan's files and runs its command, which hands the job to a scheduler and returns.

    Args:
        plan: of a launcher that copies what it needs.
        own_folder: for files that are to go again; it is made if it is missing.

    Returns:
        The command's exit code.
    """
    program = find(plan.argv[0], environ)
    with written_files(plan, own_folder):
        return subprocess.run([program, *plan.argv[1:]], env={**environ, **plan.env}, check=False).returncode


def write_files(plan: Plan, own_folder: str) -> list[Path]:
    """Writes the files that a plan's command reads.

    Args:
        own_folder: for those that are to go again; it is made if it is missing.

    Returns:
        The files in own_folder.

    Raises:
        LaunchError: one cannot be written, or others could change it: own_folder must be this user's alone.
    """
    own = []
    for path, text in ((Path(name), text) for name, text in plan.files.items()):
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.parent == Path(own_folder):
                seen = os.lstat(own_folder)
                if seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
                    raise LaunchError(f"{own_folder}: others may write there: remove it, or set XDG_RUNTIME_DIR")
                own.append(path)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"{path}: cannot be written: {error.strerror}") from error
    return own


@contextlib.contextmanager
def written_files(plan: Plan, own_folder: str) -> Iterator[None]:
    """Writes the files that a plan's command reads, and removes those in own_folder afterwards; see write_files."""
    own = write_files(plan, own_folder)
    try:
        yield
    finally:
        for path in own:
            path.unlink(missing_ok=True)


def starter(hosts: Sequence[Host]) -> str:
    """What starts a rank's command: a shell's words, which show a rank the GPUs of its host's slots, and no others.

    Args:
        hosts: in the order of ranks. Those whose slots are not their first ones name them by indices.
    """
    cases, first = [], 0
    for host in hosts:
        if host.indices:
            ranks = "|".join(str(rank) for rank in range(first, first + host.slots))
            # Of those that the host's environment shows, if it does.
            shown = f"${{CUDA_VISIBLE_DEVICES-{','.join(map(str, range(max(host.indices) + 1)))}}}"
            places = ",".join(str(index + 1) for index in host.indices)
            cases.append(f'{ranks}) export CUDA_VISIBLE_DEVICES="$(echo "{shown}" | cut -d, -f{places})" ;;')
        first += host.slots
    return f'case "{OWN_RANK}" in {" ".join(cases)} esac; {STARTER}' if cases else STARTER


def say(text: str) -> None:
    """One of the launcher's own lines."""
    write(f"ringtrain: {text}\n".encode())


def write(data: bytes) -> None:
    """Writes to standard error, whose terminal may be closed by now."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        while data:
            data = data[os.write(2, data) :]
