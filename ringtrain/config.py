"""The configuration: frozen dataclasses, one per section. Each option has its rule and requirements beside it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from ringtrain import option_rules as rule
from ringtrain.errors import ConfigError
from ringtrain.option_rules import Need, Rule, needs, needs_above_0, needs_other


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


def _optimizer_with(option: str) -> Need:
    return needs("optimizer.name", *(name for name, kind in OPTIMIZERS.items() if option in kind.options))


@dataclass(frozen=True)
class RunConfig:
    """Where the run's files go."""

    name: Annotated[str, rule.FOLDER_NAME] = ""
    """folder of this run; empty: the data set's name and the time"""
    directory: str = "runs"
    """folder that holds all runs"""
    resume: str = "auto"
    """auto: go on from the newest checkpoint in this run's folder, if there is one; must: there has to be one; never;
    or the path of a run or checkpoint to go on from"""
    init_from: str = ""
    """checkpoint, run or .keras file to take initial weights from, and nothing else"""


@dataclass(frozen=True)
class DataConfig:
    """What is learned."""

    name: str = "digits"
    """digits, fashion-mnist, mnist, cifar10, npz, image-folder, imagenet-tfrecords, synthetic, spark, or
    module:function"""
    dir: Annotated[str, needs_other("data.name", "digits", "spark", "synthetic")] = ""
    """folder with the data's files (for cifar10 also its archive); empty: fashion-mnist and mnist look in Debian's
    folder, else Keras downloads them"""
    file: Annotated[str, needs("data.name", "npz")] = ""
    """the file of npz; empty: the only one in dir"""
    num_samples: Annotated[int, rule.at_least(16), needs("data.name", "synthetic")] = 4096
    """samples that synthetic makes, training and test together"""
    image_size: Annotated[
        int, rule.PIXELS_OR_0, needs("data.name", "synthetic", "image-folder", "imagenet-tfrecords")
    ] = 0
    """height and width, pixels, of synthetic's images (0: 28) and of those read from files (0: 224)"""
    num_classes: Annotated[int, rule.AT_LEAST_0, needs("data.name", "npz", "imagenet-tfrecords")] = 0
    """labels go from 0 (ImageNet's from 1) to this number of them; 0: as many as the data says"""
    augment: Annotated[bool, needs("data.name", "cifar10", "image-folder", "imagenet-tfrecords")] = True
    """random crops and flips when training: of images read from files, else their centres, and of cifar10's"""
    on_error: Annotated[Literal["fail", "skip"], needs("data.name", "image-folder", "imagenet-tfrecords")] = "fail"
    """an image file or record that cannot be read ends training, or is left out and counted"""


@dataclass(frozen=True)
class ModelConfig:
    """What learns it."""

    name: str = "mlp"
    """mlp, cnn, resnet20, resnet50, a name of keras.applications (mobilenet-v2), or module:function for your own"""
    sync_batch_norm: bool = False
    """batch normalization by the statistics of all ranks' batches together, not of each rank's own"""
    label_smoothing: Annotated[float, rule.BELOW_1] = 0.0
    """share of each label that is spread evenly over all classes"""
    metrics: tuple[str, ...] = ()
    """besides loss and accuracy: top-5, or module:function that returns a Keras metric"""
    not_averaged: tuple[str, ...] = ()
    """paths of non-trainable weights that stay each rank's own, such as */queue; other weights that
    follow a rank's data are averaged over the ranks before each evaluation, if they are floating-point numbers"""


