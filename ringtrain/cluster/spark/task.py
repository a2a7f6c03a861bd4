"""Spark task that runs one rank on an executor for the driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

from ringtrain.protocol import services, status
from ringtrain.protocol.env import FEED

PR_SET_PDEATHSIG = 1
PIPE_S = 2.0  # for processes that a rank left behind to close its output
PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
NOT_STARTED = 127


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
    job: str,  # its ID, "" without one
    rank: int,
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
    if FEED in environ:  # the rank gets the rows by a pipe
        reading, writing = os.pipe()
        inherited = (reading,)
        environ[FEED] = f"{reading} {environ[FEED]}"
    try:
        interface = services.interface_of(_own_address(connection))
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
    if inherited:
        os.close(reading)
        threading.Thread(target=_stream_rows, args=(rows, writing), daemon=True).start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # keeps the process and group ID reserved
    for reader in readers:
        reader.join(PIPE_S)
    _kill(process.pid)
    report(ended=process.wait(), step=status.take(job, rank))
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


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Spark kills the executor's Python when a task ends


def _kill(group: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
