"""Starts the on-rank parts of a bench one after the other and reads their results."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ringtrain.cluster.restart import ASKED_TO_STOP
from ringtrain.errors import LaunchError
from ringtrain.lab import stats


class Start(Protocol):
    """Starts an on-rank part of a bench with the launcher, hosts and flags of the command line."""

    def __call__(
        self, words: Sequence[str], num_ranks: int, environ: Mapping[str, str] = {}, launcher: str = ""
    ) -> Any:
        """Runs `python -m ringtrain.lab.bench WORDS` on ranks; returns what rank 0 wrote with stats.write.

        Args:
            words: Name and options of the part; `--out FILE` is added.
            num_ranks: 0: `-np` of the command line, else all slots.

        Raises:
            LaunchError: A rank failed or wrote no results; its output is on standard error.
        """


def starter(options: argparse.Namespace, launch: Callable[[argparse.Namespace], int]) -> Start:
    """Returns a function that starts bench parts with the given command-line options, which include those of launch."""

    def start(words: Sequence[str], num_ranks: int, environ: Mapping[str, str] = {}, launcher: str = "") -> Any:
        own, told = stats.split(words)
        with tempfile.TemporaryDirectory(prefix="ringtrain-bench-") as folder:
            out = Path(folder, "out.json")
            command = ["python", "-m", "ringtrain.lab.bench", *own, "--out", str(out), "--", *told]
            changed = {
                "command": command,
                "np": num_ranks or options.np,
                "environ": dict(environ),
                "launcher": launcher or options.launcher,
            }
            code = launch(argparse.Namespace(**{**vars(options), **changed}))
            if code in ASKED_TO_STOP:  # a signal also cancels the following starts
                raise SystemExit(code)
            if not code and not out.exists():
                raise LaunchError(
                    f"{folder} on rank 0's host is not this one: start from that host, or set TMPDIR to a"
                    f" folder that both see"
                )
            if code:
                raise LaunchError(f"bench {words[0]} ended with {code} on its ranks, see above")
            return json.loads(out.read_text(encoding="utf-8"))["results"]

    return start
