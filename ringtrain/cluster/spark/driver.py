"""Runs a command as ranks on Spark's executors: what `ringtrain launch --launcher spark` starts and watches.

    python -m ringtrain.cluster.spark.driver --master 'local[2]' --num-ranks 2 -- python -m ringtrain.train

Spark runs a job with one task per rank (task.py). The tasks connect to this process. When all have connected, each
receives its rank and runs the command. The output of ranks comes back over these connections and goes to standard
output and standard error, each line tagged with the rank. Signals go the other way.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from ringtrain.cluster import horovod_driver, processes
from ringtrain.cluster.spark import dataframe, task
from ringtrain.cluster.spark.plan import check_slots
from ringtrain.cluster.spark.session import local_slots, reason, start
from ringtrain.errors import LaunchError, MissingDependency, RingtrainError
from ringtrain.protocol import transport
from ringtrain.protocol.env import FEED, JOB, MARK, install

if TYPE_CHECKING:
    from pyspark import RDD

GRACE_S = 5.0  # for ranks to exit after one has failed or after SIGTERM
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job and returns the exit code: 0, that of the rank that failed first, or 2 after a user error.

    It is 128 + n if signal n killed the rank. A user error is printed in one line.
    """
    if argv is None:
        argv = sys.argv[1:]
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:end])
    command = words[end + 1 :]
    try:
        if not command:
            raise LaunchError("got no command to run: expected it after --")
        if importlib.util.find_spec("horovod") is None:
            raise MissingDependency(f"no horovod in {sys.executable}, by which ranks meet: {install()}")
        defaults = {
            "spark.cores.max": str(options.num_ranks),  # a standalone cluster would otherwise allocate all its cores
            "spark.executor.instances": str(options.num_ranks),
            "spark.speculation": "false",
            "spark.task.maxFailures": "1",  # a lost rank ends the job, which may then be restarted as a whole
            "spark.ui.enabled": "false",
        }
        settings = {"spark.ui.showConsoleProgress": "false", **dict(setting.split("=", 1) for setting in options.set)}
        spark = start(options.master, settings, defaults)
        try:
            check_slots(options.num_ranks, spark.sparkContext.master)
            slots = spark.sparkContext.parallelize(range(options.num_ranks), options.num_ranks)
            row_counts = ""
            if options.data:
                slots, row_counts = dataframe.shares(spark, options.data, options.num_ranks)
            return SparkRanks(slots, row_counts, options, command, os.environ).run()
        finally:
            spark.sparkContext.cancelAllJobs()
            spark.stop()
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="ringtrain.cluster.spark.driver", description=__doc__.partition("\n")[0])
    made.add_argument("--num-ranks", type=int, required=True, metavar="N")
    made.add_argument("--master", default="", metavar="URL", help="default: from spark-defaults.conf, else local[*]")
    made.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="Spark setting")
    made.add_argument("--data", default="", metavar="MODULE:FUNCTION", help="returns the rows to stream to ranks")
    made.add_argument("--start-timeout", type=float, default=60, metavar="S", help="seconds to wait for slots (60)")
    made.add_argument("--folder", default="", metavar="DIR", help="directory that ranks start in, if it exists")
    made.add_argument("--export", default="", metavar="NAMES", help="variables that ranks get: NAME,NAME")
    return made


@dataclass(frozen=True)
class Caller:
    index: int
    host: str
    gpus: tuple[str, ...] = ()  # addresses of the GPUs that Spark assigned to the task


