"""What takes seconds to import is imported where it is needed."""

from __future__ import annotations

import subprocess
import sys

import launching
import pytest

HEAVY = {"tensorflow", "keras", "horovod", "mpi4py", "pyspark"}
LAUNCHING = [
    "cli",
    "function_call",
    *(f"lab.{name}" for name in ("commands", "ranks", "stats", "tables")),
    # MPI crashes at its end where TensorFlow has been loaded after it: bench allreduce.
    *(f"lab.{name}" for name in ("bench_train", "bench_allreduce", "sweep", "report")),
]
"""modules of processes that start ranks or show results"""
BEFORE_THE_CONFIGURATION = [
    *(
        "train",
        "data",
        "models",
        "strategies",
        "optim.schedules",
        "monitor.journal",
        "monitor.diagnosis",
    ),
    *(f"training.{name}" for name in ("configured", "devices", "console", "agreement", "log_capture")),
    *(f"checkpoint.{name}" for name in ("checkpoint", "run_folder")),
    *("strategies.parameter_server.server", "strategies.parameter_server.worker"),
]
"""modules that a rank imports before it knows that it can train"""


@pytest.mark.parametrize(
    ("modules", "loaded"),
    [
        (LAUNCHING, []),
        (BEFORE_THE_CONFIGURATION, []),
        (["hvd"], ["horovod", "keras", "tensorflow"]),  # what is looked for is found
    ],
    ids=["launching", "before the configuration", "hvd"],
)
def test_tensorflow_is_not_loaded_by(modules: list[str], loaded: list[str]) -> None:
    names = ", ".join(f"ringtrain.{name}" for name in modules)
    script = f"import sys, {names}; print(sorted({HEAVY} & {{*sys.modules}}))"
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=launching.ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{loaded}\n"


def test_the_launch_half_loads_no_options_of_training() -> None:
    script = (
        "import sys, ringtrain.cluster.launch\n"
        "print('ringtrain.config.options' in sys.modules, 'ringtrain.config.sections' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=launching.ROOT, capture_output=True, text=True)
    assert ended.stdout == "True False\n", ended.stderr


COLLECTED = """
import gc, weakref
import ringtrain.hvd
class Cycle: pass
mine = Cycle()
mine.own, ended = mine, weakref.ref(mine)
del mine
gc.collect()
print(gc.get_freeze_count() > 200_000, len(gc.get_objects()) < 200_000, gc.isenabled(), ended() is None)
"""


@pytest.mark.slow
def test_the_collector_skips_the_libraries_and_nothing_else() -> None:
    ended = subprocess.run([sys.executable, "-c", COLLECTED], cwd=launching.ROOT, capture_output=True, text=True)
    assert ended.stdout == "True True True True\n", ended.stderr
