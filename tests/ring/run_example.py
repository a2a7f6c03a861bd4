"""Runs an example on this rank as if it were started by itself: run_example.py FOLDER SCRIPT [ARGUMENT ...].

The example's folder is FOLDER/<rank>, as on hosts without a common disk: what a rank writes lies there. Afterwards
FOLDER/<rank>/report.json tells what became of its model, or FOLDER/<rank>/failure.txt how it failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1]) / os.environ["OMPI_COMM_WORLD_RANK"]
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    sys.argv = sys.argv[2:]
    try:
        names = runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:
        Path("failure.txt").write_text(traceback.format_exc())
        raise
    model = names["model"]
    report = {
        "weights": hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest(),
        "epochs": model.history.epoch,
        "history": model.history.history,
        "test_accuracy": names.get("test_accuracy"),
    }
    if names["hvd"].__name__ == "ringtrain.hvd":
        report["checksum"] = names["hvd"].check_in_sync(model)  # of the optimizer's slots as well; raises
    Path("report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
