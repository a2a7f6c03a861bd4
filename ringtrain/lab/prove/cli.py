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
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ringtrain import config_io, sources
from ringtrain.cluster import processes
from ringtrain.config import Config, value_of
from ringtrain.errors import LaunchError
from ringtrain.lab import ranks, stats
from ringtrain.lab.prove import checks
from ringtrain.lab.prove.checks import Check, Outcome, Start
from ringtrain.lab.report import html
from ringtrain.lab.script import Script, reason_of, start_launch, variables
from ringtrain.lab.tables import Table, counted
from ringtrain.options import FILE, N, at_least
from ringtrain.protocol import as_main
from ringtrain.protocol.env import PROVE
from ringtrain.protocol.for_script import ForScript
from ringtrain.run import setup

EXACT = {"hvd.deterministic": True}
"""options of all runs on several ranks"""
SIGNALED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
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
    html: Annotated[str, FILE] = ""
    """write a page about them"""


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
    expected: list[str] = field(default_factory=list)
    """runs after which a script may fail, as it does with one process: e.g. it reads a file that is elsewhere now"""

    def checks(self) -> list[Check]:
        """Starts the job several times, one after the other, and compares the runs."""
        num = self.num_ranks

        # One process is what all others are compared with; a part of its batches, what they must not be equal to.
        one = self.run("one", 1, PLAIN)
        told: list[Check] = []
        if one.error and one.fits:
            text = f"after {', '.join(one.fits)}, which are compared: {one.error}"
            told, self.expected = [Check("the script ends without an error", None, text)], one.fits
            one = replace(one, error="")
        if one.error:
            raise LaunchError(f"the job fails on one process: {one.error}")
        if not one.fits:
            raise LaunchError(
                "the script has not called ringtrain.fit: write ringtrain.fit(model, ...) for model.fit(...)"
            )
        several = self.run("ranks", num, PLAIN | EXACT)
        if several.error:
            return [*told, checks.fails_on_ranks(num, several.error)]
        part = self.run("part", 1, PLAIN, is_part=True)
        found = self.like_one_process(one, several, part)
        if not self.job.script.is_trainer:  # whose batch is that of one rank
            found += self.other_number(num + 1, one, part)

        # The other comparisons are between runs with the job's own options.
        off = self.job.changed(one)
        if off:
            several = self.run("ranks-as-configured", num, EXACT)
            found = [replace(check, evidence=f"{check.evidence}; without {', '.join(off)}") for check in found]
        rows = checks.of_fits(checks.every_sample_once, one, several)
        found = [*checks.of_fits(checks.in_sync, several), *rows, *found]
        twice, again = self.twice(several)
        claim = "negative control: a process with a part of each batch is another"
        found += [*twice, *checks.of_fits(partial(checks.control, claim), one, part)]
        return [*told, *found, *self.killed(several, again), *self.virtual_ranks()]

    def like_one_process(self, one: Start, several: Start, part: Start) -> list[Check]:
        """Compares several ranks with one process, in float32 and, where that tells something, in float64."""
        in_float32 = partial(checks.like_one_process, "float32")
        found = checks.of_fits(in_float32, one, several, part)
        if found[-1].holds is None:
            return found
        one_wide = self.run("one-float64", 1, PLAIN, precision="float64")
        several_wide = self.run("ranks-float64", self.num_ranks, PLAIN | EXACT, precision="float64")

        def in_both(one: Outcome, several: Outcome, part: Outcome, wide: Outcome, wide_ranks: Outcome) -> list[Check]:
            narrow = in_float32(one, several, part)
            if narrow[-1].holds is None:
                return narrow
            return checks.as_rounded(narrow, checks.like_one_process("float64", wide, wide_ranks, part))

        return checks.of_fits(in_both, one, several, part, one_wide, several_wide)

    def other_number(self, num_ranks: int, one: Start, part: Start) -> list[Check]:
        """Compares another number of ranks with one process."""
        others = self.run(f"ranks-{num_ranks}", num_ranks, PLAIN | EXACT)
        where = f", on {num_ranks} ranks"
        weights = checks.of_fits(partial(checks.like_one_process, "float32", where=where), one, others, part)
        rows = checks.of_fits(partial(checks.every_sample_once, where=where), one, others)
        return [*rows, *weights]

    def twice(self, several: Start) -> tuple[list[Check], Start]:
        """Compares two equal starts, the second one without our seed; returns it, or one with it if they differ."""
        claim, num = "two equal runs", self.num_ranks
        as_it_is = self.run("as-it-is", num, EXACT, is_seeded=False)
        found = checks.of_fits(partial(checks.same_bits, claim), several, as_it_is)
        if checks.verdict(found):
            return found, as_it_is
        again = self.run("again", num, EXACT)
        return checks.of_fits(partial(checks.same_bits_as_it_is, claim), several, as_it_is, again), again

    def killed(self, several: Start, again: Start) -> list[Check]:
        """Stops and kills the job, and resumes it, until it has ended."""
        claim = "stopped, resumed, killed and resumed, within an epoch: as without"
        steps = max(several.outcome(fit).num_steps for fit in several.fits)
        if steps < 6:
            return [Check(claim, None, f"the job has {steps} steps here: too few samples")]
        kill_at = steps // 2 + steps // 4 + 1
        faults = f"rank=0 step={steps // 4} mode=sigterm, rank={self.num_ranks - 1} step={kill_at} mode=sigkill"
        often = {"checkpoint.every_steps": 1, "health.agree_every_steps": 1, "chaos": faults}
        codes: list[int] = []
        # Each run is stopped and killed once.
        while len(codes) < 2 * len(several.fits) + 1 and 0 not in codes:
            attempt = self.run("killed", self.num_ranks, EXACT | often)
            codes.append(attempt.code)
        return checks.of_fits(partial(checks.killed, claim, codes), several, attempt, again)

    def virtual_ranks(self) -> list[Check]:
        """Compares runs with virtual ranks on one process and on several."""
        numbers = sorted({2, self.num_ranks, self.num_ranks + 1})
        virtual = least_virtual(numbers[-1])
        options = {"train.virtual_ranks": virtual}
        claim = "the same bits on any number of ranks"
        alone = self.run("virtual-1", 1, options)
        if "virtual_ranks" in alone.error or "virtual ranks" in alone.error:
            return [Check(claim, None, alone.error)]
        found = []
        for num in numbers:
            equal = partial(checks.same_bits, f"{virtual} virtual ranks: the same bits on 1 and on {num}")
            found += checks.of_fits(equal, alone, self.run(f"virtual-{num}", num, options))
        return found

    def run(self, name: str, num_ranks: int, options: Mapping[str, Any], **how: Any) -> Start:
        """Starts the job once, or resumes it, and waits for its end."""
        variant = Variant(name=name, num_ranks=num_ranks, options=options, **how)
        folder, recordings = self.folder / name, (self.folder / "recorded" / name).absolute()
        recordings.mkdir(parents=True, exist_ok=True)
        command, environ = self.job.command(variant, folder)
        launch = [*self.start.launch_words, "-np", str(num_ranks)]
        if num_ranks > self.num_ranks:
            launch.append("--oversubscribe")
        environ |= {PROVE: str(recordings)}
        for variable in environ:
            launch += ["--forward", variable]
        log = self.folder / "starts" / f"{name}.log"
        processes.say(f"prove: {name}, {counted(num_ranks, 'rank')}")
        code = start_launch(launch, command, {**os.environ, **environ}, log).wait()
        error = reason_of(log, code) if code else ""
        start = Start(folder, recordings, error, code)
        if code not in SIGNALED and self.expected and set(self.expected) <= set(start.fits):
            return replace(start, error="", code=0)
        return start


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


