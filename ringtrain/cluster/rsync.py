"""`ringtrain launch --sync`: sends the project, and the environment if asked, to the job's other hosts by rsync.

A plan per host and folder says what is sent; `send` runs the plans before ranks start.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtrain.cluster import host_agent, processes
from ringtrain.cluster.agents import HostsLost, listed
from ringtrain.cluster.hosts import Host, count
from ringtrain.cluster.job import Plan, words
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.errors import LaunchError

LEFT_OUT = ("/runs", ".git", ".venv", "__pycache__")
"""of the project, as rsync's rules; a leading slash means its top folder"""
SYSTEM_PREFIXES = ("/", "/usr", "/usr/local")
"""of Pythons that belong to a host's system"""
MAX_CONNECTIONS = 16
VANISHED = 24
"""rsync's exit code if files were removed here while it ran"""


@dataclass(frozen=True)
class Transfer:
    """One folder for one host."""

    host: str
    plan: Plan


def transfers(options: LaunchOptions, hosts: Iterable[Host]) -> list[Transfer]:
    """Transfers that the options ask for: to every host but this one. Raises LaunchError for folders not to send."""
    if not (options.sync or options.sync_environment):
        return []
    folders = {str(Path.cwd()): project_rules(Path.cwd(), Path(sys.prefix), os.path.expanduser("~"))}
    if options.sync_environment:
        folders |= dict.fromkeys(environment(sys.prefix, sys.base_prefix), ())
    names = [host.name for host in hosts]
    here = host_agent.here(names)
    others = [name for name in dict.fromkeys(names) if name not in here]
    return [Transfer(host, plan(host, *folder, options)) for host in others for folder in folders.items()]


def project_rules(folder: Path, prefix: Path, home: str) -> tuple[str, ...]:
    """Returns what is not sent of the working directory. Raises LaunchError for the home and those above it."""
    if folder in (Path(home), *Path(home).parents):
        raise LaunchError(
            f"got --sync in {folder}, which holds more than a project: call it in the project's own folder"
        )
    if folder in prefix.parents and prefix.name != ".venv":
        return (*LEFT_OUT, f"/{prefix.relative_to(folder)}")
    return LEFT_OUT


def environment(prefix: str, base_prefix: str) -> list[str]:
    """This Python's environment, and the Python it was made from unless that is the system's. Raises LaunchError."""
    if prefix in SYSTEM_PREFIXES:
        raise LaunchError(
            f"got --sync-environment, and ringtrain runs in the system's Python ({prefix}): install it in an"
            f" environment of its own (python3 -m venv), or leave the option out"
        )
    return [prefix] if base_prefix in (prefix, *SYSTEM_PREFIXES) else [prefix, base_prefix]


def plan(host: str, folder: str, left_out: Sequence[str], options: LaunchOptions) -> Plan:
    """rsync of one folder to one host, to the same path. left_out: Rules of a project; empty: all is sent."""
    timeout_s = max(1, int(options.start_timeout))
    flags = [
        words("rsync", "-a", because="times, modes and links as here; what has not changed is not sent"),
        words("-s", because="paths may have any characters"),
        words("--mkpath", because="makes the folder there"),
        words(f"--timeout={timeout_s}", because="ends if nothing moves for so many seconds (--start-timeout)"),
        words("-e", shlex.join(host_agent.ssh(timeout_s, options.ssh_port)), because="ssh as host agents use it"),
    ]
    if left_out:
        flags.append(words("-F", because="rules of your own, from files .rsync-filter, come first"))
        flags += [words(f"--exclude={rule}", because="not sent") for rule in left_out]
        flags.append(words("--filter=:- .gitignore", because="nor is what a .gitignore names"))
    address = f"[{host}]" if ":" in host else host
    flags.append(words(f"{folder}/", f"{address}:{folder}/", because="sent to every other host, to the same path"))
    return Plan(tuple(flags), ())


def explain(chosen: Sequence[Transfer]) -> list[tuple[str, str]]:
    """Rows of flags and reasons for the first host."""
    flags = [flag for transfer in chosen if transfer.host == chosen[0].host for flag in transfer.plan.flags]
    return [(shlex.join(flag.words), flag.reason) for flag in flags]


def send(chosen: Sequence[Transfer]) -> None:
    """Runs the transfers, MAX_CONNECTIONS at a time. Raises HostsLost, after all others, with the hosts that failed."""
    if not chosen:
        processes.say("nothing to sync: all ranks run on this host")
        return
    if not shutil.which("rsync"):
        raise LaunchError("no rsync on this host: install it (apt-get install rsync), or leave out --sync")
    folders = ", ".join(dict.fromkeys(transfer.plan.argv[-2] for transfer in chosen))
    hosts = dict.fromkeys(transfer.host for transfer in chosen)
    processes.say(f"sending {folders} to {count(len(hosts), 'other host')}")
    failures: dict[str, str] = {}
    for first in range(0, len(chosen), MAX_CONNECTIONS):
        some = chosen[first : first + MAX_CONNECTIONS]
        running = [processes.start_beside(transfer.plan.argv, os.environ) for transfer in some]
        try:
            for transfer, process in zip(some, running, strict=True):
                output, _ = process.communicate()
                if process.returncode not in (0, VANISHED):
                    text = output.decode(errors="replace")
                    failures.setdefault(transfer.host, why_failed(transfer, process.returncode, text))
        finally:
            for process in running:
                process.terminate()
    if failures:
        raise HostsLost([*failures], f"not synced: {listed([*failures.values()])}")


def why_failed(transfer: Transfer, code: int, text: str) -> str:
    """Message about a host: rsync's or ssh's own line, and what to do."""
    reason = f"rsync exited with code {code}"
    for line in filter(None, map(str.strip, text.splitlines())):
        if not line.startswith("rsync error:") and "connection unexpectedly closed" not in line:
            reason = line
    host = transfer.host
    return (
        f"{host}: {transfer.plan.argv[-2]} was not sent: {reason}: rsync 3.2.3 is needed here and there, and ssh: see"
        f" ringtrain doctor -H {host}"
    )
