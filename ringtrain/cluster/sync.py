"""`ringtrain launch --sync`: sends the project, and the environment if asked, to the job's other hosts by rsync.

A plan per host and folder says what is sent; `send` runs the plans before ranks start.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtrain.cluster import host_agent, processes
from ringtrain.cluster.agents import HostsLost, listed
from ringtrain.cluster.hosts import Host, count
from ringtrain.cluster.job import Flag, Plan, words
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.errors import LaunchError

LEFT_OUT: tuple[str, ...] = ("/runs", ".git", ".venv", "__pycache__")
"""of the project, as rsync's rules; a leading slash means its top folder"""
SYSTEM_PREFIXES = ("/", "/usr", "/usr/local")
"""of Pythons that belong to a host's system"""
MAX_CONNECTIONS = 16
VANISHED = 24
"""rsync's exit code if files were removed here while it ran"""
NOT_FOUND = 127
TIMED_OUT = (30, 35)
SSH_FAILED = 255
TICK_S = 0.05


@dataclass(frozen=True)
class Folder:
    path: str
    reason: str
    left_out: tuple[str, ...] = ()
    is_project: bool = False
    may_delete: bool = True
    """--sync-delete applies: nothing else uses the folder"""


@dataclass(frozen=True)
class Transfer:
    """One folder for one host."""

    host: str
    folder: Folder
    plan: Plan


def transfers(options: LaunchOptions, hosts: Iterable[Host]) -> list[Transfer]:
    """Transfers that the options ask for: to every host but this one. Raises LaunchError for folders not to send."""
    if not (options.sync or options.sync_environment):
        return []
    folders = [project(Path.cwd(), Path(sys.prefix), os.path.expanduser("~"))]
    if options.sync_environment:
        folders += environment(sys.prefix, sys.base_prefix)
    names = [host.name for host in hosts]
    here = host_agent.here(names)
    others = [name for name in dict.fromkeys(names) if name not in here]
    return [Transfer(host, folder, plan(host, folder, options)) for host in others for folder in folders]


def project(folder: Path, prefix: Path, home: str) -> Folder:
    """The folder in which ringtrain was called. Raises LaunchError for the home folder and those above it."""
    if folder in (Path(home), *Path(home).parents):
        raise LaunchError(
            f"got --sync in {folder}, which holds more than a project: call it in the project's own folder"
        )
    left_out = LEFT_OUT
    if folder in prefix.parents and prefix.name != ".venv":
        left_out = (*LEFT_OUT, f"/{prefix.relative_to(folder)}")
    return Folder(str(folder), "the project: the folder in which ranks start", left_out, is_project=True)


def environment(prefix: str, base_prefix: str) -> list[Folder]:
    """This Python's environment, and the Python it was made from unless that is the system's. Raises LaunchError."""
    if prefix in SYSTEM_PREFIXES:
        raise LaunchError(
            f"got --sync-environment, and ringtrain runs in the system's Python ({prefix}): install it in an"
            f" environment of its own (python3 -m venv), or leave the option out"
        )
    folders = [Folder(prefix, "the environment that ringtrain runs in")]
    if base_prefix not in (prefix, *SYSTEM_PREFIXES):
        reason = "the Python that the environment was made from"
        folders.append(Folder(base_prefix, reason, may_delete=False))
    return folders


def plan(host: str, folder: Folder, options: LaunchOptions) -> Plan:
    """rsync of one folder to one host, to the same path."""
    timeout_s = max(1, int(options.start_timeout))
    flags = [
        words("rsync", "-a", because="times, modes and links as here; what has not changed is not sent"),
        words("-s", because="paths may have any characters"),
        words("--mkpath", because="makes the folder there"),
        words(f"--timeout={timeout_s}", because="ends if nothing moves for so many seconds (--start-timeout)"),
        words("-e", shlex.join(host_agent.ssh(timeout_s, options.ssh_port)), because="ssh as host agents use it"),
    ]
    if options.sync_delete and folder.may_delete:
        flags.append(words("--delete-after", because="deletes there what is not here (--sync-delete)"))
    flags += rules(folder)
    address = f"[{host}]" if ":" in host else host
    flags.append(words(f"{folder.path}/", f"{address}:{folder.path}/", because=folder.reason))
    return Plan(tuple(flags), ())


