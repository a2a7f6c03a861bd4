"""Slurm: srun, and a script for sbatch that calls it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from ringtrain.cluster import job as jobs
from ringtrain.cluster.environment import Setting, as_mapping, names_for_ranks, settings
from ringtrain.cluster.job import MAX_WORD_LETTERS, Flag, Job, Plan, add_file, check, check_names, words
from ringtrain.cluster.plans.openmpi import INCLUDED, check_interfaces
from ringtrain.cluster.plans.rank_start import WAITING_SCRIPT, logged, reported
from ringtrain.errors import LaunchError
from ringtrain.protocol.launchers import RANK_VARIABLES

HOME = ("HOME", "LANG", "LOGNAME", "SHELL", "TMPDIR", "USER")
SAVED = (128 + 10, 128 + 15)
"""exit codes of ranks that saved and exited at SIGUSR1 and SIGTERM"""
NOTICE_S = 120
"""before the time limit, for ranks to save"""


def srun(job: Job, program: str = "srun") -> Plan:
    """Command that starts a job in an allocation; without hosts Slurm places the ranks."""
    check(job)
    check_names(job.hosts, "srun")
    values, reasons = as_mapping([*settings(job), *_settings(job)])
    files: dict[str, str] = {}
    flags = [
        words(program, because="starts ranks in this allocation"),
        words("--ntasks", job.num_ranks, because=jobs.NUM_RANKS),
        *_placement(job, values, reasons, files),
        words("--mpi=pmix", because="how ranks find each other; srun --mpi=list shows what there is"),
        words("--kill-on-bad-exit=1", because="one rank that fails ends the job: the others would wait for ever"),
        words("--label", because=jobs.TAGGED),
    ]
    if job.bind == "core":
        because = f"each rank has {job.cores_per_rank} cores of its own (--bind core)"
        flags.append(words("--cpu-bind=cores", f"--cpus-per-task={job.cores_per_rank}", because=because))
    else:
        flags.append(words("--cpu-bind=none", because=jobs.ALL_CORES))
    if job.working_directory:
        flags.append(words("--chdir", job.working_directory, because=jobs.FOLDER))
    if job.environment:
        flags.append(_export(job, values, "variables that ranks get, by name: no value is on the command line"))
    else:
        because = "variables set here; otherwise ranks get only those given to sbatch"
        flags.append(words("--export=ALL", because=because))
    if job.output:
        flags.append(logged(job.output, RANK_VARIABLES["Slurm"].rank, jobs.LOGGED, WAITING_SCRIPT))
    return Plan((*flags, *reported(job)), job.command, values, reasons, files)


def sbatch(job: Job) -> Plan:
    """Command that submits a job, and its script. Hosts are requested by name; for localhost or none, Slurm chooses."""
    check(job)
    hosts = tuple(host for host in job.hosts if host.name != "localhost")
    check_names(hosts, "sbatch")
    if len({host.slots for host in hosts}) > 1:
        raise LaunchError(
            "sbatch starts the same number of ranks on each host: choose hosts with the same slots, or --launcher srun"
        )
    files: dict[str, str] = {}
    path = add_file(files, job, "job.sbatch", _script(replace(job, hosts=hosts)))
    flags = [words("sbatch", because="submits the job to Slurm")]
    if job.environment:
        flags.append(_export(job, HOME, "variables that the job gets, by name: Slurm would keep a copy of all of them"))
    if job.working_directory:
        flags.append(words("--chdir", job.working_directory, because="working directory of the job, on every host"))
    if job.output:
        pattern = f"{job.output.replace('%', '%%')}/slurm-%j.log"
        flags.append(words("--output", pattern, because="output of all ranks; a requeued job appends to it"))
    flags.append(words(path, because="the script"))
    return Plan(tuple(flags), (), files=files)


def _placement(job: Job, values: dict[str, str], reasons: dict[str, str], files: dict[str, str]) -> Iterator[Flag]:
    if not job.hosts:
        return
    yield words("--nodes", len(job.hosts), because="hosts in all")
    if len({host.slots for host in job.hosts}) > 1:
        text = "".join(f"{host.name}\n" * host.slots for host in job.hosts)
        values["SLURM_HOSTFILE"] = add_file(files, job, "tasks.txt", text)
        reasons["SLURM_HOSTFILE"] = "a line with the host of each rank, since they take different numbers"
        yield words("--distribution=arbitrary", because="ranks go where SLURM_HOSTFILE has them")
        return
    names = ",".join(host.name for host in job.hosts)
    if len(names) > MAX_WORD_LETTERS:
        names = add_file(files, job, "hosts.txt", names.replace(",", "\n") + "\n")
    yield words("--nodelist", names, because="hosts")
    yield words("--ntasks-per-node", job.hosts[0].slots, because="ranks that each host takes")
    yield words("--distribution=block", because="ranks fill a host before the next")


def _settings(job: Job) -> Iterator[Setting]:
    """Options of Open MPI as environment variables, since there is no mpirun."""
    because = "Slurm's PMIx offers munge as well, which Open MPI from PyPI lacks, and says so on every rank"
    yield Setting("PMIX_MCA_psec", "^munge", because)
    because = "with Slurm's other barriers a rank may get messages before it is ready, and crash in MPI_Init"
    yield Setting("SLURM_PMIX_FENCE", "ring", because)
    if job.network == "ucx":
        yield Setting("OMPI_MCA_pml", "ucx", jobs.UCX)
    else:
        yield Setting("OMPI_MCA_pml", "ob1", "Open MPI: shared memory on a host, TCP between hosts")
        if job.subnet:
            check_interfaces(job)
            yield Setting(f"OMPI_MCA_{INCLUDED}", job.subnet, "by subnet: interface names differ between hosts")
    if job.yield_when_idle:
        yield Setting("OMPI_MCA_mpi_yield_when_idle", "1", jobs.YIELDS)


def _export(job: Job, also: dict[str, str] | tuple[str, ...], reason: str) -> Flag:
    here = [name for name in HOME if name in job.environment]
    given = [name for name in also if name not in HOME]
    names = sorted({*names_for_ranks(job, {}), *here, *given})
    return words(f"--export={','.join(names)}", because=reason)


def _script(job: Job) -> str:
    """Script that sbatch submits; it can also be edited and submitted by hand."""
    # The allocation's own hosts and environment, and the directory given to sbatch.
    inner = srun(replace(job, hosts=(), environment={}, forward=(), working_directory="", id=""))
    lines = ["#!/usr/bin/env bash", *_header(job), ""]
    lines += ["# Ranks save and exit at SIGUSR1 and SIGTERM; they resume when the job runs again."]
    for name, value in inner.env.items():
        lines.append(f"export {name}={shlex.quote(value)}  # {_in_line(inner.env_reasons[name])}")
    lines.append("launch=(")
    for flag in inner.flags:
        lines.append(f"    {shlex.join(flag.words)}  # {_in_line(flag.reason)}")
    lines += [f"    {shlex.join(inner.command)}", ")"]
    codes = " || ".join(f"code == {code}" for code in SAVED)
    lines += [
        "",
        "launcher= signalled=",
        "pass_on() {",
        "    signalled=yes",
        '    [[ -z $launcher ]] || kill -s USR1 "$launcher"  # at SIGTERM srun would kill the ranks',
        "}",
        "trap pass_on USR1 TERM",
        '"${launch[@]}" &',
        "launcher=$!",
        'while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; done  # a signal ends wait, not the launcher',
        'wait "$launcher"',
        "code=$?",
        "# Not after scancel or the time limit itself: Slurm is ending the job then.",
        'state() { squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T; }',
        f"if [[ -n $signalled ]] && (({codes})) && [[ $(state) == RUNNING ]]; then",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _header(job: Job) -> Iterator[str]:
    asked: dict[str, str | int] = {
        "job-name": "ringtrain",
        "nodes": len(job.hosts),
        "nodelist": ",".join(host.name for host in job.hosts),
        "ntasks": job.num_ranks,
        "ntasks-per-node": job.hosts[0].slots if job.hosts else 0,
        "cpus-per-task": job.threads_per_rank,
        "signal": f"B:USR1@{NOTICE_S}",
        "open-mode": "append",
    }
    for option, value in asked.items():
        if value:
            yield f"#SBATCH --{option}={value}"
    yield "#SBATCH --requeue"
    yield "# On GPUs, one for each rank of a node, also: --gpus-per-node=4"


def _in_line(text: str) -> str:
    return " ".join(text.split())
