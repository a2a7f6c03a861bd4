"""Several hosts on this machine, for tests that need a cluster: each with its own name, address, processes and sshd.

    with Lab(2) as lab:
        lab.run("host1", ["ssh", "host2", "hostname"], timeout_s=60)

A host is a set of namespaces (network, host name, mounts, processes, shared memory) that its first process holds. A
bridge in a namespace of its own joins them; the machine's own network, /etc and ~/.ssh are not touched. Nothing has a
name outside: when the owner ends, even by SIGKILL, the kernel takes all of it away but a folder, and that goes at the
next start. Hosts share the disk, as in a cluster with a shared file system, except /run, /dev/shm and what `bind`
covers. Their home folder is the lab's own, with keys and known_hosts for ssh; a command over ssh finds a bare PATH and
no environment, as on a real host.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import launching

INSIDE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("inside.py"))]
WARM_SOCKET = "/run/ringtrain-warm"  # of each host its own
PREFIX = "ringtrain-lab-"
SUBNET = "10.77.0"  # inside the namespaces only, so that every lab may have the same
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = ["--net", "--uts", "--mount", "--ipc", "--pid"]
START_TIMEOUT_S = 60


def missing() -> str:
    """What this machine lacks for a lab, in words; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    tools = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "tc": "iproute2"}
    packages = sorted({package for tool, package in tools.items() if not shutil.which(tool, path=SYSTEM_PATH)})
    if packages:
        return f"apt-get install {' '.join(packages)}"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"the right to make namespaces ({tried.stderr.strip()})" if tried.returncode else ""


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Looks again and again until something is so.

    Raises:
        TimeoutError: it was not so in all the time; says what.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not after {timeout_s} s: {what}")
        time.sleep(0.02)


class Command(subprocess.Popen[str]):
    """A command on a host. Leaving its with block kills it: a test that fails in there does not wait for it."""

    def __exit__(self, *failure: Any) -> None:
        self.kill()
        super().__exit__(*failure)


