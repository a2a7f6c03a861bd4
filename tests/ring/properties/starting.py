"""`init` after `shutdown` starts stall detection again, and over MPI is refused before MPI ends the process.

A second `init` without a `shutdown` names a process set that the first one has not made.
"""

from __future__ import annotations

import threading

import keras
import numpy as np
import small
from only import only

import ringtrain.hvd as hvd
from ringtrain.errors import LaunchError
from ringtrain.hvd.process import PROCESS

JOIN_S = 60


@only(launcher="gloo")
def a_process_starts_again_after_its_end():
    first = _trained()
    (monitor,) = _monitors()
    hvd.shutdown()
    monitor.join(JOIN_S)
    assert not hvd.is_initialized() and not _monitors() and PROCESS.monitor is None
    hvd.init()
    assert _trained() == first and len(_monitors()) == 1


@only(launcher="mpi")
def a_second_start_of_mpi_is_refused():
    PROCESS.has_finalized_mpi = True
    try:
        assert "MPI starts only once in a process" in small.raised(LaunchError, hvd.init)
    finally:
        PROCESS.has_finalized_mpi = False


def _trained():
    model = small.build(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*small.shares(3), strict=True))
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(inputs, targets, batch_size=small.BATCH, shuffle=False, verbose=0, callbacks=[broadcast])
    return hvd.check_in_sync(model)


def _monitors():
    return [thread for thread in threading.enumerate() if thread.name == "ringtrain-heartbeat" and thread.is_alive()]
