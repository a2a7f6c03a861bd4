"""The configuration: frozen dataclasses, one per section, and the numbers that follow from them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Collection, Mapping
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
    dir: str = ""
    """folder with the data's files (for cifar10 also its archive); empty: fashion-mnist and mnist look in Debian's
    folder, else Keras downloads them"""
    file: str = ""
    """the file of npz; empty: the only one in dir"""
    num_samples: int = 4096
    """samples that synthetic makes, training and test together"""
    image_size: int = 0
    """height and width, pixels, of synthetic's images (0: 28) and of those read from files (0: 224)"""
    num_classes: int = 0
    """labels go from 0 (ImageNet's from 1) to this number of them; 0: as many as the data says"""
    augment: bool = True
    """random crops and flips when training: of images read from files, else their centres, and of cifar10's"""
    on_error: Literal["fail", "skip"] = "fail"
    """an image file or record that cannot be read ends training, or is left out and counted"""


@dataclass(frozen=True)
class ModelConfig:
    """What learns it."""

    name: str = "mlp"
    """mlp, cnn, resnet20, resnet50, a name of keras.applications (mobilenet-v2), or module:function for your own"""
    sync_batch_norm: bool = False
    """batch normalization by the statistics of all ranks' batches together, not of each rank's own"""
    label_smoothing: float = 0.0
    """share of each label that is spread evenly over all classes"""
    metrics: tuple[str, ...] = ()
    """besides loss and accuracy: top-5, or module:function that returns a Keras metric"""
    not_averaged: tuple[str, ...] = ()
    """paths of non-trainable weights that stay each rank's own, such as */queue; other weights that
    follow a rank's data are averaged over the ranks before each evaluation, if they are floating-point numbers"""


@dataclass(frozen=True)
class OptimizerConfig:
    """How it is learned."""

    name: Literal["sgd", "adam", "adamw", "lamb", "lars"] = "adam"
    """update rule"""
    learning_rate: float = 0.001
    """learning rate for a global batch of reference_batch_size"""
    learning_rate_scaling: Literal["auto", "linear", "sqrt", "none"] = "auto"
    """linear: learning rate times global batch / reference_batch_size; sqrt: times its square root; none: as it is;
    auto: sqrt for adam, adamw and lamb, else linear. With hvd.op adasum, one rank's batch is what counts"""
    reference_batch_size: int = 32
    """samples per update that learning_rate is meant for"""
    momentum: float = 0.9
    """momentum of sgd and lars"""
    nesterov: bool = False
    """Nesterov's momentum, for sgd"""
    weight_decay: float = 0.0
    """pull of weights towards 0, except biases and batch norm: added to the gradient (sgd, lars), else decoupled"""
    trust_coefficient: float = 0.001
    """of lars: a layer's step, relative to the norm of its weights"""
    clip_norm: float = 0.0
    """longest that the averaged gradient of all weights together may be; longer ones are shortened; 0: any"""
    accumulation_steps: int = 1
    """steps whose gradients are averaged into one update, which makes the global batch so many times as large"""


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate changes: up to its full value over the warm-up, then by the rule of that name."""

    name: Literal["constant", "steps", "cosine", "polynomial"] = "constant"
    """what follows the warm-up"""
    warmup_epochs: float = 0.0
    """epochs over which the learning rate grows to its full value; may be a fraction; 0: none"""
    warmup_start: float = 0.0
    """share of the full learning rate at the first step; 0: what it was before scaling, if that is less"""
    milestones: tuple[float, ...] = ()
    """epochs, from the start of the run, at whose end steps multiplies the learning rate by factor"""
    factor: float = 0.1
    """of steps"""
    end_factor: float = 0.0
    """share of the full learning rate that cosine and polynomial come down to at the end of the run"""
    power: float = 1.0
    """of polynomial; 1: a straight line"""
    plateau_patience: int = 0
    """epochs without a better train.monitor after which the learning rate is multiplied by plateau_factor; 0: never"""
    plateau_factor: float = 0.1
    """of plateau_patience"""


@dataclass(frozen=True)
class TrainConfig:
    """How long, and in what batches."""

    epochs: int = 10
    """passes over the training data"""
    batch_size: int = 32
    """samples per step on each rank; the global batch is this times the number of ranks"""
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """of computing; weights and sums are float32. mixed_float16 scales the loss, as gradients allow"""
    jit: bool = False
    """compile forward and backward pass with XLA; the allreduce stays outside"""
    patience: int = 0
    """epochs without a better monitor after which training stops, on all ranks; 0: never"""
    monitor: str = "test_loss"
    """metric that patience and schedule.plateau_patience watch: test_accuracy, loss, ..."""
    min_delta: float = 0.0
    """a monitor is better if it is so by more than this"""
    target_accuracy: float = 0.0
    """training stops after the first epoch whose test accuracy is at least this; 0: never"""
    callbacks: tuple[str, ...] = ()
    """Keras callbacks of your own, each module:function that returns one; on every rank, with all ranks' metrics"""
    max_time_s: float = 0.0
    """training stops, saves and ends after so many seconds; 0: no limit"""
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
    """let several ranks use one GPU when a host has more ranks than GPUs; gradients are then reduced on the CPU"""
    threads: int = 0
    """CPU threads per rank; 0: the host's cores divided by its ranks"""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run's state is saved, and what is kept."""

    every_epochs: int = 1
    """epochs between two checkpoints; 0: none at the end of epochs. The end of the run is always saved"""
    every_steps: int = 0
    """steps between two checkpoints within an epoch; 0: none"""
    every_minutes: float = 0.0
    """minutes between two checkpoints, to the next agreement of the ranks (health.agree_every_steps); 0: none"""
    keep: int = 3
    """newest checkpoints that stay, besides the best"""
    saved_model: bool = False
    """also export the trained model as TensorFlow's SavedModel, beside model.keras"""


