"""Data-parallel training of Keras 3 models with Horovod.

``ringtrain.fit`` trains the compiled model of a script on all ranks, ``ringtrain.evaluate`` and ``ringtrain.predict``
use it there. ``ringtrain.run`` calls a function on ranks that it starts, ``ringtrain.train`` is the training job of a
configuration, ``ringtrain.hvd`` is Horovod under its own names as Keras 3 needs it. This module
imports neither Horovod nor TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringtrain.protocol.cores import share_cores
from ringtrain.protocol.env import leave_rank
from ringtrain.protocol.failures import report_uncaught_from_start

__version__ = "0.1.0"

LAZY = {
    "fit": "ringtrain.api",
    "start": "ringtrain.api",
    "evaluate": "ringtrain.api",
    "predict": "ringtrain.api",
    "run": "ringtrain.function_call",
    "from_rank_0": "ringtrain.data.from_rank_0",
    "Records": "ringtrain.data.records",
    "trial": "ringtrain.protocol.for_script",
}
"""public names whose modules are loaded when they are used"""

if TYPE_CHECKING:  # for editors and mypy
    from ringtrain import hvd as hvd
    from ringtrain.api import evaluate as evaluate
    from ringtrain.api import fit as fit
    from ringtrain.api import predict as predict
    from ringtrain.api import start as start
    from ringtrain.data.from_rank_0 import from_rank_0 as from_rank_0
    from ringtrain.data.records import Records as Records
    from ringtrain.function_call import run as run
    from ringtrain.protocol.for_script import trial as trial
else:

    def __getattr__(name: str) -> Any:
        if name in LAZY:
            return getattr(importlib.import_module(LAZY[name]), name)
        if name == "hvd":
            return importlib.import_module("ringtrain.hvd")
        advice = "Horovod's names are in ringtrain.hvd: import ringtrain.hvd as hvd"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {advice}")


def __dir__() -> list[str]:
    return sorted([*globals(), *LAZY, "hvd"])


leave_rank()  # before anything reads which rank this is
report_uncaught_from_start()
share_cores()  # a script builds its model, and TensorFlow its threads, before it calls anything here
