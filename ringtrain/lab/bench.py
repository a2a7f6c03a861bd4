"""What `ringtrain bench` starts on every rank: python -m ringtrain.lab.bench train --turns 7."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ringtrain import stderr
from ringtrain.errors import RingtrainError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one measurement.

    Args:
        argv: train, and its options; None: sys.argv.
    """
    _, *options = sys.argv[1:] if argv is None else argv
    stderr.watch()  # before TensorFlow is loaded, which talks
    try:
        from ringtrain.lab import speed

        return speed.main(options)
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
