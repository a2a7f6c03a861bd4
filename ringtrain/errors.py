"""Every error that ringtrain raises on purpose.

RingtrainError              said as one line on the terminal, exit code 2; all else is a bug with its traceback
├── ConfigError             an unknown key or name, a value of the wrong type, numbers that do not fit together
├── DataError               a data file that is missing, truncated or not what its name promises
├── DeviceError             more ranks on a host than GPUs, a memory limit that cannot be set
├── RunDirectoryError       the run's folder cannot be made or written
├── CheckpointError         a checkpoint that cannot be read, of another model, or of a newer ringtrain
│   └── DamagedCheckpoint   its content is not what its manifest says: an older one may take its place
├── NonFiniteLoss           a rank's loss became NaN or infinite
├── Stalled                 a rank keeps all others waiting; exit code 75
├── LaunchError             a hostfile or a job that cannot be launched, a launcher that is missing or unknown
│   ├── HostsError          hosts that cannot be read or do not fit the job; names the file and the line
│   └── PlacementError      ranks are not where the plan has them
├── MissingDependency       a package or program that is not installed
└── OutOfSync               the ranks' weights or optimizers differ, or gradients are not averaged
"""


class RingtrainError(Exception):
    """The root: its message says what was received, what was expected and how to mend it."""


class ConfigError(RingtrainError):
    """The configuration names something unknown, or its values do not fit together."""


class DataError(RingtrainError):
    """A data set cannot be found or read."""


class DeviceError(RingtrainError):
    """The host's devices cannot be shared out over its ranks as asked."""


class RunDirectoryError(RingtrainError):
    """The folder of the run cannot be created or written."""


class CheckpointError(RingtrainError):
    """A checkpoint cannot be restored."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete or has changed since it was written."""


class NonFiniteLoss(RingtrainError):
    """Training went wrong: the loss is no number any more."""


class Stalled(RingtrainError):
    """A rank has made no progress for too long, and the others wait for it."""

    EXIT_CODE = 75
    """of the job, which may be started again"""


class LaunchError(RingtrainError):
    """The job cannot be launched, or not as planned."""


class HostsError(LaunchError):
    """Hosts cannot be read, or have no room for the job."""


class PlacementError(LaunchError):
    """Ranks do not run where the plan has them."""


class MissingDependency(RingtrainError, ImportError):
    """Something that ringtrain needs is not installed; the message says how to get it."""


class OutOfSync(RingtrainError):
    """Ranks that must agree do not: their weights, their optimizers, or what they do with gradients."""
