"""ringtrain prove: puts a job to the test in short runs, and writes down what holds.

ringtrain prove -np 2 -- python -m ringtrain.train --config config.toml
ringtrain prove -np 2 -- python own.py
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from ringtrain import config_io, sources
from ringtrain.cluster import processes
from ringtrain.config import Config, value_of
from ringtrain.errors import LaunchError
from ringtrain.lab import prove_checks as checks
from ringtrain.lab import ranks, stats
from ringtrain.lab.prove_checks import Check, Outcome
from ringtrain.lab.script import Script, reason_of, runs_in, start_launch, variables
from ringtrain.lab.tables import Table, counted
from ringtrain.options import FILE, N, at_least
from ringtrain.protocol import as_main
from ringtrain.protocol.env import PROVE
from ringtrain.protocol.for_script import ForScript
from ringtrain.run import setup

MAX_STARTS = 20
SIGNALED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
EXACT = {"hvd.deterministic": True}
"""options of all runs on several ranks"""
MARK = ".prove"
"""file in a folder that the next proof may delete"""
WORDS = {True: "holds", False: "DOES NOT HOLD", None: "not shown"}


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    steps: Annotated[int, N, at_least(4)] = 6
    """steps of an epoch, 4 or more; each run has two epochs, or one if a script has no more"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


def main(options: Options, start: ranks.Start, _: ranks.Call) -> int:
    """Trains, prints and writes the certificate. Returns 0, or 1 if something does not hold."""
    num_ranks = start.launch.np or sum(host.slots for host in start.hosts)
    if num_ranks < 2:
        raise LaunchError(f"got {num_ranks} rank, expected 2 or more, whose result is compared with one process: -np 2")
    job = Job(Script.of(start.train_args), options.steps, num_ranks)
    job.check()
    folder = Path("runs", "prove")
    if folder.exists() and not (folder / MARK).exists():
        raise LaunchError(f"{folder}: exists already and is no proof: delete it")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "starts").mkdir(parents=True)
    (folder / MARK).touch()
    found = Proof(start, job, num_ranks, folder).checks()
    show(found, options, start.train_args, num_ranks)
    return 0 if checks.verdict(found) else 1


@dataclass
class Proof:
    """Starts of a job in a folder."""

    start: ranks.Start
    job: Job
    num_ranks: int
    folder: Path

    def checks(self) -> list[Check]:
        """Starts the job several times, one after the other, and compares the first run of each."""
        num = self.num_ranks

        # One process is what ranks are compared with; a part of its batches, what it must not be equal to.
        precision = "float64"
        one = self.run("one", 1, PLAIN, precision=precision)
        if one.error or one.first("narrow"):
            precision = "float32"  # the job has types of its own
            one = self.run("one-float32", 1, PLAIN, precision=precision)
        if one.error:
            raise LaunchError(f"the job fails on one process: {one.error}")
        plain = self.run("ranks", num, PLAIN | EXACT, precision=precision)
        if plain.error:
            return [checks.fails_on_ranks(num, plain.error)]
        part = self.run("part", 1, PLAIN, precision=precision, is_part=True)
        like_one = checks.like_one_process(precision, one, plain, part)
        off = self.job.changed(one)
        if off:
            like_one = [replace(check, evidence=f"{check.evidence}; without {', '.join(off)}") for check in like_one]

        # The other comparisons are between runs with the job's own options.
        several = self.run("ranks-as-configured", num, EXACT)
        if several.error:
            return [*like_one, checks.fails_on_ranks(num, several.error)]
        again = self.run("again", num, EXACT)
        return [
            checks.in_sync(several),
            checks.every_sample_once(one, plain),
            *like_one,
            checks.same_bits(checks.NOT_SEEDED, "two equal runs", several, again),
            self.killed(several),
            self.virtual_ranks(),
        ]

    def killed(self, several: Outcome) -> Check:
        """Stops and kills the job, and resumes it, until it has ended."""
        claim = "stopped, resumed, killed and resumed, within an epoch: as without"
        steps = several.num_steps
        if steps < 6:
            return Check(claim, None, f"the job has {steps} steps here: too few samples")
        kill_at = steps // 2 + steps // 4 + 1
        faults = f"rank=0 step={steps // 4} mode=sigterm, rank={self.num_ranks - 1} step={kill_at} mode=sigkill"
        often = {"checkpoint.every_steps": 1, "health.agree_every_steps": 1, "chaos": faults}
        codes: list[int] = []
        for _ in range(MAX_STARTS):  # each run of a script is stopped and killed once
            attempt = self.run("killed", self.num_ranks, EXACT | often)
            codes.append(attempt.code)
            if attempt.code not in SIGNALED:
                break
        return checks.killed(claim, codes, several, attempt)

    def virtual_ranks(self) -> Check:
        """Compares runs with virtual ranks on one process and on several."""
        virtual = least_virtual(self.num_ranks)
        claim = f"{virtual} virtual ranks: the same bits on 1 and on {self.num_ranks}"
        options = {"train.virtual_ranks": virtual}
        alone = self.run("virtual-1", 1, options)
        if "virtual_ranks" in alone.error or "virtual ranks" in alone.error:
            return Check(claim, None, alone.error)
        return checks.same_bits(checks.NOT_SEEDED, claim, alone, self.run("virtual", self.num_ranks, options))

    def run(self, name: str, num_ranks: int, options: Mapping[str, Any], **how: Any) -> Outcome:
        """Starts the job once, or resumes it, and waits for its end."""
        variant = Variant(name=name, num_ranks=num_ranks, options=options, **how)
        folder, recordings = self.folder / name, (self.folder / "recorded" / name).absolute()
        recordings.mkdir(parents=True, exist_ok=True)
        command, environ = self.job.command(variant, folder)
        launch = [*self.start.launch_words, "-np", str(num_ranks)]
        environ |= {PROVE: str(recordings)}
        for variable in environ:
            launch += ["--forward", variable]
        log = self.folder / "starts" / f"{name}.log"
        processes.say(f"prove: {name}, {counted(num_ranks, 'rank')}")
        code = start_launch(launch, command, {**os.environ, **environ}, log).wait()
        error = reason_of(log, code) if code else ""
        runs = runs_in(folder)
        if not runs and not error:
            error = "the script has not called ringtrain.fit: write ringtrain.fit(model, ...) for model.fit(...)"
        return Outcome(runs[0] if runs else folder, error, code, recordings)


