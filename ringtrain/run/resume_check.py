"""What a run must have in common with the checkpoint that it resumes from; each difference is named with its mend."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ringtrain.config import Config, option_types, value_of
from ringtrain.derived import Numbers, scaling_rule
from ringtrain.errors import ConfigError
from ringtrain.optimizer_kinds import OPTIMIZERS
from ringtrain.run import checkpoint

# Options that may change on resume. The others affect the result; the global batch is compared as a whole.
FREE = (
    "run.",
    "checkpoint.",
    "device.",
    "health.",
    "elastic.",
    "tracking.",
    "chaos",
    "data.dir",
    "data.file",
    "strategy.",
    "hvd.fusion_mb",
    "hvd.cycle_time_ms",
    "hvd.groups",
    "train.epochs",
    "train.batch_size",
    "train.max_time_s",
    "train.check_every_steps",
    "train.patience",
    "model.split",
    "model.stages",
)
SCALING = "optimizer.learning_rate_scaling"
# May change if the resulting learning rate stays the same.
RATES = (SCALING, "optimizer.learning_rate", "optimizer.reference_batch_size", "schedule.warmup_start")


def _anew(config: Config) -> str:
    """Returns a hint how to train from scratch instead."""
    return "give fit another name" if is_of_a_script(config) else "give the run another --run.name"


def is_of_a_script(config: Config) -> bool:
    """Returns whether `ringtrain.fit` has made a configuration: its optimizer is the name of a class."""
    return config.optimizer.name not in OPTIMIZERS


def require_same_run(newest: checkpoint.Checkpoint, config: Config, numbers: Numbers) -> None:
    saved = newest.manifest
    then, now = saved["numbers"]["global_batch_size"], numbers.global_batch_size
    if then != now:
        option = "batch_size" if is_of_a_script(config) else "train.batch_size"
        raise ConfigError(
            f"{newest.folder}: has a global batch of {then}, this run one of {now} = {numbers.batch_size} x"
            f" {numbers.num_ranks}: set {option} so that they are equal, or {_anew(config)}"
        )
    names, is_warm = ["learning_rate"], newest.global_step >= numbers.warmup_steps
    if not is_warm:
        names.append("initial_learning_rate")
    new = [getattr(numbers, name) for name in names]
    old = [saved["numbers"].get(name, rate) for name, rate in zip(names, new, strict=True)]
    same_rates = all(map(math.isclose, old, new))
    for option in option_types():
        section, _, key = option.rpartition(".")
        default, wanted = _as_in_manifest(Config(), option), _as_in_manifest(config, option)
        options = saved["config"]
        if section:
            options = options.get(section, {})
        before = options.get(key, default)  # a checkpoint that is older than an option had its default
        if option in RATES and same_rates:
            continue
        if option == SCALING:
            optimizer = saved["config"].get("optimizer", {}).get("name", config.optimizer.name)
            before, wanted = scaling_rule(before, optimizer), scaling_rule(wanted, config.optimizer.name)
        shapes_rates = option == "train.epochs" and config.schedule.name in ("cosine", "polynomial")
        if (shapes_rates or not option.startswith(FREE)) and before != wanted:
            raise ConfigError(
                f"{newest.folder}: was made with {option} = {before!r}, this run has {wanted!r}: use the same value, or"
                f" {_anew(config)}"
            )
    if not same_rates:
        start = "" if is_warm else f" --schedule.warmup-start {old[1] / old[0]!r}"
        had = " after a warm-up from ".join(map(str, old))
        has = " after a warm-up from ".join(map(str, new))
        ranks, keep = saved["numbers"]["num_ranks"], f"keep it with --{SCALING.replace('_', '-')} none"
        raise ConfigError(
            f"{newest.folder}: has the learning rate {had} with {ranks} ranks, this run {has} with {numbers.num_ranks}:"
            f" {keep} --optimizer.learning-rate {old[0]!r}{start}, or {_anew(config)}"
        )


def _as_in_manifest(config: Config, option: str) -> Any:
    """Value of an option as JSON has it: tuples are lists."""
    return json.loads(json.dumps(value_of(config, option)))


def require_same_job(
    newest: checkpoint.Checkpoint, config: Config, numbers: Numbers, of_name: Mapping[str, str]
) -> None:
    """Raises ConfigError if a run of this name has trained other data, or another loss, metrics or optimizer."""
    saved = newest.manifest
    now = {"training samples": str(numbers.num_train), **of_name}
    before = {**saved.get("checksums", {}), "training samples": str(saved["numbers"].get("num_train", ""))}
    if is_of_a_script(config):
        now["steps of an epoch"] = str(numbers.steps_per_epoch)
        before["steps of an epoch"] = str(saved["numbers"].get("steps_per_epoch", ""))
    different = []
    for name, current in now.items():
        if before.get(name, "") not in ("", current):  # an older checkpoint lacks it
            different.append(name)
    if not different:
        return
    name = different[0]
    what = f"{name} {before[name]}, this run has {now[name]}"
    if "checksum" in now[name]:
        what = f"another {name.partition(' (')[0]}"
    raise ConfigError(
        f"{newest.folder}: was made with {what}: {_anew(config)}; to train its weights further, begin with those of its"
        f" model.keras"
    )


def require_whole_update(newest: checkpoint.Checkpoint, numbers: Numbers) -> None:
    """Raises ConfigError if the number of ranks changed within an update: accumulated gradients are per shard."""
    then, accumulated = newest.manifest["num_ranks"], numbers.accumulation_steps
    if not newest.global_step % accumulated:
        return
    if then != numbers.num_ranks:
        raise ConfigError(
            f"{newest.folder}: was made by {then} ranks between two updates (step {newest.global_step},"
            f" optimizer.accumulation_steps {accumulated}): resume with {then} ranks, or from a checkpoint of an"
            f" epoch's end"
        )
