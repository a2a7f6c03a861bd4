"""How a bench starts its parts on ranks, one after the other, and hears what they measured."""

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
    """Runs a part of a bench on ranks, with the launcher, hosts and flags of the command line."""

    def __call__(
        self, words: Sequence[str], num_ranks: int, environ: Mapping[str, str] = {}, launcher: str = ""
    ) -> Any:
        """Runs `python -m ringtrain.lab.bench WORDS` on ranks, and waits for it.

        Args:
            words: the part's name and options; `--out FILE` is added, which rank 0 has to write by figures.write.
            num_ranks: how many; 0: as the command line says, else as many as there are slots.

        Returns:
            What rank 0 gave to figures.write as results.

        Raises:
            LaunchError: a rank failed, or wrote nothing; its words are on standard error.
        """


def starter(options: argparse.Namespace, launch: Callable[[argparse.Namespace], int]) -> Start:
    """Starts what the command line of a bench asks for.

    Args:
        options: of the bench, those of launch among them.
    """

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
            if code in ASKED_TO_STOP:  # and so are the starts that would follow
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
