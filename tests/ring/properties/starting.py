"""`init` after `shutdown` starts like the first time."""

from __future__ import annotations

import threading

import keras
import numpy as np
import small
from only import only

import ringtrain.hvd as hvd
from ringtrain.hvd.process import PROCESS

JOIN_S = 60


@only(launcher="gloo")
def a_process_starts_again_after_its_end():
    checksums = []
    for _ in range(3):
        model = small.build(seed=hvd.rank())
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        inputs, targets = (np.concatenate(arrays) for arrays in zip(*small.shares(3), strict=True))
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(inputs, targets, batch_size=small.BATCH, shuffle=False, verbose=0, callbacks=[broadcast])
        checksums.append(hvd.check_in_sync(model))
        (watch,) = _watches()
        hvd.shutdown()
        watch.join(JOIN_S)
        assert not hvd.is_initialized() and not _watches()
        assert PROCESS.stall_watch is None and not PROCESS.sockets
        hvd.init()
    assert len(set(checksums)) == 1, checksums


def _watches():
    return [thread for thread in threading.enumerate() if thread.name == "ringtrain-watch" and thread.is_alive()]
