"""A log per rank where the launcher keeps none, or shows nothing while it does."""

from __future__ import annotations

from ringtrain.cluster.job import Flag, words

# Runs a rank's command, in the same process, and keeps a copy of its output; $0: the folder, $1: the rank's variable.
# Launchers signal all processes of a rank: the copying ones stay until the rank itself has ended.
SCRIPT = (
    'folder=$0/rank.${!1}; shift; mkdir -p -- "$folder" || exit;'
    " keep() { trap '' HUP INT QUIT TERM USR1 USR2; exec tee -- \"$1\"; };"
    ' exec > >(keep "$folder/stdout") 2> >(keep "$folder/stderr" >&2); exec "$@"'
)
# The same for Slurm, which kills what lives on when a rank's first process has ended, the last words with it: so that
# process waits. A trap that does nothing outlives signals and is not handed down to the rank, as being deaf would be.
WAITING_SCRIPT = (
    'folder=$0/rank.${!1}; shift; mkdir -p -- "$folder" || exit;'
    " keep() { trap '' HUP INT QUIT TERM USR1 USR2; exec tee ${SLURM_RESTART_COUNT:+-a} -- \"$1\"; };"
    " stay() { trap : HUP INT QUIT TERM USR1 USR2; }; stay; exec 3>&1;"
    ' { stay; "$@" 3>&- | keep "$folder/stdout" >&3; exit "${PIPESTATUS[0]}"; } 2>&1 | keep "$folder/stderr" >&2;'
    ' exit "${PIPESTATUS[0]}"'
)


def logged(folder: str, rank_variable: str, reason: str, script: str = SCRIPT) -> Flag:
    """Words before a rank's command that copy what it writes to folder/rank.N/stdout and stderr.

    Args:
        script: SCRIPT, or WAITING_SCRIPT where the launcher signals every process of a rank, not the first alone.
    """
    return words("bash", "-c", script, folder, rank_variable, because=reason)
