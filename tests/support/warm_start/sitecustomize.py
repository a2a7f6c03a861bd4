"""Python imports this at its start where this folder is on PYTHONPATH: the trainer then forks from warm.py's server."""

import os
import sys

TRAINING = (["-m", "ringtrain.train"], ["-m", "ringtrain.lab.ranks"])

if "RINGTRAIN_TEST_WARM" in os.environ and sys.orig_argv[1:3] in TRAINING:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import warm

    os._exit(warm.call(os.environ["RINGTRAIN_TEST_WARM"], sys.orig_argv[1:]))