@dataclass(frozen=True)
class OptimizerConfig:
    """How it is learned."""

    name: Literal[tuple(OPTIMIZERS)] = "adam"  # type: ignore[valid-type]
    """update rule"""
    learning_rate: Annotated[float, rule.ABOVE_0] = 0.001
    """learning rate for a global batch of reference_batch_size"""
    learning_rate_scaling: Literal["auto", "linear", "sqrt", "none"] = "auto"
    """linear: learning rate times global batch / reference_batch_size; sqrt: times its square root; none: as it is;
    auto: sqrt for adam, adamw and lamb, else linear. With hvd.op adasum, one rank's batch is what counts"""
    reference_batch_size: Annotated[
        int, rule.AT_LEAST_1, needs("optimizer.learning_rate_scaling", "auto", "linear", "sqrt")
    ] = 32
    """samples per update that learning_rate is meant for"""
    momentum: Annotated[float, rule.BELOW_1, _optimizer_with("momentum")] = 0.9
    """momentum of sgd and lars"""
    nesterov: Annotated[bool, _optimizer_with("nesterov"), needs_above_0("optimizer.momentum")] = False
    """Nesterov's momentum, for sgd"""
    weight_decay: Annotated[float, rule.FINITE] = 0.0
    """pull of weights towards 0, except biases and batch norm: added to the gradient (sgd, lars), else decoupled"""
    trust_coefficient: Annotated[float, rule.ABOVE_0, _optimizer_with("trust_coefficient")] = 0.001
    """of lars: a layer's step, relative to the norm of its weights"""
    clip_norm: Annotated[float, rule.FINITE] = 0.0
    """longest that the averaged gradient of all weights together may be; longer ones are shortened; 0: any"""
    accumulation_steps: Annotated[int, rule.AT_LEAST_1] = 1
    """steps whose gradients are averaged into one update, which makes the global batch so many times as large"""


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate changes: up to its full value over the warm-up, then by the rule of that name."""

    name: Literal["constant", "steps", "cosine", "polynomial"] = "constant"
    """what follows the warm-up"""
    warmup_epochs: Annotated[float, rule.FINITE] = 0.0
    """epochs over which the learning rate grows to its full value; may be a fraction; 0: none"""
    warmup_start: Annotated[float, rule.SHARE, needs_above_0("schedule.warmup_epochs")] = 0.0
    """share of the full learning rate at the first step; 0: what it was before scaling, if that is less"""
    milestones: Annotated[tuple[float, ...], rule.ASCENDING_EPOCHS, needs("schedule.name", "steps")] = ()
    """epochs, from the start of the run, at whose end steps multiplies the learning rate by factor"""
    factor: Annotated[float, rule.ABOVE_0, needs("schedule.name", "steps")] = 0.1
    """of steps"""
    end_factor: Annotated[float, rule.SHARE, needs("schedule.name", "cosine", "polynomial")] = 0.0
    """share of the full learning rate that cosine and polynomial come down to at the end of the run"""
    power: Annotated[float, rule.ABOVE_0, needs("schedule.name", "polynomial")] = 1.0
    """of polynomial; 1: a straight line"""
    plateau_patience: Annotated[int, rule.AT_LEAST_0] = 0
    """epochs without a better train.monitor after which the learning rate is multiplied by plateau_factor; 0: never"""
    plateau_factor: Annotated[float, rule.WITHIN_0_AND_1, needs_above_0("schedule.plateau_patience")] = 0.1
    """of plateau_patience"""


@dataclass(frozen=True)
class TrainConfig:
    """How long, and in what batches."""

    epochs: Annotated[int, rule.AT_LEAST_1] = 10
    """passes over the training data"""
    batch_size: Annotated[int, rule.AT_LEAST_1] = 32
    """samples per step on each rank; the global batch is this times the number of ranks"""
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """of computing; weights and sums are float32. mixed_float16 scales the loss, as gradients allow"""
    jit: bool = False
    """compile forward and backward pass with XLA; the allreduce stays outside"""
    patience: Annotated[int, rule.AT_LEAST_0] = 0
    """epochs without a better monitor after which training stops, on all ranks; 0: never"""
    monitor: Annotated[str, needs_above_0("train.patience", "schedule.plateau_patience")] = "test_loss"
    """metric that patience and schedule.plateau_patience watch: test_accuracy, loss, ..."""
    min_delta: Annotated[float, rule.FINITE, needs_above_0("train.patience", "schedule.plateau_patience")] = 0.0
    """a monitor is better if it is so by more than this"""
    target_accuracy: Annotated[float, rule.SHARE] = 0.0
    """training stops after the first epoch whose test accuracy is at least this; 0: never"""
    callbacks: tuple[str, ...] = ()
    """Keras callbacks of your own, each module:function that returns one; on every rank, with all ranks' metrics"""
    max_time_s: Annotated[float, rule.AT_LEAST_0] = 0.0
    """training stops, saves and ends after so many seconds; 0: no limit"""
    check_every_steps: Annotated[int, rule.AT_LEAST_1] = 500
    """steps between two checks that all ranks hold the same weights (one more after the first step and at the end)"""