@dataclass(frozen=True)
class TrackingConfig:
    """What is written down besides the metrics of each epoch."""

    every_steps: int = 100
    """steps between two lines of steps.jsonl, with the gradient's norm, also to TensorBoard; 0: none"""
    histograms: bool = False
    """of all weights, to TensorBoard after each epoch"""
    timeline_steps: int = 0
    """steps of which every rank's timeline is drawn, into timeline.json; 0: none"""


@dataclass(frozen=True)
class HealthConfig:
    """How a run is watched and ended."""

    agree_every_steps: int = 10
    """steps between two agreements of the ranks on whether to stop (a signal, the time limit, a loss that is NaN)"""
    stall_timeout: float = 300.0
    """seconds without any progress, and 20 times the median step, after which the rank that keeps the others waiting is
    named and the job ends; 0: never"""
    straggler_factor: float = 1.5
    """a rank that needs so many times the median rank's time for 50 steps is named when that has cost 5 s; 0: none"""


@dataclass(frozen=True)
class ElasticConfig:
    """What a change of the number of ranks does, under ringtrain launch --elastic."""

    keep: Literal["global-batch", "per-rank-batch"] = "global-batch"
    """global-batch: the ranks share it anew, the learning rate stays; per-rank-batch: global batch and learning rate
    change with the number of ranks, by optimizer.learning_rate_scaling"""
    commit_every_steps: int = 10
    """steps between two commits, which a failure goes back to, and at which new hosts are taken in"""


@dataclass(frozen=True)
class StrategyConfig:
    """What adds up gradients, and who runs a step."""

    name: Literal["ring", "mpi-ring", "towers", "multi-worker", "ps-async", "ps-sync"] = "ring"
    """ring: Horovod; mpi-ring: the readable ring, without Horovod; towers: several copies of the model in one process;
    multi-worker: TensorFlow's collectives between the ranks; ps-async, ps-sync: weights on parameter servers, which
    each worker updates alone, or all together"""
    towers: int = 0
    """copies of the model of towers, each on a device of its own; 0: one per GPU, without GPUs 2"""
    reduction: Literal["one-device", "all"] = "one-device"
    """towers' gradients are added up on the controller, or by all devices together"""
    controller: str = "cpu:0"
    """device that adds up towers' gradients: cpu:0, gpu:0, gpu:1, ..."""
    communication: Literal["auto", "ring", "nccl"] = "auto"
    """of multi-worker: TensorFlow's ring, NCCL between GPUs, or as it decides"""
    servers: int = 1
    """ranks that are parameter servers, the first of them the chief too; ringtrain launch --ps says it as well"""
    variables: Literal["round-robin", "by-size"] = "round-robin"
    """spreads variables over the servers: one after the other, or each to the one that holds the fewest bytes"""
    backup_workers: int = 0
    """of ps-sync: each step takes the gradients of all workers but so many, and drops those that come late"""


