"""ringtrain prove: puts a job to the test in short runs, and writes down what holds.

ringtrain prove -np 2 -- python -m ringtrain.train --config config.toml
ringtrain prove -np 2 -- python own.py
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ringtrain.cluster import processes
from ringtrain.cluster.launch import find_hosts
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.config import files
from ringtrain.config.options import FILE, N, at_least
from ringtrain.config.sections import OF_SCRIPT, Config
from ringtrain.errors import LaunchError
from ringtrain.lab import prove_checks as checks
from ringtrain.lab import ranks, runs, stats
from ringtrain.lab.prove_checks import Check, Outcome
from ringtrain.lab.script import Script, reason_of, runs_in, start_launch
from ringtrain.lab.tables import Table
from ringtrain.protocol import as_main
from ringtrain.protocol.env import PROVE
from ringtrain.protocol.for_script import ForScript

MAX_STARTS = 20
MARK = ".prove"
"""file in a folder that the next proof may delete"""
WORDS = {True: "holds", False: "DOES NOT HOLD", None: "not shown"}
EPOCHS = 2
RECORDER = "ringtrain.lab.prove_rows"
SEED = 1
"""set before a script, which may set another one"""
STRATEGIES = ("ring", "mpi-ring")
OF_ALL = {
    "train.patience": 0,
    "train.max_time_s": 0,
    "hvd.groups": 0,
    "chaos": "",
}
"""options of all runs: none ends early, and the order of additions is fixed"""
EXACT = {"hvd.deterministic": True}
"""options of all runs on several ranks"""
PLAIN = {
    "train.precision": "float32",
    "train.virtual_ranks": 0,
    "hvd.compression": "none",
    "hvd.op": "average",
}
"""options of runs that are compared with one process, which does not round, leave out or add up as these do"""


@dataclass(frozen=True)
class ProveOptions:
    """ProveOptions of the command."""

    steps: Annotated[int, N, at_least(4)] = 6
    """steps of an epoch, 4 or more; each run has two epochs, or one if a script has no more"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


def main(options: ProveOptions, launch: LaunchOptions) -> int:
    """Trains, prints and writes the certificate. Returns 0, or 1 if something does not hold."""
    num_ranks = launch.np or sum(host.slots for host in find_hosts(launch)[0])
    if num_ranks < 2:
        raise LaunchError(f"got {num_ranks} rank, expected 2 or more, whose result is compared with one process: -np 2")
    folder = Path("runs", "prove")
    proof = Proof(launch, Script.of(launch.command), options.steps, num_ranks, folder)
    proof.check()
    if folder.exists() and not (folder / MARK).exists():
        raise LaunchError(f"{folder}: exists already and is no proof: delete it")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "starts").mkdir(parents=True)
    (folder / MARK).touch()
    found = proof.checks()
    print(f"{num_ranks} ranks: {shlex.join(launch.command)}")
    Table(("claim", "", "evidence"), [(one.claim, WORDS[one.holds], one.evidence) for one in found]).show()
    holds = all(check.holds is not False for check in found)
    num_held = sum(check.holds is True for check in found)
    print(f"{num_held} of {len(found)} hold" if holds else "something does not hold")
    if options.out:
        stats.write(Path(options.out), vars(options), [asdict(one) for one in found])
    return 0 if holds else 1


