"""Runs properties and jobs on every rank in one start: run_properties.py OUTPUT LIMIT_S MODULE.NAME [MODULE.NAME ...].

Each rank leaves OUTPUT/<ranks>/<rank>/MODULE.NAME: empty if it held, else the traceback. A rank on which one takes
longer than the limit prints its stacks and exits, and the launcher ends the others.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

import ringtrain.hvd as hvd

HERE = Path(__file__).parent


def main() -> None:
    output, limit_s, names = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    if not any(_is_job(name) for name in names):  # a job divides the CPU itself
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    hvd.init()
    folder = output / str(hvd.size()) / str(hvd.rank())
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            _function(name)()
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        (folder / name).write_text(outcome)
        hvd.allgather_object(name, name="next_function")
    faulthandler.cancel_dump_traceback_later()


def _is_job(name: str) -> bool:
    """Whether a name is that of a job in this folder, not of a property."""
    return (HERE / f"{name.partition('.')[0]}.py").exists()


def _function(name: str) -> Callable[[], object]:
    module, _, function = name.partition(".")
    if not _is_job(name):
        return getattr(importlib.import_module(f"properties.{module}"), function)
    keras.config.set_floatx("float64")
    keras.utils.clear_session()
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    main()
