"""Functions that every rank calls in one start, each with its outcome in a file."""

from __future__ import annotations

import faulthandler
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import ringtrain.hvd as hvd


def call_each(
    names: Sequence[str], function_of: Callable[[str], Callable[[], object]], folder: Path, limit_s: float
) -> None:
    """Calls functions by name. Each leaves folder/NAME: empty if it has returned, else the traceback.

    A rank on which one takes longer than the limit prints its stacks and exits, and the launcher ends the others.
    """
    folder.mkdir(parents=True)
    for name in names:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            function_of(name)()
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        (folder / name).write_text(outcome)
        hvd.allgather_object(name, name="next_function")
    faulthandler.cancel_dump_traceback_later()
