"""Numbers that follow from the configuration, the data and the number of ranks; options without effect."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ringtrain.config.rules import Need
from ringtrain.config.sections import OPTIMIZERS, OPTIONS, Config, changed_options
from ringtrain.errors import ConfigError

SCALINGS: dict[str, Callable[[float], float]] = {"linear": lambda k: k, "sqrt": math.sqrt, "none": lambda k: 1.0}


def scaling_rule(option: str, optimizer: str) -> str:
    """Returns the key of SCALINGS that optimizer.learning_rate_scaling means for an optimizer."""
    if option == "auto":
        return OPTIMIZERS[optimizer].scaling
    return option


def scaling_of(config: Config) -> tuple[str, str]:
    """Returns a key of SCALINGS, and the reasons for it that the option itself does not give, or ""."""
    rule = scaling_rule(config.optimizer.learning_rate_scaling, config.optimizer.name)
    why = []
    if config.optimizer.learning_rate_scaling == "auto":
        kind = "adaptive optimizers" if rule == "sqrt" else config.optimizer.name
        why.append(f"auto: {rule} for {kind}")
    if config.hvd.op == "adasum" and rule != "none":
        why.append("one rank's batch: Adasum scales with the ranks")
    return rule, "; ".join(why)


def scaled_batch(config: Config, global_batch_size: int) -> int:
    """Returns the samples per update that the learning rate is scaled for: Adasum itself scales with the ranks."""
    if config.hvd.op == "adasum":
        return config.train.batch_size * config.optimizer.accumulation_steps
    return global_batch_size


IMAGES = ("digits", "image-folder", "imagenet-tfrecords", "synthetic")
WITH_ROWS = ("arrays", "records", "npz", "spark")
"""names of data whose rows are counted, also where a step has one; a stream without a number of rows has 1"""


@dataclass(frozen=True)
class Numbers:
    """Sizes, steps and learning rates of a run."""

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
    """steps of the whole run"""
    learning_rate: float
    """after scaling, at the end of warm-up"""
    initial_learning_rate: float
    """at step 0"""
    warmup_steps: int
    """steps before the first one at the full learning rate"""
    milestone_steps: tuple[int, ...]
    """first steps after each of the schedule's milestones"""
    initial_epoch: int = 0
    """number of the first epoch that a script trains"""
    is_scaled: bool = True
    """whether the learning rate follows from the global batch"""

    @property
    def samples_per_step(self) -> int:
        """Samples per step on all ranks."""
        return self.global_batch_size // self.accumulation_steps

    @property
    def rates(self) -> str:
        """Learning rates in words, of a script's own schedule."""
        rate = f"{self.learning_rate:g}"
        if self.initial_learning_rate == self.learning_rate:
            return rate
        return f"from {self.initial_learning_rate:g} on, at least up to {rate}"

    @property
    def lengths(self) -> tuple[int, int]:
        """Steps of the whole run and of an epoch."""
        return self.num_steps, self.steps_per_epoch


def num_shards(config: Config, num_copies: int) -> int:
    """Returns the number of equal parts of a global batch: of the copies of the model, or of virtual ranks."""
    num_virtual = config.train.virtual_ranks
    if num_virtual and num_copies > num_virtual:
        raise ConfigError(
            f"train.virtual_ranks: got {num_virtual} on {num_copies} ranks, each of which trains at least one:"
            f" expected {num_copies} or more"
        )
    return num_virtual or num_copies


