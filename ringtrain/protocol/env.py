"""Environment variables of a job (RINGTRAIN_*), and the shell line that each rank starts with."""

from __future__ import annotations

JOB = "RINGTRAIN_JOB"
"""variable with the job's id, which every process of the job inherits"""
PLAN = "RINGTRAIN_PLAN"
"""variable with the plan as JSON"""
ATTEMPT = "RINGTRAIN_ATTEMPT"
"""variable with what came of earlier starts of the job, as JSON"""
FIRST_PROCESS = "RINGTRAIN_FIRST_PROCESS"
"""variable with the id of the process that a rank's command was started as"""
HOST_SLOTS = "RINGTRAIN_HOST_SLOTS"
"""variable with the slots of a host that several jobs share, each on some of them; none of them has the terminal"""
FEED = "RINGTRAIN_FEED"
"""variable of a rank that is fed its samples: a pipe's descriptor, rank, size, numbers of samples and of classes"""
COLLECTIVES = "RINGTRAIN_COLLECTIVES"
"""variable with what ranks talk to each other by: mpi4py, else Horovod"""
ALONE = "nothing"
"""a value of it: training is this rank's alone, the others serve it"""
SERVERS = "RINGTRAIN_SERVERS"
"""variable with the number of ranks that hold weights, where the launcher was told one"""
MARK = "ringtrain-report"
# A rank's number, in the words of a shell: each launcher has its own name for it.
OWN_RANK = "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${HOROVOD_RANK:-${PMIX_RANK:-$SLURM_PROCID}}}}"
# Runs a rank's command, in the same process, after a line that says where: one write, so that no other rank's line
# comes in between. Each dialect of MPI has its own names for the same three numbers.
STARTER = (
    f"printf '{MARK}:%s:seat:%s:%s:%s:%s:%s\\n' \"${JOB}\""
    f' "{OWN_RANK}"'
    ' "${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${HOROVOD_SIZE:-$SLURM_NTASKS}}}"'
    ' "${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${HOROVOD_LOCAL_RANK:-$SLURM_LOCALID}}}"'
    f' $$ "$(uname -n)" >&2; export {FIRST_PROCESS}=$$; exec "$@"'
)
