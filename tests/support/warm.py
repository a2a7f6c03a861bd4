"""A Python that has loaded ringtrain's libraries and forks for each start, so that ranks begin without their imports.

python -I -S tests/support/warm.py SOCKET PROGRAM [ARGUMENT ...]     runs `python PROGRAM ...` in a fork of the server

PROGRAM is -m and a module, -c and a text, or a file. A fork is a process of its own, under the launcher that started
the caller: nothing of one run is left in the next. It has the caller's environment, folder, stdin, stdout and stderr.
The caller passes signals on to it, ends as it does, and takes it along when it is killed itself.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def call(path: str, argv: list[str]) -> int:
    """Has the server run a program in place of this process; returns its exit code, or ends by the same signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until the program is known
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], (0, 1, 2))
        server.sendall(request)
        program = answer(server)
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: os.kill(program, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = os.waitstatus_to_exitcode(answer(server))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return code


def answer(server: socket.socket) -> int:
    """Number on the server's next line."""
    line = b""
    while not line.endswith(b"\n"):
        if select.select([server], [], [], 0.2)[0]:  # a signal just before a system call does not interrupt it
            line += server.recv(1) or b"\n"  # the server has gone: int raises ValueError
    return int(line)


def serve(path: str) -> list[str]:
    """Answers calls until standard input is closed; returns, in a fork for each call, its program and arguments."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            if sys.stdin in ready:
                os._exit(0)
            caller, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return begin(caller)
            caller.close()


def begin(caller: socket.socket) -> list[str]:
    """Forks the program, where this returns; the other process tells the caller of its end, or ends it."""
    size, files, _, _ = socket.recv_fds(caller, 4, 3)
    request = json.loads(caller.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    program = os.fork()
    if program:
        caller.sendall(b"%d\n" % program)
        for file in files:
            os.close(file)
        if caller in select.select([caller, os.pidfd_open(program)], [], [])[0]:
            os.kill(program, signal.SIGKILL)  # the caller was killed
        caller.send(b"%d\n" % os.waitpid(program, 0)[1], socket.MSG_NOSIGNAL)
        os._exit(0)
    caller.close()
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    return request["argv"]


def load() -> None:
    """Imports what training imports, but for Horovod and ringtrain, which not every run loads alike."""
    import importlib

    for name in ("tensorflow", "keras", "h5py", "psutil", "ringtrain.train", "sklearn.datasets"):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ringtrain"]:
        del sys.modules[name]
    gc.freeze()  # else each fork would copy what its collector looks at


def run(argv: list[str]) -> None:
    """Runs a program as `python PROGRAM ...` does."""
    import runpy
    import types

    program, *arguments = argv
    first = {"-m": os.getcwd(), "-c": ""}.get(program, os.path.dirname(os.path.abspath(program)))
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if program == "-c":
        text, sys.argv = arguments[0], ["-c", *arguments[1:]]
    else:
        main.__file__ = program
        with open(program) as file:
            text, sys.argv = file.read(), argv
    exec(compile(text, main.__dict__.get("__file__", "<string>"), "exec"), main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] != "serve":
        raise SystemExit(call(sys.argv[1], sys.argv[2:]))
    load()
    run(serve(sys.argv[2]))