def show(found: Sequence[Check], options: Options, command: Sequence[str], num_ranks: int) -> None:
    """Prints the certificate, and writes it as page and JSON."""
    table = Table(("claim", "", "evidence"), [(one.claim, WORDS[one.holds], one.evidence) for one in found])
    title = f"{num_ranks} ranks: {shlex.join(command)}"
    print(title)
    table.show()
    num_held = sum(check.holds is True for check in found)
    result = "something does not hold"
    if checks.verdict(found):
        result = f"{num_held} of {len(found)} hold"
    print(result)
    if options.out:
        stats.write(
            Path(options.out),
            "prove",
            {"steps": options.steps, "command": list(command)},
            [asdict(one) for one in found],
        )


EPOCHS = 2
RECORDER = "ringtrain.lab.prove_rows:of_trainer"
OBSERVER = "ringtrain.lab.prove_rows:observe"
SEED = 1
"""set before a script, which may set another one"""
STRATEGIES = ("ring", "mpi-ring")
NOT_TOLD = {
    "train.patience": 0,
    "train.target_accuracy": 0,
    "train.max_time_s": 0,
    "tracking.timeline_steps": 0,
    "hvd.groups": 0,
    "hvd.fusion_mb": -1,
    "chaos": "",
}
"""options of all runs: none ends early, and the order of additions is fixed"""
PLAIN = {
    "train.precision": "float32",
    "train.virtual_ranks": 0,
    "hvd.compression": "none",
    "hvd.op": "average",
}
"""options of runs that are compared with one process, which does not round, leave out or add up as these do"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a start of a job differs from the job itself."""

    name: str
    num_ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    is_part: bool = False
    """whether a part of each batch is trained alone"""
    precision: str = ""


@dataclass(frozen=True)
class Job:
    """The command of a script that calls `ringtrain.fit`, or of the trainer."""

    script: Script
    steps: int
    num_ranks: int

    def check(self) -> None:
        """Raises LaunchError for a command that cannot be proved."""
        try:
            as_main.place_of_script(self.script.command)
        except ValueError as error:
            raise LaunchError(f"{error} after --: -- python own.py") from None
        if self.script.is_trainer:
            setup.find(self._base)
            if self._base.strategy.name not in STRATEGIES:
                raise LaunchError(f"strategy.name: got {self._base.strategy.name}, expected {' or '.join(STRATEGIES)}")

    @property
    def _base(self) -> Config:
        """Configuration of the trainer."""
        return config_io.read(self.script.train_args)

    def command(self, variant: Variant, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Command of the ranks of a start whose runs are in `folder`, and variables for them."""
        given: dict[str, Any] = {"by": "ringtrain prove", "folder": str(folder.absolute())}
        options = {**NOT_TOLD, **variant.options}
        words = list(self.script.command)
        if self.script.is_trainer:
            of_trainer = {**options, **self._of_trainer(variant)}
            return words, variables(ForScript(**given, options=of_trainer))
        place = as_main.place_of_script(words)
        words[place:place] = ["-m", "ringtrain.lab.prove_seeded", str(SEED), variant.precision or "float32"]
        of_fit = {name: value for name, value in options.items() if name.startswith(sources.OPTIONS)}
        parts = self.num_ranks if variant.is_part else 1
        given |= {"epochs": EPOCHS, "steps": self.steps, "ranks": self.num_ranks, "parts": parts, "observer": OBSERVER}
        return words, variables(ForScript(**given, options=of_fit))

    def _of_trainer(self, variant: Variant) -> dict[str, Any]:
        """Options of a start of the trainer, whose batch is that of one rank."""
        base = self._base
        is_virtual = bool(variant.options.get("train.virtual_ranks"))
        batch_size = base.train.batch_size
        if variant.num_ranks == 1 and not variant.is_part and not is_virtual:
            batch_size *= self.num_ranks
        num_parts = max(least_virtual(self.num_ranks), base.train.virtual_ranks)
        return {
            "train.epochs": EPOCHS,
            "train.batch_size": batch_size,
            "train.callbacks": (*base.train.callbacks, RECORDER),
            "data.max_samples": self.steps * num_parts * base.train.batch_size * base.optimizer.accumulation_steps,
            "schedule.warmup_epochs": min(base.schedule.warmup_epochs, 1),
            **({"train.precision": variant.precision} if variant.precision else {}),
        }

    def changed(self, one: Outcome) -> list[str]:
        """Options of `PLAIN` that the job sets otherwise."""
        if self.script.is_trainer:
            own = {name: value_of(self._base, name) for name in PLAIN}
        else:
            own = one.first("options") or {}
        return [name for name, value in own.items() if name in PLAIN and value != PLAIN[name]]


def least_virtual(num_ranks: int) -> int:
    """Least number of virtual ranks for a number of ranks."""
    return 1 << (num_ranks - 1).bit_length()
