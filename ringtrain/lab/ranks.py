"""Calls a function on ranks that ringtrain launch starts, and returns its result."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.restart import ASKED_TO_STOP
from ringtrain.config.options import options_of, words_of
from ringtrain.errors import LaunchError, RingtrainError
from ringtrain.lab.commands import ON_RANKS
from ringtrain.protocol.failures import report
from ringtrain.protocol.launchers import launched_rank
from ringtrain.training import log_capture


def launch_words(launch: LaunchOptions, left_out: Collection[str]) -> list[str]:
    """Options that repeat these where a command starts ringtrain launch itself."""
    repeated = {name: value for name, value in vars(launch).items() if name not in left_out}
    return words_of(options_of(*ON_RANKS), repeated)


def call(launch: LaunchOptions, function: str, *args: Any) -> Any:
    """Calls module:function on every rank of one start and returns rank 0's result; JSON holds arguments and result."""
    from ringtrain.cluster.launch import launch as start

    with tempfile.TemporaryDirectory(prefix="ringtrain-bench-") as folder:
        out = Path(folder, "out.json")
        command = ("python", "-m", "ringtrain.lab.ranks", function, json.dumps(args), str(out))
        code = start(replace(launch, command=command))
        if code in ASKED_TO_STOP:  # a signal also cancels the following starts
            raise SystemExit(code)
        if code:
            raise LaunchError(f"ranks exited with code {code}, see above")
        if not out.exists():
            raise LaunchError(
                f"{folder} on rank 0's host is not this one: start from that host, or set TMPDIR to a folder that both"
                " see"
            )
        return json.loads(out.read_text(encoding="utf-8"))


def main(argv: Sequence[str]) -> int:
    """Entry point on ranks: calls module:function with arguments in a JSON word; rank 0 writes the result."""
    function, args, out = argv
    log_capture.watch()  # before TensorFlow is loaded, which logs messages
    report("init", launched_rank() or 0)  # some benches compare other ways to meet
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*json.loads(args))
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2
    if not launched_rank():
        Path(out).write_text(json.dumps(result), encoding="utf-8")
    if not {"horovod", "mpi4py"} & set(sys.modules):  # else MPI must be finalized
        sys.stdout.flush()
        os._exit(0)  # TensorFlow's servers may keep a process from exiting
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