def derive(
    config: Config,
    num_ranks: int,
    num_train: int,
    num_test: int,
    rows_per_step: int = 0,  # on all ranks; 0: the configured batch of each
    is_scaled: bool = True,  # whether the learning rate follows from that
) -> Numbers:
    """Derives the numbers of a run, in which the last, smaller batch of an epoch is trained, too.

    With k = global batch / reference batch, linear scaling multiplies the learning rate by k (Goyal et al. 2017, arXiv
    1706.02677, section 2.1), sqrt by k ** 0.5 (Krizhevsky 2014, arXiv 1404.5997; for adaptive optimizers Malladi et al.
    2022, arXiv 2205.10287). With Adasum k is one rank's batch / reference batch.
    """
    optimizer, schedule = config.optimizer, config.schedule
    batch_size, accumulated = config.train.batch_size, optimizer.accumulation_steps
    rows = rows_per_step or batch_size * num_ranks
    global_batch_size = rows * accumulated
    steps_per_epoch = math.ceil(num_train / rows)
    updates_per_epoch = steps_per_epoch / accumulated
    learning_rate = optimizer.learning_rate
    if is_scaled:
        num_scaled = scaled_batch(config, global_batch_size)
        learning_rate *= SCALINGS[scaling_of(config)[0]](num_scaled / optimizer.reference_batch_size)
    from_start = min(optimizer.learning_rate, learning_rate)
    if schedule.warmup_start:
        from_start = schedule.warmup_start * learning_rate

    def steps_of(epochs: float) -> int:
        """Nearest step that begins an update."""
        return round(epochs * updates_per_epoch) * accumulated

    return Numbers(
        num_ranks=num_ranks,
        num_train=num_train,
        num_test=num_test,
        batch_size=math.ceil(rows / num_ranks),
        accumulation_steps=accumulated,
        global_batch_size=global_batch_size,
        steps_per_epoch=steps_per_epoch,
        num_steps=steps_per_epoch * config.train.epochs,
        learning_rate=learning_rate,
        initial_learning_rate=from_start if steps_of(schedule.warmup_epochs) else learning_rate,
        warmup_steps=steps_of(schedule.warmup_epochs),
        milestone_steps=tuple(steps_of(epochs) for epochs in schedule.milestones),
        is_scaled=is_scaled,
    )


def lower_is_better(metric: str) -> bool:
    """Returns whether a metric improves as it falls, by its name: losses and errors do, all others do not."""
    losses = ("loss", "error", "mae", "mape", "mse", "msle", "bce", "crossentropy", "hinge", "divergence", "poisson")
    return any(word in metric for word in (*losses, "false_"))


def in_words(config: Config, numbers: Numbers) -> dict[str, str]:
    """Returns the rows of the plan on the numbers."""
    n, optimizer = numbers, config.optimizer
    batch = f"{n.global_batch_size} = {n.batch_size} x {n.num_ranks}"
    if n.accumulation_steps > 1:
        batch += f" x {n.accumulation_steps} batches accumulated"
    steps = f"{n.num_steps:,} = {config.train.epochs} epochs x {n.steps_per_epoch:,}"
    # The learning rate: the configured one, its scaling, and the reason for that.
    rule, why = "none", ""
    if n.is_scaled:
        rule, why = scaling_of(config)
    factor = f"{scaled_batch(config, n.global_batch_size)} / {optimizer.reference_batch_size}"
    scaling = {"linear": f" x {factor}", "sqrt": f" x sqrt({factor})", "none": ""}[rule]
    rate = f"{n.learning_rate:g}"
    if n.learning_rate != optimizer.learning_rate:
        rate += f" = {optimizer.learning_rate:g}{scaling}"
    reason = ""
    if why and n.global_batch_size != optimizer.reference_batch_size:
        reason = f"; {why}"
    return {
        "global batch": batch,
        "steps": steps,
        "learning rate": f"{rate} ({optimizer.name}, {config.schedule.name}{reason})",
    }


def without_effect(config: Config) -> list[str]:
    """Options that are set without effect, a sentence each, e.g. "schedule.power has no effect: it needs ..."."""
    sentences = []
    for option in changed_options(config):
        needs = [note for note in OPTIONS[option].notes if isinstance(note, Need)]
        if not all(need.is_met(config) for need in needs):
            sentences.append(f"{option} has no effect: it needs {' and '.join(need.text for need in needs)}")
    late = [f"{epoch:g}" for epoch in config.schedule.milestones if epoch >= config.train.epochs]
    if config.schedule.name == "steps" and late:
        sentences.append(f"schedule.milestones {' '.join(late)}: the run ends after epoch {config.train.epochs}")
    if config.optimizer.name == "adamw" and not config.optimizer.weight_decay:
        sentences.append("optimizer.name adamw without optimizer.weight_decay is adam")
    return sentences


def counted(data_name: str, samples_per_step: int) -> str:
    """Word for the samples of a run: images, rows, or whole batches of data whose rows are not known before."""
    if data_name in IMAGES:
        return "images"
    if samples_per_step == 1 and data_name not in WITH_ROWS:
        return "batches"
    return "rows"
