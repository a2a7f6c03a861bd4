"""A rank that stands by: loads TensorFlow, waits until its attempt begins, and runs the script.

python -m ringtrain.standby own.py --epochs 3

`ringtrain launch --standby` starts it so while the attempt before is still running. It uses no device while it waits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ringtrain.protocol import as_main, gate


def main(argv: Sequence[str]) -> None:
    """Runs the script that a command line names, once the gate is open."""
    launcher = os.getppid()
    as_main.search_as(argv)
    # Not ringtrain.hvd: a script's options decide first by which library its ranks talk.
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import ringtrain.keras_fit  # noqa: F401

    gate.wait(launcher)
    as_main.run(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
