"""bench train: images/s and ring efficiency.

    ringtrain bench train -np 2 --out speed.json -- --model.name cnn --data.name synthetic

Ring efficiency is the throughput of N ranks that train one model over that of the same N processes, on the same cores,
each of which trains a model of its own without communicating: blocks of steps of both kinds alternate within one start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.config import files
from ringtrain.config.options import AT_LEAST_1, FILE, N
from ringtrain.errors import ConfigError, LaunchError
from ringtrain.lab import ranks, stats
from ringtrain.lab.tables import Table

WARM_STEPS = 3  # of each block


@dataclass(frozen=True)
class BenchTrainOptions:
    """BenchTrainOptions of the bench."""

    turns: Annotated[int, N, AT_LEAST_1] = 7
    """measurements of each kind, in turns"""
    steps: Annotated[int, N, AT_LEAST_1] = 40
    """steps of a measurement"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


def main(options: BenchTrainOptions, launch: LaunchOptions) -> int:
    """Measures, prints and writes."""
    train_args = launch.command
    if train_args and not train_args[0].startswith("-"):
        raise LaunchError(
            f"got {train_args[0]} after --, expected options of ringtrain.train, such as --model.name own:model"
        )
    config = files.read(train_args)
    found = ranks.call(launch, f"{__name__}:on_ranks", train_args, options.steps, options.turns)
    ring, alone = found["ring"], found["alone"]
    together, apart, efficiency = stats.Spread.of(ring), stats.Spread.of(alone), stats.ratios(ring, alone)
    rows = [
        ["images/s, all ranks", together.text(",.0f")],
        ["images/s, as many processes alone", apart.text(",.0f")],
        ["ring efficiency", efficiency.text(".3f")],
    ]
    num_ranks, batch_size = found["num_ranks"], config.train.batch_size
    title = f"{config.model.name}, {config.data.name}, batch {batch_size} on each of {num_ranks} ranks"
    Table(("", "median (p10 to p90)"), rows, title).show()
    results = {"images_per_s": together, "images_per_s_alone": apart, "ring_efficiency": efficiency}
    if options.out:
        stats.write(Path(options.out), vars(options), {"num_ranks": num_ranks, **results})
    return 0


def on_ranks(train_args: Sequence[str], num_steps: int, turns: int) -> dict[str, Any]:
    """Times blocks of steps on all ranks: images per second of all together in each turn, as a ring and alone."""
    import keras

    from ringtrain import data, hvd, strategies
    from ringtrain.config.derived import derive
    from ringtrain.training import configured, devices

    config = files.read(train_args)
    hvd.configure(config.hvd)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    devices.pin(hvd.local_rank(), hvd.local_size(), config.device, num_devices=config.model.num_devices)
    hvd.check_placement()

    # The same model and data twice: once as a ring, once without communication.
    named = configured.find(config)
    data_set, batch_size = named.read_data(), config.train.batch_size
    numbers = derive(config, size, len(data_set.train), len(data_set.test), batch_size * size)
    strategy = strategies.make(config)
    ring, _ = configured.compiled_model(named, data_set, config, numbers, strategy)
    strategy.distribute(ring.optimizer)
    alone, _ = configured.compiled_model(named, data_set, config, numbers, strategy)
    hvd.broadcast_model(ring, root_rank=0)
    hvd.step_timing.PHASES.watch(ring)  # as in training
    steps_per_turn = WARM_STEPS + num_steps
    num_whole = len(data_set.train) // (batch_size * size)
    if not num_whole:
        raise ConfigError(f"train.batch_size: got {batch_size} on {size} ranks, with {len(data_set.train)} rows")
    train: Any = data_set.train
    rows = train.first(num_whole * batch_size * size)
    batches = data.RowBatches(rows, batch_size * size, data.Parts.of_rank(rank, size), config.seed).dataset.repeat()

    images_per_s: dict[str, list[float]] = {"ring": [], "alone": []}
    for turn in range(turns + 1):  # the first makes the graphs
        for kind, model in (("ring", ring), ("alone", alone)):
            ends_s: list[float] = []
            clock = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs, ends_s=ends_s: ends_s.append(time.perf_counter())
            )
            hvd.allreduce([0.0], name="ringtrain_bench_barrier")
            model.fit(batches, steps_per_epoch=steps_per_turn, epochs=1, callbacks=[clock], shuffle=False, verbose=0)
            own = batch_size * num_steps / (ends_s[-1] - ends_s[WARM_STEPS - 1])
            of_ranks = hvd.allgather_object(own, name="ringtrain_bench")
            if turn:
                images_per_s[kind].append(sum(of_ranks))
    return {"num_ranks": size, **images_per_s}