@dataclass(frozen=True)
class DeviceConfig:
    """What it runs on: one GPU per rank where there are any, else a share of the host's cores."""

    memory_growth: bool = True
    """take a GPU's memory as it is needed, not all at once"""
    memory_fraction: Annotated[float, rule.SHARE] = 0.0
    """share of a GPU's memory to take at start, above 0 and up to 1; 0: memory_growth decides"""
    memory_mb: Annotated[int, rule.AT_LEAST_0] = 0
    """limit of GPU memory per rank, MB; 0: memory_growth decides"""
    share_gpus: bool = False
    """let several ranks use one GPU when a host has more ranks than GPUs; gradients are then reduced on the CPU"""
    threads: Annotated[int, rule.AT_LEAST_0] = 0
    """CPU threads per rank; 0: the host's cores divided by its ranks"""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run's state is saved, and what is kept."""

    every_epochs: Annotated[int, rule.AT_LEAST_0] = 1
    """epochs between two checkpoints; 0: none at the end of epochs. The end of the run is always saved"""
    every_steps: Annotated[int, rule.AT_LEAST_0] = 0
    """steps between two checkpoints within an epoch; 0: none"""
    every_minutes: Annotated[float, rule.FINITE] = 0.0
    """minutes between two checkpoints, to the next agreement of the ranks (health.agree_every_steps); 0: none"""
    keep: Annotated[int, rule.AT_LEAST_1] = 3
    """newest checkpoints that stay, besides the best"""
    saved_model: bool = False
    """also export the trained model as TensorFlow's SavedModel, beside model.keras"""


@dataclass(frozen=True)
class TrackingConfig:
    """What is written down besides the metrics of each epoch."""

    every_steps: Annotated[int, rule.AT_LEAST_0] = 100
    """steps between two lines of steps.jsonl, with the gradient's norm, also to TensorBoard; 0: none"""
    histograms: bool = False
    """of all weights, to TensorBoard after each epoch"""
    timeline_steps: Annotated[int, rule.AT_LEAST_0] = 0
    """steps of which every rank's timeline is drawn, into timeline.json; 0: none"""


@dataclass(frozen=True)
class HealthConfig:
    """How a run is watched and ended."""

    agree_every_steps: Annotated[int, rule.AT_LEAST_1] = 10
    """steps between two agreements of the ranks on whether to stop (a signal, the time limit, a loss that is NaN)"""
    stall_timeout: Annotated[float, rule.FINITE] = 300.0
    """seconds without any progress, and 20 times the median step, after which the rank that keeps the others waiting is
    named and the job ends; 0: never"""
    straggler_factor: Annotated[float, rule.FACTOR_OR_0] = 1.5
    """a rank that needs so many times the median rank's time for 50 steps is named when that has cost 5 s; 0: none"""


@dataclass(frozen=True)
class ElasticConfig:
    """What a change of the number of ranks does, under ringtrain launch --elastic."""

    keep: Literal["global-batch", "per-rank-batch"] = "global-batch"
    """global-batch: the ranks share it anew, the learning rate stays; per-rank-batch: global batch and learning rate
    change with the number of ranks, by optimizer.learning_rate_scaling"""
    commit_every_steps: Annotated[int, rule.AT_LEAST_1] = 10
    """steps between two commits, which a failure goes back to, and at which new hosts are taken in"""


