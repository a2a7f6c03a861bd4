"""bench checkpoint: how long training stands still for a save, beside writing the same bytes.

    ringtrain bench checkpoint -np 2 --out checkpoint.json -- --model.name cnn --data.name synthetic

In turns: some steps with a save after the last of them, as `ringtrain.train` makes it; then, with nothing else going
on, the files of that checkpoint written and flushed to the same disk by plain `write` and `fsync`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringtrain import config_io, hvd
from ringtrain.config import Config
from ringtrain.lab import ranks, stats
from ringtrain.monitor import journal
from ringtrain.protocol import status
from ringtrain.run import checkpoint, resume, saver


def measure(config: Config, num_steps: int, turns: int, folder: Path) -> dict[str, Any]:
    """Trains and saves. A collective.

    Args:
        turns: Measured saves, after one warm-up save.

    Returns:
        On rank 0: seconds of its training thread per save, of the thread that writes, and of plain writing; bytes; the
        first of these as a share of the third. Elsewhere nothing.
    """
    training = ranks.Training.of(config)
    model, batches = training.model(), training.batches()
    model.optimizer.build(model.trainable_variables)
    hvd.broadcast_model(model, root_rank=0)
    rank = hvd.rank()
    own_journal = journal.Journal(folder, rank, hvd.size())
    clock = resume.Clock(resume.Start(), 10**9, status.StatusLine(rank), own_journal)  # the epoch does not end
    facts = {"numbers": dataclasses.asdict(training.numbers)}
    saver = TimedSaver(model, folder, config, facts, clock, {}, own_journal)
    stalls, writes, plain, num_bytes = [], [], [], 0
    for _ in range(turns + 1):
        before_s = saver.saves["write_s"]
        model.fit(batches, steps_per_epoch=num_steps, callbacks=[clock, saver], shuffle=False, verbose=0)
        saver.wait()
        stalls.append(saver.stall_s)
        writes.append(saver.saves["write_s"] - before_s)
        if rank == 0:
            contents = [path.read_bytes() for path in checkpoint.saved_in(folder)[0].iterdir()]
            num_bytes = sum(map(len, contents))
            plain.append(write(folder, contents))
        hvd.allreduce([0.0], name="ringtrain_bench_barrier")
    if rank:
        return {}
    stall_s, plain_s = stats.Spread.of(stalls[1:]), stats.Spread.of(plain[1:])
    ratio = stats.ratios(stalls[1:], plain[1:])
    rows = [
        ["training stands still, ms", stall_s.times(1e3).text()],
        ["plain write and fsync of the same bytes, ms", plain_s.times(1e3).text()],
        ["stands still / plain write", ratio.text(".3f")],
        ["writing in the background, ms", stats.Spread.of(writes[1:]).times(1e3).text()],
    ]
    title = f"{config.model.name}, {num_bytes / 1e6:.1f} MB, {hvd.size()} ranks, a save every {num_steps} steps"
    return {
        "table": [title, ["", "median (p10 to p90)"], rows],
        "bytes": num_bytes,
        "stall_s": stall_s,
        "plain_write_s": plain_s,
        "ratio": ratio,
        "write_s": stats.Spread.of(writes[1:]),
    }


class TimedSaver(saver.Saver):
    """Times all that the training thread does for a save, its line in the journal as well."""

    stall_s = 0.0

    def save(self) -> None:
        begin_s = time.perf_counter()
        super().save()
        self.stall_s = time.perf_counter() - begin_s


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


def main(argv: Sequence[str]) -> int:
    """Measures on all ranks and writes on rank 0."""
    own, told = stats.split(argv)
    parser = argparse.ArgumentParser(prog="bench checkpoint", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="between two saves")
    parser.add_argument("--turns", type=int, default=9, help="saves")
    parser.add_argument("--out", required=True, help="JSON file of the results")
    options = parser.parse_args(own)
    given = config_io.read(told)
    every = dataclasses.replace(given.checkpoint, every_steps=options.steps, every_epochs=0)
    config = dataclasses.replace(given, checkpoint=every)
    ranks.begin(config)

    def make() -> Path:
        Path(config.run.directory).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="bench-", dir=config.run.directory))

    made = hvd.run_together(make if hvd.rank() == 0 else lambda: None)
    folder = hvd.broadcast_object(made, root_rank=0, name="ringtrain_folder")
    try:
        found = measure(config, options.steps, options.turns, folder)
    finally:
        if hvd.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if hvd.rank() == 0:
        stats.write(Path(options.out), "checkpoint", {"steps": options.steps, "turns": options.turns}, found)
    return 0
