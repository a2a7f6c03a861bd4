"""Hosts from the scheduler of this job: Slurm, LSF, PBS, or Kubernetes with the MPI Operator."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ringtrain.cluster.hosts import (
    Host,
    Mention,
    checked_name,
    collect,
    parse_hostfile,
    parse_number,
    read_hostfile,
    read_text,
    shown,
)
from ringtrain.errors import HostsError

MAX_HOSTS = 100_000
"""of a Slurm job: a few brackets can name more hosts than fit into memory"""
FIX = "name the hosts with --hostfile or -H"
NOT_READ = {"PE_HOSTFILE": "SGE", "FLUX_JOB_ID": "Flux", "COBALT_NODEFILE": "Cobalt", "OAR_NODEFILE": "OAR"}
"""variable of a job of several hosts, and its scheduler, which is not supported"""


def find(
    environment: Mapping[str, str], kubernetes_folder: Path = Path("/etc/mpi")
) -> tuple[tuple[Host, ...], str] | None:
    """Hosts of the scheduler whose job this is, and their source; None outside any scheduler.

    Traces of one scheduler can exist in a job of another: an exported variable, a compatibility layer, a directory in
    an image. Each scheduler therefore gets a score, and the highest wins: 1 for a running job, 2 for a list of hosts (a
    variable that is set, a file that exists), 1 for the slots per host. In a tie the first in SCHEDULERS wins. The
    winner's information must be complete: otherwise HostsError names the variable or file, without a silent fallback.
    """
    scores = {name: score(environment, kubernetes_folder) for name, (score, _) in SCHEDULERS.items()}
    best = max(scores, key=lambda name: scores[name])
    if not scores[best]:
        for name, scheduler in NOT_READ.items():
            if environment.get(name):
                raise HostsError(f"{name}: this is a job of {scheduler}, whose hosts ringtrain does not read: {FIX}")
        return None
    hosts, source = SCHEDULERS[best][1](environment, kubernetes_folder)
    return hosts, f"{best}: {source}"


def expand(nodelist: str, where: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Host names of a Slurm node list such as "login,gpu[08-10,12]-ib[0-1]"; the last bracket changes fastest."""
    words = re.findall(r"(?:[^\[\],]|\[[^\[\]]*\])+", nodelist)
    if not words or ",".join(words) != nodelist:
        raise HostsError(f"{where}: got {shown(nodelist)}, expected names such as host1,gpu[08-10,12]")
    names: list[str] = []
    for word in words:
        literals, brackets = re.split(r"\[[^\]]*\]", word), re.findall(r"\[([^\]]*)\]", word)
        choices = [_numbers(bracket, where) for bracket in brackets]
        if len(names) + math.prod(map(len, choices)) > MAX_HOSTS:
            raise HostsError(f"{where}: got more than {MAX_HOSTS:,} hosts at {shown(word)}, expected fewer")
        for numbers in itertools.product(*choices):
            pairs = itertools.zip_longest(literals, numbers, fillvalue="")
            names.append(checked_name("".join(itertools.chain.from_iterable(pairs)), where))
    return tuple(names)


def _numbers(bracket: str, where: str) -> list[str]:
    """Numbers of a bracket: '08-10,12' is 08, 09, 10, 12."""
    numbers: list[str] = []
    for item in bracket.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or first > last:
            raise HostsError(f"{where}: got {shown(item)} in brackets, expected a number, or two that rise as in 08-10")
        if len(numbers) + last - first >= MAX_HOSTS:
            raise HostsError(f"{where}: got more than {MAX_HOSTS:,} hosts at {shown(bracket)}, expected fewer")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _score(job: object, hosts: object, slots: object) -> int:
    return bool(job) + 2 * bool(hosts) + bool(slots)


