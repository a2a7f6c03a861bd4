"""Python imports this at its start where this folder is on PYTHONPATH: the trainer then forks from warm.py's server."""

import os
import sys

TRAINING = [["-m", f"ringtrain.{name}"] for name in ("train", "lab.ranks", "lab.prove_seeded")]
SCRIPTS = tuple(os.path.join("tests", "ring", name) for name in ("own_trial.py", "proved_script.py"))

is_script = any(word.endswith(SCRIPTS) for word in sys.orig_argv[1:2])
if "RINGTRAIN_TEST_WARM" in os.environ and (is_script or sys.orig_argv[1:3] in TRAINING):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import warm

    os._exit(warm.call(os.environ["RINGTRAIN_TEST_WARM"], sys.orig_argv[1:]))
