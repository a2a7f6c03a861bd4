"""A standalone cluster of Spark, here or on the hosts of a lab: a master and workers, by their own classes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ringtrain.cluster.spark.session import check_installed
from ringtrain.errors import MissingDependency

REQUIRED = "RINGTRAIN_REQUIRE_SPARK"
START_TIMEOUT_S = 120
END_TIMEOUT_S = 20


def require() -> None:
    """Ends a test where Spark is lacking: skipped, or failed where it was said that nothing may be lacking."""
    try:
        check_installed()
    except MissingDependency as error:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, and this machine has no Spark: {error}", pytrace=False)
        pytest.skip(str(error))


class Cluster:
    """A master, and a worker on every host. A context manager."""

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[str] = ("127.0.0.1",),
        slots: int = 2,
        gpus: Sequence[str] = (),
        start: Callable[..., subprocess.Popen[Any]] | None = None,
    ) -> None:
        """Describes the cluster.

        Args:
            folder: for logs and the executors' files.
            hosts: names or addresses that the others reach them by; the first has the master as well.
            slots: of each worker.
            gpus: addresses that each worker's discovery script prints.
            start: starts a command on a host: takes host, argv, env, cwd and options of subprocess.Popen.
        """
        self.folder, self.hosts, self.slots, self.gpus = folder, hosts, slots, gpus
        self.master = ""
        self._start_on = start or start_here
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Cluster:
        try:
            log = self._start(self.hosts[0], "master.Master", [])
            self.master = self._wait_for(log, r"Starting Spark master at (spark://\S+)")
            script = self.folder / "gpus.sh"
            script.write_text(f"#!/bin/sh\necho '{json.dumps({'name': 'gpu', 'addresses': [*self.gpus]})}'\n")
            script.chmod(0o755)
            resource = "spark.worker.resource.gpu"
            settings = f"{resource}.amount {len(self.gpus)}\n{resource}.discoveryScript {script}\n"
            (self.folder / "worker.conf").write_text(settings * bool(self.gpus))
            options = ["--cores", str(self.slots), "--memory", "2g", "--properties-file", "worker.conf"]
            logs = [
                self._start(
                    host, "worker.Worker", [*options, "--work-dir", str(self.folder / f"work-{host}"), self.master]
                )
                for host in self.hosts
            ]
            for log in logs:
                self._wait_for(log, r"(Successfully registered) with master")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _start(self, host: str, name: str, options: Sequence[str]) -> Path:
        import pyspark  # noqa: TID251 - its tests skip without

        home = Path(pyspark.__file__).parent
        words = [home / "bin" / "spark-class", f"org.apache.spark.deploy.{name}"]
        words += ["--host", host, "--port", "0", "--webui-port", "0", *options]
        env = {"SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_IP": host}
        log = self.folder / f"{name}-{host}.log"
        with log.open("wb") as written:
            process = self._start_on(host, words, env, self.folder, stdout=written, stderr=subprocess.STDOUT)
        self._processes.append(process)
        return log

    def _wait_for(self, log: Path, pattern: str) -> str:
        def found() -> Any:
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"a part of Spark has ended\n{log.read_text()}")
            return re.search(pattern, log.read_text())

        return wait_for(found, START_TIMEOUT_S, f"{pattern} in {log}")[1]


def start_here(
    host: str, argv: Sequence[str | Path], env: Mapping[str, str], cwd: Path, **options: Any
) -> subprocess.Popen[Any]:
    """Starts a command on this machine, in a session of its own."""
    return subprocess.Popen(
        argv, env=os.environ | dict(env), cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True, **options
    )


def wait_for(look: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Looks again and again until there is something.

    Raises:
        TimeoutError: there was nothing in all the time; says what.
    """
    end = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"not after {timeout_s} s: {what}")
        time.sleep(0.02)
    return found


def alive(word: str) -> dict[int, str]:
    """Processes of this machine that have a word on their command line, but for this one: id and command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended while we looked
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if word in line and int(path.parent.name) != os.getpid():
                found[int(path.parent.name)] = line
    return found


def other_python(folder: Path) -> Path:
    """A Python that says it is 3.7."""
    path = folder / "python3.7"
    path.write_text(
        f"#!{sys.executable}\nimport collections, runpy, sys\n"
        "names = 'major minor micro releaselevel serial'\n"
        "sys.version_info = collections.namedtuple('version_info', names)(3, 7, 0, 'final', 0)\n"
        "sys.argv = sys.argv[sys.argv.index('-m') + 1 :]\n"
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    )
    path.chmod(0o755)
    return path


def kill(process: subprocess.Popen[Any]) -> None:
    """Kills a process that was started in a session of its own, and its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
