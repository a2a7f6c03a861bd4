"""horovodrun of an elastic job in virtual time: Horovod's own driver and ringtrain's around it, on simulated hosts.

The code of `ringtrain.cluster.horovod_driver`, `elastic` and Horovod's runner runs as it is, from the command
line on. Modeled are, by observed behavior:

- ssh and the shells of ranks: they connect in time or not at all, give up a silent host after 15 s, forward no signal,
  and exit with 255, or with the rank's code, 128 + n after a signal.
- The program that lists hosts, `cat` of a file; and HTTP: a request arrives after a while, and the server's handler,
  which gets bytes and gives bytes, answers it in a thread of its own.
- Messages to ranks about hosts: the client connects when it is made, and waits for an answer without a limit.
"""

from __future__ import annotations

import io
import re
import shlex
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from horovod.runner.http import http_server
from simulation.cluster import KEEP_ALIVE_S, Cluster, Machine, Process
from simulation.world import Gone, Host

from ringtrain.cluster import horovod_driver
from ringtrain.cluster.job import Job

CONNECT_S = 10.0
TERMINATE_S = 5.0
SYN_S, PROBE_S, ATTEMPTS = 127.0, 20.0, 3
VARIABLE = re.compile(r"\b(HOROVOD_\w+|RINGTRAIN_SLOT)=(\S+)")


class OnMachine(Host):
    """A process of a machine: frozen with it."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        super().__init__(machine.world, name)
        machine.world.hosts.append(self)

    @property
    def frozen_until_s(self) -> float:  # type: ignore[override]
        return self.machine.host.frozen_until_s

    @frozen_until_s.setter
    def frozen_until_s(self, time_s: float) -> None: ...


class HttpServer:
    """Horovod's rendezvous server without sockets."""

    init = http_server.RendezvousHTTPServer.init
    _extract_scope_size = http_server.RendezvousHTTPServer._extract_scope_size

    def __init__(self, address: Any, handler: Any, verbose: int) -> None:
        self.handler, self.verbose = handler, verbose
        self.cache_lock, self.finished_list_lock = threading.Lock(), threading.Lock()
        self.cache: dict[str, dict[str, bytes]] = {}
        self.finished_list: defaultdict[str, list[str]] = defaultdict(list)
        self.scope_size: dict[str, int] = {}
        self.is_listening = False

    def trust(self, connection: Any) -> None: ...

    def serve_forever(self) -> None: ...

    def shutdown(self) -> None:
        self.is_listening = False


def answer(server: HttpServer, request: bytes) -> tuple[int, bytes]:
    """Status and body by which the server's handler answers a request."""
    handler = server.handler.__new__(server.handler)
    handler.server, handler.client_address, handler.connection = server, ("10.0.0.2", 1), None
    handler.rfile, handler.wfile = io.BytesIO(request), io.BytesIO()
    handler.handle_one_request()
    head, _, body = handler.wfile.getvalue().partition(b"\r\n\r\n")
    return int(head.split()[1]), body


class Shell:
    """The shell of a rank, or the ssh to its host: it has an exit code once the launching host knows one."""

    def __init__(self, horovodrun: Horovodrun, machine: Machine, is_remote: bool) -> None:
        self.horovodrun, self.machine, self.is_remote = horovodrun, machine, is_remote
        self.world = machine.world
        self.number = next(horovodrun.cluster.numbers)
        self.code: int | None = None
        self.member: Any = None
        self.give_up_s = KEEP_ALIVE_S + self.world.random.uniform(0, 3)
        self.boot = machine.boot

    def end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.world.wake_waiting()

    def arrive(self, code: int) -> None:
        """The rank's code, once its host answers."""
        if self.code is not None:
            return
        if self.is_remote and not self.machine.is_reachable:
            self.world.at(self.world.now_s + 1.0, lambda: self.arrive(code))
        else:
            self.world.at(self.world.now_s + 0.02, lambda: self.end(code))

    def watch(self) -> None:
        """Gives up a host that does not answer for too long, or has booted again and knows no connection."""
        if self.code is not None or not self.is_remote:
            return
        machine, now_s = self.machine, self.world.now_s
        if not machine.is_reachable and now_s > machine.trouble_began_s + self.give_up_s:
            self.horovodrun.print(f"Timeout, server {machine.name} not responding.")
            self.end(255)
        elif machine.is_reachable and machine.boot != self.boot:
            self.horovodrun.print("client_loop: send disconnect: Broken pipe")
            self.end(255)
        self.world.at(now_s + 1.0, self.watch)

    def terminate(self) -> None:
        """SIGTERM, and after a while SIGKILL. A rank behind an ssh does not notice."""
        if self.code is not None:
            return
        if self.is_remote:
            self.end(255)
        elif self.member:
            self.member.signal(signal.SIGTERM)
            self.world.at(self.world.now_s + TERMINATE_S, self.member.kill_soon)


