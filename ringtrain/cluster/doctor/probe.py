"""Collects facts of one host; doctor sends this source to each host, where Python runs it.

It needs only the standard library of Python 3.8, since a host may lack ringtrain. The functions that collect the facts
stand with their checks (software, machine, network). Their source comes with the request, and they use what this file
imports and defines, neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import contextlib  # noqa: F401 - for the functions that come with the request, as some others
import fcntl  # noqa: F401
import importlib.util
import ipaddress  # noqa: F401
import json
import os
import re  # noqa: F401
import shutil
import socket  # noqa: F401
import struct  # noqa: F401
import subprocess
import sys
import threading  # noqa: F401
import time  # noqa: F401
from collections.abc import Callable, Mapping
from typing import Any

PROGRAM_TIMEOUT_S = 8


def facts(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of this host by name, from functions in "source"; None for a fact that cannot be read."""
    sys.path[:1] = [wanted["folder"], *filter(None, wanted["python_path"].split(os.pathsep))]
    functions = dict(globals())
    exec(wanted["source"], functions)
    return {name: attempt(functions[name], wanted) for name in wanted["facts"]}


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function and returns its result; None if it raises."""
    try:
        return function(*arguments)
    except Exception:  # one failure must not lose the other facts
        return None


def read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def outcome(path: str, name: str, *arguments: str) -> dict[str, Any] | None:
    """Runs a program of this Python's environment, else of `path`: {"program", "said" (output), "status"}, or None."""
    path = os.pathsep.join([os.path.dirname(sys.executable), path, os.environ.get("PATH", os.defpath)])
    program = shutil.which(name, path=path)
    if program is None:
        return None
    kwargs: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        ended = subprocess.run([program, *arguments], timeout=PROGRAM_TIMEOUT_S, **kwargs)
    except subprocess.TimeoutExpired:
        return {"program": program, "said": f"no answer in {PROGRAM_TIMEOUT_S} s", "status": None}
    return {"program": program, "said": ended.stdout.decode(errors="replace").strip(), "status": ended.returncode}


def folder_of(package: str) -> str:
    """Directory of a package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(package)
    return os.path.dirname(spec.origin)


def horovod_library() -> bytes | None:
    """Content of Horovod's TensorFlow library for this Python; None without one."""
    from importlib.machinery import EXTENSION_SUFFIXES

    for suffix in EXTENSION_SUFFIXES:
        library = os.path.join(folder_of("horovod"), "tensorflow", "mpi_lib" + suffix)
        if os.path.exists(library):
            with open(library, "rb") as file:
                return file.read()
    return None


if __name__ == "__main__":
    print(sys.argv[1] + json.dumps(facts(json.loads(sys.stdin.buffer.readline().decode()))))