class SparkRanks:
    """Ranks of one job, from the connection of their tasks to their exit."""

    def __init__(
        self,
        slots: RDD,  # one partition per rank
        row_counts: str,  # from dataframe.shares; "": no rows are streamed
        options: argparse.Namespace,
        command: Sequence[str],
        environ: Mapping[str, str],
    ) -> None:
        self.slots, self.row_counts, self.options, self.command = slots, row_counts, options, list(command)
        self.context = slots.context
        self.environ = {name: environ[name] for name in options.export.split(",") if name in environ}
        self.messages: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.ranks: dict[Connection, int] = {}
        """ranks that have not exited"""
        self.exit_code, self.last_signal = 0, 0
        self.deadline: float | None = None
        """for all ranks to exit; None: no limit"""

    def run(self) -> int:
        """Runs the ranks and returns the exit code; raises LaunchError if slots are missing or cannot run the tasks."""
        conf = self.context.getConf()
        here = listens_on = "127.0.0.1"
        if local_slots(self.context.master) is None:
            here = conf.get("spark.driver.host")
            listens_on = conf.get("spark.driver.bindAddress", here)
        key = secrets.token_bytes(32)
        for number in SIGNALS:
            signal.signal(number, lambda received, _: self.messages.put((None, received)))
        rendezvous = horovod_driver.make_rendezvous()()
        rendezvous.start()
        try:
            with Listener((listens_on, 0), family="AF_INET", backlog=1024) as listener:
                threading.Thread(target=self._listen, args=(listener, key), daemon=True).start()
                threading.Thread(target=self._run_spark, args=((here, listener.address[1]), key), daemon=True).start()
                callers = self._wait_for_slots()
                where = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous.listen(listens_on, here)}
                where["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(rendezvous.port)
                self._place(callers, rendezvous, where)
                return self._follow()
        finally:
            rendezvous.stop()

    # ---- background threads ----------------------------------------------------------------------------------------

    def _run_spark(self, address: tuple[str, int], key: bytes) -> None:
        try:
            self.slots.mapPartitionsWithIndex(task.task(address, key)).collect()
        except Exception as error:
            self.messages.put((None, error))

    def _listen(self, listener: Listener, key: bytes) -> None:
        while True:
            try:
                threading.Thread(target=self._receive, args=(listener.accept(), key), daemon=True).start()
            except OSError as error:
                if error.errno not in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE):
                    return  # the listener was closed: the job has ended
                time.sleep(0.1)

    def _receive(self, connection: Connection, key: bytes) -> None:
        """Authenticates one connection by the key, then queues its messages."""
        try:
            transport.limit(connection, transport.GREETING_S)
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            transport.limit(connection, 0)
            while True:
                self.messages.put((connection, connection.recv()))
        except (EOFError, OSError, AuthenticationError):
            self.messages.put((connection, None))

    # ---- main path -------------------------------------------------------------------------------------------------

    def _wait_for_slots(self) -> dict[Connection, Caller]:
        """Waits for one connected task per rank, and returns them by connection."""
        callers: dict[Connection, Caller] = {}
        num_ranks, timeout_s = self.options.num_ranks, self.options.start_timeout
        deadline = time.monotonic() + timeout_s
        while len(callers) < num_ranks:
            try:
                connection, message = self.messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise LaunchError(
                    f"got {len(callers)} of {num_ranks} slots from Spark at {self.context.master} in {timeout_s:g} s,"
                    " expected one for each rank: start fewer ranks (-np), add executors, or raise --start-timeout"
                ) from None
            if isinstance(message, Exception):
                raise LaunchError(f"Spark's executors cannot run ranks: {reason(message)}")
            if connection is None:
                raise LaunchError(f"stopped by {signal.Signals(message).name} before the ranks started")
            if message is None:
                callers.pop(connection, None)
            else:
                callers[connection] = Caller(message["index"], message["host"], tuple(message["gpus"]))
        return callers

    def _place(self, callers: Mapping[Connection, Caller], rendezvous: Any, where: Mapping[str, str]) -> None:
        """Gives each task its rank. where: Variables with which ranks find the rendezvous."""
        connections = {caller: connection for connection, caller in callers.items()}
        placed = assign([*callers.values()], by_index=bool(self.row_counts))
        rendezvous.init([slot for _, slot in placed])
        over_gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", **where}
        for rank, (caller, slot) in enumerate(placed):
            connection = connections[caller]
            environ = {**self.environ, **over_gloo, **rendezvous.variables(slot)}
            gpus = gpus_of_host([*callers.values()], caller.host)
            if gpus:
                environ["CUDA_VISIBLE_DEVICES"] = gpus
            if self.row_counts:
                environ[FEED] = f"{rank} {len(callers)} {self.row_counts}"
            self.ranks[connection] = rank
            connection.send(
                {
                    "command": self.command,
                    "environ": environ,
                    "folder": self.options.folder,
                    "job": self.environ.get(JOB, ""),
                    "rank": rank,
                }
            )

    def _follow(self) -> int:
        """Forwards output and signals until all ranks have exited; returns the exit code."""
        while self.ranks:
            timeout_s = None
            if self.deadline is not None:
                timeout_s = max(0.0, self.deadline - time.monotonic())
            try:
                connection, message = self.messages.get(timeout=timeout_s)
            except queue.Empty:
                if self.last_signal == signal.SIGKILL:
                    self._ended_with(1, f"{len(self.ranks)} ranks cannot be reached")
                    break
                self._signal(signal.SIGKILL, GRACE_S)
                continue
            if connection is None and isinstance(message, Exception):
                self._ended_with(1, f"Spark's job has failed: {reason(message)}")
            elif connection is None:
                # A second signal kills the ranks.
                number = signal.SIGKILL if self.last_signal else message
                grace_s = None if number in (signal.SIGINT, signal.SIGUSR1) else GRACE_S
                self._signal(number, grace_s)
            elif connection not in self.ranks:
                connection.close()  # a duplicate task of Spark
            elif message and "line" in message:
                stream = "stdout" if message["stream"] == 1 else "stderr"
                tag = f"[{self.ranks[connection]}]<{stream}>:"
                processes.write(tag.encode() + message["line"].rstrip(b"\n") + b"\n", message["stream"])
            else:
                self._end(self.ranks.pop(connection), message)
        return self.exit_code

    def _end(self, rank: int, message: dict[str, Any] | None) -> None:
        if message is None:
            self._ended_with(1, f"lost rank {rank}: its executor exited, or its host or the network failed")
            return
        if message["step"]:
            step, _, phase = message["step"].partition(" ")
            processes.write(f"{MARK}:{self.environ.get(JOB, '')}:box:{rank}:{step}:{phase}\n".encode())
        code = message["ended"] if message["ended"] >= 0 else 128 - message["ended"]
        if code:
            self._ended_with(code, f"the first rank to end was\nProcess name: {rank}\nExit code: {code}")

    def _ended_with(self, code: int, why: str) -> None:
        """Records the first failure and stops the other ranks, unless a signal did: then they may be saving."""
        if not self.exit_code:
            self.exit_code = code
            processes.write(f"spark: {why}\n".encode())
            if not self.last_signal:
                self._signal(signal.SIGTERM, GRACE_S)

    def _signal(self, number: int, grace_s: float | None) -> None:
        self.last_signal = number
        self.deadline = None if grace_s is None else time.monotonic() + grace_s
        for connection in self.ranks:
            with contextlib.suppress(OSError):
                connection.send(number)


def assign(callers: Sequence[Caller], by_index: bool = False) -> list[tuple[Caller, Any]]:
    """Assigns ranks host by host; returns, by rank, its task and its slot of Horovod's."""
    by_host: dict[str, list[Caller]] = {}
    for caller in sorted(callers, key=lambda member: member.index):
        by_host.setdefault(caller.host, []).append(caller)
    assigned: list[tuple[Caller, int]] = []
    for group in by_host.values():
        assigned += [(caller, local_rank) for local_rank, caller in enumerate(group)]
    if by_index:  # the task's partition holds the rows of that rank
        assigned.sort(key=lambda pair: pair[0].index)
    return [
        (caller, horovod_driver.slot(caller.host, rank, local_rank, len(assigned)))
        for rank, (caller, local_rank) in enumerate(assigned)
    ]


def gpus_of_host(callers: Sequence[Caller], host: str) -> str:
    """GPUs that all ranks of a host see, one per rank in the order of local ranks; "": those that the host has."""
    group = sorted((caller for caller in callers if caller.host == host), key=lambda member: member.index)
    if all(member.gpus for member in group):
        return ",".join(member.gpus[0] for member in group)
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
