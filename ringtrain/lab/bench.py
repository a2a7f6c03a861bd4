"""What `ringtrain bench` starts on every rank: python -m ringtrain.lab.bench train --turns 7."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ringtrain import stderr
from ringtrain.errors import RingtrainError

BENCHES = ("train", "allreduce")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one measurement.

    Args:
        argv: one of BENCHES, and its options; None: sys.argv.
    """
    what, *options = sys.argv[1:] if argv is None else argv
    stderr.watch()  # before TensorFlow is loaded, which talks
    try:
        if what == "train":
            from ringtrain.lab import speed

            return speed.main(options)
        from ringtrain.lab import allreduce

        return allreduce.main(options)
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
