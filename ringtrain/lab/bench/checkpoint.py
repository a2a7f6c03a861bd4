"""bench checkpoint: how long training stands still for a save, beside writing the same bytes.

    ringtrain bench checkpoint -np 2 --out checkpoint.json -- --model.name cnn --data.name synthetic

Alternately: some steps with a save after the last of them, as `ringtrain.train` makes it; then, with nothing else
running, the files of that checkpoint written and flushed to the same disk by plain `write` and `fsync`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from ringtrain import config_io
from ringtrain.config import Config
from ringtrain.lab import ranks, stats
from ringtrain.lab.options import by_flag
from ringtrain.lab.tables import Table
from ringtrain.monitor import journal
from ringtrain.options import AT_LEAST_1, FILE, N
from ringtrain.protocol import status


@dataclass(frozen=True)
class Options:
    """Options of the bench."""

    turns: Annotated[int, N, AT_LEAST_1] = 9
    """measurements of each kind, in turns"""
    steps: Annotated[int, N, AT_LEAST_1] = 20
    """steps between two saves"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


def main(options: Options, start: ranks.Start, call: ranks.Call) -> int:
    """Measures, prints and writes."""
    results = call(on_ranks, options, start.train_args)
    title = results.pop("title")
    rows = [
        ["training stands still, ms", results["stall_s"].times(1e3).text()],
        ["plain write and fsync of the same bytes, ms", results["plain_write_s"].times(1e3).text()],
        ["stands still / plain write", results["ratio"].text(".3f")],
        ["writing in the background, ms", results["write_s"].times(1e3).text()],
    ]
    Table(["", "median (p10 to p90)"], rows, title).show()
    if options.out:
        stats.write(Path(options.out), "checkpoint", by_flag(options), results)
    return 0


def on_ranks(options: Options, train_args: Sequence[str]) -> dict[str, Any]:
    """Measures on all ranks, in a folder that is deleted at the end."""
    from ringtrain import hvd

    config = config_io.read(train_args)
    every = dataclasses.replace(config.checkpoint, every_steps=options.steps, every_epochs=0)
    config = dataclasses.replace(config, checkpoint=every)
    ranks.begin(config)

    def make() -> Path:
        Path(config.run.directory).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="bench-", dir=config.run.directory))

    folder = hvd.on_rank_0(make)
    try:
        return measure(config, options.steps, options.turns, folder)
    finally:
        if hvd.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def measure(config: Config, num_steps: int, turns: int, folder: Path) -> dict[str, Any]:
    """Trains and saves. A collective.

    Args:
        turns: Measured saves, after one warm-up save.

    Returns:
        On rank 0: seconds of its training thread per save, of the thread that writes, and of plain writing; bytes; the
        first of these as a share of the third. Elsewhere nothing.
    """
    from ringtrain import hvd
    from ringtrain.run import checkpoint, resume, saver
    from ringtrain.run.context import Validation
    from ringtrain.run.run_folder import RunLock

    class TimedSaver(saver.Saver):
        """Times all that the training thread does for a save, including its line in the journal."""

        stall_s = 0.0

        def _save(self, step: int) -> None:
            begin_s = time.perf_counter()
            super()._save(step)
            self.stall_s = time.perf_counter() - begin_s

    training = ranks.Training.of(config)
    model, batches = training.model(), training.batches()
    model.optimizer.build(model.trainable_variables)
    hvd.broadcast_model(model, root_rank=0)
    rank = hvd.rank()
    own_journal = journal.Journal(folder, rank, hvd.size())
    clock = resume.Clock(resume.Start(), 10**9, status.StatusLine(rank), own_journal)  # the epoch does not end
    start = resume.Start()
    run: Any = SimpleNamespace(model=model, checkpoints=folder, config=config, numbers=training.numbers, start=start)
    run.clock, run.journal, run.validation = clock, own_journal, Validation()
    run.lock = RunLock()
    run.strategy, run.checksums = SimpleNamespace(ranks_change=False), {}
    run.users_callbacks, run.callback_state = [], None
    timed = TimedSaver(run)
    stalls, writes, plain, num_bytes = [], [], [], 0
    for _ in range(turns + 1):
        before_s = timed.saves["write_s"]
        model.fit(batches, steps_per_epoch=num_steps, callbacks=[clock, timed], shuffle=False, verbose=0)
        timed.wait()
        stalls.append(timed.stall_s)
        writes.append(timed.saves["write_s"] - before_s)
        if rank == 0:
            contents = [path.read_bytes() for path in checkpoint.saved_in(folder)[0].iterdir()]
            num_bytes = sum(map(len, contents))
            plain.append(write(folder, contents))
        hvd.allreduce([0.0], name="ringtrain_bench_barrier")
    if rank:
        return {}
    return {
        "title": f"{config.model.name}, {num_bytes / 1e6:.1f} MB, {hvd.size()} ranks, a save every {num_steps} steps",
        "bytes": num_bytes,
        "stall_s": stats.Spread.of(stalls[1:]),
        "plain_write_s": stats.Spread.of(plain[1:]),
        "ratio": stats.ratios(stalls[1:], plain[1:]),
        "write_s": stats.Spread.of(writes[1:]),
    }


def write(folder: Path, contents: Sequence[bytes]) -> float:
    """Writes files, flushes them to disk and removes them; returns the seconds of writing and flushing."""
    begin_s = time.perf_counter()
    for number, content in enumerate(contents):
        with open(folder / f"plain-{number}", "wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
    seconds = time.perf_counter() - begin_s
    for number in range(len(contents)):
        (folder / f"plain-{number}").unlink()
    return seconds
