"""A log per rank for launchers that keep none, or show nothing while they keep it."""

from __future__ import annotations

from ringtrain.cluster.job import Flag, words

# Runs a rank's command in the same process, and copies its output; $0: directory, $1: name of the rank's variable.
# Launchers signal all processes of a rank: the copying ones ignore it and stay until the rank itself has exited.
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
    """Arguments before a rank's command that copy its output to folder/rank.N/stdout and stderr.

    script: WAITING_SCRIPT if the launcher signals every process of a rank, not only the first.
    """
    return words("bash", "-c", script, folder, rank_variable, because=reason)