def rules(folder: Folder) -> list[Flag]:
    """Flags that say what is neither sent nor deleted. The first rule that matches a file counts."""
    if not folder.is_project:
        return []
    return [
        words("-F", because="rules of your own, from files .rsync-filter, come first"),
        *(words(f"--exclude={rule}", because="not sent, not deleted") for rule in folder.left_out),
        words("--filter=:- .gitignore", because="nor is what a .gitignore names"),
    ]


def explain(chosen: Sequence[Transfer]) -> list[tuple[str, str]]:
    """Rows of flags and reasons for the first host, and the names of the others."""
    if not chosen:
        return []
    first = chosen[0].host
    rows = []
    for transfer in chosen:
        if transfer.host == first:
            rows += [(shlex.join(flag.words), flag.reason) for flag in transfer.plan.flags]
    hosts = dict.fromkeys(transfer.host for transfer in chosen)
    others = [host for host in hosts if host != first]
    if others:
        rows.append((listed(others), "the same, at the same time"))
    return rows


def send(chosen: Sequence[Transfer], is_elastic: bool) -> None:
    """Runs the transfers, MAX_CONNECTIONS at a time. Raises HostsLost, after all others, with the hosts that failed."""
    if not chosen:
        processes.say("nothing to sync: all ranks run on this host")
        return
    if not shutil.which("rsync"):
        raise LaunchError("no rsync on this host: install it (apt-get install rsync), or leave out --sync")
    start_s = time.monotonic()
    folders = ", ".join(dict.fromkeys(transfer.folder.path for transfer in chosen))
    hosts = dict.fromkeys(transfer.host for transfer in chosen)
    processes.say(f"sending {folders} to {count(len(hosts), 'other host')}")
    failures = run(chosen)
    if failures:
        raise HostsLost([*failures], f"not synced: {listed([*failures.values()])}")
    processes.say(f"sent in {time.monotonic() - start_s:.1f} s")
    if is_elastic:
        processes.say("hosts that join later do not get these files: sync them before, by a launch that names them")


def run(chosen: Sequence[Transfer]) -> dict[str, str]:
    """Runs transfers and returns why they failed, by host."""
    waiting, running = deque(chosen), list[tuple[subprocess.Popen[bytes], Transfer, Path]]()
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="ringtrain-") as logs:
        try:
            while waiting or running:
                while waiting and len(running) < MAX_CONNECTIONS:
                    transfer, log = waiting.popleft(), Path(logs, str(len(waiting)))
                    process = processes.start_beside(transfer.plan.argv, os.environ, log)
                    running.append((process, transfer, log))
                time.sleep(TICK_S)
                for ended in [entry for entry in running if entry[0].poll() is not None]:
                    running.remove(ended)
                    process, transfer, log = ended
                    if process.returncode not in (0, VANISHED):
                        text = log.read_text(encoding="utf-8", errors="replace")
                        failures.setdefault(transfer.host, why_failed(transfer, process.returncode, text))
        finally:
            for process, _, _ in running:
                process.terminate()
                process.wait()
    return failures


def why_failed(transfer: Transfer, code: int, text: str) -> str:
    """Message about a host: rsync's or ssh's own line, and what to do."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = f"rsync exited with code {code}"
    for line in lines:
        if not line.startswith("rsync error:") and "connection unexpectedly closed" not in line:
            reason = line
    host = transfer.host
    if code == NOT_FOUND or "rsync: command not found" in text:
        return f"{host} has no rsync: install it there (apt-get install rsync)"
    if "unknown option" in text:
        return f"{host}: {reason}: rsync 3.2.3 or later is needed, here and there"
    if code in TIMED_OUT:
        return f"{host}: {transfer.folder.path}: {reason}: check the network, or raise --start-timeout"
    if code == SSH_FAILED or reason.startswith("ssh: "):  # by timing, rsync has an error of its own first
        return f"{host} does not answer: {reason}: see ringtrain doctor -H {host}"
    return f"{host}: {transfer.folder.path} could not be sent: {reason}"
