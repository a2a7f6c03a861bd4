"""A store whose large files wait for a file GATE, and a rank that leaves the last copy of a run to it at SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem  # noqa: TID251 - its test skips without

from ringtrain.run import checkpoint, mirror


class Gated(LocalFileSystem):
    """Local file system; `gate` is an option, as a store's credentials are, known to the rank's memory alone."""

    cachable = False

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        while lpath.endswith("state.npz") and not Path(self.storage_options["gate"]).exists():
            time.sleep(0.05)
        super().put_file(lpath, rpath, **options)


def main() -> None:
    """Rank 0 copies when it gets SIGTERM; the other one waits."""
    folder, grace_s = Path(sys.argv[2]), float(sys.argv[3])
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    mirror.store_of = lambda url: (Gated(gate=str(folder / "gate")), url)
    copy = mirror.Mirror(str(folder / "there"), "r") if rank == "0" else None
    (folder / f"rank-{rank}").write_text(str(os.getpid()))
    print("begun", flush=True)
    while not signals:
        time.sleep(0.05)
    if copy:
        run = folder / "r"
        (run / "logs").mkdir(parents=True)
        (run / "checkpoints").mkdir()
        checkpoint.save(run / "checkpoints", 7, {"state": {"w": np.zeros(3)}, "ranks": {}}, {"metrics": {}})
        copy.leave(run, time.monotonic() + grace_s)
        copy.finish(run)
        copy.close()
    else:
        time.sleep(60)
    sys.exit(143)


def train() -> None:
    """The command that trains, with a mirror in this store."""
    from ringtrain import train

    mirror.store_of = lambda url: (Gated(gate=sys.argv[2]), url)
    sys.exit(train.main(sys.argv[3:]))
