"""Set-up that benches share on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from ringtrain import data, hvd, strategies
from ringtrain.config import Config
from ringtrain.derived import Numbers, derive
from ringtrain.run import devices, setup


def begin(config: Config) -> None:
    """Starts Horovod and pins this rank's device."""
    hvd.configure(config.hvd)
    hvd.init()
    pinning = devices.pin(hvd.local_rank(), hvd.local_size(), config.device)
    hvd.check_placement("" if config.device.share_gpus else devices.identity(pinning))


@dataclass(frozen=True)
class Training:
    """Data, model and derived numbers of a configuration, for training without a fixed end."""

    config: Config
    named: setup.Named
    data_set: data.DataSet
    numbers: Numbers

    @classmethod
    def of(cls, config: Config) -> Training:
        """Reads the training data of a configuration."""
        named = setup.find(config)
        data_set = named.read_data()
        return cls(config, named, data_set, derive(config, hvd.size(), len(data_set.train), len(data_set.test)))

    def model(self, distributed: bool = True) -> keras.Model:
        """Builds and compiles a new model; see setup.compiled_model."""
        return setup.compiled_model(
            self.named, self.data_set, self.config, self.numbers, strategies.make(self.config), distributed
        )

    def batches(self) -> Any:
        """Batches of this rank, for more epochs than any bench trains."""
        epochs = 10**6 // self.numbers.steps_per_epoch + 1
        batch_size = self.config.train.batch_size
        return data.training_batches(self.data_set.train, batch_size, hvd.rank(), hvd.size(), self.config.seed, epochs)