@dataclass(frozen=True)
class StrategyConfig:
    """What adds up gradients, and who runs a step."""

    name: Literal["ring", "mpi-ring", "towers", "multi-worker", "ps-async", "ps-sync"] = "ring"
    """ring: Horovod; mpi-ring: the readable ring, without Horovod; towers: several copies of the model in one process;
    multi-worker: TensorFlow's collectives between the ranks; ps-async, ps-sync: weights on parameter servers, which
    each worker updates alone, or all together"""
    towers: Annotated[int, rule.AT_LEAST_0, needs("strategy.name", "towers")] = 0
    """copies of the model of towers, each on a device of its own; 0: one per GPU, without GPUs 2"""
    reduction: Annotated[Literal["one-device", "all"], needs("strategy.name", "towers")] = "one-device"
    """towers' gradients are added up on the controller, or by all devices together"""
    controller: Annotated[
        str, rule.DEVICE, needs("strategy.name", "towers"), needs("strategy.reduction", "one-device")
    ] = "cpu:0"
    """device that adds up towers' gradients: cpu:0, gpu:0, gpu:1, ..."""
    communication: Annotated[Literal["auto", "ring", "nccl"], needs("strategy.name", "multi-worker")] = "auto"
    """of multi-worker: TensorFlow's ring, NCCL between GPUs, or as it decides"""
    servers: Annotated[int, rule.AT_LEAST_1, needs("strategy.name", "ps-async", "ps-sync")] = 1
    """ranks that are parameter servers, the first of them the chief too; ringtrain launch --ps says it as well"""
    variables: Annotated[Literal["round-robin", "by-size"], needs("strategy.name", "ps-async", "ps-sync")] = (
        "round-robin"
    )
    """spreads variables over the servers: one after the other, or each to the one that holds the fewest bytes"""
    backup_workers: Annotated[int, rule.AT_LEAST_0, needs("strategy.name", "ps-sync")] = 0
    """of ps-sync: each step takes the gradients of all workers but so many, and drops those that come late"""


@dataclass(frozen=True)
class HvdConfig:
    """How gradients are combined over the ranks."""

    op: Literal["average", "adasum"] = "average"
    """average of the ranks' gradients, or Adasum (arXiv 2006.02924)"""
    compression: Literal["none", "fp16"] = "none"
    """fp16: send gradients in half precision"""
    fusion_mb: Annotated[float, rule.FINITE_OR_UNSET] = -1.0
    """MB of gradients that are sent in one message; 0: each alone; -1: 4 without GPUs, else Horovod's 128, or as its
    environment has it"""
    cycle_time_ms: Annotated[float, rule.FINITE_OR_UNSET] = -1.0
    """milliseconds for which ready gradients are collected; -1: as Horovod has it (1), or its environment"""
    groups: Annotated[int, rule.AT_LEAST_0] = 0
    """groups of gradients, each of which is sent when all of it is ready; 0: each gradient as soon as it is"""
    deterministic: bool = False
    """add the ranks' gradients in the same order in every step and run, also with more than two ranks"""


