"""Runs properties on every rank in one start: run_properties.py OUTPUT LIMIT_S MODULE.NAME [MODULE.NAME ...].

Each rank leaves OUTPUT/<rank>/<property>: empty if it held, else the traceback.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf
from on_every_rank import call_each

import ringtrain.hvd as hvd


def main() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    hvd.init()

    def property_of(name: str) -> Any:
        module, function = name.split(".")
        return getattr(importlib.import_module(f"properties.{module}"), function)

    call_each(sys.argv[3:], property_of, Path(sys.argv[1]) / str(hvd.rank()), float(sys.argv[2]))


if __name__ == "__main__":
    main()
