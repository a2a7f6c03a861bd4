"""The configuration: frozen dataclasses, one per section. Each option has its rule and requirements beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

from ringtrain.config import combinations
from ringtrain.config import rules as rule
from ringtrain.config.options import AT_LEAST_0, AT_LEAST_1, at_least, options_of
from ringtrain.config.options import nearest as nearest
from ringtrain.config.rules import Need, needs, needs_above_0, needs_other
from ringtrain.errors import ConfigError


class OptimizerKind(NamedTuple):
    """Class (module:name), learning-rate scaling that auto means, and options that not all optimizers take."""

    path: str
    scaling: Literal["linear", "sqrt"]
    options: tuple[str, ...] = ()


# A step of the adaptive optimizers does not grow with the gradient: they scale by sqrt.
OPTIMIZERS = {
    "sgd": OptimizerKind("ringtrain.optim.optimizers:SGD", "linear", ("momentum", "nesterov")),
    "adam": OptimizerKind("keras.optimizers:Adam", "sqrt"),  # arXiv 1412.6980
    "adamw": OptimizerKind("keras.optimizers:AdamW", "sqrt"),  # arXiv 1711.05101
    "lamb": OptimizerKind("keras.optimizers:Lamb", "sqrt"),  # arXiv 1904.00962
    "lars": OptimizerKind("ringtrain.optim.optimizers:LARS", "linear", ("momentum", "trust_coefficient")),
}
"""Optimizers by name: what options and derived numbers must know of each, without TensorFlow."""


def _optimizer_with(option: str) -> Need:
    return needs("optimizer.name", *(name for name, kind in OPTIMIZERS.items() if option in kind.options))


@dataclass(frozen=True)
class RunConfig:
    """Files of the run."""

    name: Annotated[str, rule.FOLDER_NAME] = ""
    """folder of this run; empty: name of the data set and time"""
    directory: str = "runs"
    """folder that holds all runs"""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: resume from the newest checkpoint in this run's folder, if any; must: fail without one; never: refuse a
    folder that holds a run"""
    mirror: str = ""
    """folder or URL (s3://bucket/runs) to which the run is copied during training, and from which it goes on on another
    host; needs run.name"""


@dataclass(frozen=True)
class DataConfig:
    """Training and test data."""

    name: str = "digits"
    """digits, npz, image-folder, imagenet-tfrecords, records, synthetic, spark, or module:function"""
    dir: Annotated[str, needs_other("data.name", "digits", "spark", "synthetic")] = ""
    """folder with the data's files"""
    file: Annotated[str, needs("data.name", "npz")] = ""
    """file that npz reads, in dir if that is given"""
    url: Annotated[tuple[str, ...], needs("data.name", "records")] = ()
    """files of rows to train: Parquet, TFRecord, images; paths, folders, patterns, URLs (s3://bucket/rows)"""
    test_url: Annotated[tuple[str, ...], needs("data.name", "records")] = ()
    """the same for test data"""
    inputs: Annotated[tuple[str, ...], needs("data.name", "records")] = ()
    """columns of the inputs; several are one array with these columns"""
    target: Annotated[str, needs("data.name", "records")] = ""
    """column of the target"""
    transform: Annotated[str, needs("data.name", "records")] = ""
    """module:function of TensorFlow, from inputs and targets of a batch to those that are trained"""
    max_samples: Annotated[int, AT_LEAST_0] = 0
    """first samples in memory that are used, of training and of test data, for a short try; 0: all"""
    num_samples: Annotated[int, at_least(16), needs("data.name", "synthetic")] = 4096
    """number of samples that synthetic generates, training and test together"""
    image_size: Annotated[
        int, rule.PIXELS_OR_0, needs("data.name", "synthetic", "image-folder", "imagenet-tfrecords")
    ] = 0
    """height and width in pixels of generated images (0: 28) and of images read from files (0: 224)"""
    num_classes: Annotated[int, AT_LEAST_0, needs("data.name", "npz", "imagenet-tfrecords", "records")] = 0
    """number of classes; labels start at 0, those of ImageNet at 1. 0: as in the data"""
    augment: Annotated[bool, needs("data.name", "image-folder", "imagenet-tfrecords")] = True
    """random crops and flips of training images from files; off: centre crops"""