@dataclass(frozen=True)
class Config:
    """Everything that shapes a run."""

    seed: Annotated[int, rule.SEED] = 0
    """of initial weights, sample order and dropout"""
    chaos: str = ""
    """a fault to try out, e.g. "rank=1 step=20 mode=sigkill"; see docs/faults.md"""
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
        for name, (expected, holds) in RULES.items():
            value = value_of(self, name)
            if not holds(value):
                raise ConfigError(f"{name}: got {value}, expected {expected}")
        if self.device.memory_fraction and self.device.memory_mb:
            raise ConfigError("device.memory_fraction and device.memory_mb are both set: keep one, set the other to 0")
        if self.train.jit and self.model.sync_batch_norm:
            raise ConfigError(
                "train.jit and model.sync_batch_norm are both set: synchronized batch norm needs an allreduce in the"
                " forward pass, for which XLA has no kernel: keep one"
            )
        if self.hvd.deterministic and self.hvd.fusion_mb > 0:
            raise ConfigError("hvd.deterministic and hvd.fusion_mb are both set: deterministic runs fuse nothing")
        if self.hvd.groups and self.hvd.deterministic:
            raise ConfigError("hvd.deterministic and hvd.groups are both set: deterministic runs send all as one")
        if self.hvd.groups and self.hvd.op == "adasum":
            raise ConfigError("hvd.op adasum and hvd.groups are both set: Adasum combines tensor by tensor")
        _check_schedule(self.schedule, self.train.epochs)


def _check_schedule(schedule: ScheduleConfig, epochs: int) -> None:
    warmup, milestones = schedule.warmup_epochs, schedule.milestones
    if warmup > epochs:
        raise ConfigError(f"schedule.warmup_epochs: got {warmup:g}, expected no more than train.epochs ({epochs})")
    if schedule.name == "steps" and not milestones:
        raise ConfigError("schedule.name: steps needs schedule.milestones: give epochs such as 30 60 80")
    if milestones and milestones[0] < warmup:
        within = f"within the warm-up (schedule.warmup_epochs {warmup:g})"
        raise ConfigError(f"schedule.milestones: got {milestones[0]:g}, expected none {within}")


def option_types(section: type = Config, prefix: str = "", include_extras: bool = False) -> dict[str, Any]:
    """Dotted name and type of every option, e.g. {"train.epochs": int}; `include_extras` keeps `Annotated`."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(section, include_extras=include_extras).items():
        if dataclasses.is_dataclass(kind):
            types |= option_types(kind, f"{prefix}{name}.", include_extras)  # type: ignore[arg-type]
        else:
            types[prefix + name] = kind
    return types


_NOTES = {option: getattr(kind, "__metadata__", ()) for option, kind in option_types(include_extras=True).items()}
RULES = {option: note for option, notes in _NOTES.items() for note in notes if isinstance(note, Rule)}
NEEDS = {option: [note for note in notes if isinstance(note, Need)] for option, notes in _NOTES.items()}


def without_effect(config: Config) -> list[str]:
    """Options that are set without effect, a sentence each, e.g. "schedule.power has no effect: it needs ..."."""
    sentences = [
        f"{option} has no effect: it needs {' and '.join(need.text for need in NEEDS[option])}"
        for option in changed_options(config)
        if not all(need.is_met(config) for need in NEEDS[option])
    ]
    late = [f"{epoch:g}" for epoch in config.schedule.milestones if epoch >= config.train.epochs]
    if config.schedule.name == "steps" and late:
        sentences.append(f"schedule.milestones {' '.join(late)}: the run ends after epoch {config.train.epochs}")
    if config.optimizer.name == "adamw" and not config.optimizer.weight_decay:
        sentences.append("optimizer.name adamw without optimizer.weight_decay is adam")
    return sentences


def nearest(name: str, known: Collection[str]) -> str:
    """End of a message about an unknown name: "did you mean mlp?", or "expected one of cnn, mlp" if none is similar."""
    elsewhere = [one for one in known if "." in one and one.rpartition(".")[2] == name.rpartition(".")[2]]
    similar = elsewhere if len(elsewhere) == 1 else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {similar[0]}?" if similar else f"expected one of {', '.join(sorted(known))}"


def changed_options(config: Config) -> dict[str, Any]:
    """Options that differ from their defaults, by dotted name."""
    default = Config()
    return {
        name: value_of(config, name) for name in option_types() if value_of(config, name) != value_of(default, name)
    }


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


def lower_is_better(metric: str) -> bool:
    """Returns whether a metric improves as it falls, by its name: losses and errors do, all others do not."""
    return "loss" in metric or "error" in metric
