"""The configuration of a run: options, their rules, files and help. This folder does not import TensorFlow.

sections:     the options of a run, by section
rules:        what values they may have
combinations: the one table of what does not go together
derived:      the numbers that follow from the options and the data
files:        TOML files, the command line
by_name:      functions and classes that options name
help_texts:   the help
options:      fields of dataclasses as options of a command line, also for the launcher
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringtrain.protocol import lazy

MODULES = {
    **dict.fromkeys(
        [
            "CheckpointConfig",
            "Config",
            "DataConfig",
            "DeviceConfig",
            "ElasticConfig",
            "HealthConfig",
            "HvdConfig",
            "ModelConfig",
            "OptimizerConfig",
            "RunConfig",
            "ScheduleConfig",
            "StrategyConfig",
            "TrackingConfig",
            "TrainConfig",
        ],
        "sections",
    ),
    "read": "files",
}
"""public names, by the module that is imported when one is used: the launch half uses `options` alone"""

if TYPE_CHECKING:  # for editors and mypy
    from ringtrain.config.files import read as read
    from ringtrain.config.sections import CheckpointConfig as CheckpointConfig
    from ringtrain.config.sections import Config as Config
    from ringtrain.config.sections import DataConfig as DataConfig
    from ringtrain.config.sections import DeviceConfig as DeviceConfig
    from ringtrain.config.sections import ElasticConfig as ElasticConfig
    from ringtrain.config.sections import HealthConfig as HealthConfig
    from ringtrain.config.sections import HvdConfig as HvdConfig
    from ringtrain.config.sections import ModelConfig as ModelConfig
    from ringtrain.config.sections import OptimizerConfig as OptimizerConfig
    from ringtrain.config.sections import RunConfig as RunConfig
    from ringtrain.config.sections import ScheduleConfig as ScheduleConfig
    from ringtrain.config.sections import StrategyConfig as StrategyConfig
    from ringtrain.config.sections import TrackingConfig as TrackingConfig
    from ringtrain.config.sections import TrainConfig as TrainConfig
else:
    __getattr__, __dir__ = lazy.names_of(__name__, MODULES)