@dataclass(frozen=True)
class ModelConfig:
    """Model, batch normalization, metrics."""

    name: str = "mlp"
    """mlp, cnn, resnet20, resnet50, a name of keras.applications (mobilenet-v2), or module:function for your own"""
    sync_batch_norm: bool = False
    """normalize by the statistics of all ranks' batches together instead of each rank's; for small batches per rank"""
    loss: str = ""
    """loss: a name in Keras (mse, binary_crossentropy), or module:function for your own, a function of (y_true, y_pred)
    or a subclass of Loss; empty: cross-entropy of classes, or the loss with which the model is compiled"""
    label_smoothing: Annotated[float, rule.BELOW_1] = 0.0
    """fraction of each label that is spread evenly over all classes"""
    metrics: tuple[str, ...] = ()
    """metrics besides loss and accuracy: top-5, names in Keras (mae, auc), or module:function that returns a metric"""
    split: Annotated[str, rule.SPLIT] = ""
    """layers:K divides the model into K consecutive stages, columns:K the kernels of its layers; each part is on a GPU
    of its own, and a rank has K GPUs"""
    micro_batches: Annotated[int, AT_LEAST_1] = 1
    """parts of a rank's batch, whose gradients are averaged; stages of a split model work on several at a time"""

    @property
    def num_devices(self) -> int:
        """Devices over which a rank's model is divided."""
        return int(self.split.partition(":")[2] or 1)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning-rate scaling, gradient accumulation."""

    name: Literal[tuple(OPTIMIZERS)] = "adam"  # type: ignore[valid-type]
    """update rule"""
    learning_rate: Annotated[float, rule.ABOVE_0] = 0.001
    """learning rate for a global batch of reference_batch_size"""
    learning_rate_scaling: Literal["auto", "linear", "sqrt", "none"] = "auto"
    """linear: learning_rate times global batch / reference_batch_size; sqrt: times its square root; none: unchanged;
    auto: sqrt for adam, adamw and lamb, else linear. With hvd.op adasum, one rank's batch replaces the global one"""
    reference_batch_size: Annotated[
        int, AT_LEAST_1, needs("optimizer.learning_rate_scaling", "auto", "linear", "sqrt")
    ] = 32
    """samples per update that learning_rate is meant for"""
    momentum: Annotated[float, rule.BELOW_1, _optimizer_with("momentum")] = 0.9
    """momentum of sgd and lars"""
    nesterov: Annotated[bool, _optimizer_with("nesterov"), needs_above_0("optimizer.momentum")] = False
    """Nesterov's momentum, for sgd"""
    weight_decay: Annotated[float, rule.FINITE] = 0.0
    """weight decay, except for biases and batch norm: added to the gradient by sgd and lars, else decoupled"""
    trust_coefficient: Annotated[float, rule.ABOVE_0, _optimizer_with("trust_coefficient")] = 0.001
    """size of a layer's step in lars, relative to the norm of its weights"""
    clip_norm: Annotated[float, rule.FINITE] = 0.0
    """maximum global norm of the averaged gradient, which is scaled down to it; use it against divergence. 0: none"""
    accumulation_steps: Annotated[int, AT_LEAST_1] = 1
    """steps whose gradients are averaged into one update; multiplies the global batch by this number"""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the run: warm-up to the full rate, then the named decay."""

    name: Literal["constant", "steps", "cosine", "polynomial"] = "constant"
    """decay after the warm-up"""
    warmup_epochs: Annotated[float, rule.FINITE] = 0.0
    """epochs in which the learning rate grows to its full value, also fractions; 0: no warm-up"""
    warmup_start: Annotated[float, rule.SHARE, needs_above_0("schedule.warmup_epochs")] = 0.0
    """first learning rate, as a fraction of the full one; 0: start at the unscaled learning_rate, if that is lower"""
    milestones: Annotated[tuple[float, ...], rule.ASCENDING_EPOCHS, needs("schedule.name", "steps")] = ()
    """epochs, counted from the start of the run, after which steps multiplies the learning rate by factor"""
    factor: Annotated[float, rule.ABOVE_0, needs("schedule.name", "steps")] = 0.1
    """factor of the learning rate at each milestone of steps"""
    end_factor: Annotated[float, rule.SHARE, needs("schedule.name", "cosine", "polynomial")] = 0.0
    """final learning rate of cosine and polynomial, as a fraction of the full one"""
    power: Annotated[float, rule.ABOVE_0, needs("schedule.name", "polynomial")] = 1.0
    """exponent of polynomial; 1: linear decay"""


@dataclass(frozen=True)
class TrainConfig:
    """Length of the training, batches, precision, early stopping."""

    epochs: Annotated[int, AT_LEAST_1] = 10
    """passes over the training data"""
    batch_size: Annotated[int, AT_LEAST_1] = 32
    """samples per step on each rank; the global batch is this times the number of ranks"""
    virtual_ranks: Annotated[int, rule.POWER_OF_2_OR_0] = 0
    """train as this many ranks would, on as many or fewer, with the same bits on any number; batch_size is then that of
    a virtual rank, and a rank computes those of several. 0: off"""
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16", "float64"] = "float32"
    """compute dtype; weights and allreduce stay float32. mixed_float16 adds dynamic loss scaling; slower on CPUs.
    float64: of weights, too, to compare runs"""
    jit: bool = False
    """compile forward and backward pass with XLA; the allreduce stays outside"""
    patience: Annotated[int, AT_LEAST_0] = 0
    """epochs without improvement of monitor after which Keras' EarlyStopping ends training on all ranks; 0: never"""
    monitor: Annotated[str, needs_above_0("train.patience")] = "test_loss"
    """metric that patience watches: test_accuracy, loss, ..."""
    min_delta: Annotated[float, rule.FINITE, needs_above_0("train.patience")] = 0.0
    """smallest change of monitor that counts as an improvement"""
    callbacks: tuple[str, ...] = ()
    """your Keras callbacks, each a module:function that returns one; run on every rank, with averaged metrics"""
    max_time_s: Annotated[float, AT_LEAST_0] = 0.0
    """seconds after which training stops and saves; for jobs with a time limit. 0: no limit"""
    check_every_steps: Annotated[int, AT_LEAST_1] = 500
    """steps between two checks that all ranks hold the same weights; also after the first step and at the end"""


