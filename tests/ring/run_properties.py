"""Runs properties on every rank in one start: run_properties.py OUTPUT LIMIT_S MODULE.NAME [MODULE.NAME ...].

Each rank leaves OUTPUT/<rank>/<property>: empty if it held, else the traceback. A rank on which one takes longer than
LIMIT_S seconds prints its stacks and exits, and the launcher ends the others.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import traceback
from pathlib import Path

import tensorflow as tf

import ringtrain.hvd as hvd


def main() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    hvd.init()
    output = Path(sys.argv[1]) / str(hvd.rank())
    output.mkdir(parents=True)
    for name in sys.argv[3:]:
        faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
        module, function = name.split(".")
        try:
            getattr(importlib.import_module(f"properties.{module}"), function)()
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        (output / name).write_text(outcome)
        hvd.allgather_object(name, name="next_property")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
