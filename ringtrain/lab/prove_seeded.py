"""Runs a script as `python` would, after it has seeded Python, NumPy and Keras and set the type of floats.

python -m ringtrain.lab.prove_seeded 1 float32 own.py --epochs 3
python -m ringtrain.lab.prove_seeded 1 float32 -m package.module
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ringtrain.protocol import as_main


def main(argv: Sequence[str]) -> None:
    """Runs the script that a command line names."""
    import keras

    seed, floatx, program, *words = argv
    keras.utils.set_random_seed(int(seed))
    if floatx != keras.config.floatx():
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(floatx)
    as_main.run([program, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