EPOCHS = 2
RECORDER = "ringtrain.lab.prove.rows:of_trainer"
OBSERVER = "ringtrain.lab.prove.rows:observe"
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
    "hvd.local_steps": 1,
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
    is_seeded: bool = True
    """whether a script is started with a seed"""


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
        if variant.is_seeded:
            place = as_main.place_of_script(words)
            words[place:place] = ["-m", "ringtrain.lab.prove.seeded", str(SEED), variant.precision or "float32"]
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
        num_parts = max(least_virtual(self.num_ranks + 1), base.train.virtual_ranks)
        return {
            "train.epochs": EPOCHS,
            "train.batch_size": batch_size,
            "train.callbacks": (*base.train.callbacks, RECORDER),
            "data.max_samples": self.steps * num_parts * base.train.batch_size * base.optimizer.accumulation_steps,
            "schedule.warmup_epochs": min(base.schedule.warmup_epochs, 1),
            **({"train.precision": variant.precision} if variant.precision else {}),
        }

    def changed(self, start: Start) -> list[str]:
        """Options of `PLAIN` that the job sets otherwise."""
        if self.script.is_trainer:
            return [name for name, value in PLAIN.items() if value_of(self._base, name) != value]
        found: dict[str, None] = {}
        for fit in start.fits:
            options = start.outcome(fit).first("options") or {}
            for name, value in options.items():
                if name in PLAIN and value != PLAIN[name]:
                    found[name] = None
        return list(found)


def least_virtual(num_ranks: int) -> int:
    """Least number of virtual ranks for a number of ranks."""
    return 1 << (num_ranks - 1).bit_length()