class Lab:
    """Hosts named host1, host2, ...; see the module. A context manager."""

    def __init__(self, num_hosts: int, interfaces: Mapping[str, str] | None = None) -> None:
        """Describes the hosts; they are made on entering.

        Args:
            num_hosts: how many; at most 200.
            interfaces: the network interface's name on some hosts, where it is not eth0.
        """
        self.names = tuple(f"host{number}" for number in range(1, num_hosts + 1))
        self.interfaces = dict.fromkeys(self.names, "eth0") | dict(interfaces or {})
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._first: dict[str, int] = {}  # process 1 of each host and of the switch, as the machine counts
        self._servers: dict[int, Command] = {}  # of warm_python, by process as the machine counts

    def address(self, host: str) -> str:
        """The host's address."""
        return f"{SUBNET}.{self.names.index(host) + 1}"

    def __enter__(self) -> Lab:
        remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self.home = self.folder / "home"
        try:
            self._write_files()
            for name in ("switch", *self.names):
                self._hold(name)
            self._ip("switch", "link", "add", "bridge", "type", "bridge")
            self._ip("switch", "link", "set", "bridge", "up")
            for name in self.names:
                self._furnish(name)
                self.start_sshd(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.__exit__(None, None, None)
        self._servers.clear()
        for name, holder in self._holders.items():
            if name in self._first:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._first[name], signal.SIGKILL)  # and the kernel ends all others with process 1
            holder.stdin.close()
            holder.wait(START_TIMEOUT_S)
            holder.stdout.close()
        self._holders.clear()
        shutil.rmtree(self.folder)

    # Commands and processes.

    def run(
        self,
        host: str,
        argv: Sequence[str | Path],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: Path = launching.ROOT,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host and waits for it.

        Args:
            host: its name.
            argv: the command; found on PATH, this environment's bin first.
            timeout_s: after this many seconds every process on every host, but for their sshd, is killed.
            env: added to (and winning over) this process' environment, in which HOME is the lab's.
            cwd: folder to start in.

        Returns:
            The finished process, with stdout and stderr as text and whatever return code it had.

        Raises:
            TimeoutError: with the output so far.
        """
        with self.start(host, argv, env, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout_s)
            except BaseException as failure:
                process.kill()
                self.kill_processes(*self.names)
                stdout, stderr = process.communicate()
                if isinstance(failure, subprocess.TimeoutExpired):
                    command = " ".join(map(str, argv))
                    raise TimeoutError(
                        f"{host}: {command}: still running after {timeout_s} s, killed\n{stdout}\n{stderr}"
                    ) from None
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def start(
        self,
        host: str,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path = launching.ROOT,
        **options: Any,
    ) -> Command:
        """Starts a command on a host, in a session of its own. For the arguments see run.

        Args:
            options: of subprocess.Popen. A terminal given as stdin becomes the command's controlling terminal.

        Returns:
            A process that stands for the command: signals reach it, SIGKILL too, and its return code is the command's.
        """
        path = f"{launching.BIN}{os.pathsep}{SYSTEM_PATH}"
        full_env = os.environ | {"PATH": path, "HOME": str(self.home)} | dict(env or {})
        enter = ["nsenter", f"--target={self._first[host]}", *NAMESPACES, "--no-fork", "--"]
        return Command(
            [*enter, *INSIDE, str(cwd), *map(str, argv)],
            env=full_env,
            text=True,
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, **options},
        )

    def seen_from_here(self, host: str, path: Path | str) -> Path:
        """Path by which this machine reaches a file of a host, also one in /run and /dev/shm."""
        return Path(f"/proc/{self._first[host]}/root") / str(path).lstrip("/")

    def processes(self, host: str) -> dict[int, str]:
        """What lives on a host besides its process 1, its listening sshd and what warm_python starts: id, command line.

        The ids are this machine's, for os.kill. Sessions of sshd are among them, and whatever was started there, by
        whomever: a process cannot leave the namespace that it is recognized by.
        """
        own = {1, self._sshd_inside(host)}
        found = {}
        for process, inside in self._inside(host).items():
            with contextlib.suppress(OSError):  # it ended while we looked
                line = Path(f"/proc/{process}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
                if line and inside not in own:  # one that is ending has no command line any more
                    found[process] = line
        return {process: line for process, line in found.items() if process not in self._servers}

    def warm_python(self) -> list[str | Path]:
        """What stands for `python` where processes, on any host, are to fork from one that has loaded TensorFlow."""
        if not self._servers:
            serve = [sys.executable, launching.WARM, "serve", WARM_SOCKET]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            env = {"PYTHONPATH": str(launching.ROOT)}
            for name, server in [(name, self.start(name, serve, env, **pipes)) for name in self.names]:
                if server.stdout.readline() != "ready\n":
                    raise RuntimeError(f"{serve} on {name} has ended with {server.wait()}")
                self._servers |= {one: server for one, line in self.processes(name).items() if WARM_SOCKET in line}
        return [sys.executable, "-I", "-S", launching.WARM, WARM_SOCKET]

    def kill_processes(self, *hosts: str) -> None:
        """Kills what lives on some hosts, but not the hosts: their sshd goes on listening."""
        for host in hosts:

            def none_left(host: str = host) -> bool:
                left = self.processes(host)
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                return not left

            wait_for(none_left, START_TIMEOUT_S, f"no processes on {host}")

    # What can happen to a host.

    def export(self, **settings: str) -> None:
        """Sets what every command over ssh finds in its environment, as a person does: in ~/.bashrc. $ is expanded."""
        (self.home / ".bashrc").write_text("".join(f'export {name}="{value}"\n' for name, value in settings.items()))

    def limit(self, host: str, megabits_per_s: float | None) -> None:
        """Sets the rate of a host's link, the same in both directions; None: as fast as the machine is."""
        for place, interface in ((host, self.interfaces[host]), ("switch", host)):
            if megabits_per_s is None:
                self._at(place, "tc", "qdisc", "del", "dev", interface, "root")
                continue
            burst_bytes = int(max(32_768, megabits_per_s * 1e6 / 8 / 100))  # ten milliseconds
            rate = ["rate", f"{int(megabits_per_s * 1e6)}bit", "burst", str(burst_bytes), "latency", "100ms"]
            self._at(place, "tc", "qdisc", "replace", "dev", interface, "root", "tbf", *rate)

    def add_bridge(self, host: str, name: str, address: str) -> None:
        """Gives a host a bridge of its own, with one virtual machine's link on it, as libvirt and Docker do.

        Args:
            address: of the host in the bridge's network, such as 192.168.122.1/24.
        """
        for words in (
            f"link add {name} type bridge",
            f"link add {name}-in type veth peer name {name}-out",
            f"link set {name}-in master {name} up",
            f"link set {name}-out up",
            f"address add {address} dev {name}",
            f"link set {name} up",
        ):
            self._at(host, "ip", *words.split())

    def cut(self, host: str) -> None:
        """Takes a host off the network: no packet comes through, and nobody is told."""
        self._ip("switch", "link", "set", host, "nomaster")

    def restore(self, host: str) -> None:
        """Undoes cut."""
        self._ip("switch", "link", "set", host, "master", "bridge")

    def stop_sshd(self, host: str) -> None:
        """Ends a host's listening sshd; sessions that are open go on."""
        listening = {inside: process for process, inside in self._inside(host).items()}[self._sshd_inside(host)]
        os.kill(listening, signal.SIGTERM)
        wait_for(lambda: listening not in self._inside(host), START_TIMEOUT_S, f"sshd of {host} has ended")
        self._file(host, "pid").unlink(missing_ok=True)

    def start_sshd(self, host: str) -> None:
        """Starts a host's sshd, and waits until it listens."""
        sshd = shutil.which("sshd", path=SYSTEM_PATH)
        started = self.run(
            host, [sshd, "-f", self._file(host, "config"), "-E", self._file(host, "log")], START_TIMEOUT_S
        )
        if started.returncode:
            raise RuntimeError(f"sshd of {host}: {started.stderr}{self._file(host, 'log').read_text()}")
        wait_for(lambda: self._sshd_inside(host) > 0, START_TIMEOUT_S, f"sshd of {host} listens")

    def change_host_key(self, host: str) -> None:
        """Gives a host another key than the one that everybody knows it by."""
        self.stop_sshd(host)
        self._make_key(self._file(host, "key"))
        self.start_sshd(host)

    def bind(self, host: str, source: Path | str, target: Path | str) -> None:
        """Puts a folder over a folder, or a file over a file, on one host alone."""
        self._at(host, "mount", "--bind", str(source), str(target))

    # How a host is made.

    def _write_files(self) -> None:
        """Everything that hosts read: names, accounts, keys."""
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        hosts = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        # ssh and sshd take the home folder from here, whatever HOME says.
        accounts = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        root = f"root:x:0:0:root:{self.home}:/bin/bash"
        (self.folder / "passwd").write_text("\n".join([root, *accounts]) + "\n")
        (self.folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        self._make_key(self.home / ".ssh" / "id_ed25519")
        shutil.copy(self.home / ".ssh" / "id_ed25519.pub", self.home / ".ssh" / "authorized_keys")
        known = ""
        for name in self.names:
            self._make_key(self._file(name, "key"))
            known += f"{name},{self.address(name)} {self._file(name, 'key.pub').read_text()}"
            settings = {
                "ListenAddress": self.address(name),
                "HostKey": self._file(name, "key"),
                "PidFile": self._file(name, "pid"),
                "UsePAM": "no",
                "StrictModes": "no",
                "PasswordAuthentication": "no",
                "KbdInteractiveAuthentication": "no",
                "PermitRootLogin": "prohibit-password",
                "LogLevel": "VERBOSE",
            }
            self._file(name, "config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        (self.home / ".ssh" / "known_hosts").write_text(known)

    def _hold(self, name: str) -> None:
        """Makes the namespaces of a host (or the switch), and their first process."""
        said = self._file(name, "holder")
        with said.open("w") as errors:
            holder = self._holders[name] = subprocess.Popen(
                ["unshare", *NAMESPACES, "--fork", "--kill-child", "--", *INSIDE, "hold"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        first = holder.stdout.readline()
        if not first:
            raise RuntimeError(f"namespaces of {name}: {said.read_text()}")
        self._first[name] = int(first)

    def _furnish(self, name: str) -> None:
        """Gives a host its name, its files and its link to the switch."""
        interface, groups = self.interfaces[name], self.folder / "cgroup"
        groups.mkdir(exist_ok=True)
        self._ip(
            "switch", "link", "add", name, "type", "veth", "peer", "name", interface, "netns", str(self._first[name])
        )
        self._ip("switch", "link", "set", name, "master", "bridge", "up")
        commands = [
            ["hostname", name],
            ["mount", "-t", "proc", "proc", "/proc"],
            ["mount", "-t", "tmpfs", "tmpfs", "/run"],
            ["mkdir", "/run/sshd"],
            ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
            *(["mount", "--bind", self.folder / file, f"/etc/{file}"] for file in ("hosts", "passwd", "shadow")),
            # Its own network interfaces in /sys, but the machine's control groups.
            ["mount", "--rbind", "/sys/fs/cgroup", groups],
            ["mount", "-t", "sysfs", "sysfs", "/sys"],
            ["mount", "--rbind", groups, "/sys/fs/cgroup"],
            ["umount", "--recursive", "--lazy", groups],
            ["ip", "address", "add", f"{self.address(name)}/24", "dev", interface],
            ["ip", "link", "set", interface, "up"],
            ["ip", "link", "set", "lo", "up"],
        ]
        self._at(name, "sh", "-ec", "\n".join(shlex.join(map(str, command)) for command in commands))

    def _ip(self, place: str, *argv: str) -> None:
        # From outside the host's processes: ip link names another namespace by a process id of this machine.
        first = self._first[place]
        subprocess.run(["nsenter", f"--target={first}", "--net", "--", "ip", *argv], check=True)

    def _at(self, place: str, *argv: str) -> None:
        subprocess.run(["nsenter", f"--target={self._first[place]}", *NAMESPACES, "--", *argv], check=True)

    def _file(self, host: str, what: str) -> Path:
        return self.folder / f"{host}.{what}"

    def _make_key(self, file: Path) -> None:
        for old in (file, Path(f"{file}.pub")):
            old.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", file], check=True)

    def _sshd_inside(self, host: str) -> int:
        """The listening sshd, as its host counts processes; 0: there is none."""
        with contextlib.suppress(FileNotFoundError):
            return int(self._file(host, "pid").read_text() or 0)
        return 0

    def _inside(self, host: str) -> dict[int, int]:
        """The host's processes: as the machine counts, and as the host does."""
        found = {}
        own = os.readlink(f"/proc/{self._first[host]}/ns/pid")
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended while we looked
                if os.readlink(process / "ns" / "pid") == own:
                    numbers = next(x for x in (process / "status").read_text().splitlines() if x.startswith("NSpid:"))
                    found[int(process.name)] = int(numbers.split()[-1])
        return found


def remove_abandoned() -> None:
    """Removes the folders of labs whose owner is gone; their hosts went with it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
