"""One run of a function, in a separate process. Sent to executors as a whole: standard library only."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


def run(payload: bytes) -> dict[str, Any]:
    """Runs a pickled function in a forked process; returns the Row's fields except `arguments`, the result pickled."""
    from pyspark import TaskContext

    resource = TaskContext.get().resources().get("gpu")
    gpus = tuple(resource.addresses) if resource else ()
    outcome = {"result": b"", "error": "", "message": "", "traceback": "", "host": socket.gethostname(), "gpus": gpus}
    if not payload:
        return outcome
    receiver, sender = multiprocessing.Pipe(duplex=False)
    began_s = time.monotonic()
    # An executor reuses its Python process: TensorFlow and its GPUs would stay loaded for the next run.
    process = multiprocessing.get_context("fork").Process(target=_run_apart, args=(payload, gpus, sender))
    process.start()
    sender.close()  # so that the pipe closes when the process exits
    try:
        outcome |= receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"called exit({code})"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        outcome |= {"error": "ProcessDied", "message": f"its process {how} before it returned"}
    process.join()
    return outcome | {"seconds": time.monotonic() - began_s}


def _run_apart(payload: bytes, gpus: tuple[str, ...], sender: Connection) -> None:
    from pyspark import cloudpickle

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Spark kills its Python to cancel a task
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        function, arguments = pickle.loads(payload)
        result = function(**arguments)
        try:
            sender.send({"result": cloudpickle.dumps(result)})
        except Exception as error:
            raise TypeError(f"the result cannot be sent back: {error}") from error
    except (Exception, SystemExit) as error:
        text = traceback.format_exc()
        sender.send({"error": type(error).__name__, "message": str(error), "traceback": text})
