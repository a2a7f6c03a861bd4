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


def logged(folder: str, rank_variable: str, reason: str) -> Flag:
    """Words before a rank's command that copy what it writes to folder/rank.N/stdout and stderr.

    Args:
        folder: on the rank's host.
        rank_variable: with the rank's number.
        reason: for the reader.
    """
    return words("bash", "-c", SCRIPT, folder, rank_variable, because=reason)
