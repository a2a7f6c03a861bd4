"""`ringtrain.run`: calls a function on ranks that it starts, from a script or a notebook, and returns their values.

The caller writes the function and its arguments to a file and starts `ringtrain launch`. Each rank is a new interpreter
that runs this module: it reads the file, calls the function, and leaves its value or its failure beside the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import linecache
import os
import pickle
import re
import select
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from ringtrain.cluster import exit_cause, processes, schedulers
from ringtrain.errors import LaunchError, RankError, exit_code_of
from ringtrain.protocol import launchers
from ringtrain.protocol.env import JOB, MARK, path_with_own
from ringtrain.protocol.failures import Failure, failure_of, report_failure
from ringtrain.protocol.json_text import INVALID, parse_json
from ringtrain.protocol.reader import Lines
from ringtrain.training import log_capture

LARGE_MB = 64
"""size of function and arguments from which on `run` warns: every rank reads them"""
POLL_MS = 200
# Of Open MPI 4 and 5 ("[1,3]<stdout>:", "[prterun-host1-99@1,3]<stdout>: ") and horovodrun ("[3]<stdout>:").
TAG = re.compile(r"\[([^][<>\n]*@)?(?:\d+,)?(\d{1,9})\]<std(?:out|err)>:(?(1) ?)")
FIRST = re.compile(r"rank (\d{1,9}) on \S+ failed first")
LAUNCHER = -1
"""as the rank of a line"""
T = TypeVar("T")


# ---- the caller ---------------------------------------------------------------------------------------------------


def run(
    function: Callable[..., T], *args: Any, np: int = 2, hosts: str = "", options: Sequence[str] = (), **kwargs: Any
) -> list[T]:
    """Calls a function on new ranks, shows their output, and returns the value of each rank.

    It works in a notebook, an interactive session, and a script, which needs no `if __name__ == "__main__"`. Ranks are
    new interpreters with the working directory, `sys.path` and `sys.argv` of the caller. The function, and what it uses
    of the notebook or script, is copied to them; modules are imported there. Objects of the caller that the function
    changes are changed on the ranks only: return what is needed here.

    Lines of rank 0 are shown as they are, those of other ranks after "rank 1: ". Interrupting the call (Ctrl-C, or the
    stop button of a notebook) sends SIGINT to all ranks, upon which `ringtrain.fit` saves; a second interrupt ends them
    at once. No rank outlives the call or the calling process.

    Args:
        function: Called on every rank as `function(*args, **kwargs)`. Data sets of tf.data, generators, locks and
            models of your own classes cannot be sent: create them inside of it.
        np: Number of ranks.
        hosts: Hosts and slots, as for `ringtrain launch -H`: "host1:4,host2:4". "": the scheduler's, else this machine.
            With other hosts, the working directory must be on a file system that all of them share.
        options: Further options of `ringtrain launch`, e.g. ("--oversubscribe",).

    Returns:
        The values in the order of the ranks. They must be picklable, such as numbers, arrays and `model.get_weights()`.

    Raises:
        RankError: A rank has failed. The message has the traceback of the one that failed first.
        LaunchError: The ranks cannot be started, the function or its arguments cannot be sent, or this is a rank.
        KeyboardInterrupt: The call was interrupted, and all ranks have ended.

    Example:
        >>> def train(units):
        ...     import keras
        ...     model = keras.Sequential([keras.layers.Dense(units), keras.layers.Dense(1)])
        ...     model.compile("adam", "mse")
        ...     return ringtrain.fit(model, x, y, epochs=3).history["loss"][-1]
        >>> ringtrain.run(train, 32, np=2)
        [0.0815, 0.0815]
    """
    if JOB in os.environ:
        raise LaunchError(
            "ringtrain.run was called on a rank, expected in the process that starts the ranks: a module that ranks"
            ' import must call it under if __name__ == "__main__" only'
        )
    num_gpus = gpus_in_use()
    if num_gpus:
        warnings.warn(
            f"ringtrain.run: TensorFlow of this process holds memory of {num_gpus} GPUs, which ranks may lack: restart"
            f" the notebook, and use TensorFlow inside of the function only",
            stacklevel=2,
        )
    content = content_of(function, args, kwargs)
    if len(content) > LARGE_MB << 20:
        warnings.warn(
            f"ringtrain.run: function and arguments are {len(content) >> 20} MB, which every rank reads: load the data"
            f" inside of the function",
            stacklevel=2,
        )
    may_leave = hosts or options or schedulers.find(os.environ)
    parent = os.getcwd() if may_leave else tempfile.gettempdir()
    with _call_file(content, parent) as call:
        launch = [sys.executable, "-m", "ringtrain", "launch", "-np", str(np)]
        if hosts:
            launch += ["-H", hosts]
        rank = [sys.executable, "-m", "ringtrain.function_call", str(call)]
        shown = Shown(processes.start_beside([*launch, *options, "--", *rank], {**os.environ, "PATH": path_with_own()}))
        code = shown.follow()
        if code:
            raise _error_of(call, np, shown.message, code)
        return [_value(call, number) for number in range(np)]


@contextlib.contextmanager
def _call_file(content: bytes, parent: str) -> Iterator[Path]:
    """File with the call in a new directory below `parent`, which is removed afterwards. Raises LaunchError."""
    with contextlib.ExitStack() as stack:
        try:
            folder = tempfile.TemporaryDirectory(prefix=".ringtrain-", dir=parent, ignore_cleanup_errors=True)
            call = Path(stack.enter_context(folder), "call")
            call.touch(mode=0o600)
            call.write_bytes(content)
        except OSError as error:
            raise LaunchError(
                f"ringtrain.run: {parent}: function and arguments, {len(content):,} bytes, cannot be written:"
                f" {error.strerror}: {_fix_of(error)}"
            ) from error
        yield call


def _error_of(call: Path, num_ranks: int, message: str, code: int) -> LaunchError | RankError:
    """Error of a launch that has exited with `code`: the failure of a rank, else the launcher's own message."""
    text = _first_failure(call, num_ranks, message) or message or f"ringtrain launch exited with code {code}"
    if text.startswith("rank "):
        return RankError(text)
    return LaunchError(text)


