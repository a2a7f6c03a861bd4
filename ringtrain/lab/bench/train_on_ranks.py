"""bench train: images per second, what a step's time goes into, and ring efficiency, measured in turns.

    ringtrain bench train -np 2 --out speed.json -- --model.name cnn --data.name synthetic

Ring efficiency is the throughput of N ranks that train one model over that of the same N processes, on the same cores,
each of which trains a model of its own without talking: blocks of steps of both kinds take turns within one start.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain import config_io, hvd
from ringtrain.config import Config
from ringtrain.lab import ranks, stats
from ringtrain.lab.predict.profile import Gradient, Profile
from ringtrain.monitor.trace import PHASES

WARM_STEPS = 3  # of each block
PROFILE_WARM_STEPS = 120  # after which TensorFlow has learned that a note of the time costs nothing, and is not put off


def measure(config: Config, num_steps: int, turns: int) -> dict[str, Any]:
    """Times blocks of steps on all ranks. A collective.

    Args:
        num_steps: Steps of a block, without its warm-up steps.

    Returns:
        On every rank: images per second of all ranks together, for the ring and for processes alone, per turn; their
        ratio; seconds of a step and of its parts, on this rank.
    """
    training = ranks.Training.of(config)
    ring, alone, batches = training.model(), training.model(distributed=False), training.batches()
    hvd.broadcast_model(ring, root_rank=0)
    hvd.step_timing.PLACE.watch(ring)
    kinds: dict[str, tuple[keras.Model, list[float], Stopwatch]] = {
        "ring": (ring, [], Stopwatch(hvd.step_timing.PLACE)),
        "alone": (alone, [], Stopwatch(None)),
    }
    for turn in range(turns + 1):  # the first makes the graphs
        for model, images_per_s, watch in kinds.values():
            hvd.allreduce([0.0], name="ringtrain_bench_barrier")
            model.fit(
                batches, steps_per_epoch=WARM_STEPS + num_steps, epochs=1, callbacks=[watch], shuffle=False, verbose=0
            )
            own = config.train.batch_size * num_steps / watch.block_s
            if turn:
                images_per_s.append(sum(hvd.allgather_object(own, name="ringtrain_bench")))
            else:
                watch.forget()
    _, together, watch = kinds["ring"]
    return {
        "model": config.model.name,
        "data": config.data.name,
        "batch_size": config.train.batch_size,
        "num_ranks": hvd.size(),
        "images_per_s": stats.Spread.of(together),
        "images_per_s_alone": stats.Spread.of(kinds["alone"][1]),
        "ring_efficiency": stats.ratios(together, kinds["alone"][1]),
        "step_s": stats.Spread.of(watch.steps),
        "parts_s": {part: stats.Spread.of(watch.parts[part]) for part in PHASES},
        "step_alone_s": stats.Spread.of(kinds["alone"][2].steps),
        "profile": profile_of(config, alone, batches, num_steps, float(np.mean(kinds["alone"][2].steps))),
    }


def profile_of(config: Config, model: keras.Model, batches: Any, num_steps: int, step_s: float) -> Profile:
    """Profiles when each gradient is ready while all ranks compute without communication. A collective.

    Args:
        model: compiled, and not distributed.
        step_s: mean time of a step of fit; what it takes besides the gradients is the update's.
    """
    variables = model.trainable_variables

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.control_dependencies([x, y]):
            begin_s = tf.timestamp()
        with tf.control_dependencies([begin_s]):
            x = tf.identity(x)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        ready_s = [hvd.step_timing.clock_after(gradient) for gradient in gradients]
        with tf.control_dependencies(ready_s):  # a lone thread might else come to them after the update
            model.optimizer.apply([tf.identity(gradient) for gradient in gradients], variables)
        return tf.stack([begin_s, *ready_s])

    rows = []
    hvd.allreduce([0.0], name="ringtrain_bench_profile")
    for x, y in batches.take(PROFILE_WARM_STEPS + num_steps):
        moments = step(x, y).numpy()
        rows.append(moments[1:] - moments[0])
    ready = np.median(np.array(rows[PROFILE_WARM_STEPS:]), axis=0)
    computed = [float(row.max()) for row in rows[PROFILE_WARM_STEPS:]]
    compute_s = float(np.mean(computed))
    gradients = [
        Gradient(4 * int(np.prod(variable.shape)), min(float(at), compute_s), variable.path)
        for variable, at in zip(variables, ready, strict=True)
    ]
    name, batch_size = config.model.name, config.train.batch_size
    update_s = max(0.0, step_s - compute_s)
    return Profile(name, batch_size, compute_s, tuple(gradients), update_s, step_s=tuple(computed))


class Stopwatch(keras.callbacks.Callback):
    """Callback that times the steps of blocks without their warm-up steps.

    Args:
        place: Phase tracker with the timestamps within a step; None: only whole steps are timed.
    """

    def __init__(self, place: hvd.step_timing.PhaseTracker | None) -> None:
        super().__init__()
        self.place = place
        self.block_s = 0.0
        self.forget()

    def forget(self) -> None:
        """Discards all times."""
        self.steps: list[float] = []
        self.parts: dict[str, list[float]] = {part: [] for part in PHASES}

    def on_train_begin(self, logs: Any = None) -> None:
        self.number = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begin_s = time.time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        end_s = time.time()
        self.number += 1
        if self.number <= WARM_STEPS:
            self.block_begin_s = self.before_s = end_s
            return
        self.block_s = end_s - self.block_begin_s
        self.steps.append(end_s - self.before_s)
        self.before_s = end_s
        if self.place is not None:
            edges = (self.begin_s, *self.place.moments(), end_s)
            for part, (first_s, last_s) in zip(PHASES, itertools.pairwise(edges), strict=True):
                self.parts[part].append(max(0.0, last_s - first_s))


def main(argv: Sequence[str]) -> int:
    """Measures on all ranks and writes on rank 0."""
    own, told = stats.split(argv)
    parser = argparse.ArgumentParser(prog="bench train", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="of a block")
    parser.add_argument("--turns", type=int, default=7, help="blocks of each kind")
    parser.add_argument("--out", required=True, help="JSON file of the results")
    options = parser.parse_args(own)
    config = config_io.read(told)
    ranks.begin(config)
    found = measure(config, options.steps, options.turns)
    if hvd.rank() == 0:
        stats.write(Path(options.out), "train", {"steps": options.steps, "turns": options.turns}, found)
    return 0
