"""Exceptions that ringtrain raises on purpose. Others are bugs: they keep their traceback.

RingtrainError
├── ConfigError, DeviceError, RunDirectoryError, NonFiniteLoss, Stalled, MissingDependency, OutOfSync, RankError,
│   DataError
├── CheckpointError
│   └── DamagedCheckpoint
└── LaunchError
    ├── HostsError
    └── PlacementError
"""


class RingtrainError(Exception):
    """Base class, exit code 2, printed without traceback. States what was received and expected, and how to fix it."""


def exit_code_of(error: BaseException) -> int:
    """Exit code of a job that ends by an uncaught exception: 2 where a restart would not help, else 1."""
    return 2 if isinstance(error, RingtrainError) else 1


class ConfigError(RingtrainError):
    """Invalid configuration: unknown key or name, value of the wrong type, contradicting values."""


class DataError(RingtrainError):
    """Data set that cannot be found or read, or data file that is truncated or of another format."""


class DeviceError(RingtrainError):
    """Devices of a host that do not suit its ranks: fewer GPUs than ranks, or a memory limit that cannot be set."""


class RunDirectoryError(RingtrainError):
    """Run folder that cannot be created or written."""


class CheckpointError(RingtrainError):
    """Checkpoint that cannot be read, of another model, or of a newer ringtrain."""


class DamagedCheckpoint(CheckpointError):
    """Checkpoint whose content does not match its manifest: an older one may be used instead."""


class NonFiniteLoss(RingtrainError):
    """NaN or infinite loss on a rank."""


class Stalled(RingtrainError):
    """Rank that blocks the others: it has made no progress for too long."""

    EXIT_CODE = 75
    """exit code of the job, which may be restarted"""


class LaunchError(RingtrainError):
    """Job that cannot be launched as planned, or launcher that is missing or unknown."""


class HostsError(LaunchError):
    """Hosts that cannot be read, or have too few slots for the job. Names file and line."""


class PlacementError(LaunchError):
    """Ranks that do not run where planned."""


class MissingDependency(RingtrainError, ImportError):
    """Required package or program that is not installed. The message states how to install it."""


class OutOfSync(RingtrainError):
    """Ranks with different weights or optimizers, or in different calls, or gradients that are not averaged."""


class RankError(RingtrainError):
    """Rank of `ringtrain.run` that has failed: its exception with the traceback, else the launcher's exit cause."""