def content_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Content of the file that ranks read: two pickles, the caller's surroundings and its call. Raises LaunchError."""
    # Cells of a notebook have no file: their source, for tracebacks.
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    caller = {"path": [os.path.abspath(entry) for entry in sys.path], "argv": sys.argv, "cells": cells}
    try:
        return pickle.dumps(caller) + cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # objects raise anything
        raise LaunchError(
            f"ringtrain.run: the function or an argument cannot be sent to ranks ({error}): create data sets,"
            f" generators, locks and open files inside of the function"
        ) from error


def gpus_in_use(modules: Mapping[str, Any] = sys.modules) -> int:
    """Number of GPUs that TensorFlow of this process has allocated; 0 also if it has not used a device yet."""
    context = getattr(modules.get("tensorflow.python.eager.context"), "context_safe", lambda: None)()
    if not getattr(context, "_initialized", False):
        return 0
    return len(modules["tensorflow"].config.list_logical_devices("GPU"))


class Shown:
    """Output of a launch, which is printed to `sys.stdout`: a notebook does not show file descriptors."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.lines = Lines(MARK.encode())
        self._message: list[str] = []
        self._open: int | None = None
        """rank of the line that is not complete; None: all lines are"""

    @property
    def message(self) -> str:
        """Last message of the launcher."""
        return "\n".join(self._message)

    def follow(self) -> int:
        """Prints the output until the launch ends, and returns its exit code; if interrupted, raises afterwards."""
        process, interrupt = self.process, None
        try:
            while True:
                try:
                    self._print_all()
                    break
                except KeyboardInterrupt as error:
                    interrupt = error
                    process.send_signal(signal.SIGINT)
        finally:
            if process.poll() is None:
                process.terminate()
            process.stdout.close()  # before waiting: nobody reads it any more
            process.wait()
        if interrupt:
            raise interrupt
        return int(process.returncode)

    def _print_all(self) -> None:
        poller, stream = select.poll(), self.process.stdout.fileno()
        poller.register(stream, select.POLLIN)
        while True:
            is_ready = poller.poll(POLL_MS)
            data = os.read(stream, 65536) if is_ready else b""
            self._print(self.lines.add(data) if data else self.lines.late())
            # Without the launch, a process that it has left may hold the pipe open.
            if not data and (is_ready or self.process.poll() is not None):
                break
            if not is_ready:
                sys.stdout.flush()  # not after each line: a progress bar would flood a notebook
        self.process.wait()
        self._print(self.lines.rest())
        sys.stdout.flush()

    def _print(self, lines: Iterable[bytes]) -> None:
        for text in (raw.decode(errors="replace") for raw in lines):
            begin, rank = 0, None
            for tag in TAG.finditer(text):  # several, if a rank has flushed parts of a line
                self._write(rank, text[begin : tag.start()])
                begin, rank = tag.end(), int(tag[2])
            self._write(rank, text[begin:])

    def _write(self, rank: int | None, text: str) -> None:
        """Prints a part of a line of a rank; None: it has no tag of Open MPI."""
        if not text:
            return
        if rank is None:
            rank, text = self._untagged(text) if self._open is None else (self._open, text)
        if self._open not in (None, rank):
            sys.stdout.write("\n")
            self._open = None
        sys.stdout.write(f"rank {rank}: {text}" if rank > 0 and self._open is None else text)
        self._open = None if text.endswith("\n") else rank

    def _untagged(self, text: str) -> tuple[int, str]:
        """Rank and text of a line with the tag of another launcher, or of the launcher's own line."""
        line = text.rstrip("\r\n")
        tagged = exit_cause.rank_of(line)
        if tagged:
            return tagged[0], tagged[1] + text[len(line) :]
        if line.startswith("ringtrain: "):
            self._message = [line.removeprefix("ringtrain: ")]
        elif self._message:
            self._message.append(line)
        return LAUNCHER, text