def _slurm_score(environment: Mapping[str, str], _: Path) -> int:
    return _score(*map(environment.get, ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")))


def _slurm(environment: Mapping[str, str], _: Path) -> tuple[tuple[Host, ...], str]:
    for name in ("SLURM_HET_SIZE", "SLURM_PACK_SIZE"):
        if environment.get(name):
            raise HostsError(
                f"{name}: a heterogeneous job of {shown(environment[name])} components, of which SLURM_JOB_NODELIST has"
                f" one: {FIX}"
            )
    names = expand(_needed(environment, "SLURM_JOB_NODELIST", "host[1-2]"))
    where = "SLURM_TASKS_PER_NODE"
    tasks: list[int] = []
    for item in _needed(environment, where, "4(x2),3").split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,9})\))?", item)
        if not match or not 1 <= int(match[2] or 1) <= MAX_HOSTS - len(tasks):
            raise HostsError(f"{where}: got {shown(item)}, expected tasks of each node such as 4(x2),3")
        tasks += [parse_number(match[1], where)] * int(match[2] or 1)
    if len(tasks) != len(names):
        # srun describes a step only: the rest of the allocation is not known in it.
        fix = FIX
        if "SLURM_STEP_NODELIST" in environment:
            fix = f"this is a step of srun on {len(tasks)} of them: start it outside of srun, or {FIX}"
        raise HostsError(
            f"{where}: got tasks of {len(tasks)} nodes, expected {len(names)} as in SLURM_JOB_NODELIST: {fix}"
        )
    mentions = (Mention("SLURM_JOB_NODELIST", name, slots) for name, slots in zip(names, tasks, strict=True))
    return collect(mentions, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE"


def _pbs_score(environment: Mapping[str, str], _: Path) -> int:
    there = _names_a_file(environment, "PBS_NODEFILE")
    return _score(environment.get("PBS_JOBID"), there, there)


def _lsf_score(environment: Mapping[str, str], _: Path) -> int:
    there = _names_a_file(environment, "LSB_DJOB_HOSTFILE") or environment.get("LSB_MCPU_HOSTS")
    return _score(environment.get("LSB_JOBID"), there, there)


def _lsf(environment: Mapping[str, str], _: Path) -> tuple[tuple[Host, ...], str]:
    where = "LSB_MCPU_HOSTS"
    if _names_a_file(environment, "LSB_DJOB_HOSTFILE") or where not in environment:
        hosts, source = _read_named_file(environment, "LSB_DJOB_HOSTFILE")
        return _without_batch_host(hosts, environment), source
    words = environment[where].split()
    if len(words) % 2:
        raise HostsError(f"{where}: got {len(words)} words, expected pairs of host and slots such as host1 4 host2 4")
    pairs = zip(words[::2], words[1::2], strict=True)
    mentions = (Mention(where, checked_name(name, where), parse_number(slots, where)) for name, slots in pairs)
    return _without_batch_host(collect(mentions, where), environment), where


def _without_batch_host(hosts: tuple[Host, ...], environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Compute hosts. IBM's CSM lists the host of the job script first, with one slot; it has no GPUs."""
    listed = "CSM_ALLOCATION_ID" in environment and len(hosts) > 1 and hosts[0].slots == 1
    return hosts[1:] if listed else hosts


def _kubernetes_score(environment: Mapping[str, str], folder: Path) -> int:
    hostfile, script = os.path.isfile(folder / "hostfile"), os.path.isfile(folder / "discover_hosts.sh")
    return _score(environment.get("K_MPI_JOB_ROLE") == "launcher", hostfile or script, hostfile)


def _kubernetes(environment: Mapping[str, str], folder: Path) -> tuple[tuple[Host, ...], str]:
    """Hosts of the hostfile, which names all workers; else of the script with the running ones (parsed, not run)."""
    path, script = folder / "hostfile", folder / "discover_hosts.sh"
    if os.path.isfile(path) or not os.path.isfile(script):
        hosts = read_hostfile(path)
    else:
        path, lines = script, []
        for number, line in enumerate(read_text(script).split("\n"), start=1):
            match = re.fullmatch(r"\s*(?:#.*|echo\s+(\S+)\s*)?", line)
            if not match:
                raise HostsError(f"{script}:{number}: got {shown(line)}, expected 'echo host:4'")
            lines.append(match[1] or "")
        hosts = parse_hostfile("\n".join(lines), str(script))
    # Older operators omit the number of slots from their files, and set a variable of Open MPI.
    variable = "OMPI_MCA_orte_set_default_slots"
    text = environment.get(variable)
    if text and all(host.slots == 1 for host in hosts):
        slots = parse_number(text, variable)
        return tuple(replace(host, slots=slots) for host in hosts), f"{path} and {variable}"
    return hosts, str(path)


Score = Callable[[Mapping[str, str], Path], int]
Read = Callable[[Mapping[str, str], Path], tuple[tuple[Host, ...], str]]

SCHEDULERS: Mapping[str, tuple[Score, Read]] = {
    "Slurm": (_slurm_score, _slurm),
    "LSF": (_lsf_score, _lsf),
    "PBS": (_pbs_score, lambda environment, _: _read_named_file(environment, "PBS_NODEFILE")),
    "Kubernetes": (_kubernetes_score, _kubernetes),
}


def _needed(environment: Mapping[str, str], name: str, example: str) -> str:
    if not environment.get(name):
        raise HostsError(
            f"{name}: not set, though other variables say that a job is running: expected {example}: {FIX}"
        )
    return environment[name]


def _names_a_file(environment: Mapping[str, str], name: str) -> bool:
    return os.path.isfile(environment.get(name, ""))


def _read_named_file(environment: Mapping[str, str], name: str) -> tuple[tuple[Host, ...], str]:
    path = Path(_needed(environment, name, "the path of a file with a host per line"))
    try:
        return read_hostfile(path), name
    except HostsError as error:
        raise HostsError(f"{name}: {error}") from error