@dataclass(frozen=True)
class HvdConfig:
    """How gradients are combined over the ranks."""

    op: Literal["average", "adasum"] = "average"
    """average of the ranks' gradients, or Adasum (arXiv 2006.02924)"""
    compression: Literal["none", "fp16"] = "none"
    """fp16: send gradients in half precision"""
    fusion_mb: float = -1.0
    """MB of gradients that are sent in one message; 0: each alone; -1: 4 without GPUs, else Horovod's 128, or as its
    environment has it"""
    cycle_time_ms: float = -1.0
    """milliseconds for which ready gradients are collected; -1: as Horovod has it (1), or its environment"""
    groups: int = 0
    """groups of gradients, each of which is sent when all of it is ready; 0: each gradient as soon as it is"""
    deterministic: bool = False
    """add the ranks' gradients in the same order in every step and run, also with more than two ranks"""


@dataclass(frozen=True)
class Config:
    """Everything that shapes a run."""

    seed: int = 0
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
        for name, (rule, holds) in RULES.items():
            value = value_of(self, name)
            if not holds(value):
                raise ConfigError(f"{name}: got {value}, expected {rule}")
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
        raise ConfigError(
            f"schedule.milestones: got {milestones[0]:g}, expected none within the warm-up (schedule.warmup_epochs"
            f" {warmup:g})"
        )


_AT_LEAST_0 = ("0 or more", lambda value: value >= 0)
_AT_LEAST_1 = ("1 or more", lambda value: value >= 1)
_FINITE = ("a number from 0 on", lambda value: 0 <= value < float("inf"))
_ABOVE_0 = ("a number above 0", lambda value: 0 < value < float("inf"))
_SHARE = ("0 to 1", lambda value: 0 <= value <= 1)
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "seed": ("0 to 4294967295", lambda value: 0 <= value < 2**32),
    "run.name": ("a name, not a path", lambda value: "/" not in value and value not in (".", "..")),
    "data.num_samples": ("16 or more", lambda value: value >= 16),
    "data.image_size": ("0, or 4 or more", lambda value: value == 0 or value >= 4),
    "data.num_classes": _AT_LEAST_0,
    "optimizer.learning_rate": _ABOVE_0,
    "optimizer.reference_batch_size": _AT_LEAST_1,
    "optimizer.momentum": ("0 up to 1, 1 excluded", lambda value: 0 <= value < 1),
    "optimizer.weight_decay": _FINITE,
    "optimizer.trust_coefficient": _ABOVE_0,
    "optimizer.clip_norm": _FINITE,
    "optimizer.accumulation_steps": _AT_LEAST_1,
    "schedule.warmup_epochs": _FINITE,
    "schedule.warmup_start": _SHARE,
    "schedule.milestones": (
        "epochs above 0, each after the one before",
        lambda value: all(0 < one < float("inf") for one in value) and list(value) == sorted(set(value)),
    ),
    "schedule.factor": _ABOVE_0,
    "schedule.end_factor": _SHARE,
    "schedule.power": _ABOVE_0,
    "schedule.plateau_patience": _AT_LEAST_0,
    "schedule.plateau_factor": ("above 0, below 1", lambda value: 0 < value < 1),
    "model.label_smoothing": ("0 up to 1, 1 excluded", lambda value: 0 <= value < 1),
    "train.epochs": _AT_LEAST_1,
    "train.batch_size": _AT_LEAST_1,
    "train.check_every_steps": _AT_LEAST_1,
    "train.max_time_s": _AT_LEAST_0,
    "train.patience": _AT_LEAST_0,
    "train.min_delta": _FINITE,
    "train.target_accuracy": _SHARE,
    "tracking.every_steps": _AT_LEAST_0,
    "tracking.timeline_steps": _AT_LEAST_0,
    "checkpoint.every_epochs": _AT_LEAST_0,
    "checkpoint.every_steps": _AT_LEAST_0,
    "checkpoint.every_minutes": _FINITE,
    "checkpoint.keep": _AT_LEAST_1,
    "health.agree_every_steps": _AT_LEAST_1,
    "health.stall_timeout": _FINITE,
    "health.straggler_factor": ("0, or a number above 1", lambda value: value == 0 or 1 < value < float("inf")),
    "elastic.commit_every_steps": _AT_LEAST_1,
    "device.memory_fraction": ("0 to 1", lambda value: 0 <= value <= 1),
    "device.memory_mb": _AT_LEAST_0,
    "device.threads": _AT_LEAST_0,
    "strategy.towers": _AT_LEAST_0,
    "strategy.servers": _AT_LEAST_1,
    "strategy.backup_workers": _AT_LEAST_0,
    "strategy.controller": (
        "cpu:0, gpu:0, gpu:1, ...",
        lambda value: value == "cpu:0" or (value[:4] == "gpu:" and value[4:].isdecimal()),
    ),
    "hvd.fusion_mb": ("0 or more, or -1", lambda value: value == -1 or 0 <= value < float("inf")),
    "hvd.groups": _AT_LEAST_0,
    "hvd.cycle_time_ms": ("0 or more, or -1", lambda value: value == -1 or 0 <= value < float("inf")),
}