def _first_failure(call: Path, num_ranks: int, message: str) -> str:
    """Failure of the rank that failed first, with its traceback; "" if the launcher knows more about it."""
    named = FIRST.match(message)  # by the launcher: clocks of hosts differ
    ranks = [int(named[1])] if named else []
    for rank in [*ranks, *range(num_ranks)]:
        with contextlib.suppress(OSError, *INVALID):
            first = Failure(**parse_json(_left_by(rank, call, "failure").read_text(encoding="utf-8")))
            if not first.is_consequence:
                break
    else:
        return ""
    return f"rank {first.rank} on {first.host} failed first:\n{first.text}"


def _value(call: Path, rank: int) -> Any:
    try:
        return pickle.loads(_left_by(rank, call, "value").read_bytes())
    except FileNotFoundError:
        raise RankError(f"rank {rank} exited with code 0 before the function returned") from None


# ---- a rank -------------------------------------------------------------------------------------------------------


def main(call: Path) -> int:
    """Calls the function of a file on this rank, leaves its value or failure beside it, and returns the exit code."""
    log_capture.watch()
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    rank = int(next(filter(None, map(os.environ.get, launchers.names("rank"))), 0))
    try:
        content = cloudpickle.dumps(_called(call, rank))
        _write_value(_left_by(rank, call, "value"), content)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        return _report(error, rank, call)
    return 0


def _fix_of(error: OSError) -> str:
    """Fix of a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space there"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "allow this user to write there"
    return "check this directory"


def _write_value(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        path.unlink(missing_ok=True)  # so that there is space for the failure
        raise LaunchError(
            f"{path.parent}: the value of the function, {len(content):,} bytes, cannot be written: {error.strerror}:"
            f" {_fix_of(error)}, or save it elsewhere"
        ) from error


def _called(call: Path, rank: int) -> Any:
    """Value of the call in a file; None if the function exits with code 0."""
    if not call.exists():
        raise LaunchError(
            f"{call}: rank {rank} on {socket.gethostname()} does not see this file of ringtrain.run: call it in a"
            f" directory that all hosts share"
        )
    _left_by(rank, call, "failure").unlink(missing_ok=True)  # of an earlier attempt
    with open(call, "rb") as file:
        caller = pickle.load(file)
        sys.path[:], sys.argv[:] = caller["path"], caller["argv"]
        linecache.cache.update(caller["cells"])
        function, args, kwargs = pickle.load(file)
    try:
        return function(*args, **kwargs)
    except SystemExit as ended:
        if ended.code:
            raise
        return None


def _report(error: Exception, rank: int, call: Path) -> int:
    """Leaves a failure beside the call, reports it to the launcher in one line, and returns the exit code."""
    exit_code = exit_code_of(error)
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    failure = failure_of(error.with_traceback(trace or error.__traceback__), rank, exit_code, exit_code == 1)
    with contextlib.suppress(OSError):  # the directory may be the failure
        _left_by(rank, call, "failure").write_text(json.dumps(asdict(failure)), encoding="utf-8")
    report_failure(error, rank, exit_code, with_traceback=False)
    return exit_code


def _left_by(rank: int, call: Path, kind: str) -> Path:
    return call.with_name(f"{kind}-{rank}")


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
