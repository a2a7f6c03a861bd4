"""The configuration: frozen dataclasses, one per section, and the numbers that follow from them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from ringtrain.errors import ConfigError


@dataclass(frozen=True)
class RunConfig:
    """Where the run's files go."""

    name: str = ""
    """folder of this run; empty: the data set's name and the time"""
    directory: str = "runs"
    """folder that holds all runs"""


@dataclass(frozen=True)
class DataConfig:
    """What is learned."""

    name: str = "digits"
    """digits, fashion-mnist, mnist, synthetic, or module:function for your own"""
    dir: str = ""
    """folder with the IDX files of fashion-mnist or mnist; empty: Debian's folder, else Keras' download"""
    num_samples: int = 4096
    """samples that synthetic makes, training and test together"""
    image_size: int = 28
    """height and width of synthetic's images, pixels"""


@dataclass(frozen=True)
class ModelConfig:
    """What learns it."""

    name: str = "mlp"
    """mlp, cnn, or module:function for your own"""


@dataclass(frozen=True)
class OptimizerConfig:
    """How it is learned."""

    name: Literal["sgd", "adam", "adamw"] = "adam"
    """update rule"""
    learning_rate: float = 0.001
    """learning rate of one rank"""
    learning_rate_scaling: Literal["linear", "none"] = "linear"
    """linear: learning rate times number of ranks; none: as it is"""
    momentum: float = 0.9
    """momentum of sgd"""


@dataclass(frozen=True)
class TrainConfig:
    """How long, and in what batches."""

    epochs: int = 10
    """passes over the training data"""
    batch_size: int = 32
    """samples per step on each rank; the global batch is this times the number of ranks"""
    warmup_epochs: int = 0
    """epochs over which the learning rate grows to its full value, from that divided by the number of ranks; 0: none"""
    check_every_steps: int = 500
    """steps between two checks that all ranks hold the same weights (one more after the first step and at the end)"""


@dataclass(frozen=True)
class DeviceConfig:
    """What it runs on: one GPU per rank where there are any, else a share of the host's cores."""

    memory_growth: bool = True
    """take a GPU's memory as it is needed, not all at once"""
    memory_fraction: float = 0.0
    """share of a GPU's memory to take at start, above 0 and up to 1; 0: memory_growth decides"""
    memory_mb: int = 0
    """limit of GPU memory per rank, MB; 0: memory_growth decides"""
    share_gpus: bool = False
    """let several ranks use one GPU when a host has more ranks than GPUs"""
    threads: int = 0
    """CPU threads per rank where there is no GPU; 0: the host's cores divided by its ranks"""


@dataclass(frozen=True)
class HvdConfig:
    """How gradients are combined over the ranks."""

    op: Literal["average", "adasum"] = "average"
    """average of the ranks' gradients, or Adasum (arXiv 2006.02924)"""
    compression: Literal["none", "fp16"] = "none"
    """fp16: send gradients in half precision"""


@dataclass(frozen=True)
class Config:
    """Everything that shapes a run."""

    seed: int = 0
    """of initial weights, sample order and dropout"""
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    hvd: HvdConfig = field(default_factory=HvdConfig)

    def __post_init__(self) -> None:
        for name, (rule, holds) in RULES.items():
            value = value_of(self, name)
            if not holds(value):
                raise ConfigError(f"{name}: got {value}, expected {rule}")
        if self.device.memory_fraction and self.device.memory_mb:
            raise ConfigError("device.memory_fraction and device.memory_mb are both set: keep one, set the other to 0")
        if self.train.warmup_epochs > self.train.epochs:
            raise ConfigError(
                f"train.warmup_epochs: got {self.train.warmup_epochs}, expected no more than train.epochs"
                f" ({self.train.epochs})"
            )


_AT_LEAST_0 = ("0 or more", lambda value: value >= 0)
_AT_LEAST_1 = ("1 or more", lambda value: value >= 1)
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "seed": ("0 to 4294967295", lambda value: 0 <= value < 2**32),
    "run.name": ("a name, not a path", lambda value: "/" not in value and value not in (".", "..")),
    "data.num_samples": ("16 or more", lambda value: value >= 16),
    "data.image_size": ("4 or more", lambda value: value >= 4),
    "optimizer.learning_rate": ("a number above 0", lambda value: 0 < value < float("inf")),
    "optimizer.momentum": ("0 up to 1, 1 excluded", lambda value: 0 <= value < 1),
    "train.epochs": _AT_LEAST_1,
    "train.batch_size": _AT_LEAST_1,
    "train.warmup_epochs": _AT_LEAST_0,
    "train.check_every_steps": _AT_LEAST_1,
    "device.memory_fraction": ("0 to 1", lambda value: 0 <= value <= 1),
    "device.memory_mb": _AT_LEAST_0,
    "device.threads": _AT_LEAST_0,
}


@dataclass(frozen=True)
class Numbers:
    """What follows from the configuration, the data's size and the number of ranks."""

    num_ranks: int
    num_train: int
    """training samples"""
    num_test: int
    """test samples, each evaluated by one rank"""
    batch_size: int
    """samples per step on each rank"""
    global_batch_size: int
    """samples per step on all ranks"""
    steps_per_epoch: int
    num_steps: int
    """steps of the whole run"""
    dropped_per_epoch: int
    """samples that do not fill a global batch; others in each epoch"""
    learning_rate: float
    """after scaling, at the end of warm-up"""
    warmup_steps: int


def derive(config: Config, num_ranks: int, num_train: int, num_test: int) -> Numbers:
    """Works out a run's numbers.

    Args:
        config: the resolved configuration.
        num_ranks: processes that train together.
        num_train: training samples.
        num_test: test samples.

    Returns:
        The numbers. Linear scaling of the learning rate is that of Goyal et al. 2017 (arXiv 1706.02677), section 2.1.

    Raises:
        ConfigError: the global batch is larger than the training data.
    """
    batch_size = config.train.batch_size
    global_batch_size = batch_size * num_ranks
    if global_batch_size > num_train:
        raise ConfigError(
            f"train.batch_size: {batch_size} on {num_ranks} rank{'s' * (num_ranks != 1)} makes a global batch of"
            f" {global_batch_size}, but {config.data.name} has {num_train} training samples:"
            f" expected {max(1, num_train // num_ranks)} or less"
        )
    steps_per_epoch = num_train // global_batch_size
    linear = config.optimizer.learning_rate_scaling == "linear"
    return Numbers(
        num_ranks=num_ranks,
        num_train=num_train,
        num_test=num_test,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        steps_per_epoch=steps_per_epoch,
        num_steps=steps_per_epoch * config.train.epochs,
        dropped_per_epoch=num_train - steps_per_epoch * global_batch_size,
        learning_rate=config.optimizer.learning_rate * (num_ranks if linear else 1),
        warmup_steps=steps_per_epoch * config.train.warmup_epochs,
    )


def nearest(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: what was probably meant, or what there is.

    Args:
        name: what was received.
        known: what would have been right.

    Returns:
        E.g. "did you mean mlp?", or "expected one of cnn, mlp" when nothing resembles it.
    """
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {similar[0]}?" if similar else f"expected one of {', '.join(sorted(known))}"


def option_types(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every option's dotted name and type, e.g. {"train.epochs": int}."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(section).items():
        if dataclasses.is_dataclass(kind):
            types |= option_types(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            types[prefix + name] = kind
    return types


def value_of(config: Config, option: str) -> Any:
    """The value of a dotted option, e.g. value_of(config, "train.epochs")."""
    return functools.reduce(getattr, option.split("."), config)