SCALINGS: dict[str, Callable[[float], float]] = {"linear": lambda k: k, "sqrt": math.sqrt, "none": lambda k: 1.0}
ADAPTIVE = ("adam", "adamw", "lamb")
"""Optimizers whose step does not grow with the gradient."""


def scaling_rule(option: str, optimizer: str) -> str:
    """Returns the key of SCALINGS that optimizer.learning_rate_scaling means for an optimizer."""
    return option if option != "auto" else "sqrt" if optimizer in ADAPTIVE else "linear"


def scaling_of(config: Config) -> tuple[str, str]:
    """Returns a key of SCALINGS, and the reasons for it that the option itself does not give, or ""."""
    rule, why = scaling_rule(config.optimizer.learning_rate_scaling, config.optimizer.name), []
    if config.optimizer.learning_rate_scaling == "auto":
        why.append(f"auto: {rule} for {'adaptive optimizers' if rule == 'sqrt' else config.optimizer.name}")
    if config.hvd.op == "adasum" and rule != "none":
        why.append("one rank's batch: Adasum scales with the ranks")
    return rule, "; ".join(why)


def scaled_batch(config: Config, global_batch_size: int, num_ranks: int) -> int:
    """Returns the samples per update that the learning rate is scaled for: Adasum itself scales with the ranks."""
    return global_batch_size // (num_ranks if config.hvd.op == "adasum" else 1)


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
    accumulation_steps: int
    """steps per update of the weights"""
    global_batch_size: int
    """samples per update on all ranks"""
    steps_per_epoch: int
    """batches that each rank trains in an epoch"""
    num_steps: int
    """of the whole run"""
    dropped_per_epoch: int
    """samples that do not fill a global batch; others in each epoch"""
    learning_rate: float
    """after scaling, at the end of warm-up"""
    initial_learning_rate: float
    """at step 0"""
    warmup_steps: int
    """steps before the first one at the full learning rate"""
    milestone_steps: tuple[int, ...]
    """first steps after each of the schedule's milestones"""


