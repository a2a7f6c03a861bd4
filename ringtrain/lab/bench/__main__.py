"""Entry point of `ringtrain bench` on every rank: python -m ringtrain.lab.bench train --turns 7 --out FILE."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ringtrain.errors import RingtrainError
from ringtrain.run import log_capture

PARTS = {
    "train": "bench.train_on_ranks",
    "peer": "bench.peers_on_ranks",
    "allreduce": "bench.allreduce_on_ranks",
    "checkpoint": "bench.checkpoint_on_ranks",
    "input": "bench.input_on_ranks",
    "tune": "tune.measure",
    "ensemble": "sweep.ensemble",
}
"""on-rank parts, and the modules of ringtrain.lab whose main(words) runs them"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one measurement; argv is a name of PARTS and its options, None: sys.argv."""
    name, *words = sys.argv[1:] if argv is None else argv
    log_capture.watch()  # before TensorFlow is loaded, which logs messages
    try:
        return importlib.import_module(f"ringtrain.lab.{PARTS[name]}").main(words)
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
