"""Callbacks and metrics as users write them, some of which do on one rank what the others do not."""

from __future__ import annotations

import os
import signal

import keras

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


class StopsAfterSecondEpoch(keras.callbacks.Callback):
    """Ends training, on rank 1 alone."""

    def on_epoch_end(self, epoch, logs=None):
        if RANK == 1 and epoch == 1:
            self.model.stop_training = True


class StopsInTheMiddle(keras.callbacks.Callback):
    """Ends training in the middle of the first epoch, on rank 0 alone."""

    def on_train_batch_end(self, batch, logs=None):
        if RANK == 0 and batch == 4:
            self.model.stop_training = True


class ChangesAWeight(keras.callbacks.Callback):
    """Puts rank 1 out of step: before training, or after the batch that a variable names."""

    def on_train_begin(self, logs=None):
        self.on_train_batch_end(-1)

    def on_train_batch_end(self, batch, logs=None):
        if RANK == 1 and batch == int(os.environ["RINGTRAIN_TEST_CHANGED_AFTER"]):
            weight = self.model.trainable_weights[0]
            weight.assign(weight * 1.001)


class Signals(keras.callbacks.Callback):
    """Sends a signal to its own rank in step 26; a variable has rank and number of the signal."""

    def on_train_batch_end(self, batch, logs=None):
        rank, number = map(int, os.environ["RINGTRAIN_TEST_SIGNAL"].split())
        if rank == RANK and int(self.model.optimizer.iterations) == 26:
            os.kill(os.getpid(), number)


class InterruptsTwice(keras.callbacks.Callback):
    """Sends Ctrl-C to its own process twice in the third step."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)


class LocalMonitor(keras.callbacks.Callback):
    """Gives each rank another value of test_loss: rank 0's never gets better, rank 1's always does."""

    def on_epoch_end(self, epoch, logs=None):
        logs["test_loss"] = 1.0 if RANK == 0 else 1.0 / (epoch + 1)
