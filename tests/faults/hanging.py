"""Callbacks of a user that hang or dawdle on rank 1."""

from __future__ import annotations

import threading

import keras

from ringtrain import hvd

STEP = 20


class Hanging(keras.callbacks.Callback):
    """Waits for something that never comes, after step 20 on rank 1."""

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == STEP and hvd.rank() == 1:
            wait_for_a_file_that_never_comes()


def wait_for_a_file_that_never_comes():
    threading.Event().wait()
