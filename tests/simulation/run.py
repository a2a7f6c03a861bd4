"""Runs schedules of a simulation, and shows one.

python tests/simulation/run.py launched --minutes 2           # new seeds
python tests/simulation/run.py launched --seed 7 --trace      # who did what when
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

HOSTS_PER_COLLECTION = 1000
"""simulated hosts between two collections of garbage, which otherwise take a fourth of the time of a thousand hosts"""

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=["launched", "elastic", "power"])
    parser.add_argument("--seed", type=int, help="the first seed; default: from the time")
    parser.add_argument("--count", type=int, default=1, help="number of schedules")
    parser.add_argument("--minutes", type=float, help="in place of a number of schedules")
    parser.add_argument("--hosts", type=int, help="of a launched job; default: 2 to 6")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    options = parser.parse_args()
    simulate = importlib.import_module(f"simulation.{options.scenario}").simulate
    if options.hosts:
        simulate = partial(simulate, num_hosts=options.hosts)

    first = options.seed
    if first is None:
        first = time.time_ns() // 1_000_000
    count, limit_s = options.count, float("inf")
    if options.minutes:
        count, limit_s = sys.maxsize, options.minutes * 60
    begin_s, number, violated = time.monotonic(), 0, 0
    transitions = importlib.import_module("simulation.transitions")
    counts = Counter()
    is_counted = options.scenario in transitions.SCENARIOS
    if options.hosts:
        gc.freeze()
        gc.disable()
    while number < count and time.monotonic() - begin_s < limit_s:
        if options.hosts and number % max(1, HOSTS_PER_COLLECTION // options.hosts) == 0:
            gc.collect()
        found = simulate(first + number, is_traced=options.trace or is_counted)
        if options.trace:
            print("\n".join(found.world.trace))
        if found.violation:
            violated += 1
            print(f"seed {first + number}: {found.violation}", flush=True)
        number += 1
        if is_counted:
            counts += transitions.taken(found, options.scenario)
    print(f"{number:,} schedules from seed {first} on in {time.monotonic() - begin_s:.0f} s: {violated} violated")
    if is_counted:
        for name, count in counts.items():
            print(f"{count:7,} x {name}")
        print(f"never: {', '.join(transitions.never(counts, options.scenario)) or 'none'}")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
