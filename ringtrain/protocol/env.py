"""Environment variables of a job (RINGTRAIN_*), and the shell line that each rank starts with."""

from __future__ import annotations

JOB = "RINGTRAIN_JOB"
"""ID of the job, inherited by all its processes"""
PLAN = "RINGTRAIN_PLAN"
"""planned placement as JSON"""
ATTEMPT = "RINGTRAIN_ATTEMPT"
"""number of the attempt and exit causes of earlier ones, as JSON"""
FIRST_PROCESS = "RINGTRAIN_FIRST_PROCESS"
"""ID of the process that a rank's command was started as"""
HOST_SLOTS = "RINGTRAIN_HOST_SLOTS"
"""slots of a host that several jobs share, each on some of them; none of these jobs uses the terminal"""
FEED = "RINGTRAIN_FEED"
"""for a rank whose rows Spark streams: descriptor of a pipe, rank, size, number of samples and of classes"""
COLLECTIVES = "RINGTRAIN_COLLECTIVES"
"""library of the ranks' collectives: mpi4py, else Horovod"""
ALONE = "nothing"
"""value of COLLECTIVES if this rank trains alone and the others serve it"""
SERVERS = "RINGTRAIN_SERVERS"
"""number of parameter-server ranks, if the launcher was given one"""
MARK = "ringtrain-report"
# Rank as a shell expression: each launcher sets another variable.
OWN_RANK = "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${HOROVOD_RANK:-${PMIX_RANK:-$SLURM_PROCID}}}}"
# Prints a line with the rank's placement and runs its command in the same process. The line is one write, so that
# lines of other ranks do not mix with it. Each MPI has its own names for the same three numbers.
STARTER = (
    f"printf '{MARK}:%s:seat:%s:%s:%s:%s:%s\\n' \"${JOB}\""
    f' "{OWN_RANK}"'
    ' "${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${HOROVOD_SIZE:-$SLURM_NTASKS}}}"'
    ' "${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${HOROVOD_LOCAL_RANK:-$SLURM_LOCALID}}}"'
    f' $$ "$(uname -n)" >&2; export {FIRST_PROCESS}=$$; exec "$@"'
)
