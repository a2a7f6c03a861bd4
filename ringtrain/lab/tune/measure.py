"""A trial of ringtrain tune on ranks: images per second with settings that one start can have, alternately."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ringtrain import config_io, hvd
from ringtrain.config import Config
from ringtrain.lab import ranks
from ringtrain.lab.tune.candidates import AUTOTUNE, Trial, best_point
from ringtrain.run import devices, measuring

FIRST_STEPS = 3  # to trace the graph and time a step
MAX_WARM_STEPS = 3  # of each block


class Ends(keras.callbacks.Callback):
    """Records when steps end."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter())


class Variant:
    """Model trained with one variant of the communication settings."""

    def __init__(self, training: ranks.Training) -> None:
        self.model, self.batches = training.model(), training.batches()
        self.batch_size, self.local_steps = training.config.train.batch_size, training.config.hvd.local_steps

    def block(self, num_steps: int, warm_steps: int) -> float:
        """Seconds per step, the longest of all ranks, after 1 or more warm-up steps. A collective."""
        ends = Ends()
        hvd.allreduce([0.0], name="ringtrain_trial_barrier")
        self.model.fit(self.batches, steps_per_epoch=warm_steps + num_steps, callbacks=[ends], shuffle=False, verbose=0)
        step_s = (ends.seconds[-1] - ends.seconds[warm_steps - 1]) / num_steps
        return float(hvd.allreduce([step_s], op=hvd.Max, name="ringtrain_trial")[0])


def measure(variants: Sequence[Variant], block_s: float, turns: int, end_s: float) -> dict[str, Any]:
    """Images per second of all ranks, per variant and round, and seconds per step of the first variant. A collective.

    Args:
        block_s: Approximate seconds of a block of steps.
        end_s: Deadline by time.perf_counter(): after the first round, no round starts that would end later on rank 0.
    """
    steps = []
    for variant in variants:
        step_s = variant.block(FIRST_STEPS - 1, 1)
        num_steps = min(500, max(2, math.ceil(block_s / step_s)))
        steps.append(math.ceil(num_steps / variant.local_steps) * variant.local_steps)  # whole rounds
    speeds: list[list[float]] = [[] for _ in variants]
    for _ in range(turns):
        begin_s = time.perf_counter()
        for variant, num_steps, found in zip(variants, steps, speeds, strict=True):
            step_s = variant.block(num_steps, min(MAX_WARM_STEPS, max(1, num_steps // 4)))
            found.append(variant.batch_size * hvd.size() / step_s)
        over = 2 * time.perf_counter() - begin_s > end_s
        if hvd.broadcast_object(over, root_rank=0, name="ringtrain_trial_over"):
            break
    first = variants[0]
    return {"images_per_s": speeds, "step_s": first.batch_size * hvd.size() / float(np.median(speeds[0]))}


def autotune(variant: Variant, seconds: float, log: Path) -> dict[str, float]:
    """Best settings of Horovod's autotuner in the given seconds; rank 0's Horovod writes `log`. A collective."""
    step_s = variant.block(FIRST_STEPS - 1, 1)
    end_s, over = time.perf_counter() + seconds, False
    while not over:
        variant.block(max(2, math.ceil(seconds / 6 / step_s)), 1)
        over = hvd.broadcast_object(time.perf_counter() > end_s, root_rank=0, name="ringtrain_trial_end")
    return best_point(log)


def facts(variant: Variant, config: Config) -> dict[str, Any]:
    """Facts that decide which settings are worth trying."""
    pinning = devices.plan((), hvd.local_rank(), hvd.local_size(), config.device, *devices.count_cores(), "")
    return measuring.facts_of(variant.model, pinning.num_threads)


def trial(options: Trial, train_args: Sequence[str]) -> dict[str, Any]:
    """Measures on all ranks."""
    end_s = time.perf_counter() + 0.9 * options.limit_s
    signal.alarm(options.limit_s)  # a setting that hangs the ranks must not use up the whole budget
    configs = [config_io.read([*train_args, *changes]) for changes in options.variants]
    with tempfile.TemporaryDirectory(prefix="ringtrain-tune-") as folder:
        log = Path(folder, "autotune.csv")
        if options.autotune_s:
            os.environ.update(AUTOTUNE, HOROVOD_AUTOTUNE_LOG=str(log))
        ranks.begin(configs[0])
        training = ranks.Training.of(configs[0])
        variants = [Variant(dataclasses.replace(training, config=config)) for config in configs]
        results: dict[str, Any] = {"facts": facts(variants[0], configs[0])}
        if options.autotune_s:
            return results | {"autotuned": autotune(variants[0], options.autotune_s, log)}
        return results | measure(variants, options.block_s, options.turns, end_s)
