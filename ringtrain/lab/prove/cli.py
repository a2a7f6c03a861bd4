"""ringtrain prove: puts a job to the test in short runs, and writes down what holds.

ringtrain prove -np 2 -- --config config.toml
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ringtrain import config_io
from ringtrain.cluster import processes
from ringtrain.config import Config, value_of
from ringtrain.errors import LaunchError
from ringtrain.lab import jobs, ranks, stats
from ringtrain.lab.prove import checks
from ringtrain.lab.prove.checks import Check, Outcome
from ringtrain.lab.report import html
from ringtrain.lab.tables import Table
from ringtrain.options import FILE, N, at_least
from ringtrain.protocol.env import PROVE
from ringtrain.run import setup

EPOCHS = 2
RECORDER = "ringtrain.lab.prove.rows:Rows"
MARK = ".prove"
"""file in a folder that the next proof may delete"""
STRATEGIES = ("ring", "mpi-ring")
NOT_TOLD = {
    "train.patience": 0,
    "train.target_accuracy": 0,
    "train.max_time_s": 0,
    "tracking.mlflow": "",
    "tracking.wandb": "off",
    "tracking.timeline_steps": 0,
    "hvd.groups": 0,
    "hvd.fusion_mb": -1,
    "chaos": "",
}
"""options of all runs: none ends early or is told to a tracker, and the order of additions is fixed"""
PLAIN = {
    "train.precision": "float32",
    "train.virtual_ranks": 0,
    "hvd.compression": "none",
    "hvd.local_steps": 1,
    "hvd.op": "average",
}
"""options of runs that are compared with one process, which does not round, leave out or add up as these do"""
WORDS = {True: "holds", False: "DOES NOT HOLD", None: "not shown"}


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    steps: Annotated[int, N, at_least(4)] = 6
    """steps of an epoch, 4 or more; each run has two epochs"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""
    html: Annotated[str, FILE] = ""
    """write a page about them"""


def main(options: Options, start: ranks.Start, _: ranks.Call) -> int:
    """Trains, prints and writes the certificate. Returns 0, or 1 if something does not hold."""
    base = config_io.read(start.train_args)
    setup.find(base)  # report a mistake before anything starts
    if base.strategy.name not in STRATEGIES:
        raise LaunchError(f"strategy.name: got {base.strategy.name}, expected {' or '.join(STRATEGIES)}")
    num_ranks = start.launch.np or sum(host.slots for host in start.hosts)
    if num_ranks < 2:
        raise LaunchError(f"got {num_ranks} rank, expected 2 or more, whose result is compared with one process: -np 2")
    folder = Path(base.run.directory) / (base.run.name or "prove")
    if folder.exists() and not (folder / MARK).exists():
        raise LaunchError(f"{folder}: exists already and is no proof: give another --run.name after --, or delete it")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "starts").mkdir(parents=True)
    (folder / MARK).touch()
    found = Job(options, start, base, num_ranks, folder).checks()
    show(found, options, start.train_args, num_ranks)
    return 0 if checks.verdict(found) else 1


