"""Horovod's own launcher, horovodrun, with its network services restricted.

    python3 -m ringtrain.cluster.horovod_driver --export PATH,PYTHONPATH -np 4 ...     options as horovodrun's

As released, horovodrun listens on all interfaces without authentication and unpickles what it receives, starts
services whose key is on command lines, connects to hosts of any key, and writes the environment on command lines.
Here it listens on one interface, every request carries a secret, no service looks for interfaces, ssh checks host keys,
and ranks on other hosts read their environment from ssh's standard input.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import shlex
import socketserver
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ringtrain.cluster import elastic, host_agent, processes, rank_process
from ringtrain.cluster.doctor.software import horovod_operations
from ringtrain.errors import LaunchError
from ringtrain.protocol import services
from ringtrain.protocol.env import SLOT
from ringtrain.protocol.failures import report

CONNECT_TIMEOUT_S = 10
MAX_VALUE_BYTES = 1 << 24
"""for one rank's addresses, about 150 bytes per other rank"""
# On another host, with the environment on standard input. sshd waits for all processes that hold the rank's output:
# those of its process group are killed where it fails. In the background, SIGINT would be ignored.
REMOTE = (
    'eval "$(cat)"; exec 3>&1;'
    " said=$(setsid sh -c 'echo $$; exec >&3 3>&-; exec \"$@\"' rank %s; echo $?);"
    ' set -- $said; [ "$2" = 0 ] || kill -s KILL -- "-$1" 2>/dev/null; exit "$2"'
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs horovodrun's command line, with up to two options before it, in this order.

    `--grace S`: seconds after which ranks over Gloo are killed if they stay after another has ended. `--export
    NAME,...`: names of the variables for ranks on other hosts.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    values = {"--grace": "", "--export": ""}
    for option in values:
        if words[:1] == [option]:
            values[option], words = words[1], words[2:]
    sys.argv[1:] = words
    from horovod.runner import launch

    install({name for name in values["--export"].split(",") if name}, float(values["--grace"] or 0))
    try:
        launch.run_commandline()
    except LaunchError as error:
        processes.say(str(error))
        sys.exit(2)
    except RuntimeError as error:
        if not str(error).startswith("Horovod detected that"):  # a rank failed
            raise
        sys.exit(elastic.readable(str(error)))


def install(exported: set[str], grace_s: float = 0.0) -> None:
    """Replaces what Horovod's launcher does otherwise. grace_s 0: the job is elastic, or over MPI."""
    from horovod.runner import gloo_run, launch, mpi_run
    from horovod.runner.common.util import env, safe_shell_exec
    from horovod.runner.driver import driver_service
    from horovod.runner.util import remote

    operations = horovod_operations({})
    if operations is not None:  # Horovod would load TensorFlow to ask its library
        launch.mpi_built = lambda verbose=False: "MPI" in operations
        launch.gloo_built = lambda verbose=False: "Gloo" in operations
    env.is_exportable = exported.__contains__
    mpi_run.env_util.is_exportable = exported.__contains__
    remote.SSH_COMMAND_PREFIX = shlex.join(host_agent.ssh(CONNECT_TIMEOUT_S))
    driver_service.get_common_interfaces = common_interfaces
    elastic.install()
    rendezvous = make_rendezvous()
    gloo_run.RendezvousServer = rendezvous
    exported_values: dict[str, str] = {}
    horovod_values: dict[str, str] = {}

    def rank_values() -> dict[str, str]:
        """Environment of all ranks; Horovod's own variables override the user's."""
        return {**exported_values, "PYTHONUNBUFFERED": "1", **horovod_values}

    def run_command(command: Sequence[str], address: str, nics: Any, port: object, elastic: bool = False) -> str:
        """Ranks' command without values: Horovod's own variables are sent with the environment."""
        at = rendezvous.opened.listen(address)
        horovod_values.update({k: str(v) for k, v in gloo_run.create_run_env_vars(at, nics, "", elastic).items()})
        horovod_values["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(rendezvous.opened.port)
        return shlex.join(command)

    def slot_command(command: str, environ: dict[str, str]) -> Any:
        """Function that returns the command of one rank from its slot."""
        exported_values.update({name: value for name, value in environ.items() if name in exported})

        def of_slot(slot: Any) -> str:
            variables = [f"{name}={value}" for name, value in rendezvous.opened.variables(slot).items()]
            return f"env {shlex.join(variables)} {command}"

        return of_slot

    def remote_command(command: str, **where: Any) -> str:
        """Command line of ssh for a command in quotes."""
        (text,) = shlex.split(command)
        folder, _, rank = text.partition(" ; ")
        inner = shlex.join(["sh", "-c", f"{folder}; {REMOTE % rank}"])
        ssh: str = remote.get_ssh_command(shlex.quote(inner), **where)
        return ssh

    def execute_rank(command: str, **options: Any) -> int:
        return run_rank(shlex.split(command), rank_values(), grace_s, **options)

    safe_shell_exec.execute = execute
    gloo_run.get_run_command = run_command
    gloo_run._slot_info_to_command_fn = slot_command
    gloo_run.get_remote_command = remote_command
    gloo_run.safe_shell_exec = SimpleNamespace(execute=execute_rank)


def run_rank(argv: Sequence[str], values: Mapping[str, str], grace_s: float, **options: Any) -> int:
    """Runs a rank here, or its ssh. Reports that it has exited by itself, or that its ssh was killed."""
    given, after_s = "", grace_s or rank_process.GRACE_S
    is_remote = argv[0] == "ssh"
    if is_remote:
        given = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
        after_s = grace_s
    code = rank_process.run(argv, {**os.environ, **values}, given=given, grace_s=after_s, **options)
    if grace_s and code == 0:
        report("left", options["index"])
    elif grace_s and is_remote and code < 0:
        report("cut", options["index"], -code, "", times=2)
    return code if code >= 0 else 128 - code


def execute(command: str, env: Mapping[str, str] | None = None, **options: Any) -> int:
    """In place of Horovod's `safe_shell_exec.execute`."""
    code = rank_process.run(["sh", "-c", command], os.environ if env is None else env, **options)
    return code if code >= 0 else 128 - code


def common_interfaces(settings: Any, hosts: Sequence[str], remote_hosts: Any = None, cache: Any = None) -> set[str]:
    """Interfaces of the ranks: those asked for, else the one that leads from here to the first other host."""
    from horovod.runner.driver import driver_service

    if settings.nics:
        return set(settings.nics)
    hosts = list(dict.fromkeys(map(elastic.host_of, hosts)))
    others = remote_hosts
    if remote_hosts is None:
        others = driver_service.network.filter_local_addresses(hosts)
    if not others:
        return set(driver_service.get_local_interfaces(settings))
    for host in others:
        for name in (ssh_name(host), host):
            with contextlib.suppress(OSError):
                address = host_agent.source_address(name)
                interface = services.interface_of(address)
                if not interface:
                    raise LaunchError(f"no interface has the address {address}: give --network-interface")
                return {interface}
    raise LaunchError(f"{', '.join(others[:10])}: no IPv4 address found from here: give --network-interface NAME")


def ssh_name(host: str) -> str:
    """Name or address that ssh connects to for a host: HostName in ~/.ssh/config, or the host's own name."""
    with contextlib.suppress(LaunchError):
        for line in processes.call(["ssh", "-G", "--", host], CONNECT_TIMEOUT_S).splitlines():
            if line.startswith("hostname "):
                return line.split()[1]
    return host


def slot(host: str, rank: int, local_rank: int, size: int) -> Any:
    """Placement of a rank, as the rendezvous takes it: it computes the rest itself."""
    from horovod.runner.common.util.hosts import SlotInfo

    return SlotInfo(host, rank, local_rank, cross_rank=0, size=size, local_size=0, cross_size=0)


def make_rendezvous() -> Any:
    """Class of Horovod's rendezvous server that listens on one address and requires a secret in requests."""
    from horovod.runner import gloo_run
    from horovod.runner.http import http_server

    class Server(services.Server, http_server.RendezvousHTTPServer):
        def server_bind(self) -> None:
            """Does nothing until `open`: the address is not known yet."""

        def server_activate(self) -> None:
            """Does nothing until `open`."""

        def open(self, address: str) -> None:
            self.server_address = (address, 0)
            socketserver.TCPServer.server_bind(self)
            socketserver.TCPServer.server_activate(self)

    class Rendezvous(http_server.RendezvousServer):
        opened: Any = None

        def start(self, handler_cls: Any = http_server.RendezvousHandler) -> int:
            """Prepares the server; `listen` opens it."""
            self.token = secrets.token_urlsafe(32)
            self.names: list[str] = []
            self._httpd = Server(("", 0), guarded(handler_cls, self.token, self.names), self._verbose)
            type(self).opened = self
            return 0

        def init(self, slots: Sequence[Any]) -> None:
            """Called with the placement of ranks at the start, and after each change."""
            self.placement = elastic.placement(slots)
            super().init(list(self.placement.values()))

        def variables(self, slot: Any) -> dict[str, str]:
            """Variables of one rank, of which none is secret."""
            values: dict[str, str] = gloo_run.create_slot_env_vars(self.placement[slot.hostname, slot.local_rank])
            if elastic.MARK in slot.hostname:
                if slot.hostname not in self.names:
                    self.names.append(slot.hostname)
                # In place of the port, which ranks append to the secret.
                values["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(self.names.index(slot.hostname))
                values[SLOT] = str(elastic.number_of(slot.hostname))
            return values

        def listen(self, address: str, reached: str = "") -> str:
            """Opens the server on one address; returns HOROVOD_GLOO_RENDEZVOUS_ADDR. reached: Its address for ranks."""
            self._httpd.open(address)
            self._listen_thread = http_server.in_thread(self._httpd.serve_forever)
            # Ranks append ":PORT/SCOPE/KEY", which gives a path that begins with the secret.
            return f"{reached or address}:{self.port}/{self.token}"

        @property
        def port(self) -> int:
            return int(self._httpd.server_address[1])

        def stop(self) -> None:
            if self._listen_thread is not None:
                super().stop()

    return Rendezvous


def guarded(handler: Any, token: str, names: Sequence[str] = ()) -> Any:
    """Subclass of a request handler that requires a secret at the beginning of each path, before it reads on."""
    prefix = f"/{token}:".encode()

    class Guarded(handler):
        path: str

        def parse_request(self) -> bool:
            path = [*self.raw_requestline.split(), b"", b""][1]
            if not hmac.compare_digest(path[: len(prefix)], prefix):
                self.requestline, self.request_version = "", "HTTP/1.0"
                return self._refuse(403)
            if not super().parse_request():
                return False
            first, *rest = self.path.removeprefix("/").split("/")
            number, length = first.partition(":")[2], self.headers.get("Content-Length", "0")
            is_right = len(rest) == 2 and number.isdecimal() and length.isdecimal()
            if not is_right or int(length) > MAX_VALUE_BYTES:
                return self._refuse(400)
            # A rank knows its host and local rank only, which since a change may be those of another slot.
            if rest[0] in elastic.SCOPES and int(number) < len(names):
                rest[1] = f"{names[int(number)]}:0"
            self.path = "/" + "/".join(rest)
            return True

        def _refuse(self, status: int) -> bool:
            self.close_connection = True
            self.send_status_code(status)
            return False

    return Guarded


if __name__ == "__main__":
    main()