@dataclass(frozen=True)
class DeviceConfig:
    """Devices: one GPU per rank if there are GPUs, else a share of the host's cores."""

    memory_growth: bool = True
    """allocate GPU memory as needed instead of all at start"""
    memory_mb: Annotated[int, AT_LEAST_0] = 0
    """limit of GPU memory per rank, MB; 0: see memory_growth"""
    share_gpus: bool = False
    """let ranks share GPUs if a host has more ranks than GPUs; gradients are then reduced on the CPU"""
    threads: Annotated[int, AT_LEAST_0] = 0
    """CPU threads per rank; 0: the host's cores divided by its ranks"""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    every_epochs: Annotated[int, AT_LEAST_0] = 1
    """epochs between two checkpoints; 0: none after epochs. The end of the run is always saved"""
    every_steps: Annotated[int, AT_LEAST_0] = 0
    """steps between two checkpoints within an epoch; 0: none"""
    keep: Annotated[int, AT_LEAST_1] = 3
    """number of newest checkpoints to keep"""


@dataclass(frozen=True)
class TrackingConfig:
    """Records besides the metrics of each epoch."""

    every_steps: Annotated[int, AT_LEAST_0] = 100
    """steps between two records of metrics in steps.jsonl and TensorBoard; 0: none"""


@dataclass(frozen=True)
class HealthConfig:
    """Stop, stall and straggler detection."""

    agree_every_steps: Annotated[int, AT_LEAST_1] = 10
    """steps between two agreements of the ranks on whether to stop (signal, time limit, loss of NaN or infinity)"""
    stall_timeout: Annotated[float, rule.FINITE] = 300.0
    """seconds without progress on any rank, at least 20 median steps, after which the job names the blocking rank and
    exits with 75. 0: never"""
    straggler_factor: Annotated[float, rule.FACTOR_OR_0] = 1.5
    """name a rank that takes this many times the median rank's time over 50 steps, once it has cost 5 s; 0: never"""


@dataclass(frozen=True)
class ElasticConfig:
    """Changes of the number of ranks, under ringtrain launch --elastic."""

    commit_every_steps: Annotated[int, AT_LEAST_1] = 10
    """steps between two times at which hosts join and leave"""


