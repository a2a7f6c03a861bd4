"""Arguments before a rank's command: the report of its placement, and a log per rank where the launcher keeps none."""

from __future__ import annotations

from ringtrain.cluster.job import Flag, Job, words
from ringtrain.protocol.env import STARTER
from ringtrain.protocol.launchers import in_shell

BIND_NOW = "LD_BIND_NOW"
# Runs a rank's command in the same process, and copies its output; $0: directory, $1: name of the rank's variable.
# A signal may reach all processes of a rank: the copying ones ignore it and stay until the rank itself has exited.
SCRIPT = (
    'folder=$0/rank.${!1}; shift; mkdir -p -- "$folder" || exit;'
    " keep() { trap '' HUP INT QUIT TERM USR1 USR2; exec tee -- \"$1\"; };"
    ' exec > >(keep "$folder/stdout") 2> >(keep "$folder/stderr" >&2); exec "$@"'
)
# The same for Slurm, which kills all processes of a rank when its first one exits, and the last output would be lost:
# so that one waits. A trap with a no-op command survives signals; ignored signals would be inherited by the rank.
WAITING_SCRIPT = (
    'folder=$0/rank.${!1}; shift; mkdir -p -- "$folder" || exit;'
    " keep() { trap '' HUP INT QUIT TERM USR1 USR2; exec tee ${SLURM_RESTART_COUNT:+-a} -- \"$1\"; };"
    " stay() { trap : HUP INT QUIT TERM USR1 USR2; }; stay; exec 3>&1;"
    ' { stay; "$@" 3>&- | keep "$folder/stdout" >&3; exit "${PIPESTATUS[0]}"; } 2>&1 | keep "$folder/stderr" >&2;'
    ' exit "${PIPESTATUS[0]}"'
)


def logged(folder: str, rank_variable: str, reason: str, script: str = SCRIPT) -> Flag:
    """Arguments before a rank's command that copy its output to folder/rank.N/stdout and stderr."""
    return words("bash", "-c", script, folder, rank_variable, because=reason)


def reported(job: Job) -> list[Flag]:
    """Arguments before a rank's command: of its linker, and those by which it reports its placement if supervised."""
    flags = []
    if job.wheel_mpi and BIND_NOW not in job.environment:
        # Only for the rank: Slurm's srun, which mpirun starts in an allocation, does not start with it.
        because = "Open MPI finds its own functions, also if TensorFlow, which has some of the same names, is there"
        flags.append(words("env", f"{BIND_NOW}=1", because=because))
    if not job.id:
        return flags
    cases, first = [], 0
    for host in job.hosts:
        if host.indices:
            ranks = "|".join(str(rank) for rank in range(first, first + host.slots))
            # Chosen from the GPUs that the host's environment shows, if it is set there.
            shown = f"${{CUDA_VISIBLE_DEVICES-{','.join(map(str, range(max(host.indices) + 1)))}}}"
            fields = ",".join(str(index + 1) for index in host.indices)
            cases.append(f'{ranks}) export CUDA_VISIBLE_DEVICES="$(echo "{shown}" | cut -d, -f{fields})" ;;')
        first += host.slots
    script = STARTER
    if cases:
        script = f'case "{in_shell("rank")}" in {" ".join(cases)} esac; {STARTER}'
    gpus = "shows each rank the GPUs of its host's slots, then " if cases else ""
    because = f"{gpus}reports each rank's placement to ringtrain launch, and becomes the command"
    return [*flags, words("sh", "-c", script, "rank", because=because)]