@dataclass(frozen=True)
class Proof:
    """Starts of a job in a folder."""

    launch: LaunchOptions
    script: Script
    steps: int
    num_ranks: int
    folder: Path

    @property
    def _base(self) -> Config:
        """Configuration of the trainer."""
        return files.read(self.script.train_args)

    def check(self) -> None:
        """Raises LaunchError for a command that cannot be proved."""
        try:
            as_main.place_of_script(self.script.command)
        except ValueError as error:
            raise LaunchError(f"{error} after --: -- python own.py") from None
        if self.script.is_trainer and self._base.strategy.name not in STRATEGIES:
            raise LaunchError(f"strategy.name: got {self._base.strategy.name}, expected {' or '.join(STRATEGIES)}")

    def checks(self) -> list[Check]:
        """Starts the job several times, one after the other, and compares the first run of each."""
        num_ranks = self.num_ranks

        # One process is what ranks are compared with.
        precision = "float64"
        one = self.run("one", 1, PLAIN, precision)
        if one.error or one.is_narrow():
            precision = "float32"  # the job has types of its own
            one = self.run("one-float32", 1, PLAIN, precision)
        if one.error:
            raise LaunchError(f"the job fails on one process: {one.error}")
        plain = self.run("ranks", num_ranks, PLAIN | EXACT, precision)
        if plain.error:
            return [checks.fails_on_ranks(num_ranks, plain.error)]
        like_one = checks.like_one_process(precision, one, plain)

        # The other comparisons are between runs with the job's own options.
        several = self.run("ranks-as-configured", num_ranks, EXACT)
        if several.error:
            return [*like_one, checks.fails_on_ranks(num_ranks, several.error)]
        own_options = runs.read(several.folder).options
        off = [name for name, value in PLAIN.items() if own_options.get(name, value) != value]
        if off:
            like_one = [replace(check, evidence=f"{check.evidence}; without {', '.join(off)}") for check in like_one]
        again = self.run("again", num_ranks, EXACT)
        return [
            checks.in_sync(several),
            checks.every_sample_once(one, plain),
            *like_one,
            checks.same_bits(checks.NOT_SEEDED, "two equal runs", several, again),
            self.killed(several),
        ]

    def killed(self, several: Outcome) -> Check:
        """Stops and kills the job, and resumes it, until it has ended."""
        claim = "stopped, resumed, killed and resumed, within an epoch: as without"
        steps = several.record.summary["global_step"]
        if steps < 6:
            return Check(claim, None, f"the job has {steps} steps here: too few samples")
        kill_at = steps // 2 + steps // 4 + 1
        faults = f"rank=0 step={steps // 4} mode=sigterm, rank={self.num_ranks - 1} step={kill_at} mode=sigkill"
        often = {"checkpoint.every_steps": 1, "health.agree_every_steps": 1, "chaos": faults}
        codes: list[int] = []
        for _ in range(MAX_STARTS):  # each run of a script is stopped and killed once
            attempt = self.run("killed", self.num_ranks, EXACT | often)
            codes.append(attempt.code)
            if attempt.code not in checks.SIGNALED:
                break
        return checks.killed(claim, codes, several, attempt)

    def run(self, name: str, num_ranks: int, options: Mapping[str, Any], precision: str = "") -> Outcome:
        """Starts the job once, or resumes it, and waits for its end."""
        folder, recordings = self.folder / name, (self.folder / "recorded" / name).absolute()
        recordings.mkdir(parents=True, exist_ok=True)
        command, for_script = self._job(num_ranks, {**OF_ALL, **options}, precision, str(folder.absolute()))
        environ = {PROVE: str(recordings), **for_script.variables()}
        words = [*ranks.launch_words(self.launch, ("np",)), "-np", str(num_ranks)]
        for variable in environ:
            words += ["--forward", variable]
        log = self.folder / "starts" / f"{name}.log"
        processes.say(f"prove: {name}, ranks: {num_ranks}")
        code = start_launch(words, command, {**os.environ, **environ}, log).wait()
        error = reason_of(log, code) if code else ""
        found = runs_in(folder)
        if not found and not error:
            error = "the script has not called ringtrain.fit: write ringtrain.fit(model, ...) for model.fit(...)"
        return Outcome(found[0].folder if found else folder, error, code, recordings)

    def _job(
        self, num_ranks: int, options: Mapping[str, Any], precision: str, folder: str
    ) -> tuple[list[str], ForScript]:
        """Command of the ranks of a start, and what it is told."""
        words, by = list(self.script.command), "ringtrain prove"
        if self.script.is_trainer:
            return words, ForScript(by=by, folder=folder, options={**options, **self._of_trainer(num_ranks, precision)})
        place = as_main.place_of_script(words)
        words[place:place] = ["-m", "ringtrain.lab.prove_seeded", str(SEED), precision or "float32"]
        of_fit = {name: value for name, value in options.items() if name.startswith(OF_SCRIPT)}
        observer = f"{RECORDER}:Rows"
        limits: dict[str, Any] = {"epochs": EPOCHS, "steps": self.steps, "ranks": self.num_ranks}
        return words, ForScript(by=by, folder=folder, options=of_fit, observer=observer, **limits)

    def _of_trainer(self, num_ranks: int, precision: str) -> dict[str, Any]:
        """ProveOptions of a start of the trainer, whose batch is that of one rank."""
        base = self._base
        rows_of_step = max(self.num_ranks, base.train.virtual_ranks) * base.train.batch_size
        options: dict[str, Any] = {
            "train.epochs": EPOCHS,
            "train.batch_size": base.train.batch_size,
            "train.callbacks": (*base.train.callbacks, f"{RECORDER}:of_trainer"),
            "data.max_samples": self.steps * rows_of_step * base.optimizer.accumulation_steps,
            "schedule.warmup_epochs": min(base.schedule.warmup_epochs, 1),
        }
        if num_ranks == 1:
            options["train.batch_size"] *= self.num_ranks
        if precision:
            options["train.precision"] = precision
        return options
