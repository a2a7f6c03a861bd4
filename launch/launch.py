#!/usr/bin/env python3
"""`ringtrain launch` where nothing is installed: python launch/launch.py -H host1:4,host2:4 -- python train.py"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ringtrain.cli import main

raise SystemExit(main(["launch", *sys.argv[1:]]))
