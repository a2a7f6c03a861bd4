"""Data-parallel training of Keras 3 models with Horovod.

``ringtrain.fit`` trains the compiled model of a script on all ranks, ``ringtrain.evaluate`` and ``ringtrain.predict``
use it there. ``ringtrain.run`` calls a function on ranks that it starts, ``ringtrain.train`` is the training job of a
configuration, ``ringtrain.hvd`` is Horovod under its own names as Keras 3 needs it. This module
imports neither Horovod nor TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringtrain.protocol import lazy
from ringtrain.protocol.cores import share_cores
from ringtrain.protocol.env import leave_rank
from ringtrain.protocol.failures import report_uncaught_from_start

__version__ = "0.1.0"

LAZY = {
    "fit": "api",
    "start": "api",
    "evaluate": "api",
    "predict": "api",
    "run": "function_call",
    "from_rank_0": "data.from_rank_0",
    "Records": "data.records",
    "trial": "protocol.for_script",
    "hvd": "hvd",
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
    __getattr__, __dir__ = lazy.names_of(
        __name__, LAZY, ": Horovod's names are in ringtrain.hvd: import ringtrain.hvd as hvd"
    )

leave_rank()  # before anything reads which rank this is
report_uncaught_from_start()
share_cores()  # a script builds its model, and TensorFlow its threads, before it calls anything here