def derive(config: Config, num_ranks: int, num_train: int, num_test: int) -> Numbers:
    """Works out a run's numbers.

    Args:
        config: the resolved configuration.
        num_ranks: processes that train together.
        num_train: training samples.
        num_test: test samples.

    Returns:
        The numbers. With k = global batch / reference batch, linear scaling of the learning rate multiplies by k (Goyal
        et al. 2017, arXiv 1706.02677, section 2.1), sqrt by k ** 0.5 (Krizhevsky 2014, arXiv 1404.5997; for adaptive
        optimizers Malladi et al. 2022, arXiv 2205.10287). With Adasum k is one rank's batch / reference batch.

    Raises:
        ConfigError: the global batch is larger than the training data.
    """
    optimizer, schedule = config.optimizer, config.schedule
    batch_size, accumulated = config.train.batch_size, optimizer.accumulation_steps
    global_batch_size = batch_size * num_ranks * accumulated
    if global_batch_size > num_train:
        times = f", {accumulated} times accumulated," if accumulated > 1 else ""
        raise ConfigError(
            f"train.batch_size: {batch_size} on {num_ranks} rank{'s' * (num_ranks != 1)}{times} makes a global batch of"
            f" {global_batch_size}, but {config.data.name} has {num_train} training samples:"
            f" expected {max(1, num_train // (num_ranks * accumulated))} or less"
        )
    updates_per_epoch = num_train // global_batch_size
    steps_per_epoch = updates_per_epoch * accumulated
    num_scaled = scaled_batch(config, global_batch_size, num_ranks)
    scale = SCALINGS[scaling_of(config)[0]](num_scaled / optimizer.reference_batch_size)
    learning_rate = optimizer.learning_rate * scale
    unscaled = min(optimizer.learning_rate, learning_rate)
    from_start = schedule.warmup_start * learning_rate if schedule.warmup_start else unscaled

    def steps_of(epochs: float) -> int:
        """The nearest step that begins an update."""
        return round(epochs * updates_per_epoch) * accumulated

    return Numbers(
        num_ranks=num_ranks,
        num_train=num_train,
        num_test=num_test,
        batch_size=batch_size,
        accumulation_steps=accumulated,
        global_batch_size=global_batch_size,
        steps_per_epoch=steps_per_epoch,
        num_steps=steps_per_epoch * config.train.epochs,
        dropped_per_epoch=num_train - updates_per_epoch * global_batch_size,
        learning_rate=learning_rate,
        initial_learning_rate=from_start if steps_of(schedule.warmup_epochs) else learning_rate,
        warmup_steps=steps_of(schedule.warmup_epochs),
        milestone_steps=tuple(steps_of(epochs) for epochs in schedule.milestones),
    )


_PATIENCE = (
    "train.patience or schedule.plateau_patience above 0",
    lambda config: config.train.patience > 0 or config.schedule.plateau_patience > 0,
)


def _of_sources(*names: str) -> tuple[str, Callable[[Config], bool]]:
    """For options of some data sources; a user's own source may look at any."""
    return f"data.name {' or '.join(names)}", lambda config: config.data.name in names or ":" in config.data.name


_SERVERS = ("strategy.name ps-async or ps-sync", lambda config: config.strategy.name in ("ps-async", "ps-sync"))
_TOWERS = ("strategy.name towers", lambda config: config.strategy.name == "towers")

