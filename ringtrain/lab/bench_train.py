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

from ringtrain import config_io
from ringtrain.config import Config
from ringtrain.errors import LaunchError
from ringtrain.lab import ranks, stats
from ringtrain.lab.tables import Table
from ringtrain.options import AT_LEAST_1, FILE, LIST, N

SPREADS = {"images_per_s": ",.0f", "images_per_s_alone": ",.0f", "ring_efficiency": ".3f"}
"""columns of the scaling table and their formats"""
WARM_STEPS = 3  # of each block


@dataclass(frozen=True)
class Options:
    """Options of the bench."""

    turns: Annotated[int, N, AT_LEAST_1] = 7
    """measurements of each kind, in turns"""
    steps: Annotated[int, N, AT_LEAST_1] = 40
    """steps of a measurement"""
    ranks: Annotated[str, LIST] = ""
    """numbers of ranks to compare: 1,2,4 (-np alone)"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


def main(options: Options, start: ranks.Start, call: ranks.Call) -> int:
    """Measures, prints and writes."""
    if start.train_args and not start.train_args[0].startswith("-"):
        raise LaunchError(
            f"got {start.train_args[0]} after --, expected options of ringtrain.train, such as --model.name own:model"
        )
    numbers = parse_ranks(options.ranks) or [0]
    found = [call(on_ranks, options, start.train_args, number) for number in numbers]
    for results in found:
        show(results)
    table = []
    for results in found:
        table.append({name: results[name] for name in ("num_ranks", *SPREADS)})
    if len(table) > 1:
        head = ("ranks", "images/s", "as many, not talking", "ring efficiency")
        rows = []
        for row in table:
            speeds = [row[name].text(form) for name, form in SPREADS.items()]
            rows.append([str(row["num_ranks"]), *speeds])
        Table(head, rows, "scaling").show()
    if options.out:
        about = {"steps": options.steps, "turns": options.turns}
        stats.write(Path(options.out), "train", about, {**found[-1], "scaling": table})
    return 0


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks in a list such as 1,2,4."""
    words = [word for word in text.split(",") if word]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise LaunchError(f"got --ranks {text}, expected numbers above 0 such as 1,2,4")
    return sorted({int(word) for word in words})


def show(found: dict[str, Any]) -> None:
    """Prints the measurements."""
    rows = [
        ["images/s, all ranks", found["images_per_s"].text(",.0f")],
        ["images/s, as many processes alone", found["images_per_s_alone"].text(",.0f")],
        ["ring efficiency", found["ring_efficiency"].text(".3f")],
    ]
    title = f"{found['model']}, {found['data']}, batch {found['batch_size']} on each of {found['num_ranks']} ranks"
    Table(("", "median (p10 to p90)"), rows, title).show()


def on_ranks(options: Options, train_args: Sequence[str]) -> dict[str, Any]:
    """Measures on all ranks."""
    config = config_io.read(train_args)
    ranks.begin(config)
    return measure(config, options.steps, options.turns)


def measure(config: Config, num_steps: int, turns: int) -> dict[str, Any]:
    """Times blocks of steps on all ranks. A collective.

    Args:
        num_steps: Steps of a block, without its warm-up steps.

    Returns:
        On every rank: images per second of all ranks together, for the ring and for processes alone, per turn; their
        ratio.
    """
    import keras

    from ringtrain import hvd

    training = ranks.Training.of(config)
    ring, alone, batches = training.model(), training.model(distributed=False), training.batches()
    hvd.broadcast_model(ring, root_rank=0)
    hvd.step_timing.PLACE.watch(ring)  # as in training
    together: list[float] = []
    apart: list[float] = []
    for turn in range(turns + 1):  # the first makes the graphs
        for model, images_per_s in ((ring, together), (alone, apart)):
            watch = Stopwatch()
            hvd.allreduce([0.0], name="ringtrain_bench_barrier")
            model.fit(
                batches,
                steps_per_epoch=WARM_STEPS + num_steps,
                epochs=1,
                callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=watch.end_of_step)],
                shuffle=False,
                verbose=0,
            )
            own = config.train.batch_size * num_steps / watch.block_s
            if turn:
                images_per_s.append(sum(hvd.allgather_object(own, name="ringtrain_bench")))
    return {
        "model": config.model.name,
        "data": config.data.name,
        "batch_size": config.train.batch_size,
        "num_ranks": hvd.size(),
        "images_per_s": stats.Spread.of(together),
        "images_per_s_alone": stats.Spread.of(apart),
        "ring_efficiency": stats.ratios(together, apart),
    }


class Stopwatch:
    """Time of a block of steps without its warm-up steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.block_s = self._began_s = 0.0

    def end_of_step(self, batch: int, logs: Any) -> None:
        """Callback of Keras."""
        end_s = time.perf_counter()
        self.num_steps += 1
        if self.num_steps <= WARM_STEPS:
            self._began_s = end_s
        self.block_s = end_s - self._began_s
