"""Runs schedules of a simulation, and shows one.

python tests/simulation/run.py mirrored --minutes 2           # schedules that nobody has run
python tests/simulation/run.py mirrored --seed 7 --trace      # who did what when
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=["mirrored", "launched"])
    parser.add_argument("--seed", type=int, help="the first; without it, one of the time")
    parser.add_argument("--count", type=int, default=1, help="schedules")
    parser.add_argument("--minutes", type=float, help="in place of a number of schedules")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    options = parser.parse_args()
    simulate = importlib.import_module(f"simulation.{options.scenario}").simulate

    first = time.time_ns() // 1_000_000 if options.seed is None else options.seed
    begin_s, number, violated = time.monotonic(), 0, 0
    limit_s = (options.minutes or 0) * 60
    while time.monotonic() < begin_s + limit_s if options.minutes else number < options.count:
        found = simulate(first + number, is_traced=options.trace)
        if options.trace:
            print("\n".join(found.world.trace))
        if found.violation:
            violated += 1
            print(f"seed {first + number}: {found.violation}", flush=True)
        number += 1
    print(f"{number:,} schedules from seed {first} on in {time.monotonic() - begin_s:.0f} s: {violated} violated")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
