"""Runs the trainer with one command line after the other, each in a fork of this process.

python tests/support/each.py OUTPUT LINE [LINE ...]     LINE: a folder to start in, and the trainer's words; as JSON

Leaves the exit code, standard output and standard error of each in OUTPUT: 0-code, 0-1, 0-2, 1-code, ...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ringtrain import train


def main() -> None:
    output = Path(sys.argv[1])
    for number, line in enumerate(sys.argv[2:]):
        if os.fork() == 0:
            folder, *words = json.loads(line)
            os.chdir(folder)
            for stream in (1, 2):
                os.dup2(os.open(output / f"{number}-{stream}", os.O_CREAT | os.O_WRONLY), stream)
            sys.exit(train.main(words))
        code = os.waitstatus_to_exitcode(os.wait()[1])
        (output / f"{number}-code").write_text(str(code))


if __name__ == "__main__":
    main()
