"""Spark task that runs one rank on an executor for the driver. Sent there as a whole: standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

PR_SET_PDEATHSIG = 1
SIOCGIFADDR = 0x8915  # ioctl: IPv4 address of an interface
PIPE_S = 2.0
"""for processes that a rank left behind to close its output"""
PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
NOT_STARTED = 127


def task(address: tuple[str, int], key: bytes) -> Callable[[int, Iterable[Any]], Iterator[None]]:
    """Function for mapPartitionsWithIndex, which Spark runs once per rank; `address` is the driver's."""

    def sit(index: int, rows: Iterable[Any]) -> Iterator[None]:
        from pyspark import TaskContext

        found = TaskContext.get().resources().get("gpu")
        with Client(address, authkey=key) as connection:
            gpus = list(found.addresses) if found else []
            connection.send({"index": index, "host": socket.gethostname(), "gpus": gpus})
            # The driver closes the connection of a duplicate task of Spark.
            with contextlib.suppress(EOFError, ConnectionError):
                run(connection, rows, **connection.recv())
        yield from ()

    return sit


def run(
    connection: Connection,
    rows: Iterable[Any],
    command: list[str],
    environ: dict[str, str],
    folder: str,
    box: str,
    fed: str,
) -> None:
    """Runs a rank's command until it exits or the driver disconnects.

    Args:
        connection: To the driver. It carries output and the exit code there, and signals back.
        command: A `python` in it is the executor's.
        environ: Added to the executor's variables.
        folder: Working directory, if it exists.
        box: Path of the rank's status file, which contains its current step.
        fed: Variable that passes the descriptor of the sample pipe to the rank; "": no samples are streamed.
    """
    lock = threading.Lock()

    def tell(**message: Any) -> None:
        with lock, contextlib.suppress(OSError):
            connection.send(message)

    if folder and not os.path.isdir(folder):
        folder, missing = os.getcwd(), folder
        tell(stream=2, line=f"{socket.gethostname()} has no folder {missing}: the rank starts in {folder}\n".encode())
    reading, writing = os.pipe() if fed else (-1, -1)
    if fed:
        environ[fed] = f"{reading} {environ[fed]}"
    try:
        process = subprocess.Popen(
            command,
            env=_environment(environ, _interface(_own_address(connection))),
            pass_fds=(reading,) if fed else (),
            cwd=folder or None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        tell(stream=2, line=f"{command[0]} cannot be started: {error.strerror}\n".encode())
        tell(ended=NOT_STARTED, step="")
        return

    def feed() -> None:
        # A full pipe blocks, so Spark waits for a slower rank.
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
            for row in rows:
                pickle.dump(row, pipe)
            pickle.dump(None, pipe)

    def pass_on(number: int, stream: Any) -> None:
        for line in stream:
            tell(stream=number, line=line)

    def obey() -> None:
        try:
            while True:
                number = connection.recv()
                if process.returncode is None:
                    os.kill(process.pid, number)
        except (EOFError, OSError):
            if process.returncode is None:
                _kill(process.pid)

    streams = ((1, process.stdout), (2, process.stderr))
    readers = [threading.Thread(target=pass_on, args=stream, daemon=True) for stream in streams]
    for thread in (*readers, threading.Thread(target=obey, daemon=True)):
        thread.start()
    if fed:
        os.close(reading)
        threading.Thread(target=feed, daemon=True).start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # keeps the process and group ID reserved
    for reader in readers:
        reader.join(PIPE_S)
    _kill(process.pid)
    step = ""
    if os.path.isfile(box):  # a FIFO of that name would block
        with contextlib.suppress(OSError), open(box) as said:
            step = said.read().strip()
            os.unlink(box)
    tell(ended=process.wait(), step=step)
    with contextlib.suppress(OSError), socket_of(connection) as same:
        same.shutdown(socket.SHUT_RDWR)  # the driver must not wait: the executor's Python may keep running


def _environment(told: dict[str, str], interface: str) -> dict[str, str]:
    """Executor's variables, overridden by the job's; PATHS are joined, with the executor's Python first in PATH."""
    own = dict(os.environ)
    own.pop("OMP_NUM_THREADS", None)  # Spark sets it to a task's cores, but a rank sets its own threads
    joined = {name: ":".join(filter(None, (told.get(name), own.get(name)))) for name in PATHS}
    joined["PATH"] = f"{os.path.dirname(sys.executable)}:{joined['PATH']}"
    if interface:
        own |= {"HOROVOD_GLOO_IFACE": interface, "NCCL_SOCKET_IFNAME": interface}
    return {**own, **told, **{name: value for name, value in joined.items() if value}}


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