@dataclass(frozen=True)
class StrategyConfig:
    """How gradients are summed, and which processes run a step."""

    name: Literal["ring", "mpi-ring", "towers", "multi-worker", "ps-async", "ps-sync"] = "ring"
    """ring: Horovod; mpi-ring: a ring in NumPy, without Horovod; towers: several copies of the model in one process;
    multi-worker: TensorFlow's collectives between the ranks; ps-async, ps-sync: weights on parameter servers, which
    each worker updates alone, or all together"""
    towers: Annotated[int, AT_LEAST_0, needs("strategy.name", "towers")] = 0
    """copies of the model in towers, each on its own device; 0: one per GPU, or 2 without GPUs"""
    reduction: Annotated[Literal["one-device", "all"], needs("strategy.name", "towers")] = "one-device"
    """sum gradients of towers on the controller, or on all devices together"""
    controller: Annotated[
        str, rule.DEVICE, needs("strategy.name", "towers"), needs("strategy.reduction", "one-device")
    ] = "cpu:0"
    """device that sums gradients of towers: cpu:0, gpu:0, gpu:1, ..."""
    servers: Annotated[int, AT_LEAST_1, needs("strategy.name", "ps-async", "ps-sync")] = 1
    """number of ranks that are parameter servers, the first also the coordinator; also ringtrain launch --ps"""
    backup_workers: Annotated[int, AT_LEAST_0, needs("strategy.name", "ps-sync")] = 0
    """slowest workers per step whose gradients ps-sync drops; against stragglers"""


@dataclass(frozen=True)
class HvdConfig:
    """Reduction of gradients over the ranks by Horovod."""

    op: Literal["average", "adasum"] = "average"
    """average of the ranks' gradients, or Adasum (arXiv 2006.02924)"""
    compression: Annotated[str, rule.COMPRESSION] = "none"
    """for slow networks: fp16 (16 bits per number), or powersgd:4 (matrices of rank 4)"""
    groups: Annotated[int, AT_LEAST_0] = 0
    """number of groups of gradients, each sent when complete; 0: send each gradient when it is ready"""
    deterministic: bool = False
    """sum gradients in the same order in every step and run, also with more than two ranks; slower"""


@dataclass(frozen=True)
class Config:
    """Configuration of a run."""

    seed: Annotated[int, rule.SEED] = 0
    """seed of initial weights, sample order and dropout"""
    chaos: str = ""
    """fault to inject, to try out recovery: "rank=1 step=20 mode=sigkill" kills a rank"""
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    hvd: HvdConfig = field(default_factory=HvdConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def __post_init__(self) -> None:
        for name, limit in RULES.items():
            value = value_of(self, name)
            if not limit.holds(value):
                raise ConfigError(f"{name}: got {value}, expected {limit.text}")
        rule.check_values(self)
        combinations.check(self, DEFAULTS)


OPTIONS = options_of(Config)
"""all options by dotted name, e.g. "train.epochs"""
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
"""default value of each"""
RULES = {name: option.rule for name, option in OPTIONS.items() if option.rule}

OF_SCRIPT = (
    "run.directory",
    "run.mirror",
    "checkpoint.",
    "device.",
    "health.",
    "hvd.",
    "elastic.commit_every_steps",
    "tracking.",
    "chaos",
    "model.sync_batch_norm",
    "strategy.name",
    "train.max_time_s",
    "train.check_every_steps",
    "train.jit",
    "train.virtual_ranks",
)
"""Options of a configuration that a script may set; the others are arguments of `fit`, or the script's own."""


def option_types() -> dict[str, Any]:
    """Dotted name and type of every option, e.g. {"train.epochs": int}."""
    return {name: option.kind for name, option in OPTIONS.items()}


def changed_options(config: Config) -> dict[str, Any]:
    """Options that differ from their defaults, by dotted name."""
    default, changed = Config(), {}
    for name in option_types():
        value = value_of(config, name)
        if value != value_of(default, name):
            changed[name] = value
    return changed


def value_of(config: Config, option: str) -> Any:
    """Value of a dotted option, e.g. value_of(config, "train.epochs")."""
    return attrgetter(option)(config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Configuration with other values of dotted options, e.g. {"train.epochs": 3}; may raise ConfigError."""
    sections: dict[str, dict[str, Any]] = {}
    for option, value in values.items():
        section, _, key = option.rpartition(".")
        sections.setdefault(section, {})[key] = value
    changed = {name: dataclasses.replace(getattr(config, name), **new) for name, new in sections.items() if name}
    return dataclasses.replace(config, **changed, **sections.get("", {}))
