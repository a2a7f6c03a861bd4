"""A callback with a bug that strikes at the same step of every start."""

from __future__ import annotations

import keras


class Strikes(keras.callbacks.Callback):
    """Fails on rank 1 after the run's ninth step."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        from ringtrain import hvd

        if hvd.rank() == 1 and int(self.model.optimizer.iterations) == 9:
            raise ValueError("bad luck")


def at_step_9() -> Strikes:
    return Strikes()