# Options that do nothing unless others are set: what they need, and whether they have it.
NEEDS: dict[str, tuple[str, Callable[[Config], bool]]] = {
    "data.dir": (
        "data.name other than digits, spark or synthetic",
        lambda config: config.data.name not in ("digits", "spark", "synthetic"),
    ),
    "data.file": _of_sources("npz"),
    "data.num_samples": _of_sources("synthetic"),
    "data.image_size": _of_sources("synthetic", "image-folder", "imagenet-tfrecords"),
    "data.num_classes": _of_sources("npz", "imagenet-tfrecords"),
    "data.augment": _of_sources("cifar10", "image-folder", "imagenet-tfrecords"),
    "data.on_error": _of_sources("image-folder", "imagenet-tfrecords"),
    "optimizer.reference_batch_size": (
        "optimizer.learning_rate_scaling auto, linear or sqrt",
        lambda config: config.optimizer.learning_rate_scaling != "none",
    ),
    "optimizer.momentum": ("optimizer.name sgd or lars", lambda config: config.optimizer.name in ("sgd", "lars")),
    "optimizer.nesterov": (
        "optimizer.name sgd and optimizer.momentum above 0",
        lambda config: config.optimizer.name == "sgd" and config.optimizer.momentum > 0,
    ),
    "optimizer.trust_coefficient": ("optimizer.name lars", lambda config: config.optimizer.name == "lars"),
    "schedule.warmup_start": ("schedule.warmup_epochs above 0", lambda config: config.schedule.warmup_epochs > 0),
    "schedule.milestones": ("schedule.name steps", lambda config: config.schedule.name == "steps"),
    "schedule.factor": ("schedule.name steps", lambda config: config.schedule.name == "steps"),
    "schedule.end_factor": (
        "schedule.name cosine or polynomial",
        lambda config: config.schedule.name in ("cosine", "polynomial"),
    ),
    "schedule.power": ("schedule.name polynomial", lambda config: config.schedule.name == "polynomial"),
    "schedule.plateau_factor": (
        "schedule.plateau_patience above 0",
        lambda config: config.schedule.plateau_patience > 0,
    ),
    "strategy.towers": _TOWERS,
    "strategy.reduction": _TOWERS,
    "strategy.controller": (
        "strategy.name towers and strategy.reduction one-device",
        lambda config: config.strategy.name == "towers" and config.strategy.reduction == "one-device",
    ),
    "strategy.communication": (
        "strategy.name multi-worker",
        lambda config: config.strategy.name == "multi-worker",
    ),
    "strategy.servers": _SERVERS,
    "strategy.variables": _SERVERS,
    "strategy.backup_workers": ("strategy.name ps-sync", lambda config: config.strategy.name == "ps-sync"),
    "train.monitor": _PATIENCE,
    "train.min_delta": _PATIENCE,
}


def without_effect(config: Config) -> list[str]:
    """What was set and does nothing, a sentence each, e.g. "schedule.power has no effect: it needs ..."."""
    defaults, found = Config(), []
    for option, (need, has_it) in NEEDS.items():
        if value_of(config, option) != value_of(defaults, option) and not has_it(config):
            found.append(f"{option} has no effect: it needs {need}")
    late = [f"{epoch:g}" for epoch in config.schedule.milestones if epoch >= config.train.epochs]
    if config.schedule.name == "steps" and late:
        found.append(f"schedule.milestones {' '.join(late)}: the run ends after epoch {config.train.epochs}")
    if config.optimizer.name == "adamw" and not config.optimizer.weight_decay:
        found.append("optimizer.name adamw without optimizer.weight_decay is adam")
    return found


def nearest(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: what was probably meant, or what there is.

    Args:
        name: what was received.
        known: what would have been right.

    Returns:
        E.g. "did you mean mlp?", or "expected one of cnn, mlp" when nothing resembles it.
    """
    elsewhere = [one for one in known if "." in one and one.rpartition(".")[2] == name.rpartition(".")[2]]
    similar = elsewhere if len(elsewhere) == 1 else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
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


def changed_options(config: Config) -> dict[str, Any]:
    """The options that are not left at their defaults, by dotted name."""
    default = Config()
    values = {option: value_of(config, option) for option in option_types()}
    return {option: value for option, value in values.items() if value != value_of(default, option)}


def value_of(config: Config, option: str) -> Any:
    """The value of a dotted option, e.g. value_of(config, "train.epochs")."""
    return functools.reduce(getattr, option.split("."), config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values.

    Args:
        config: the one to begin with.
        values: by dotted option, e.g. {"train.epochs": 3}.

    Raises:
        ConfigError: a value outside its range, or values that do not fit together.
    """
    sections: dict[str, dict[str, Any]] = {}
    for option, value in values.items():
        section, _, key = option.rpartition(".")
        sections.setdefault(section, {})[key] = value
    changed = {name: dataclasses.replace(getattr(config, name), **own) for name, own in sections.items() if name}
    return dataclasses.replace(config, **changed, **sections.get("", {}))


def lower_is_better(metric: str) -> bool:
    """Whether a metric, by its name, is to fall: losses and errors are, all else is to grow."""
    return "loss" in metric or "error" in metric
