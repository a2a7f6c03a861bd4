"""Command line of horovodrun over MPI, over Gloo, and elastic; horovod_driver.py starts and restricts it.

horovodrun composes a shell command as text: this module quotes or refuses the parts that it would leave unquoted. Ranks
of this host inherit its environment, so variables that ranks must not get are removed before it starts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from ringtrain.cluster import job as jobs
from ringtrain.cluster.environment import as_mapping, clean_start, names_for_ranks, settings
from ringtrain.cluster.job import MAX_WORD_LETTERS, Flag, Job, Plan, check, check_names, words
from ringtrain.cluster.plans import openmpi
from ringtrain.cluster.plans.rank_start import reported
from ringtrain.errors import LaunchError

PLAIN_PATH = re.compile(r"[A-Za-z0-9_@%+=:,./-]*")
DRIVER = "ringtrain.cluster.horovod_driver"
GLOO_TIMEOUT, GLOO_TIMEOUT_S = "HOROVOD_GLOO_TIMEOUT_SECONDS", 60


def plan(
    job: Job,
    gloo: bool = False,
    dialect: str = "openmpi4",  # key of mpirun.DIALECTS for the mpirun that it will find
    start_timeout_s: int = 60,
    interface: str = "",
    python: str = "python3",
) -> Plan:
    """Command that starts a job by horovodrun."""
    _check(job)
    if not gloo and dialect != "openmpi4":
        raise LaunchError(
            f"horovodrun over MPI supports Open MPI 4 only, and this is {dialect}: use --launcher horovodrun-gloo or"
            f" mpirun"
        )
    name, where = job.own_interfaces
    if not gloo and name == openmpi.EXCLUDED:
        raise LaunchError(
            f"{where}, but horovodrun gives mpirun {openmpi.INCLUDED}, which Open MPI does not take beside it: unset"
            f" it, or use --launcher mpirun"
        )
    listed = ",".join(map(str, job.hosts))
    if len(listed) > MAX_WORD_LETTERS:
        raise LaunchError(f"{len(job.hosts)} hosts are too many for horovodrun's command line: use --launcher mpirun")
    hosts = words(
        "-H", listed, because="hosts, each with the ranks it takes; its reader of hostfiles knows one form only"
    )
    return _plan(job, gloo, [hosts], interface, start_timeout_s, {}, python)


def elastic(
    job: Job,
    *,
    min_ranks: int,
    max_ranks: int,
    first_ranks: int = 0,  # slots with which it starts, if more are not available yet; 0: the job's number of ranks
    discovery: str = "",  # program whose output, lines host:slots, the launcher writes to a file; "": the job's hosts
    interface: str = "",
    start_timeout_s: int = 60,
    cooldown_s: tuple[int, int] = (0, 0),
    python: str = "python3",
) -> Plan:
    """Command that starts an elastic job over Gloo."""
    _check(job)
    first_ranks = min(first_ranks or job.num_ranks, job.num_ranks)
    if not 1 <= min_ranks <= first_ranks <= max_ranks:
        raise LaunchError(
            f"got {min_ranks} ranks at least, {first_ranks} to begin with and {max_ranks} at most, expected them in"
            f" this order, from 1 on"
        )
    if len(job.hosts) < 2 and not interface:
        raise LaunchError(
            "got one host: an elastic horovodrun waits for a second one to find the interface between them: name more"
            " hosts, or give --network-interface (lo, if it stays on this host)"
        )
    files: dict[str, str] = {}
    text = "".join(f"{host}\n" for host in job.hosts)  # may change while the job runs
    path = jobs.add_file(files, job, "discovery.txt", text)
    source = f"printed by {shlex.quote(discovery)}" if discovery else "given"
    limits = [
        words("--min-np", min_ranks, because="with fewer slots it waits for hosts"),
        words("--max-np", max_ranks, because="slots beyond these are not used"),
        words(
            "--host-discovery-script",
            shlex.join(["cat", path]),
            because=f"run every second; ringtrain launch writes to this file which of the hosts {source} answer",
        ),
    ]
    # A slot is excluded for 2 to 3 times the first number, doubled each time, up to the second; zeros: for good.
    if any(cooldown_s):
        because = "seconds, shortest and longest, after which the slot of a rank that has failed is used again"
        limits.append(words("--blacklist-cooldown-range", *cooldown_s, because=because))
    return _plan(job, True, limits, interface, start_timeout_s, files, python, first_ranks)


def _check(job: Job) -> None:
    check(job)
    check_names(job.hosts, "horovodrun")
    if job.subnet:
        raise LaunchError(
            f"got --subnet {job.subnet}, but horovodrun chooses interfaces itself, by name: leave it out, or use"
            f" --launcher mpirun"
        )
    if job.network == "ucx":
        raise LaunchError("got --network ucx, but horovodrun runs MPI and Gloo over TCP: use --launcher mpirun")


def _plan(
    job: Job,
    gloo: bool,
    hosts: list[Flag],
    interface: str,
    start_timeout_s: int,
    files: dict[str, str],
    python: str,
    first_ranks: int = 0,
) -> Plan:
    if gloo:
        _check_gloo(job)
    values, reasons = as_mapping([*settings(job)])
    chosen = interface or "the interface that leads to the job's hosts"
    for name in ("NCCL_SOCKET_IFNAME", *(["HOROVOD_GLOO_IFACE"] if gloo else [])):
        if name not in reasons:
            reasons[name] = f"horovodrun sets it to {chosen}"
        elif gloo:  # mpirun keeps the value set here
            reasons[name] = f"horovodrun sets it to {chosen}, whatever is set here: see --network-interface"
    if first_ranks and GLOO_TIMEOUT not in job.environment:
        values[GLOO_TIMEOUT] = str(GLOO_TIMEOUT_S)
        reasons[GLOO_TIMEOUT] = "for ranks of a new host to load TensorFlow, while the others wait"
    because = "horovodrun, Horovod's launcher, with its services restricted to this job"
    # -P: modules of the folder that it is started in, such as a secrets.py, are the script's, not the driver's.
    driver = words(python, "-P", "-m", DRIVER, because=because)
    flags = [*clean_start(job, "horovodrun", job.working_directory), driver]
    if gloo and job.grace_s and not first_ranks:
        because = "seconds for ranks to save after another has ended (--grace)"
        flags.append(words("--grace", f"{job.grace_s:g}", because=because))
    names = names_for_ranks(job, values)
    if names:
        flags.append(words("--export", ",".join(names), because=jobs.BY_NAME))
    flags.append(words("-np", first_ranks or job.num_ranks, because=jobs.NUM_RANKS))
    flags += hosts
    if interface:
        flags.append(words("--network-interfaces", interface, because="as asked for (--network-interface)"))
    if gloo:
        flags.append(words("--gloo", because="Gloo, which needs no MPI"))
    else:
        flags.append(words("--mpi", because="MPI starts the ranks and transports their messages"))
    flags.append(words("--disable-cache", because="checks the hosts now: cached results are up to an hour old"))
    flags.append(words("--start-timeout", start_timeout_s, because="seconds for its check of the hosts"))
    if job.ssh_port:
        flags.append(words("-p", job.ssh_port, because="port of every host's sshd"))
    if job.output:
        folder = job.output if gloo else shlex.quote(job.output)
        flags.append(words("--output-filename", folder, because="keeps a log per rank"))
    if not gloo:
        flags += _mpi_arguments(job)
    return Plan((*flags, *reported(job)), job.command, values, reasons, files)


def _check_gloo(job: Job) -> None:
    """Refuses a binding, and a directory that other hosts' shells would run as a command."""
    if job.bind == "core":
        raise LaunchError("got --bind core, but over Gloo, horovodrun binds no ranks: leave it out, or use mpirun")
    folder = job.working_directory or job.environment.get("PWD", "")
    if len(job.hosts) > 1 and not PLAIN_PATH.fullmatch(folder):
        raise LaunchError(
            f"{shlex.quote(folder)}: over Gloo, horovodrun passes this directory unquoted to other hosts' shells: start"
            f" in one without spaces and special characters, or use --launcher mpirun"
        )


def _mpi_arguments(job: Job) -> Iterator[Flag]:
    """Arguments that horovodrun passes on to mpirun, through a shell."""
    # With a port, horovodrun itself passes options of ssh, which mpirun accepts once only.
    left_out = ("plm_rsh_no_tree", "plm_rsh_num", *(["plm_rsh_args"] if job.ssh_port else []))
    flags = [flag for flag in openmpi.control(job, openmpi.FOUR) if not flag.words[1].startswith(left_out)]
    if job.oversubscribe:
        flags.append(words("--oversubscribe", because="more ranks than slots are allowed, as asked for"))
    if flags:
        reasons = dict.fromkeys(flag.reason for flag in flags)
        text = shlex.join([word for flag in flags for word in flag.words])
        yield words(f"--mpi-args={text}", because=f"for mpirun: {'; '.join(reasons)}")
    if job.bind == "core":
        binding = shlex.join(["--bind-to", "core", "--map-by", f"slot:PE={job.cores_per_rank}"])
        yield words(f"--binding-args={binding}", because=f"each rank has {job.cores_per_rank} cores of its own")
