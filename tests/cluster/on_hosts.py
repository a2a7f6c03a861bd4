"""Runs a command on the first of several hosts that this machine makes of itself, with links of a rate. Needs root.

    python tests/cluster/on_hosts.py --rate 100 -- ringtrain bench allreduce -H host1:1,host2:1 --sizes 1KiB,16MiB

Exits as the command does; the hosts go with it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import lab
import launching


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="host1, host2, ... (2)")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="Mb/s of each link; else what the machine gives")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args()
    if lacking := lab.missing():
        parser.error(f"a lab of hosts needs {lacking}")
    with lab.Lab(options.hosts) as hosts:
        for name in hosts.names if options.rate else ():
            hosts.limit(name, options.rate)
        with hosts.start("host1", options.command, {"PYTHONPATH": str(launching.ROOT)}, cwd=Path.cwd()) as command:
            return command.wait()


if __name__ == "__main__":
    raise SystemExit(main())