class Horovodrun(Process):
    """The process that the launcher starts."""

    def __init__(self, cluster: Cluster, job: Job, argv: Sequence[str], start: Callable[..., Any]) -> None:
        super().__init__(cluster)
        self.job, self.index, self._start = job, len(cluster.attempts), start
        self.argv = [*argv[argv.index("ringtrain.cluster.horovod_driver") + 1 :]]
        self.ranks: dict[int, Any] = {}
        self.shells: list[Shell] = []
        self.server: Any = None
        self.rendezvous: Any = None
        self.handlers: dict[int, Any] = {}
        self.is_broken = False
        self.launch_s = self.world.now_s
        self.process = OnMachine(cluster.here, "horovodrun")
        self.process.facts["horovodrun"] = self
        cluster.mpirun = self  # type: ignore[assignment]
        cluster.attempts.append(self)  # type: ignore[arg-type]
        self.task = self.world.start(self.process, "horovodrun", self._main)

    def _main(self) -> None:
        self.world.sleep(self.world.random.uniform(0.5, 2.0))  # for Python to load it
        self.cluster.fresh_modules()  # type: ignore[attr-defined]
        code: Any = 0
        try:
            horovod_driver.main(self.argv)
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                self.print(code)
                code = 1
        except Gone:
            raise
        except BaseException as error:
            self.print(f"{type(error).__name__}: {error}")
            code = 1
        self.exit(code)

    def print(self, text: str) -> None:
        for line in text.splitlines():
            self.stderr.put(f"{line}\n".encode())

    def exit(self, code: int) -> None:
        if self.returncode is not None:
            return
        self.world.note("horovodrun", f"exits with {code}")
        self.process.is_dead = True
        for shell in self.shells:
            shell.terminate()
        super().exit(code)

    def lose(self, machine: Machine) -> None: ...

    def send_signal(self, number: int) -> None:
        handler = self.handlers.get(number)
        if handler:
            handler(number, None)

    # ---- what its modules get ----------------------------------------------------------------------------------------

    def run(self, argv: Sequence[str], environ: Mapping[str, str], given: str = "", **options: Any) -> int:
        """`rank_process.run` of a rank's command."""
        world, index, events = self.world, options["index"], options["events"]
        text = f"{given}\n{shlex.join(argv)}"
        variables = {name: value for name, value in environ.items() if name.startswith("HOROVOD_")}
        for name, value in VARIABLE.findall(text):
            variables[name] = value.strip("\"'")
        machine = self.cluster.machines[variables["HOROVOD_HOSTNAME"]]
        is_remote = argv[0] == "ssh"
        shell = Shell(self, machine, is_remote)
        self.shells.append(shell)
        self.cluster.on_shell(machine)  # type: ignore[attr-defined]
        self._connect(shell)
        if shell.code is None and not any(event.is_set() for event in events):
            shell.member = self._start(self, shell, index, variables)
        shell.watch()
        world.wait_for(lambda: shell.code is not None or any(event.is_set() for event in events))
        shell.terminate()
        world.wait_for(lambda: shell.code is not None)
        return int(shell.code or 0)

    def _connect(self, shell: Shell) -> None:
        world, machine = self.world, shell.machine
        world.sleep(world.random.uniform(0.1, 0.6))
        until_s = world.now_s + CONNECT_S
        while shell.is_remote and not machine.is_reachable and shell.code is None:
            if world.now_s > until_s:
                self.print(f"ssh: connect to host {machine.name} port 22: Connection timed out")
                shell.end(255)
            world.sleep(0.5)

    def list_hosts(self, command: str, stdout: Any, **_: Any) -> int:
        """`safe_shell_exec.execute` of `cat FILE`."""
        self.world.sleep(self.world.random.uniform(0.05, 0.3))
        files = self.cluster.files  # type: ignore[attr-defined]
        text = files.get(command.split(maxsplit=1)[1].strip("'"))
        if text is None:
            return 1
        stdout.write(text)
        return 0


def request(member: Any, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """HTTP of a rank to the rendezvous, as Horovod's C++ code does it: it tries three times, and waits for an answer.

    Raises ConnectionError.
    """
    world, horovodrun = member.world, member.horovodrun
    head = f"{method} {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(ATTEMPTS):
        world.sleep(member.machine.latency_s)
        world.wait_for(lambda: member.is_connected)
        found = SimpleNamespace(status=0, body=b"")

        def serve(found: SimpleNamespace = found) -> None:
            try:
                found.status, found.body = answer(horovodrun.server, head + body)
            except Gone:
                raise
            except Exception as error:
                world.note("horovodrun", f"does not answer {method} {path.rpartition(':')[2]}: {error!r}")
                found.status = -1
            world.wake_waiting()

        if horovodrun.server and horovodrun.server.is_listening and not horovodrun.process.is_dead:
            world.start(horovodrun.process, "request", serve)
            world.wait_for(lambda found=found: found.status or horovodrun.process.is_dead)
        if found.status in (200, 404):
            world.wait_for(lambda: member.is_connected)
            return found.status, found.body
        world.sleep(0.5)
    raise ConnectionError("HTTP request failed.")


class NotificationClient:
    """`WorkerNotificationClient`: the driver's connection to what a rank listens on."""

    def __init__(self, cluster: Any, addresses: Any, key: bytes, verbose: int) -> None:
        ((_, number),) = addresses["eth0"]
        self.member = cluster.members[number]
        self.world = cluster.world
        self._reach(PROBE_S)

    def _reach(self, limit_s: float) -> None:
        """Connects, three times with a limit each. Raises OSError."""
        member = self.member
        for _ in range(ATTEMPTS):
            self.world.sleep(member.machine.latency_s)
            if self.world.wait_for(lambda: member.answers or member.has_reset, limit_s) and member.answers:
                return
        raise OSError("no connection")

    def notify_hosts_updated(self, timestamp: int, result: Any) -> None:
        member = self.member
        self._reach(SYN_S)
        self.world.sleep(self.world.random.uniform(0.0, member.cluster.slow_message_s))
        answered = SimpleNamespace(is_so=False)

        def take() -> None:
            member.note("hears of a change of hosts")
            for listener in [*member.listeners]:
                listener.on_hosts_updated(timestamp, result)
            answered.is_so = True
            self.world.wake_waiting()

        self.world.start(member.process, "notification", take)
        self.world.wait_for(lambda: answered.is_so or member.has_reset)
        if not answered.is_so:
            raise OSError("the connection was closed")
