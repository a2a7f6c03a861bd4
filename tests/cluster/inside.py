"""What lab.py runs at the border of a host: its first process, and the one that brings a command in.

A standard-library program of its own, started by nsenter and unshare; nothing imports it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import termios
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
RELAYED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}


def hold() -> None:
    """Is a host's process 1: keeps the namespaces while the lab's owner lives, and ends them with it.

    Prints its process id as the machine counts: /proc is still the machine's at this moment.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what is orphaned on this host leaves no zombies
    print(os.readlink("/proc/self"), flush=True)
    sys.stdin.read()  # ends when the owner closes its end, or is killed; the kernel then ends the whole host


def enter(folder: str, argv: Sequence[str]) -> None:
    """Runs a command as a process of the host, in a session of its own, and ends as it ends.

    A namespace of processes is entered by a child only. This parent passes signals on to it, and takes it along when it
    is killed itself, so that the lab's user may treat the parent as if it were the command.

    Args:
        folder: where the command starts.
        argv: the command.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, RELAYED | {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        # Python ignores the first two, and a shell the others in what it starts in the background.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        try:
            os.chdir(folder)
            os.execvp(argv[0], list(argv))
        except OSError as error:
            print(f"{argv[0]}: {error}", file=sys.stderr, flush=True)
            os._exit(127)
    os.closerange(0, 3)  # so that a reader sees the end of the output when the host's processes are gone
    while True:
        received = signal.sigwait(RELAYED | {signal.SIGCHLD})
        if received != signal.SIGCHLD:
            os.kill(child, received)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            continue
        if os.WIFSIGNALED(status):
            with_signal = os.WTERMSIG(status)
            if with_signal != signal.SIGKILL:
                signal.signal(with_signal, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {with_signal})
            os.kill(os.getpid(), with_signal)
        os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    if sys.argv[1:] == ["hold"]:
        hold()
    else:
        enter(sys.argv[1], sys.argv[2:])