@dataclass(frozen=True)
class Job:
    """Runs of a job in a folder."""

    options: Options
    start: ranks.Start
    base: Config
    num_ranks: int
    folder: Path

    def checks(self) -> list[Check]:
        """Trains the runs one after the other, and compares them."""
        base, num = self.base, self.num_ranks
        whole, exact = ["--train.batch-size", str(base.train.batch_size * num)], ["--hvd.deterministic"]
        single = _arguments(PLAIN)
        one = self.run("one", 1, *whole, *single)
        if one.error:
            raise LaunchError(f"the job fails on one process: {one.error}")
        several = self.run("ranks", num, *exact, *single)
        if several.error:
            return [checks.fails_on_ranks(num, several.error)]
        part = self.run("part", 1, *single)
        found = checks.like_one_process("float32", one, several, part)
        if found[-1].holds is not None:
            wide = [*single, "--train.precision", "float64"]
            runs = (self.run("one-float64", 1, *whole, *wide), self.run("ranks-float64", num, *exact, *wide))
            found = checks.as_rounded(found, checks.like_one_process("float64", *runs, part))
        off = [name for name, value in PLAIN.items() if value_of(base, name) != value]
        if off:
            several = self.run("ranks-as-configured", num, *exact)
            found = [replace(one, evidence=f"{one.evidence}; without {', '.join(off)}") for one in found]
        found = [checks.in_sync(several), checks.every_sample_once(one, several), *found]
        again, seed = self.run("again", num, *exact), self.run("seed", num, *exact, "--seed", str(base.seed + 1))
        found.append(checks.same_bits("two equal runs", several, again))
        found.append(checks.control("negative control: a run with another seed is another", several, seed))
        steps = several.num_steps // EPOCHS
        faults = f"rank=0 step={steps // 2} mode=sigterm, rank={num - 1} step={steps + steps // 2 + 1} mode=sigkill"
        often = ["--checkpoint.every-steps", "1", "--health.agree-every-steps", "1"]
        claim = "stopped, resumed, killed and resumed, within an epoch: as without"
        if steps < 4:
            found.append(Check(claim, None, f"an epoch has {steps} steps here: too few samples"))
        else:
            attempts = [self.run("killed", num, *exact, *often, "--chaos", faults) for _ in range(3)]
            found.append(checks.killed(claim, several, attempts, again))
        return [*found, *self.virtual_ranks()]

    @property
    def least_virtual(self) -> int:
        """Least number of virtual ranks for as many ranks."""
        return 1 << (self.num_ranks - 1).bit_length()

    def virtual_ranks(self) -> list[Check]:
        """Compares runs with virtual ranks on one process and on several."""
        virtual = self.least_virtual
        words = ["--train.virtual-ranks", str(virtual)]
        alone = self.run("virtual-1", 1, *words)
        if "virtual_ranks" in alone.error or "virtual ranks" in alone.error:
            return [Check("the same bits on any number of ranks", None, alone.error)]
        others = sorted({2, self.num_ranks})
        return [
            checks.same_bits(
                f"{virtual} virtual ranks: the same bits on 1 and on {num}",
                alone,
                self.run(f"virtual-{num}", num, *words),
            )
            for num in others
        ]

    def run(self, name: str, num_ranks: int, *words: str) -> Outcome:
        """Trains once, or resumes; options that `words` repeat win."""
        base, rows = self.base, self.folder / name / "rows"
        rows.mkdir(parents=True, exist_ok=True)
        num_parts = max(self.least_virtual, base.train.virtual_ranks)
        num_samples = self.options.steps * num_parts * base.train.batch_size * base.optimizer.accumulation_steps
        short = {
            "train.epochs": EPOCHS,
            "data.max_samples": num_samples,
            "schedule.warmup_epochs": min(base.schedule.warmup_epochs, 1),
            "run.directory": self.folder,
            "run.name": name,
            "run.resume": "auto",
        }
        said = _arguments(NOT_TOLD | short)
        said += ["--train.callbacks", *base.train.callbacks, RECORDER]
        launch = ["ringtrain", "launch", *self.start.launch_words, "-np", str(num_ranks)]
        trainer = ["python", "-m", "ringtrain.train", *self.start.train_args, *said, *words]
        log = self.folder / "starts" / f"{name}.log"
        processes.say(f"prove: {name}, {num_ranks} rank{'s' if num_ranks > 1 else ''}")
        process = processes.start_beside(
            [sys.executable, "-m", *launch, "--forward", PROVE, "--", *trainer],
            {**os.environ, PROVE: str(rows.resolve())},
            log,
        )
        code = process.wait()
        return Outcome(self.folder / name, jobs.reason_of(log, code) if code else "", code)


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments of a command line."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def show(found: Sequence[Check], options: Options, command: Sequence[str], num_ranks: int) -> None:
    """Prints the certificate, and writes it as page and JSON."""
    table = Table(("claim", "", "evidence"), [(one.claim, WORDS[one.holds], one.evidence) for one in found])
    title = f"{num_ranks} ranks: {shlex.join(command)}"
    print(title)
    table.show()
    num_held = sum(check.holds is True for check in found)
    result = f"{num_held} of {len(found)} hold" if checks.verdict(found) else "something does not hold"
    print(result)
    if options.html:
        page = html.html(f"Proof of {title}", [html.Section("", [result, table])])
        Path(options.html).write_text(page, encoding="utf-8")
    if options.out:
        stats.write(
            Path(options.out),
            "prove",
            {"steps": options.steps, "command": list(command)},
            [asdict(one) for one in found],
        )
