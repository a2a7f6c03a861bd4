"""Spark task that runs one rank on an executor for the driver. Sent there as a whole: standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import os
import pickle
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

PR_SET_PDEATHSIG = 1
SIOCGIFADDR = 0x8915  # ioctl: IPv4 address of an interface
PIPE_S = 2.0  # for processes that a rank left behind to close its output
PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
NOT_STARTED = 127
STATUS_LENGTH = 80
"""as in protocol.status"""


def task(address: tuple[str, int], key: bytes) -> Callable[[int, Iterable[Any]], Iterator[None]]:
    """Function for mapPartitionsWithIndex, which Spark runs once per rank; `address` is the driver's."""

    def run_rank(index: int, rows: Iterable[Any]) -> Iterator[None]:
        from pyspark import TaskContext

        gpus: list[str] = []
        assigned = TaskContext.get().resources().get("gpu")
        if assigned:
            gpus = list(assigned.addresses)
        with Client(address, authkey=key) as connection:
            connection.send({"index": index, "host": socket.gethostname(), "gpus": gpus})
            # The driver closes the connection of a duplicate task of Spark.
            with contextlib.suppress(EOFError, ConnectionError):
                run(connection, rows, **connection.recv())
        yield from ()

    return run_rank


def run(
    connection: Connection,  # takes output and exit code to the driver, and signals back
    rows: Iterable[Any],
    command: list[str],  # a `python` in it is the executor's
    environ: dict[str, str],
    folder: str,
    status_file: str,  # contains the rank's current step
    pipe_variable: str,  # passes the descriptor of the row pipe to the rank; "": no rows are streamed
) -> None:
    """Runs a rank's command until it exits or the driver disconnects."""
    lock = threading.Lock()

    def report(**message: Any) -> None:
        with lock, contextlib.suppress(OSError):
            connection.send(message)

    if folder and not os.path.isdir(folder):
        folder, missing = os.getcwd(), folder
        line = f"{socket.gethostname()} has no directory {missing}: the rank starts in {folder}\n"
        report(stream=2, line=line.encode())
    inherited: tuple[int, ...] = ()
    if pipe_variable:
        reading, writing = os.pipe()
        inherited = (reading,)
        environ[pipe_variable] = f"{reading} {environ[pipe_variable]}"
    try:
        interface = _interface(_own_address(connection))
        process = _start(command, _environment(environ, interface), folder, inherited)
    except OSError as error:
        report(stream=2, line=f"{command[0]} cannot be started: {error.strerror}\n".encode())
        report(ended=NOT_STARTED, step="")
        return

    def forward(number: int, stream: Any) -> None:
        for line in stream:
            report(stream=number, line=line)

    streams = ((1, process.stdout), (2, process.stderr))
    readers = [threading.Thread(target=forward, args=stream, daemon=True) for stream in streams]
    signals = threading.Thread(target=_forward_signals, args=(connection, process), daemon=True)
    for thread in (*readers, signals):
        thread.start()
    if pipe_variable:
        os.close(reading)
        threading.Thread(target=_stream_rows, args=(rows, writing), daemon=True).start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # keeps the process and group ID reserved
    for reader in readers:
        reader.join(PIPE_S)
    _kill(process.pid)
    report(ended=process.wait(), step=_status(status_file))
    with contextlib.suppress(OSError), socket_of(connection) as same:
        same.shutdown(socket.SHUT_RDWR)  # the driver must not wait: the executor's Python may keep running


def _start(
    command: list[str], environ: dict[str, str], folder: str, inherited: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """Starts a rank's process in `folder`; it inherits the descriptors in `inherited`."""
    return subprocess.Popen(
        command,
        env=environ,
        pass_fds=inherited,
        cwd=folder or None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _stream_rows(rows: Iterable[Any], writing: int) -> None:
    """Writes the rows of Spark to the rank's pipe, and None after the last one."""
    # A full pipe blocks, so Spark waits for a slower rank.
    with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
        for row in rows:
            pickle.dump(row, pipe)
        pickle.dump(None, pipe)


def _forward_signals(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    """Sends the driver's signals to the process, and kills its group when the driver disconnects."""
    try:
        while True:
            number = connection.recv()
            if process.returncode is None:
                os.kill(process.pid, number)
    except (EOFError, OSError):
        if process.returncode is None:
            _kill(process.pid)


def _status(path: str) -> str:
    """Status line of a rank, which is then removed; "" without one. Others may have files and links of its name."""
    for name in (path, *glob.glob(f"{path}.*")):
        with contextlib.suppress(OSError):
            # O_NONBLOCK: a FIFO without a writer would block.
            with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), errors="replace") as file:
                opened = os.fstat(file.fileno())
                if not stat.S_ISREG(opened.st_mode) or opened.st_uid != os.geteuid():
                    continue
                text = file.read(STATUS_LENGTH)
            os.unlink(name)
            letters = [letter if letter.isprintable() else " " for letter in text]
            return "".join(letters).strip()
    return ""


def _environment(forwarded: dict[str, str], interface: str) -> dict[str, str]:
    """Executor's variables and `interface`, replaced by the job's; PATHS are joined, the executor's Python first."""
    environ = dict(os.environ)
    environ.pop("OMP_NUM_THREADS", None)  # Spark sets it to a task's cores, but a rank sets its own threads
    joined = {name: ":".join(filter(None, (forwarded.get(name), environ.get(name)))) for name in PATHS}
    joined["PATH"] = f"{os.path.dirname(sys.executable)}:{joined['PATH']}"
    if interface:
        environ |= {"HOROVOD_GLOO_IFACE": interface, "NCCL_SOCKET_IFNAME": interface}
    return {**environ, **forwarded, **{name: value for name, value in joined.items() if value}}


def socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def _own_address(connection: Connection) -> str:
    with socket_of(connection) as same:
        return str(same.getsockname()[0])


def _interface(address: str) -> str:
    """Name of the network interface with this address, which reaches the driver and the other hosts; "" if none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Spark kills the executor's Python when a task ends


def _kill(group: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
